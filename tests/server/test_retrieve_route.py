"""The route of ``retrieve`` over plain HTTP: answers, events, errors, headers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

ASK = {"messages": [{"role": "user", "content": [{"type": "text", "text": "How tall was the Saturn V?"}]}]}
EXTRACT = {"intents": [{"type": "semantic", "search": "Saturn V"}], "outputMode": "extractiveData"}
STREAM = {"accept": "text/event-stream"}


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


def test_a_stream_has_the_events_in_order(client: httpx.Client) -> None:
    """Started, activities, tokens, the answer, references, the whole response."""
    response = client.post("/knowledgebases('space')/retrieve", json=ASK, headers=STREAM)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    seen = events(response.text)
    names = [name for name, _ in seen]
    assert names[0] == "retrieval.started"
    assert names[-3:] == ["answer.completed", "references.completed", "response.completed"]
    started = [data["id"] for name, data in seen if name == "activity.started"]
    completed = [data["id"] for name, data in seen if name == "activity.completed"]
    assert sorted(started) == sorted(completed) == list(range(len(started)))
    written = "".join(data["delta"] for name, data in seen if name == "answer.delta")
    whole = seen[-1][1]
    assert names.count("answer.delta") > 1
    assert written == whole["response"]["response"][0]["content"][0]["text"]
    assert whole["statusCode"] == 200
    assert dict(seen)["references.completed"] == whole["response"]["references"]


def test_extracts_stream_without_an_answer(client: httpx.Client) -> None:
    """Extracted data has no answer events."""
    seen = events(client.post("/knowledgebases/space/retrieve", json=EXTRACT, headers=STREAM).text)
    names = {name for name, _ in seen}
    assert not {"answer.delta", "answer.completed"} & names
    assert "response.completed" in names


@pytest.mark.parametrize(
    ("path", "options", "status", "words"),
    [
        ("/knowledgebases/space/retrieve", {"headers": {"api-key": "wrong"}}, 401, "not known"),
        ("/knowledgebases/space/retrieve", {"headers": {"authorization": "Bearer x", "api-key": ""}}, 401, "no bearer"),
        ("/knowledgebases/none/retrieve", {}, 404, "'none'"),
        ("/knowledgebases/space/nothing", {}, 404, "Not Found"),
        ("/knowledgebases/space/retrieve", {"json": {}}, 400, "messages"),
        ("/knowledgebases/space/retrieve", {"json": {**ASK, "intents": [{"search": "x"}]}}, 400, "exclude each other"),
        ("/knowledgebases/space/retrieve", {"content": "{"}, 400, "JSON"),
        ("/knowledgebases/space/retrieve", {"params": {"api-version": "2019-01-01"}}, 400, "2026-08-01-preview"),
        (
            "/knowledgebases/space/retrieve",
            {"params": {"api-version": "2025-11-01-preview"}, "headers": STREAM},
            406,
            "",
        ),
        ("/knowledgebases/space/retrieve", {"content": b" " * 5_000_000}, 413, "4,000,000"),
        ("/knowledgebases/private/retrieve", {"json": EXTRACT}, 403, "principal"),
        ("/knowledgebases/private/retrieve", {"json": EXTRACT, "headers": STREAM}, 403, "principal"),
        (
            "/knowledgebases/space/retrieve",
            {"headers": {"x-ms-query-source-authorization": "token"}},
            401,
            "verifies no bearer tokens",
        ),
        (
            "/knowledgebases/space/retrieve",
            {"json": {**ASK, "knowledgeSourceParams": [{"knowledgeSourceName": "mars"}]}, "headers": STREAM},
            400,
            "mars",
        ),
    ],
)
def test_errors_say_what_is_wrong(
    client: httpx.Client, path: str, options: dict[str, Any], status: int, words: str
) -> None:
    """Each refused request gets its status and Azure's error object, also where it asked for a stream."""
    response = client.post(path, **({"json": ASK} if "content" not in options else {}) | options)
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
        assert (
            'agentic_kb_requests_total{method="POST",route="/knowledgebases/{name}/retrieve"'
            in anyone.get("/metrics").text
        )


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
