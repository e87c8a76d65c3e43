from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import CustomLLM, MockLLM
from llama_index.core.tools import FunctionTool
from llama_index.core.utils import get_tokenizer, set_global_tokenizer
from llama_index.llms.openai import OpenAI

from llama_index_agentic_kb import OpenAICompatible
from llama_index_agentic_kb._aio import aiterate, arun, deadline_after, iterate, run
from llama_index_agentic_kb.errors import DeadlineExceededError, LLMError
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.llm import (
    LanguageModel,
    Reply,
    Usage,
    is_function_calling,
    parsed,
    resolve_llm,
    strip_code_fence,
)
from llama_index_agentic_kb.testing import LoopbackOpenAI, ScriptedLLM, ScriptedReply
from llama_index_agentic_kb.testing import Reply as Sent
from tests.faulty_server import Fault

ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Who was first on the moon?")]
SAID = "Neil Armstrong, in July 1969, with Buzz Aldrin after him."

Perform = Callable[[Coroutine[Any, Any, Reply]], Reply]


@pytest.fixture(params=["sync", "async"])
def perform(request: pytest.FixtureRequest) -> Perform:
    """Performs a flow with either driver."""

    def sync(flow: Coroutine[Any, Any, Reply]) -> Reply:
        return run(flow)

    def native(flow: Coroutine[Any, Any, Reply]) -> Reply:
        return asyncio.run(arun(flow))

    return sync if request.param == "sync" else native


def ask(model: LanguageModel, way: str, seconds: float | None = 20, **kwargs: Any) -> Coroutine[Any, Any, Reply]:
    deadline = deadline_after(seconds)
    return (model.chat if way == "chat" else model.stream)(ASK, deadline=deadline, **kwargs)


def language_model(llm: Any, *handlers: Any, retries: RetryPolicy | None = None) -> LanguageModel:
    manager = CallbackManager(list(handlers))
    return LanguageModel(llm, lambda: manager, retries=retries)


@pytest.fixture(autouse=True)
def tokenizer_as_it_was() -> Iterator[None]:
    tokenizer = get_tokenizer()
    yield
    set_global_tokenizer(tokenizer)


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_a_server_that_reports_nothing(perform: Perform, way: str) -> None:
    """Where a server says no counts, they are None: never a guess, and never nought."""
    with LoopbackOpenAI(Sent(SAID, report_usage=False)) as server:
        reply = perform(ask(language_model(server.llm()), way))
    assert reply.usage == Usage(None, None, calls=1)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_tells_its_pieces(is_async: bool) -> None:
    """Each piece is emitted as it comes, in as many as the server sent, through the caller's function."""
    with LoopbackOpenAI(Sent(SAID, chunk_size=10)) as server:
        flow = language_model(server.llm()).stream(ASK, deadline=deadline_after(20), through=str.upper)

        async def read() -> list[str]:
            return [item async for item in aiterate(flow)]

        pieces = asyncio.run(read()) if is_async else list(iterate(flow))
    assert pieces == [SAID[i : i + 10].upper() for i in range(0, len(SAID), 10)]
    assert server.chats[0].body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_a_models_exception_goes_through(perform: Perform, way: str) -> None:
    """What a model of another kind raises, before or after its text, is the cause of an LLMError."""
    with pytest.raises(LLMError, match="OSError: gone") as caught:
        perform(ask(language_model(ScriptedLLM(ScriptedReply("Neil", error=OSError("gone")))), way))
    assert isinstance(caught.value.__cause__, OSError)


def plan(question: str) -> str:
    """Plan."""
    return question


def test_a_tool_is_called(perform: Perform) -> None:
    """A function-calling model's arguments are the reply's; talk is text; nothing, or megabytes, is an error."""
    endless = Sent(tool_calls=[("plan", '{"question": "' + "x" * 200_000 + '"}')])
    with LoopbackOpenAI(['{"question": "Who?"}', "I would rather talk.", Fault.null_content(), endless]) as server:
        model, tool = language_model(server.llm(max_retries=0)), FunctionTool.from_defaults(plan)
        reply, talk = (perform(model.call_tool(ASK, tool, deadline=deadline_after(20))) for _ in range(2))
        assert (reply.tool_arguments, server.chats[0].forced_tool) == ({"question": "Who?"}, "plan")
        assert (talk.text, talk.tool_arguments) == ("I would rather talk.", None)
        for error in ("empty", "longer than 200,000 characters"):
            with pytest.raises(LLMError, match=error):
                perform(model.call_tool(ASK, tool, deadline=deadline_after(20)))


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_long_reply_is_read_off_the_loop(length: int) -> None:
    """Other requests go on while it is parsed, and its deadline holds; a short one needs no thread."""
    on_loop = run(parsed(threading.get_ident, "x" * length)) == threading.get_ident()
    assert on_loop == (length == 10)
    with pytest.raises(ValueError, match="no JSON"):
        run(parsed(lambda: loud("no JSON"), "x" * length))
    if not on_loop:
        with pytest.raises(DeadlineExceededError, match="reading a reply"):
            run(parsed(threading.get_ident, "x" * length, deadline=deadline_after(-1)))


def loud(message: str) -> None:
    raise ValueError(message)


TURN = threading.Event()
"""Set by the event loop while a model computes."""


class Blocking(CustomLLM):
    """A model with sync methods alone, as core's CustomLLM makes it easy to write."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="blocking")

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        assert TURN.wait(20), "the loop stood still"
        return CompletionResponse(text=f"said: {prompt[-4:]}")

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        def tell() -> CompletionResponseGen:
            for text in ("one ", "two"):
                assert TURN.wait(20), "the loop stood still"
                yield CompletionResponse(text=text, delta=text)

        return tell()


async def test_a_model_without_native_async_does_not_block_the_loop() -> None:
    """A model whose async methods are sync ones in disguise is called on a thread."""
    model, loop = language_model(Blocking()), asyncio.get_running_loop()
    replies = []
    for way in ("chat", "stream"):
        TURN.clear()
        loop.call_later(0.05, TURN.set)
        replies.append(await arun(ask(model, way, seconds=60)))
    whole, streamed = replies
    assert whole.text.startswith("said: ")
    assert streamed.text == "one two"
    assert whole.usage == Usage(None, None, calls=1)


def test_which_model_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own argument, else Settings', unless disabled (a MockLLM), else a key's default, else none."""
    assert resolve_llm(None) is None
    assert Settings._llm is None
    llm, mock = ScriptedLLM(), MockLLM()
    Settings.llm = llm
    assert resolve_llm(None) is llm
    assert resolve_llm(mock) is mock
    Settings._llm = MockLLM()
    assert resolve_llm(None) is None
    Settings._llm = None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-the-environment")
    assert isinstance(resolve_llm(None), OpenAI)


def test_a_compatible_models_metadata() -> None:
    """An unknown name has the window and ability it was given, a known one its own; the tokenizer is the global one."""
    unknown = OpenAICompatible(model="my-model", api_key="k", context_window=1_000, is_function_calling_model=True)
    metadata = unknown.metadata
    assert (metadata.context_window, metadata.model_name, metadata.is_chat_model) == (1_000, "my-model", True)
    assert metadata.is_function_calling_model
    assert is_function_calling(unknown)
    default = OpenAICompatible(model="other", api_key="k", max_tokens=7).metadata
    assert (default.context_window, default.num_output, default.is_function_calling_model) == (8_192, 7, False)
    known = OpenAICompatible(model="gpt-4o-mini", api_key="k", context_window=1_000).metadata
    assert (known.context_window, known.is_function_calling_model) == (128_000, True)
    set_global_tokenizer(str.split)
    assert unknown._tokenizer is not None
    assert len(unknown._tokenizer.encode("a b c")) == 3
    with pytest.raises(ValueError, match="context_window"):
        OpenAICompatible(model="my-model", api_key="k", context_window=0)
    for twin in (pickle.loads(pickle.dumps(unknown)), OpenAICompatible.from_dict(unknown.to_dict())):
        assert (type(twin), twin.metadata.context_window) == (OpenAICompatible, 1_000)


def test_hostile_fences_are_read_in_linear_time() -> None:
    """A fence that never closes, before very much white space, ends at once (a lazy pattern took minutes)."""
    hostile = "```json" + "\n" * 200_000
    assert strip_code_fence(hostile) == hostile
    assert strip_code_fence('Here:\n```json\n{"a": 1}\n```') == '\n{"a": 1}\n'
