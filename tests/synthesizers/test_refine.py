from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers.refine import StructuredRefineResponse
from llama_index.core.schema import QueryBundle
from pydantic import BaseModel

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import SynthesisError
from llama_index_agentic_kb.llm import billed, count_tokens
from llama_index_agentic_kb.synthesizers import Compact, Refine
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply
from tests.conftest import Serve
from tests.faulty_server import Fault
from tests.synthesizers.conftest import Nodes, Way, make_nodes

SENTENCES = [f"Sentence number {number} is here." for number in range(300)]


class Capital(BaseModel):
    city: str


def prompts(llm: ScriptedLLM) -> list[str]:
    return ["\n".join(message.content or "" for message in call) for call in llm.calls]


async def test_each_node_is_a_call_in_order(way: Way, nodes: Nodes) -> None:
    """The first node is answered from, each further one refines; the last call's deltas are told."""
    llm = ScriptedLLM(
        ["One [ref_id:0].", "Two [ref_id:0][ref_id:1].", ScriptedReply("Three [ref_id:2] of 3.", chunk_size=4)]
    )
    told = await way.ask(Refine(llm, streaming=way.streaming), "Which?", nodes)
    assert told.text == "Three [ref_id:2] of 3."
    assert (len(told.deltas) > 2) is way.streaming
    first, second, third = prompts(llm)
    assert '<passage ref_id="0"' in first
    assert "The answer so far:\nOne [ref_id:0]." in second
    assert '<passage ref_id="1"' in second
    assert '<passage ref_id="0"' not in second
    assert "Two [ref_id:0][ref_id:1]." in third
    assert told.source_ids == ["n0", "n1", "n2"]


@pytest.mark.parametrize("reply", ["UNCHANGED", "Unchanged.", "The original answer remains the same.", "", "   "])
async def test_a_reply_that_refines_nothing_keeps_the_answer(reply: str, way: Way, nodes: Nodes) -> None:
    """An empty reply, the word for it, or a remark without a citation takes no cited answer's place."""
    llm = ScriptedLLM(["Paris [ref_id:0].", reply, ScriptedReply(reply, chunk_size=5)])
    told = await way.ask(Refine(llm, streaming=way.streaming), "?", nodes)
    assert told.text == "Paris [ref_id:0]."


@pytest.mark.parametrize(
    ("earlier", "reply"),
    [
        ("Rome [ref_id:1].", "The original answer remains the same: Paris [ref_id:0]."),
        ("Rome.", "Paris."),
        ("Rome.", "Unchanged since 1871."),
    ],
)
async def test_a_refined_answer_takes_the_place(earlier: str, reply: str, way: Way, nodes: Nodes) -> None:
    """Any other reply is the new answer."""
    llm = ScriptedLLM([earlier, earlier, ScriptedReply(reply, chunk_size=5)])
    assert (await way.ask(Refine(llm, streaming=way.streaming), "?", nodes)).text == reply


def test_an_empty_reply_is_warned_of_and_billed(nodes: Nodes, serve: Serve) -> None:
    """A kept answer says what happened, and every call is on the bill."""
    server = serve(["Paris.", Fault.null_content(), "Rome."])
    with billed() as bill:
        made = run(Refine(server.llm()).synthesis(QueryBundle("?"), nodes))
    assert (made.text, made.warnings) == ("Rome.", ["call 2 had an empty reply; the answer before it is kept"])
    assert (bill.calls, bill.input_tokens) == (3, server.billed.prompt_tokens)


def test_a_node_too_big_for_a_window_is_split_and_keeps_its_number() -> None:
    """Parts end at sentences, come in order, overlap, and carry the node's reference id; nothing is lost or dropped."""
    llm = ScriptedLLM("Answer [ref_id:1].", context_window=1_600, num_output=100)
    made = run(Refine(llm).synthesis(QueryBundle("?"), make_nodes(["Small.", " ".join(SENTENCES), "Last."])))
    sent = prompts(llm)
    assert len(sent) > 4
    assert '<passage ref_id="0"' in sent[0]
    assert '<passage ref_id="2"' in sent[-1]
    assert all('<passage ref_id="1"' in prompt for prompt in sent[1:-1])
    found = [sentence for prompt in sent for sentence in SENTENCES if sentence in prompt]
    assert len(found) > len(SENTENCES)
    assert list(dict.fromkeys(found)) == SENTENCES
    assert (made.dropped, made.text) == (0, "Answer [ref_id:1].")


def test_an_answer_that_fills_the_window_stands(nodes: Nodes) -> None:
    """Where the answer leaves no room for further passages, they are counted as dropped."""
    llm = ScriptedLLM("Long answer. " * 600, context_window=1_500, num_output=100)
    made = run(Refine(llm).synthesis(QueryBundle("?"), nodes))
    assert made.dropped == 2
    assert len(llm.calls) == 1
    assert all("beside the answer so far" in warning for warning in made.warnings)


async def test_unsatisfied_steps_are_skipped(way: Way, nodes: Nodes) -> None:
    """Only passages that satisfy the question make the answer."""
    llm = ScriptedLLM(
        [
            '{"query_satisfied": false, "answer": "I do not know."}',
            '{"query_satisfied": true, "answer": "Rome [ref_id:1][ref_id:5]."}',
            '{"query_satisfied": false, "answer": "Nothing new."}',
        ]
    )
    told = await way.ask(Refine(llm, streaming=way.streaming, structured_answer_filtering=True), "?", nodes)
    assert told.text == "Rome [ref_id:1]."
    assert "The answer so far" not in prompts(llm)[1]
    assert "The answer so far:\nRome [ref_id:1]." in prompts(llm)[2]


async def test_no_satisfied_step_is_an_empty_response(way: Way, nodes: Nodes) -> None:
    """As in LlamaIndex; the text may be chosen."""
    llm = ScriptedLLM('{"query_satisfied": false, "answer": "?"}')
    synthesizer = Refine(llm, streaming=way.streaming, structured_answer_filtering=True, empty_response="Nothing.")
    assert (await way.ask(synthesizer, "?", nodes)).text == "Nothing."


@pytest.mark.parametrize("prose", ["I would say Rome.", '{"query_satisfied": tr', '{"answer": "Rome."}'])
def test_a_step_that_can_not_be_read_is_not_satisfied(prose: str, nodes: Nodes) -> None:
    """As in LlamaIndex it is skipped, before and after a good step, and the response says so."""
    good = '{"query_satisfied": true, "answer": "Paris."}'
    made = run(
        Refine(ScriptedLLM([prose, good, prose]), structured_answer_filtering=True).synthesis(QueryBundle("?"), nodes)
    )
    assert made.text == "Paris."
    assert [warning.partition(":")[0] for warning in made.warnings] == [
        "call 1 was not counted as satisfied",
        "call 3 was not counted as satisfied",
    ]


def test_where_no_step_can_be_read_there_is_no_empty_response(nodes: Nodes) -> None:
    """It is the model that failed: nobody said that the evidence holds no answer."""
    synthesizer = Refine(ScriptedLLM("I would say Rome."), structured_answer_filtering=True)
    with pytest.raises(SynthesisError, match="the model's reply is no RefinedAnswer"):
        synthesizer.synthesize("?", nodes)
    unsatisfied = '{"query_satisfied": false, "answer": "?"}'
    llm = ScriptedLLM(["I would say Rome.", unsatisfied, "Rome."])
    assert str(Refine(llm, structured_answer_filtering=True).synthesize("?", nodes)) == "Empty Response"


def filtered(llm: ScriptedLLM, **kwargs: Any) -> Refine:
    """A synthesizer whose steps are made by a program of LlamaIndex's."""

    def factory(prompt: Any) -> Any:
        return LLMTextCompletionProgram.from_defaults(output_cls=StructuredRefineResponse, prompt=prompt, llm=llm)

    return Refine(ScriptedLLM([]), structured_answer_filtering=True, program_factory=factory, **kwargs)


def test_programs_of_the_users_make_the_steps(nodes: Nodes) -> None:
    """A program factory is called with the prompt, as in LlamaIndex; its error is a failed step's cause."""
    llm = ScriptedLLM('{"query_satisfied": true, "answer": "Paris [ref_id:0][ref_id:8]."}')
    template = PromptTemplate("{tone}: {context_str} {query_str}")
    made = filtered(llm, text_qa_template=template).synthesize("Why?", nodes, tone="dry")
    assert str(made) == "Paris [ref_id:0]."
    assert prompts(llm)[0].startswith("dry: [data ")
    assert "Why?" in prompts(llm)[0]
    with pytest.raises(SynthesisError, match="call 1: ConnectionError: gone"):
        filtered(ScriptedLLM(ConnectionError("gone"))).synthesize("?", nodes)


def test_a_program_that_reads_nothing_is_a_step_that_is_not_satisfied(nodes: Nodes) -> None:
    """As in LlamaIndex, whose programs raise ValueError then."""
    llm = ScriptedLLM(["I would say Rome.", '{"query_satisfied": true, "answer": "Paris."}', "Rome."])
    assert str(filtered(llm).synthesize("?", nodes)) == "Paris."


async def test_objects_are_refined(way: Way, nodes: Nodes) -> None:
    """Each step gives an object; the next one refines its JSON."""
    llm = ScriptedLLM(['{"city": "Paris"}', '{"city": "Rome"}', '{"city": "Madrid"}'])
    told = await way.ask(Refine(llm, streaming=way.streaming, output_cls=Capital), "?", nodes)
    assert told.text == '{"city":"Madrid"}'
    assert 'The answer so far:\n{"city":"Rome"}' in prompts(llm)[2]


async def test_strings_can_be_refined_too(nodes: Nodes) -> None:
    """LlamaIndex callers that have only strings, and an answer already, are served."""
    llm = ScriptedLLM(["Two.", ScriptedReply("Three.", chunk_size=2)] * 2)
    assert Refine(llm).get_response("?", ["a", "b"], prev_response="One.") == "Three."
    assert "The answer so far:\nOne." in prompts(llm)[0]
    streamed: Any = await Refine(llm, streaming=True).aget_response("?", ["a", "b"], prev_response="One.")
    assert "".join([delta async for delta in streamed]) == "Three."
    assert Refine(llm).get_response("?", []) == "Empty Response"


@pytest.mark.parametrize(
    ("replies", "text", "answerable"),
    [
        (["UNANSWERABLE: nothing.", "Paris [ref_id:1].", "UNANSWERABLE: no more."], "Paris [ref_id:1].", True),
        (["UNANSWERABLE: nothing.", "UNCHANGED", "UNCHANGED"], "nothing.", False),
        (["UNANSWERABLE: nothing.", "UNCHANGED", "UNANSWERABLE: no height."], "no height.", False),
    ],
)
def test_any_step_may_answer(replies: list[str], text: str, answerable: bool, nodes: Nodes) -> None:
    """A step whose passages do not answer leaves the answer of an earlier one."""
    synthesizer = Refine(ScriptedLLM([ScriptedReply(one, chunk_size=3) for one in replies]), streaming=True)
    made = run(synthesizer.synthesis(QueryBundle("?"), nodes))
    assert (made.text, made.answerable) == (text, answerable)


def ids_in(prompt: str) -> list[int]:
    return [number for number in range(50) if f'<passage ref_id="{number}"' in prompt]


async def test_passages_are_packed_whole_and_in_order(way: Way) -> None:
    """As few calls as fit the window; every passage whole in one of them, under its own number."""
    llm = ScriptedLLM(lambda messages: f"Seen {len(messages)} [ref_id:0].", context_window=1_500, num_output=100)
    texts = [f"Fact {number}: " + "word " * 150 for number in range(20)]
    told = await way.ask(Compact(llm, streaming=way.streaming), "?", make_nodes(texts))
    packed = [ids_in(prompt) for prompt in prompts(llm)]
    assert [number for numbers in packed for number in numbers] == list(range(20))
    assert max(map(len, packed)) >= 4
    assert len(packed) <= 7
    assert all(count_tokens(prompt) <= 1_400 for prompt in prompts(llm))
    assert told.source_ids == [f"n{number}" for number in range(20)]


def test_a_prompt_helpers_sizes_are_kept_to(nodes: Nodes) -> None:
    """A given PromptHelper sets window, output and the most evidence of a call."""
    llm = ScriptedLLM("x")
    helper = PromptHelper(context_window=4_000, num_output=100, chunk_size_limit=70)
    run(Compact(llm, prompt_helper=helper).synthesis(QueryBundle("?"), nodes))
    assert [ids_in(prompt) for prompt in prompts(llm)] == [[0, 1], [2]]


def test_a_growing_answer_splits_later_passages_in_order() -> None:
    """Where the answer so far takes the room of a passage, the passage is split, its parts in order."""
    llm = ScriptedLLM(
        lambda messages: "Long answer. " * (250 if "so far" not in str(messages) else 1),
        context_window=1_900,
        num_output=100,
    )
    run(Refine(llm).synthesis(QueryBundle("?"), make_nodes(["Small.", " ".join(SENTENCES[:150])])))
    found = [sentence for prompt in prompts(llm) for sentence in SENTENCES if sentence in prompt]
    assert list(dict.fromkeys(found)) == SENTENCES[:150]
    assert len(llm.calls) > 2


def test_filtering_and_objects_go_together(nodes: Nodes) -> None:
    """The answer of a filtered step may be an object."""
    llm = ScriptedLLM(
        ['{"query_satisfied": true, "answer": {"city": "Paris"}}']
        + ['{"query_satisfied": false, "answer": {"city": ""}}'] * 2
    )
    response = Refine(llm, structured_answer_filtering=True, output_cls=Capital).synthesize("?", nodes)
    assert response.response == Capital(city="Paris")
