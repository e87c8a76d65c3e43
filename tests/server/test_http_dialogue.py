"""Conversations over HTTP whose state a session keeps: questions, confirmations and scope, each user's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llama_index_agentic_kb import KnowledgeBase
from llama_index_agentic_kb.schema import RetrievalResponse
from llama_index_agentic_kb.server.access import JwksVerifier
from llama_index_agentic_kb.server.azure import KeptState
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.store.sessions import SessionStore
from llama_index_agentic_kb.testing import ScriptedLLM
from tests.server.serving import AUDIENCE, ISSUER, Issuer, served_client
from tests.server.test_retrieve_route import STREAM, events
from tests.shop import Shop, open_shop
from tests.test_tool_dialogue import read

SESSION = "x-agentic-kb-session"
ENGINE = "projects/p/locations/global/collections/c/engines/shop"
SAID = ["Where is my order?", "It is A-4711.", "I want to return it, it is damaged.", "yes"]
STAGES = ["asking", "done", "confirming", "done"]


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with open_shop() as opened:
        yield opened


@pytest.fixture(scope="module")
def door(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Issuer]]:
    """A client of a server with the shop, and the issuer of its users' tokens."""
    folder = tmp_path_factory.mktemp("dialogue")
    issuer = Issuer(folder)
    verifier = JwksVerifier(issuer=ISSUER, audience=AUDIENCE, jwks=str(issuer.jwks), query_role="ask")
    service = KnowledgeService(
        folder / "server.db", bases=[KnowledgeBase(shop.sources(), name="shop", llm=ScriptedLLM(read))]
    )
    with served_client(service, verifier=verifier) as client:
        yield client, issuer


def user(issuer: Issuer, name: str) -> dict[str, str]:
    token = issuer.token(tid="acme", oid=name, groups=["staff"])
    return {"x-ms-query-source-authorization": token}


def ask(client: httpx.Client, text: str, headers: dict[str, str]) -> httpx.Response:
    """Send the last message alone: the state knows what was said of the tool."""
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return client.post("/knowledgebases/shop/retrieve", json={"messages": messages}, headers=headers)


@pytest.mark.parametrize("streams", [False, True])
def test_a_session_keeps_the_state(door: tuple[httpx.Client, Issuer], shop: Shop, streams: bool) -> None:
    """What is missing is asked for, a call that writes is confirmed and made once; whole and as events."""
    (client, issuer), session, before = door, "-", len(shop.returns)
    for number, (text, stage) in enumerate(zip(SAID, STAGES, strict=True), start=1):
        headers = {**user(issuer, "alice"), SESSION: session, **(STREAM if streams else {})}
        response = ask(client, text, headers)
        session = response.headers[SESSION]
        body = events(response.text)[-1][1]["response"] if streams else response.json()
        assert (body["dialogue"]["stage"], body["scopeState"]["turn"]) == (stage, number)
    assert [one["order"] for one in shop.returns[before:]] == ["A-4711"]
    again = ask(client, "yes", {**user(issuer, "alice"), SESSION: session}).json()
    assert again["dialogue"].get("pending") is None
    assert len(shop.returns) == before + 1
    first = ask(client, SAID[1], user(issuer, "alice")).json()  # without a session, each turn is a first one
    assert first["dialogue"].get("tool") is None


def test_a_session_is_its_users(door: tuple[httpx.Client, Issuer], shop: Shop) -> None:
    """Another user finds none of this id, and a request without a user has none."""
    client, issuer = door
    named = ask(client, SAID[0], {**user(issuer, "alice"), SESSION: "-"}).headers[SESSION]
    before = len(shop.returns)
    for headers, status in (
        ({**user(issuer, "mallory"), SESSION: named}, 404),
        ({SESSION: named}, 403),
        ({SESSION: "-"}, 403),
        ({"x-ms-query-source-authorization": issuer.token(tid="acme", sub=None, groups=["staff"]), SESSION: "-"}, 403),
        ({**user(issuer, "alice"), SESSION: "nothing"}, 404),
    ):
        response = ask(client, "yes", headers)
        assert response.status_code == status, response.text
        assert SESSION not in response.headers
    assert len(shop.returns) == before


async def test_a_response_is_not_lost_with_its_session(tmp_path: Path) -> None:
    """A session that was deleted while it answered is named as missing; a new one is made by its first response."""
    with SessionStore(tmp_path / "sessions.db") as store:
        response = RetrievalResponse()
        await KeptState(store, "user", "gone", is_new=False).keep(response)
        assert (response.status_code, [one.what for one in response.missing]) == (206, ["session"])
        await KeptState(store, "user", "made", is_new=True).keep(response)
        assert (await store.aget("user", "made")).turns == []


def test_googles_sessions_keep_it_too(door: tuple[httpx.Client, Issuer], shop: Shop) -> None:
    """``:answer`` goes on in its session's state."""
    (client, issuer), session, before = door, f"{ENGINE}/sessions/-", len(shop.returns)
    answers: list[Any] = []
    for text in SAID:
        body = {"query": {"text": text}, "session": session}
        path = f"/v1/{ENGINE}/servingConfigs/default:answer"
        response = client.post(path, json=body, headers=user(issuer, "bob"))
        assert response.status_code == 200, response.text
        answers.append(response.json())
        session = answers[-1]["session"]["name"]
    assert "please tell: the order number" in answers[0]["answer"]["answerText"]
    assert "Reply yes to confirm" in answers[2]["answer"]["answerText"]
    assert [one["order"] for one in shop.returns[before:]] == ["A-4711"]
