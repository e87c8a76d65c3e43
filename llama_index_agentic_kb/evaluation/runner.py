"""Runs systems side by side over an evaluation set, and sums a run up.

The metrics are trec_eval's and BEIR's. They stand here because each is one line; a library of them brings a compiled
extension, and has no All@k.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean
from typing import Any, Final, Self

import numpy as np

from llama_index_agentic_kb.evaluation.dataset import Dataset, EvaluationQuery
from llama_index_agentic_kb.evaluation.meter import Cost
from llama_index_agentic_kb.evaluation.systems import Found, System

__all__ = ["ALL", "BASELINE", "METRICS", "PLAIN", "EvaluationRun", "QueryResult", "SystemRun", "evaluate", "mean"]

BASELINE: Final = "hybrid"
"""The system that others are compared with: the single query, dense and BM25 fused."""

PLAIN: Final = "minimal"
"""Ours without a plan: what a plan found beyond it is the plan's value."""

ALL: Final = "all"
"""The questions of every kind together."""

COSTS: Final = tuple(cost.name for cost in fields(Cost))

SAMPLES: Final = 2_000
"""Resamples of a bootstrap interval."""

DRAWS_AT_ONCE: Final = 2_000_000
"""So many values are drawn together: all resamples at once would take gigabytes for 100,000 questions."""

Relevant = Mapping[str, float]


def _ndcg(ranking: Sequence[str], relevant: Relevant, k: int) -> float:
    """Return nDCG@k with linear gain (Jarvelin and Kekalainen, TOIS 2002); a repeated document counts once."""
    gained = sum(relevant.get(key, 0.0) / math.log2(at + 2) for at, key in enumerate([*dict.fromkeys(ranking)][:k]))
    best = sorted(relevant.values(), reverse=True)[:k]
    return gained / sum(grade / math.log2(at + 2) for at, grade in enumerate(best))


METRICS: Final[Mapping[str, Callable[[Sequence[str], Relevant, int], float]]] = {
    "R": lambda ranking, relevant, k: len(relevant.keys() & set(ranking[:k])) / len(relevant),
    "All": lambda ranking, relevant, k: float(relevant.keys() <= set(ranking[:k])),
    "nDCG": _ndcg,
    "MRR": lambda ranking, relevant, k: next((1 / (at + 1) for at, x in enumerate(ranking[:k]) if x in relevant), 0.0),
}
"""What is measured, at each k: recall, whether every relevant document was found, gain, the first one's place."""


def mean(values: Sequence[float] | np.ndarray, seed: int = 0) -> dict[str, float]:
    """Return the mean with its 95 % bootstrap percentile interval (Efron and Tibshirani 1993, chapter 13).

    Args:
        values: One a question; or differences of two systems, paired by question.
        seed: Of the resampling.

    Returns:
        "mean", "low", "high", and "p", the two-sided bootstrap p-value that the mean is not 0.
    """
    array, generator = np.asarray(values, dtype=float), np.random.default_rng(seed)
    at_once = max(1, DRAWS_AT_ONCE // len(array))
    sizes = [min(at_once, SAMPLES - start) for start in range(0, SAMPLES, at_once)]
    draws = [array[generator.integers(0, len(array), size=(size, len(array)))].mean(axis=1) for size in sizes]
    means = np.concatenate(draws)
    low, high = np.percentile(means, [2.5, 97.5])
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (SAMPLES + 1))  # never 0: so many resamples can't show more
    return {"mean": float(array.mean()), "low": float(low), "high": float(high), "p": p}


@dataclass(slots=True)
class QueryResult:
    """One question at one system.

    Args:
        query_id: The question.
        kinds: What kinds of question it is of.
        documents: What was found, best first.
        metrics: By name and k: ``R@5``.
        milliseconds: How long it took, with others at its side.
        cost: What it cost.
        plan: The queries that were searched.
        activity: The account, as data; our systems alone have one.
        warnings: What our systems warned of.
        error: Why it found nothing, where it failed.
    """

    query_id: str
    kinds: list[str]
    documents: list[str]
    metrics: dict[str, float]
    milliseconds: float
    cost: Cost = field(default_factory=Cost)
    plan: list[str] = field(default_factory=list)
    activity: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class SystemRun:
    """All questions at one system, in the set's order."""

    system: str
    results: list[QueryResult] = field(default_factory=list)

    def values(self, metric: str, kind: str = ALL) -> list[float]:
        """Return a metric's per-query values, of one kind of question or of all."""
        return [result.metrics[metric] for result in self.results if kind in {ALL, *result.kinds}]


@dataclass(slots=True)
class EvaluationRun:
    """A whole run, ready to be reported, kept as JSON, and compared with another.

    Args:
        dataset: The set's name.
        plans: Where plans came from.
        cutoffs: The k of each metric.
        systems: One run a system.
        relevant: Grades by document id, by query id.
        notes: What should be known of the run.
        settings: What it was made with: seed, embedding model, concurrency, versions.
    """

    dataset: str
    plans: str
    cutoffs: list[int]
    systems: list[SystemRun] = field(default_factory=list)
    relevant: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """All questions, then the kinds of questions in order of appearance, where not all are of the same."""
        results = self.systems[0].results if self.systems else []
        kinds = list(dict.fromkeys(kind for result in results for kind in result.kinds))
        return [ALL, *(kinds if any(set(result.kinds) != set(kinds) for result in results) else [])]

    def run_of(self, system: str) -> SystemRun | None:
        """Return a system's run, or None."""
        return next((run for run in self.systems if run.system == system), None)

    def summary(self) -> list[dict[str, Any]]:
        """Return each system's run in numbers: metrics and differences from the baseline by kind, costs, plan value."""
        return [self._summary(one) for one in self.systems]

    def _summary(self, one: SystemRun) -> dict[str, Any]:
        baseline = self.run_of(BASELINE)
        names = [f"{metric}@{k}" for k in self.cutoffs for metric in METRICS]
        kinds = {}
        for kind in self.kinds:
            values = {name: one.values(name, kind) for name in names}
            kinds[kind] = {
                "questions": len(values[names[0]]),
                "metrics": {name: mean(mine) for name, mine in values.items()},
                "differences": {}
                if baseline is None or baseline is one
                else {name: mean(np.subtract(mine, baseline.values(name, kind))) for name, mine in values.items()},
            }
        times = [result.milliseconds for result in one.results]
        return {
            "system": one.system,
            "kinds": kinds,
            "cost": {name: fmean(getattr(result.cost, name) for result in one.results) for name in COSTS},
            "milliseconds": {f"p{q}": float(np.percentile(times, q)) for q in (50, 99)},
            "plan_value": self._plan_value(one),
            "failed": sum(result.error is not None for result in one.results),
            "warned": sum(bool(result.warnings) for result in one.results),
        }

    def _plan_value(self, system: SystemRun) -> dict[str, float] | None:
        """Return what was found that the plain query missed, and the other way, as shares of all relevant documents."""
        plain = self.run_of(PLAIN)
        if plain is None or plain is system:
            return None
        k, gained, lost, total = max(self.cutoffs), 0, 0, 0
        for ours, theirs in zip(system.results, plain.results, strict=True):
            relevant = self.relevant[ours.query_id].keys()
            found, before = relevant & set(ours.documents[:k]), relevant & set(theirs.documents[:k])
            gained, lost, total = gained + len(found - before), lost + len(before - found), total + len(relevant)
        return {"gained": gained / total, "lost": lost / total}

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` returned."""
        systems = [
            SystemRun(run["system"], [QueryResult(**{**one, "cost": Cost(**one["cost"])}) for one in run["results"]])
            for run in data["systems"]
        ]
        known = ("dataset", "plans", "cutoffs", "relevant", "notes", "settings")
        return cls(**{name: data[name] for name in known}, systems=systems)


def evaluate(
    dataset: Dataset,
    systems: Sequence[System],
    *,
    plans: str = "none",
    cutoffs: Sequence[int] = (5, 10),
    concurrency: int = 4,
    progress: Callable[[str, int, int], None] | None = None,
) -> EvaluationRun:
    """Ask every system every question.

    Systems run one after another, each with some questions side by side. A question that fails counts as one that
    found nothing, and its error is kept.

    Args:
        dataset: The set.
        systems: What is compared.
        plans: Where their plans come from, for the report.
        cutoffs: The k of each metric.
        concurrency: Questions asked side by side; 1 where times are to be those of a single user.
        progress: Called with (system, done, all).
    """
    relevant = {query.id: dataset.relevant[query.id] for query in dataset.queries}
    run = EvaluationRun(dataset.name, plans, list(cutoffs), relevant=relevant, notes=list(dataset.warnings))
    run.settings = {"concurrency": concurrency}

    async def run_system(system: System) -> SystemRun:
        gate, done = asyncio.Semaphore(concurrency), 0

        async def ask(query: EvaluationQuery) -> QueryResult:
            nonlocal done
            async with gate:
                result = await _ask(system, query, relevant[query.id], cutoffs)
            done += 1
            if progress is not None:
                progress(system.name, done, len(dataset.queries))
            return result

        return SystemRun(system.name, list(await asyncio.gather(*map(ask, dataset.queries))))

    async def run_all() -> None:
        for system in systems:
            run.systems.append(await run_system(system))

    asyncio.run(run_all())
    return run


async def _ask(system: System, query: EvaluationQuery, relevant: Relevant, cutoffs: Sequence[int]) -> QueryResult:
    start, error = time.perf_counter(), None
    try:
        found = await system.ask(query)
    except Exception as failure:  # noqa: BLE001 (one question's failure is a result too)
        found, error = Found([]), f"{type(failure).__name__}: {failure}"
    return QueryResult(
        query_id=query.id,
        kinds=list(query.kinds),
        documents=found.documents,
        metrics={f"{n}@{k}": measure(found.documents, relevant, k) for n, measure in METRICS.items() for k in cutoffs},
        milliseconds=(time.perf_counter() - start) * 1000,
        cost=found.cost,
        plan=found.plan,
        activity=found.activity,
        warnings=found.warnings,
        error=error,
    )
