"""Reads what a wave of searches found: one streamed call, whose lines are acted on as they come."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.callbacks.schema import CBEventType

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import normalize, one_line
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.guard.spotlighting import Spotlight, draw
from llama_index_agentic_kb.guard.text import plain_value
from llama_index_agentic_kb.llm import Usage, mended_json, unfenced
from llama_index_agentic_kb.planning.graph import refers
from llama_index_agentic_kb.planning.passage_reader import PassageReader
from llama_index_agentic_kb.planning.reading import Reading, numbered
from llama_index_agentic_kb.prompts import FINDINGS_TEMPLATE, as_data
from llama_index_agentic_kb.schema import Confidence, Finding, ModelInfo, ModelQueryPlanningActivity, Outcome

__all__ = ["Findings", "FindingsReader", "Wanted"]

MAX_REPLY: Final = 20_000
"""Characters of a reply that are read."""

MAX_VALUE: Final = 200
"""Characters of one answer; a longer one is no name, date or number to search with."""
MAX_READ: Final = 2_000
"""Characters of what a model gives as an answer that are looked at."""

_STEP: Final = re.compile(r'\{\s*"step"')
_NOTHING: Final = ("none", "null", "unknown", "n/a", "not stated", "not found", "not mentioned")

Found: TypeAlias = Callable[[str, list[Finding]], Coroutine[Any, Any, None]]
"""A flow that is given a step's id and its answers, best first; none means that it was not found."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call is asked for.

    Args:
        steps: Queries that were searched, by id: each gets a line.
        later: Queries that wait for them, by id: only what the passages already answer gets a line.
        known: What earlier calls found; may be corrected.
    """

    steps: Mapping[str, str]
    later: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, list[Finding]] = field(default_factory=dict)


@dataclass(slots=True)
class Findings:
    """What came of a call."""

    usage: Usage = field(default_factory=Usage)
    error: Exception | None = None


class FindingsReader(PassageReader):
    """Reads answers out of passages with a language model.

    The passages may be hostile, and so may what the model reads in them. An answer becomes words of a later query, and
    nothing else: which steps there are, which sources they go to and under which filters stands in the plan, which no
    passage was read for. It is one short line of plain words: no address, tag, marker, reference to a step, JSON or
    hidden character is left in it.

    Its arguments are those of ``PassageReader``.
    """

    default_template = FINDINGS_TEMPLATE

    async def read(
        self,
        question: str,
        wanted: Wanted,
        reading: Reading,
        found: Found,
        *,
        most: int,
        deadline: float | None,
        log: ActivityLog,
    ) -> Findings:
        """Read the answers of steps; each is handed on as soon as its line is complete.

        Args:
            question: What it is all for.
            wanted: The steps.
            reading: The passages.
            found: Called once for each step that the model writes a line for.
            most: Answers of one step that are taken.
            deadline: ``time.monotonic()`` at which the call is given up.
            log: The request's account; the call has a record in it.

        Returns:
            The bill, and the error where it failed; what was read by then has been handed on.
        """
        name = self.model.name
        record = log.open(
            ModelQueryPlanningActivity,
            CBEventType.AGENT_STEP,
            model=None if name is None else ModelInfo(model_name=name),
            purpose="findings",
        )
        spotlight = draw(self.spotlighting)
        intake = _Intake(wanted, reading, found, most, spotlight)
        result = Findings()
        messages = self.template.format_messages(
            llm=self.model.llm,
            max_answers=str(most),
            context_str=reading.as_prompt(spotlight),
            query_str=as_data(question),
            steps=as_data(numbered(wanted.steps)),
            later_steps=as_data(numbered(wanted.later)),
            found=as_data(numbered([(one, "; ".join(f.value for f in known)) for one, known in wanted.known.items()])),
        )
        try:
            reply = await self.model.read(messages, intake.read, deadline=deadline, at_most=MAX_REPLY)
            result.usage = reply.usage
            if not intake.is_complete:
                mend = partial(_any_lines, reply.text)
                lines = await Call(sync=mend, deadline=deadline, what="reading what was found")
                await intake.finish(lines)
        except asyncio.CancelledError:
            log.cancel(record)
            raise
        except Exception as error:  # noqa: BLE001 (without findings the next searches use the question's own words)
            result.error = error
            if isinstance(error, LLMError) and error.usage is not None:
                result.usage = error.usage
        log.close(
            record,
            outcome=Outcome.OK if result.error is None else Outcome.ERROR,
            error=None if result.error is None else describe_error(result.error, name),
            input_tokens=result.usage.input_tokens,
            output_tokens=result.usage.output_tokens,
        )
        return result


class _Intake:
    """Takes the lines of a reply as they are written."""

    def __init__(self, wanted: Wanted, reading: Reading, found: Found, most: int, spotlight: Spotlight) -> None:
        self._wanted = wanted
        self._steps = {*wanted.steps, *wanted.later, *wanted.known}
        self._reading = reading
        self._found = found
        self._most = most
        self._unmarked = spotlight.unmarked
        self._position = 0
        self._taken: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Whether there was a line for every step."""
        return self._taken >= self._wanted.steps.keys()

    async def read(self, delta: str, text: str) -> None:
        """Look into the reply where an object may have ended."""
        if "}" not in delta:
            return
        for line, end in _lines(text, self._position):
            self._position = end
            await self._take(line)

    async def finish(self, lines: Sequence[dict[str, Any]]) -> None:
        """Take what was no plain line: a reply of another form, mended where it is broken."""
        taken = set(self._taken)
        for line in lines:
            if self._step_of(line) not in taken:
                await self._take(line)

    def _step_of(self, line: dict[str, Any]) -> str:
        step = str(line.get("step", line.get("id", ""))).strip().lstrip("#")
        return step if step in self._steps else f"q{step}"

    async def _take(self, line: dict[str, Any]) -> None:
        step = self._step_of(line)
        if step not in self._steps:
            return
        self._taken.add(step)
        answers = line.get("answers", line.get("answer", line.get("value")))
        given = answers if isinstance(answers, list) else [answers]
        read = [finding for one in given if (finding := self._finding(step, one)) is not None]
        distinct: dict[str, Finding] = {}
        for finding in read:
            distinct.setdefault(finding.value.casefold(), finding)
        await self._found(step, list(distinct.values())[: self._most])

    def _finding(self, step: str, answer: Any) -> Finding | None:
        """Read one answer; "stated" only where the passage that is named for it says it."""
        fields = answer if isinstance(answer, dict) else {"value": answer}
        value = fields.get("value", fields.get("answer"))
        sure = str(fields.get("confidence") or "stated").strip().lower()
        if not isinstance(value, (str, int, float)) or isinstance(value, bool) or sure == "none":
            return None
        read = self._unmarked(str(value)[:MAX_READ])
        told = one_line(plain_value(read), MAX_VALUE)
        if not normalize(told) or told.casefold() in _NOTHING or refers(read) or refers(told):
            return None
        passage = self._reading.passages.get(_number(fields.get("ref", fields.get("ref_id"))))
        if passage is None or not passage.says(told):
            return Finding(sub_query_id=step, value=told, confidence=Confidence.IMPLIED)
        confidence = Confidence.STATED if sure == "stated" else Confidence.IMPLIED
        return Finding(
            sub_query_id=step, value=told, confidence=confidence, node_id=passage.node.node_id, title=passage.title
        )


def _number(value: Any) -> int:
    """Read a ref: a number, or one in a text or a list; 0 where there is none."""
    digits = re.search(r"\d{1,6}", str(value))
    return int(digits.group()) if digits else 0


def _lines(text: str, position: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Give the objects that are complete from a position on, each with its end; a broken one does not hide others."""
    decoder = json.JSONDecoder()
    while (start := _STEP.search(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            position = start.end()
            continue
        yield value, position


def _any_lines(text: str) -> list[dict[str, Any]]:
    """Give the steps of a reply in whatever form: a list, an object of steps, broken JSON."""
    try:
        value = mended_json(unfenced(text))
    except (ValueError, RecursionError):
        return []
    if isinstance(value, dict):
        listed = [item for item in value.values() if isinstance(item, list) and any(map(_is_line, item))]
        by_step = [{"step": name, "answers": item} for name, item in value.items()]
        value = [value] if _is_line(value) else listed[0] if listed else by_step
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_line(value: Any) -> bool:
    return isinstance(value, dict) and ("step" in value or "id" in value)
