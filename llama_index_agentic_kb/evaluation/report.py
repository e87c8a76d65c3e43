"""A run as tables: what was found, what it cost, and what planning was worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Final

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llama_index_agentic_kb.evaluation.comparison import RunDifference
from llama_index_agentic_kb.evaluation.metrics import bootstrap_interval, paired_bootstrap
from llama_index_agentic_kb.evaluation.runner import EvaluationRun, SystemRun

__all__ = ["render_difference", "render_run"]

BASELINE: Final = "hybrid"
"""The system that others are compared with: the single query, dense and BM25 fused."""

PLAIN: Final = "minimal"
"""Ours without a plan: what a plan found beyond it is the plan's value."""


def render_run(run: EvaluationRun) -> RenderableType:
    """Give a run as tables for a terminal."""
    deepest = max(run.cutoffs)
    parts: list[RenderableType] = [Text(note, "yellow") for note in run.notes]
    questions = len(run.systems[0].results) if run.systems else 0
    title = f"{run.dataset}: {questions} questions; plans: {run.plans}; mean [95 % bootstrap interval]"
    parts.append(_quality(run, title))
    parts.append(_costs(run, f"Cost of a question, and what the plan found that {PLAIN} missed (top {deepest})"))
    if run.kinds:
        parts.append(_kinds(run, f"All@{deepest} by kind of question; * differs from {BASELINE} (paired bootstrap)"))
    failed = [f"{one.system}: {len(bad)} questions failed, the first: {bad[0]}" for one, bad in _failures(run)]
    parts += [Text(line, "red") for line in failed]
    return Group(*parts)


def _quality(run: EvaluationRun, title: str) -> Table:
    names = [f"{metric}@{k}" for k in run.cutoffs for metric in ("R", "All", "nDCG", "MRR")]
    table = _table(title, "system", names)
    for one in run.systems:
        table.add_row(one.system, *(_interval(one.values(name)) for name in names))
    return table


def _interval(values: Sequence[float]) -> str:
    if not values:
        return "-"
    interval = bootstrap_interval(values)
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _costs(run: EvaluationRun, title: str) -> Table:
    headings = ["LLM calls", "tokens in", "tokens out", "queries", "searches", "p50 ms", "p99 ms", "plan value"]
    table = _table(title, "system", headings)
    for one in run.systems:
        costs = [result.cost for result in one.results]
        times = [result.milliseconds for result in one.results]
        table.add_row(
            one.system,
            *(
                f"{fmean(getattr(cost, name) for cost in costs):.1f}"
                for name in ("llm_calls", "input_tokens", "output_tokens", "queries", "searches")
            ),
            *(f"{np.percentile(times, q):.0f}" for q in (50, 99)),
            plan_value(run, one),
        )
    return table


def plan_value(run: EvaluationRun, system: SystemRun) -> str:
    """Tell how much of the evidence a system found that the plain query missed, and what it lost of it."""
    plain = run.run_of(PLAIN)
    if plain is None or plain is system:
        return "-"
    k, gained, lost, wanted = max(run.cutoffs), 0, 0, 0
    for ours, theirs in zip(system.results, plain.results, strict=True):
        relevant = run.relevant[ours.query_id].keys()
        found, before = relevant & set(ours.documents[:k]), relevant & set(theirs.documents[:k])
        gained, lost, wanted = gained + len(found - before), lost + len(before - found), wanted + len(relevant)
    return f"+{100 * gained / wanted:.1f} % -{100 * lost / wanted:.1f} %"


def _kinds(run: EvaluationRun, title: str) -> Table:
    metric = f"All@{max(run.cutoffs)}"
    baseline = run.run_of(BASELINE)
    counts = {kind: len(run.systems[0].values(metric, kind)) for kind in run.kinds}
    table = _table(title, "system", [f"{kind} ({count})" for kind, count in counts.items()])
    for one in run.systems:
        cells = []
        for kind in run.kinds:
            values = one.values(metric, kind)
            mark = ""
            if baseline is not None and baseline is not one:
                difference = paired_bootstrap(values, baseline.values(metric, kind))
                mark = (" * better" if difference.mean > 0 else " * worse") if difference.significant else ""
            cells.append(f"{100 * fmean(values):.1f}{mark}")
        table.add_row(one.system, *cells)
    return table


def _failures(run: EvaluationRun) -> Iterable[tuple[SystemRun, list[str]]]:
    for one in run.systems:
        bad = [result.error for result in one.results if result.error is not None]
        if bad:
            yield one, bad


def render_difference(difference: RunDifference) -> RenderableType:
    """Give what changed between two runs as a table for a terminal."""
    headings = ["questions", "evidence gained", "evidence lost", "plans changed", "tokens", "p50 ms"]
    table = _table(f"From the first run to the second ({difference.dataset})", "system", headings)
    for one in difference.systems:
        table.add_row(
            one.system,
            str(one.questions),
            str(sum(len(change.gained) for change in one.changes)),
            str(sum(len(change.lost) for change in one.changes)),
            str(sum(change.plan_changed for change in one.changes)),
            f"{one.tokens:+.1f}",
            f"{one.milliseconds:+.0f}",
        )
    lines: list[RenderableType] = [table]
    for one in difference.systems:
        for change in one.changes:
            if change.gained or change.lost:
                gained, lost = " ".join(change.gained) or "-", " ".join(change.lost) or "-"
                lines.append(Text(f"{one.system} {change.query_id}: gained {gained}, lost {lost}"))
    return Group(*lines)


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    table = Table(first, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
