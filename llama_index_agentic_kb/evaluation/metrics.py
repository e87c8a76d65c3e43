"""Measures of one ranking, and how sure their mean is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

__all__ = [
    "Difference",
    "Interval",
    "all_at",
    "bootstrap_interval",
    "ndcg_at",
    "paired_bootstrap",
    "precision_at",
    "recall_at",
    "reciprocal_rank_at",
]

SAMPLES: Final = 2_000
DRAWS_AT_ONCE: Final = 2_000_000


def recall_at(ranking: Sequence[str], relevant: Mapping[str, float], k: int) -> float:
    """Give R@k: the share of the relevant documents among the first k."""
    return len(relevant.keys() & set(ranking[:k])) / len(relevant)


def precision_at(ranking: Sequence[str], relevant: Mapping[str, float], k: int) -> float:
    """Give P@k: the share of the first k places that hold relevant documents."""
    return len(relevant.keys() & set(ranking[:k])) / k


def all_at(ranking: Sequence[str], relevant: Mapping[str, float], k: int) -> float:
    """Give All@k: 1 where every relevant document is among the first k, else 0."""
    return float(relevant.keys() <= set(ranking[:k]))


def reciprocal_rank_at(ranking: Sequence[str], relevant: Mapping[str, float], k: int) -> float:
    """Give RR@k: 1 / the 1-based rank of the first relevant document, 0 where none is among the first k."""
    return next((1 / rank for rank, one in enumerate(ranking[:k], start=1) if one in relevant), 0.0)


def ndcg_at(ranking: Sequence[str], relevant: Mapping[str, float], k: int) -> float:
    """Give nDCG@k with linear gain: sum of grade / log2(rank + 1), over the same of the best ranking.

    Jarvelin and Kekalainen, TOIS 2002, in the form that trec_eval's ``ndcg_cut`` and BEIR use. A document that comes
    twice counts where it comes first.
    """
    seen = list(dict.fromkeys(ranking))[:k]
    gained = sum(relevant.get(one, 0.0) / math.log2(rank + 1) for rank, one in enumerate(seen, start=1))
    best = sorted(relevant.values(), reverse=True)[:k]
    return gained / sum(grade / math.log2(rank + 1) for rank, grade in enumerate(best, start=1))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % bootstrap percentile interval (Efron and Tibshirani 1993, chapter 13)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean paired difference, with its 95 % interval and the two-sided bootstrap p-value."""

    mean: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def bootstrap_interval(values: Sequence[float], *, samples: int = SAMPLES, seed: int = 0) -> Interval:
    """Give the mean of per-query values and its interval.

    Args:
        values: At least one.
        samples: Resamples.
        seed: Of the resampling.
    """
    means = _means(np.asarray(values, dtype=float), samples, seed)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(np.mean(values)), float(low), float(high))


def paired_bootstrap(
    ours: Sequence[float], theirs: Sequence[float], *, samples: int = SAMPLES, seed: int = 0
) -> Difference:
    """Give how much better one system is than another on the same queries.

    Args:
        ours: Per-query values.
        theirs: Of the other, in the same order.
        samples: Resamples.
        seed: Of the resampling.

    Raises:
        ValueError: The lists differ in length, or are empty.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError("paired values must be of the same queries, and at least one")
    deltas = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    means = _means(deltas, samples, seed)
    low, high = np.percentile(means, [2.5, 97.5])
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (samples + 1))  # never 0: so many resamples can't show more
    return Difference(float(deltas.mean()), float(low), float(high), p)


def _means(values: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Give the mean of each resample, some at a time: all of them at once would take gigabytes for 100,000 values."""
    generator, count = np.random.default_rng(seed), len(values)
    at_once = max(1, DRAWS_AT_ONCE // count)
    sizes = [min(at_once, samples - start) for start in range(0, samples, at_once)]
    return np.concatenate([values[generator.integers(0, count, size=(size, count))].mean(axis=1) for size in sizes])
