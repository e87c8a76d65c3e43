"""Reads intermediate answers out of the passages that a round of searches found.

One streamed call a round; each line of the reply is acted on as it comes. The passages are the best of each sub-query,
numbered, and cut around what it asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import excerpt, normalize, one_line
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.evidence.candidates import Candidate, Fusion, collect, lists_by_sub_query
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight, draw
from llama_index_agentic_kb.guard.text import plain_value
from llama_index_agentic_kb.llm import repair_json, strip_code_fence
from llama_index_agentic_kb.planning.model_calls import ModelCall, PassageReader, model_record
from llama_index_agentic_kb.planning.plan_graph import refers
from llama_index_agentic_kb.prompts import FINDINGS_TEMPLATE, Passage, as_data, format_passages
from llama_index_agentic_kb.schema import Confidence, Finding
from llama_index_agentic_kb.sources.base import KnowledgeSource, NodeKey, node_key
from llama_index_agentic_kb.sources.fan_out import SourceSearch

__all__ = ["FindingsReader", "OpenSteps", "PassageSet", "ShownPassage", "best_of"]

MAX_PASSAGES: Final = 30
"""Passages of one prompt, whatever the number of sub-queries."""

PASSAGES_PER_QUERY: Final = 5
"""Passages of each sub-query: the answer of a well-put step is nearly always among its first five."""

PASSAGE_WORDS: Final = 110
"""Words of a passage around what the sub-query asks: a paragraph."""

MAX_REPLY: Final = 20_000
"""Characters of a reply that are read."""

MAX_VALUE: Final = 200
"""Characters of one answer; a longer one is no name, date or number to search with."""

MAX_READ: Final = 2_000
"""Characters of one answer, as the model wrote it, that are looked at."""

_STEP: Final = re.compile(r'\{\s*"step"')
_NOTHING: Final = ("none", "null", "unknown", "n/a", "not stated", "not found", "not mentioned")


@dataclass(frozen=True, slots=True)
class ShownPassage:
    """A passage as the model sees it."""

    ref: int
    node: NodeWithScore
    source: KnowledgeSource
    title: str
    content: str

    def says(self, value: str) -> bool:
        """Return whether the value stands in the passage or its title; a qualifier behind the name need not."""
        text = normalize(f"{self.title}\n{self.content}\n{self.source.source_data(self.node).content}")
        form = normalize(value)
        return _holds(text, form) or all(_holds(text, part) for part in _name_of(form).split())


def _holds(text: str, part: str) -> bool:
    """Return whether a text holds another as whole words: "ed" is not in "directed"."""
    return re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", text) is not None


def _name_of(value: str) -> str:
    """Return an answer without its qualifier: "columbia" of "columbia, south carolina"."""
    return value.split("(", maxsplit=1)[0].split(",", maxsplit=1)[0].strip() or value


@dataclass(slots=True)
class PassageSet:
    """Passages for one prompt, each once.

    Args:
        per_query: How many of each sub-query.
        words: Words of each passage.
    """

    per_query: int = PASSAGES_PER_QUERY
    words: int = PASSAGE_WORDS
    passages: dict[int, ShownPassage] = field(default_factory=dict)
    _seen: set[NodeKey] = field(default_factory=set)

    def add(self, query: str, found: Iterable[Candidate]) -> None:
        """Add passages that a query found, each cut around the query's words.

        Args:
            query: The query.
            found: Best first.
        """
        for candidate in list(found)[: self.per_query]:
            node, source = candidate.node, candidate.search.source
            key = node_key(node.node)
            if key in self._seen or len(self.passages) >= MAX_PASSAGES:
                continue
            self._seen.add(key)
            ref, data = len(self.passages) + 1, source.source_data(node)
            self.passages[ref] = ShownPassage(ref, node, source, data.title, excerpt(data.content, query, self.words))

    def as_prompt(self, spotlight: Spotlight = PLAIN) -> str:
        """Return the passages as they stand in a prompt, marked as data by ``spotlight``."""
        return format_passages(
            Passage(passage.ref, passage.title, passage.content, passage.source.name, spotlight=spotlight)
            for passage in self.passages.values()
        )


def best_of(searches: Sequence[SourceSearch], fusion: Fusion) -> list[Candidate]:
    """Return what one sub-query found at all its sources, best first.

    Args:
        searches: Its searches.
        fusion: How lists of different corpora are fused.
    """
    candidates = collect(searches)
    return [candidates[key] for one in lists_by_sub_query(searches, fusion) for key in one.ranked.keys]


# -- the call ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSteps:
    """The steps that a call is asked for.

    Args:
        steps: Queries that were searched, by id: each gets a line.
        later: Queries that wait for them, by id: only what the passages already answer gets a line.
        known: What earlier calls found; may be corrected.
    """

    steps: Mapping[str, str]
    later: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, list[Finding]] = field(default_factory=dict)


Take: TypeAlias = Callable[[str, list[Finding]], Coroutine[Any, Any, None]]
"""Awaited with a step's id and its answers, best first; an empty list says that no answer was found."""


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
        open_steps: OpenSteps,
        passages: PassageSet,
        take: Take,
        *,
        limit: int,
        deadline: float | None,
        log: ActivityLog,
    ) -> ModelCall:
        """Read the answers of steps; each is handed on as soon as its line is complete.

        Args:
            question: What the steps are for.
            open_steps: The steps.
            passages: The passages.
            take: Awaited once for each step that the model writes a line for.
            limit: Answers of one step that are taken.
            deadline: ``time.monotonic()`` at which the call is given up.
            log: The request's account; the call has a record in it.

        Returns:
            The bill, and the error where the call failed; what was read before has been handed on.
        """
        call = ModelCall()
        spotlight = draw(self.spotlighting)
        intake = _Intake(open_steps, passages, take, limit, spotlight)
        known = {name: "; ".join(finding.value for finding in found) for name, found in open_steps.known.items()}
        with model_record(log, self.model, "findings") as record:
            messages = self.template.format_messages(
                llm=self.model.llm,
                max_answers=str(limit),
                context_str=passages.as_prompt(spotlight),
                query_str=as_data(question),
                steps=as_data(_one_a_line(open_steps.steps)),
                later_steps=as_data(_one_a_line(open_steps.later)),
                found=as_data(_one_a_line(known)),
            )
            try:
                reply = await self.model.read(messages, intake.read, deadline=deadline, max_chars=MAX_REPLY)
                call.usage = reply.usage
                if not intake.is_complete:
                    repair = partial(_any_lines, reply.text)
                    await intake.finish(await Call(sync=repair, deadline=deadline, what="reading what was found"))
            except Exception as error:  # noqa: BLE001 (without findings the next searches use the question's own words)
                call.fail(error)
            call.close(log, record)
        return call


def _one_a_line(steps: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {' '.join(text.split())}" for name, text in steps.items())


class _Intake:
    """Takes the lines of a reply as they are written."""

    def __init__(
        self, open_steps: OpenSteps, passages: PassageSet, take: Take, limit: int, spotlight: Spotlight
    ) -> None:
        self._asked = open_steps.steps.keys()
        self._steps = {*open_steps.steps, *open_steps.later, *open_steps.known}
        self._passages = passages.passages
        self._hand_on = take
        self._limit = limit
        self._unmarked = spotlight.unmarked
        self._position = 0
        self._taken: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Whether there was a line for every step."""
        return self._taken >= self._asked

    async def read(self, delta: str, text: str) -> None:
        """Parse the reply where an object may have ended."""
        if "}" not in delta:
            return
        for line, end in _lines(text, self._position):
            self._position = end
            await self._take(line)

    async def finish(self, lines: Sequence[dict[str, Any]]) -> None:
        """Take what was no plain line: a reply of another form, repaired where it is broken."""
        before = set(self._taken)
        for line in lines:
            if self._step_of(line) not in before:
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
        distinct: dict[str, Finding] = {}
        for answer in answers if isinstance(answers, list) else [answers]:
            finding = self._finding(step, answer)
            if finding is not None:
                distinct.setdefault(finding.value.casefold(), finding)
        await self._hand_on(step, list(distinct.values())[: self._limit])

    def _finding(self, step: str, answer: Any) -> Finding | None:
        """Return one answer as a finding; "stated" only where the passage that is named for it says it."""
        fields = answer if isinstance(answer, dict) else {"value": answer}
        value = fields.get("value", fields.get("answer"))
        sure = str(fields.get("confidence") or "stated").strip().lower()
        if not isinstance(value, (str, int, float)) or isinstance(value, bool) or sure == "none":
            return None
        written = self._unmarked(str(value)[:MAX_READ])
        text = one_line(plain_value(written), MAX_VALUE)
        if not normalize(text) or text.casefold() in _NOTHING or refers(written) or refers(text):
            return None
        passage = self._passages.get(_number(fields.get("ref", fields.get("ref_id"))))
        if passage is None or not passage.says(text):
            return Finding(sub_query_id=step, value=text, confidence=Confidence.IMPLIED)
        confidence = Confidence.STATED if sure == "stated" else Confidence.IMPLIED
        return Finding(
            sub_query_id=step, value=text, confidence=confidence, node_id=passage.node.node_id, title=passage.title
        )


def _number(value: Any) -> int:
    """Return a ref: a number, or one in a text or a list; 0 where there is none."""
    digits = re.search(r"\d{1,6}", str(value))
    return int(digits.group()) if digits else 0


def _lines(text: str, position: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the objects that are complete from a position on, each with its end; a broken one does not hide others."""
    decoder = json.JSONDecoder()
    while (start := _STEP.search(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            position = start.end()
            continue
        yield value, position


def _any_lines(text: str) -> list[dict[str, Any]]:
    """Return the steps of a reply in whatever form: a list, an object of steps, broken JSON."""
    try:
        value = repair_json(strip_code_fence(text))
    except (ValueError, RecursionError):
        return []
    if isinstance(value, dict):
        listed = [item for item in value.values() if isinstance(item, list) and any(map(_is_line, item))]
        by_step = [{"step": name, "answers": item} for name, item in value.items()]
        value = [value] if _is_line(value) else listed[0] if listed else by_step
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_line(value: Any) -> bool:
    return isinstance(value, dict) and ("step" in value or "id" in value)
