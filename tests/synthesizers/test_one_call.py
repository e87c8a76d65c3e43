from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.output_parsers.base import OutputParserException
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import QueryBundle
from llama_index.core.types import BaseOutputParser
from pydantic import BaseModel

from llama_index_agentic_kb._aio import arun, iterate, run
from llama_index_agentic_kb.errors import SynthesisError
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.synthesizers import AnswerSynthesis, Generation, SimpleSummarize
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply
from tests.conftest import Serve
from tests.synthesizers.conftest import Nodes, Way, make_nodes


class Capital(BaseModel):
    """A capital."""

    city: str
    country: str = "unknown"


def prompt(llm: ScriptedLLM, call: int = -1) -> str:
    return "\n".join(message.content or "" for message in llm.calls[call])


async def test_one_call_answers_with_markers(way: Way, nodes: Nodes) -> None:
    """One call over all passages gives the answer, its source nodes in order of reference numbers."""
    llm = ScriptedLLM(ScriptedReply("Paris [ref_id:0] and Rome [ref_id:1, 9].", chunk_size=3))
    told = await way.ask(AnswerSynthesis(llm, streaming=way.streaming), "Which capitals?", nodes)
    assert told.text == "Paris [ref_id:0] and Rome [ref_id:1]."
    assert told.source_ids == ["n0", "n1", "n2"]
    assert set(told.response.metadata or {}) == {"n0", "n1", "n2"}
    assert len(llm.calls) == 1
    assert '<passage ref_id="2" title="n2">\nMadrid is the capital of Spain.\n</passage>' in prompt(llm)
    assert "Question: Which capitals?" in prompt(llm)
    assert (len(told.deltas) > 3) is way.streaming


def test_an_output_budget_is_kept_to(nodes: Nodes, serve: Serve) -> None:
    """The model is told of a budget, of the synthesizer's or of the request."""
    server = serve("Paris.")
    synthesizer = AnswerSynthesis(server.llm(), max_output_tokens=70)
    run(synthesizer.synthesis(QueryBundle("?"), nodes))
    run(synthesizer.synthesis(QueryBundle("?"), nodes, max_output_tokens=7))
    assert [chat.body["max_tokens"] for chat in server.chats] == [70, 7]


def test_passages_that_overflow_are_cut_at_a_sentence_and_counted() -> None:
    """The passage that overflows the window ends at a sentence; what doesn't fit at all is counted."""
    llm = ScriptedLLM("ok", context_window=1_000, num_output=100)
    long = " ".join(f"Sentence number {number} is about nothing." for number in range(200))
    made = run(AnswerSynthesis(llm).synthesis(QueryBundle("?"), make_nodes(["Short.", long, "Never seen. " * 30])))
    assert made.dropped == 1
    assert made.warnings == [
        "1 passages were cut to fit into the model's window",
        "1 passages did not fit into the model's window and were left out",
    ]
    sent = prompt(llm)
    assert "is about nothing.\n</passage>" in sent
    assert "Never seen" not in sent
    assert 600 < count_tokens(sent) < 900


def test_a_window_without_room_is_an_error(nodes: Nodes) -> None:
    """Where question and template fill the window, nothing is sent."""
    llm = ScriptedLLM("ok", context_window=1_000, num_output=100)
    with pytest.raises(SynthesisError, match="leave no room for evidence in the model's window of 1000 tokens"):
        AnswerSynthesis(llm).synthesize("why " * 2_000, nodes)
    assert llm.calls == []


async def test_templates_take_further_variables(way: Way, nodes: Nodes) -> None:
    """A custom template's variables come from the call, or are filled in before."""
    template = PromptTemplate("In a {tone_name} tone, for {reader}: {context_str}\n{query_str}").partial_format(
        reader="kids"
    )
    llm = ScriptedLLM("ok")
    synthesizer = AnswerSynthesis(llm, streaming=way.streaming, text_qa_template=template)
    await way.ask(synthesizer, "Why?", nodes, tone_name="dry")
    assert prompt(llm).startswith("In a dry tone, for kids: [data ")
    assert prompt(llm).endswith("Why?")


def test_the_llms_own_prompt_parts_are_respected(nodes: Nodes) -> None:
    """System prompt and output parser of the LLM are applied as by core's ``predict``."""

    class Shouts(BaseOutputParser):
        def parse(self, output: str) -> str:
            if not output:
                raise OutputParserException("nothing")
            return output.upper()

        def format(self, query: str) -> str:
            return query + " LOUD."

    for streaming in (False, True):
        llm = ScriptedLLM("paris", system_prompt="Be brief.", output_parser=Shouts())
        synthesizer = AnswerSynthesis(llm, streaming=streaming, text_qa_template=PromptTemplate("{query_str}"))
        assert run(synthesizer.synthesis(QueryBundle("?"), nodes)).text == "PARIS"
        assert llm.calls[0][0] == ChatMessage(role="system", content="Be brief.")
        assert llm.calls[0][1].content == "? LOUD."


def test_a_known_source_tells_title_and_content(atlas: KnowledgeSource, atlas_nodes: Nodes) -> None:
    """Evidence of a source is shown under the fields that the source names; other nodes as LlamaIndex shows them."""
    llm = ScriptedLLM("ok")
    run(AnswerSynthesis(llm).synthesis(QueryBundle("?"), atlas_nodes, sources={"atlas": atlas}))
    assert '<passage ref_id="0" title="Gazetteer">\nParis lies on the Seine.\n</passage>' in prompt(llm)
    run(AnswerSynthesis(llm).synthesis(QueryBundle("?"), atlas_nodes))
    assert "name: Gazetteer" in prompt(llm)
    assert "searches" not in prompt(llm)


async def test_an_object_is_validated(way: Way, nodes: Nodes) -> None:
    """With ``output_cls`` the response is a validated object; a stream gives its JSON."""
    llm = ScriptedLLM('Sure! ```json\n{"city": "Paris [ref_id:0][ref_id:9]", "country": "France"}\n```')
    told = await way.ask(AnswerSynthesis(llm, streaming=way.streaming, output_cls=Capital), "?", nodes)
    assert Capital.model_validate_json(told.text) == Capital(city="Paris [ref_id:0]", country="France")
    response: Any = told.response
    assert way.streaming or response.response == Capital(city="Paris [ref_id:0]", country="France")
    assert way.streaming or response.city == "Paris [ref_id:0]"


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
@pytest.mark.parametrize(
    ("reply", "text", "answerable"),
    [
        ("UNANSWERABLE: The passages tell no height.", "The passages tell no height.", False),
        ("**UNANSWERABLE**\n\nNo height.", "No height.", False),
        ('UNANSWERABLE. "No height" is told.', '"No height" is told.', False),
        ('"UNANSWERABLE": "No height" is told.', '"No height" is told.', False),
        ("UNANSWERABLE", "Empty Response", False),
        ("UNANSWERABLENESS is a word.", "UNANSWERABLENESS is a word.", True),
        ("UN members: 193 [ref_id:0].", "UN members: 193 [ref_id:0].", True),
        ("It says UNANSWERABLE.", "It says UNANSWERABLE.", True),
    ],
)
async def test_whether_the_evidence_answers_is_the_models_first_word(
    reply: str, text: str, answerable: bool, chunk_size: int, nodes: Nodes
) -> None:
    """Readers never see the word, streamed or not."""
    synthesizer = AnswerSynthesis(ScriptedLLM(ScriptedReply(reply, chunk_size=chunk_size)), streaming=True)
    assert "".join(iterate(synthesizer.synthesis(QueryBundle("?"), nodes))) == text
    made = await arun(synthesizer.synthesis(QueryBundle("?"), nodes, streaming=False))
    assert (made.text, made.answerable) == (text, answerable)


def test_every_passage_gets_its_share() -> None:
    """Long passages are cut, each to the same length; what short ones leave over is theirs, and nothing is dropped."""
    llm = ScriptedLLM("ok", context_window=1_400, num_output=100)
    long = [" ".join(f"Sentence {number} of {name}." for number in range(300)) for name in ("first", "second", "third")]
    made = run(SimpleSummarize(llm).synthesis(QueryBundle("?"), make_nodes([long[0], "Short.", *long[1:]])))
    counts = [prompt(llm).count(f"of {name}.") for name in ("first", "second", "third")]
    assert "Short." in prompt(llm)
    assert max(counts) - min(counts) <= 1
    assert min(counts) > 40
    assert made.dropped == 0
    assert made.warnings == ["3 passages were cut to fit into the model's window"]


async def test_the_model_is_asked_alone(way: Way, nodes: Nodes) -> None:
    """The question is all that it sees; nodes stay the sources, are not needed, and can not be cited."""
    llm = ScriptedLLM(ScriptedReply("From memory [ref_id:0].", chunk_size=4))
    template = PromptTemplate("Be {tone}: {query_str}")
    for given in (nodes, []):
        made = Generation(llm, streaming=way.streaming, simple_template=template)
        told = await way.ask(made, "Why?", given, tone="kind")
        assert (told.text, told.source_ids) == ("From memory.", [node.node_id for node in given])
    assert [message.content for message in llm.calls[0]] == ["Be kind: Why?"]
