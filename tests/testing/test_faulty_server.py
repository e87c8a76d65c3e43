from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai import OpenAI

from llama_index_agentic_kb.testing import LoopbackOpenAI, Reply, Usage
from tests.faulty_server import Fault

ASK = [ChatMessage(role="user", content="Hi")]
TEXT = "one two three four five six seven eight"


def kind_of(value: object) -> str | None:
    return value.kind if isinstance(value, Fault) else None


@contextmanager
def failing(fault: Fault) -> Iterator[tuple[LoopbackOpenAI, OpenAI]]:
    waits = fault.seconds is None and fault.kind in {"hang", "stream_hang"}
    with LoopbackOpenAI(fault) as server:
        yield server, server.llm(max_retries=0, timeout=0.3 if waits else 60.0)


PLAIN: list[tuple[Fault, type[Exception]]] = [
    (Fault.status(401), openai.AuthenticationError),
    (Fault.status(429), openai.RateLimitError),
    (Fault.status(503).after(0.05), openai.InternalServerError),
    (Fault.hang(), openai.APITimeoutError),
    (Fault.hang(0.05), openai.APIConnectionError),
    (Fault.reset(), openai.APIConnectionError),
    (Fault.cut(), openai.APIConnectionError),
    (Fault.html(), AttributeError),
    (Fault.bad_json(), json.JSONDecodeError),
    (Fault.error_body(), TypeError),
    (Fault.no_choices(), IndexError),
    (Fault.stream_hang(), openai.APITimeoutError),
    (Fault.stream_reset(), openai.APIConnectionError),
]

STREAMED: list[tuple[Fault, type[Exception]]] = [
    (Fault.status(503), openai.InternalServerError),
    (Fault.hang(), openai.APITimeoutError),
    (Fault.reset(), openai.APIConnectionError),
    (Fault.cut(), httpx.RemoteProtocolError),
    (Fault.bad_json(), json.JSONDecodeError),
    (Fault.error_body(), openai.APIError),
    (Fault.stream_hang(), httpx.ReadTimeout),
    (Fault.stream_reset(), httpx.ReadError),
]


@pytest.mark.parametrize(("fault", "error"), PLAIN, ids=kind_of)
async def test_plain_faults_raise(fault: Fault, error: type[Exception]) -> None:
    """Each fault leaves the real client as the error measured, after one request that costs nothing."""
    with failing(fault) as (server, llm):
        with pytest.raises(error) as caught:
            llm.chat(ASK)
        assert type(caught.value) is error
        with pytest.raises(error):
            await llm.achat(ASK)
        assert (len(server.requests), server.billed) == (2, Usage(calls=0))


@pytest.mark.parametrize(("fault", "error"), STREAMED, ids=kind_of)
async def test_stream_faults_raise(fault: Fault, error: type[Exception]) -> None:
    """Streams raise while they are read; broken midway, it is httpx's own error."""
    with failing(fault) as (_, llm):
        with pytest.raises(error) as caught:
            list(llm.stream_chat(ASK))
        assert type(caught.value) is error
        with pytest.raises(error):
            _ = [response async for response in await llm.astream_chat(ASK)]


@pytest.mark.parametrize(
    ("make", "error"), [(Fault.stream_cut, None), (Fault.stream_reset, httpx.TransportError)], ids=["cut", "reset"]
)
def test_broken_streams_cost_what_was_sent(make: Callable[[str], Fault], error: type[Exception] | None) -> None:
    """Half the text arrives before a stream breaks, and is billed; one that is cut raises nothing."""
    seen: list[str] = []
    with failing(make(TEXT)) as (server, llm):
        if error is None:
            seen.extend(response.delta or "" for response in llm.stream_chat(ASK))
        else:
            stream = llm.stream_chat(ASK)
            with pytest.raises(error):
                seen.extend(response.delta or "" for response in stream)
        assert ("".join(seen), server.billed) == ("one two three fo", Usage(1, 4))


def test_the_server_recovers() -> None:
    """A client that retries succeeds once the faults are over."""
    with LoopbackOpenAI([Fault.status(503, retry_after=0.01), Fault.reset(), Reply("Well again.")]) as server:
        assert server.llm(max_retries=2).complete("Hi").text == "Well again."
        assert (len(server.requests), server.billed.calls) == (3, 1)
