"""Reads what a round of searches found: the answers of its steps, and at the end whether anything is missing.

Both calls are shown passages: the best of each sub-query, numbered, and cut around what it asks. Passages may be
hostile, and so may what the model reads in them. So what it replies is bounded. An answer becomes words of a later
query, and a proposed search is a short line of plain words with the names of allowed sources: no address, tag, marker,
reference to a step, JSON or hidden character is left in them. Plans and filters come only from the user's messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import excerpt, normalize, one_line, sentence_spans
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.evidence.candidates import Candidate
from llama_index_agentic_kb.evidence.provenance import shown_metadata
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight, draw
from llama_index_agentic_kb.guard.text import plain_value, strip_invisible
from llama_index_agentic_kb.llm import repair_json, strip_code_fence
from llama_index_agentic_kb.planning.plan_graph import PlannerSource, Proposal, refers
from llama_index_agentic_kb.planning.planner import ModelCall, PlanningModel, describe_sources, read_proposals
from llama_index_agentic_kb.prompts import Passage, as_data, format_passages
from llama_index_agentic_kb.schema import Confidence, Finding
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.search import NodeKey, node_key

MAX_PASSAGES: Final = 30
"""Passages of one prompt, whatever the number of sub-queries."""

PASSAGES_PER_QUERY: Final = 5
"""Passages of each sub-query: the answer of a well-put step is nearly always among its first five."""

PASSAGE_WORDS: Final = 110
"""Words of a passage around what the sub-query asks: a paragraph."""

WHOLE_WORDS: Final = 150
"""Words up to which a passage is shown whole: a cut would save little, and may lose the fact."""

PROOF_WORDS: Final = 400
"""Words of a passage that proves a finding, or that the model asked to read in full."""

CUT: Final = "[...]"
"""Stands where something of a passage was left out."""

MAX_BRANCHES: Final = 3
"""Answers of a step that are built on, and searches that a step may become (three directors, two candidates)."""

MAX_REPLY: Final = 20_000
"""Characters of a reply that are read."""

MAX_VALUE: Final = 200
"""Characters of one answer or proposed search: enough for a missing fact, and little for a passage that wants to send
data out."""

MAX_READ: Final = 2_000
"""Characters of one answer, as the model wrote it, that are looked at."""

MAX_GAPS: Final = 10

_STEP: Final = re.compile(r'\{\s*"step"')
_NOTHING: Final = ("none", "null", "unknown", "n/a", "not stated", "not found", "not mentioned")


# -- passages ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShownPassage:
    """A passage as the model sees it."""

    ref: int
    node: NodeWithScore
    source: KnowledgeSource
    title: str
    content: str
    metadata: str = ""

    def says(self, value: str) -> bool:
        """Return whether the value stands in the passage or its title; a qualifier behind the name need not.

        Only whole words count: "ed" is not in "directed".
        """
        text = normalize(f"{self.title}\n{self.content}\n{self.source.source_data(self.node).content}")
        form = normalize(value)
        name = form.split("(", maxsplit=1)[0].split(",", maxsplit=1)[0].strip() or form
        return any(
            all(re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", text) for part in parts)
            for parts in ([form], name.split())
        )


class PassageSet:
    """Passages for one prompt, each once, numbered from 0.

    Args:
        per_query: How many of each sub-query.
        in_full: The ids of passages that are shown in full, up to ``PROOF_WORDS``.
    """

    def __init__(self, per_query: int = PASSAGES_PER_QUERY, in_full: Collection[str] = ()) -> None:
        self.passages: dict[int, ShownPassage] = {}
        self._per_query = per_query
        self._in_full = in_full
        self._seen: set[NodeKey] = set()

    def add(self, query: str, found: Sequence[Candidate]) -> None:
        """Add passages that a query found, best first, each cut around the query's words."""
        for candidate in found[: self._per_query]:
            node, source = candidate.node, candidate.search.source
            key = node_key(node.node)
            if key in self._seen or len(self.passages) >= MAX_PASSAGES:
                continue
            self._seen.add(key)
            ref, data = len(self.passages), source.source_data(node)
            words = PROOF_WORDS if node.node_id in self._in_full else PASSAGE_WORDS
            shown = passage_excerpt(data.content, query, words)
            metadata = shown_metadata(node, source.permissions, (data.title, data.content, data.url))
            self.passages[ref] = ShownPassage(ref, node, source, data.title, shown, metadata)

    def as_prompt(self, spotlight: Spotlight = PLAIN) -> str:
        """Return the passages as they stand in a prompt, marked as data by ``spotlight``."""
        return format_passages(
            Passage(
                passage.ref,
                passage.title,
                passage.content,
                passage.source.name,
                spotlight=spotlight,
                metadata=passage.metadata,
            )
            for passage in self.passages.values()
        )

    def refs(self) -> dict[str, int]:
        """Return the number of each passage, by its node's id."""
        return {passage.node.node_id: ref for ref, passage in self.passages.items()}


def passage_excerpt(text: str, query: str, words: int) -> str:
    """Return the sentences of a text that are nearest to a query, in the text's order, with a mark at each cut.

    A short text is returned whole. The first sentence, which names what the text is about, is always among them. A
    word counts the more the fewer sentences hold it. A sentence too long for its room is cut around the query's words.
    """
    count = len(text.split())
    if count <= max(words, WHOLE_WORDS):
        return text
    spans = sentence_spans(text)
    sentences = [text[start:end] for start, end in spans]
    held = [{*re.findall(r"\w{3,}", normalize(sentence))} for sentence in sentences]
    wanted = {word: sum(word in own for own in held) for word in re.findall(r"\w{3,}", normalize(query))}
    scores = [sum(1 / wanted[word] for word in wanted if word in own) for own in held]
    best = scores.index(max(scores))
    order = sorted(range(len(sentences)), key=lambda at: (at > 0, -scores[at], abs(at - best), -at))
    room, chosen = words, dict[int, str]()
    for at in order:
        length = len(sentences[at].split())
        if length <= room:
            chosen[at] = sentences[at]
        elif not chosen or (len(chosen) == 1 and scores[at] and room > words // 2):
            chosen[at] = excerpt(sentences[at], query, room // 2)
            length = room // 2
        else:
            continue
        room -= length
    parts, last = [], -1
    for at in sorted(chosen):
        parts += [CUT] if at > last + 1 else []
        parts.append(chosen[at].strip())
        last = at
    return " ".join([*parts, CUT] if last < len(sentences) - 1 else parts)


# -- answers of steps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSteps:
    """The steps that a call is asked for."""

    steps: Mapping[str, str]
    """Queries that were searched, by id: each gets a line."""
    later: Mapping[str, str] = field(default_factory=dict)
    """Queries that wait for them: only what the passages already answer gets a line."""
    known: Mapping[str, list[Finding]] = field(default_factory=dict)
    """What earlier calls found; may be corrected."""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What was read for a step."""

    findings: list[Finding]
    """Best first; none says that no answer was found."""
    search: str = ""
    """What to search next where the findings are only nearer to what was asked."""


Take: TypeAlias = Callable[[str, StepAnswer], Coroutine[object, object, None]]
"""Awaited with a step's id and what was read for it."""


@dataclass(slots=True)
class Reading(ModelCall):
    """What a call that reads answers gave, beside the answers."""

    in_full: set[str] = field(default_factory=set)
    """The ids of passages that the model asked to read in full."""


async def read_findings(
    models: PlanningModel,
    question: str,
    open_steps: OpenSteps,
    passages: PassageSet,
    take: Take,
    *,
    deadline: float | None,
    log: ActivityLog,
) -> Reading:
    """Read the answers of steps; each step's are handed on as soon as its line is complete.

    Where the call fails, the result says why, and what was read before has been handed on.
    """
    call = Reading()
    spotlight = draw(models.spotlighting)
    intake = FindingsIntake(open_steps, passages, take, spotlight)
    known = {name: as_found(found) for name, found in open_steps.known.items()}
    with call.recorded(log, models.model, "findings"):
        messages = models.prompts["findings_prompt"].format_messages(
            llm=models.model.llm,
            max_answers=str(MAX_BRANCHES),
            context_str=passages.as_prompt(spotlight),
            query_str=as_data(question),
            steps=as_data(_one_a_line(open_steps.steps)),
            later_steps=as_data(_one_a_line(open_steps.later)),
            found=as_data(_one_a_line(known)),
        )
        reply = await models.model.read(messages, intake.read, deadline=deadline, max_chars=MAX_REPLY)
        call.usage = reply.usage
        call.in_full = intake.in_full
        if not intake.is_complete:
            repair = partial(lines_in, reply.text)
            await intake.finish(await Call(sync=repair, deadline=deadline, what="reading what was found"))
    return call


def as_found(findings: Iterable[Finding], refs: Mapping[str, int] = MappingProxyType({})) -> str:
    """Return findings as a prompt has them: "James Cameron (stated, ref_id 3)"; ``refs`` by the passage's id."""
    shown = []
    for one in findings:
        ref = refs.get(one.node_id or "")
        shown.append(f"{one.value} ({one.confidence}" + (")" if ref is None else f", ref_id {ref})"))
    return "; ".join(shown)


def _one_a_line(steps: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {' '.join(text.split())}" for name, text in steps.items())


class FindingsIntake:
    """Takes the lines of a reply as they are written."""

    def __init__(self, open_steps: OpenSteps, passages: PassageSet, take: Take, spotlight: Spotlight) -> None:
        self._asked = open_steps.steps.keys()
        self._steps = {*open_steps.steps, *open_steps.later, *open_steps.known}
        self._passages = passages.passages
        self._hand_on = take
        self._unmarked = spotlight.unmarked
        self._position = 0
        self._taken: set[str] = set()
        self.in_full: set[str] = set()
        """The ids of passages that the model asked to read in full."""

    @property
    def is_complete(self) -> bool:
        """Whether there was a line for every step."""
        return self._taken >= self._asked

    async def read(self, delta: str, text: str) -> None:
        """Parse the reply where an object may have ended; a broken one does not hide others."""
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
        """Take what was no plain line: a reply of another form, repaired where it is broken."""
        before = set(self._taken)
        for line in lines:
            if self._step_of(line) not in before:
                await self._take(line)

    def _step_of(self, line: dict[str, object]) -> str:
        step = str(line.get("step", line.get("id", ""))).strip().lstrip("#")
        return step if step in self._steps else f"q{step}"

    async def _take(self, line: dict[str, object]) -> None:
        step = self._step_of(line)
        if step not in self._steps:
            return
        self._taken.add(step)
        whole = line.get("whole")
        for ref in whole if isinstance(whole, list) else ():
            if (passage := self._passages.get(_number(ref))) is not None and CUT in passage.content:
                self.in_full.add(passage.node.node_id)
        answers = line.get("answers", line.get("answer", line.get("value")))
        distinct: dict[str, Finding] = {}
        for answer in answers if isinstance(answers, list) else [answers]:
            finding = self._finding(step, answer)
            if finding is not None:
                distinct.setdefault(finding.value.casefold(), finding)
        search = line.get("next")
        next_search = (
            one_line(plain_value(self._unmarked(search[:MAX_READ])), MAX_VALUE) if isinstance(search, str) else ""
        )
        found = list(distinct.values())[:MAX_BRANCHES]
        await self._hand_on(step, StepAnswer(found, "" if refers(next_search) else next_search))

    def _finding(self, step: str, answer: object) -> Finding | None:
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
        says = passage is not None and passage.says(text)
        confidence = Confidence.STATED if says and sure == "stated" else Confidence.IMPLIED
        if sure == "partial":
            confidence = Confidence.PARTIAL
        if passage is None:
            return Finding(sub_query_id=step, value=text, confidence=confidence)
        node_id, title = passage.node.node_id, passage.title
        return Finding(sub_query_id=step, value=text, confidence=confidence, node_id=node_id, title=title)


def _number(value: object) -> int:
    """Return a ref: a number, or one in a text or a list; -1 where there is none."""
    digits = re.search(r"\d{1,6}", str(value))
    return int(digits.group()) if digits else -1


def lines_in(text: str) -> list[dict[str, object]]:
    """Return the lines of a reply in whatever form: a list, an object of steps, broken JSON."""
    try:
        value = repair_json(strip_code_fence(text))
    except (ValueError, RecursionError):
        return []
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
    """What a look for gaps gave."""

    sufficient: bool | None = None
    """Whether nothing is missing, as the model judges; None where it could not say."""
    gaps: list[str] = field(default_factory=list)
    refs: list[int] = field(default_factory=list)
    """The passages that it rests on, in the order of the chain."""
    proposals: list[Proposal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Read a reply.

        Raises:
            PlanningError: There is no verdict in it.
        """
        body = strip_code_fence(text)
        start = body.find("{")
        value = repair_json(body[start:]) if start >= 0 else None
        if not isinstance(value, dict) or not {"sufficient", "sub_queries", "gaps"} & value.keys():
            raise PlanningError(f"the model's reply holds no verdict: {one_line(text[:400], 80)!r}")
        gaps, sufficient, proposed = value.get("gaps"), value.get("sufficient"), value.get("sub_queries")
        if isinstance(gaps, list):
            self.gaps = [one_line(strip_invisible(str(gap)), 200) for gap in gaps[:MAX_GAPS]]
        self.sufficient = sufficient if isinstance(sufficient, bool) else None
        refs = value.get("refs")
        self.refs = [_number(ref) for ref in refs[:MAX_PASSAGES]] if isinstance(refs, list) else []
        if self.sufficient or not isinstance(proposed, list):
            return
        proposals = read_proposals({"sub_queries": proposed})
        if any(proposal.filter for proposal in proposals):
            self.warnings.append("filters of the revision were left out: filters come only from the user's messages")
        for item in proposals:
            query = one_line(plain_value(item.query), MAX_VALUE)
            if query:
                self.proposals.append(replace(item, query=query, filter="", finds=""))


async def look_for_gaps(
    models: PlanningModel,
    question: str,
    searches: str,
    passages: PassageSet,
    sources: Sequence[PlannerSource],
    *,
    limit: int,
    deadline: float | None,
    log: ActivityLog,
) -> Verdict:
    """Ask once whether the evidence is sufficient; a failure is reported, never raised.

    ``searches`` is what was searched and found, one search a line; at most ``limit`` further ones may be proposed.
    """
    verdict = Verdict(fields={"sub_queries": []})
    spotlight = draw(models.spotlighting)
    with verdict.recorded(log, models.model, "revision"):
        messages = models.prompts["revision_prompt"].format_messages(
            llm=models.model.llm,
            max_sub_queries=str(limit),
            sources=as_data(describe_sources(sources)),
            context_str=passages.as_prompt(spotlight),
            searches=as_data(searches),
            query_str=as_data(question),
        )
        reply = await models.model.chat(messages, deadline=deadline)
        verdict.usage = reply.usage
        read = partial(verdict.read, spotlight.unmarked(reply.text))
        await Call(sync=read, deadline=deadline, what="reading the verdict")
        verdict.fields = {
            "sub_queries": [proposal.query for proposal in verdict.proposals],
            "warning": "; ".join([*verdict.gaps, *verdict.warnings]) or None,
        }
    return verdict
