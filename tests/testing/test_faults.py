from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai import OpenAI

from llama_index_agentic_kb.testing import Fault, FaultKind, LoopbackOpenAI, Reply, Usage

ASK = [ChatMessage(role="user", content="Hi")]
TEXT = "one two three four five six seven eight"


class Rig:
    """One server and its clients for all faults: each new client loads the system's certificates for 0.1 s."""

    def __init__(self) -> None:
        self._fault = Fault.hang()
        self._asked = 0
        self._paid = Usage(calls=0)
        self.server = LoopbackOpenAI(lambda _request: self._fault).start()
        self._patient = self.server.llm(max_retries=0, timeout=20.0)
        self._impatient = self.server.llm(max_retries=0, timeout=0.3)

    def failing(self, fault: Fault) -> OpenAI:
        self._fault = fault
        self._asked = len(self.server.requests)
        self._paid = self.server.billed
        waits = fault.kind in {FaultKind.HANG, FaultKind.STREAM_HANG, FaultKind.DRIP}
        return self._impatient if waits else self._patient

    @property
    def asked(self) -> int:
        return len(self.server.requests) - self._asked

    @property
    def billed(self) -> Usage:
        return self.server.billed + -self._paid


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.server.stop()


PLAIN_ERRORS: list[tuple[Fault, type[Exception]]] = [
    (Fault.status(401), openai.AuthenticationError),
    (Fault.status(429), openai.RateLimitError),
    (Fault.status(503), openai.InternalServerError),
    (Fault.hang(), openai.APITimeoutError),
    (Fault.hang(0.05), openai.APIConnectionError),
    (Fault.reset(), openai.APIConnectionError),
    (Fault.cut(), openai.APIConnectionError),
    (Fault.html(), AttributeError),
    (Fault.bad_json(), json.JSONDecodeError),
    (Fault.error_body(), TypeError),
    (Fault.no_choices(), IndexError),
    (Fault.stream_cut(), openai.APIConnectionError),
    (Fault.stream_hang(), openai.APITimeoutError),
    (Fault.stream_reset(), openai.APIConnectionError),
]

STREAM_ERRORS: list[tuple[Fault, type[Exception]]] = [
    (Fault.status(503), openai.InternalServerError),
    (Fault.hang(), openai.APITimeoutError),
    (Fault.reset(), openai.APIConnectionError),
    (Fault.cut(), httpx.RemoteProtocolError),
    (Fault.bad_json(), json.JSONDecodeError),
    (Fault.error_body(), openai.APIError),
    (Fault.stream_hang(), httpx.ReadTimeout),
    (Fault.stream_reset(), httpx.ReadError),
]


def kind_of(value: object) -> str | None:
    return value.kind if isinstance(value, Fault) else None


@pytest.mark.parametrize(("fault", "error"), PLAIN_ERRORS, ids=kind_of)
def test_plain_faults_raise(rig: Rig, fault: Fault, error: type[Exception]) -> None:
    """Each fault leaves the real client as the error measured, after one request that costs nothing."""
    llm = rig.failing(fault)
    with pytest.raises(error) as caught:
        llm.chat(ASK)
    assert type(caught.value) is error
    assert rig.asked == 1
    assert rig.billed == Usage(calls=0)


@pytest.mark.parametrize(("fault", "error"), PLAIN_ERRORS, ids=kind_of)
async def test_plain_faults_raise_asynchronously(rig: Rig, fault: Fault, error: type[Exception]) -> None:
    """The async client raises the same errors."""
    llm = rig.failing(fault)
    with pytest.raises(error) as caught:
        await llm.achat(ASK)
    assert type(caught.value) is error


@pytest.mark.parametrize(("fault", "error"), STREAM_ERRORS, ids=kind_of)
def test_stream_faults_raise(rig: Rig, fault: Fault, error: type[Exception]) -> None:
    """Streams raise while they are read; broken midway, it is httpx's own error."""
    stream = rig.failing(fault).stream_chat(ASK)
    with pytest.raises(error) as caught:
        list(stream)
    assert type(caught.value) is error


@pytest.mark.parametrize(("fault", "error"), STREAM_ERRORS, ids=kind_of)
async def test_stream_faults_raise_asynchronously(rig: Rig, fault: Fault, error: type[Exception]) -> None:
    """The async client's streams raise the same errors."""
    stream = await rig.failing(fault).astream_chat(ASK)
    with pytest.raises(error) as caught:
        _ = [response async for response in stream]
    assert type(caught.value) is error


@pytest.mark.parametrize("fault", [Fault.html(), Fault.no_choices()], ids=kind_of)
def test_streams_without_an_answer_end_silently(rig: Rig, fault: Fault) -> None:
    """A web page or a stream without choices is an empty answer to the real client."""
    assert "".join(r.delta or "" for r in rig.failing(fault).stream_chat(ASK)) == ""
    assert rig.billed.calls == 0


def test_stream_cut_looks_like_success(rig: Rig) -> None:
    """A stream that ends early without [DONE] gives part of the text, no finish reason and no error."""
    last: Any = list(rig.failing(Fault.stream_cut(TEXT)).stream_chat(ASK))[-1]

    assert last.message.content == "one two three fo"
    assert last.raw.choices[0].finish_reason is None
    assert rig.billed == Usage(1, 4)


@pytest.mark.parametrize("fault", [Fault.stream_reset(TEXT), Fault.stream_hang(content=TEXT)], ids=kind_of)
def test_broken_streams_cost_what_was_told(rig: Rig, fault: Fault) -> None:
    """Half the text arrives before a stream breaks, and is billed."""
    told: list[str] = []
    stream = rig.failing(fault).stream_chat(ASK)
    with pytest.raises(httpx.TransportError):
        told.extend(response.delta or "" for response in stream)
    assert "".join(told) == "one two three fo"
    assert rig.billed == Usage(1, 4)


def test_retry_after_is_sent(rig: Rig) -> None:
    """A status carries the Retry-After header set."""
    llm = rig.failing(Fault.status(429, retry_after=1.5))
    with pytest.raises(openai.RateLimitError) as caught:
        llm.chat(ASK)
    assert caught.value.response.headers["retry-after"] == "1.5"


POOR_ANSWERS: list[tuple[Fault, str | None, str]] = [
    (Fault.null_content(), None, "stop"),
    (Fault.refusal(), None, "stop"),
    (Fault.content_filter(), None, "content_filter"),
    (Fault.length("Once upon"), "Once upon", "length"),
]


@pytest.mark.parametrize(("fault", "content", "reason"), POOR_ANSWERS, ids=kind_of)
def test_poor_answers_look_like_success(rig: Rig, fault: Fault, content: str | None, reason: str) -> None:
    """Null, refused, filtered and truncated answers raise nothing; only the raw response tells."""
    response: Any = rig.failing(fault).chat(ASK)

    assert (response.message.content or None) == content
    assert response.raw.choices[0].finish_reason == reason
    assert rig.billed.calls == 1


@pytest.mark.parametrize(("fault", "content", "reason"), POOR_ANSWERS, ids=kind_of)
async def test_poor_streams_look_like_success(rig: Rig, fault: Fault, content: str | None, reason: str) -> None:
    """The same holds for streams."""
    stream = await rig.failing(fault).astream_chat(ASK)
    last: Any = [response async for response in stream][-1]

    assert (last.message.content or None) == content
    assert last.raw.choices[0].finish_reason == reason
    assert rig.billed.calls == 1


def test_refusal_stands_in_the_raw_message(rig: Rig) -> None:
    """The words of a refusal are to be found in the raw message only."""
    message = rig.failing(Fault.refusal("No.")).chat(ASK).raw.choices[0].message
    assert (message.content, message.refusal) == (None, "No.")


def test_drip_outlives_the_read_timeout(rig: Rig) -> None:
    """Bytes that drip in never trip the client's timeout of 0.3 s, however long the answer takes."""
    started = time.monotonic()
    assert rig.failing(Fault.drip(0.002, content="Drop.")).chat(ASK).message.content == "Drop."
    assert time.monotonic() - started > 0.5
    assert rig.billed == Usage(1, 2)


def test_drip_of_a_stream(rig: Rig) -> None:
    """A stream drips as well."""
    responses = list(rig.failing(Fault.drip(0.0, content="Drop.")).stream_chat(ASK))
    assert responses[-1].message.content == "Drop."
    assert rig.billed == Usage(1, 2)


def test_unfinished_drip_ends_with_the_server() -> None:
    """A drip that nobody awaits holds nothing up and costs nothing."""
    with LoopbackOpenAI(Fault.drip()) as server:
        with (
            httpx.Client(trust_env=False, verify=False) as client,
            client.stream("POST", f"{server.base_url}/chat/completions", json={"messages": []}) as answer,
        ):
            assert next(answer.iter_raw()) == b"{"
        started = time.monotonic()
    assert time.monotonic() - started < 2.0
    assert server.billed == Usage(calls=0)


def test_a_fault_can_come_late(rig: Rig) -> None:
    """A fault told to come after a while does."""
    llm = rig.failing(Fault.status(503).after(0.2))
    started = time.monotonic()
    with pytest.raises(openai.InternalServerError):
        llm.chat(ASK)
    assert time.monotonic() - started >= 0.2


def test_the_server_recovers() -> None:
    """A client that retries gets through once the faults are over."""
    with LoopbackOpenAI([Fault.status(503, retry_after=0.01), Fault.reset(), Reply("Well again.")]) as server:
        assert server.llm(max_retries=2).complete("Hi").text == "Well again."
        assert len(server.requests) == 3
        assert server.billed.calls == 1


def test_every_kind_has_its_constructor() -> None:
    """Each kind of fault is made by the constructor of its name."""
    for kind in FaultKind:
        make = getattr(Fault, kind.value)
        assert (make(500) if kind is FaultKind.STATUS else make()).kind is kind
