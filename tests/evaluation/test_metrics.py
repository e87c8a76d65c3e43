from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.evaluation import METRICS
from llama_index_agentic_kb.evaluation.runner import mean


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


def test_what_comes_twice_counts_once() -> None:
    """A repeated document adds no gain and takes no place."""
    assert METRICS["nDCG"](["e", "e", "z", "b"], {"b": 1.0, "e": 3.0, "z": 2.0}, 3) == pytest.approx(1)


def test_an_interval_holds_its_mean_and_shrinks_with_more_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the values halve its width, about; the same seed gives the same interval, whatever memory allows."""
    narrow, wide = mean([0.0, 1.0] * 200), mean([0.0, 1.0] * 50)
    assert narrow["low"] < narrow["mean"] == 0.5 < narrow["high"]
    assert 1.6 < (wide["high"] - wide["low"]) / (narrow["high"] - narrow["low"]) < 2.5
    monkeypatch.setattr("llama_index_agentic_kb.evaluation.runner.DRAWS_AT_ONCE", 100)
    assert mean([0.0, 1.0] * 50) == wide


def test_a_difference_is_separated_from_noise() -> None:
    """A steady gain is significant, though never quite sure; a coin's is not; no difference has a p-value of 1."""
    steady = mean([0.01] * 200)
    assert steady["low"] > 0
    assert steady["p"] == pytest.approx(2 / 2001)
    noise = mean(np.random.default_rng(1).choice([-1.0, 1.0], size=200))
    assert noise["low"] < 0 < noise["high"]
    assert noise["p"] > 0.05
    assert mean([0.0] * 50)["p"] == 1
