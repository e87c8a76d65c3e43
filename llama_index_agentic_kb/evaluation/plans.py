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

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import ConfigDict

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.errors import InvalidRequestError, LLMError
from llama_index_agentic_kb.evaluation.dataset import EvaluationQuery
from llama_index_agentic_kb.llm import count_tokens

__all__ = ["GoldPlans", "PlanSource", "PlannedLLM", "PlannedStep", "RecordedPlans"]

_QUESTION: Final = re.compile(r"^Question: (.*?)$", re.MULTILINE)
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
            InvalidRequestError: A line is none of these.
        """
        plans = {}
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
                plans[str(row["_id"])] = {"plan": list(row["plan"]), "answers": dict(row.get("answers") or {})}
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequestError(f"{path}, line {number}: no recorded plan ({error!r})") from error
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
    queries: dict[str, EvaluationQuery] = field(default_factory=dict)

    def steps_for(self, prompt: str) -> list[PlannedStep]:
        """Find the question that a prompt is about, and give its steps.

        Raises:
            LLMError: The prompt holds no question of the set.
        """
        for asked in reversed(_QUESTION.findall(prompt)):
            query = self.queries.get(normalize(asked))
            if query is not None:
                return list(self.source.steps(query))
        raise LLMError("the prompt holds no question of the evaluation set")


class PlannedLLM(CustomLLM):
    """A language model that answers prompts of planning, findings and revision from given plans.

    It says of the evidence that it is sufficient, and names no passage for an answer: it has read none.

    Args:
        source: Where plans come from.
        queries: The questions that will be asked.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    book: Any

    def __init__(self, source: PlanSource, queries: Sequence[EvaluationQuery]) -> None:
        by_text = {normalize(" ".join(query.text.split())): query for query in queries}
        super().__init__(book=_Book(source, by_text))

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
            return "\n".join(step.text for step in self._steps_of_fusion(prompt))
        steps = self.book.steps_for(prompt)
        if kind.endswith("Plan:"):
            return _plan(steps)
        if kind.endswith("Findings:"):
            return _findings(steps, prompt)
        if kind.endswith("Verdict:"):
            return json.dumps({"sufficient": True, "gaps": [], "sub_queries": []})
        raise LLMError("given plans answer prompts of planning, findings and revision, and no others")

    def _steps_of_fusion(self, prompt: str) -> list[PlannedStep]:
        asked = normalize(prompt)
        found = [query for text, query in self.book.queries.items() if text in asked]
        longest = max(found, key=lambda query: len(query.text), default=None)
        return list(self.book.source.steps(longest)) if longest is not None else []

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:  # noqa: ARG002
        """Reply to a prompt."""
        text = self.reply_to(prompt)
        return CompletionResponse(text=text, raw=_billed(prompt, text))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponseGen:  # noqa: ARG002
        """Reply to a prompt in one piece."""
        text = self.reply_to(prompt)
        yield CompletionResponse(text=text, delta=text, raw=_billed(prompt, text))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        """Reply to a conversation."""
        return self._chat(messages)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponseGen:
        """Reply to a conversation in one piece."""
        response = self._chat(messages)
        response.delta = response.message.content

        def told() -> ChatResponseGen:
            yield response

        return told()

    def _chat(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        prompt = "\n".join(message.content or "" for message in messages)
        text = self.reply_to(prompt)
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), raw=_billed(prompt, text))


def _billed(prompt: str, reply: str) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": count_tokens(prompt), "completion_tokens": count_tokens(reply)}}


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
    lines = []
    for name, query in _STEP.findall(asked[-1]) if asked else []:
        step = next((step for step in steps if _is_of(query, step)), None)
        answers = [{"value": value, "ref": 0, "confidence": "stated"} for value in step.answers] if step else []
        lines.append(json.dumps({"step": name, "answers": answers}))
    return "\n".join(lines)


def _is_of(query: str, step: PlannedStep) -> bool:
    """Whether a query is a step's, its references filled with something."""
    pattern = ".+?".join(re.escape(normalize(part)) for part in _REFERENCE.split(step.text)[::2])
    return re.fullmatch(rf"\s*{pattern}\s*", normalize(query)) is not None
