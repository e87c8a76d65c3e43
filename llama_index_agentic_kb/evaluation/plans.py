"""Where an evaluation's plans come from: gold fields (an oracle), a recorded file, or a language model.

Gold and recorded plans go the way of every plan: they answer the prompts of planner, findings reader and reviser as a
model would, so that what is measured is the library's own path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from llama_index.core.base.llms.types import LLMMetadata
from pydantic import ConfigDict

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.errors import InvalidRequestError, LLMError
from llama_index_agentic_kb.evaluation.dataset import EvaluationQuery, json_lines
from llama_index_agentic_kb.prompts import as_data
from llama_index_agentic_kb.replay import PASSAGE, ReplyingLLM

__all__ = ["GoldPlans", "PlanSource", "PlannedLLM", "PlannedStep", "RecordedPlans"]

_QUESTION: Final = re.compile(r"^Question: ", re.MULTILINE)
_ENDS: Final = ("\nPlan:", "\nVerdict:", "\n\n<steps>", "\nAnswer:")
_TITLE: Final = re.compile(r' title="([^"\n]*)"')
_STEPS: Final = re.compile(r"<steps>\n(.*?)\n</steps>", re.DOTALL)
_STEP: Final = re.compile(r"^(\S+): (.*)$", re.MULTILINE)
_REFERENCE: Final = re.compile(r"#(\d+)")
_FUSION: Final = "generates multiple search queries"  # QueryFusionRetriever's own prompt


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a given plan: its query (``#1`` stands for the answer of step 1), its parents, its answers."""

    id: str
    text: str
    depends_on: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


class PlanSource(Protocol):
    """Gives the plan of a question."""

    @property
    def name(self) -> str:
        """Names it in reports; one that knows the answers says ORACLE."""
        ...

    def steps(self, query: EvaluationQuery) -> Sequence[PlannedStep]:
        """Give the steps of a question's plan; none where there is no plan for it."""
        ...


@dataclass(frozen=True, slots=True)
class GoldPlans:
    """Plans from the gold fields of a set: ``decomposition``, or else ``rewrite``. An oracle: it knows the answers.

    Steps that are marked ``is_operation`` need no search, and are left out.
    """

    name: str = "ORACLE plans (gold fields)"

    def steps(self, query: EvaluationQuery) -> Sequence[PlannedStep]:
        """Give the gold steps."""
        gold = query.fields.get("decomposition")
        if isinstance(gold, list):
            wanted = [step for step in gold if isinstance(step, Mapping) and not step.get("is_operation")]
            return [_step(step, step.get("answer")) for step in wanted]
        rewrite = query.fields.get("rewrite")
        return [PlannedStep("1", str(rewrite))] if rewrite else []


@dataclass(frozen=True, slots=True)
class RecordedPlans:
    """Plans and step answers that a model wrote earlier, by question id.

    Args:
        plans: Each question's plan and the answers of its steps.
        name: Names them in reports.
    """

    plans: Mapping[str, Mapping[str, Any]]
    name: str = "recorded plans"

    @classmethod
    def load(cls, path: str | Path) -> RecordedPlans:
        """Read ``{"_id", "plan": [{"id", "text", "depends_on"}], "answers": {"1": ...}}``, one a line.

        Raises:
            InvalidRequestError: The file can't be read, or a line is none of these.
        """
        plans = {}
        for row, where in json_lines(Path(path)):
            try:
                steps = [{**step, "id": step["id"], "text": step["text"]} for step in row["plan"]]
                plans[str(row["_id"])] = {"plan": steps, "answers": dict(row.get("answers") or {})}
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequestError(
                    f"{where}: no recorded plan ({error!r}); expected _id, plan (of id and text) and answers"
                ) from error
        return cls(plans, f"recorded plans ({Path(path).name})")

    def steps(self, query: EvaluationQuery) -> Sequence[PlannedStep]:
        """Give the recorded steps."""
        row = self.plans.get(query.id)
        return [] if row is None else [_step(step, row["answers"].get(str(step["id"]))) for step in row["plan"]]


def _step(step: Mapping[str, Any], answer: Any) -> PlannedStep:
    values = answer if isinstance(answer, list) else [answer]
    text = str(step.get("text", ""))
    parents = [str(parent) for parent in step.get("depends_on") or _REFERENCE.findall(text)]
    return PlannedStep(
        str(step.get("id", "")), text, tuple(parents), tuple(str(value) for value in values if value not in (None, ""))
    )


@dataclass(slots=True)
class _Book:
    """The questions of a set by the form in which prompts hold them."""

    source: PlanSource
    queries: dict[str, list[EvaluationQuery]] = field(default_factory=dict)

    def add(self, query: EvaluationQuery) -> None:
        self.queries.setdefault(_asked(query), []).append(query)

    def steps_for(self, prompt: str) -> list[PlannedStep]:
        """Find the question that a prompt is about, and give its steps.

        Raises:
            LLMError: The prompt holds no question of the set.
        """
        for start in reversed([match.end() for match in _QUESTION.finditer(prompt)]):
            ends = [end for mark in _ENDS if (end := prompt.find(mark, start)) >= 0]
            same = self.queries.get(normalize(prompt[start : min(ends, default=len(prompt))]))
            if same:
                return list(self.source.steps(_best_of(same, prompt)))
        raise LLMError("the prompt holds no question of the evaluation set")

    def steps_within(self, prompt: str) -> list[PlannedStep]:
        """Give the steps of the longest question that stands anywhere in a prompt; none where there is none."""
        asked = normalize(prompt)
        found = [query for text, same in self.queries.items() if text in asked for query in same[:1]]
        longest = max(found, key=lambda query: len(query.text), default=None)
        return list(self.source.steps(longest)) if longest is not None else []


def _asked(query: EvaluationQuery) -> str:
    return normalize(as_data(query.text))


def _best_of(same: Sequence[EvaluationQuery], prompt: str) -> EvaluationQuery:
    """Tell questions of the same words ("Why?") by the conversation that the prompt shows."""
    if len(same) == 1:
        return same[0]
    shown = normalize(prompt)

    def turns_shown(query: EvaluationQuery) -> int:
        turns = [normalize(as_data(text))[:100] for _, text in query.history]
        return sum(1 if turn in shown else -1 for turn in turns)

    return max(same, key=turns_shown)


class PlannedLLM(ReplyingLLM):
    """A language model that answers prompts of planning, findings and revision from given plans.

    It says of the evidence that it is sufficient. For an answer it names the passage of the prompt that holds it, as a
    reader would; where none does it gives the answer all the same, and names none.

    Args:
        source: Where plans come from.
        queries: The questions that will be asked.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    book: Any

    def __init__(self, source: PlanSource, queries: Sequence[EvaluationQuery]) -> None:
        book = _Book(source)
        for query in queries:
            book.add(query)
        super().__init__(book=book)

    @property
    def metadata(self) -> LLMMetadata:
        """Name it by its plans."""
        return LLMMetadata(
            context_window=128_000, num_output=4_096, is_chat_model=True, model_name=self.book.source.name
        )

    def reply_to(self, prompt: str) -> str:
        """Give the reply to a prompt.

        Raises:
            LLMError: It is no prompt of ours, or holds no question of the set.
        """
        kind = prompt.rstrip()
        if _FUSION in prompt:
            return "\n".join(" ".join(_REFERENCE.sub("", step.text).split()) for step in self.book.steps_within(prompt))
        steps = self.book.steps_for(prompt)
        if kind.endswith("Plan:"):
            return _plan(steps)
        if kind.endswith("Findings:"):
            return _findings(steps, prompt)
        if kind.endswith("Verdict:"):
            return json.dumps({"sufficient": True, "gaps": [], "sub_queries": []})
        raise LLMError("given plans answer prompts of planning, findings and revision, and no others")


def _plan(steps: Sequence[PlannedStep]) -> str:
    return json.dumps(
        {
            "sub_queries": [
                {
                    "id": f"q{step.id}",
                    "query": _REFERENCE.sub(r"#q\1", step.text),
                    "sources": [],
                    "depends_on": [f"q{parent}" for parent in step.depends_on],
                }
                for step in steps
            ]
        }
    )


def _findings(steps: Sequence[PlannedStep], prompt: str) -> str:
    """Answer the steps that a prompt asks for: found by their text, for our ids are not the plan's own."""
    asked = _STEPS.findall(prompt)
    passages = [(int(number), normalize(text)) for number, text in _titled_passages(prompt)]
    lines = []
    for name, query in _STEP.findall(asked[-1]) if asked else []:
        step = _step_of(name, query, steps)
        answers = [
            {"value": value, "ref": _ref_of(value, query, passages), "confidence": "stated"}
            for value in (step.answers if step is not None else ())
        ]
        lines.append(json.dumps({"step": name, "answers": answers}, ensure_ascii=False))
    return "\n".join(lines)


def _titled_passages(prompt: str) -> list[tuple[str, str]]:
    """Give (number, title and text) of each passage."""
    titled = []
    for match in PASSAGE.finditer(prompt):
        title = _TITLE.search(match.group(0))
        titled.append((match.group(1), f"{title.group(1) if title else ''}\n{match.group(2)}"))
    return titled


def _ref_of(value: str, query: str, passages: Sequence[tuple[int, str]]) -> int:
    """Name the passage that holds a value, out of several the one that has most of the query's words; 0 for none."""
    wanted = re.compile(rf"(?<![a-z0-9]){re.escape(normalize(value))}(?![a-z0-9])")
    words = set(normalize(query).split())
    holding = [(number, text) for number, text in passages if wanted.search(text)]
    return max(holding, key=lambda one: len(words & set(one[1].split())), default=(0, ""))[0]


def _step_of(name: str, query: str, steps: Sequence[PlannedStep]) -> PlannedStep | None:
    """Find the step that a query was made of.

    "When did #1 die?" and "When did #2 die?" have one form: the answers that stand in the query tell, then the id.
    """
    asked = normalize(query)
    answers = {step.id: step.answers for step in steps}

    def fit(step: PlannedStep) -> tuple[int, bool]:
        given = [answers.get(parent, ()) for parent in step.depends_on]
        return sum(any(normalize(value) in asked for value in values) for values in given), name == f"q{step.id}"

    return max((step for step in steps if _is_of(asked, step)), key=fit, default=None)


def _is_of(asked: str, step: PlannedStep) -> bool:
    """Whether a query is a step's, its references filled with something."""
    pattern = ".+?".join(re.escape(normalize(part)).join(("\\s*", "\\s*")) for part in _REFERENCE.split(step.text)[::2])
    return re.fullmatch(pattern, asked) is not None
