from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import Document
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import ImageNode, IndexNode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

from llama_index_agentic_kb.evidence import candidates
from llama_index_agentic_kb.evidence.candidates import PROVENANCE_KEY, arrange, follows, join, provenance


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


def test_pieces_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a chunk takes a place of its own, and a bridge joins the better side."""
    monkeypatch.setattr("llama_index_agentic_kb.evidence.candidates.MAX_CHARACTERS", 8)
    assert arranged("a1 a2 a3 a4", 9) == ["a1 a2", "a3 a4"]
    assert arranged("a3 a1 a2", 9) == ["a2 a3", "a1"]
    monkeypatch.setattr("llama_index_agentic_kb.evidence.candidates.MAX_CHARACTERS", 3)
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


def chunk(
    name: str,
    text: str = "text",
    *,
    document: str | None = "doc",
    index: int | None = None,
    span: tuple[int, int] | None = None,
    links: dict[NodeRelationship, str] | None = None,
    source: str = "docs",
    **metadata: Any,
) -> TextNode:
    relations = {kind: RelatedNodeInfo(node_id=target) for kind, target in (links or {}).items()}
    if document is not None:
        relations[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    numbered = {} if index is None else {"chunk_index": index}
    mark = {PROVENANCE_KEY: {"source": source, "activity": 1, "searches": [{"query": name}]}}
    start, end = span or (None, None)
    return TextNode(
        id_=name, text=text, metadata={**metadata, **numbered, **mark}, relationships=relations,
        start_char_idx=start, end_char_idx=end,
    )  # fmt: skip


def joined(*nodes: TextNode, best: int = 0, scores: tuple[float | None, ...] = ()) -> NodeWithScore:
    """Join nodes that stand in the document's order; ``best`` was ranked first."""
    given = scores or (None,) * len(nodes)
    places = [(0 if n == best else n + 1, NodeWithScore(node=node, score=given[n])) for n, node in enumerate(nodes)]
    return join(places)


def split(text: str, size: int, overlap: int, **kwargs: Any) -> list[TextNode]:
    splitter = SentenceSplitter(chunk_size=size, chunk_overlap=overlap, tokenizer=str.split, **kwargs)
    made = splitter.get_nodes_from_documents([Document(id_="doc", text=text)])
    return [node for node in made if isinstance(node, TextNode)]


def test_links_tell_neighbours() -> None:
    """LlamaIndex's own: what one names as next, or the other as previous, even without a source document."""
    following = chunk("a", links={NodeRelationship.NEXT: "b"}, document=None)
    previous = chunk("b", links={NodeRelationship.PREVIOUS: "a"}, document=None)
    bare = chunk("b", document=None)
    assert follows(following, bare)
    assert follows(chunk("a", document=None), previous)
    assert not follows(previous, following)
    assert not follows(chunk("a", links={NodeRelationship.NEXT: "z"}, span=(0, 10)), chunk("b", span=(10, 20)))


def test_numbers_tell_neighbours() -> None:
    """Consecutive chunks of one document; numbers go before positions, for a page's positions start anew."""
    assert follows(chunk("a", index=3), chunk("b", index=4))
    assert not follows(chunk("a", index=4), chunk("b", index=3))
    assert not follows(chunk("a", index=3), chunk("b", index=5))
    assert not follows(chunk("a", index=3), chunk("b", index=4, document="other"))
    assert not follows(chunk("a", index=3, document=None), chunk("b", index=4, document=None))
    assert not follows(chunk("a", index=0, span=(0, 10)), chunk("b", index=7, span=(8, 20)))


@pytest.mark.parametrize(
    ("one", "two", "touching"),
    [
        ((0, 10), (10, 20), True), ((0, 10), (7, 20), True), ((0, 10), (12, 20), True), ((0, 10), (13, 20), False),
        ((0, 10), (2, 8), False), ((0, 10), (0, 10), False), ((10, 20), (0, 10), False), (None, (10, 20), False),
    ],
)  # fmt: skip
def test_positions_tell_neighbours(one: tuple[int, int] | None, two: tuple[int, int], touching: bool) -> None:
    """They touch, overlap, or have white space between them; what lies within another does not follow it."""
    assert follows(chunk("a", span=one), chunk("b", span=two)) is touching


def test_no_neighbours_are_missed() -> None:
    """However two chunks are linked, numbered and placed: they are one piece where one follows the other."""

    def chunks(name: str, other: str, place: int) -> list[TextNode]:
        following, previous = NodeRelationship.NEXT, NodeRelationship.PREVIOUS
        links = [{}, {following: other}, {previous: other}, {following: "x"}, {previous: "x"}]
        ways = product([None, place], [None, (place * 10, place * 10 + 10)], [*links, {following: "x", previous: "y"}])
        return [chunk(name, index=index, span=span, links=to) for index, span, to in ways]

    pairs = list(product(chunks("a", "b", 1), chunks("b", "a", 2)))
    adjacent = [pair for pair in pairs if follows(*pair) or follows(*reversed(pair))]
    assert len(pairs) > len(adjacent) > 0
    for nodes in (*adjacent, *map(reversed, adjacent)):
        assert len(arrange([NodeWithScore(node=one) for one in nodes], 2).nodes) == 1


@pytest.mark.parametrize("ends", [(0, 1), (0, 500), (499, 502), (1, 5_900), (5_000, 5_050), (-2, 4)])
def test_neighbours_are_found_wherever_they_meet(ends: tuple[int, int]) -> None:
    """Also beside a multiple of the greatest length, on which chunks are sought; in either order."""
    for middle in (6_000, 6_001, 11_999, 12_000):
        one, two = chunk("a", span=(middle - ends[1] - 10, middle)), chunk("b", span=(middle - ends[0], middle + 900))
        assert follows(one, two)
        for nodes in ((one, two), (two, one)):
            assert len(arrange([NodeWithScore(node=node) for node in nodes], 2).nodes) == 1


@pytest.mark.parametrize("spans", [((0, 7_000), (7_000, 7_900)), ((100, 900), (900, 40_000))])
def test_a_shortened_chunk_has_neighbours(spans: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """A postprocessor that keeps single sentences leaves the chunk's place; in either order."""
    nodes = [NodeWithScore(node=chunk(name, span=span)) for name, span in zip("ab", spans, strict=True)]
    for ordered in (nodes, nodes[::-1]):
        assert len(arrange(ordered, 2).nodes) == 1


def test_numbered_chunks_are_not_compared_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are linked or placed ones: each only with those that may be beside it, also in a document of many pieces."""
    compare = Mock(side_effect=follows)
    monkeypatch.setattr(candidates, "follows", compare)
    numbered = [chunk(str(n), index=n, span=(n * 10, n * 10 + 10)) for n in range(0, 1000, 2)]
    linked = []
    for n in range(1000, 2000, 2):
        links = {NodeRelationship.PREVIOUS: str(n - 1), NodeRelationship.NEXT: str(n + 1)}
        linked.append(chunk(str(n), span=(n * 10, n * 10 + 10), links=links))
    placed = [chunk(str(n), span=(n * 1000, n * 1000 + 900)) for n in range(2000, 2500)]
    assert len(arrange([NodeWithScore(node=one) for one in (*numbered, *linked, *placed)], 1500).nodes) == 1500
    assert compare.call_count < 11_000


def test_only_plain_text_of_one_source_and_one_metadata() -> None:
    """What a joined node could not tell of all its parts keeps them apart; one node is no neighbour of itself."""
    assert follows(chunk("a", index=1, title="t"), chunk("b", index=2, title="t"))
    assert not follows(chunk("a", index=1, page_label="1"), chunk("b", index=2, page_label="2"))
    assert not follows(chunk("a", index=1, audience="public"), chunk("b", index=2, audience="staff"))
    assert not follows(chunk("a", index=1, source="docs"), chunk("b", index=2, source="wiki"))
    assert not follows(chunk("a", index=1), chunk("a", index=2))
    for kind in (IndexNode, ImageNode):
        fields = chunk("b", index=2).model_dump(exclude={"class_name"})
        extra = {"index_id": "i"} if kind is IndexNode else {}
        assert not follows(chunk("a", index=1), kind(**{**fields, **extra, "id_": "b"}))


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 12), st.integers(0, 3), st.booleans(), st.data())
def test_joining_all_chunks_gives_the_text_back(size: int, overlap: int, linked: bool, data: st.DataObject) -> None:
    """Whatever overlaps comes once, nothing is lost, and each part's text is where the provenance says."""
    words = data.draw(st.lists(st.sampled_from(["sun", "moon", "star", "comet"]), min_size=8, max_size=40))
    text = " ".join(f"{word} {n}." for n, word in enumerate(words))
    nodes = split(text, size, overlap, include_prev_next_rel=linked)
    for node in nodes:
        node.metadata[PROVENANCE_KEY] = {"source": "docs", "activity": 1, "searches": []}
    made = joined(*nodes)
    assert made.text.split() == text.split()
    if len(nodes) > 1:
        mark = provenance(made)
        assert mark is not None
        cut = [made.text[part["start"] : part["end"]] for part in mark["parts"]]
        assert [part["node_id"] for part in mark["parts"]] == [node.node_id for node in nodes]
        assert cut == [node.text for node in nodes]
        assert isinstance(made.node, TextNode)
        assert (made.node.start_char_idx, made.node.end_char_idx) == (0, nodes[-1].end_char_idx)


def test_the_best_part_gives_its_name() -> None:
    """Id, metadata and source document are the best part's, the score the best of all; links lead out of both ends."""
    one = chunk("a", "First.", index=1, title="t", links={NodeRelationship.PREVIOUS: "z", NodeRelationship.NEXT: "b"})
    two = chunk("b", "Second.", index=2, title="t", links={NodeRelationship.NEXT: "c"})
    two.embedding = [1.0]
    two.metadata[PROVENANCE_KEY].update(best_for=["q1"], reranker_score=3.0, source_score=0.5)
    one.metadata[PROVENANCE_KEY].update(best_for=["q0", "q1"], reranker_score=3.5, source_score=None)
    before = [node.model_dump() for node in (one, two)]
    made = joined(one, two, best=1, scores=(3.5, 3.0))
    assert (made.node_id, made.text, made.score, made.node.ref_doc_id) == ("b", "First.\nSecond.", 3.5, "doc")
    assert (made.metadata["title"], made.metadata["chunk_index"]) == ("t", 2)
    assert made.node.embedding is None
    assert made.node.prev_node is not None
    assert made.node.next_node is not None
    assert (made.node.prev_node.node_id, made.node.next_node.node_id) == ("z", "c")
    assert provenance(made) == {
        "source": "docs",
        "activity": 1,
        "searches": [{"query": "a"}, {"query": "b"}],
        "best_for": ["q0", "q1"],
        "reranker_score": 3.5,
        "source_score": 0.5,
        "parts": [
            {"node_id": "a", "start": 0, "end": 6, "score": 3.5},
            {"node_id": "b", "start": 7, "end": 14, "score": 3.0},
        ],
    }
    assert [node.model_dump() for node in (one, two)] == before
    alone = NodeWithScore(node=one)
    assert arrange([alone], 1).nodes[0] is alone
    assert joined(one, two).score is None


@pytest.mark.parametrize(
    ("one", "two", "spans", "text"),
    [
        ("The sun is", "is hot.", ((0, 10), (8, 15)), "The sun is hot."),
        ("The sun", "is hot.", ((0, 7), (8, 15)), "The sun is hot."),
        ("The sun", "is hot.", ((0, 7), (9, 16)), "The sun\nis hot."),
        ("The su", "n is hot.", ((0, 6), (6, 15)), "The sun is hot."),
        ("The sun is", "is hot.", (None, None), "The sun is\nis hot."),
        ("So the sun is very, very hot", "the sun is very, very hot now", (None, None),
         "So the sun is very, very hot now"),
        ("So the sun is very, very hot", "the sun is very, very hot now", ((0, 28), (0, 29)),
         "So the sun is very, very hot now"),
        ("So the sun is very, very hot", "the sun is very, very hot now", ((0, 28), (28, 57)),
         "So the sun is very, very hotthe sun is very, very hot now"),
        ("changed by somebody", "is hot.", ((0, 10), (8, 15)), "changed by somebody\nis hot."),
    ],
)  # fmt: skip
def test_what_overlaps_comes_once(one: str, two: str, spans: Any, text: str) -> None:
    """By positions where the texts bear them out; else only what is too long to be chance."""
    made = joined(chunk("a", one, index=1, span=spans[0]), chunk("b", two, index=2, span=spans[1]))
    assert made.text == text
