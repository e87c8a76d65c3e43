"""What a definition says holds when its knowledge base is asked, also after a restart; the configuration file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.server.app import Configuration, announce_first_key, create_app
from llama_index_agentic_kb.server.catalog import SourceDefinition, manage_keys
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.testing import LoopbackOpenAI
from tests.aio.conftest import until
from tests.server.serving import ADMIN, KEYS, Served, client_of, indexes, served_client, space_service
from tests.server.test_retrieve_route import ASK

SEARCH = {"intents": [{"search": "rocket"}], "outputMode": "extractiveData"}


def define(client: httpx.Client, kind: str, name: str, **fields: Any) -> httpx.Response:
    """Store a definition of a source over the rockets, or of a knowledge base over that source."""
    parameters = {"searchIndexName": "rockets", **fields.pop("parameters", {})}
    source = {"kind": "searchIndex", "searchIndexParameters": parameters}
    own: dict[str, Any] = source if kind == "knowledgesources" else {"knowledgeSources": [{"name": "s"}]}
    response = client.put(f"/{kind}/{name}", json={"name": name, **own, **fields})
    response.raise_for_status()
    return response


def titles(client: httpx.Client, name: str, body: dict[str, Any] = SEARCH) -> set[str]:
    response = client.post(f"/knowledgebases/{name}/retrieve", json=body).raise_for_status()
    return {one["sourceData"]["title"] for one in response.json()["references"]}


def test_what_is_defined_holds(admin: httpx.Client) -> None:
    """Base filter, number of documents and processing apply where a request says nothing; changes hold at once."""
    define(admin, "knowledgesources", "s", parameters={"baseFilter": "title ne 'Soyuz'"}, resultsProcessing="none")
    define(admin, "knowledgebases", "b")
    assert titles(admin, "b") == {"Saturn", "Titan"}
    define(admin, "knowledgebases", "b", retrieveDefaults={"maxOutputDocuments": 1})
    assert len(titles(admin, "b")) == 1
    assert len(titles(admin, "b", {**SEARCH, "maxOutputDocuments": 2})) == 2
    define(admin, "knowledgesources", "s")
    assert titles(admin, "b", {**SEARCH, "maxOutputDocuments": 5}) == {"Saturn", "Titan", "Soyuz"}
    admin.delete("/knowledgebases/b").raise_for_status()
    admin.delete("/knowledgesources/s").raise_for_status()
    assert admin.post("/knowledgebases/b/retrieve", json=SEARCH).status_code == 404


def test_instructions_reach_the_model(admin: httpx.Client, model: LoopbackOpenAI) -> None:
    """The definition's instructions and a request's system message stand in the prompts."""
    define(admin, "knowledgesources", "s")
    define(admin, "knowledgebases", "i", models=["gpt-4o-mini"], answerInstructions="Speak like a pirate.")
    system = {"role": "system", "content": "Be brief, always."}
    body = {"messages": [system, *ASK["messages"]]}
    admin.post("/knowledgebases/i/retrieve", json=body).raise_for_status()
    admin.delete("/knowledgebases/i").raise_for_status()  # else no test could delete its source
    prompts = [str(one.body) for one in model.requests[-2:]]
    assert "Speak like a pirate." in prompts[-1]
    assert "Be brief, always." in prompts[-1]


def test_parts_without_effect_are_named(admin: httpx.Client) -> None:
    """What is stored without effect is named in the response, with an ETag of the whole."""
    shown = define(admin, "knowledgesources", "w", parameters={"searchFields": [{"name": "title"}]})
    assert shown.json()["warnings"] == ["searchIndexParameters.searchFields: it has no effect on this server"]
    assert shown.headers["etag"] == shown.json()["@odata.etag"]
    assert define(admin, "knowledgesources", "w", parameters={"searchFields": [{"name": "title"}]}).status_code == 200


INGESTED = {
    "embeddingModel": {"azureOpenAIParameters": {"apiKey": "S"}},
    "aiServices": {"apiKey": "S"},
    "assetStore": {"connectionString": "AccountKey=S"},
    "rerankers": [{"api_key": "S"}],
    "ingestionPermissionOptions": ["userIds"],
}


@pytest.mark.parametrize(
    "parameters",
    [
        *({"ingestionParameters": {name: value}} for name, value in INGESTED.items()),
        {"ingestion_parameters": {"ingestion_permission_options": ["userIds"]}},
        {"connectionString": "ResourceId=/x;AccountKey=S"},
        {"connection_string": "AccountKey=S"},
        {"ingestionParameters": {"identity": {"applicationSecret": "S"}}},
        {"folder_path": "a"},
    ],
)
def test_secrets_and_parts_of_storage_are_refused(parameters: dict[str, Any]) -> None:
    """A secret at any depth and in either spelling is refused, and so is what would be ignored."""
    sent = {"name": "s", "kind": "azureBlob", "azureBlobParameters": {"containerName": "c", **parameters}}
    with pytest.raises(InvalidRequestError, match=r"leave it out|ingest that part"):
        SourceDefinition.parse(sent)


@pytest.mark.parametrize(
    ("kind", "index"),
    [("azureBlob", "c"), ("indexedOneLake", "l"), ("indexedSql", "t"), ("indexedSharePoint", "s"), ("file", "s")],
)
def test_the_index_is_named_by_the_kinds_own_parameter(kind: str, index: str) -> None:
    """Each kind has one parameter that names its index; the others are named as without effect."""
    fields = {"containerName": "c", "lakehouseId": "l", "tableOrView": "t", "connectionString": None}
    parameters = {**fields, "ingestionParameters": {"assetStore": {"connectionString": "ResourceId=/x;"}}}
    source = SourceDefinition.parse({"name": "s", "kind": kind, f"{kind}Parameters": parameters})
    assert source.index_name == index
    used = {"c": "containerName", "l": "lakehouseId", "t": "tableOrView"}.get(index)
    unused = [name for name in ("containerName", "lakehouseId", "tableOrView", "ingestionParameters") if name != used]
    assert sorted(text.partition(":")[0].partition(".")[2] for text in source.warnings()) == sorted(unused)


@pytest.mark.parametrize(
    "size", ["0", "1001", "00001" + "9" * 5_000, "-1", "x"], ids=["zero", "many", "digits", "negative", "letter"]
)
def test_a_page_has_up_to_a_thousand_definitions(admin: httpx.Client, size: str) -> None:
    """Other sizes are refused."""
    refused = admin.get("/knowledgesources", params={"pageSize": size})
    assert refused.status_code == 400
    assert "pageSize: Input should be " in refused.json()["error"]["message"]
    assert len(admin.get("/knowledgesources", params={"pageSize": "1"}).json()["value"]) == 1


def test_an_application_can_be_started_again(tmp_path: Path) -> None:
    """All of its routes are served again after a stop."""
    app = create_app(space_service(tmp_path / "d.db", None), keys=KEYS)
    for _ in range(2):
        with Served(app) as url, client_of(url, ADMIN) as client:
            define(client, "knowledgesources", "s")
            define(client, "knowledgebases", "b")
            sent = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            headers = {"accept": "application/json, text/event-stream"}
            assert client.post("/knowledgebases/b/mcp", json=sent, headers=headers).status_code == 200


def test_definitions_survive_a_restart(tmp_path: Path) -> None:
    """Another server on the same database answers; one without the index says that it can't."""
    database = tmp_path / "d.db"
    with served_client(space_service(database, None), key=ADMIN) as client:
        define(client, "knowledgesources", "s")
        define(client, "knowledgebases", "b", corsOptions={"allowedOrigins": ["https://b.test"]})
    statuses = []
    for known in (indexes(), {}):
        with served_client(
            KnowledgeService(database, indexes=known), key=ADMIN, headers={"origin": "https://b.test"}
        ) as client:
            response = client.post("/knowledgebases/b/retrieve", json=SEARCH, timeout=60)
            statuses.append(response.status_code)
            assert response.headers["access-control-allow-origin"] == "https://b.test"
            assert "access-control-allow-origin" not in client.get("/knowledgebases/other").headers
    assert statuses == [200, 503]
    assert "rockets" in response.json()["error"]["message"]


def test_what_was_stored_before_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lone surrogate loses nothing; what is refused now is left out and logged, without its text."""
    database = tmp_path / "d.db"
    with served_client(space_service(database, None), key=ADMIN) as client:
        define(client, "knowledgesources", "s")
        define(client, "knowledgesources", "other")
        define(client, "knowledgebases", "b", description="HERE")
    with closing(sqlite3.connect(database)) as connection, connection:
        update = "UPDATE agentic_kb_definitions SET definition = "
        connection.execute(f"{update} replace(definition, 'HERE', ?)", ("\\ud800",))
        connection.execute(f"{update} '{{\"apiKey\": \"S3CRET\"}}' WHERE name = 'other'")
    with served_client(KnowledgeService(database, indexes=indexes()), key=ADMIN) as client:
        assert titles(client, "b") == {"Saturn", "Titan", "Soyuz"}
        assert client.get("/knowledgesources/other").status_code == 404
        define(client, "knowledgesources", "other")
        assert client.get("/knowledgesources/other").status_code == 200
    assert "'other' is left out" in caplog.text
    assert "S3CRET" not in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stores: [", "kb.yaml"),
        ("[]", "kb.yaml"),
        ("{}", "stores"),
        ("{stores: [], surprise: 1}", "surprise"),
        ("{stores: [], keys: {admin: [plain-text-in-the-file]}}", "env:NAME"),
        ("{stores: [], keys: {admin: ['env:NOT_SET_AT_ALL']}}", "NOT_SET_AT_ALL"),
        ("{stores: [], keys: {admin: ['env:SHORT']}}", "16"),
        ("{stores: [], models: {m: {apiKey: sk-in-the-file}}}", "env:NAME"),
        ("{stores: [], knowledgeSources: [{name: web, kind: web}]}", "'web' is not served"),
    ],
)
def test_a_file_that_is_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    """Each mistake in the file is named, and a secret in it is refused."""
    monkeypatch.setenv("SHORT", "tiny")
    (tmp_path / "kb.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=words):
        Configuration.load(tmp_path / "kb.yaml")


def test_the_first_key_is_made_and_keys_are_managed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server without keys makes one and shows it once; keys are listed, made and revoked by the file's name."""
    service = KnowledgeService(tmp_path / "d.db")
    announce_first_key(service)
    key = capsys.readouterr().err.split(": ")[1].strip()
    announce_first_key(service)
    assert (len(key) >= 40, capsys.readouterr().err) == (True, "")
    service.close()
    config = tmp_path / "kb.yaml"
    config.write_text("{stores: [], database: d.db}", encoding="utf-8")
    made = manage_keys(config, new="query", name="reports", revoke=None)
    listed = manage_keys(config, new=None, name="", revoke=made[0].removeprefix("id "))
    assert [line.split()[-1] for line in listed] == ["first"]
    for wrong, error in (({"new": "root", "revoke": None}, "admin or query"), ({"new": None, "revoke": "x"}, "none")):
        with pytest.raises(AgenticKBError, match=error):
            manage_keys(config, name="", **wrong)


def test_readiness_follows_the_database(tmp_path: Path) -> None:
    """A server whose database is gone is alive, and not ready."""
    with served_client(KnowledgeService(tmp_path / "d.db"), key=None) as client:
        assert client.get("/readyz").status_code == 200
        for path in tmp_path.glob("d.db*"):
            path.unlink()
        (tmp_path / "d.db").mkdir()
        assert until(lambda: client.get("/readyz").status_code == 503, 30)
        assert client.get("/healthz").status_code == 200
