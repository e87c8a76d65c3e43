"""Reads evaluation sets in BEIR form (Thakur et al., NeurIPS 2021).

corpus.jsonl          {"_id", "title", "text", "metadata"}, one object for each line
queries.jsonl         {"_id", "text", ...}, one object for each line; further fields are kept
qrels.tsv, or         query-id, corpus-id, score, with or without a header line; or TREC's four columns
qrels/<split>.tsv
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from llama_index.core.schema import TextNode

from llama_index_agentic_kb.errors import InvalidRequestError

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EvaluationQuery:
    """A question of an evaluation set.

    Args:
        id: The question's ``_id``.
        text: The question.
        kinds: Kinds of the question (``type``, one name or several); metrics are also reported by kind.
        history: Earlier turns as (role, text), oldest first.
        fields: All fields of the question's line: gold decompositions, rewrites, answers.
    """

    id: str
    text: str
    kinds: tuple[str, ...] = ()
    history: tuple[tuple[str, str], ...] = ()
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dataset:
    """An evaluation set.

    Args:
        name: Name of the folder.
        documents: The corpus: one node for each document, with the document's id.
        queries: The questions that have judgments.
        relevant: By query id, the grades above 0 by document id.
        warnings: Notes on omitted data and the reasons.
    """

    name: str
    documents: Sequence[TextNode]
    queries: Sequence[EvaluationQuery]
    relevant: Mapping[str, Mapping[str, float]]
    warnings: tuple[str, ...] = ()

    def only(self, ids: Collection[str], why: str) -> Dataset:
        """Return the dataset with the given queries and a warning; raise ``InvalidRequestError`` if none is left."""
        queries = [query for query in self.queries if query.id in ids]
        if not queries:
            raise InvalidRequestError(f"{self.name}: no query is left: {why}")
        left = len(self.queries) - len(queries)
        warnings = (*self.warnings, f"{left} queries were left out: {why}") if left else self.warnings
        return replace(self, queries=queries, warnings=warnings)


def read_dataset(folder: str | Path, *, split: str = "test", limit: int | None = None, seed: int = 0) -> Dataset:
    """Read an evaluation set from a folder in BEIR form.

    Args:
        folder: Folder with the files listed in the module's docstring.
        split: Name of the file in ``qrels/`` that is read if there is no ``qrels.tsv``.
        limit: Number of queries drawn at random. Defaults to all.
        seed: Seed of the random draw.

    Raises:
        InvalidRequestError: A file is missing or malformed; the message names file, line and remedy.
    """
    path = Path(folder)
    documents = [_document(row) for row, _ in _rows(path / "corpus.jsonl")]
    queries = [_query(row, where) for row, where in _rows(path / "queries.jsonl")]
    relevant = _judgments(path, split)
    judged = [query for query in queries if relevant.get(query.id)]
    if not judged:
        raise InvalidRequestError(f"{path}: no query of queries.jsonl has a judgment above 0 in the qrels")
    known = {document.node_id for document in documents}
    warnings = []
    if unknown := sum(len(grades.keys() - known) for grades in relevant.values()):
        warnings.append(f"{unknown} judgments name documents that are not in corpus.jsonl; they can't be found")
    if len(judged) < len(queries):
        warnings.append(f"{len(queries) - len(judged)} queries have no judgment above 0; they were left out")
    if limit is not None and limit < len(judged):
        drawn = random.Random(seed).sample(range(len(judged)), limit)  # noqa: S311 (a sample, no secret)
        judged = [judged[at] for at in sorted(drawn)]
    return Dataset(path.resolve().name, documents, judged, relevant, tuple(warnings))


def json_lines(path: Path) -> Iterator[tuple[Row, str]]:
    """Yield each line's JSON object and its place; raise ``InvalidRequestError`` for one without an ``_id``."""
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{where}: no JSON ({error}); each line is one JSON object") from error
        if not isinstance(row, dict) or row.get("_id") is None or not str(row["_id"]).strip():
            raise InvalidRequestError(f"{where}: each line is a JSON object with an _id")
        yield {**row, "_id": str(row["_id"])}, where


def _rows(path: Path) -> Iterator[tuple[Row, str]]:
    """Yield the objects of a file and their positions, and check that they have a text and unique ids."""
    if not path.is_file():
        raise InvalidRequestError(f"{path} is missing: a BEIR-form folder has corpus.jsonl, queries.jsonl, qrels.tsv")
    seen: set[str] = set()
    for row, where in json_lines(path):
        if not isinstance(row.get("text"), str):
            raise InvalidRequestError(f"{where}: text is missing, or not a string")
        if row["_id"] in seen:
            raise InvalidRequestError(f"{path}: the _id {row['_id']!r} is there twice; ids must differ")
        seen.add(row["_id"])
        yield row, where


def _document(row: Row) -> TextNode:
    """Return a document as a node; only its title and text are embedded."""
    known = row["metadata"] if isinstance(row.get("metadata"), dict) else {}
    metadata = {key: value for key, value in known.items() if isinstance(value, (str, int, float, bool))}
    title = str(row.get("title") or "")
    hidden = [key for key in metadata if key != "title" or not title]
    if title:
        metadata["title"] = title
    return TextNode(
        id_=row["_id"],
        text=row["text"],
        metadata=metadata,
        excluded_embed_metadata_keys=hidden,
        excluded_llm_metadata_keys=hidden,
    )


def _query(row: Row, where: str) -> EvaluationQuery:
    kind, turns = row.get("type") or [], row.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InvalidRequestError(f"{where}: history is a list of {{role, content}} objects")
    history = tuple((str(turn.get("role", "user")), str(turn.get("content", ""))) for turn in turns)
    kinds = tuple(map(str, kind)) if isinstance(kind, list) else (str(kind),)
    return EvaluationQuery(row["_id"], row["text"], kinds, history, row)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} can't be read as UTF-8 text: {error}") from error


def _judgments(folder: Path, split: str) -> dict[str, dict[str, float]]:
    """Return, by query id, the grades above 0 by document id."""
    files = (folder / "qrels.tsv", folder / "qrels" / f"{split}.tsv")
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise InvalidRequestError(f"{folder}: neither qrels.tsv nor qrels/{split}.tsv is there")
    relevant: dict[str, dict[str, float]] = {}
    for number, line in enumerate(_text_of(path).splitlines(), start=1):
        columns = line.split("\t") if "\t" in line else line.split()
        if not columns:
            continue
        if len(columns) not in {3, 4}:
            raise InvalidRequestError(f"{path}, line {number}: expected query-id, corpus-id and score, tab-separated")
        try:
            grade = float(columns[-1])
        except ValueError:
            if number == 1:  # the header
                continue
            raise InvalidRequestError(f"{path}, line {number}: the score {columns[-1]!r} is no number") from None
        if not math.isfinite(grade):
            raise InvalidRequestError(f"{path}, line {number}: the score {columns[-1]!r} is no finite number")
        if grade > 0:
            relevant.setdefault(columns[0], {})[columns[-2]] = grade
    return relevant
