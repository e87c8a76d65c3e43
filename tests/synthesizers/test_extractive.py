from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.response_synthesizers.context_only import ContextOnly as CoresContextOnly
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.settings import Settings

from llama_index_agentic_kb._aio import arun, iterate, run
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.schema import RetrievalResponse
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.synthesizers import ContextOnly, ExtractiveData, Synthesis
from llama_index_agentic_kb.synthesizers.passages import Packed, cost, fit, pack, share, singly
from llama_index_agentic_kb.testing import ScriptedLLM
from tests.synthesizers.conftest import Nodes, Way, make_nodes

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
    """Title, terms and content come from the fields that the source names."""
    items = json.loads(extract(atlas_nodes, sources={"atlas": atlas}).text)
    assert items == [{"ref_id": 0, "title": "Gazetteer", "terms": "river", "content": "Paris lies on the Seine."}]


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
