from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

from llama_index_agentic_kb.evidence.arrangement import arrange, follows, pieces_per_document
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY


def node(name: str, *, best_for: list[str] | None = None, text: str | None = None) -> NodeWithScore:
    """Make chunk number n of document d out of the name "d3"."""
    mark: dict[str, Any] = {"source": "docs", "activity": 0, "searches": []}
    if best_for:
        mark["best_for"] = best_for
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=name[0])}
    metadata = {"chunk_index": int(name[1:]), PROVENANCE_KEY: mark}
    made = TextNode(id_=name, text=text or f"<{name}>", metadata=metadata, relationships=source)
    return NodeWithScore(node=made, score=None)


def arranged(names: str, wanted: int, **options: Any) -> list[str]:
    """Give each piece by the names of its chunks."""
    made = arrange([node(name) for name in names.split()], wanted, **options)
    return [piece.text.replace("\n", "").replace("><", " ").strip("<>") for piece in made.nodes]


def test_neighbours_take_one_place() -> None:
    """A piece stands where its first chunk stood; the freed place goes to the next one."""
    assert arranged("a1 b1 a2 c1 d1", 3) == ["a1 a2", "b1", "c1"]
    assert arranged("a2 b1 a1 c1", 3) == ["a1 a2", "b1", "c1"]
    assert arranged("a1 b1 a2 c1 d1", 3, joining=False) == ["a1", "b1", "a2"]


def test_one_that_bridges_two_pieces_frees_a_place() -> None:
    """Both become one, which stands where the better stood and bears its id."""
    made = arrange([node(name) for name in ("b1", "a3", "a1", "c1", "a2", "d1")], 4)
    assert [piece.node_id for piece in made.nodes] == ["b1", "a3", "c1", "d1"]
    assert made.nodes[1].text == "<a1>\n<a2>\n<a3>"
    assert made.used == 6


def test_the_first_without_a_place_ends_it() -> None:
    """What comes later does not join, for it was not worth a place."""
    assert arranged("a1 b1 c1 a2", 2) == ["a1", "b1"]
    assert arranged("", 2) == []


def test_pieces_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a chunk takes a place of its own, and a bridge joins the better side."""
    monkeypatch.setattr("llama_index_agentic_kb.evidence.arrangement.MAX_CHARACTERS", 8)
    assert arranged("a1 a2 a3 a4", 9) == ["a1 a2", "a3 a4"]
    assert arranged("a3 a1 a2", 9) == ["a2 a3", "a1"]
    monkeypatch.setattr("llama_index_agentic_kb.evidence.arrangement.MAX_CHARACTERS", 3)
    assert arranged("a1 a2", 9) == ["a1", "a2"]


def test_long_documents_leave_room_for_short_ones() -> None:
    """Beyond its number a document's pieces wait behind the others; nothing is dropped that has a place."""
    assert arranged("a1 a3 a5 a7 b1 a9 c1", 5, max_per_document=2) == ["a1", "a3", "b1", "c1", "a5"]
    assert arranged("a1 a3 a5 a7 b1 a9 c1", 9, max_per_document=2) == ["a1", "a3", "b1", "c1", "a5", "a7", "a9"]
    assert arranged("a1 a3 a5 a7 b1", 4, max_per_document=None) == ["a1", "a3", "a5", "a7"]
    assert arranged("a1 a2 a3 a5 b1", 9, max_per_document=2) == ["a1 a2 a3", "a5", "b1"]


def test_a_sub_querys_best_never_waits() -> None:
    """Coverage goes before the number of pieces."""
    given_nodes = [node("a1"), node("a3"), node("a5", best_for=["q1"]), node("b1")]
    assert [one.node_id for one in arrange(given_nodes, 9, max_per_document=1).nodes] == ["a1", "a5", "b1", "a3"]


@pytest.mark.parametrize(("wanted", "pieces"), [(1, 3), (9, 3), (10, 4), (15, 5), (50, 17)])
def test_a_third_of_all_and_at_least_three(wanted: int, pieces: int) -> None:
    """The default number of one document's pieces."""
    assert pieces_per_document(wanted) == pieces


def test_a_node_is_compared_with_its_document_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many documents cost no more comparisons than their chunks: arranging is not quadratic."""
    compared: list[tuple[str, str]] = []

    def counted(first: Any, second: Any) -> bool:
        compared.append((first.node_id, second.node_id))
        return follows(first, second)

    monkeypatch.setattr("llama_index_agentic_kb.evidence.arrangement.follows", counted)
    nodes = [node(f"{letter}{n}") for n in (1, 3) for letter in map(chr, range(0x4E00, 0x4E00 + 300))]
    assert len(arrange(nodes, 1_000, max_per_document=1).nodes) == 600
    assert {one[0] == other[0] for one, other in compared} == {True}


NAMES = st.lists(
    st.builds(lambda letter, number: f"{letter}{number}", st.sampled_from("abc"), st.integers(0, 9)),
    max_size=20,
    unique=True,
)


@settings(max_examples=100, deadline=None)
@given(NAMES, st.integers(1, 12), st.booleans(), st.one_of(st.none(), st.integers(1, 4)))
def test_every_chunk_is_used_once_at_most(names: list[str], wanted: int, joining: bool, most: int | None) -> None:
    """No more pieces than places; the used chunks are each in one piece; nothing is made up, nothing left unused."""
    made = arrange([node(name) for name in names], wanted, joining=joining, max_per_document=most)
    used = [name for piece in made.nodes for name in piece.text.replace("<", "").replace(">", "").split()]
    assert len(used) == len(set(used)) == made.used
    assert set(used) <= set(names)
    assert len(made.nodes) <= wanted
    assert made.used == len(names) or len(made.nodes) == wanted
    assert joining or len(made.nodes) == made.used
