from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb import interleave, reciprocal_rank_fusion
from llama_index_agentic_kb.search.fusion import (
    DEPTH,
    Fused,
    Ranked,
    merge_by_score,
    relative_score_fusion,
    with_coverage,
)

Fuse = Callable[[Sequence[Ranked[str]]], list[Fused[str]]]

FUSIONS: list[Fuse] = [interleave, reciprocal_rank_fusion, relative_score_fusion]
KEYS = st.sampled_from("abcdefgh")
WEIGHTS = st.floats(0.1, 10)
SCORES = st.one_of(st.floats(-50, 50), st.just(math.nan), st.just(math.inf))


@st.composite
def ranked_lists(draw: st.DrawFn, keys: st.SearchStrategy[str] = KEYS, most: int = 6) -> Ranked[str]:
    """Draw a list with or without scores; its keys stand as they stand, whatever its scores say."""
    drawn = draw(st.lists(keys, max_size=most))
    scores = draw(st.one_of(st.none(), st.lists(SCORES, min_size=len(drawn), max_size=len(drawn))))
    return Ranked(drawn, draw(WEIGHTS), scores)


LISTS = st.lists(ranked_lists(), max_size=5)


def keys(fused: Sequence[Fused[str]]) -> list[str]:
    return [item.key for item in fused]


def ranked(*lists: str, weights: Sequence[float] = ()) -> list[Ranked[str]]:
    return [Ranked(list(word), weight) for word, weight in zip(lists, weights or [1.0] * len(lists), strict=True)]


@pytest.mark.parametrize("fuse", FUSIONS)
@settings(max_examples=50, deadline=None)
@given(LISTS)
def test_every_key_comes_once_with_its_places(fuse: Fuse, lists: list[Ranked[str]]) -> None:
    """Scores never rise; each key names every list that holds it, with its first rank; nothing is changed."""
    before = repr(lists)
    fused = fuse(lists)
    assert (repr(lists), fuse(lists)) == (before, fused)
    assert sorted(keys(fused)) == sorted({key for one in lists for key in one.keys})
    scores = [item.score for item in fused]
    assert scores == sorted(scores, reverse=True)
    for item in fused:
        first_seen = {
            (position, list(dict.fromkeys(one.keys)).index(item.key))
            for position, one in enumerate(lists)
            if item.key in one.keys
        }
        assert set(item.found) == first_seen


@pytest.mark.parametrize(
    ("fuse", "lists", "order"),
    [
        (interleave, ranked("abc", "xyz"), "axbycz"),
        (interleave, ranked("abc", "bad", "c"), "abcd"),
        (interleave, ranked("abc", "xy", "b"), "axbyc"),
        (interleave, ranked("xyz", "abcd", weights=[1, 2]), "abxcdyz"),
        (interleave, ranked("xyz", "abcd", weights=[1, 100]), "abcdxyz"),
        (reciprocal_rank_fusion, ranked("abc", "xb"), "baxc"),
        (reciprocal_rank_fusion, ranked("abc", "xb", weights=[1, 3]), "bxac"),
        (relative_score_fusion, [Ranked("a", scores=[3.0]), Ranked("b", scores=[9.0])], "ab"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_orders(fuse: Fuse, lists: list[Ranked[str]], order: str) -> None:
    """Lists take turns by their weight, or the sum of reciprocal ranks decides; what says nothing stays as it was."""
    assert keys(fuse(lists)) == list(order)
    if order == "baxc":
        assert fuse(lists)[0].score == pytest.approx(1 / 62 + 1 / 62)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        ({"a": 7.0}, [1.0]),
        ({"a": 7.0, "b": 7.0}, [1.0, 1.0]),
        ({"a": math.nan, "b": math.inf}, [1.0, 1.0]),
        ({"a": 1e308, "b": 1e308}, [1.0, 1.0]),
        ({"a": 3.0, "b": math.nan, "c": 1.0}, [1.0, 0.0, 0.0]),
    ],
)
def test_scores_that_say_little(one: dict[str, float], expected: list[float]) -> None:
    """Equal scores, and lists of none that is a number, count the same; beside others such a score is the lowest."""
    assert {item.key: item.score for item in relative_score_fusion([Ranked(list(one), scores=list(one.values()))])} == (
        dict(zip(one, expected, strict=True))
    )


def test_lists_without_weight_and_repeated_keys() -> None:
    """A list of weight 0 is left out; a key that comes twice in one list counts once, where it comes first."""
    for fuse in FUSIONS:
        assert keys(fuse(ranked("ab", "xy", weights=[1, 0]))) == ["a", "b"]
        assert fuse(ranked("aab")) == fuse(ranked("ab"))
        assert fuse([]) == fuse(ranked("", "")) == []
    repeated = relative_score_fusion([Ranked("aab", scores=[3.0, 1.0, 2.0])])
    assert repeated == relative_score_fusion([Ranked("ab", scores=[3.0, 2.0])])


def scored(**lists: dict[str, float]) -> list[Ranked[str]]:
    return [Ranked(list(one), scores=list(one.values())) for one in lists.values()]


def test_relative_scores_go_from_lowest_to_highest() -> None:
    """A list's best counts 1, its worst 0, what lies between by its distance; BM25's size does not matter."""
    fused = relative_score_fusion(scored(dense={"a": 0.9, "b": 0.8, "c": 0.5}, lexical={"b": 30.0, "d": 10.0}))
    assert keys(fused) == ["b", "a", "c", "d"]
    assert {item.key: round(item.score, 9) for item in fused} == {"b": 1.75, "a": 1.0, "c": 0.0, "d": 0.0}
    assert [item.score for item in relative_score_fusion(ranked("abcd"))] == [1.0, 0.75, 0.5, 0.25]
    with pytest.raises(ValueError, match="shorter"):
        relative_score_fusion([Ranked("ab", scores=[1.0])])


LONG = st.lists(ranked_lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), most=14), max_size=5)


@pytest.mark.parametrize("fuse", [*FUSIONS, partial(reciprocal_rank_fusion, k=0)])
@settings(max_examples=60, deadline=None)
@given(LONG, st.integers(1, 12))
def test_each_lists_best_comes_before_any_lists_tenth(fuse: Fuse, lists: list[Ranked[str]], places: int) -> None:
    """Whatever fused: bests before what is deep in every list, and among the first places; nothing is lost."""
    fused = fuse(lists)
    covered = with_coverage(fused, lists, places=places)
    assert sorted(keys(covered)) == sorted(keys(fused))
    bests = {one.keys[0] for one in lists if one.keys}
    deep = [key for item in covered if (key := item.key) not in bests and item.best_rank + 1 >= DEPTH]
    at = {item.key: position for position, item in enumerate(covered)}
    assert all(at[best] < at[key] for best in bests for key in deep)
    assert sum(at[best] < places for best in bests) == min(places, len(bests))


def test_a_heavy_list_leaves_room_for_a_light_ones_best() -> None:
    """Weights of 100 to 1 would put a hundred before it; it comes before the tenth, or in the last of the places."""
    lists = ranked("abcdefghijklm", "XYZ", weights=[100, 1])
    assert keys(with_coverage(interleave(lists), lists, places=99)) == list("abcdefghiXjklmYZ")
    assert keys(with_coverage(interleave(lists), lists, places=4)) == list("abcXdefghijklmYZ")
    assert keys(with_coverage(interleave(lists), lists, places=1))[0] == "a"
    unweighted = ranked("ab", "xy", weights=[1, 0])
    assert keys(with_coverage(interleave(unweighted), unweighted, places=1)) == ["a", "b"]


SCORED = st.lists(st.lists(st.tuples(KEYS, st.floats(-1, 1)), max_size=5), max_size=4)


@settings(max_examples=50, deadline=None)
@given(SCORED, st.data())
def test_merging_keeps_each_key_at_its_best(lists: list[list[tuple[str, float]]], data: st.DataObject) -> None:
    """With equal weights the merged list is sorted by each key's best score, each key once."""
    before = copy.deepcopy(lists)
    merged = merge_by_score(lists, [1.0] * len(lists))
    best: dict[str, float] = {}
    for pairs in lists:
        for key, score in pairs:
            best[key] = max(score, best.get(key, -2))
    assert sorted(best) == sorted(merged)
    assert [best[key] for key in merged] == sorted(best.values(), reverse=True)
    assert lists == before
