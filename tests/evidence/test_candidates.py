from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.schema import MetadataMode

from llama_index_agentic_kb import KnowledgeSource, interleave
from llama_index_agentic_kb.evidence.candidates import collect, lists_by_search, lists_by_sub_query
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY, provenance
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.testing import MemoryRetriever

if TYPE_CHECKING:
    from tests.evidence.conftest import MakeLane


def source(name: str = "docs", **fields: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever([]), **fields)


def lists(lanes: Sequence[SourceSearch]) -> dict[str, str]:
    made = lists_by_sub_query(lanes, interleave)
    return {one.sub_query.id: "".join(name for name, _ in one.ranked.keys) for one in made}


def scores(lanes: Sequence[SourceSearch]) -> dict[str, float | None]:
    return {name: one.score for (name, _), one in collect(lanes).items()}


def test_one_list_a_sub_query_in_the_plans_order(make_lane: MakeLane) -> None:
    """Each sub-query's searches make one list."""
    lanes = [make_lane(0, [("a", 0.9), ("b", 0.8)]), make_lane(1, [("x", 0.2), ("y", 0.1)], query="q1")]
    assert lists(lanes) == {"q0": "ab", "q1": "xy"}
    assert lists([make_lane(0, [])]) == {"q0": ""}
    assert lists([]) == {}


def test_scores_of_one_scale_are_compared(make_lane: MakeLane) -> None:
    """Searches that share a scale are merged by score; others take turns, and so does one without scores."""
    one, two = source("one"), source("two")
    same = [
        make_lane(0, [("a", 0.9), ("b", 0.8)], over=one, scale=1),
        make_lane(1, [("x", 0.85)], over=two, scale=1),
    ]
    assert lists(same) == {"q0": "axb"}
    apart = [make_lane(0, [("a", 0.2), ("b", 0.1)], over=one), make_lane(1, [("x", 0.9), ("y", 0.8)], over=two)]
    assert lists(apart) == {"q0": "axby"}
    unscored = [
        make_lane(0, [("a", 0.9), ("b", 0.8)], over=one, scale=1),
        make_lane(1, [("x", None)], over=two, scale=1),
    ]
    assert lists(unscored) == {"q0": "axb"}


@pytest.mark.parametrize("scale", [1, None])
def test_weights_lift_a_source(make_lane: MakeLane, scale: int | None) -> None:
    """A heavier source's documents come before a lighter one's of equal standing, whatever the order of sources."""
    light, heavy = source("light"), source("heavy", weight=2.0)
    first = make_lane(0, [("a", 0.5), ("b", 0.5)], over=light, scale=scale)
    second = make_lane(1, [("x", 0.5)], over=heavy, scale=scale)
    for lanes in ([first, second], [second, first]):
        assert lists(lanes)["q0"][0] == "x"


def test_dense_and_lexical_lists_of_a_search_are_fused(make_lane: MakeLane) -> None:
    """By their scores, each list's scaled from its lowest to its highest."""
    lanes = [make_lane(0, [("a", 0.9), ("b", 0.8), ("c", 0.1)], lexical=[("x", 30.0), ("b", 29.0), ("y", 1.0)])]
    assert lists(lanes) == {"q0": "baxcy"}


def test_searches_of_one_scale_are_one_corpus(make_lane: MakeLane) -> None:
    """Their dense lists merge by score, their lexical lists take turns by weight, then both are fused."""
    one, two = source("one"), source("two", weight=2.0)
    lanes = [
        make_lane(0, [("a", 0.9)], over=one, scale=1, lexical=[("k", 900.0), ("l", 800.0)]),
        make_lane(1, [("b", 0.1)], over=two, scale=1, lexical=[("m", 3.0), ("n", 2.0), ("a", 1.0)]),
    ]
    # dense: a b; lexical: m n k a l, two turns for the heavier; a is in both.
    assert lists(lanes) == {"q0": "amnklb"}


def test_searches_of_other_scales_are_other_corpora(make_lane: MakeLane) -> None:
    """A source that is searched in one way is not put behind those that are searched in two."""
    hybrid, plain = source("hybrid"), source("plain")
    lanes = [
        make_lane(0, [("a", 0.9), ("b", 0.8)], over=hybrid, scale=1, lexical=[("b", 9.0), ("a", 8.0)]),
        make_lane(1, [("x", 0.4), ("y", 0.3)], over=plain),
    ]
    assert lists(lanes) == {"q0": "axby"}


def test_no_score_is_invented(make_lane: MakeLane) -> None:
    """A similarity where a dense list has one; BM25's score beside similarities is none; both stand in the record."""
    lane = make_lane(0, [("a", 0.9), ("b", 0.8)], lexical=[("b", 31.0), ("x", 20.0)])
    assert scores([lane]) == {"a": 0.9, "b": 0.8, "x": None}
    searches = collect([lane])["b", "text of b"].searches
    assert [(s["list"], s["rank"], s["score"]) for s in searches] == [("dense", 1, 0.8), ("lexical", 0, 31.0)]


def test_one_node_of_several_searches_comes_once_with_its_provenance(make_lane: MakeLane) -> None:
    """Its metadata tells every search that found it; its score is the best one."""
    found = collect([make_lane(4, [("a", 0.5), ("b", 0.4)]), make_lane(5, [("b", 0.7)], query="q1")])
    node = found["b", "text of b"].evidence()
    mark = provenance(node)
    assert mark is not None
    assert (mark["source"], mark["activity"], node.score) == ("docs", 4, 0.7)
    assert [(s["activity"], s["sub_query"], s["rank"], s["score"]) for s in mark["searches"]] == [
        (4, "q0", 1, 0.4),
        (5, "q1", 0, 0.7),
    ]


def test_provenance_is_shown_to_no_model(make_lane: MakeLane) -> None:
    """Neither the language model's nor the embedding model's text has it; the metadata does."""
    (candidate,) = collect([make_lane(0, [("a", 0.5)])]).values()
    found = candidate.evidence()
    assert PROVENANCE_KEY in found.node.metadata
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert found.node.get_content(mode) == "title: a\n\ntext of a"
    assert PROVENANCE_KEY not in candidate.node.node.metadata


def test_searches_that_are_left_as_they_are(make_lane: MakeLane) -> None:
    """One list a search, of equal weight; only the ways of one search are fused."""
    lanes = [
        make_lane(0, [("a", 0.9)], over=source("one", weight=9.0), scale=1, lexical=[("b", 3.0)]),
        make_lane(1, [("x", 0.99)], over=source("two"), scale=1),
    ]
    made = lists_by_search(lanes, ["one"])
    assert [([name for name, _ in one.ranked.keys], one.ranked.weight, one.processed) for one in made] == [
        (["a", "b"], 1.0, False),
        (["x"], 1.0, True),
    ]
