"""The route of ``retrieve`` over plain HTTP: answers, events, errors, headers."""

from __future__ import annotations

import asyncio
import json
import mimetypes
import re
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.server import azure, http
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.testing import LoopbackOpenAI, MemoryRetriever, Reply
from tests.aio.conftest import until
from tests.server.serving import QUERY, client_of, served_client

ASK = {"messages": [{"role": "user", "content": [{"type": "text", "text": "How tall was the Saturn V?"}]}]}
EXTRACT = {"intents": [{"type": "semantic", "search": "Saturn V"}], "outputMode": "extractiveData"}
STREAM = {"accept": "text/event-stream"}
GOOGLE = "/v1/projects/p/locations/global/dataStores/space/servingConfigs/d:answer"
GOOGLES = {"query": {"text": "How tall was the Saturn V?"}}


def events(text: str) -> list[tuple[str, Any]]:
    """The events of a stream."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    lines = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    return [(one["event"], json.loads(one["data"])) for one in lines]


@pytest.mark.parametrize("path", ["knowledgebases/space", "knowledgebases('space')", "agents('space')", "agents/space"])
def test_every_form_of_the_path_answers(client: httpx.Client, path: str) -> None:
    """Both path forms and the older name reach the same knowledge base."""
    response = client.post(f"/{path}/retrieve", json=ASK, headers={"x-ms-client-request-id": "abc-1"})
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
    with client_of(str(client.base_url), None) as anyone:
        assert anyone.get("/healthz").json() == {"status": "ok"}
        assert anyone.get("/readyz").json() == {"status": "ready"}
        counted = 'agentic_kb_requests_total{method="POST",route="/knowledgebases/{name}/retrieve"'
        assert counted in anyone.get("/metrics").text
        doors = {
            "/knowledgebases/space/retrieve": ASK,
            GOOGLE: GOOGLES,
            GOOGLE.replace("answer", "streamAnswer"): GOOGLES,
        }
        for path, sent in doors.items():
            before = tokens(anyone)
            client.post(path, json=sent).raise_for_status()
            assert tokens(anyone) > before, path


def tokens(client: httpx.Client) -> float:
    """The tokens that models read, by the metrics."""
    found = re.search(r'agentic_kb_tokens_total\{direction="input"\} (\S+)', client.get("/metrics").text)
    return 0.0 if found is None else float(found[1])


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


PATH = "/knowledgebases/kb/retrieve"


@contextmanager
def serving(
    database: Path, llm: Any = None, options: Mapping[str, Any] = {}, **retriever: Any
) -> Iterator[httpx.Client]:
    """A server over one registered knowledge base."""
    memory = MemoryRetriever(["The pump is red, the Saturn V was tall."], mode="async", **retriever)
    base = KnowledgeBase(
        [KnowledgeSource("docs", "everything", retriever=memory)], llm=llm, name="kb", effort="minimal"
    )
    with served_client(KnowledgeService(database, bases=[base]), **options) as client:
        yield client


def test_a_slow_stream_has_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a source is silent, and behind another question before the first step; events do not change."""
    monkeypatch.setattr(azure, "HEARTBEAT_SECONDS", 0.05)
    with (
        serving(tmp_path / "s.db", options={"running_questions": 1}, latency=1.0) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        texts = list(threads.map(lambda _: client.post(PATH, json=ASK, headers=STREAM).text, range(2)))
    before, after = zip(*(text.split("event: activity.started", 1) for text in texts), strict=True)
    assert any(": heartbeat\n\n" in text for text in before)
    assert all(text.count(": heartbeat\n\n") >= 2 for text in after)
    assert {events(text)[-1][0] for text in texts} == {"response.completed"}


SLOW = Reply("word " * 2_000, chunk_size=5, chunk_delay=0.05)
GOOGLE_STREAM = "/v1/projects/p/locations/global/dataStores/kb/servingConfigs/default:streamAnswer"


@pytest.mark.parametrize(
    ("path", "sent", "headers", "reply"),
    [
        (PATH, {**ASK, "outputMode": "answerSynthesis"}, STREAM, SLOW),
        (PATH, {**ASK, "outputMode": "answerSynthesis"}, {}, Reply("late", latency=100.0)),
        (GOOGLE_STREAM, GOOGLES, {}, SLOW),
        (GOOGLE_STREAM.replace("streamAnswer", "answer"), GOOGLES, {}, Reply("late", latency=100.0)),
    ],
    ids=["events", "json", "google stream", "google"],
)
def test_who_disconnects_cancels(
    tmp_path: Path, path: str, sent: dict[str, Any], headers: dict[str, str], reply: Reply
) -> None:
    """The request of a client that goes away ends, long before the model would have answered."""
    running = "agentic_kb_running_requests 1.0"  # the request for the metrics itself
    with LoopbackOpenAI(reply) as model, serving(tmp_path / "s.db", model.llm()) as client:
        address = urlsplit(str(client.base_url))
        with socket.create_connection((address.hostname or "", address.port or 0)) as raw:
            body = json.dumps(sent).encode()
            lines = [f"POST {path} HTTP/1.1", "host: x", f"api-key: {QUERY}", f"content-length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            raw.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            assert until(lambda: bool(model.requests), 50)
            assert running not in client.get("/metrics").text
        assert until(lambda: running in client.get("/metrics").text, 50)


async def test_a_disconnect_waits_for_the_clean_up() -> None:
    """What makes a stream's chunks is cancelled once, and cleans up to its end."""
    sent, cleaned = asyncio.Event(), []

    async def chunks() -> AsyncGenerator[bytes]:
        try:
            yield b"first"
            sent.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(9):
                await asyncio.sleep(0)
            cleaned.append(True)

    async def receive() -> Message:
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    scope = {"type": "http", "headers": [], "method": "POST"}
    response = await http.streamed(Request(scope, receive), chunks(), "text/plain")
    await response(scope, receive, send)
    assert cleaned == [True]


def test_the_types_of_the_pages_files_are_its_own(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's own table of types stops no script."""
    mimetypes.init()
    monkeypatch.setitem(mimetypes.types_map, ".js", "text/plain")
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/page/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/page/icon.svg").headers["content-type"] == "image/svg+xml"


def test_a_failure_before_the_first_step_is_no_stream(tmp_path: Path) -> None:
    """A source that fails ends the request with 502, naming source and stage, streamed as an error event."""
    with serving(tmp_path / "s.db", fault=OSError("the disk is gone")) as client:
        plain = client.post(PATH, json=ASK)
        streamed = events(client.post(PATH, json=ASK, headers=STREAM).text)
    assert plain.status_code == 502
    detail = plain.json()["error"]["details"][0]
    assert (detail["target"], detail["additionalInfo"][0]["info"]["stage"]) == ("docs", "search")
    assert "disk is gone" in detail["message"]
    assert streamed[-1] == ("error", plain.json())


def test_a_failure_that_nobody_foresaw_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each door the client learns of a failure, and the log has its reason."""

    async def fails(*_: Any) -> None:
        raise RuntimeError("sk-secret-123456")

    for method in ("aretrieve", "aanswer"):
        monkeypatch.setattr(KnowledgeBase, method, fails)
    with serving(tmp_path / "s.db") as client:
        for path, sent in ((PATH, ASK), (GOOGLE.replace("space", "kb"), GOOGLES)):
            caplog.clear()
            response = client.post(path, json=sent)
            assert (response.status_code, "secret" in response.text) == (500, False)
            assert caplog.messages.count("a request failed") == caplog.text.count("RuntimeError: sk-***") == 1


def test_running_requests_have_a_limit(tmp_path: Path) -> None:
    """A request beyond the limit gets 503 in its API's form, and the time to wait; health is served all the same."""
    with (
        serving(tmp_path / "s.db", options={"running_requests": 1}, latency=2.0) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        begun = [threads.submit(client.post, PATH, json=ASK) for _ in range(4)]
        assert client.get("/healthz").status_code == 200
        googles = threads.submit(client.post, GOOGLE.replace("space", "kb"), json=GOOGLES).result()
        assert {one.result().status_code for one in begun} == {200, 503}
    assert (googles.status_code, googles.json()[0]["error"]["status"]) == (503, "UNAVAILABLE")
    assert int(googles.headers["retry-after"]) >= 1


def test_a_citation_leads_to_its_passage(client: httpx.Client) -> None:
    """The citation's address names knowledge base, source and passage, which are found by their ids."""
    reference = client.post("/knowledgebases/space/retrieve", json=ASK).json()["references"][0]
    named = dict(parse_qsl(urlsplit(reference["citationUrl"]).fragment))
    assert reference["citationUrl"].startswith(str(client.base_url))
    params = {"source": named["source"], "id": named["passage"]}
    found = client.get(f"/knowledgebases/{named['kb']}/passage", params=params)
    assert found.json()["content"] == reference["sourceData"]["content"]
    assert client.get("/knowledgebases/space/passage", params={**params, "id": "none"}).status_code == 404
    assert client.get("/knowledgebases/space/passage", params={"id": "none"}).status_code == 400
    assert client.get("/knowledgebases/private/passage", params={"source": "secrets", "id": "plan"}).status_code == 403


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    """With one source of two down the status is 206, in the stream too; 502 where the request insists on it."""
    good = KnowledgeSource("good", "rockets", retriever=MemoryRetriever(["The Saturn V was tall."], mode="async"))
    down = KnowledgeSource("down", "more", retriever=MemoryRetriever(["x"], mode="async", fault=OSError("no disk")))
    base = KnowledgeBase([good, down], name="kb", effort="minimal")
    insist = {**ASK, "knowledgeSourceParams": [{"knowledgeSourceName": "down", "failOnError": True}]}
    with served_client(KnowledgeService(tmp_path / "s.db", bases=[base])) as client:
        plain = client.post(PATH, json=ASK)
        streamed = events(client.post(PATH, json=ASK, headers=STREAM).text)
        refused = client.post(PATH, json=insist)
    body, (name, last) = plain.json(), streamed[-1]
    assert (plain.status_code, body["statusCode"], name, last["statusCode"]) == (206, 206, "response.completed", 206)
    assert [(part["what"], "no disk" in part["reason"]) for part in body["missing"]] == [("down", True)]
    assert (refused.status_code, refused.json()["error"]["target"]) == (502, "down")
