"""The route of ``retrieve`` over plain HTTP: answers, events, errors, headers."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from llama_index_agentic_kb.server import http
from tests.server.serving import QUERY

ASK = {"messages": [{"role": "user", "content": [{"type": "text", "text": "How tall was the Saturn V?"}]}]}
EXTRACT = {"intents": [{"type": "semantic", "search": "Saturn V"}], "outputMode": "extractiveData"}
STREAM = {"accept": "text/event-stream"}
GOOGLE = "/v1/projects/p/locations/global/dataStores/space/servingConfigs/d:answer"


def events(text: str) -> list[tuple[str, Any]]:
    """The events of a stream."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    lines = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    return [(one["event"], json.loads(one["data"])) for one in lines]


@pytest.mark.parametrize(
    "path",
    [
        "/knowledgebases/space/retrieve",
        "/knowledgebases('space')/retrieve",
        "/agents('space')/retrieve",
        "/agents/space/retrieve",
    ],
)
def test_every_form_of_the_path_answers(client: httpx.Client, path: str) -> None:
    """Both path forms and the older name reach the same knowledge base."""
    response = client.post(path, json=ASK, headers={"x-ms-client-request-id": "abc-1"})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    body = response.json()
    assert body["response"][0]["content"][0]["text"] == "The Saturn V was 110.6 m tall [ref_id:0]."
    assert body["statusCode"] == 200
    assert body["references"][0]["sourceData"]["content"].startswith("The Saturn V")
    assert response.headers["x-ms-client-request-id"] == "abc-1"
    assert response.headers["request-id"]
    assert response.headers["x-content-type-options"] == "nosniff"


MARS = {**ASK, "knowledgeSourceParams": [{"knowledgeSourceName": "mars"}]}
USER_TOKEN = {"x-ms-query-source-authorization": "token"}


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"headers": {"authorization": "Bearer x", "api-key": ""}}, 401, "no bearer"),
        ({"headers": USER_TOKEN}, 401, "verifies no bearer tokens"),
        ({"json": {**ASK, "intents": [{"search": "x"}]}}, 400, "exclude each other"),
        ({"content": "{"}, 400, "JSON"),
        ({"params": {"api-version": "2019-01-01"}}, 400, "2026-08-01-preview"),
        ({"params": {"api-version": "2025-11-01-preview"}, "headers": STREAM}, 406, ""),
        ({"content": b" " * 5_000_000}, 413, "4,000,000"),
        ({"base": "private", "json": EXTRACT, "headers": STREAM}, 403, "principal"),
        ({"json": MARS, "headers": STREAM}, 400, "mars"),
    ],
)
def test_errors_say_what_is_wrong(client: httpx.Client, options: dict[str, Any], status: int, words: str) -> None:
    """Each refused request gets its status and Azure's error object, also where it asked for a stream."""
    sent = {"json": ASK, **options} if "content" not in options else {**options}
    response = client.post(f"/knowledgebases/{sent.pop('base', 'space')}/retrieve", **sent)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert words in response.json()["error"]["message"]


def test_a_query_key_changes_no_definitions(client: httpx.Client) -> None:
    """Definitions need an admin key, and nothing is answered without any."""
    assert client.get("/knowledgebases").status_code == 403
    assert httpx.get(f"{client.base_url}/knowledgebases", trust_env=False).status_code == 401


def test_the_server_tells_how_it_is(client: httpx.Client) -> None:
    """Health, readiness and metrics need no key."""
    client.post("/knowledgebases/space/retrieve", json=EXTRACT)
    with httpx.Client(base_url=client.base_url, trust_env=False) as anyone:
        assert anyone.get("/healthz").json() == {"status": "ok"}
        assert anyone.get("/readyz").json() == {"status": "ready"}
        counted = 'agentic_kb_requests_total{method="POST",route="/knowledgebases/{name}/retrieve"'
        assert counted in anyone.get("/metrics").text


@pytest.mark.parametrize(
    ("version", "body", "kinds", "reference"),
    [
        ("2025-05-01-preview", ASK, {"AzureSearchQuery", "AzureSearchSemanticRanker"}, "AzureSearchDoc"),
        ("2025-11-01-preview", EXTRACT, {"searchIndex", "agenticReasoning"}, "searchIndex"),
        ("2026-04-01", {"intents": EXTRACT["intents"]}, {"searchIndex", "agenticReasoning"}, "searchIndex"),
    ],
)
def test_a_response_has_the_names_of_its_version(
    client: httpx.Client, version: str, body: dict[str, Any], kinds: set[str], reference: str
) -> None:
    """Activity and references; what this library adds to the response itself is in all of them."""
    response = client.post(f"/knowledgebases('space')/retrieve?api-version={version}", json=body)
    assert response.status_code == 200
    data = response.json()
    assert kinds <= {one["type"] for one in data["activity"]} <= kinds | {"ModelQueryPlanning"}
    assert {one["type"] for one in data["references"]} == {reference}
    assert data["statusCode"] == 200


@pytest.mark.parametrize("path", ["/knowledgebases/space/retrieve", "/knowledgebases/space/mcp", GOOGLE])
def test_a_body_must_arrive_in_time(client: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends half of a body, and waits, does not keep the place of a request."""
    monkeypatch.setattr(http, "BODY_SECONDS", 0.2)
    host, port = client.base_url.host, client.base_url.port or 80
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", f"api-key: {QUERY}", "content-length: 100", "accept: */*"]
    with socket.create_connection((host, port), timeout=60) as sender:
        sender.sendall("\r\n".join([*lines, "content-type: application/json", "", '{"messages"']).encode())
        response = sender.recv(65_536).decode()
    assert response.split()[1] == "400", response
