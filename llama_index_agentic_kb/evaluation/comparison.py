"""What changed from one run to another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.evaluation.runner import EvaluationRun, QueryResult, SystemRun

__all__ = ["QueryChange", "RunDifference", "SystemDifference", "compare_runs"]


@dataclass(frozen=True, slots=True)
class QueryChange:
    """What changed for one question: relevant documents in the top k, and the queries that were searched."""

    query_id: str
    gained: tuple[str, ...]
    lost: tuple[str, ...]
    plan: tuple[str, ...]
    plan_before: tuple[str, ...]

    @property
    def plan_changed(self) -> bool:
        """Whether other queries were searched."""
        return self.plan != self.plan_before


@dataclass(frozen=True, slots=True)
class SystemDifference:
    """What changed for one system; costs are a question's in the second run less the first's (times: medians)."""

    system: str
    questions: int
    changes: tuple[QueryChange, ...]
    llm_calls: float
    tokens: float
    searches: float
    milliseconds: float


@dataclass(frozen=True, slots=True)
class RunDifference:
    """What changed from one run to another."""

    dataset: str
    systems: tuple[SystemDifference, ...]
    notes: tuple[str, ...] = ()
    """What keeps the runs from being quite alike: other plans, a system that one of them lacks."""


def compare_runs(first: EvaluationRun, second: EvaluationRun) -> RunDifference:
    """Tell what the second run found of the relevant documents that the first did not, and the other way round.

    Args:
        first: The earlier run.
        second: The later one. Systems and questions that only one of them has are left out.

    Raises:
        InvalidRequestError: The runs are of different sets, or have no system in common.
    """
    if first.dataset != second.dataset:
        raise InvalidRequestError(f"the runs are of {first.dataset!r} and {second.dataset!r}: they can't be compared")
    k = min(max(first.cutoffs), max(second.cutoffs))
    pairs = [(before, second.run_of(before.system)) for before in first.systems]
    systems = [_difference(before, after, second.relevant, k) for before, after in pairs if after is not None]
    if not systems:
        raise InvalidRequestError("the runs have no system in common: they can't be compared")
    return RunDifference(first.dataset, tuple(systems), tuple(_notes(first, second)))


def _notes(first: EvaluationRun, second: EvaluationRun) -> Iterator[str]:
    if first.plans != second.plans:
        yield f"plans differ: {first.plans}; then {second.plans}"
    for name in sorted(first.settings.keys() | second.settings.keys()):
        before, after = first.settings.get(name), second.settings.get(name)
        if before != after:
            yield f"{name} differs: {before}; then {after}"
    ours, theirs = ({one.system for one in run.systems} for run in (first, second))
    if ours != theirs:
        yield f"only one of the runs has {', '.join(sorted(ours ^ theirs))}; left out"
    if first.relevant.keys() != second.relevant.keys():
        yield f"{len(first.relevant.keys() ^ second.relevant.keys())} questions are in one of the runs only; left out"


def _difference(
    before: SystemRun, after: SystemRun, relevant: Mapping[str, Mapping[str, float]], k: int
) -> SystemDifference:
    known = {result.query_id: result for result in before.results}
    both = [(known[result.query_id], result) for result in after.results if result.query_id in known]
    return SystemDifference(
        before.system,
        len(both),
        tuple(_change(old, new, relevant[new.query_id].keys(), k) for old, new in both),
        _mean([new.cost.llm_calls - old.cost.llm_calls for old, new in both]),
        _mean([_tokens(new) - _tokens(old) for old, new in both]),
        _mean([new.cost.searches - old.cost.searches for old, new in both]),
        median([new.milliseconds for _, new in both] or [0.0]) - median([old.milliseconds for old, _ in both] or [0.0]),
    )


def _change(old: QueryResult, new: QueryResult, wanted: Collection[str], k: int) -> QueryChange:
    had, has = set(old.documents[:k]) & {*wanted}, set(new.documents[:k]) & {*wanted}
    return QueryChange(
        new.query_id, tuple(sorted(has - had)), tuple(sorted(had - has)), tuple(new.plan), tuple(old.plan)
    )


def _tokens(result: QueryResult) -> int:
    return result.cost.input_tokens + result.cost.output_tokens


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
