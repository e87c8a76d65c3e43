"""Reads evaluation sets in BEIR form (Thakur et al., NeurIPS 2021), and plans for their questions.

corpus.jsonl          {"_id", "title", "text", "metadata"}, one object for each line
queries.jsonl         {"_id", "text", ...}, one object for each line; further fields are kept
qrels.tsv, or         query-id, corpus-id, score, with or without a header line; or TREC's four columns
qrels/<split>.tsv

Plans use the library's normal code: a model that knows them answers the prompts of planner, findings reader and
reviser.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import Final

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import TextNode

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import InvalidRequestError, LLMError
from llama_index_agentic_kb.prompts import as_data
from llama_index_agentic_kb.replay import PASSAGE, ReplyingLLM


@dataclass(frozen=True, slots=True)
class EvaluationQuery:
    """A question of an evaluation set."""

    id: str
    text: str
    kinds: tuple[str, ...] = ()  # ``type``, one name or several; metrics are also reported by kind
    history: tuple[tuple[str, str], ...] = ()  # earlier turns as (role, text), oldest first
    fields: Mapping[str, object] = field(default_factory=dict)  # of its line: gold decompositions, rewrites, answers


@dataclass(frozen=True, slots=True)
class Dataset:
    """An evaluation set: documents, queries, and the relevant documents of each query."""

    name: str  # of the folder
    documents: Sequence[TextNode]  # one node for each document, with the document's id
    queries: Sequence[EvaluationQuery]  # that have judgments
    relevant: Mapping[str, Mapping[str, float]]  # by query id, the grades above 0 by document id
    warnings: tuple[str, ...] = ()  # notes on omitted data and the reasons

    def only(self, ids: Collection[str], why: str) -> Dataset:
        """Return the dataset with the given queries and a warning; raise ``InvalidRequestError`` if none is left."""
        queries = [query for query in self.queries if query.id in ids]
        if not queries:
            raise InvalidRequestError(f"{self.name}: no query is left: {why}")
        left = len(self.queries) - len(queries)
        warnings = (*self.warnings, f"{left} queries were left out: {why}") if left else self.warnings
        return replace(self, queries=queries, warnings=warnings)


def read_dataset(folder: str | Path, *, split: str = "test", limit: int | None = None, seed: int = 0) -> Dataset:
    """Read an evaluation set from a folder in BEIR form; raise ``InvalidRequestError`` with file, line and remedy.

    Without a ``qrels.tsv`` the ``split`` is read; ``limit`` queries are drawn at random by ``seed``, by default all.
    """
    path = Path(folder)
    documents = [_document(row) for row, _ in _rows(path / "corpus.jsonl")]
    queries = list(starmap(_query, _rows(path / "queries.jsonl")))
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


def json_lines(path: Path) -> Iterator[tuple[JsonObject, str]]:
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


def _rows(path: Path) -> Iterator[tuple[JsonObject, str]]:
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


def _document(row: JsonObject) -> TextNode:
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


def _query(row: JsonObject, where: str) -> EvaluationQuery:
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


# -- plans: gold fields (an oracle), or recorded ones ------------------------------------------------------------------

_QUESTION: Final = re.compile(r"^Question: ", re.MULTILINE)
_ENDS: Final = ("\nPlan:", "\nVerdict:", "\n\n<steps>", "\nAnswer:")
_TITLE: Final = re.compile(r' title="([^"\n]*)"')
_STEPS: Final = re.compile(r"<steps>\n(.*?)\n</steps>", re.DOTALL)
_STEP: Final = re.compile(r"^(\S+): (.*)$", re.MULTILINE)
_REFERENCE: Final = re.compile(r"#(\d+)")
_FUSION: Final = "generates multiple search queries"  # QueryFusionRetriever's own prompt


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a given plan: its query (``#1`` refers to the answer of step 1), its parents and its answers."""

    id: str
    text: str
    depends_on: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


Steps = Callable[[EvaluationQuery], list[PlannedStep]]


def gold_steps(query: EvaluationQuery) -> list[PlannedStep]:
    """Return the steps of a question's gold fields: ``decomposition``, or else ``rewrite``.

    This is an oracle: it knows the answers. Steps marked ``is_operation`` need no search and are omitted.
    """
    gold = query.fields.get("decomposition")
    if isinstance(gold, list):
        searched = [step for step in gold if isinstance(step, Mapping) and not step.get("is_operation")]
        return [_step(step, step.get("answer")) for step in searched]
    rewrite = query.fields.get("rewrite")
    return [PlannedStep("1", str(rewrite))] if rewrite else []


def recorded_plans(path: str | Path) -> dict[str, list[PlannedStep]]:
    """Return recorded plans and step answers of a model by question id; raise ``InvalidRequestError`` for other lines.

    Each line of the file is ``{"_id", "plan": [{"id", "text", "depends_on"}], "answers": {"1": ...}}``.
    """
    plans = {}
    for row, where in json_lines(Path(path)):
        try:
            answers = dict(row.get("answers") or {})
            steps = [{**step, "id": step["id"], "text": step["text"]} for step in row["plan"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(
                f"{where}: no recorded plan ({error!r}); expected _id, plan (of id and text) and answers"
            ) from error
        plans[row["_id"]] = [_step(step, answers.get(str(step["id"]))) for step in steps]
    return plans


def _step(step: JsonMapping, answer: object) -> PlannedStep:
    text, values = str(step.get("text", "")), answer if isinstance(answer, list) else [answer]
    parents = step.get("depends_on") or _REFERENCE.findall(text)
    answers = tuple(str(value) for value in values if value not in (None, ""))
    return PlannedStep(str(step.get("id", "")), text, tuple(map(str, parents)), answers)


class PlannedLLM(ReplyingLLM):
    """A language model that answers prompts of planning, findings and revision from given plans.

    It always judges the evidence sufficient, and cites for each answer the passage of the prompt that contains it. The
    name is shown in reports; ``steps`` returns the steps of a question's plan, none if it has no plan.
    """

    _name: str = PrivateAttr()
    _steps: Steps = PrivateAttr()
    _queries: dict[str, list[EvaluationQuery]] = PrivateAttr(default_factory=dict)

    def __init__(self, name: str, steps: Steps, queries: Iterable[EvaluationQuery]) -> None:
        super().__init__()
        self._name, self._steps = name, steps
        for query in queries:
            self._queries.setdefault(normalize(as_data(query.text)), []).append(query)

    @property
    def metadata(self) -> LLMMetadata:
        """Metadata of a chat model with the plans' name."""
        return LLMMetadata(context_window=128_000, num_output=4_096, is_chat_model=True, model_name=self._name)

    def reply_to(self, prompt: str) -> str:
        """Return the reply to a prompt; raise ``LLMError`` for other prompts than those of planning over the set."""
        if _FUSION in prompt:  # the longest question of the set anywhere in it
            asked = normalize(prompt)
            found = [same[0] for text, same in self._queries.items() if text in asked]
            steps = self._steps(max(found, key=lambda query: len(query.text))) if found else []
            return "\n".join(" ".join(_REFERENCE.sub("", step.text).split()) for step in steps)
        steps = self._steps_for(prompt)
        match prompt.rstrip().rpartition("\n")[2]:
            case "Plan:":
                return json.dumps({"sub_queries": [*map(_planned, steps)]})
            case "Findings:":
                return _findings(steps, prompt)
            case "Verdict:":
                return json.dumps({"sufficient": True, "gaps": [], "sub_queries": []})
        raise LLMError("given plans answer prompts of planning, findings and revision, and no others")

    def _steps_for(self, prompt: str) -> list[PlannedStep]:
        """Return the steps of the question that a prompt is about."""
        shown = normalize(prompt)

        def turns_shown(query: EvaluationQuery) -> int:
            """Count earlier turns in the prompt, which distinguish questions with the same text ("Why?")."""
            return sum(1 if normalize(as_data(text))[:100] in shown else -1 for _, text in query.history)

        for start in reversed([match.end() for match in _QUESTION.finditer(prompt)]):
            ends = [end for mark in _ENDS if (end := prompt.find(mark, start)) >= 0]
            same = self._queries.get(normalize(prompt[start : min(ends, default=len(prompt))]))
            if same:
                return self._steps(max(same, key=turns_shown))
        raise LLMError("the prompt holds no question of the evaluation set")


def _planned(step: PlannedStep) -> JsonObject:
    query, parents = _REFERENCE.sub(r"#q\1", step.text), [f"q{one}" for one in step.depends_on]
    return {"id": f"q{step.id}", "query": query, "sources": [], "depends_on": parents}


def _findings(steps: Sequence[PlannedStep], prompt: str) -> str:
    """Return the planned answers to the steps listed in a prompt, one JSON line per step; steps are matched by text."""
    asked, passages = _STEPS.findall(prompt), dict[int, str]()
    for match in PASSAGE.finditer(prompt):
        passages[int(match[1])] = normalize("\n".join([*_TITLE.findall(match[0])[:1], match[2]]))
    lines = []
    for name, query in _STEP.findall(asked[-1]) if asked else []:
        words, step = set(normalize(query).split()), _step_of(name, query, steps)
        answers = []
        for value in step.answers if step is not None else ():
            pattern = re.compile(rf"(?<![a-z0-9]){re.escape(normalize(value))}(?![a-z0-9])")
            # Of several passages with the value, the one with most of the query's words.
            shared = {ref: len(words & set(text.split())) for ref, text in passages.items() if pattern.search(text)}
            ref = max(shared, key=lambda ref: shared[ref], default=None)
            answers.append({"value": value, "ref": ref, "confidence": "stated"})
        lines.append(json.dumps({"step": name, "answers": answers}, ensure_ascii=False))
    return "\n".join(lines)


def _step_of(name: str, query: str, steps: Sequence[PlannedStep]) -> PlannedStep | None:
    """Return the step whose text, with its references replaced by answers, gives the query. None if there is none.

    "When did #1 die?" and "When did #2 die?" have the same form: answers found in the query decide, then the id.
    """
    asked = normalize(query)
    answers = {step.id: step.answers for step in steps}

    def is_of(step: PlannedStep) -> bool:
        parts = [re.escape(normalize(part)).join(("\\s*", "\\s*")) for part in _REFERENCE.split(step.text)[::2]]
        return re.fullmatch(".+?".join(parts), asked) is not None

    def fit(step: PlannedStep) -> tuple[int, bool]:
        known = [map(normalize, answers.get(parent, ())) for parent in step.depends_on]
        return sum(any(value in asked for value in values) for values in known), name == f"q{step.id}"

    return max(filter(is_of, steps), key=fit, default=None)
