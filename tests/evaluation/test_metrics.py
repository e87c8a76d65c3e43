from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.evaluation import (
    all_at,
    bootstrap_interval,
    ndcg_at,
    paired_bootstrap,
    precision_at,
    recall_at,
    reciprocal_rank_at,
)

RANKING = ["a", "b", "c", "d", "e"]
RELEVANT = {"b": 1.0, "e": 3.0, "z": 2.0}


def test_hand_worked_values() -> None:
    """Worked out on paper: b stands second, e fifth, z is not found."""
    assert recall_at(RANKING, RELEVANT, 5) == pytest.approx(2 / 3)
    assert recall_at(RANKING, RELEVANT, 1) == 0
    assert precision_at(RANKING, RELEVANT, 5) == pytest.approx(2 / 5)
    assert all_at(RANKING, RELEVANT, 5) == 0
    assert all_at(RANKING, {"b": 1.0, "e": 1.0}, 5) == 1
    assert all_at(RANKING, {"b": 1.0, "e": 1.0}, 4) == 0
    assert reciprocal_rank_at(RANKING, RELEVANT, 5) == pytest.approx(1 / 2)
    assert reciprocal_rank_at(RANKING, {"z": 1.0}, 5) == 0
    best = 3 / math.log2(2) + 2 / math.log2(3) + 1 / math.log2(4)
    assert ndcg_at(RANKING, RELEVANT, 5) == pytest.approx((1 / math.log2(3) + 3 / math.log2(6)) / best)


def test_the_best_ranking_has_ndcg_one_and_repeats_gain_nothing() -> None:
    """Grades in order give 1; a document that comes twice counts once."""
    assert ndcg_at(["e", "z", "b"], RELEVANT, 3) == pytest.approx(1)
    assert ndcg_at(["e", "e", "z", "b"], RELEVANT, 3) == pytest.approx(1)


def brute_ndcg(ranking: Sequence[str], relevant: dict[str, float], k: int) -> float:
    """NDCG by numpy over arrays of gains, written apart from the one under test."""
    discounts = 1 / np.log2(np.arange(2, k + 2))
    gains = np.array([relevant.get(one, 0.0) for one in ranking[:k]] + [0.0] * max(0, k - len(ranking)))
    ideal = np.sort(np.array([*relevant.values(), *[0.0] * k]))[::-1][:k]
    return float((gains[:k] * discounts).sum() / (ideal * discounts).sum())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8),
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.5, 5), min_size=1, max_size=8),
    st.integers(1, 10),
)
def test_measures_agree_with_a_second_way_of_counting(ranking: list[str], relevant: dict[str, float], k: int) -> None:
    """nDCG, recall, all and reciprocal rank against brute force; all within 0 and 1."""
    assert ndcg_at(ranking, relevant, k) == pytest.approx(brute_ndcg(ranking, relevant, k))
    found = sum(one in ranking[:k] for one in relevant)
    assert recall_at(ranking, relevant, k) == pytest.approx(found / len(relevant))
    assert all_at(ranking, relevant, k) == (found == len(relevant))
    ranks = [ranking.index(one) + 1 for one in relevant if one in ranking[:k]]
    assert reciprocal_rank_at(ranking, relevant, k) == pytest.approx(1 / min(ranks) if ranks else 0)


def test_an_interval_holds_its_mean_and_shrinks_with_more_values() -> None:
    """Four times the values halve its width, about; the same seed gives the same interval."""
    few, many = [0.0, 1.0] * 50, [0.0, 1.0] * 200
    narrow, wide = bootstrap_interval(many), bootstrap_interval(few)
    assert narrow.low < narrow.mean == 0.5 < narrow.high
    assert 1.6 < (wide.high - wide.low) / (narrow.high - narrow.low) < 2.5
    assert bootstrap_interval(few) == wide
    assert bootstrap_interval([1.0]) == type(wide)(1.0, 1.0, 1.0)


def test_a_paired_difference_is_told_from_noise() -> None:
    """A steady gain is significant, a coin's is not; pairing matters."""
    base = [0.1 * (at % 10) for at in range(200)]
    better = [value + 0.01 for value in base]
    assert paired_bootstrap(better, base).significant
    assert paired_bootstrap(better, base).p < 0.01
    coins = np.random.default_rng(1).choice([-1.0, 1.0], size=200)
    noise = paired_bootstrap([value + coin for value, coin in zip(base, coins, strict=True)], base)
    assert not noise.significant
    assert noise.p > 0.05
    assert paired_bootstrap(base, better).mean == pytest.approx(-0.01)


def test_a_difference_is_never_quite_sure() -> None:
    """So many resamples can't show a p-value of 0; equal systems have 1."""
    assert paired_bootstrap([1.0] * 50, [0.0] * 50, samples=999).p == pytest.approx(2 / 1000)
    assert paired_bootstrap([1.0] * 50, [1.0] * 50).p == 1


def test_many_values_are_resampled_in_parts_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory allows at once does not change the interval."""
    values = np.random.default_rng(3).random(57).tolist()
    whole = bootstrap_interval(values)
    monkeypatch.setattr("llama_index_agentic_kb.evaluation.metrics.DRAWS_AT_ONCE", 100)
    assert bootstrap_interval(values) == whole


def test_unpaired_values_are_refused() -> None:
    """Pairs are of the same queries."""
    with pytest.raises(ValueError, match="same queries"):
        paired_bootstrap([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        paired_bootstrap([], [])
