from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb import interleave, reciprocal_rank_fusion
from llama_index_agentic_kb.search.fusion import Fused, Ranked, merge_by_score

Fuse = Callable[[Sequence[Ranked[str]]], list[Fused[str]]]

FUSIONS: list[Fuse] = [interleave, reciprocal_rank_fusion]
KEYS = st.sampled_from("abcdefgh")
WEIGHTS = st.floats(0.1, 10)
LISTS = st.lists(st.builds(Ranked, st.lists(KEYS, max_size=6), WEIGHTS), max_size=5)


def keys(fused: Sequence[Fused[str]]) -> list[str]:
    return [item.key for item in fused]


def ranked(*lists: str, weights: Sequence[float] = ()) -> list[Ranked[str]]:
    return [Ranked(list(word), weight) for word, weight in zip(lists, weights or [1.0] * len(lists), strict=True)]


@pytest.mark.parametrize("fuse", FUSIONS)
@settings(max_examples=50, deadline=None)
@given(LISTS)
def test_every_key_comes_once(fuse: Fuse, lists: list[Ranked[str]]) -> None:
    """What was found anywhere is in the fused list, exactly once, and nothing else is."""
    fused = keys(fuse(lists))
    assert len(fused) == len(set(fused))
    assert set(fused) == {key for one in lists for key in one.keys}


@pytest.mark.parametrize("fuse", FUSIONS)
@settings(max_examples=50, deadline=None)
@given(LISTS)
def test_fusion_is_deterministic_and_changes_nothing(fuse: Fuse, lists: list[Ranked[str]]) -> None:
    """The same lists give the same result, and are as they were."""
    before = copy.deepcopy(lists)
    assert fuse(lists) == fuse(lists)
    assert lists == before


@pytest.mark.parametrize("fuse", FUSIONS)
@settings(max_examples=50, deadline=None)
@given(LISTS)
def test_scores_fall_and_places_are_told(fuse: Fuse, lists: list[Ranked[str]]) -> None:
    """Scores never rise along the list; each key names every list that holds it, with its first rank there."""
    fused = fuse(lists)
    scores = [item.score for item in fused]
    assert scores == sorted(scores, reverse=True)
    for item in fused:
        first_seen = {
            (position, list(dict.fromkeys(one.keys)).index(item.key))
            for position, one in enumerate(lists)
            if item.key in one.keys
        }
        assert set(item.found) == first_seen


@pytest.mark.parametrize("fuse", FUSIONS)
@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(KEYS, max_size=6, unique=True), min_size=1, max_size=4), st.data())
def test_more_weight_never_moves_a_list_back(fuse: Fuse, lists: list[list[str]], data: st.DataObject) -> None:
    """With more weight, no key that is in this list alone loses to a key that is not in it."""
    chosen = data.draw(st.integers(0, len(lists) - 1))
    own = set(lists[chosen]) - {key for n, one in enumerate(lists) if n != chosen for key in one}
    others = {key for one in lists for key in one} - set(lists[chosen])

    def order(weight: float) -> list[str]:
        return keys(fuse([Ranked(one, weight if n == chosen else 1.0) for n, one in enumerate(lists)]))

    light, heavy = order(1.0), order(3.0)
    for key in own:
        for other in others:
            assert not (light.index(key) < light.index(other) and heavy.index(key) > heavy.index(other))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(KEYS, min_size=1, max_size=6, unique=True), min_size=1, max_size=5))
def test_interleaving_covers_every_list(lists: list[list[str]]) -> None:
    """Each list's best key is among as many first places as there are lists; its second among twice as many."""
    fused = keys(interleave([Ranked(one) for one in lists]))
    for one in lists:
        for rank, key in enumerate(one):
            assert fused.index(key) < (rank + 1) * len(lists)


def test_interleaving_with_equal_weights_is_round_robin() -> None:
    """The lists take turns, the first one first; a key that was taken is passed over."""
    assert keys(interleave(ranked("abc", "xyz"))) == list("axbycz")
    assert keys(interleave(ranked("abc", "bad", "c"))) == list("abcd")


def test_a_list_of_weight_two_has_two_turns() -> None:
    """Weight is turns; the heavier list goes first among equals."""
    assert keys(interleave(ranked("xyz", "abcd", weights=[1, 2]))) == list("abxcdyz")
    assert keys(interleave(ranked("xyz", "abcd", weights=[1, 100]))) == list("abcdxyz")


def test_reciprocal_rank_fusion_sums_over_lists() -> None:
    """The score is the paper's sum; two good places beat one best place."""
    fused = reciprocal_rank_fusion(ranked("abc", "xb"))
    assert keys(fused) == ["b", "a", "x", "c"]
    assert fused[0].score == pytest.approx(1 / 62 + 1 / 62)
    assert keys(reciprocal_rank_fusion(ranked("abc", "xb", weights=[1, 3])))[:2] == ["b", "x"]


def test_only_the_top_of_each_list_may_count() -> None:
    """``cut`` leaves the tails out; a small ``k`` favours top ranks."""
    assert keys(reciprocal_rank_fusion(ranked("abc", "xyz"), cut=1)) == ["a", "x"]
    lists = ranked("abcdeX", "vwxyzX")
    assert keys(reciprocal_rank_fusion(lists))[0] == "X"
    assert keys(reciprocal_rank_fusion(lists, k=0))[0] == "a"


def test_lists_without_weight_and_repeated_keys() -> None:
    """A list of weight 0 is left out; a key that comes twice in one list counts once, where it comes first."""
    for fuse in FUSIONS:
        assert keys(fuse(ranked("ab", "xy", weights=[1, 0]))) == ["a", "b"]
        assert fuse(ranked("aab")) == fuse(ranked("ab"))
        assert fuse([]) == fuse(ranked("", "")) == []


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


@settings(max_examples=50, deadline=None)
@given(SCORED)
def test_weight_lifts_scores_below_zero_too(lists: list[list[tuple[str, float]]]) -> None:
    """A list of more weight never falls behind one of less, also where scores are negative."""
    for pairs in lists:
        doubled = [(key.upper(), score) for key, score in pairs]
        merged = merge_by_score([pairs, doubled], [1.0, 2.0])
        for key in {key for key, _ in pairs}:
            best = max(score for other, score in pairs if other == key)
            if best != 0:
                assert merged.index(key.upper()) < merged.index(key)


def test_ties_go_to_the_earlier_list() -> None:
    """Equal scores keep the order of lists and ranks; keys need not be comparable."""
    first: object = (1, "x")
    second: object = ("y", 2)
    lists = [[(first, 0.5), (second, 0.5)], [(second, 0.5)]]
    assert merge_by_score(lists, [1.0, 1.0]) == [first, second]
