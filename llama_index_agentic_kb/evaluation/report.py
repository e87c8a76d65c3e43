"""A run, and what changed between two, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llama_index_agentic_kb._text import one_line, printable
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.evaluation.runner import (
    ALL,
    BASELINE,
    METRICS,
    PLAIN,
    EvaluationRun,
    QueryResult,
    SystemRun,
)

__all__ = ["render_difference", "render_run"]

COSTS: Final = {
    "llm_calls": "LLM calls",
    "input_tokens": "tokens in",
    "output_tokens": "tokens out",
    "embedding_calls": "embedding calls",
    "embedded_texts": "texts",
    "searches": "searches",
}

CHANGES_SHOWN: Final = 20
"""Questions whose changes are shown."""

Summary = Mapping[str, Any]


def render_run(run: EvaluationRun, summaries: Sequence[Summary]) -> RenderableType:
    """Return a run and its ``summary()`` as tables."""
    notes = [Text(printable(note), "yellow") for note in run.notes]
    tables = _quality(run, summaries), _costs(run, summaries), _kinds(run, summaries)
    return Group(*notes, *tables, *(line for one in run.systems for line in _troubles(one)))


def _quality(run: EvaluationRun, summaries: Sequence[Summary]) -> Table:
    names = [f"{metric}@{k}" for k in run.cutoffs for metric in METRICS]
    title = f"{run.dataset}: {len(run.relevant)} questions; plans: {run.plans}; mean [95 % bootstrap interval]"
    table = _table(title, "system", names)
    for one in summaries:
        metrics = one["kinds"][ALL]["metrics"]
        cells = [[100 * metrics[name][part] for part in ("mean", "low", "high")] for name in names]
        table.add_row(one["system"], *(f"{middle:.1f} [{low:.1f}, {high:.1f}]" for middle, low, high in cells))
    return table


def _costs(run: EvaluationRun, summaries: Sequence[Summary]) -> Table:
    title = (
        f"Cost of a question ({run.settings.get('concurrency', '?')} side by side), and what it found that {PLAIN} "
        f"missed, and missed that {PLAIN} found (top {max(run.cutoffs)}); plans: {run.plans}"
    )
    table = _table(title, "system", [*COSTS.values(), "p50 ms", "p99 ms", "plan value"])
    for one in summaries:
        value = one["plan_value"]
        worth = "-" if value is None else f"+{100 * value['gained']:.1f} % -{100 * value['lost']:.1f} %"
        costs = [f"{one['cost'][name]:.1f}" for name in COSTS]
        table.add_row(one["system"], *costs, *(f"{one['milliseconds'][name]:.0f}" for name in ("p50", "p99")), worth)
    return table


def _kinds(run: EvaluationRun, summaries: Sequence[Summary]) -> Table:
    """Kinds go down, for there may be many; each cell says how far it lies from the baseline."""
    metric = f"All@{max(run.cutoffs)}"
    title = (
        f"{metric} by kind of question (difference from {BASELINE}; * the paired bootstrap interval leaves out 0); "
        f"plans: {run.plans}"
    )
    table = _table(title, "kind", [one["system"] for one in summaries])
    for kind in run.kinds:
        cells = [_cell(one["kinds"][kind], metric) for one in summaries]
        table.add_row(f"{printable(kind)} ({summaries[0]['kinds'][kind]['questions']})", *cells)
    return table


def _cell(kind: Summary, metric: str) -> str:
    middle = f"{100 * kind['metrics'][metric]['mean']:.1f}"
    difference = kind["differences"].get(metric)
    if difference is None:
        return middle
    significant = difference["low"] > 0 or difference["high"] < 0
    return f"{middle} ({100 * difference['mean']:+.1f}{'*' if significant else ''})"


def _troubles(one: SystemRun) -> Iterator[Text]:
    errors = [result.error for result in one.results if result.error is not None]
    warnings = [result.warnings[0] for result in one.results if result.warnings]
    if errors:
        yield Text(f"{one.system}: {len(errors)} questions failed, the first: {_line(errors[0])}", "red")
    if warnings:
        yield Text(f"{one.system}: {len(warnings)} questions warned, the first: {_line(warnings[0])}", "yellow")


def _line(text: str) -> str:
    return one_line(printable(text), 300)


# -- two runs --------------------------------------------------------------------------------------------------------


def render_difference(first: EvaluationRun, second: EvaluationRun) -> RenderableType:
    """Return what changed between two runs as a table, and the questions whose evidence changed.

    Raises:
        InvalidRequestError: The runs are of different sets, or have no system in common.
    """
    if first.dataset != second.dataset:
        raise InvalidRequestError(f"the runs are of {first.dataset!r} and {second.dataset!r}: they can't be compared")
    pairs = [(before, after) for before in first.systems if (after := second.run_of(before.system)) is not None]
    if not pairs:
        raise InvalidRequestError("the runs have no system in common: they can't be compared")
    headings = ["questions", "evidence gained", "evidence lost", "plans changed"]
    headings += ["LLM calls", "tokens", "searches", "p50 ms"]
    table = _table(f"From the first run to the second ({first.dataset})", "system", headings)
    lines: list[Text] = []
    k = min(max(first.cutoffs), max(second.cutoffs))
    for before, after in pairs:
        known = {result.query_id: result for result in before.results}
        both = [(known[new.query_id], new) for new in after.results if new.query_id in known]
        changes = [(old, new, *_evidence(old, new, second.relevant[new.query_id], k)) for old, new in both]
        sums = len(both), sum(len(c[2]) for c in changes), sum(len(c[3]) for c in changes)
        planned = sum(old.plan != new.plan for old, new in both)
        table.add_row(before.system, *map(str, (*sums, planned)), *_costs_changed(both))
        lines += _changes(before.system, [change for change in changes if change[2] or change[3]])
    return Group(*(Text(printable(note), "yellow") for note in _notes(first, second)), table, *lines)


def _evidence(old: QueryResult, new: QueryResult, relevant: Mapping[str, float], k: int) -> tuple[list[str], list[str]]:
    """Return the relevant documents that the second run gained, and those that it lost."""
    had, has = set(old.documents[:k]) & relevant.keys(), set(new.documents[:k]) & relevant.keys()
    return sorted(has - had), sorted(had - has)


def _costs_changed(both: Sequence[tuple[QueryResult, QueryResult]]) -> list[str]:
    """Return a question's cost in the second run less the first's: means, and medians of times."""

    def tokens(result: QueryResult) -> int:
        return result.cost.input_tokens + result.cost.output_tokens

    means = (
        fmean([new.cost.llm_calls - old.cost.llm_calls for old, new in both] or [0.0]),
        fmean([tokens(new) - tokens(old) for old, new in both] or [0.0]),
        fmean([new.cost.searches - old.cost.searches for old, new in both] or [0.0]),
    )
    before, after = (median([pair[at].milliseconds for pair in both] or [0.0]) for at in (0, 1))
    return [*(f"{value:+.1f}" for value in means), f"{after - before:+.0f}"]


def _changes(system: str, changed: Sequence[tuple[QueryResult, QueryResult, list[str], list[str]]]) -> Iterator[Text]:
    for old, new, gained, lost in changed[:CHANGES_SHOWN]:
        documents = f"gained {_line(' '.join(gained) or '-')}, lost {_line(' '.join(lost) or '-')}"
        yield Text(f"{system} {_line(new.query_id)}: {documents}")
        if old.plan != new.plan:
            yield Text(f"  planned {_line(' | '.join(new.plan))}; before {_line(' | '.join(old.plan))}", "dim")
    if len(changed) > CHANGES_SHOWN:
        yield Text(f"{system}: {len(changed) - CHANGES_SHOWN} further questions changed")


def _notes(first: EvaluationRun, second: EvaluationRun) -> Iterator[str]:
    """Yield what keeps the runs from being alike: other plans or settings, systems and questions of one alone."""
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


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    table = Table(title=Text(printable(title)), title_justify="left")
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table
