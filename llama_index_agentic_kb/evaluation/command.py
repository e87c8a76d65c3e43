"""``agentic-kb bench``: a folder in, a report out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.evaluation.comparison import compare_runs
from llama_index_agentic_kb.evaluation.corpus import CorpusIndex
from llama_index_agentic_kb.evaluation.dataset import Dataset, read_dataset
from llama_index_agentic_kb.evaluation.plans import GoldPlans, PlannedLLM, PlanSource, RecordedPlans
from llama_index_agentic_kb.evaluation.recordings import recorded_llm, recorded_queries
from llama_index_agentic_kb.evaluation.report import render_difference, render_run
from llama_index_agentic_kb.evaluation.runner import EvaluationRun, evaluate
from llama_index_agentic_kb.evaluation.summary import summarize
from llama_index_agentic_kb.evaluation.systems import PLANNING, check_systems, make_systems

if TYPE_CHECKING:
    from llama_index.core.llms import LLM

__all__ = ["bench", "diff"]

RECORDED: Final = "recorded:"

WIDTH: Final = 200
"""Columns of output that goes to a file or a pipe."""


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
        plans: "oracle" (gold fields), "recorded:FILE" (plans with their answers), "recorded:FOLDER" (what ``record``
            kept, replayed), "llm", or "none".
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
        record: Folder for every retrieval of ours, to be replayed.

    Raises:
        InvalidRequestError: The folder, or a file of plans, can't be read.
        ConfigurationError: A system or a source of plans is unknown or lacks its model.
    """
    from llama_index_agentic_kb.store import default_embed_model  # noqa: PLC0415 (loads torch)

    dataset = read_dataset(folder, split=split, limit=limit, seed=seed)
    given = _plans(plans, llm, dataset, [name for name in systems if name in PLANNING])
    dataset = given.dataset
    check_systems(systems, given.llm)
    if out is not None:
        _make_folder(out.parent)
    embed_model = default_embed_model()
    with _progress(console) as bar, closing(_index(dataset, embed_model, cache, source_field, bar)) as corpus:
        made = make_systems(systems, corpus, given.llm, documents=documents or max(cutoffs), record=record)
        task = bar.add_task("asking", total=None)
        run = evaluate(
            dataset,
            made,
            plans=given.name,
            cutoffs=cutoffs,
            concurrency=concurrency,
            progress=lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
        )
    run.settings |= {
        "embed_model": embed_model.model_name,
        "source_field": source_field,
        "documents": documents or max(cutoffs),
        "llama-index-agentic-kb": version("llama-index-agentic-kb"),
        "llama-index-core": version("llama-index-core"),
    }
    summaries = summarize(run)
    _show(console, render_run(run, summaries))
    if out is not None:
        data = run.to_dict() | {"summary": [one.to_dict() for one in summaries]}
        out.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
    return run


def _show(console: Console, tables: RenderableType) -> None:
    """Print tables; where the output is no terminal, and so has no width of its own, as wide as they are."""
    wide = console if console.is_terminal else Console(file=console.file, width=max(console.width, WIDTH))
    wide.print(tables)


def _make_folder(path: Path) -> None:
    """Make the folder of what is kept, before the work whose result could not be kept."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--out: {path} can't be made: {error}") from error


def diff(first: Path, second: Path, console: Console) -> None:
    """Print what changed between two runs that were kept as JSON.

    Raises:
        InvalidRequestError: A file holds no run, or the runs are of different sets.
    """
    _show(console, render_difference(compare_runs(_load(first), _load(second))))


def _load(path: Path) -> EvaluationRun:
    try:
        return EvaluationRun.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{path} holds no run of `agentic-kb bench --out` ({error!r})") from error


@dataclass(frozen=True, slots=True)
class _Plans:
    """What plans, how the report names it, and the questions that it has plans for."""

    llm: LLM | dict[str, LLM] | None
    name: str
    dataset: Dataset


def _plans(plans: str, llm: LLM | None, dataset: Dataset, planning: Sequence[str]) -> _Plans:
    if plans == "none":
        return _Plans(None, "none", dataset)
    if plans == "llm":
        if llm is None:
            raise ConfigurationError("--plans llm needs OPENAI_API_KEY, or OPENAI_BASE_URL for a server of your own")
        return _Plans(llm, f"language model {llm.metadata.model_name}", dataset)
    if plans == "oracle":
        return _given(GoldPlans(), dataset)
    if not plans.startswith(RECORDED):
        raise ConfigurationError(f"--plans: {plans!r} is unknown; known are oracle, recorded:FILE, llm and none")
    path = Path(plans.removeprefix(RECORDED))
    if path.is_dir():
        return _replayed(path, dataset, planning)
    recorded = RecordedPlans.load(path)
    return _given(recorded, dataset.only(recorded.plans, f"{path.name} holds no plan for them"))


def _given(source: PlanSource, dataset: Dataset) -> _Plans:
    without = sum(not source.steps(query) for query in dataset.queries)
    if without:
        told = f"{without} questions have no steps in the {source.name}; they are searched as asked"
        dataset = replace(dataset, warnings=(*dataset.warnings, told))
    return _Plans(PlannedLLM(source, dataset.queries), source.name, dataset)


def _replayed(folder: Path, dataset: Dataset, planning: Sequence[str]) -> _Plans:
    """Replay what ``--record`` kept: each effort has had replies of its own."""
    if not planning:
        raise ConfigurationError(f"--plans: nothing of {folder} is replayed, for no system of --systems plans")
    ids = set.intersection(*(recorded_queries(folder, effort) for effort in planning))
    models: dict[str, LLM] = {effort: recorded_llm(folder, effort) for effort in planning}
    told = f"replies of {models[planning[0]].metadata.model_name}, {folder.name}"
    return _Plans(models, told, dataset.only(ids, f"{folder.name} holds no recording of them"))


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
