from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from llama_index_agentic_kb.testing import (
    ChatRequest,
    Fault,
    LoopbackOpenAI,
    Reply,
    ScriptExhaustedError,
    Usage,
    count_tokens,
    hash_vector,
)

ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="The capital of France?")]
ASK_TOKENS = 3 + 5


class City(BaseModel):
    """A city."""

    name: str
    people: int


def look_up(name: str) -> str:
    """Look a city up."""
    return name


def usage_of(raw: Any) -> tuple[int, int]:
    return raw.usage.prompt_tokens, raw.usage.completion_tokens


def test_plain_chat_reports_and_bills_the_same_usage() -> None:
    """The real client gets the text, and the usage it reads is the usage billed."""
    with LoopbackOpenAI("Paris, of course.") as server:
        response = server.llm().chat(ASK)

        assert response.message.content == "Paris, of course."
        assert usage_of(response.raw) == (ASK_TOKENS, 5)
        assert server.billed == Usage(ASK_TOKENS, 5, calls=1)
        assert server.billed.total_tokens == ASK_TOKENS + 5


def test_requests_are_recorded() -> None:
    """Path, body, headers and arrival time of each request are kept."""
    before = time.monotonic()
    with LoopbackOpenAI() as server:
        server.llm(temperature=0.5).chat(ASK)

    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    assert request.body is not None
    assert request.body["temperature"] == 0.5
    assert request.headers["authorization"].startswith("Bearer sk-loopback")
    assert before <= request.arrived <= time.monotonic()
    assert server.chats[0].last == "The capital of France?"


def test_chat_request_views() -> None:
    """A request shows texts, also of content parts, and what was asked of the answer."""
    parts = [{"type": "text", "text": "one"}, {"type": "image_url"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "zero"}, {"role": "assistant", "content": None}, {"content": parts}]
    request = ChatRequest({"model": "m", "messages": messages, "stream": True, "stream_options": {"include_usage": 1}})

    assert request.text == "zero\n\none\ntwo"
    assert request.last == "one\ntwo"
    assert (request.model, request.stream, request.include_usage) == ("m", True, True)
    assert (request.response_format, request.tools, request.forced_tool) == (None, [], None)
    assert ChatRequest({}).last == ""


def test_list_is_consumed_then_refused() -> None:
    """A list of replies is given out in order; one call more is a bad request that says so."""
    with LoopbackOpenAI(["first", Reply("second")]) as server:
        llm = server.llm()
        assert [llm.complete("?").text for _ in range(2)] == ["first", "second"]
        with pytest.raises(openai.BadRequestError, match="holds 2 replies and this is call 3"):
            llm.complete("?")

        assert server.billed.calls == 2
        assert len(server.requests) == 3
        assert isinstance(server.errors[0], ScriptExhaustedError)


def test_callable_sees_the_request() -> None:
    """A callable answers each request by what it says."""
    with LoopbackOpenAI(lambda request: f"You said: {request.last}") as server:
        assert server.llm().complete("Hi").text == "You said: Hi"


def test_callable_that_raises_is_noted() -> None:
    """An error in the callable is answered by a status that isn't retried, and kept."""

    def fail(_request: ChatRequest) -> str:
        raise KeyError("plan")

    with LoopbackOpenAI(fail) as server:
        with pytest.raises(openai.BadRequestError, match="KeyError"):
            server.llm().complete("Hi")
        assert len(server.requests) == 1
        assert isinstance(server.errors[0], KeyError)


def test_json_schema_answers_come_as_content() -> None:
    """Structured prediction by response format reads the JSON from the content."""
    with LoopbackOpenAI('{"name": "Paris", "people": 2}') as server:
        city = server.llm("gpt-4o-mini").structured_predict(City, PromptTemplate("{q}"), q="Which?")

        assert city == City(name="Paris", people=2)
        response_format = server.chats[0].response_format
        assert response_format is not None
        assert response_format["type"] == "json_schema"


def test_forced_tool_answers_come_as_its_call() -> None:
    """Structured prediction by a forced tool reads the JSON from the call's arguments."""
    with LoopbackOpenAI('{"name": "Paris", "people": 2}') as server:
        city = server.llm("gpt-4-turbo").structured_predict(City, PromptTemplate("{q}"), q="Which?")

        assert city == City(name="Paris", people=2)
        assert server.chats[0].forced_tool == "City"
        assert server.billed.completion_tokens == 1 + count_tokens('{"name": "Paris", "people": 2}')


def test_named_tool_is_called_and_prose_is_not() -> None:
    """A tool forced by name is called; a text that is no JSON object stays text."""
    tool = FunctionTool.from_defaults(look_up)
    with LoopbackOpenAI(['{"name": "Oslo"}', "I'd rather not."]) as server:
        llm = server.llm()
        called = llm.chat_with_tools([tool], "Which?", tool_choice="look_up")
        spoken = llm.chat_with_tools([tool], "Which?", tool_choice="look_up")

        assert llm.get_tool_calls_from_response(called)[0].tool_kwargs == {"name": "Oslo"}
        assert spoken.message.content == "I'd rather not."


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_of_a_reply(stream: bool) -> None:
    """Several tool calls arrive whole, in a plain answer and piece by piece."""
    reply = Reply("Looking.", tool_calls=[("look_up", {"name": "Oslo"}), ("look_up", '{"name": "Bergen"}')])
    tool = FunctionTool.from_defaults(look_up)
    with LoopbackOpenAI(reply) as server:
        llm = server.llm()
        options: dict[str, Any] = {"allow_parallel_tool_calls": True}
        if stream:
            response = list(llm.stream_chat_with_tools([tool], "Which?", **options))[-1]
        else:
            response = llm.chat_with_tools([tool], "Which?", **options)

        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        assert [block.tool_name for block in blocks] == ["look_up", "look_up"]
        arguments = [call.tool_kwargs for call in llm.get_tool_calls_from_response(response)]
        assert arguments == [{"name": "Oslo"}, {"name": "Bergen"}]
        assert server.billed == Usage(2, count_tokens("Looking.") + 2 * count_tokens('look_up {"name": "Oslo"}'))
        assert response.raw is not None
        assert response.raw.choices[0].finish_reason == "tool_calls"


def test_stream_tells_deltas() -> None:
    """A stream arrives in pieces of the size set, ends with a finish reason, and is billed in full."""
    with LoopbackOpenAI(Reply("Paris, of course.", chunk_size=6)) as server:
        responses = list(server.llm().stream_chat(ASK))

        assert [r.delta for r in responses if r.delta] == ["Paris,", " of co", "urse."]
        assert responses[-1].message.content == "Paris, of course."
        assert responses[-1].raw.choices[0].finish_reason == "stop"
        assert all(r.raw.usage is None for r in responses)
        assert server.billed == Usage(ASK_TOKENS, 5)


def test_stream_usage_comes_only_if_asked_for() -> None:
    """With include_usage, one last chunk without choices holds the counts."""
    with LoopbackOpenAI("Paris, of course.") as server:
        last = list(server.llm().stream_chat(ASK, stream_options={"include_usage": True}))[-1]

        assert last.raw.choices == []
        assert usage_of(last.raw) == (ASK_TOKENS, 5)


async def test_async_chat_and_stream() -> None:
    """The async client chats and streams as well."""
    with LoopbackOpenAI("Paris, of course.") as server:
        llm = server.llm()
        assert (await llm.achat(ASK)).message.content == "Paris, of course."
        deltas = [r.delta async for r in await llm.astream_chat(ASK)]
        assert "".join(d or "" for d in deltas) == "Paris, of course."
        assert server.billed.calls == 2


def test_stream_left_early_is_billed_in_part() -> None:
    """A client that goes away pays for what was told, and the server goes on."""
    # Not by LlamaIndex's client: a stream closed there is read on until the garbage is collected.
    reply = Reply("one two three four five six seven eight nine ten", chunk_size=10, chunk_delay=0.2)
    with LoopbackOpenAI(reply) as server, httpx.Client(trust_env=False, verify=False) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with client.stream("POST", f"{server.base_url}/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            while "one two th" not in next(lines):
                pass
        time.sleep(0.6)

        assert server.billed.prompt_tokens == 1
        assert 3 <= server.billed.completion_tokens < 10
        assert client.get(f"{server.base_url}/models").status_code == 200


def test_usage_can_be_set_or_kept_back() -> None:
    """A usage that is set is reported and billed; one kept back is billed only."""
    usage = Usage(1000, 50)
    with LoopbackOpenAI([Reply("Hi", usage=usage), Reply("Hi", usage=usage, report_usage=False)]) as server:
        llm = server.llm()
        assert usage_of(llm.chat(ASK).raw) == (1000, 50)
        assert llm.chat(ASK).raw.usage is None
        assert server.billed == usage + usage


def test_latency_is_kept() -> None:
    """Latency and chunk delay pass before the first and between further pieces."""
    with LoopbackOpenAI(Reply("abcdef", latency=0.1, chunk_delay=0.05, chunk_size=2)) as server:
        started = time.monotonic()
        list(server.llm().stream_chat(ASK))
        assert time.monotonic() - started >= 0.25


def test_keep_alive_reuses_one_fast_connection() -> None:
    """Calls over one kept connection are not held up by 40 ms each, as small writes are without TCP_NODELAY."""
    with LoopbackOpenAI() as server, httpx.Client(base_url=server.base_url, trust_env=False, verify=False) as client:
        took: list[float] = []
        for _ in range(20):
            started = time.monotonic()
            answer = client.post("/chat/completions", json={"messages": []})
            took.append(time.monotonic() - started)
        assert "connection" not in answer.headers
        assert statistics.median(took) < 0.03


def test_keep_alive_can_be_refused() -> None:
    """Without keep-alive, every answer closes its connection."""
    with LoopbackOpenAI(keep_alive=False) as server:
        answer = httpx.post(f"{server.base_url}/chat/completions", json={"messages": []}, trust_env=False, verify=False)
        assert answer.headers["connection"] == "close"


def test_async_clients_leave_no_connection_behind() -> None:
    """A client whose event loop ends before the server does leaks nothing, and works in the next loop."""
    with LoopbackOpenAI() as server:
        llm = server.llm()
        for _ in range(3):
            assert asyncio.run(llm.acomplete("Hi")).text == "OK."


def test_a_hundred_connections_at_once() -> None:
    """A hundred slow calls overlap."""
    with LoopbackOpenAI(Reply("OK", latency=0.3)) as server, ThreadPoolExecutor(100) as pool:
        url = f"{server.base_url}/chat/completions"
        body = json.dumps({"messages": []}).encode()
        with httpx.Client(
            trust_env=False, verify=False, timeout=30, limits=httpx.Limits(max_connections=None)
        ) as client:
            started = time.monotonic()
            statuses = list(pool.map(lambda _: client.post(url, content=body).status_code, range(100)))
            elapsed = time.monotonic() - started

        assert statuses == [200] * 100
        assert elapsed < 15.0
        assert server.billed.calls == 100


def test_models_are_listed() -> None:
    """The models route lists what it was told."""
    with LoopbackOpenAI(models=["a", "b"]) as server, openai.OpenAI(base_url=server.base_url, api_key="k") as client:
        assert [model.id for model in client.models.list()] == ["a", "b"]


def test_embeddings_are_deterministic() -> None:
    """Embeddings, packed or not, are the hash vectors of their texts."""
    with LoopbackOpenAI() as server, openai.OpenAI(base_url=server.base_url, api_key="k") as client:
        packed = client.embeddings.create(model="e", input=["rain", "snow"])
        plain = client.embeddings.create(model="e", input="rain", encoding_format="float", dimensions=16)
        tokens = client.embeddings.create(model="e", input=[1, 2], encoding_format="float")
        batch = client.embeddings.create(model="e", input=[[1, 2], [3]], encoding_format="float")

        assert packed.data[1].embedding == pytest.approx(hash_vector("snow"))
        assert plain.data[0].embedding == hash_vector("rain", 16)
        assert tokens.data[0].embedding == batch.data[0].embedding
        assert packed.usage.prompt_tokens == 2
        assert server.billed.calls == 0


def test_unknown_paths_and_bodies_are_refused() -> None:
    """An unknown path is 404, a body that is no JSON object 400."""
    with LoopbackOpenAI() as server, httpx.Client(base_url=server.base_url, trust_env=False, verify=False) as client:
        assert client.get("/nothing").status_code == 404
        assert client.post("/nothing", json={}).status_code == 404
        assert client.post("/chat/completions", content=b"[").status_code == 400
        assert client.post("/chat/completions", json=[]).status_code == 400


def test_stop_is_quick_and_start_returns_to_the_port() -> None:
    """A hung call doesn't hold up the stop; a stopped server can come back at the same address."""
    server = LoopbackOpenAI([Fault.hang(), "back"])
    with pytest.raises(RuntimeError, match="no address"):
        _ = server.base_url
    server.start()
    url = server.base_url
    with pytest.raises(RuntimeError, match="running"):
        server.start()
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(server.llm(max_retries=0).complete, "Hi")
        while not server.requests:
            time.sleep(0.01)
        started = time.monotonic()
        server.stop()
        server.stop()
        assert time.monotonic() - started < 2.0
        with pytest.raises(openai.APIConnectionError):
            hung.result(timeout=2)
    with server:
        assert server.base_url == url
        assert server.llm().complete("Hi").text == "back"


def test_stop_leaves_a_callable_that_sleeps() -> None:
    """A script that is busy holds up the stop for about a second at most."""

    def sleep(_request: ChatRequest) -> str:
        time.sleep(6)
        return "late"

    with LoopbackOpenAI(sleep) as server, ThreadPoolExecutor(1) as pool:
        hung = pool.submit(server.llm(max_retries=0).complete, "Hi")
        while not server.requests:
            time.sleep(0.01)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 4.0
        with pytest.raises(openai.APIConnectionError):
            hung.result(timeout=2)


def test_half_a_request_does_not_hurt() -> None:
    """A client that goes away within its request is ignored."""
    with LoopbackOpenAI() as server:
        host, port = server.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        assert server.llm().complete("Hi").text == "OK."
    assert server.errors == []


def test_reply_checks_its_piece_size() -> None:
    """A piece size below one is refused."""
    with pytest.raises(ValueError, match="chunk_size"):
        Reply("Hi", chunk_size=0)


def test_importing_the_doubles_is_light() -> None:
    """The package imports neither torch nor chromadb nor the OpenAI client's module."""
    code = (
        "import sys, llama_index_agentic_kb.testing as t; "
        "assert all(hasattr(t, n) for n in t.__all__); "
        "print([m for m in ('torch', 'chromadb', 'llama_index.llms.openai') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
