"""A run, and what changed between two, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llama_index_agentic_kb._text import one_line, printable
from llama_index_agentic_kb.evaluation.comparison import RunDifference, SystemDifference
from llama_index_agentic_kb.evaluation.metrics import Difference, Interval
from llama_index_agentic_kb.evaluation.runner import EvaluationRun
from llama_index_agentic_kb.evaluation.summary import ALL, BASELINE, PLAIN, SystemSummary, summarize

__all__ = ["render_difference", "render_run"]

COSTS: Final = {
    "llm_calls": "LLM calls",
    "input_tokens": "tokens in",
    "output_tokens": "tokens out",
    "embedding_calls": "embedding calls",
    "embedded_texts": "texts",
    "searches": "searches",
}

SHOWN: Final = 20
"""Questions whose changes are shown."""


def render_run(run: EvaluationRun, summaries: Sequence[SystemSummary] | None = None) -> RenderableType:
    """Give a run as tables.

    Args:
        run: The run.
        summaries: What ``summarize`` made of it; None makes them.
    """
    told = summarize(run) if summaries is None else summaries
    parts: list[RenderableType] = [Text(printable(note), "yellow") for note in run.notes]
    parts += [_quality(run, told), _costs(run, told), _kinds(run, told)]
    return Group(*parts, *_troubles(run, told))


def _quality(run: EvaluationRun, summaries: Sequence[SystemSummary]) -> Table:
    names = [f"{metric}@{k}" for k in run.cutoffs for metric in ("R", "All", "nDCG", "MRR")]
    questions = len(run.relevant)
    title = f"{run.dataset}: {questions} questions; plans: {run.plans}; mean [95 % bootstrap interval]"
    table = _table(title, "system", names)
    for one in summaries:
        table.add_row(one.system, *(_interval(one.kinds[ALL].metrics[name]) for name in names))
    return table


def _interval(interval: Interval) -> str:
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _costs(run: EvaluationRun, summaries: Sequence[SystemSummary]) -> Table:
    title = (
        f"Cost of a question ({run.settings.get('concurrency', '?')} side by side), and what it found that {PLAIN} "
        f"missed, and missed that {PLAIN} found (top {max(run.cutoffs)}); plans: {run.plans}"
    )
    table = _table(title, "system", [*COSTS.values(), "p50 ms", "p99 ms", "plan value"])
    for one in summaries:
        value = one.plan_value
        table.add_row(
            one.system,
            *(f"{one.cost[name]:.1f}" for name in COSTS),
            *(f"{one.milliseconds[name]:.0f}" for name in ("p50", "p99")),
            "-" if value is None else f"+{100 * value.gained:.1f} % -{100 * value.lost:.1f} %",
        )
    return table


def _kinds(run: EvaluationRun, summaries: Sequence[SystemSummary]) -> Table:
    """Kinds go down, for there may be many; each cell tells how far it lies from the baseline."""
    metric = f"All@{max(run.cutoffs)}"
    title = (
        f"{metric} by kind of question (difference from {BASELINE}; * the paired bootstrap interval leaves out 0); "
        f"plans: {run.plans}"
    )
    table = _table(title, "kind", [one.system for one in summaries])
    for kind in (ALL, *run.kinds):
        cells = [_cell(one, kind, metric) for one in summaries]
        table.add_row(f"{printable(kind)} ({summaries[0].kinds[kind].questions})", *cells)
    return table


def _cell(one: SystemSummary, kind: str, metric: str) -> str:
    told = one.kinds[kind]
    difference: Difference | None = told.differences.get(metric)
    mean = f"{100 * told.metrics[metric].mean:.1f}"
    if difference is None:
        return mean
    return f"{mean} ({100 * difference.mean:+.1f}{'*' if difference.significant else ''})"


def _troubles(run: EvaluationRun, summaries: Sequence[SystemSummary]) -> Iterator[Text]:
    for one, summary in zip(run.systems, summaries, strict=True):
        errors = [result.error for result in one.results if result.error is not None]
        warnings = [result.warnings[0] for result in one.results if result.warnings]
        if errors:
            yield Text(f"{one.system}: {len(errors)} questions failed, the first: {_line(errors[0])}", "red")
        if warnings:
            yield Text(f"{one.system}: {summary.warned} questions warned, the first: {_line(warnings[0])}", "yellow")


def _line(text: str) -> str:
    return one_line(printable(text), 300)


def render_difference(difference: RunDifference) -> RenderableType:
    """Give what changed between two runs as a table, and the questions whose evidence changed."""
    headings = [
        "questions",
        "evidence gained",
        "evidence lost",
        "plans changed",
        "LLM calls",
        "tokens",
        "searches",
        "p50 ms",
    ]
    table = _table(f"From the first run to the second ({difference.dataset})", "system", headings)
    for one in difference.systems:
        table.add_row(
            one.system,
            str(one.questions),
            str(sum(len(change.gained) for change in one.changes)),
            str(sum(len(change.lost) for change in one.changes)),
            str(sum(change.plan_changed for change in one.changes)),
            f"{one.llm_calls:+.1f}",
            f"{one.tokens:+.1f}",
            f"{one.searches:+.1f}",
            f"{one.milliseconds:+.0f}",
        )
    notes = [Text(printable(note), "yellow") for note in difference.notes]
    return Group(*notes, table, *(line for one in difference.systems for line in _changes(one)))


def _changes(one: SystemDifference) -> Iterator[Text]:
    changed = [change for change in one.changes if change.gained or change.lost]
    for change in changed[:SHOWN]:
        gained, lost = " ".join(change.gained) or "-", " ".join(change.lost) or "-"
        yield Text(f"{one.system} {_line(change.query_id)}: gained {_line(gained)}, lost {_line(lost)}")
        if change.plan_changed:
            yield Text(
                f"  planned {_line(' | '.join(change.plan))}; before {_line(' | '.join(change.plan_before))}", "dim"
            )
    if len(changed) > SHOWN:
        yield Text(f"{one.system}: {len(changed) - SHOWN} further questions changed")


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    table = Table(title=Text(printable(title)), title_justify="left")
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table
