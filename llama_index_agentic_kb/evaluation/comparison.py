"""What changed from one run to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.evaluation.runner import EvaluationRun, SystemRun

__all__ = ["QueryChange", "RunDifference", "SystemDifference", "compare_runs"]


@dataclass(frozen=True, slots=True)
class QueryChange:
    """What changed for one question."""

    query_id: str
    gained: tuple[str, ...]
    lost: tuple[str, ...]
    plan_changed: bool


@dataclass(frozen=True, slots=True)
class SystemDifference:
    """What changed for one system; tokens and milliseconds are the second run's less the first's."""

    system: str
    questions: int
    changes: tuple[QueryChange, ...]
    tokens: float
    milliseconds: float


@dataclass(frozen=True, slots=True)
class RunDifference:
    """What changed from one run to another."""

    dataset: str
    systems: tuple[SystemDifference, ...]


def compare_runs(first: EvaluationRun, second: EvaluationRun) -> RunDifference:
    """Tell what the second run found of the relevant documents that the first did not, and the other way round.

    Args:
        first: The earlier run.
        second: The later one. Systems and questions that only one of them has are left out.

    Raises:
        InvalidRequestError: The runs are of different sets.
    """
    if first.dataset != second.dataset:
        raise InvalidRequestError(f"the runs are of {first.dataset!r} and {second.dataset!r}: they can't be compared")
    k = min(max(first.cutoffs), max(second.cutoffs))
    pairs = [(before, second.run_of(before.system)) for before in first.systems]
    systems = [_difference(before, after, second.relevant, k) for before, after in pairs if after is not None]
    return RunDifference(first.dataset, tuple(systems))


def _difference(
    before: SystemRun, after: SystemRun, relevant: Mapping[str, Mapping[str, float]], k: int
) -> SystemDifference:
    known = {result.query_id: result for result in before.results}
    both = [(known[result.query_id], result) for result in after.results if result.query_id in known]
    changes = []
    for old, new in both:
        had, has = set(old.documents[:k]), set(new.documents[:k])
        wanted = relevant[new.query_id].keys()
        gained, lost = sorted(wanted & (has - had)), sorted(wanted & (had - has))
        changes.append(QueryChange(new.query_id, tuple(gained), tuple(lost), old.plan != new.plan))
    return SystemDifference(
        before.system,
        len(both),
        tuple(changes),
        _mean([new.cost.input_tokens + new.cost.output_tokens for _, new in both])
        - _mean([old.cost.input_tokens + old.cost.output_tokens for old, _ in both]),
        median([new.milliseconds for _, new in both] or [0.0]) - median([old.milliseconds for old, _ in both] or [0.0]),
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
