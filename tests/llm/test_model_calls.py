"""Calls of language models: whole, streamed and with tools, retried here alone, ended with their deadline, bounded."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import CustomLLM, MockLLM
from llama_index.core.tools import FunctionTool
from llama_index.core.utils import get_tokenizer, set_global_tokenizer
from llama_index.llms.openai import OpenAI

from llama_index_agentic_kb import OpenAICompatible
from llama_index_agentic_kb._aio import Call, aiterate, arun, cancel, deadline_after, iterate, run, start
from llama_index_agentic_kb.errors import DeadlineExceededError, LLMError
from llama_index_agentic_kb.guard.resilience import Permit, RetryPolicy
from llama_index_agentic_kb.llm import (
    MAX_PIECE,
    LanguageModel,
    ThoughtFilter,
    Usage,
    calls,
    is_function_calling,
    parsed,
    resolve_llm,
    strip_code_fence,
)
from llama_index_agentic_kb.testing import LoopbackOpenAI, Reply, ScriptedLLM, ScriptedReply
from tests.faulty_server import Fault

ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Who was first on the moon?")]
SAID = "Neil Armstrong, in July 1969, with Buzz Aldrin after him."
QUICK = RetryPolicy(first_wait=0.01, max_wait=0.02)

Perform = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(autouse=True)
def tokenizer_as_it_was() -> Iterator[None]:
    tokenizer = get_tokenizer()
    yield
    set_global_tokenizer(tokenizer)


def model_of(llm: Any) -> LanguageModel:
    manager = CallbackManager()
    return LanguageModel(llm, lambda: manager, retries=QUICK)


def ask(model: LanguageModel, way: str = "chat", seconds: float = 30) -> Coroutine[Any, Any, Any]:
    return (model.chat if way == "chat" else model.stream)(ASK, deadline=deadline_after(seconds))


class RetriesItself(ScriptedLLM):
    """A model of another kind, whose client has retries of its own."""

    max_retries: int = 3


def test_a_model_that_retries_itself_is_left_to_it(perform: Perform) -> None:
    """Ours around its own would multiply; a model without any is retried here."""

    def gone(_: Any) -> Exception:
        return ConnectionError("gone")

    own, none = RetriesItself(gone), ScriptedLLM(gone)  # type: ignore[call-arg]  # pydantic's plugin sees the field alone
    for llm in (own, none):
        with pytest.raises(LLMError, match="ConnectionError: gone"):
            perform(ask(model_of(llm)))
    assert (len(own.calls), len(none.calls)) == (1, 3)


def test_settings_of_the_users_client_hold(perform: Perform) -> None:
    """Headers, authentication and event hooks of an ``http_client`` of the user's own are applied, once."""
    hooked: list[str] = []
    with LoopbackOpenAI(SAID) as server:
        theirs = httpx.Client(
            headers={"x-team": "blue"},
            params={"region": "eu"},
            event_hooks={"request": [lambda request: hooked.append(str(request.url))]},
        )
        llm = server.llm(http_client=theirs, default_headers={"x-app": "kb"})
        run(ask(model_of(llm)))
        perform(ask(model_of(llm)))
        headers = server.requests[0].headers
        assert (headers["x-team"], headers["x-app"]) == ("blue", "kb")
        assert hooked[0].count("region=eu") == 1
        theirs.close()


def test_one_model_has_one_bulkhead() -> None:
    """Whoever uses it; it goes with the model's object."""
    llm = ScriptedLLM(SAID)
    first, second = model_of(llm), model_of(llm)
    assert first._calls is second._calls
    assert model_of(ScriptedLLM(SAID))._calls is not first._calls
    known = id(llm)
    del llm, first, second
    gc.collect()
    assert known not in calls._CALLS


CASES = [
    ("<think>\nHm, [ref_id:9].\n</think>\n\nIt was tall.", "It was tall."),
    ("<THINKING>a</thinking>It <reasoning>b</reasoning>was.", "It was."),
    ("thoughts that began in the prompt</think>\nIt was.", "It was."),
    ("<think></think>It was.", "It was."),
    ("<think>it never ends", ""),
    ("The tag `<think>` opens, `</think>` closes.", "The tag `<think>` opens, `</think>` closes."),
    ("a < b <thin", "a < b <thin"),
    ("  It was.", "  It was."),
    ("<think>a <b> </thought> c</think>It was.", "It was."),
    ("İstanbul ve İzmir: <think>İİ</think>Cevap 42", "İstanbul ve İzmir: Cevap 42"),  # in lower case İ is two signs
]


@pytest.mark.parametrize(("text", "shown"), CASES)
def test_thoughts_are_left_out_of_a_reply(text: str, shown: str) -> None:
    """Blocks of any name, in any case, not closed, not opened; what is no block stays."""
    thoughts = ThoughtFilter()
    assert thoughts.feed(text, final=True) == shown


@given(st.sampled_from([case for case in CASES if "prompt" not in case[0]]), st.lists(st.integers(0, 60), max_size=20))
def test_a_stream_is_the_same(case: tuple[str, str], places: list[int]) -> None:
    """However it is cut."""
    text, shown = case
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    thoughts = ThoughtFilter()
    assert (
        "".join(thoughts.feed(text[start:end]) for start, end in pairwise(bounds)) + thoughts.feed("", final=True)
        == shown
    )


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_a_server_that_reports_nothing(perform: Perform, way: str) -> None:
    """Where a server says no counts, they are None: never a guess, and never nought."""
    with LoopbackOpenAI(Reply(SAID, report_usage=False)) as server:
        reply = perform(ask(model_of(server.llm()), way))
    assert reply.usage == Usage(None, None, calls=1)


@pytest.mark.parametrize("said", [SAID, "a" * 3 * MAX_PIECE], ids=["short", "long"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_tells_its_pieces(is_async: bool, said: str) -> None:
    """Each piece is emitted as it comes, a long one in parts that don't hold up the loop, by the caller's function."""
    size = 10 if said is SAID else MAX_PIECE
    with LoopbackOpenAI(Reply(said, chunk_size=10 if said is SAID else len(said))) as server:
        flow = model_of(server.llm()).stream(ASK, deadline=deadline_after(20), through=str.upper)

        async def read() -> list[str]:
            return [item async for item in aiterate(flow)]

        pieces = asyncio.run(read()) if is_async else list(iterate(flow))
    assert pieces == [said[i : i + size].upper() for i in range(0, len(said), size)]
    assert server.chats[0].body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_a_models_exception_goes_through(perform: Perform, way: str) -> None:
    """What a model of another kind raises, before or after its text, is the cause of an LLMError."""
    with pytest.raises(LLMError, match="OSError: gone") as caught:
        perform(ask(model_of(ScriptedLLM(ScriptedReply("Neil", error=OSError("gone")))), way))
    assert isinstance(caught.value.__cause__, OSError)


def plan(question: str) -> str:
    """Plan."""
    return question


def test_a_stream_that_was_never_begun_says_so(perform: Perform) -> None:
    """At its deadline it still waits for a place."""
    model = model_of(llm := ScriptedLLM(SAID))
    model._calls.bulkhead.max_concurrency = 1
    model._calls.bulkhead.held.add(Permit())
    with pytest.raises(DeadlineExceededError, match=r"was not begun by its deadline$"):
        perform(ask(model, "stream", seconds=0.1))
    assert llm.calls == []


def test_a_stream_read_to_its_end_keeps_its_connection(monkeypatch: pytest.MonkeyPatch, perform: Perform) -> None:
    """It is not hung up, which would end the next call on the same connection."""
    hung = list[object]()
    monkeypatch.setattr(calls._SocketPermit, "hang_up", hung.append)
    with LoopbackOpenAI([SAID] * 20) as server:
        model = model_of(server.llm())
        assert [perform(ask(model, "stream")).text for _ in range(20)] == [SAID] * 20
    assert hung == []


def test_a_stream_that_nobody_waits_for_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread begins after it was closed, and before the event loop has cancelled the call."""
    begins, goes, tried, refused = threading.Event(), threading.Event(), threading.Event(), []
    enter, hang_up = Permit.__enter__, calls._SocketPermit.hang_up

    def enter_late(permit: Permit) -> None:
        begins.set()
        goes.wait(10)
        try:
            enter(permit)
        except DeadlineExceededError as error:
            refused.append(str(error))
            raise
        finally:
            tried.set()

    def hang_up_early(permit: Any) -> None:
        hang_up(permit)
        goes.set()
        assert tried.wait(10)

    async def leave(model: LanguageModel) -> None:
        job = start(ask(model, "stream"))
        await Call(sync=lambda: begins.wait(10))
        await cancel(job)

    monkeypatch.setattr(Permit, "__enter__", enter_late)
    monkeypatch.setattr(calls._SocketPermit, "hang_up", hang_up_early)
    run(leave(model_of(ScriptedLLM(SAID))))
    assert refused == ["given up before it was begun"]


def test_a_tool_is_called(perform: Perform) -> None:
    """A function-calling model's arguments are the reply's; talk is text; nothing, or megabytes, is an error."""
    endless = Reply(tool_calls=[("plan", '{"question": "' + "x" * 200_000 + '"}')])
    with LoopbackOpenAI(['{"question": "Who?"}', "I would rather talk.", Fault.null_content(), endless]) as server:
        model, tool = model_of(server.llm(max_retries=0)), FunctionTool.from_defaults(plan)
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
    model, loop = model_of(Blocking()), asyncio.get_running_loop()
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
