"""Keys, tokens, principals, rates and origins."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.server import access
from llama_index_agentic_kb.server.access import JwksVerifier
from llama_index_agentic_kb.server.app import Configuration
from llama_index_agentic_kb.server.catalog import Catalog, SourceDefinition
from llama_index_agentic_kb.server.errors import UnauthorizedError
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.sources import KnowledgeSource
from tests.aio.conftest import until
from tests.server.serving import (
    ADMIN,
    AUDIENCE,
    DEFINITIONS,
    ISSUER,
    MOONS,
    QUERY,
    Issuer,
    chroma_index,
    define,
    served_client,
    space_service,
)

ASK = {"intents": [{"search": "launch of the rocket"}], "outputMode": "extractiveData"}
ALICE = {"tid": "acme", "oid": "alice"}
PRIVATE = "/knowledgebases/private/retrieve"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access") / "server.db"


@pytest.fixture
def catalog(database: Path) -> Iterator[Catalog]:
    """A second program's view of the server's database."""
    made = Catalog(database)
    yield made
    made.close()


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture(scope="module")
def client(database: Path, issuer: Issuer) -> Iterator[httpx.Client]:
    verifier = JwksVerifier(issuer=ISSUER, audience=AUDIENCE, jwks=str(issuer.jwks), query_role="ask")
    origins = ["https://app.test"]
    with served_client(
        space_service(database, None), verifier=verifier, requests_per_minute=60, cors_origins=origins, key=None
    ) as made:
        define(made, {path: body for path, body in DEFINITIONS.items() if "models" not in body})
        yield made


def test_a_users_token_opens_that_users_documents(client: httpx.Client, issuer: Issuer) -> None:
    """The query source token's user finds what is shared with her, also by its id, and nobody else does."""

    def found(**claims: Any) -> tuple[int, int, int]:
        headers = {"api-key": QUERY, "x-ms-query-source-authorization": issuer.token(**claims)}
        response = client.post(PRIVATE, json=ASK, headers=headers)
        params = {"source": "secrets", "id": "plan"}
        passage = client.get("/knowledgebases/private/passage", params=params, headers=headers)
        assert "acl_user_" not in passage.text
        return response.status_code, len(response.json().get("references", [])), passage.status_code

    assert found(**ALICE) == (200, 1, 200)
    assert found(tid="acme", oid="mallory") == (200, 0, 404)
    assert found(tid="other", oid="alice") == (200, 0, 404)


def test_the_holder_of_a_token_is_the_principal(client: httpx.Client, issuer: Issuer) -> None:
    """A bearer token with the role authenticates, and its own user is searched for; without the role it is refused."""

    def status(**claims: Any) -> int:
        headers = {"authorization": f"Bearer {issuer.token(**claims)}"}
        return client.post(PRIVATE, json=ASK, headers=headers).status_code

    assert status(**ALICE, roles=["ask"]) == 200
    assert status(**ALICE) == 403


@pytest.mark.parametrize(
    "claims",
    [{"aud": "other"}, {"iss": "https://evil.test"}, {"exp": 1}, {"exp": None}, {"oid": "a\x00b"}, {"groups": 3}],
)
def test_a_token_that_is_not_valid_is_refused(client: httpx.Client, issuer: Issuer, claims: dict[str, Any]) -> None:
    """A wrong audience, issuer, time or name gets 401, as a credential and as a query source token."""
    check_refused(client, issuer.token(**{"roles": ["ask"], **ALICE, **claims}))


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
def test_forged_signatures_are_refused(client: httpx.Client, issuer: Issuer, algorithm: str) -> None:
    """Neither an unsigned token nor one signed with the public key as a secret passes."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, **ALICE, "roles": ["ask"]}
    key: Any = None if algorithm == "none" else json.loads(issuer.jwks.read_text())["keys"][0]["x"]
    check_refused(client, jwt.encode(claims, key, algorithm=algorithm, headers={"kid": "k1"}))


def check_refused(client: httpx.Client, token: str) -> None:
    for headers in ({"authorization": f"Bearer {token}"}, {"api-key": QUERY, "x-ms-query-source-authorization": token}):
        assert client.post(PRIVATE, json=ASK, headers=headers).status_code == 401


def test_keys_are_rotated_while_the_server_runs(client: httpx.Client, catalog: Catalog) -> None:
    """A new key holds at once, a revoked one is refused within seconds; only hashes are stored."""

    def status(key: str) -> int:
        return client.get("/knowledgebases", headers={"api-key": key}).status_code

    made, secret = asyncio.run(catalog.add_key("admin", "rotated"))
    assert status(secret) == 200
    snapshot = asyncio.run(catalog.snapshot())
    assert secret not in str(snapshot)
    asyncio.run(catalog.remove_key(made.id))
    assert until(lambda: status(secret) == 401, 30)


def test_a_caller_that_asks_too_often_waits(client: httpx.Client, catalog: Catalog) -> None:
    """Past its rate a caller gets 429 with the time to wait; others are not concerned."""
    _, secret = asyncio.run(catalog.add_key("query", "eager"))
    responses = [client.post("/knowledgebases/none/retrieve", json=ASK, headers={"api-key": secret}) for _ in range(70)]
    refused = [response for response in responses if response.status_code == 429]
    assert refused
    assert int(refused[0].headers["retry-after"]) >= 1
    assert client.get("/knowledgebases", headers={"api-key": ADMIN}).status_code == 200


@pytest.mark.parametrize(("origin", "allowed"), [("https://app.test", True), ("https://evil.test", False)])
def test_only_listed_origins_may_call(client: httpx.Client, origin: str, allowed: bool) -> None:
    """A preflight and a request of a listed origin carry its permission, others none."""
    ask = {"origin": origin, "access-control-request-method": "POST"}
    for response in (client.options(PRIVATE, headers=ask), client.get("/healthz", headers={"origin": origin})):
        assert (response.headers.get("access-control-allow-origin") == origin) is allowed


def test_a_method_that_a_path_lacks_is_refused_in_its_form(client: httpx.Client) -> None:
    """Google's clients read an array with one error."""
    for path, form in (("/v1/projects/p/x", list), ("/healthz", dict)):
        response = client.put(path, headers={"api-key": "any"})
        body = response.json()
        assert (response.status_code, type(body)) == (405, form)
        error = (body[0] if form is list else body)["error"]
        assert error["code"] == (405 if form is list else "methodNotAllowed")
        assert [error.get("status"), error.get("details")] == (["UNIMPLEMENTED", []] if form is list else [None] * 2)
        assert error["message"].startswith(f"PUT {path}")


@pytest.mark.parametrize("host", ["issuer.test", "127.0.0.1.evil.test", "localhost@evil.test"])
def test_a_key_set_over_plain_http_is_refused(host: str) -> None:
    """The issuer's keys come over https or from this machine."""
    with pytest.raises(ConfigurationError, match=r"^jwks: keys must come over https"):
        JwksVerifier(issuer=ISSUER, audience=AUDIENCE, jwks=f"http://{host}/keys")


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ("{issuer: i, audience: a}", "tokens.jwks: Field required"),
        ("{issuer: i, audience: a, jwks: 'http://x/k'}", "tokens.jwks: keys must come over https, or from a file"),
        ("{1: 2}", "tokens.issuer: Field required; "),
    ],
)
def test_a_wrong_verifier_in_a_file_names_its_field(tmp_path: Path, tokens: str, problem: str) -> None:
    """By its path in the file, also where a key is no text."""
    (tmp_path / "c.yaml").write_text(f"stores: [s]\ntokens: {tokens}")
    with pytest.raises(ConfigurationError, match=re.escape(f"c.yaml: {problem}")):
        Configuration.load(tmp_path / "c.yaml")


@pytest.mark.parametrize("role", ["AgenticKB.Admin", "NoAgenticKB.AdminAtAll", ["AgenticKB.Admin"], ["Admin"], None])
async def test_a_role_is_a_whole_name(issuer: Issuer, role: Any) -> None:
    """A text in which the role's name stands is not the role; a single text may be one role."""
    verifier = JwksVerifier(issuer=ISSUER, audience=AUDIENCE, jwks=str(issuer.jwks))
    verified = await verifier.verify(issuer.token(tid="acme", roles=role))
    assert verified.is_admin is (role in ("AgenticKB.Admin", ["AgenticKB.Admin"]))


async def test_keys_that_cannot_be_read_are_asked_for_once(issuer: Issuer, tmp_path: Path) -> None:
    """Neither forged tokens nor an issuer that is down make each request read them; no token passes meanwhile."""
    read = []

    class Counting(JwksVerifier):
        async def _read(self) -> Any:
            read.append(1)
            return await super()._read()

    (tmp_path / "keys").write_text("[1]")
    verifier = Counting(issuer=ISSUER, audience=AUDIENCE, jwks=str(tmp_path / "keys"))
    made = await asyncio.gather(*[verifier.verify(issuer.token()) for _ in range(20)], return_exceptions=True)
    assert {type(one) for one in made} == {UnauthorizedError}
    assert len(read) == 1


async def test_a_forged_key_id_makes_nobody_wait(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the keys are read for a key id that nobody knows, a token of a known one is verified."""
    reading, finish = asyncio.Event(), asyncio.Event()

    class Slow(JwksVerifier):
        async def _read(self) -> Any:
            if self._keys:
                reading.set()
                await finish.wait()
            return await super()._read()

    monkeypatch.setattr(access, "_JWKS_PAUSE", 0.0)
    verifier = Slow(issuer=ISSUER, audience=AUDIENCE, jwks=str(issuer.jwks))
    await verifier.verify(issuer.token())
    forged = asyncio.create_task(verifier.verify(jwt.encode({}, "x" * 32, headers={"kid": "forged"})))
    await reading.wait()
    await asyncio.wait_for(verifier.verify(issuer.token()), 10)
    finish.set()
    with pytest.raises(UnauthorizedError):
        await forged


def test_an_index_keeps_its_own_filter(tmp_path: Path) -> None:
    """A definition's filter narrows the filter of the program's index, and does not replace it."""
    made = partial(KnowledgeSource, index=chroma_index(MOONS), filters="kind eq 'text'")
    service = KnowledgeService(tmp_path / "server.db", indexes={"moons": made})
    for own in (None, "title eq 'Moon'"):
        parameters = {"searchIndexName": "moons", "baseFilter": own}
        definition = {"name": "moons", "kind": "searchIndex", "searchIndexParameters": parameters}
        source = service._source(SourceDefinition.model_validate(definition))
        assert "kind" in str(source.mandatory)
        assert ("title" in str(source.mandatory)) is (own is not None)
    service.close()
