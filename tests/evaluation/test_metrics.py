from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.evaluation import METRICS
from llama_index_agentic_kb.evaluation.runner import mean

RANKING = ["a", "b", "c", "d", "e"]
RELEVANT = {"b": 1.0, "e": 3.0, "z": 2.0}
BEST = 3 / math.log2(2) + 2 / math.log2(3) + 1 / math.log2(4)


@pytest.mark.parametrize(
    ("metric", "ranking", "relevant", "k", "value"),
    [
        ("R", RANKING, RELEVANT, 5, 2 / 3),
        ("R", RANKING, RELEVANT, 1, 0),
        ("All", RANKING, RELEVANT, 5, 0),
        ("All", RANKING, {"b": 1.0, "e": 1.0}, 5, 1),
        ("All", RANKING, {"b": 1.0, "e": 1.0}, 4, 0),
        ("MRR", RANKING, RELEVANT, 5, 1 / 2),
        ("MRR", RANKING, {"z": 1.0}, 5, 0),
        ("nDCG", RANKING, RELEVANT, 5, (1 / math.log2(3) + 3 / math.log2(6)) / BEST),
        ("nDCG", ["e", "z", "b"], RELEVANT, 3, 1),
        ("nDCG", ["e", "e", "z", "b"], RELEVANT, 3, 1),
    ],
)
def test_hand_worked_values(metric: str, ranking: list[str], relevant: dict[str, float], k: int, value: float) -> None:
    """Worked out on paper: b stands second, e fifth, z is not found; what comes twice counts once."""
    assert METRICS[metric](ranking, relevant, k) == pytest.approx(value)


def brute_ndcg(ranking: Sequence[str], relevant: dict[str, float], k: int) -> float:
    """NDCG by numpy over arrays of gains, written apart from the one under test."""
    discounts = 1 / np.log2(np.arange(2, k + 2))
    gains = np.array([relevant.get(key, 0.0) for key in ranking[:k]] + [0.0] * max(0, k - len(ranking)))
    ideal = np.sort(np.array([*relevant.values(), *[0.0] * k]))[::-1][:k]
    return float((gains[:k] * discounts).sum() / (ideal * discounts).sum())


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8),
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.5, 5), min_size=1, max_size=8),
    st.integers(1, 10),
)
def test_metrics_agree_with_a_second_way_of_counting(ranking: list[str], relevant: dict[str, float], k: int) -> None:
    """nDCG, recall, all and reciprocal rank against brute force."""
    found = sum(key in ranking[:k] for key in relevant)
    ranks = [ranking.index(key) + 1 for key in relevant if key in ranking[:k]]
    assert {name: measure(ranking, relevant, k) for name, measure in METRICS.items()} == {
        "nDCG": pytest.approx(brute_ndcg(ranking, relevant, k)),
        "R": pytest.approx(found / len(relevant)),
        "All": found == len(relevant),
        "MRR": pytest.approx(1 / min(ranks) if ranks else 0),
    }


def test_an_interval_holds_its_mean_and_shrinks_with_more_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the values halve its width, about; the same seed gives the same interval, whatever memory allows."""
    narrow, wide = mean([0.0, 1.0] * 200), mean([0.0, 1.0] * 50)
    assert narrow["low"] < narrow["mean"] == 0.5 < narrow["high"]
    assert 1.6 < (wide["high"] - wide["low"]) / (narrow["high"] - narrow["low"]) < 2.5
    monkeypatch.setattr("llama_index_agentic_kb.evaluation.runner.DRAWS_AT_ONCE", 100)
    assert mean([0.0, 1.0] * 50) == wide


def test_a_difference_is_told_from_noise() -> None:
    """A steady gain is significant, though never quite sure; a coin's is not; no difference has a p-value of 1."""
    steady = mean([0.01] * 200)
    assert steady["low"] > 0
    assert steady["p"] == pytest.approx(2 / 2001)
    noise = mean(np.random.default_rng(1).choice([-1.0, 1.0], size=200))
    assert noise["low"] < 0 < noise["high"]
    assert noise["p"] > 0.05
    assert mean([0.0] * 50)["p"] == 1
