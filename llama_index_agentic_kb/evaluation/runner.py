"""Runs systems over an evaluation set, summarizes a run and shows it, as ``agentic-kb bench`` does.

The metrics are those of trec_eval and BEIR. They are implemented here because each is one line; a metrics library
needs a compiled extension and lacks All@k.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Final, TypeAlias

import numpy as np
from llama_index.core.llms import LLM
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from llama_index_agentic_kb._text import error_message, one_line, printable
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evaluation.dataset import Dataset, EvaluationQuery, PlannedLLM, gold_steps, recorded_plans
from llama_index_agentic_kb.evaluation.systems import Ask, QueryResult

BASELINE: Final = "hybrid"  # system that others are compared with: a single query with fused dense and BM25 results
PLAIN: Final = "minimal"  # this library's system without a plan; a plan's value is measured against it
ALL: Final = "all"  # name of the group with questions of all kinds
SAMPLES: Final = 2_000  # number of resamples for a bootstrap interval

COSTS: Final = {
    "llm_calls": "LLM calls",
    "input_tokens": "tokens in",
    "output_tokens": "tokens out",
    "embedding_calls": "embedding calls",
    "embedded_texts": "texts",
    "searches": "searches",
}

RECORDED: Final = "recorded:"

Relevant: TypeAlias = Mapping[str, float]
Estimate: TypeAlias = dict[str, float]
Summary: TypeAlias = JsonObject
"""Of one system's run: ``system``, ``kinds`` (by kind: ``questions``, ``metrics``, paired ``differences`` from the
baseline), ``cost``, ``milliseconds``, ``plan_value`` (shares of relevant documents gained and lost beside ``PLAIN``),
``failed``, ``warned``."""


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
"""Metrics at each k: recall, whether all relevant documents were found, nDCG, and reciprocal rank."""


def mean(values: Sequence[float] | np.ndarray) -> Estimate:
    """Return the mean with its 95 % bootstrap percentile interval (Efron and Tibshirani 1993, chapter 13).

    Values are those of each question, or differences of two systems. "p" is the two-sided p-value for a mean of 0.
    """
    array, generator = np.asarray(values, dtype=float), np.random.default_rng(0)
    # one by one: all resamples of 100,000 questions together would take gigabytes
    means = np.array([array[generator.integers(0, len(array), len(array))].mean() for _ in range(SAMPLES)])
    low, high = np.percentile(means, [2.5, 97.5])
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (SAMPLES + 1))  # never 0, which a finite number of resamples can't show
    return {"mean": float(array.mean()), "low": float(low), "high": float(high), "p": p}


@dataclass(slots=True)
class EvaluationRun:
    """The results of an evaluation by system, in the dataset's order of questions; ``relevant`` is by query id."""

    dataset: str
    plans: str
    cutoffs: list[int]
    systems: dict[str, list[QueryResult]] = field(default_factory=dict)
    relevant: dict[str, Relevant] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    settings: JsonObject = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """Names of the question groups: ``ALL``, then each question kind, unless every question has the same kinds."""
        results = next(iter(self.systems.values()), [])
        kinds = list(dict.fromkeys(kind for result in results for kind in result.kinds))
        return [ALL, *(kinds if any(set(result.kinds) != set(kinds) for result in results) else [])]

    def values(self, system: str, metric: str, kind: str = ALL) -> list[float]:
        """Return a system's values of a metric, one for each question of a kind. Defaults to all questions."""
        return [result.metrics[metric] for result in self.systems[system] if kind in {ALL, *result.kinds}]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics with their k, such as ``R@5``."""
        return [f"{metric}@{k}" for k in self.cutoffs for metric in METRICS]

    def summary(self) -> list[Summary]:
        """Return a summary of each system: metrics and differences from the baseline by kind, costs, plan value."""
        return [self._summary(system, results) for system, results in self.systems.items()]

    def _summary(self, system: str, results: Sequence[QueryResult]) -> Summary:
        times = [result.milliseconds for result in results]
        return {
            "system": system,
            "kinds": {kind: self._of_kind(system, kind) for kind in self.kinds},
            "cost": {name: fmean(getattr(result.cost, name) for result in results) for name in COSTS},
            "milliseconds": {f"p{q}": float(np.percentile(times, q)) for q in (50, 99)},
            "plan_value": None if system == PLAIN or PLAIN not in self.systems else self._plan_value(results),
            "failed": sum(result.error is not None for result in results),
            "warned": sum(bool(result.warnings) for result in results),
        }

    def _of_kind(self, system: str, kind: str) -> Summary:
        values = {name: self.values(system, name, kind) for name in self.metrics}
        differences = {}
        if system != BASELINE and BASELINE in self.systems:
            differences = {name: mean(np.subtract(values[name], self.values(BASELINE, name, kind))) for name in values}
        estimates = {name: mean(found) for name, found in values.items()}
        questions = sum(kind in {ALL, *result.kinds} for result in self.systems[system])
        return {"questions": questions, "metrics": estimates, "differences": differences}

    def _plan_value(self, results: Sequence[QueryResult]) -> dict[str, float]:
        """Return the shares of the relevant documents that the plain system missed, and that only it found."""
        gained = lost = total = 0
        for old, new in zip(self.systems[PLAIN], results, strict=True):
            relevant, top = self.relevant[new.query_id].keys(), max(self.cutoffs)
            had, has = relevant & old.documents[:top], relevant & new.documents[:top]
            gained, lost, total = gained + len(has - had), lost + len(had - has), total + len(relevant)
        return {"gained": gained / total, "lost": lost / total}

    def to_dict(self) -> JsonObject:
        """Return the run as JSON data."""
        data = asdict(self)
        return data | {"systems": [{"system": name, "results": found} for name, found in data["systems"].items()]}


def evaluate(
    dataset: Dataset,
    systems: Mapping[str, Ask],
    *,
    plans: str = "none",
    cutoffs: Sequence[int] = (5, 10),
    concurrency: int = 4,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> EvaluationRun:
    """Run every system on every question, one system after another, and return the results.

    ``concurrency`` questions are asked at the same time; use 1 to measure times for a single user. A failed question
    counts as one without results, and its error is recorded. ``plans`` names the source of the plans in the report;
    ``progress`` is called with (system, completed questions, all questions).
    """
    relevant = {query.id: dataset.relevant[query.id] for query in dataset.queries}
    run = EvaluationRun(dataset.name, plans, list(cutoffs), relevant=relevant, notes=list(dataset.warnings))
    run.settings = {"concurrency": concurrency}

    async def ask(name: str, query: EvaluationQuery, gate: asyncio.Semaphore, finished: Iterator[int]) -> QueryResult:
        async with gate:
            start = time.perf_counter()
            try:
                result = await systems[name](query)
            except Exception as failure:  # noqa: BLE001 (one question's failure is a result too)
                result = QueryResult([], error=f"{type(failure).__name__}: {error_message(failure)}")
            result.milliseconds = (time.perf_counter() - start) * 1000
        result.query_id, result.kinds = query.id, list(query.kinds)
        for metric in run.metrics:
            measure, _, k = metric.partition("@")
            result.metrics[metric] = METRICS[measure](result.documents, relevant[query.id], int(k))
        progress(name, next(finished), len(dataset.queries))
        return result

    async def run_all() -> None:
        for name in systems:
            gate, finished = asyncio.Semaphore(concurrency), count(1)
            jobs = [ask(name, query, gate, finished) for query in dataset.queries]
            run.systems[name] = list(await asyncio.gather(*jobs))

    asyncio.run(run_all())
    return run


# -- a run as tables ---------------------------------------------------------------------------------------------------


def render_run(run: EvaluationRun, summaries: Sequence[Summary]) -> Group:
    """Return a run and its ``summary()`` as tables: quality with intervals, costs, kinds of questions."""
    top = max(run.cutoffs)
    title = f"{run.dataset}: {len(run.relevant)} questions; plans: {run.plans}; mean [95 % bootstrap interval]"
    quality = _table(title, "system", run.metrics)
    title = (
        f"Cost of a question ({run.settings.get('concurrency', '?')} side by side), and what it found that {PLAIN} "
        f"missed, and missed that {PLAIN} found (top {top}); plans: {run.plans}"
    )
    costs = _table(title, "system", [*COSTS.values(), "p50 ms", "p99 ms", "plan value"])
    for one in summaries:
        found = [[100 * share for share in one["kinds"][ALL]["metrics"][name].values()] for name in run.metrics]
        quality.add_row(one["system"], *(f"{middle:.1f} [{low:.1f}, {high:.1f}]" for middle, low, high, _ in found))
        value, times = one["plan_value"], one["milliseconds"]
        worth = "-" if value is None else f"+{100 * value['gained']:.1f} % -{100 * value['lost']:.1f} %"
        spent = [f"{one['cost'][name]:.1f}" for name in COSTS]
        costs.add_row(one["system"], *spent, f"{times['p50']:.0f}", f"{times['p99']:.0f}", worth)
    title = (
        f"All@{top} by kind of question (difference from {BASELINE}; * the paired bootstrap interval leaves out 0); "
        f"plans: {run.plans}"
    )
    kinds = _table(title, "kind", [one["system"] for one in summaries])  # kinds are rows, because there may be many
    for kind in run.kinds:
        cells_of = [_kind_cell(one["kinds"][kind], f"All@{top}") for one in summaries]
        kinds.add_row(f"{printable(kind)} ({summaries[0]['kinds'][kind]['questions']})", *cells_of)
    notes = [Text(printable(note), "yellow") for note in run.notes]
    return Group(*notes, quality, costs, kinds, *_troubles(run))


def _troubles(run: EvaluationRun) -> Iterator[Text]:
    """Yield how many questions failed, and how many had warnings, for each system with such questions."""
    for name, results in run.systems.items():
        errors = [result.error for result in results if result.error is not None]
        warnings = [result.warnings[0] for result in results if result.warnings]
        for what, texts, style in (("failed", errors, "red"), ("warned", warnings, "yellow")):
            if texts:
                first = one_line(printable(texts[0]), 300)
                yield Text(f"{name}: {len(texts)} questions {what}, the first: {first}", style)


def _kind_cell(kind: Summary, metric: str) -> str:
    shown = f"{100 * kind['metrics'][metric]['mean']:.1f}"
    difference = kind["differences"].get(metric)
    if difference is None:
        return shown
    star = "*" if difference["low"] > 0 or difference["high"] < 0 else ""
    return f"{shown} ({100 * difference['mean']:+.1f}{star})"


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    columns = [Column(heading, justify="right", overflow="fold") for heading in headings]
    return Table(Column(first, overflow="fold"), *columns, title=Text(printable(title)), title_justify="left")


def planner_of(plans: str, llm: LLM | None, dataset: Dataset) -> tuple[LLM | None, str, Dataset]:
    """Return the planning model, its name in the report, and the dataset of planned questions.

    ``plans`` is "oracle" (gold fields), "recorded:FILE", "llm" or "none"; see ``agentic-kb bench``.
    """
    if plans == "none":
        return None, plans, dataset
    if plans == "llm":
        if llm is None:
            raise ConfigurationError("--plans llm needs OPENAI_API_KEY, or OPENAI_BASE_URL for a server of your own")
        return llm, f"language model {llm.metadata.model_name}", dataset
    if plans == "oracle":
        name, steps = "ORACLE plans (gold fields)", {query.id: gold_steps(query) for query in dataset.queries}
    elif plans.startswith(RECORDED):
        path = Path(plans.removeprefix(RECORDED))
        name, steps = f"recorded plans ({path.name})", recorded_plans(path)
        dataset = dataset.only(steps, f"{path.name} holds no plan for them")
    else:
        raise ConfigurationError(f"--plans: {plans!r} is unknown; known are oracle, recorded:FILE, llm and none")
    if without := sum(not steps[query.id] for query in dataset.queries):
        warning = f"{without} questions have no steps in the {name}; they are searched as asked"
        dataset = replace(dataset, warnings=(*dataset.warnings, warning))
    return PlannedLLM(name, lambda query: steps[query.id], dataset.queries), name, dataset
