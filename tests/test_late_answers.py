"""Answers that do not come in time: what arrived is given, status 206, and the answer is named as missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.indices.prompt_helper import PromptHelper
from pydantic import BaseModel

from llama_index_agentic_kb import (
    AgenticStreamingResponse,
    KnowledgeBase,
    KnowledgeSource,
    RetrievalResponse,
    synthesis,
)
from llama_index_agentic_kb.errors import DeadlineExceededError, SynthesisError
from llama_index_agentic_kb.grounding.settings import Grounding
from llama_index_agentic_kb.schema import Outcome
from llama_index_agentic_kb.testing import LoopbackOpenAI, MemoryRetriever, ScriptedLLM, ScriptedReply

TEXTS = ["Rain in Paris.", "Rain in Oslo.", "Rain in Rome."]
HANGS = ScriptedReply("late", latency=60)


class Weather(BaseModel):
    """The weather."""

    rain: bool


def base(reply: Any, texts: list[str] | None = None, **fields: Any) -> KnowledgeBase:
    source = KnowledgeSource("docs", retriever=MemoryRetriever(texts or TEXTS, similarity_top_k=3))
    settings = {"effort": "minimal", "max_runtime_in_seconds": 0.6, **fields}
    return KnowledgeBase([source], llm=ScriptedLLM(reply), **settings)


def missing_answer(response: RetrievalResponse) -> str:
    assert response.status_code == 206
    (part,) = [part for part in response.missing if part.what == "answer"]
    assert part.outcome is Outcome.TIMEOUT
    return part.reason


def first_calls(good: str) -> Callable[[list[ChatMessage]], Any]:
    """A model that reads passages, and hangs where it shall combine or refine what it read."""

    def reply(messages: list[ChatMessage]) -> Any:
        text = str(messages)
        return HANGS if "<partial_answer" in text or "The answer so far" in text else good

    return reply


LONG_TEXTS = [text + " It goes on, and on, and on." * 3 for text in TEXTS]
FIRST = "Rain in Paris [ref_id:0]."


@pytest.mark.parametrize(
    ("mode", "good", "text"),
    [("tree_summarize", "Good.", "Good.\n\nGood.\n\nGood."), ("refine", FIRST, FIRST), ("compact", FIRST, FIRST)],
)
def test_the_partial_answers_of_several_calls_are_kept(mode: str, good: str, text: str) -> None:
    """Whole, streamed, and streamed after the checks: what the first calls answered is the answer."""
    fields: dict[str, Any] = {"response_mode": mode, "prompt_helper": PromptHelper(chunk_size_limit=80)}
    whole = base(first_calls(good), LONG_TEXTS).as_query_engine(**fields).query("Rain?")
    assert "what there was of it" in missing_answer(whole.account)  # type: ignore[union-attr]
    assert str(whole) == text
    streamed = base(first_calls(good), LONG_TEXTS).as_query_engine(streaming=True, **fields).query("Rain?")
    assert isinstance(streamed, AgenticStreamingResponse)
    deltas: list[str] = []
    with pytest.raises(DeadlineExceededError):
        deltas.extend(streamed.response_gen)
    assert "".join(deltas) == text == streamed.account.text
    assert "the text so far" in missing_answer(streamed.account)


def test_accumulated_answers_are_kept() -> None:
    """Those before the one that hangs."""
    kb = base(lambda messages: HANGS if "Rome" in str(messages) else FIRST)
    response = kb.as_query_engine("accumulate").query("Rain?")
    assert missing_answer(response.account)  # type: ignore[union-attr]
    assert "Response 1: Rain" in str(response)
    assert "Response 2: Rain" in str(response)


def test_a_held_stream_that_is_late_is_its_partial_answer() -> None:
    """What is streamed only after the checks is checked and given."""
    kb = base(first_calls(FIRST), LONG_TEXTS, grounding=Grounding(filtering="low"))
    response = kb.as_query_engine("refine", streaming=True).query("Rain?")
    assert isinstance(response, AgenticStreamingResponse)
    assert "".join(response.response_gen) == FIRST
    assert "what there was of it" in missing_answer(response.account)
    assert response.account.grounding is not None


@pytest.mark.parametrize(
    ("grounding", "shown"), [(True, FIRST), (Grounding(filtering="low"), "")], ids=["shown", "held"]
)
def test_a_stream_that_fails_is_named_as_missing(grounding: Grounding | bool, shown: str) -> None:
    """The error is raised to the reader, and stands in the account with the text so far, if no check held it back."""

    def reply(messages: list[ChatMessage]) -> Any:
        return ValueError("boom") if "The answer so far" in str(messages) else FIRST

    kb = base(reply, LONG_TEXTS, max_runtime_in_seconds=20, grounding=grounding)
    response = kb.as_query_engine("refine", streaming=True).query("Rain?")
    assert isinstance(response, AgenticStreamingResponse)
    with pytest.raises(SynthesisError, match="boom"):
        list(response.response_gen)
    [part] = [part for part in response.account.missing if part.what == "answer"]
    assert (part.outcome, response.account.status_code, response.account.text) == (Outcome.ERROR, 206, shown)
    assert "boom" in part.reason


async def test_an_error_of_a_stream_has_the_text_that_was_shown() -> None:
    """Without the markers, if they are stripped."""
    reply = ScriptedReply("Rain in Paris [ref_id:0]. Rain in Oslo [ref_id:1].", chunk_size=30, error=ValueError("boom"))
    kb, shown = base(lambda _: reply, max_runtime_in_seconds=20, grounding=Grounding(markers="strip")), list[object]()

    async def read() -> None:
        async for piece in kb.astream_retrieve("Rain?"):
            shown.append(piece)

    with pytest.raises(SynthesisError, match="boom") as caught:
        await read()
    assert shown
    assert caught.value.partial == "".join(map(str, shown))
    assert "[" not in caught.value.partial


def test_a_part_of_an_object_is_none() -> None:
    """Where an object is wanted, the failure is raised."""
    engine = base(HANGS).as_query_engine(output_cls=Weather)
    with pytest.raises(DeadlineExceededError):
        engine.query("Rain?")
    engine = base(json.dumps({"rain": True}), max_runtime_in_seconds=20).as_query_engine(output_cls=Weather)
    assert isinstance(engine.query("Rain?"), PydanticResponse)


def test_evidence_that_takes_too_long_to_extract_is_named_by_its_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no text, and no exception either."""
    monkeypatch.setattr(synthesis, "EXTRACTING_SECONDS", -1.0)
    response = base(HANGS).retrieve("Rain?")
    assert response.text == ""
    assert "the references name the evidence" in missing_answer(response)
    assert len(response.references) == 3
    assert (
        str(base(HANGS).as_chat_engine().chat("Rain?")) == "The answer was not there in time. The sources are listed."
    )


def test_searching_that_takes_its_time_leaves_the_extracts_theirs() -> None:
    """Without a model, what comes after searching has no earlier deadline than the request's."""
    slow = KnowledgeSource("slow", retriever=MemoryRetriever(TEXTS, latency=60))
    source = KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))
    kb = KnowledgeBase([slow, source], effort="minimal", output_mode="extractiveData", max_runtime_in_seconds=1.0)
    response = kb.retrieve("Rain?")
    assert {part.what for part in response.missing} == {"slow"}
    assert response.extracts


@pytest.mark.parametrize("mode", ["compact", "refine"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_reply_without_end_is_cut(mode: str, *, streaming: bool) -> None:
    """A million characters are not read: the answer is what came first, it is named as cut, and the loop goes on."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticker = asyncio.create_task(tick())
    engine = base("rain falls " * 100_000, max_runtime_in_seconds=600).as_query_engine(mode, streaming=streaming)
    response: Any = await engine.aquery("Rain?")
    if streaming:
        text = "".join([delta async for delta in response.async_response_gen()])
    else:
        text = str(response)
        assert [part.what for part in response.account.missing] == ["answer"]
    ticker.cancel()
    assert 100_000 < len(text) <= 250_000
    assert ticks > 0


async def test_a_stream_that_brought_nothing_is_the_evidence() -> None:
    """Late or of a server that is gone; in a chat it is text."""
    with LoopbackOpenAI("x") as server:
        gone = KnowledgeBase([*base("").sources.values()], llm=server.llm(max_retries=0), effort="minimal")
    for kb in (base(HANGS), gone):
        response = kb.as_query_engine(streaming=True).query("Rain?")
        assert isinstance(response, AgenticStreamingResponse)
        extracts = json.loads("".join(response.response_gen))
        assert [extract["content"] for extract in extracts] == TEXTS
        assert response.account.status_code == 206
        chat = kb.as_chat_engine()
        assert "".join(chat.stream_chat("Rain?").response_gen).count("\nRain in ") == 3
