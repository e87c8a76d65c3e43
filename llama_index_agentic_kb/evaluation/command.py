"""``agentic-kb bench``: a folder in, a report out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.evaluation.comparison import compare_runs
from llama_index_agentic_kb.evaluation.corpus import CorpusIndex
from llama_index_agentic_kb.evaluation.dataset import Dataset, read_dataset
from llama_index_agentic_kb.evaluation.plans import GoldPlans, PlannedLLM, PlanSource, RecordedPlans
from llama_index_agentic_kb.evaluation.report import render_difference, render_run
from llama_index_agentic_kb.evaluation.runner import EvaluationRun, evaluate
from llama_index_agentic_kb.evaluation.systems import make_systems

if TYPE_CHECKING:
    from llama_index.core.llms import LLM

__all__ = ["bench", "diff"]

RECORDED: Final = "recorded:"


def bench(
    folder: Path,
    *,
    systems: Sequence[str],
    plans: str,
    llm: LLM | None,
    cache: Path,
    console: Console,
    cutoffs: Sequence[int] = (5, 10),
    documents: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    source_field: str | None = None,
    split: str = "test",
    concurrency: int = 4,
    out: Path | None = None,
    record: Path | None = None,
) -> EvaluationRun:
    """Run systems over an evaluation set, print the report, and keep it as JSON where asked.

    Args:
        folder: A BEIR-form folder.
        systems: Names out of ``SYSTEMS``.
        plans: "oracle" (gold fields), "recorded:FILE", "llm", or "none".
        llm: The model of "llm".
        cache: Where vectors are kept.
        console: Where the report goes.
        cutoffs: The k of each metric.
        documents: Documents of each ranking; None is the largest k.
        limit: So many questions, drawn at random.
        seed: Of the draw.
        source_field: Metadata key by which the corpus falls into several sources.
        split: Which of ``qrels/`` is read, where there is no ``qrels.tsv``.
        concurrency: Questions asked side by side.
        out: Where the run goes as JSON.
        record: Folder for every retrieval of ours, to be replayed. Questions are asked one at a time then.

    Raises:
        InvalidRequestError: The folder, or a file of plans, can't be read.
        ConfigurationError: A system or a source of plans is unknown or lacks its model.
    """
    from llama_index_agentic_kb.store import default_embed_model  # noqa: PLC0415 (loads torch)

    dataset = read_dataset(folder, split=split, limit=limit, seed=seed)
    planner, told = _planner(plans, llm, dataset)
    with _progress(console) as bar, closing(_index(dataset, default_embed_model(), cache, source_field, bar)) as corpus:
        made = make_systems(systems, corpus, planner, documents=documents or max(cutoffs), record=record)
        task = bar.add_task("asking", total=None)
        run = evaluate(
            dataset,
            made,
            plans=told,
            cutoffs=cutoffs,
            concurrency=1 if record is not None else concurrency,
            progress=lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
        )
    console.print(render_run(run))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(run.to_dict(), ensure_ascii=False) + "\n", encoding="utf-8")
    return run


def diff(first: Path, second: Path, console: Console) -> None:
    """Print what changed between two runs that were kept as JSON.

    Raises:
        InvalidRequestError: A file holds no run, or the runs are of different sets.
    """
    console.print(render_difference(compare_runs(_load(first), _load(second))))


def _load(path: Path) -> EvaluationRun:
    try:
        return EvaluationRun.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{path} holds no run of `agentic-kb bench --out` ({error!r})") from error


def _planner(plans: str, llm: LLM | None, dataset: Dataset) -> tuple[LLM | None, str]:
    """Give what plans, and its name in the report."""
    if plans == "none":
        return None, "none"
    if plans == "llm":
        if llm is None:
            raise ConfigurationError("--plans llm needs OPENAI_API_KEY, or OPENAI_BASE_URL for a server of your own")
        return llm, f"language model {llm.metadata.model_name}"
    source: PlanSource
    if plans == "oracle":
        source = GoldPlans()
    elif plans.startswith(RECORDED):
        source = RecordedPlans.load(plans.removeprefix(RECORDED))
    else:
        raise ConfigurationError(f"--plans: {plans!r} is unknown; known are oracle, recorded:FILE, llm and none")
    return PlannedLLM(source, dataset.queries), source.name


def _index(dataset: Dataset, embed_model: Any, cache: Path, source_field: str | None, bar: Progress) -> CorpusIndex:
    task = bar.add_task("embedding", total=None)
    return CorpusIndex(
        dataset,
        embed_model,
        cache,
        source_field=source_field,
        progress=lambda done, total: bar.update(task, completed=done, total=total),
    )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = Console(stderr=True)
    hidden = not shown.is_terminal or not console.is_terminal
    return Progress(*columns, console=shown, transient=True, disable=hidden)
