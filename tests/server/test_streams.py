"""Streams while time passes: heartbeats, disconnects, failures in the middle, and the passages behind citations."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.server import azure
from llama_index_agentic_kb.server.quotas import Quotas
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.testing import LoopbackOpenAI, MemoryRetriever, Reply
from tests.server.serving import QUERY, served
from tests.server.test_retrieve_route import ASK, STREAM, events

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
    with (
        served(KnowledgeService(database, bases=[base]), **options) as url,
        httpx.Client(base_url=url, headers={"api-key": QUERY}, trust_env=False, timeout=60) as client,
    ):
        yield client


def test_a_slow_stream_has_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a source is silent, comments keep the connection open; events do not change."""
    monkeypatch.setattr(azure, "HEARTBEAT_SECONDS", 0.05)
    with serving(tmp_path / "s.db", latency=0.5) as client:
        text = client.post(PATH, json=ASK, headers=STREAM).text
    assert text.count(": heartbeat\n\n") >= 2
    assert events(text)[-1][0] == "response.completed"


def test_a_stream_that_waits_for_its_place_has_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind another question a stream begins, and has comments before its first step."""
    monkeypatch.setattr(azure, "HEARTBEAT_SECONDS", 0.05)
    one = {"quotas": Quotas(running=1)}
    with serving(tmp_path / "s.db", options=one, latency=1.0) as client, ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(lambda _: client.post(PATH, json=ASK, headers=STREAM).text, range(2)))
    assert any(": heartbeat" in text.partition("event: activity.started")[0] for text in texts)
    assert {events(text)[-1][0] for text in texts} == {"response.completed"}


SLOW = Reply("word " * 2_000, chunk_size=5, chunk_delay=0.05)
GOOGLE = "/v1/projects/p/locations/global/dataStores/kb/servingConfigs/default:streamAnswer"
GOOGLES = {"query": {"text": "How tall was the Saturn V?"}}


@pytest.mark.parametrize(
    ("path", "sent", "headers", "reply"),
    [
        (PATH, {**ASK, "outputMode": "answerSynthesis"}, STREAM, SLOW),
        (PATH, {**ASK, "outputMode": "answerSynthesis"}, {}, Reply("late", latency=100.0)),
        (GOOGLE, GOOGLES, {}, SLOW),
        (GOOGLE.replace("streamAnswer", "answer"), GOOGLES, {}, Reply("late", latency=100.0)),
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
            until = time.monotonic() + 50
            while not model.requests and time.monotonic() < until:
                time.sleep(0.01)
            assert running not in client.get("/metrics").text
        while running not in client.get("/metrics").text and time.monotonic() < until:
            time.sleep(0.05)
        assert running in client.get("/metrics").text


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


def test_running_requests_have_a_limit(tmp_path: Path) -> None:
    """A request beyond the limit gets 503 and the time to wait; health is served all the same."""
    with (
        serving(tmp_path / "s.db", options={"max_running": 1}, latency=1.0) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        begun = [threads.submit(client.post, PATH, json=ASK) for _ in range(4)]
        assert client.get("/healthz").status_code == 200
        assert {one.result().status_code for one in begun} == {200, 503}


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
    with (
        served(KnowledgeService(tmp_path / "s.db", bases=[base])) as url,
        httpx.Client(base_url=url, headers={"api-key": QUERY}, trust_env=False, timeout=60) as client,
    ):
        plain = client.post(PATH, json=ASK)
        streamed = events(client.post(PATH, json=ASK, headers=STREAM).text)
        refused = client.post(PATH, json=insist)
    body, (name, last) = plain.json(), streamed[-1]
    assert (plain.status_code, body["statusCode"], name, last["statusCode"]) == (206, 206, "response.completed", 206)
    assert [(part["what"], "no disk" in part["reason"]) for part in body["missing"]] == [("down", True)]
    assert (refused.status_code, refused.json()["error"]["target"]) == (502, "down")
