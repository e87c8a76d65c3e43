from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.response_synthesizers import get_response_synthesizer as cores
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.settings import Settings
from pydantic import BaseModel

import llama_index_agentic_kb.synthesizers as room
from llama_index_agentic_kb._aio import arun, iterate, run
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.llm import billed
from llama_index_agentic_kb.schema import OutputMode
from llama_index_agentic_kb.synthesizers import (
    MODES,
    AnswerSynthesis,
    Compact,
    Generation,
    Refine,
    get_response_synthesizer,
)
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply
from tests.conftest import Serve
from tests.synthesizers.conftest import Nodes, Way

NEED_NODES = sorted(set(MODES) - {"generation"})
NEED_NO_LLM = ["extractiveData", "no_text", "context_only"]


class Capital(BaseModel):
    """A capital city."""

    city: str


@pytest.mark.parametrize("mode", NEED_NODES)
async def test_no_nodes_is_an_empty_response(mode: str, way: Way) -> None:
    """Without nodes no model is asked, and the response is LlamaIndex's."""
    llm = ScriptedLLM([])
    told = await way.ask(get_response_synthesizer(llm, response_mode=mode, streaming=way.streaming), "?", [])
    assert told.text == "Empty Response"
    kinds = {"sync": Response, "async": Response, "stream": StreamingResponse, "astream": AsyncStreamingResponse}
    assert type(told.response) is kinds[way.name]
    assert (told.source_ids, told.metadata) == ([], None)


@pytest.mark.parametrize("mode", sorted(MODES))
async def test_every_mode_keeps_its_nodes(mode: str, way: Way, nodes: Nodes) -> None:
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
    mode: str, way: Way, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
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


async def test_the_given_model_is_never_changed(way: Way, nodes: Nodes) -> None:
    """LlamaIndex writes its callback manager into the model; this doesn't, and both are told."""
    mine, yours = LlamaDebugHandler(print_trace_on_end=False), LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([mine])
    llm = ScriptedLLM("x", callback_manager=manager)
    synthesizer = AnswerSynthesis(llm, callback_manager=CallbackManager([yours]), streaming=way.streaming)
    await way.ask(synthesizer, "?", nodes)
    assert llm.callback_manager is manager
    assert manager.handlers == [mine]
    assert len(mine.get_event_pairs(CBEventType.LLM)) == len(yours.get_event_pairs(CBEventType.LLM)) == 1


def test_prompts_can_be_read_and_replaced(nodes: Nodes) -> None:
    """Under LlamaIndex's keys; what isn't named stays."""
    llm = ScriptedLLM("x")
    synthesizer = Compact(llm)
    assert set(synthesizer.get_prompts()) == {"text_qa_template", "refine_template"}
    before = synthesizer.get_prompts()["refine_template"]
    synthesizer.update_prompts({"text_qa_template": PromptTemplate("Mine: {context_str}"), "other": before})
    assert synthesizer.get_prompts()["refine_template"] == before
    synthesizer.synthesize("?", nodes)
    assert (llm.calls[0][0].content or "").startswith("Mine: [data ")


@pytest.mark.parametrize(
    "mode", ["answerSynthesis", "compact", "refine", "tree_summarize", "simple_summarize", "generation"]
)
def test_a_structured_model_gives_an_object(mode: str, nodes: Nodes, serve: Serve) -> None:
    """``llm.as_structured_llm`` is ``output_cls`` by another name, with a true bill."""
    server = serve('{"city": "Paris"}')
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


class Thing(BaseModel):
    name: str


@pytest.mark.parametrize("mode", [*MODES, *OutputMode, *ResponseMode])
def test_every_mode_has_its_synthesizer(mode: str) -> None:
    """Our names, output modes and LlamaIndex's response modes all make the mode of that name."""
    name = mode.value if isinstance(mode, Enum) else mode
    synthesizer = get_response_synthesizer(ScriptedLLM(), response_mode=mode)
    assert synthesizer.mode == name
    assert type(synthesizer).__name__ in room.__all__


def test_an_unknown_mode_is_refused() -> None:
    """The message lists the known ones."""
    with pytest.raises(
        ConfigurationError, match="'haiku' is unknown; known are extractiveData, answerSynthesis, refine"
    ):
        get_response_synthesizer(ScriptedLLM(), response_mode="haiku")


def test_every_argument_of_llamaindex_is_taken() -> None:
    """By its name; the model comes first here too."""
    named = {*inspect.signature(get_response_synthesizer).parameters, *room.SynthesizerArguments.__annotations__}
    assert next(iter(inspect.signature(cores).parameters)) == "llm"
    assert set(inspect.signature(cores).parameters) <= named


def test_what_a_mode_can_not_do_is_refused() -> None:
    """Rather than ignored."""
    with pytest.raises(ConfigurationError, match="structured_answer_filtering: mode 'accumulate' has no steps"):
        get_response_synthesizer(ScriptedLLM(), response_mode="accumulate", structured_answer_filtering=True)
    with pytest.raises(ConfigurationError, match="output_cls: mode 'extractiveData' makes text only"):
        get_response_synthesizer(response_mode="extractiveData", output_cls=Thing)
    with pytest.raises(ConfigurationError, match="multimodal"):
        get_response_synthesizer(ScriptedLLM(), multimodal=True)
    made = get_response_synthesizer(ScriptedLLM(), response_mode="refine", structured_answer_filtering=True)
    assert made.mode == "refine"


@pytest.mark.parametrize("name", sorted({where.partition(".")[2] for where in MODES.values()}))
def test_classes_take_llama_index_s_arguments(name: str) -> None:
    """Those of its constructors, the first four by position; what is not needed is let go."""
    manager, helper = CallbackManager([]), PromptHelper(context_window=4_000)
    made = getattr(room, name)(
        ScriptedLLM(),
        manager,
        helper,
        None,
        streaming=True,
        use_async=True,
        response_padding_size=5,
        strict_truncation=True,
        chat_content_qa_template=PromptTemplate("x"),
    )
    assert made._streaming
    assert made._prompt_helper is helper
