"""The command ``agentic-kb bench``: evaluates systems on a dataset folder and prints a report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import unquote

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.evaluation.dataset import Dataset, read_dataset
from llama_index_agentic_kb.evaluation.plans import PlannedLLM, Steps, gold_steps, recorded_plans
from llama_index_agentic_kb.evaluation.runner import EvaluationRun, evaluate, render_difference, render_run
from llama_index_agentic_kb.evaluation.systems import PLANNING, CorpusIndex, check_systems, make_systems
from llama_index_agentic_kb.replay import RecordedLLM, Recording

if TYPE_CHECKING:
    from llama_index.core.llms import LLM

RECORDED: Final = "recorded:"

WIDTH: Final = 200
"""Minimum columns of output to a file or a pipe."""

Planning: TypeAlias = "tuple[LLM | dict[str, LLM] | None, str, Dataset]"
"""The planning model (or models by effort), its name in the report, and the dataset of planned questions."""


def bench(
    folder: Path,
    *,
    systems: Sequence[str],
    plans: str,
    llm: LLM | None,
    cache: Path,
    console: Console,
    cutoffs: Sequence[int] = (5, 10),
    limit: int | None = None,
    seed: int = 0,
    source_field: str | None = None,
    split: str = "test",
    concurrency: int = 4,
    out: Path | None = None,
    record: Path | None = None,
) -> None:
    """Run systems over an evaluation set, print the report, and save it as JSON if requested (options: see ``cli``).

    Raises:
        InvalidRequestError: The folder or a file of plans can't be read.
        ConfigurationError: A system or a source of plans is unknown or lacks its model, or ``out`` can't be created.
    """
    from llama_index_agentic_kb.store import default_embed_model  # noqa: PLC0415 (loads torch)

    dataset = read_dataset(folder, split=split, limit=limit, seed=seed)
    planner, plans, dataset = _planner(plans, llm, dataset, [name for name in systems if name in PLANNING])
    check_systems(systems, planner)
    if out is not None:
        try:  # fail before the evaluation if its result can't be saved
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--out: {out.parent} can't be made: {error}") from error
    embed_model = default_embed_model()
    with _progress(console) as show:
        corpus = CorpusIndex(
            dataset, embed_model, cache, source_field=source_field, progress=lambda *n: show("embedding", *n)
        )
        with closing(corpus):
            made = make_systems(systems, corpus, planner, documents=max(cutoffs), record=record)
            run = evaluate(dataset, made, plans=plans, cutoffs=cutoffs, concurrency=concurrency, progress=show)
    run.settings |= {
        "embed_model": embed_model.model_name,
        "source_field": source_field,
        "documents": max(cutoffs),
        **{package: version(package) for package in ("llama-index-agentic-kb", "llama-index-core")},
    }
    summary = run.summary()
    _show(console, render_run(run, summary))
    if out is not None:
        out.write_text(json.dumps(run.to_dict() | {"summary": summary}, ensure_ascii=False) + "\n", encoding="utf-8")


def diff(first: Path, second: Path, console: Console) -> None:
    """Print the changes between two runs saved as JSON.

    Raises:
        InvalidRequestError: A file contains no run, or the runs can't be compared.
    """
    _show(console, render_difference(_load(first), _load(second)))


def _show(console: Console, tables: RenderableType) -> None:
    """Print tables; at least ``WIDTH`` columns wide if the output is not a terminal."""
    wide = console if console.is_terminal else Console(file=console.file, width=max(console.width, WIDTH))
    wide.print(tables)


def _load(path: Path) -> EvaluationRun:
    try:
        return EvaluationRun.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{path} holds no run of `agentic-kb bench --out` ({error!r})") from error


def _planner(plans: str, llm: LLM | None, dataset: Dataset, planning: Sequence[str]) -> Planning:
    if plans == "none":
        return None, "none", dataset
    if plans == "llm":
        if llm is None:
            raise ConfigurationError("--plans llm needs OPENAI_API_KEY, or OPENAI_BASE_URL for a server of your own")
        return llm, f"language model {llm.metadata.model_name}", dataset
    if plans == "oracle":
        return _planned("ORACLE plans (gold fields)", gold_steps, dataset)
    if not plans.startswith(RECORDED):
        raise ConfigurationError(f"--plans: {plans!r} is unknown; known are oracle, recorded:FILE, llm and none")
    path = Path(plans.removeprefix(RECORDED))
    if path.is_dir():
        return _replayed(path, dataset, planning)
    recorded = recorded_plans(path)
    only = dataset.only(recorded, f"{path.name} holds no plan for them")
    return _planned(f"recorded plans ({path.name})", lambda query: recorded.get(query.id, []), only)


def _planned(name: str, steps: Steps, dataset: Dataset) -> Planning:
    without = sum(not steps(query) for query in dataset.queries)
    if without:
        warning = f"{without} questions have no steps in the {name}; they are searched as asked"
        dataset = replace(dataset, warnings=(*dataset.warnings, warning))
    return PlannedLLM(name, steps, dataset.queries), name, dataset


def _replayed(folder: Path, dataset: Dataset, planning: Sequence[str]) -> Planning:
    """Return models that replay the replies saved by ``--record``, one for each effort."""
    if not planning:
        raise ConfigurationError(f"--plans: nothing of {folder} is replayed, for no system of --systems plans")
    models: dict[str, LLM] = {}
    known = {query.id for query in dataset.queries}
    for effort in planning:
        recordings: dict[str, Recording] = {}
        for file in sorted((folder / effort).glob("*.json")):
            try:
                recordings[unquote(file.stem)] = Recording.load(file)
            except (OSError, ValueError) as error:
                raise InvalidRequestError(f"{file} holds no recording ({error!r}); record it again") from error
        if not recordings:
            raise InvalidRequestError(
                f"{folder}: no question of effort {effort!r} was recorded here; run with --record"
            )
        replies = [reply for recording in recordings.values() for reply in recording.replies]
        model = next(iter(recordings.values())).model
        models[effort] = RecordedLLM(recording=Recording(question="", model=model, effort=effort, replies=replies))
        known &= recordings.keys()
    name = f"replies of {models[planning[0]].metadata.model_name}, {folder.name}"
    return models, name, dataset.only(known, f"{folder.name} holds no recording of them")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows progress: (task name, completed, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = Console(stderr=True)
    hidden = not shown.is_terminal or not console.is_terminal
    with Progress(*columns, console=shown, transient=True, disable=hidden) as bar:
        task = bar.add_task("embedding", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)
