"""Model calls that read search results: one extracts the answers of the steps, one looks for missing evidence.

The prompts of both calls contain the best passages of each sub-query, numbered and shortened around its words.
Passages may be hostile, and so may the model's reply to them, so the reply is restricted. An answer (part of a later
query) or a proposed search is one short line of plain text: addresses, tags, markers, references to steps, JSON and
hidden characters are removed, and only allowed sources are searched. Filters come only from the user's messages.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Final, TypeAlias

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import excerpt, normalize, one_line, sentence_spans
from llama_index_agentic_kb._types import JsonObject, Work
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.evidence.candidates import Candidate, Fusion, best_of, provenance, shown_metadata
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight, draw
from llama_index_agentic_kb.guard.text import plain_value, strip_invisible
from llama_index_agentic_kb.llm import read_json
from llama_index_agentic_kb.planning.plan_graph import Proposal, proposals_in, refers
from llama_index_agentic_kb.planning.planner import ModelCall, PlanningModel, Task, describe_sources
from llama_index_agentic_kb.prompts import ON_SEARCHING, Passage, format_passages, with_instructions
from llama_index_agentic_kb.schema import Confidence, Finding
from llama_index_agentic_kb.sources.base import KnowledgeSource, SelectedSource
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, node_key

MAX_BRANCHES: Final = 3
"""Maximum number of answers used per step, and of searches made from one step (three directors, two candidates)."""
MAX_REPLY: Final = 20_000  # maximum number of characters of a reply that are parsed
MAX_VALUE: Final = 200
"""Maximum number of characters of an answer or a proposed search: a fact, but little of what one may exfiltrate."""
MAX_READ: Final = 2_000  # maximum number of characters of one raw answer from the model that are processed
MAX_GAPS: Final = 10

_STEP: Final = re.compile(r'\{\s*"step"')
_NOTHING: Final = ("none", "null", "unknown", "n/a", "not stated", "not found", "not mentioned")

MAX_PASSAGES: Final = 30  # in one prompt, whatever the number of sub-queries
PASSAGES_PER_QUERY: Final = 5  # the answer to a well-worded query is nearly always in the top five

# Words to which a passage is shortened, around the sub-query's words: usually (a paragraph); if it supports a finding;
# if the model asked for its full text, which may be a whole file. Up to WHOLE_WORDS it is not shortened at all.
PASSAGE_WORDS: Final = 110
PROOF_WORDS: Final = 400
ASKED_WORDS: Final = 2_000
WHOLE_WORDS: Final = 150

CUT: Final = "[...]"  # marker for omitted text in a passage
_HYPHEN: Final = re.compile(r"(?<=[^\W\d_])[-\u2010-\u2015](?=[^\W\d_])")  # a hyphen inside a word
_BREAK: Final = re.compile(
    r"\s+(?:[-\u2010-\u2015]\s+)?|(?<=\w)[-\u2010-\u2015](?=\w)|(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])"
)
"""A place in a name where texts write a space, a hyphen, both or nothing: "B-29", "B - 29", "B29"."""


# -- passages ------------------------------------------------------------------------------------------------------

Found: TypeAlias = tuple[Candidate, str]  # a result, with the query that found it


@dataclass(frozen=True, slots=True)
class ShownPassage:
    """A passage as shown to the model."""

    node: NodeWithScore
    source: KnowledgeSource
    title: str
    content: str
    metadata: str = ""

    def says(self, value: str) -> bool:
        """Return whether the passage or its title has all words of the value's name, the part before "(" or ","."""
        text = normalize(f"{self.title}\n{self.content}\n{self.source.source_data(self.node).content}")
        text += "\n" + _HYPHEN.sub("", text)
        form = normalize(value)
        name = form.split("(", maxsplit=1)[0].split(",", maxsplit=1)[0].strip() or form
        whole, *parts = (_pattern(one).search(text) is not None for one in (form, *name.split()))
        return whole or all(parts)


def _pattern(name: str) -> re.Pattern[str]:
    """Return a pattern of a name in other spellings; two of its numbers never run together ("2-1" is not "21")."""
    first, *rest = _BREAK.split(name)
    pattern = re.escape(first)
    for before, part in pairwise([first, *rest]):
        apart = "+" if before[-1:].isdigit() and part[:1].isdigit() else "*"
        pattern += rf"[\s\-\u2010-\u2015]{apart}{re.escape(part)}"
    return re.compile(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])")


@dataclass(slots=True)
class PassageSet:
    """The passages of one prompt, by their numbers, and how they are marked as data."""

    passages: dict[int, ShownPassage] = field(default_factory=dict)
    spotlight: Spotlight = PLAIN

    def as_prompt(self) -> str:
        """Return the passages as prompt text."""
        return format_passages(
            Passage(ref, one.title, one.content, one.source.name, spotlight=self.spotlight, metadata=one.metadata)
            for ref, one in self.passages.items()
        )

    def refs(self) -> dict[str, int]:
        """Return the number of each passage by node id."""
        return {passage.node.node_id: ref for ref, passage in self.passages.items()}

    def named(self, ref: object) -> ShownPassage | None:
        """Return the passage of a ref, which may be a number, a string or a list; None if it names none."""
        digits = re.search(r"\d{1,6}", str(ref))
        return self.passages.get(int(digits[0])) if digits else None


def passage_excerpt(text: str, query: str, words: int) -> str:
    """Return the sentences of a text that best match a query, in the text's order, with ``CUT`` for omitted text.

    The first is preferred, as it usually names the subject. A query word weighs more if fewer sentences contain it.
    """
    if len(text.split()) <= max(words, WHOLE_WORDS):
        return text
    sentences = [text[start:end] for start, end in sentence_spans(text)]
    scores = _scores(sentences, query)
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
    ends = {-1, *chosen}  # after these an omitted run begins
    return " ".join(chosen.get(at, CUT).strip() for at in range(len(sentences)) if at in chosen or at - 1 in ends)


def _scores(sentences: Sequence[str], query: str) -> list[float]:
    held = [{*re.findall(r"\w{3,}", normalize(sentence))} for sentence in sentences]
    counts = Counter(chain.from_iterable(held))
    wanted = dict.fromkeys(re.findall(r"\w{3,}", normalize(query)))
    return [sum(1 / counts[word] for word in wanted if word in own) for own in held]


def best_passages(
    searches: Sequence[SourceSearch],
    per_query: Mapping[str, int],
    fusion: Fusion,
    proof: Sequence[str] = (),
    in_full: Iterable[str] = (),
    known: Collection[str] = (),
    whole: int = 0,
) -> PassageSet:
    """Return the passages for a prompt: those of ``proof`` (node ids), then ``per_query`` of each search.

    A page whose title is a ``known`` value in the search's query comes before its others. Each is shortened around the
    words of its query: those of ``proof`` and the ``whole`` best of each search less than others, and those of
    ``in_full``, which the model asked for, least.
    """
    best = _best_by_query(searches, fusion, known)
    shown = [best[name][:count] for name, count in per_query.items() if name in best]
    supports = [*proof, *(one.node.node_id for found in shown for one, _ in found[:whole])]
    words = {**dict.fromkeys(supports, PROOF_WORDS), **dict.fromkeys(in_full, ASKED_WORDS)}
    by_id = {found[0].node.node_id: found for found in chain(*best.values(), *shown[::-1])}
    made: dict[NodeKey, ShownPassage] = {}
    proven = [by_id[node_id] for node_id in proof if node_id in by_id]
    for candidate, query in chain(proven, *shown):
        node, source = candidate.node, candidate.search.source
        key = node_key(node.node)
        if key not in made and len(made) < MAX_PASSAGES:
            data = source.source_data(node)
            content = passage_excerpt(data.content, query, words.get(node.node_id, PASSAGE_WORDS))
            metadata = shown_metadata(node, source.permissions, (data.title, data.content, data.url))
            made[key] = ShownPassage(node, source, data.title, content, metadata)
    return PassageSet(dict(enumerate(made.values())))


def _best_by_query(searches: Iterable[SourceSearch], fusion: Fusion, known: Collection[str]) -> dict[str, list[Found]]:
    """Return the ranked results of each sub-query by its id."""
    by_query, best = defaultdict[str, list[SourceSearch]](list), {}
    for search in searches:
        by_query[search.sub_query.id].append(search)
    for name, found in by_query.items():
        query = found[0].sub_query.query
        values, ranked = {value for value in known if value in normalize(query)}, best_of(found, fusion)
        if values:
            ranked.sort(key=lambda one: normalize(one.search.source.source_data(one.node).title) not in values)
        best[name] = [(one, query) for one in ranked]
    return best


# -- answers of steps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The answer to one step, as the model read it in the passages."""

    findings: list[Finding]  # findings, best first; empty if no answer was found
    search: str = ""  # the query to search next if the findings are only partial answers; else empty
    whole: Collection[str] = ()  # node ids of passages whose full text the model asked for


Answer: TypeAlias = dict[str, object]  # one answer in a reply
Take: TypeAlias = Callable[[str, StepAnswer], Work[None]]
"""Callback that is awaited with a step's id and its answer."""


async def read_findings(
    task: Task,
    models: PlanningModel,
    passages: PassageSet,
    take: Take,
    *,
    steps: Mapping[str, str],
    later: Mapping[str, str],
    known: Mapping[str, Iterable[Finding]],
) -> ModelCall:
    """Ask the model for the answers of steps; ``take`` gets each as soon as its line is complete.

    ``steps`` are searched queries by id. ``later`` are queries that wait for answers: those that the passages answer
    have a line too. ``known`` are findings of earlier calls, which the reply may correct.
    """
    call, deadline, refs = ModelCall(), task.call_deadline, passages.refs()
    passages.spotlight = draw(models.spotlighting)
    intake = FindingsIntake(steps, {*steps, *later, *known}, passages, take)
    with call.recorded(task.log, models, "findings"):
        messages = models.messages(
            "findings_prompt",
            passages.as_prompt(),
            max_answers=str(MAX_BRANCHES),
            query_str=task.scope.question,
            steps=_one_a_line(steps),
            later_steps=_one_a_line(later),
            found=_one_a_line({name: as_found(answers, refs) for name, answers in known.items()}),
        )
        reply = await models.read(messages, intake.read, deadline, MAX_REPLY)
        call.usage = reply.usage
        if not intake.is_complete:
            repair = partial(lines_in, reply.text)
            await intake.finish(await Call(sync=repair, deadline=deadline, what="reading what was found"))
    return call


def as_found(findings: Iterable[Finding], refs: Mapping[str, int]) -> str:
    """Return findings as prompt text. ``refs`` numbers the passages shown in the prompt; only these prove "stated"."""
    shown = []
    for one in findings:
        ref = refs.get(one.node_id or "")
        unseen = "its passage is not shown" if one.confidence is Confidence.STATED else one.confidence
        shown.append(f"{one.value} ({unseen if ref is None else f'{one.confidence}, ref_id {ref}'})")
    return "; ".join(shown)


@dataclass(frozen=True, slots=True)
class FoundStep:
    """A step of the reasoning chain: its query, with earlier answers filled in, and its findings."""

    id: str
    query: str
    findings: list[Finding]


def chain_lines(chain: Sequence[FoundStep], nodes: Sequence[NodeWithScore]) -> list[str]:
    """Return the chain's steps for the answer prompt, one per line, with findings and reference numbers."""
    refs: dict[str, int] = {}
    for ref, node in enumerate(nodes):
        for part in (provenance(node) or {}).get("parts") or [{"node_id": node.node.node_id}]:
            refs.setdefault(part["node_id"], ref)
    return [f"- {step.query} -> {as_found(step.findings, refs)}" for step in chain if step.findings]


def _one_a_line(steps: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {' '.join(text.split())}" for name, text in steps.items())


@dataclass(slots=True)
class FindingsIntake:
    """Parses a reply while it is streamed: a line for each step ``asked``, and for some others of ``steps``."""

    asked: Collection[str]
    steps: Collection[str]
    passages: PassageSet
    take: Take
    position: int = 0
    taken: set[str] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether the reply had a line for every searched step."""
        return self.taken.issuperset(self.asked)

    async def read(self, delta: str, text: str) -> None:
        """Parse the reply when a JSON object may have ended; a broken object is skipped."""
        position, decoder = self.position, json.JSONDecoder()
        while "}" in delta and (start := _STEP.search(text, position)) is not None:
            try:
                line, position = decoder.raw_decode(text, start.start())
            except (ValueError, RecursionError):
                position = start.end()
                continue
            self.position = position
            await self._take(line)

    async def finish(self, lines: Sequence[dict[str, object]]) -> None:
        """Take the repaired lines of the complete reply, for steps that had no valid line while it was streamed."""
        before = {*self.taken}
        for line in lines:
            await self._take(line, before)

    async def _take(self, line: dict[str, object], before: Collection[str] = ()) -> None:
        step = _step_of(line, self.steps)
        if step not in self.steps or step in before:
            return
        self.taken.add(step)
        wanted = map(self.passages.named, _listed(line.get("whole")))
        whole = {one.node.node_id for one in wanted if one is not None and CUT in one.content}
        answers = _answers_in(line)
        found = _findings_in(answers, step, self.passages)
        following = _next_in([*answers, line], self.passages.spotlight)
        await self.take(step, StepAnswer(found, following, whole))


def _next_in(parts: Iterable[Answer], spotlight: Spotlight) -> str:
    """Return the query to search next, which models write beside the answers as well as in one of them."""
    search = next((one["next"] for one in parts if one.get("next")), "")
    if not isinstance(search, str):
        return ""
    following = one_line(plain_value(spotlight.unmarked(search[:MAX_READ])), MAX_VALUE)
    return "" if refers(following) else following


def _step_of(line: Mapping[str, object], steps: Collection[str]) -> str:
    """Return the id of a line's step; it may be none of ``steps``."""
    step = str(line.get("step", line.get("id", ""))).strip().lstrip("#")
    return step if step in steps else f"q{step}"


def _answers_in(line: Answer) -> list[Answer]:
    """Return the answers of a line, which may be one answer itself."""
    answers = line.get("answers", line.get("answer", line.get("value")))
    if isinstance(answers, list):
        return [one if isinstance(one, dict) else {"value": one} for one in answers]
    return [answers if isinstance(answers, dict) else {**line, "value": answers}]


def _findings_in(answers: Iterable[Answer], step: str, passages: PassageSet) -> list[Finding]:
    """Return the valid ones of a step's answers, each once; "stated" only if the referenced passage says it."""
    distinct: dict[str, Finding] = {}
    for fields in answers:
        sure = str(fields.get("confidence") or "stated").strip().lower()
        text = _value_of(fields, passages.spotlight)
        if not text or sure == "none":
            continue
        passage = passages.named(fields.get("ref", fields.get("ref_id")))
        confidence = Confidence.PARTIAL if sure == "partial" else Confidence.IMPLIED
        if sure == "stated" and passage is not None and passage.says(text):
            confidence = Confidence.STATED
        node_id, title = (None, None) if passage is None else (passage.node.node_id, passage.title)
        made = Finding(sub_query_id=step, value=text, confidence=confidence, node_id=node_id, title=title)
        distinct.setdefault(text.casefold(), made)
    return list(distinct.values())


def _value_of(answer: Answer, spotlight: Spotlight) -> str:
    """Return the value of an answer as one line of plain text; "" if it has none."""
    value = answer.get("value", answer.get("answer"))
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        return ""
    written = spotlight.unmarked(str(value)[:MAX_READ])
    text = one_line(plain_value(written), MAX_VALUE)
    is_empty = re.search(r"\w", text) is None or text.casefold() in _NOTHING
    return "" if is_empty or refers(written) or refers(text) else text


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def lines_in(text: str) -> list[dict[str, object]]:
    """Return the lines of a reply in any form: a list, an object keyed by step, or broken JSON."""
    value = read_json(text, "{[")
    if isinstance(value, dict):
        listed = [item for item in value.values() if isinstance(item, list) and any(map(_is_line, item))]
        by_step = [{"step": name, "answers": item} for name, item in value.items()]
        value = [value] if _is_line(value) else listed[0] if listed else by_step
    return [item for item in _listed(value) if isinstance(item, dict)]


def _is_line(value: object) -> bool:
    return isinstance(value, dict) and ("step" in value or "id" in value)


# -- gaps ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Verdict(ModelCall):
    """The model's verdict on whether the evidence is sufficient."""

    sufficient: bool | None = None  # whether the model judged the evidence sufficient; None if it gave no judgement
    gaps: list[str] = field(default_factory=list)
    proof: list[str] = field(default_factory=list)
    """Node ids of the passages that support the verdict, in the order in which the facts lead to the answer."""
    values: dict[str, list[Finding]] = field(default_factory=dict)
    """Answers of open steps that the model read in the passages, by id."""
    proposals: list[Proposal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def report(self) -> JsonObject:
        """Return the proposed queries, and what is missing."""
        queries = [proposal.query for proposal in self.proposals]
        return {"sub_queries": queries, "warning": "; ".join([*self.gaps, *self.warnings]) or None}

    def read(self, text: str, steps: Collection[str], passages: PassageSet) -> None:
        """Parse a reply on the open ``steps`` into the fields; raise ``PlanningError`` if it contains no verdict."""
        value = read_json(passages.spotlight.unmarked(text))
        if not isinstance(value, dict) or not {"sufficient", "sub_queries", "gaps"} & value.keys():
            raise PlanningError(f"the model's reply holds no verdict: {one_line(text[:400], 80)!r}")
        self.gaps = [one_line(strip_invisible(str(gap)), 200) for gap in _listed(value.get("gaps"))[:MAX_GAPS]]
        sufficient = value.get("sufficient")
        self.sufficient = sufficient if isinstance(sufficient, bool) else None
        named = map(passages.named, _listed(value.get("refs"))[:MAX_PASSAGES])
        self.proof = [one.node.node_id for one in named if one is not None]
        self.values = _values_in(_listed(value.get("values"))[:MAX_PASSAGES], steps, passages)
        if not self.sufficient:
            self._propose(_listed(value.get("sub_queries")))

    def _propose(self, proposed: Sequence[object]) -> None:
        proposals = proposals_in(proposed, "r")  # "q1" is a step of the plan
        if any(proposal.filter for proposal in proposals):
            self.warnings.append("filters of the revision were left out: filters come only from the user's messages")
        for item in proposals:
            query, finds = (one_line(plain_value(text), MAX_VALUE) for text in (item.query, item.finds))
            if query:
                self.proposals.append(replace(item, query=query, filter="", finds=finds))


def _values_in(lines: Iterable[object], steps: Collection[str], passages: PassageSet) -> dict[str, list[Finding]]:
    """Return the answers of open steps that lines of a verdict have, by id."""
    answers = defaultdict[str, list[Answer]](list)
    for line in lines:
        if isinstance(line, dict):
            answers[_step_of(line, steps)] += _answers_in(line)
    found = {step: _findings_in(answers[step], step, passages)[:MAX_BRANCHES] for step in steps}
    return {step: findings for step, findings in found.items() if findings}


async def look_for_gaps(
    task: Task,
    models: PlanningModel,
    passages: PassageSet,
    searches: Mapping[str, str],
    open_steps: Collection[str],
    sources: Sequence[SelectedSource],
) -> Verdict:
    """Ask whether the evidence is sufficient, or for further searches; a failure is in the result.

    ``searches`` are queries with their findings, ``open_steps`` those of which the reply may state the answers, and
    ``sources`` those that may be searched.
    """
    verdict, deadline = Verdict(), task.call_deadline
    passages.spotlight = draw(models.spotlighting)
    with verdict.recorded(task.log, models, "revision"):
        messages = models.messages(
            "revision_prompt",
            passages.as_prompt(),
            max_sub_queries=str(task.limits.sub_queries),
            sources=describe_sources(sources),
            searches=_one_a_line(searches),
            query_str=task.scope.question,
        )
        if task.scope.retrieval_instructions:
            messages = with_instructions(messages, task.scope.retrieval_instructions, ON_SEARCHING)
        reply = await models.model.chat(messages, deadline=deadline)
        verdict.usage = reply.usage
        read = partial(verdict.read, reply.text, open_steps, passages)
        await Call(sync=read, deadline=deadline, what="reading the verdict")
    return verdict
