from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import openai
import pytest
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.tools import FunctionTool

from llama_index_agentic_kb.testing import (
    ChatRequest,
    LoopbackOpenAI,
    Reply,
    ScriptExhaustedError,
    Usage,
    count_tokens,
    hash_vector,
)
from tests.faulty_server import Fault

ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="The capital of France?")]
ASK_TOKENS = 3 + 5


def look_up(name: str) -> str:
    """Look a city up."""
    return name


def usage_of(raw: Any) -> tuple[int, int]:
    return raw.usage.prompt_tokens, raw.usage.completion_tokens


def test_plain_chat_is_recorded_reported_and_billed() -> None:
    """The real client gets the text, and the usage it reads is the usage billed."""
    with LoopbackOpenAI("Paris, of course.") as server:
        response = server.llm(temperature=0.5).chat(ASK)
        assert response.message.content == "Paris, of course."
        assert usage_of(response.raw) == (ASK_TOKENS, 5)
        assert server.billed == Usage(ASK_TOKENS, 5, calls=1)
    (request,) = server.requests
    assert (request.path, (request.body or {})["temperature"]) == ("/v1/chat/completions", 0.5)
    assert request.headers["authorization"].startswith("Bearer sk-loopback")
    assert server.chats[0].last == "The capital of France?"


def test_chat_request_views() -> None:
    """A request shows texts, also of content parts, and what was asked of the answer."""
    parts = [{"type": "text", "text": "one"}, {"type": "image_url"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "zero"}, {"role": "assistant", "content": None}, {"content": parts}]
    request = ChatRequest({"messages": messages, "stream": True})
    assert (request.text, request.last, request.stream) == ("zero\n\none\ntwo", "one\ntwo", True)
    assert (request.response_format, request.forced_tool, ChatRequest({}).last) == (None, None, "")


def test_a_script_that_fails_is_a_bad_request() -> None:
    """A list is consumed in order; one call more, or a callable that raises, is a status that is not retried."""

    def fail(request: ChatRequest) -> str:
        raise KeyError(request.last)

    with LoopbackOpenAI(["first", Reply("second")]) as server:
        llm = server.llm()
        assert [llm.complete("?").text for _ in range(2)] == ["first", "second"]
        with pytest.raises(openai.BadRequestError, match="holds 2 replies and this is call 3"):
            llm.complete("?")
        assert (server.billed.calls, len(server.requests)) == (2, 3)
        assert isinstance(server.errors[0], ScriptExhaustedError)
    with LoopbackOpenAI(fail) as server, pytest.raises(openai.BadRequestError, match="KeyError: 'Hi'"):
        server.llm().complete("Hi")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_of_a_reply(stream: bool) -> None:
    """Several tool calls arrive whole, in a plain answer and piece by piece."""
    reply = Reply("Looking.", tool_calls=[("look_up", {"name": "Oslo"}), ("look_up", '{"name": "Bergen"}')])
    tool = FunctionTool.from_defaults(look_up)
    with LoopbackOpenAI(reply) as server:
        llm = server.llm()
        if stream:
            response = list(llm.stream_chat_with_tools([tool], "Which?", allow_parallel_tool_calls=True))[-1]
        else:
            response = llm.chat_with_tools([tool], "Which?", allow_parallel_tool_calls=True)
        assert sum(isinstance(block, ToolCallBlock) for block in response.message.blocks) == 2
        arguments = [call.tool_kwargs for call in llm.get_tool_calls_from_response(response)]
        assert arguments == [{"name": "Oslo"}, {"name": "Bergen"}]
        assert server.billed == Usage(2, count_tokens("Looking.") + 2 * count_tokens('look_up {"name": "Oslo"}'))


async def test_streams() -> None:
    """A stream arrives in pieces of the size set, reports its usage if asked to, and is billed in full."""
    with LoopbackOpenAI(Reply("Paris, of course.", chunk_size=6)) as server:
        llm = server.llm()
        for responses in (list(llm.stream_chat(ASK)), [one async for one in await llm.astream_chat(ASK)]):
            assert [r.delta for r in responses if r.delta] == ["Paris,", " of co", "urse."]
            assert responses[-1].message.content == "Paris, of course."
            assert (responses[-1].raw.choices[0].finish_reason, responses[-1].raw.usage) == ("stop", None)
        assert server.billed == Usage(2 * ASK_TOKENS, 10, calls=2)
        last = list(llm.stream_chat(ASK, stream_options={"include_usage": True}))[-1]
        assert (last.raw.choices, usage_of(last.raw)) == ([], (ASK_TOKENS, 5))


def test_async_clients_leave_no_connection_behind() -> None:
    """A client whose event loop ends before the server does leaks nothing, and works in the next loop."""
    with LoopbackOpenAI() as server:
        llm = server.llm()
        for _ in range(3):
            assert asyncio.run(llm.acomplete("Hi")).text == "OK."


def test_embeddings_are_the_hash_vectors() -> None:
    """A text or a list of texts is embedded, at the length asked for."""
    with LoopbackOpenAI() as server, openai.OpenAI(base_url=server.base_url, api_key="k") as client:
        several = client.embeddings.create(model="e", input=["rain", "snow"])
        short = client.embeddings.create(model="e", input="rain", encoding_format="float", dimensions=16)
        assert several.data[1].embedding == pytest.approx(hash_vector("snow"))
        assert short.data[0].embedding == hash_vector("rain", 16)
        assert server.billed.calls == 0


def test_unknown_paths_and_bodies_are_refused() -> None:
    """An unknown path is 404, a body that is not a JSON object 400; without keep-alive a connection ends."""
    with LoopbackOpenAI(keep_alive=False) as server:
        with httpx.Client(base_url=server.base_url, trust_env=False, verify=False) as client:
            answers = [client.get("/nothing"), client.post("/nothing", json={})]
            answers += [client.post("/chat/completions", content=body) for body in (b"[", b"[]")]
        assert [answer.status_code for answer in answers] == [404, 404, 400, 400]
        assert answers[0].headers["connection"] == "close"


def test_a_hung_call_does_not_hold_up_the_stop() -> None:
    """Stopping resets what hangs; a stopped server can come back at the same address."""
    arrived = Event()

    def answer(_request: ChatRequest) -> Fault | str:
        if arrived.is_set():
            return "back"
        arrived.set()
        return Fault.hang()

    server = LoopbackOpenAI(answer).start()
    url = server.base_url
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(server.llm(max_retries=0, timeout=600).complete, "Hi")
        assert arrived.wait(60)
        server.stop()
        server.stop()
        with pytest.raises(openai.APIConnectionError):
            hung.result(timeout=60)
    with server:
        assert (server.base_url, server.llm().complete("Hi").text) == (url, "back")
