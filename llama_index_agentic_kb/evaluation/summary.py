"""A run in numbers: means with intervals, differences from the baseline, costs, and what planning was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any, Final

import numpy as np

from llama_index_agentic_kb.evaluation.metering import Cost
from llama_index_agentic_kb.evaluation.metrics import Difference, Interval, bootstrap_interval, paired_bootstrap
from llama_index_agentic_kb.evaluation.runner import METRICS, EvaluationRun, SystemRun

__all__ = ["ALL", "BASELINE", "PLAIN", "KindSummary", "PlanValue", "SystemSummary", "summarize"]

BASELINE: Final = "hybrid"
"""The system that others are compared with: the single query, dense and BM25 fused."""

PLAIN: Final = "minimal"
"""Ours without a plan: what a plan found beyond it is the plan's value."""

ALL: Final = "all"
"""Names the questions of every kind together."""


@dataclass(frozen=True, slots=True)
class PlanValue:
    """What a system's evidence gained and lost beside the plain query's, as shares of all relevant documents.

    Args:
        gained: Found in the top k by the system and missed by the plain query.
        lost: The other way round.
    """

    gained: float
    lost: float


@dataclass(frozen=True, slots=True)
class KindSummary:
    """One kind of question at one system.

    Args:
        questions: How many.
        metrics: Means with 95 % intervals, by name (``R@5``).
        differences: Paired differences from the baseline, by name; empty for the baseline, or without one.
    """

    questions: int
    metrics: Mapping[str, Interval]
    differences: Mapping[str, Difference]


@dataclass(frozen=True, slots=True)
class SystemSummary:
    """One system's run in numbers.

    Args:
        system: Its name.
        kinds: By kind of question; "all" stands for all.
        cost: Means of a question, by the names of ``Cost``.
        milliseconds: Median ("p50") and 99th percentile ("p99") of a question's time.
        plan_value: None for the plain query, or without it.
        failed: Questions that failed.
        warned: Questions of which ours told a warning.
    """

    system: str
    kinds: Mapping[str, KindSummary]
    cost: Mapping[str, float]
    milliseconds: Mapping[str, float]
    plan_value: PlanValue | None
    failed: int
    warned: int

    def to_dict(self) -> dict[str, Any]:
        """Give it as data."""
        return asdict(self)


def summarize(run: EvaluationRun) -> list[SystemSummary]:
    """Give each system's run in numbers, in the run's order."""
    return [_summary(run, one) for one in run.systems]


def _summary(run: EvaluationRun, one: SystemRun) -> SystemSummary:
    baseline = run.run_of(BASELINE)
    other = None if baseline is one else baseline
    times = [result.milliseconds for result in one.results]
    return SystemSummary(
        one.system,
        {kind or ALL: _kind(run, one, other, kind) for kind in (None, *run.kinds)},
        {cost.name: fmean(getattr(result.cost, cost.name) for result in one.results) for cost in fields(Cost)},
        {f"p{q}": float(np.percentile(times, q)) for q in (50, 99)},
        _plan_value(run, one),
        sum(result.error is not None for result in one.results),
        sum(bool(result.warnings) for result in one.results),
    )


def _kind(run: EvaluationRun, one: SystemRun, other: SystemRun | None, kind: str | None) -> KindSummary:
    values = {name: one.values(name, kind) for name in _metrics(run.cutoffs)}
    return KindSummary(
        len(next(iter(values.values()))),
        {name: bootstrap_interval(mine) for name, mine in values.items()},
        {}
        if other is None
        else {name: paired_bootstrap(mine, other.values(name, kind)) for name, mine in values.items()},
    )


def _metrics(cutoffs: Sequence[int]) -> list[str]:
    return [f"{metric}@{k}" for k in cutoffs for metric in METRICS]


def _plan_value(run: EvaluationRun, system: SystemRun) -> PlanValue | None:
    plain = run.run_of(PLAIN)
    if plain is None or plain is system:
        return None
    k, gained, lost, wanted = max(run.cutoffs), 0, 0, 0
    for ours, theirs in zip(system.results, plain.results, strict=True):
        relevant = run.relevant[ours.query_id].keys()
        found, before = relevant & set(ours.documents[:k]), relevant & set(theirs.documents[:k])
        gained, lost, wanted = gained + len(found - before), lost + len(before - found), wanted + len(relevant)
    return PlanValue(gained / wanted, lost / wanted)
