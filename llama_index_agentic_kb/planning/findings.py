"""Model calls that read search results: one extracts the answers of the steps, one looks for missing evidence.

The prompts of both calls contain the best passages of each sub-query, numbered and shortened around its words.
Passages may be hostile, and so may the model's reply to them, so the reply is restricted. An answer (part of a later
query) or a proposed search is one short line of plain text: addresses, tags, markers, references to steps, JSON and
hidden characters are removed, and only allowed sources are searched. Filters come only from the user's messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.guard.spotlighting import Spotlight, draw
from llama_index_agentic_kb.guard.text import plain_value, strip_invisible
from llama_index_agentic_kb.llm import read_json
from llama_index_agentic_kb.planning.passages import CUT, MAX_PASSAGES, PassageSet, ShownPassage
from llama_index_agentic_kb.planning.plan_graph import PlannerSource, Proposal, refers
from llama_index_agentic_kb.planning.planner import ModelCall, PlanningModel, describe_sources, read_proposals
from llama_index_agentic_kb.prompts import ON_SEARCHING, with_instructions
from llama_index_agentic_kb.schema import Confidence, Finding

MAX_BRANCHES: Final = 3
"""Maximum number of answers used per step, and of searches made from one step (three directors, two candidates)."""
MAX_REPLY: Final = 20_000  # maximum number of characters of a reply that are parsed
MAX_VALUE: Final = 200
"""Maximum number of characters of an answer or a proposed search: a fact, but little of what one may exfiltrate."""
MAX_READ: Final = 2_000  # maximum number of characters of one raw answer from the model that are processed
MAX_GAPS: Final = 10

_STEP: Final = re.compile(r'\{\s*"step"')
_NOTHING: Final = ("none", "null", "unknown", "n/a", "not stated", "not found", "not mentioned")


# -- answers of steps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The answer to one step, as the model read it in the passages."""

    findings: list[Finding]  # findings, best first; empty if no answer was found
    search: str = ""  # the query to search next if the findings are only partial answers; else empty
    whole: Collection[str] = ()  # node ids of passages whose full text the model asked for


Take: TypeAlias = Callable[[str, StepAnswer], Coroutine[object, object, None]]
"""Callback that is awaited with a step's id and its answer."""


async def read_findings(
    models: PlanningModel,
    question: str,
    steps: Mapping[str, str],
    passages: PassageSet,
    take: Take,
    *,
    later: Mapping[str, str],
    known: Mapping[str, Iterable[Finding]],
    deadline: float | None,
    log: ActivityLog,
) -> ModelCall:
    """Ask the model for the answers of steps; ``take`` gets each as soon as its line is complete.

    ``steps`` are searched queries by id. ``later`` are queries that wait for answers: those that the passages answer
    have a line too. ``known`` are findings of earlier calls, which the reply may correct.
    """
    call = ModelCall()
    spotlight = draw(models.spotlighting)
    intake = FindingsIntake(steps, {*steps, *later, *known}, passages, take, spotlight)
    found = {name: as_found(answers, passages.refs()) for name, answers in known.items()}
    with call.recorded(log, models.model, "findings"):
        messages = models.messages(
            "findings_prompt",
            passages.as_prompt(spotlight),
            max_answers=str(MAX_BRANCHES),
            query_str=question,
            steps=_one_a_line(steps),
            later_steps=_one_a_line(later),
            found=_one_a_line(found),
        )
        reply = await models.model.read(messages, intake.read, deadline=deadline, max_chars=MAX_REPLY)
        call.usage = reply.usage
        if not intake.is_complete:
            repair = partial(lines_in, reply.text)
            await intake.finish(await Call(sync=repair, deadline=deadline, what="reading what was found"))
    return call


def as_found(findings: Iterable[Finding], refs: Mapping[str, int]) -> str:
    """Return findings as prompt text; "stated" is said only where the passage is shown, by its number in ``refs``."""
    shown = []
    for one in findings:
        ref = refs.get(one.node_id or "")
        unseen = "its passage is not shown" if one.confidence is Confidence.STATED else one.confidence
        shown.append(f"{one.value} ({unseen if ref is None else f'{one.confidence}, ref_id {ref}'})")
    return "; ".join(shown)


def _one_a_line(steps: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {' '.join(text.split())}" for name, text in steps.items())


class FindingsIntake:
    """Parses a reply while it is streamed: a line for each step ``asked``, and for some others of ``steps``."""

    def __init__(
        self, asked: Iterable[str], steps: Collection[str], passages: PassageSet, take: Take, spotlight: Spotlight
    ) -> None:
        self._asked = {*asked}
        self._steps = steps
        self._passages = passages.passages
        self._hand_on = take
        self._spotlight = spotlight
        self._position = 0
        self._taken: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Whether the reply had a line for every searched step."""
        return self._taken >= self._asked

    async def read(self, delta: str, text: str) -> None:
        """Parse the reply when a JSON object may have ended; a broken object is skipped."""
        position, decoder = self._position, json.JSONDecoder()
        while "}" in delta and (start := _STEP.search(text, position)) is not None:
            try:
                line, position = decoder.raw_decode(text, start.start())
            except (ValueError, RecursionError):
                position = start.end()
                continue
            self._position = position
            await self._take(line)

    async def finish(self, lines: Sequence[dict[str, object]]) -> None:
        """Take the repaired lines of the complete reply, for steps that had no valid line while it was streamed."""
        before = set(self._taken)
        for line in lines:
            if _step_of(line, self._steps) not in before:
                await self._take(line)

    async def _take(self, line: dict[str, object]) -> None:
        step = _step_of(line, self._steps)
        if step not in self._steps:
            return
        self._taken.add(step)
        wanted = [self._passages.get(_number(ref)) for ref in _listed(line.get("whole"))]
        whole = {one.node.node_id for one in wanted if one is not None and CUT in one.content}
        answers, found = _answers_in(line), _findings_in([line], step, self._passages, self._spotlight)
        # models write it beside the answers as well as in one of them
        search = next((one["next"] for one in (*answers, line) if isinstance(one, dict) and one.get("next")), "")
        words = self._spotlight.unmarked(search[:MAX_READ]) if isinstance(search, str) else ""
        following = one_line(plain_value(words), MAX_VALUE)
        await self._hand_on(step, StepAnswer(found, "" if refers(following) else following, whole))


def _step_of(line: Mapping[str, object], steps: Collection[str]) -> str:
    """Return the id of a line's step; it may be none of ``steps``."""
    step = str(line.get("step", line.get("id", ""))).strip().lstrip("#")
    return step if step in steps else f"q{step}"


def _answers_in(line: dict[str, object]) -> list[object]:
    """Return the answers of a line, which may be one answer itself."""
    answers = line.get("answers", line.get("answer", line.get("value")))
    if isinstance(answers, list):
        return answers
    return [answers if isinstance(answers, dict) else {**line, "value": answers}]


def _findings_in(
    lines: Iterable[dict[str, object]], step: str, passages: Mapping[int, ShownPassage], spotlight: Spotlight
) -> list[Finding]:
    """Return the valid answers in the lines of a step, each once."""
    distinct: dict[str, Finding] = {}
    for answer in (answer for line in lines for answer in _answers_in(line)):
        if (finding := _finding(step, answer, passages, spotlight)) is not None:
            distinct.setdefault(finding.value.casefold(), finding)
    return list(distinct.values())


def _finding(step: str, answer: object, passages: Mapping[int, ShownPassage], spotlight: Spotlight) -> Finding | None:
    """Return an answer as a finding (None if invalid), "stated" only if the referenced passage contains it."""
    fields = answer if isinstance(answer, dict) else {"value": answer}
    value = fields.get("value", fields.get("answer"))
    sure = str(fields.get("confidence") or "stated").strip().lower()
    if not isinstance(value, (str, int, float)) or isinstance(value, bool) or sure == "none":
        return None
    written = spotlight.unmarked(str(value)[:MAX_READ])
    text = one_line(plain_value(written), MAX_VALUE)
    if re.search(r"\w", text) is None or text.casefold() in _NOTHING or refers(written) or refers(text):
        return None
    passage = passages.get(_number(fields.get("ref", fields.get("ref_id"))))
    is_stated = sure == "stated" and passage is not None and passage.says(text)
    confidence = Confidence.STATED if is_stated else Confidence.PARTIAL if sure == "partial" else Confidence.IMPLIED
    node_id, title = (None, None) if passage is None else (passage.node.node_id, passage.title)
    return Finding(sub_query_id=step, value=text, confidence=confidence, node_id=node_id, title=title)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _number(value: object) -> int:
    """Return the first number in a ref, which may be a number, a string or a list; -1 if it has none."""
    digits = re.search(r"\d{1,6}", str(value))
    return int(digits.group()) if digits else -1


def lines_in(text: str) -> list[dict[str, object]]:
    """Return the lines of a reply in any form: a list, an object keyed by step, or broken JSON."""
    value = read_json(text, "{[")
    if isinstance(value, dict):
        listed = [item for item in value.values() if isinstance(item, list) and any(map(_is_line, item))]
        by_step = [{"step": name, "answers": item} for name, item in value.items()]
        value = [value] if _is_line(value) else listed[0] if listed else by_step
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_line(value: object) -> bool:
    return isinstance(value, dict) and ("step" in value or "id" in value)


# -- gaps ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Verdict(ModelCall):
    """The model's verdict on whether the evidence is sufficient."""

    sufficient: bool | None = None  # whether the model judged the evidence sufficient; None if it gave no judgement
    gaps: list[str] = field(default_factory=list)
    refs: list[int] = field(default_factory=list)
    """Numbers of the passages that support the verdict, in the order in which the facts lead to the answer."""
    values: dict[str, list[Finding]] = field(default_factory=dict)
    """Answers of open steps that the model read in the passages, by id."""
    proposals: list[Proposal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def read(self, text: str, steps: Collection[str], passages: PassageSet, spotlight: Spotlight) -> None:
        """Parse a reply and fill the fields of this verdict; ``steps`` are the open steps.

        Raises:
            PlanningError: The reply contains no verdict.
        """
        value = read_json(spotlight.unmarked(text))
        if not isinstance(value, dict) or not {"sufficient", "sub_queries", "gaps"} & value.keys():
            raise PlanningError(f"the model's reply holds no verdict: {one_line(text[:400], 80)!r}")
        self.gaps = [one_line(strip_invisible(str(gap)), 200) for gap in _listed(value.get("gaps"))[:MAX_GAPS]]
        sufficient, proposed = value.get("sufficient"), value.get("sub_queries")
        self.sufficient = sufficient if isinstance(sufficient, bool) else None
        numbers = [_number(ref) for ref in _listed(value.get("refs"))[:MAX_PASSAGES]]
        self.refs = [ref for ref in numbers if ref in passages.passages]
        lines = [line for line in _listed(value.get("values"))[:MAX_PASSAGES] if isinstance(line, dict)]
        for step in steps:
            own = [line for line in lines if _step_of(line, steps) == step]
            if found := _findings_in(own, step, passages.passages, spotlight)[:MAX_BRANCHES]:
                self.values[step] = found
        if self.sufficient or not isinstance(proposed, list):
            return
        proposals = read_proposals({"sub_queries": proposed}, "r")  # "q1" is a step of the plan
        if any(proposal.filter for proposal in proposals):
            self.warnings.append("filters of the revision were left out: filters come only from the user's messages")
        for item in proposals:
            query, finds = (one_line(plain_value(text), MAX_VALUE) for text in (item.query, item.finds))
            if query:
                self.proposals.append(replace(item, query=query, filter="", finds=finds))


async def look_for_gaps(
    models: PlanningModel,
    question: str,
    searches: Mapping[str, str],
    open_steps: Collection[str],
    passages: PassageSet,
    sources: Sequence[PlannerSource],
    *,
    limit: int,
    deadline: float | None,
    log: ActivityLog,
    instructions: str = "",
) -> Verdict:
    """Ask whether the evidence is sufficient, or for at most ``limit`` further searches; a failure is in the result."""
    verdict = Verdict(fields={"sub_queries": []})
    spotlight = draw(models.spotlighting)
    with verdict.recorded(log, models.model, "revision"):
        messages = models.messages(
            "revision_prompt",
            passages.as_prompt(spotlight),
            max_sub_queries=str(limit),
            sources=describe_sources(sources),
            searches=_one_a_line(searches),
            query_str=question,
        )
        messages = with_instructions(messages, instructions, ON_SEARCHING)
        reply = await models.model.chat(messages, deadline=deadline)
        verdict.usage = reply.usage
        read = partial(verdict.read, reply.text, open_steps, passages, spotlight)
        await Call(sync=read, deadline=deadline, what="reading the verdict")
        verdict.fields = {
            "sub_queries": [proposal.query for proposal in verdict.proposals],
            "warning": "; ".join([*verdict.gaps, *verdict.warnings]) or None,
        }
    return verdict
