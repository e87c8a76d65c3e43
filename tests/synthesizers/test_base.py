"""What all synthesizers share: arguments, LlamaIndex's methods, objects as replies, extracts, what fits a prompt."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.response_synthesizers import get_response_synthesizer as cores
from llama_index.core.response_synthesizers.context_only import ContextOnly as CoresContextOnly
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.settings import Settings
from pydantic import AfterValidator, BaseModel, Field

from llama_index_agentic_kb._aio import arun, iterate, run
from llama_index_agentic_kb.errors import ConfigurationError, LLMError, SynthesisError
from llama_index_agentic_kb.grounding.citations import AnswerRules, CheckedText
from llama_index_agentic_kb.llm import LanguageModel, Reply, Usage, billed, count_tokens
from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.schema import OutputMode, RetrievalResponse
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.synthesizers import MODES, AgenticSynthesizer, Synthesis, get_response_synthesizer
from llama_index_agentic_kb.synthesizers.draft import ask_object, read_object, strict_schema
from llama_index_agentic_kb.synthesizers.modes import (
    AnswerSynthesis,
    Compact,
    ContextOnly,
    ExtractiveData,
    Generation,
    Refine,
    SimpleSummarize,
)
from llama_index_agentic_kb.synthesizers.passages import Packed, cost, fit, pack, share, singly
from llama_index_agentic_kb.testing import Reply as Sent
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply
from tests.conftest import Serve
from tests.faulty_server import Fault
from tests.synthesizers.conftest import Nodes, Way, make_nodes

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
    asked = None if mode in NEED_NO_LLM else llm  # these work without a model, and there is no key
    synthesizer = get_response_synthesizer(asked, response_mode=mode, streaming=way.streaming)
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
    ("mode", "arguments", "message"),
    [
        ("haiku", {}, "'haiku' is unknown; known are extractiveData, answerSynthesis, refine"),
        ("compact", {"llm": None}, "mode 'compact' needs a language model"),
        ("refine", {"multimodal": True}, "multimodal: not supported"),
        ("refine", {"max_output_tokens": 0}, "max_output_tokens must be above 0"),
        ("refine", {"program_factory": lambda prompt: prompt}, "program_factory: not supported without"),
        ("accumulate", {"structured_answer_filtering": True}, "filtering: mode 'accumulate' has no steps"),
        ("extractiveData", {"output_cls": Capital}, "output_cls: mode 'extractiveData' makes text only"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(mode: str, arguments: dict[str, Any], message: str) -> None:
    """The message names the argument, and lists the known ones."""
    with pytest.raises(ConfigurationError, match=message):
        get_response_synthesizer(**{"llm": ScriptedLLM(), "response_mode": mode, **arguments})
    with pytest.raises(ConfigurationError, match="mode 'refine' has no summary_template; its templates: text_qa_te"):
        Refine(ScriptedLLM(), summary_template=PromptTemplate("x"))


def test_what_is_no_model_is_named() -> None:
    """It is not said that none was passed."""
    with pytest.raises(ConfigurationError, match=r"expected an LLM of LlamaIndex, as .*, got str"):
        AnswerSynthesis("gpt-4o")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [*MODES, *OutputMode, *ResponseMode])
def test_every_mode_has_its_synthesizer(mode: str) -> None:
    """Our names, output modes and LlamaIndex's response modes all make the mode of that name."""
    name = mode.value if isinstance(mode, Enum) else mode
    synthesizer = get_response_synthesizer(ScriptedLLM(), response_mode=mode)
    assert synthesizer.mode == name
    assert type(synthesizer) is MODES[name]


def signature_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_every_argument_of_llamaindex_is_taken() -> None:
    """By its name; the model comes first here too."""
    templates = {key for mode in MODES.values() for key in mode.default_templates}
    ignored = {"chat_content_qa_template", "chat_content_refine_template", "chat_summary_template"}
    named = {*signature_of(get_response_synthesizer), *signature_of(AgenticSynthesizer), *templates, *ignored}
    assert signature_of(cores)[0] == "llm"
    assert set(signature_of(cores)) <= named


@pytest.mark.parametrize("mode", sorted(MODES))
def test_classes_take_llama_index_s_arguments(mode: str) -> None:
    """Those of its constructors, the first four by position; what is not needed is let go."""
    manager, helper = CallbackManager([]), PromptHelper(context_window=4_000)
    made = MODES[mode](
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


class River(BaseModel):
    """A river."""

    name: str
    length: int = Field(default=0, description="Kilometres.")


class City(BaseModel):
    """A city."""

    name: str
    rivers: list[River] = []
    title: str | None = None


class Loose(BaseModel):
    facts: dict[str, int]


PARIS = City(name="Paris", rivers=[River(name="Seine", length=777)])
JSON = '{"name": "Paris", "rivers": [{"name": "Seine", "length": 777}]}'


@pytest.mark.parametrize(
    "text",
    [
        JSON, f"Sure, here it is:\n```json\n{JSON}\n```\nAnything else?", f"The object: {JSON} I hope it helps.",
        f'{{"City": {JSON}}}', f"[{JSON}]", JSON[:-1], JSON.replace('"', "'"),
        '{"name": "Paris", "rivers": [{"name": "Seine", "length": "777"}],}',
    ],
)  # fmt: skip
def test_an_object_is_read_however_it_is_wrapped(text: str) -> None:
    """Preamble, fences, lists, a wrapper or broken JSON don't hide it."""
    assert read_object(Reply(text), City, AnswerRules()) == (PARIS, CheckedText(""))


@pytest.mark.parametrize(
    ("text", "why"), [("Paris.", "no JSON object"), ('{"city": "Paris"}', "name: Field required"), ("[1]", "no JSON")]
)
def test_what_is_no_object_is_an_error(text: str, why: str) -> None:
    """The error says why, quotes the reply and holds the bill."""
    with pytest.raises(LLMError, match=f"the model's reply is no City .*{why}") as caught:
        read_object(Reply(text, Usage(1, 2, 1)), City, AnswerRules())
    assert caught.value.usage == Usage(1, 2, 1)


class Strict(BaseModel):
    """A class whose validator has a fault."""

    name: Annotated[str, AfterValidator({"Rome": "Roma"}.__getitem__)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"name": "Paris"}', "KeyError: 'Paris'"),
        ('{"name": ' + "[" * 50_000 + "]" * 50_000 + "}", "it holds no JSON object"),
    ],
    ids=["own", "deep"],
)
def test_no_reply_raises_what_is_no_error_of_synthesis(text: str, why: str, nodes: Nodes) -> None:
    """Neither what a validator raises, nor what deep nesting does."""
    with pytest.raises(SynthesisError, match=f"the model's reply is no Strict .{why}"):
        SimpleSummarize(ScriptedLLM(text), output_cls=Strict).synthesize("?", nodes)


def test_a_strict_schema_requires_all_and_allows_no_more() -> None:
    """As OpenAI's structured outputs want it; a property may be named like a keyword."""
    schema: Any = strict_schema(City)
    assert schema["required"] == ["name", "rivers", "title"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["River"]["required"] == ["name", "length"]
    assert "default" not in schema["properties"]["rivers"]
    assert strict_schema(Loose) is None


@pytest.mark.parametrize(
    ("model", "cls", "form"), [("gpt-4o-mini", City, "schema"), ("gpt-4", City, "tool"), ("gpt-4o-mini", Loose, "tool")]
)
def test_the_strictest_form_that_fits_is_asked_for(model: str, cls: type[BaseModel], form: str, serve: Serve) -> None:
    """A strict JSON schema, else a tool call."""
    server = serve(JSON if cls is City else '{"facts": {"a": 1}}')
    language_model = LanguageModel(server.llm(model), CallbackManager)
    reply = run(ask_object(language_model, [ChatMessage("?")], cls, set(), deadline=None))
    assert isinstance(read_object(reply, cls, AnswerRules())[0], cls)
    (chat,) = server.chats
    assert (chat.response_format is not None, chat.forced_tool is not None) == (form == "schema", form == "tool")


def test_a_refused_form_gives_way_to_a_plainer_one_for_good(serve: Serve) -> None:
    """First a schema, then a tool, then words, and these at once the next time; unless words were refused as well."""
    server = serve([Fault.status(400)] * 5 + [JSON, JSON])
    refused, model = set[str](), LanguageModel(server.llm(max_retries=0), CallbackManager)
    with pytest.raises(Exception, match="400"):
        run(ask_object(model, [ChatMessage("?")], City, refused, deadline=None))
    for _ in range(2):
        assert run(ask_object(model, [ChatMessage("?")], City, refused, deadline=None)).text == JSON
    assert [bool(chat.response_format) for chat in server.chats] == [True, False, False, True, False, False, False]


def test_a_tool_that_is_not_called_may_still_be_answered(serve: Serve) -> None:
    """Some models write the arguments as text."""
    server = serve(Sent(JSON))
    assert AnswerSynthesis(server.llm("gpt-4"), output_cls=City).get_response("?", ["a"]) == PARIS


def test_a_cut_object_is_mended_and_warned_of(nodes: Nodes, serve: Serve) -> None:
    """What ran out of tokens may be incomplete."""
    synthesizer = AnswerSynthesis(
        serve(Fault.length('{"name": "Paris", "rivers": [{"name": "Sei')).llm(), output_cls=City
    )
    made = run(synthesizer.synthesis(QueryBundle("?"), nodes))
    assert made.output == City(name="Paris", rivers=[River(name="Sei")])
    assert made.warnings == ["the model stopped before it was done; its reply is cut"]


LONG = " ".join(f"Sentence number {number} is here." for number in range(400))


def extract(nodes: Nodes, **kwargs: Any) -> Synthesis:
    made: Synthesis = run(ExtractiveData().synthesis(QueryBundle("?"), nodes, **kwargs))
    return made


async def test_extracts_are_json_in_order(way: Way, nodes: Nodes) -> None:
    """Every passage is an object under its reference number; no model and no key is needed."""
    told = await way.ask(ExtractiveData(streaming=way.streaming), "?", nodes)
    assert json.loads(told.text) == [
        {"ref_id": 0, "title": "n0", "content": "Paris is the capital of France."},
        {"ref_id": 1, "title": "n1", "content": "Rome is the capital of Italy."},
        {"ref_id": 2, "title": "n2", "content": "Madrid is the capital of Spain."},
    ]
    assert told.source_ids == ["n0", "n1", "n2"]


def test_a_known_source_tells_terms(atlas: KnowledgeSource, atlas_nodes: Nodes) -> None:
    """Title, terms and content come from the fields that the source names; else they are as LlamaIndex shows them."""
    items = json.loads(extract(atlas_nodes, sources={"atlas": atlas}).text)
    assert items == [{"ref_id": 0, "title": "Gazetteer", "terms": "river", "content": "Paris lies on the Seine."}]
    [item] = json.loads(extract(atlas_nodes).text)
    assert item["content"].startswith("name: Gazetteer")
    assert "searches" not in item["content"]


def test_a_big_passage_is_cut_at_a_sentence_end() -> None:
    """What overflows the budget ends at a sentence, what comes after is counted, and the reader is told."""
    made = extract(make_nodes(["Short one.", LONG, LONG]), max_output_tokens=300)
    items = json.loads(made.text)
    assert [item["ref_id"] for item in items] == [0, 1]
    assert items[1]["content"].endswith(" is here.")
    assert LONG.startswith(items[1]["content"])
    assert 250 < count_tokens(made.text) <= 300
    assert made.dropped == 1
    assert made.warnings == [
        "1 passages were cut to fit into the budget of 300 tokens",
        "1 passages did not fit into the budget of 300 tokens and were left out",
    ]


def test_a_long_passage_of_few_tokens_is_kept_whole() -> None:
    """Its length says nothing where a run of spaces is a token or two."""
    text = "Section\n" + " " * 9_000 + "The tower is 330 m high."
    assert count_tokens(text) < 200
    (item,) = json.loads(extract(make_nodes([text]), max_output_tokens=240).text)
    assert item["content"] == text
    assert fit(make([text]), 240) == Packed([make([text])])


def test_no_evidence_is_an_empty_array() -> None:
    """The extracted data of nothing is an empty array; LlamaIndex's own method says what LlamaIndex says."""
    assert extract([]).text == "[]"
    assert list(iterate(ExtractiveData(streaming=True).synthesis(QueryBundle("?"), []))) == ["[]"]
    assert str(ExtractiveData().synthesize("?", [])) == "Empty Response"


async def test_text_is_kept_as_it_is() -> None:
    """Quotes, other scripts and markers survive; what can't be seen is left out, the node is not touched."""
    text = 'He said "é".\n日本語 [ref_id:7] \u2028 end'
    nodes = make_nodes([text, "a\ud800b\x00\u202e"])
    made = await arun(ExtractiveData().synthesis(QueryBundle("?"), nodes))
    assert [item["content"] for item in json.loads(made.text)] == [text.replace("\u2028", "\n"), "a\ufffdb"]
    assert made.warnings == ["3 hidden characters were left out of 1 passages"]
    assert nodes[1].node.get_content() == "a\ud800b\x00\u202e"
    assert "日本語" in made.text
    made.text.encode("utf-8")
    response = RetrievalResponse.parse({"response": [{"role": "assistant", "content": made.text}]})
    assert [extract.ref_id for extract in response.extracts] == [0, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=200), max_size=6), st.integers(1, 300))
def test_it_is_always_valid_json_within_its_budget(texts: list[str], budget: int) -> None:
    """Whatever the texts and the budget: valid JSON, within it, every passage kept or counted."""
    nodes = [NodeWithScore(node=TextNode(text=text, id_=f"n{number}")) for number, text in enumerate(texts)]
    made = extract(nodes, max_output_tokens=budget)
    items = json.loads(made.text)
    assert count_tokens(made.text) <= max(budget, 1)
    assert len(items) + made.dropped == len(nodes)
    assert [item["ref_id"] for item in items] == sorted(item["ref_id"] for item in items)


async def test_the_passages_are_the_text(way: Way, nodes: Nodes) -> None:
    """The text is what LlamaIndex's own mode gives; no model is needed."""
    told = await way.ask(ContextOnly(streaming=way.streaming), "?", nodes)
    Settings.llm = ScriptedLLM()
    assert told.text == str(CoresContextOnly().synthesize("?", nodes))
    assert told.source_ids == ["n0", "n1", "n2"]


def test_a_budget_cuts_and_counts(nodes: Nodes) -> None:
    """With a budget the text keeps to it, and says what is missing."""
    made = run(ContextOnly().synthesis(QueryBundle("?"), nodes, max_output_tokens=60))
    assert 0 < count_tokens(made.text) <= 60
    assert made.dropped > 0
    assert "the output's budget" in made.warnings[0]


TEXTS = st.lists(
    st.lists(st.sampled_from(["A sentence. ", "word ", "日本語。", "x" * 40, "\n", "<evidence>"]), max_size=120).map(
        "".join
    ),
    max_size=8,
)


def kept(packed: Packed) -> list[Passage]:
    return [passage for group in packed.groups for passage in group]


def make(texts: list[str]) -> list[Passage]:
    return [Passage(number, f"t{number}", text) for number, text in enumerate(texts)]


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 600))
def test_nothing_overflows_and_nothing_is_lost_in_silence(texts: list[str], room: int) -> None:
    """Every group fits its room; every passage is kept under its number, or counted."""
    given_ones = make(texts)
    for packer in (fit, share, singly, pack):
        packed = packer(given_ones, room)
        ids = [passage.ref_id for passage in kept(packed)]
        assert all(sum(map(cost, group)) <= room for group in packed.groups if len(group) > 1 or packer in (fit, share))
        assert len(set(ids)) + packed.dropped == len(texts)
        assert ids == sorted(ids)
        assert all(packed.groups)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(60, 400))
def test_splitting_loses_nothing(texts: list[str], room: int) -> None:
    """The parts of a passage are the passage, but for spaces between them, and each fits."""
    packed = pack(make(texts), room)
    assert packed.dropped == packed.cut == 0
    assert all(cost(passage) <= room for passage in kept(packed))
    for number, text in enumerate(texts):
        parts = [passage.content for passage in kept(packed) if passage.ref_id == number]
        assert "".join("".join(parts).split()) == "".join(text.split())


def test_a_mode_s_own_partial_text_is_kept() -> None:
    """A mode that raises with the text so far hands it on."""

    class Half(AnswerSynthesis):
        async def _compose(self, draft: Any) -> str:
            raise SynthesisError("no more", partial="half an answer")

    with pytest.raises(SynthesisError) as caught:
        Half(llm=ScriptedLLM([])).synthesize("?", make_nodes())
    assert caught.value.partial == "half an answer"
