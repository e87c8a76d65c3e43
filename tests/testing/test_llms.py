from __future__ import annotations

import asyncio
import copy
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, PrivateAttr

from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply, ScriptExhaustedError

ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Who?")]
USAGE = {"usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}}


class City(BaseModel):
    """A city."""

    name: str


class Names(BaseEventHandler):
    """Collects the class names of events."""

    _seen: list[str] = PrivateAttr(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "names"

    def handle(self, event: BaseEvent, **_kwargs: Any) -> None:
        self._seen.append(event.class_name())


def told(responses: list[ChatResponse]) -> list[str]:
    return [response.delta or "" for response in responses]


async def test_all_four_ways_say_the_same() -> None:
    """Chat and streams, sync and async, tell the content and report its usage."""
    llm = ScriptedLLM(ScriptedReply("It's me", chunk_size=3))

    for response in (llm.chat(ASK), await llm.achat(ASK)):
        assert (response.message.content, response.raw) == ("It's me", USAGE)
    for stream in (list(llm.stream_chat(ASK)), [r async for r in await llm.astream_chat(ASK)]):
        assert told(stream) == ["It'", "s m", "e"]
        assert stream[-1].message.content == "It's me"
        assert [r.raw for r in stream] == [None, None, USAGE]
    assert len(llm.calls) == 4


async def test_completions_are_one_user_message() -> None:
    """Completions, sync and async, whole and streamed, are recorded as one user message."""
    llm = ScriptedLLM("Yes.")

    assert llm.complete("Sure?").text == "Yes."
    assert (await llm.acomplete("Sure?")).text == "Yes."
    assert list(llm.stream_complete("Sure?"))[-1].text == "Yes."
    assert [r.text async for r in await llm.astream_complete("Sure?")] == ["Yes."]
    assert [(m.role.value, m.content) for call in llm.calls for m in call] == [("user", "Sure?")] * 4


def test_a_list_is_consumed() -> None:
    """A list answers in order, raises its exceptions, and then refuses."""
    llm = ScriptedLLM(["one", ValueError("two")])

    assert llm.complete("?").text == "one"
    with pytest.raises(ValueError, match="two"):
        llm.complete("?")
    with pytest.raises(ScriptExhaustedError, match="2 replies"):
        llm.complete("?")


def test_a_callable_sees_the_messages() -> None:
    """A callable answers by the messages it is given."""
    llm = ScriptedLLM(lambda messages: f"{len(messages)} messages")
    assert llm.chat(ASK).message.content == "2 messages"


async def test_streams_raise_when_read() -> None:
    """A stream raises its error after its content, and not before it is read."""
    llm = ScriptedLLM([ScriptedReply("half", error=OSError("gone"), chunk_size=2), OSError("gone"), OSError("gone")])

    pieces: list[str] = []
    stream = llm.stream_chat(ASK)
    with pytest.raises(OSError, match="gone"):
        pieces.extend(r.delta or "" for r in stream)
    assert pieces == ["ha", "lf"]
    empty = llm.stream_chat(ASK)
    with pytest.raises(OSError, match="gone"):
        next(empty)
    last = await llm.astream_chat(ASK)
    with pytest.raises(OSError, match="gone"):
        await anext(last)


def test_an_empty_answer_is_one_empty_piece() -> None:
    """A stream of nothing still reports its usage."""
    (only,) = ScriptedLLM("").stream_chat(ASK)
    assert only.delta == ""
    assert only.raw is not None


async def test_latency_does_not_block_the_loop() -> None:
    """Async calls overlap; sync calls sleep; chunk delays come between pieces."""
    llm = ScriptedLLM(ScriptedReply("abcd", latency=0.2, chunk_delay=0.1, chunk_size=2))

    started = time.monotonic()
    await asyncio.gather(*(llm.achat(ASK) for _ in range(10)))
    assert 0.2 <= time.monotonic() - started < 1.5
    started = time.monotonic()
    list(llm.stream_chat(ASK))
    assert time.monotonic() - started >= 0.3
    started = time.monotonic()
    llm.chat(ASK)
    assert time.monotonic() - started >= 0.2


def test_copies_share_script_and_record() -> None:
    """Shallow and deep copies consume the same list and fill the same record."""
    llm = ScriptedLLM(["one", "two", "three"], model_name="twin")
    copies = [llm.model_copy(), llm.model_copy(deep=True), copy.deepcopy(llm)]

    assert [twin.complete("?").text for twin in copies] == ["one", "two", "three"]
    assert len(llm.calls) == 3
    assert copies[0].metadata.model_name == "twin"


def test_threads_share_a_list() -> None:
    """Each reply of a list is given once, however many threads ask."""
    llm = ScriptedLLM([str(n) for n in range(200)])
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda _: llm.complete("?").text, range(200))
        assert sorted(map(int, answers)) == list(range(200))
    assert len(llm.calls) == 200


def test_the_record_is_a_copy() -> None:
    """Messages changed after the call stay as they were in the record."""
    llm = ScriptedLLM()
    message = ChatMessage(role="user", content="before")
    llm.chat([message])
    message.content = "after"
    assert llm.calls[0][0].content == "before"


def test_metadata() -> None:
    """The metadata tell what was set, of a chat model without functions."""
    metadata = ScriptedLLM(context_window=100, num_output=10, model_name="m").metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (100, 10, "m")
    assert (metadata.is_chat_model, metadata.is_function_calling_model) == (True, False)


def test_structured_prediction_reads_json_from_the_text() -> None:
    """Without functions, LlamaIndex parses the text itself."""
    llm = ScriptedLLM('{"name": "Paris"}')
    assert llm.structured_predict(City, PromptTemplate("{q}"), q="Which?") == City(name="Paris")


def test_synthesizers_accept_it() -> None:
    """A response synthesizer of LlamaIndex runs on it."""
    llm = ScriptedLLM("Rain.")
    answer = get_response_synthesizer(llm=llm).get_response("Weather?", ["It rains."])
    assert answer == "Rain."
    assert any("It rains." in (message.content or "") for message in llm.calls[0])


async def test_callbacks_and_events_fire() -> None:
    """Callback handlers and the dispatcher see each call, its pieces and its end."""
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = ScriptedLLM(ScriptedReply("abcd", chunk_size=2), callback_manager=CallbackManager([debug]))
    names = Names()
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(names)
    try:
        llm.chat(ASK)
        await llm.achat(ASK)
        list(llm.stream_chat(ASK))
        async for _ in await llm.astream_chat(ASK):
            pass
    finally:
        dispatcher.event_handlers.remove(names)

    assert len(debug.get_event_pairs(CBEventType.LLM)) == 4
    whole = ["LLMChatStartEvent", "LLMChatEndEvent"]
    streamed = ["LLMChatStartEvent", "LLMChatInProgressEvent", "LLMChatInProgressEvent", "LLMChatEndEvent"]
    assert names._seen == whole * 2 + streamed * 2


def test_reply_checks_its_piece_size() -> None:
    """A piece size below one is refused."""
    with pytest.raises(ValueError, match="chunk_size"):
        ScriptedReply("Hi", chunk_size=0)
