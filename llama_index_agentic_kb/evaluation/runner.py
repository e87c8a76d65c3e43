"""Runs systems side by side over an evaluation set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from llama_index_agentic_kb.evaluation.dataset import Dataset, EvaluationQuery
from llama_index_agentic_kb.evaluation.metering import Cost
from llama_index_agentic_kb.evaluation.metrics import (
    all_at,
    ndcg_at,
    precision_at,
    recall_at,
    reciprocal_rank_at,
)
from llama_index_agentic_kb.evaluation.systems import Found, System

__all__ = ["METRICS", "EvaluationRun", "QueryResult", "SystemRun", "aevaluate", "evaluate"]

METRICS: Final[Mapping[str, Callable[[Sequence[str], Mapping[str, float], int], float]]] = {
    "R": recall_at,
    "All": all_at,
    "nDCG": ndcg_at,
    "MRR": reciprocal_rank_at,
    "P": precision_at,
}
"""What is measured, at each k."""

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class QueryResult:
    """One question at one system.

    Args:
        query_id: The question.
        kinds: What kinds of question it is of.
        documents: What was found, best first.
        metrics: By name and k: ``R@5``.
        milliseconds: How long it took, others at its side.
        cost: What it cost.
        plan: The queries that were searched.
        activity: The account, as data; ours alone have one.
        warnings: What ours told of.
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

    def values(self, metric: str, kind: str | None = None) -> list[float]:
        """Give a metric's per-query values, of one kind of question or of all."""
        return [result.metrics[metric] for result in self.results if kind is None or kind in result.kinds]


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
        """The kinds of questions, in order of appearance; empty where all are of one."""
        results = self.systems[0].results if self.systems else []
        kinds = list(dict.fromkeys(kind for result in results for kind in result.kinds))
        return kinds if any(set(result.kinds) != set(kinds) for result in results) else []

    def run_of(self, system: str) -> SystemRun | None:
        """Give a system's run."""
        return next((run for run in self.systems if run.system == system), None)

    def to_dict(self) -> dict[str, Any]:
        """Give it as data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` gave."""
        systems = [
            SystemRun(
                run["system"],
                [QueryResult(**{**result, "cost": Cost(**result["cost"])}) for result in run["results"]],
            )
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
    progress: Progress | None = None,
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
    return asyncio.run(
        aevaluate(dataset, systems, plans=plans, cutoffs=cutoffs, concurrency=concurrency, progress=progress)
    )


async def aevaluate(
    dataset: Dataset,
    systems: Sequence[System],
    *,
    plans: str = "none",
    cutoffs: Sequence[int] = (5, 10),
    concurrency: int = 4,
    progress: Progress | None = None,
) -> EvaluationRun:
    """Do what ``evaluate`` does inside a running loop, as notebooks have one."""
    relevant = {query.id: dataset.relevant[query.id] for query in dataset.queries}
    run = EvaluationRun(dataset.name, plans, list(cutoffs), relevant=relevant, notes=list(dataset.warnings))
    run.settings = {"concurrency": concurrency}
    for system in systems:
        run.systems.append(await _run_system(system, dataset, cutoffs, concurrency, progress))
    return run


async def _run_system(
    system: System, dataset: Dataset, cutoffs: Sequence[int], concurrency: int, progress: Progress | None
) -> SystemRun:
    gate, done = asyncio.Semaphore(concurrency), 0

    async def one(query: EvaluationQuery) -> QueryResult:
        nonlocal done
        async with gate:
            result = await _ask(system, query, dataset.relevant[query.id], cutoffs)
        done += 1
        if progress is not None:
            progress(system.name, done, len(dataset.queries))
        return result

    return SystemRun(system.name, list(await asyncio.gather(*(one(query) for query in dataset.queries))))


async def _ask(
    system: System, query: EvaluationQuery, relevant: Mapping[str, float], cutoffs: Sequence[int]
) -> QueryResult:
    start, error = time.perf_counter(), None
    try:
        found = await system.ask(query)
    except Exception as failure:  # noqa: BLE001 (one question's failure is a result too)
        found, error = Found([]), f"{type(failure).__name__}: {failure}"
    return QueryResult(
        query_id=query.id,
        kinds=list(query.kinds),
        documents=found.documents,
        metrics={
            f"{name}@{k}": measure(found.documents, relevant, k) for name, measure in METRICS.items() for k in cutoffs
        },
        milliseconds=(time.perf_counter() - start) * 1000,
        cost=found.cost,
        plan=found.plan,
        activity=found.activity,
        warnings=found.warnings,
        error=error,
    )
