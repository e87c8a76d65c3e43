from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.settings import Settings
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, PrivateAttr

from llama_index_agentic_kb._aio import arun, iterate, run
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.llm import billed
from llama_index_agentic_kb.synthesizers import (
    MODES,
    AnswerSynthesis,
    Compact,
    Generation,
    Refine,
    get_response_synthesizer,
)
from llama_index_agentic_kb.testing import LoopbackOpenAI, ScriptedLLM, ScriptedReply

Nodes = list[NodeWithScore]
Servers = Callable[[Any], LoopbackOpenAI]
NEED_NODES = sorted(set(MODES) - {"generation"})
NEED_NO_LLM = ["extractiveData", "no_text", "context_only"]


class Capital(BaseModel):
    """A capital city."""

    city: str


class Events(BaseEventHandler):
    """Collects events."""

    _seen: list[BaseEvent] = PrivateAttr(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "events"

    def handle(self, event: BaseEvent, **_kwargs: Any) -> None:
        self._seen.append(event)

    def named(self, name: str) -> list[Any]:
        return [event for event in self._seen if event.class_name() == name]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    handler = Events()
    root = get_dispatcher()
    monkeypatch.setattr(root, "event_handlers", [*root.event_handlers, handler])
    return handler


@pytest.mark.parametrize("mode", NEED_NODES)
async def test_no_nodes_is_an_empty_response(mode: str, way: Any) -> None:
    """Without nodes no model is asked, and the response is LlamaIndex's."""
    llm = ScriptedLLM([])
    told = await way.ask(get_response_synthesizer(llm, response_mode=mode, streaming=way.streaming), "?", [])
    assert told.text == "Empty Response"
    kinds = {"sync": Response, "async": Response, "stream": StreamingResponse, "astream": AsyncStreamingResponse}
    assert type(told.response) is kinds[way.name]
    assert (told.source_ids, told.metadata) == ([], None)


@pytest.mark.parametrize("mode", sorted(MODES))
async def test_every_mode_keeps_its_nodes(mode: str, way: Any, nodes: Nodes) -> None:
    """Source nodes stand in the order of reference numbers, further ones behind them, each with its metadata."""
    llm = ScriptedLLM("Answer [ref_id:0].")
    synthesizer = get_response_synthesizer(llm, response_mode=mode, streaming=way.streaming)
    more = [NodeWithScore(node=TextNode(text="More.", id_="more", metadata={"file_name": "a.txt"}))]
    told = await way.ask(synthesizer, "?", nodes, additional_source_nodes=more)
    assert told.source_ids == ["n0", "n1", "n2", "more"]
    assert told.response.metadata == {"n0": {}, "n1": {}, "n2": {}, "more": {"file_name": "a.txt"}}
    assert "More." not in str(llm.calls)


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("streaming", [False, True])
async def test_what_is_emitted_is_the_text(mode: str, streaming: bool, nodes: Nodes) -> None:
    """A flow's deltas together are its text, in every mode; without streaming there are none."""
    llm = ScriptedLLM(ScriptedReply("An answer [ref_id:0][ref_id:77] of some length.", chunk_size=3))
    synthesizer = get_response_synthesizer(llm, response_mode=mode, streaming=streaming)
    text = run(synthesizer.synthesis(QueryBundle("?"), nodes)).text
    assert (await arun(synthesizer.synthesis(QueryBundle("?"), nodes))).text == text
    deltas = list(iterate(synthesizer.synthesis(QueryBundle("?"), nodes)))
    assert "".join(deltas) == (text if streaming else "")
    assert "77" not in text


@pytest.mark.parametrize("mode", NEED_NO_LLM)
async def test_modes_without_a_model_never_ask_for_one(
    mode: str, way: Any, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They work without a key, and don't touch ``Settings.llm``."""

    def refuse(_: Any) -> None:
        raise AssertionError("Settings.llm was asked for")

    monkeypatch.setattr(type(Settings), "llm", property(refuse))
    synthesizer = get_response_synthesizer(response_mode=mode, streaming=way.streaming)
    assert (await way.ask(synthesizer, "?", nodes)).source_ids == ["n0", "n1", "n2"]
    assert synthesizer.needs_llm is False


def test_a_missing_model_is_told_of() -> None:
    """Without a key, a mode that needs a model says so when it is made."""
    with pytest.raises(ConfigurationError, match="mode 'compact' needs a language model"):
        Compact()


def test_the_settings_model_is_used(nodes: Nodes) -> None:
    """As in LlamaIndex, also the mock that stands for none."""
    Settings.llm = ScriptedLLM("Set.")
    assert str(Compact().synthesize("?", nodes)) == "Set."
    Settings.llm = None
    assert isinstance(Settings.llm, MockLLM)
    assert "Why not?" in str(Generation().synthesize("Why not?", nodes))


async def test_the_given_model_is_never_changed(way: Any, nodes: Nodes) -> None:
    """LlamaIndex writes its callback manager into the model; this doesn't, and both are told."""
    mine, yours = LlamaDebugHandler(print_trace_on_end=False), LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([mine])
    llm = ScriptedLLM("x", callback_manager=manager)
    synthesizer = AnswerSynthesis(llm, callback_manager=CallbackManager([yours]), streaming=way.streaming)
    await way.ask(synthesizer, "?", nodes)
    assert llm.callback_manager is manager
    assert manager.handlers == [mine]
    assert len(mine.get_event_pairs(CBEventType.LLM)) == len(yours.get_event_pairs(CBEventType.LLM)) == 1


async def test_synthesize_is_the_parent_of_its_calls(way: Any, nodes: Nodes) -> None:
    """One SYNTHESIZE event a synthesis, with question and response, above every call of the model."""
    debug = LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([debug])
    parents: dict[str, str] = {}

    class Parents(LlamaDebugHandler):
        def on_event_start(
            self, event_type: Any, payload: Any = None, event_id: str = "", parent_id: str = "", **kwargs: Any
        ) -> str:
            parents[event_id] = parent_id
            return event_id

    manager.add_handler(Parents(print_trace_on_end=False))
    synthesizer = Refine(ScriptedLLM("x"), callback_manager=manager, streaming=way.streaming)
    told = await way.ask(synthesizer, "Why?", nodes)

    ((start, end),) = debug.get_event_pairs(CBEventType.SYNTHESIZE)
    assert (start.payload or {})["query_str"] == "Why?"
    assert str((end.payload or {})["response"]) == told.text
    calls = debug.get_event_pairs(CBEventType.LLM)
    assert len(calls) == 3
    assert {parents[pair[0].id_] for pair in calls} == {start.id_}


@pytest.mark.parametrize("mode", ["refine", "compact", "tree_summarize", "answerSynthesis"])
async def test_the_dispatchers_events_are_cores(mode: str, way: Any, nodes: Nodes, events: Events) -> None:
    """Synthesize events in every mode, get-response events where LlamaIndex has them."""
    synthesizer = get_response_synthesizer(ScriptedLLM("x"), response_mode=mode, streaming=way.streaming)
    told = await way.ask(synthesizer, "Why?", nodes)
    (start,), (end,) = events.named("SynthesizeStartEvent"), events.named("SynthesizeEndEvent")
    assert start.query == "Why?"
    assert end.response == told.response
    assert start.span_id == end.span_id
    assert (start.span_id or "").startswith(
        type(synthesizer).__name__ + (".asynthesize" if way.name[0] == "a" else ".synth")
    )
    chunks = [event.text_chunks for event in events.named("GetResponseStartEvent")]
    assert [len(texts) for texts in chunks] == {"refine": [3], "compact": [1]}.get(mode, [])
    assert len(events.named("GetResponseEndEvent")) == len(chunks)


def test_prompts_can_be_read_and_replaced(nodes: Nodes) -> None:
    """Under LlamaIndex's keys; what isn't named stays."""
    llm = ScriptedLLM("x")
    synthesizer = Compact(llm)
    assert set(synthesizer.get_prompts()) == {"text_qa_template", "refine_template"}
    before = synthesizer.get_prompts()["refine_template"]
    synthesizer.update_prompts({"text_qa_template": PromptTemplate("Mine: {context_str}"), "other": before})
    assert synthesizer.get_prompts()["refine_template"] == before
    assert set(synthesizer.get_prompts()) == {"text_qa_template", "refine_template"}
    synthesizer.synthesize("?", nodes)
    assert (llm.calls[0][0].content or "").startswith("Mine: [data ")
    assert Compact(ScriptedLLM()).get_prompts()["text_qa_template"] != synthesizer.get_prompts()["text_qa_template"]


@pytest.mark.parametrize(
    "mode", ["answerSynthesis", "compact", "refine", "tree_summarize", "simple_summarize", "generation"]
)
def test_a_structured_model_gives_an_object(mode: str, nodes: Nodes, server_of: Servers) -> None:
    """``llm.as_structured_llm`` is ``output_cls`` by another name, with a true bill."""
    server = server_of('{"city": "Paris"}')
    synthesizer = get_response_synthesizer(server.llm().as_structured_llm(Capital), response_mode=mode)
    response = synthesizer.synthesize("?", nodes)
    assert response.response == Capital(city="Paris")  # type: ignore[union-attr]
    with billed() as bill:
        made = run(synthesizer.synthesis(QueryBundle("?"), nodes))
    assert made.output == Capital(city="Paris")
    assert made.text == '{"city":"Paris"}'
    assert bill.calls * 2 == server.billed.calls
    assert (bill.input_tokens or 0) * 2 == server.billed.prompt_tokens


async def test_strings_are_answered_from_in_every_way(nodes: Nodes) -> None:
    """``get_response`` serves LlamaIndex callers without nodes."""
    llm = ScriptedLLM("Paris [ref_id:1].")
    assert AnswerSynthesis(llm).get_response("?", ["a", "b"]) == "Paris [ref_id:1]."
    assert await AnswerSynthesis(llm).aget_response("?", ["a", "b"]) == "Paris [ref_id:1]."
    streamed: Any = AnswerSynthesis(llm, streaming=True).get_response("?", ["a"])
    assert "".join(streamed) == "Paris."
    streamed = await AnswerSynthesis(llm, streaming=True).aget_response("?", ["a", "b"])
    assert "".join([delta async for delta in streamed]) == "Paris [ref_id:1]."
    structured = AnswerSynthesis(ScriptedLLM('{"city": "Rome"}'), output_cls=Capital)
    assert structured.get_response("?", ["a"]) == Capital(city="Rome")
    assert await structured.aget_response("?", ["a"]) == Capital(city="Rome")


def test_an_unread_stream_asks_nothing(nodes: Nodes) -> None:
    """A streamed response's model is called when its tokens are read."""
    llm = ScriptedLLM("x")
    response: Any = AnswerSynthesis(llm, streaming=True).synthesize("?", nodes)
    assert llm.calls == []
    assert str(response) == "x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"multimodal": True}, "multimodal: not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens must be above 0"),
        ({"program_factory": lambda prompt: prompt}, "program_factory: not supported without"),
        (
            {"summary_template": PromptTemplate("x")},
            "mode 'refine' has no summary_template; its templates: text_qa_template, refine_template",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    """The message names the argument."""
    with pytest.raises(ConfigurationError, match=message):
        Refine(ScriptedLLM(), **arguments)
