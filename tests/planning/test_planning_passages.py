from __future__ import annotations

from collections.abc import Sequence

import pytest
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb import KnowledgeSource, interleave
from llama_index_agentic_kb.evidence.candidates import best_of
from llama_index_agentic_kb.planning.passages import CUT, MAX_PASSAGES, PASSAGE_WORDS, PassageSet
from llama_index_agentic_kb.schema import SourceActivity, SubQuery
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeList
from llama_index_agentic_kb.testing import MemoryRetriever

SOURCE = KnowledgeSource("docs", retriever=MemoryRetriever([]))


def node(name: str, text: str | None = None) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=name, text=text or f"text of {name}", metadata={"title": name}), score=0.5)


def lane(query: str, *lists: Sequence[NodeWithScore], number: int = 0) -> SourceSearch:
    record = SourceActivity(id=number, knowledge_source_name="docs", sub_query_id=query)
    sub_query = SubQuery(id=query, query=f"what is {query}", sources=["docs"])
    kinds = ("dense", "lexical")
    return SourceSearch(
        sub_query, SOURCE, record, tuple(NodeList(k, [*one]) for k, one in zip(kinds, lists, strict=False))
    )


def reading(*nodes: NodeWithScore, per_query: int = 5, query: str = "x") -> PassageSet:
    made = PassageSet(per_query)
    made.add(query, best_of([lane("q1", nodes)], interleave))
    return made


def test_passages_are_numbered_and_shown_once() -> None:
    """Two searches that found the same share a passage; each gives no more than it may."""
    a, b, c = node("a"), node("b"), node("c")
    made = reading(a, b, c, per_query=2)
    made.add("x", best_of([lane("q2", [b, c])], interleave))
    assert [(ref, one.title) for ref, one in made.passages.items()] == [(0, "a"), (1, "b"), (2, "c")]
    assert made.as_prompt().count("<passage ") == 3


def test_no_prompt_has_too_many_passages() -> None:
    """Whatever the number of searches."""
    made = PassageSet(20)
    for query in range(10):
        made.add("x", best_of([lane("q1", [node(f"{query}-{n}") for n in range(20)])], interleave))
    assert len(made.passages) == MAX_PASSAGES


def test_passages_are_cut_around_what_is_asked() -> None:
    """A long document is shown where it speaks of the query."""
    text = "Rain. " * 500 + "The keeper lives in Bergen now. " + "Snow. " * 500
    (passage,) = reading(node("a", text), query="where does the keeper live").passages.values()
    assert "The keeper lives in Bergen now." in passage.content
    assert passage.content.startswith("Rain. ")
    assert passage.content.endswith(f"Snow. {CUT}")
    assert passage.content.count(CUT) == 2
    assert len(passage.content.split()) <= PASSAGE_WORDS + 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("Columbia", True), ("COLUMBIA", True), ("Columbia, South Carolina", True), ("Columbia (city)", True),
        ("Ann Lee", True), ("lumb", False), ("19", False), ("1985", True), ("Ann Smith", False), ("Oslo", False),
        (", South Carolina", False), ("the title", True), ("東京", True), ("a.b*c", False), ("Southeast Asia", True),
        ("16th century", True), ("North West Africa", True), ("20", False),
    ],
)  # fmt: skip
def test_what_a_passage_says(value: str, says: bool) -> None:
    """Whole words of it, or of its title; what only tells the value from others of its name is not asked for."""
    text = (
        "Lee (Ann) was born in Columbia in 1985, 2-0; South-East Asia, northwest Africa, 16th-century; 彼は東京に住む。"
    )
    (passage,) = reading(node("The Title", text)).passages.values()
    assert passage.says(value) == says
