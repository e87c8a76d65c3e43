from __future__ import annotations

import copy
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
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


async def test_all_four_ways_say_the_same() -> None:
    """Chat and streams, sync and async, return the content and report its usage."""
    llm = ScriptedLLM(ScriptedReply("It's me", chunk_size=3))

    for response in (llm.chat(ASK), await llm.achat(ASK)):
        assert (response.message.content, response.raw) == ("It's me", USAGE)
    for stream in (list(llm.stream_chat(ASK)), [r async for r in await llm.astream_chat(ASK)]):
        assert [response.delta for response in stream] == ["It'", "s m", "e"]
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


def test_copies_share_script_and_record() -> None:
    """Shallow and deep copies consume the same list and fill the same record."""
    llm = ScriptedLLM(["one", "two", "three"], model_name="twin")
    copies = [llm.model_copy(), llm.model_copy(deep=True), copy.deepcopy(llm)]

    assert [twin.complete("?").text for twin in copies] == ["one", "two", "three"]
    assert len(llm.calls) == 3
    assert copies[0].metadata.model_name == "twin"


def test_structured_prediction_reads_json_from_the_text() -> None:
    """Without functions, LlamaIndex parses the text itself."""
    llm = ScriptedLLM('{"name": "Paris"}')
    assert llm.structured_predict(City, PromptTemplate("{q}"), q="Which?") == City(name="Paris")


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
