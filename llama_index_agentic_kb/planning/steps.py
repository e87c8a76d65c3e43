"""The steps of a multi-hop search: which wait, which were searched, what was found, and which source may get what.

A step is a sub-query of the plan or of a revision. ``planning.rounds`` searches the steps and reads their answers.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice, product, zip_longest
from typing import Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.account import ActivityLog, Budget
from llama_index_agentic_kb.evidence.candidates import Fusion, Proof, provenance
from llama_index_agentic_kb.llm import Usage
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.findings import MAX_BRANCHES, as_found
from llama_index_agentic_kb.planning.plan_graph import asked_for, fill
from llama_index_agentic_kb.planning.planner import PlanningModel
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.schema import (
    Confidence,
    EffortUse,
    Finding,
    MissingPart,
    QueryPlan,
    ReasoningEffort,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.sources.fan_out import FanOut, SourceSearch

_SURE: Final = {Confidence.PARTIAL: 1, Confidence.IMPLIED: 2, Confidence.STATED: 3}

MAX_SEARCHES: Final = 2 * MAX_BRANCHES
"""Maximum number of searches of one step: a model that keeps correcting answers would otherwise search endlessly."""


@dataclass(frozen=True, slots=True)
class FoundStep:
    """A step of the reasoning chain: its query, with earlier answers filled in, and its findings."""

    id: str
    query: str
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class Task:
    """The question, limits and components of one request's search."""

    scope: Scope
    effort: ReasoningEffort
    limits: EffortLimits
    model: PlanningModel | None
    """The model that plans and reads; without one (None), the question is searched unplanned."""
    fusion: Fusion  # fuses ranked lists of different corpora into the passages that the model reads
    fan_out: FanOut
    log: ActivityLog


@dataclass(slots=True)
class PlanOutcome:
    """The searches of a request, their findings and their costs."""

    plan: QueryPlan  # the plan of all searched queries, in the order in which their evidence is fused
    searches: list[SourceSearch] = field(default_factory=list)
    """Finished searches, one per (query, source) pair, in the plan's order."""
    findings: list[Finding] = field(default_factory=list)  # all findings, in the order in which they were read
    chain: list[FoundStep] = field(default_factory=list)
    """The steps with their findings; each step comes after those that it depends on."""
    sufficient: bool = False
    """Whether the proof was found to hold all that the question needs: by a verdict that names passages, or because
    every step has an answer with its passage."""
    proof: list[Proof] = field(default_factory=list)
    """The passages that support the chain's findings, and those that support the verdict on the evidence."""
    withheld: list[MissingPart] = field(default_factory=list)
    """The sources that did not get queries, because these were written after reading passages that they may not get."""
    usage: Usage = field(default_factory=Usage)
    rounds: int = 1
    revisions: int = 0
    planned: bool = False
    decision: str = ""  # explanation of why a model planned or not, and why the search stopped
    signals: dict[str, float] | None = None
    """Strength of the unplanned question's evidence (``EvidenceStrength.signals``); None if it was not rated."""

    def spent(self, budget: Budget, ranked: int) -> EffortUse:
        """Return the resources that the search used; ``ranked`` is the number of ranked documents."""
        queries = [one for one in self.plan.sub_queries if one.origin is not SubQueryOrigin.QUESTION]
        return EffortUse(
            sub_queries=len(queries),
            sources=max([0, *(len(one.sources) for one in queries)]),
            waves=self.rounds,
            revisions=self.revisions,
            tokens=(self.usage.input_tokens or 0) + (self.usage.output_tokens or 0),
            seconds=round(time.monotonic() - budget.started, 3),
            documents_ranked=ranked,
        )


def chain_lines(chain: Sequence[FoundStep], nodes: Sequence[NodeWithScore]) -> list[str]:
    """Return the chain's steps for the answer prompt, one per line, with findings and reference numbers."""
    refs: dict[str, int] = {}
    for ref, node in enumerate(nodes):
        for part in (provenance(node) or {}).get("parts") or [{"node_id": node.node.node_id}]:
            refs.setdefault(part["node_id"], ref)
    return [f"- {step.query} -> {as_found(step.findings, refs)}" for step in chain if step.findings]


class Steps:
    """The state of a multi-hop search: planned steps, their searches (shared where queries are equal) and findings."""

    def __init__(self, learns: Mapping[str, AbstractSet[str]]) -> None:
        self.planned: dict[str, SubQuery] = {}
        self.waiting: dict[str, SubQuery] = {}
        """Steps, by id, that depend on answers which are not known yet."""
        self.searched: dict[str, SubQuery] = {}
        """Every query whose search was started, by id, with all sources in which it is searched."""
        self.found: dict[str, list[Finding]] = {}
        """Findings by the id of their search, or by the id of a step that needed no search."""
        self.finds: dict[str, str] = {}
        """See ``PlanGraph.finds``."""
        self.next: set[str] = set()
        """Ids of steps whose findings are partial, and whose follow-up query was searched."""
        self.read: set[str] = set()
        """Names of the sources whose passages a model call was shown."""
        self.withheld: dict[str, dict[str, None]] = {}
        """Ids of steps, or of revisions, by the name of a source that did not get their queries."""
        self._learns = learns  # by source, the names of the sources whose passages its queries may be made of
        self._serves: dict[str, set[str]] = {}  # ids of steps by the id of the search that provides their results

    def note(self, sub_query: SubQuery, names: Sequence[str]) -> None:
        """Record that a search was started; ``names`` are the names of all sources, in order."""
        self._serves.setdefault(sub_query.id, set()).add(sub_query.part_of or sub_query.id)
        known = self.searched.setdefault(sub_query.id, sub_query)
        chosen = {*known.sources, *sub_query.sources}
        known.sources = [name for name in names if name in chosen]

    def searches_of(self, steps: Collection[str]) -> list[str]:
        """Return the ids of the searches that provide results for any of these steps."""
        return [search for search, served in self._serves.items() if not served.isdisjoint(steps)]

    def plan(self, sub_queries: Sequence[SubQuery], finds: Mapping[str, str]) -> None:
        """Add the steps of a plan or of a revision."""
        self.finds |= finds
        for one in sub_queries:
            self.planned[one.id] = one
            if one.depends_on:
                self.waiting[one.id] = one

    def to_read(self, *, every: bool = False) -> list[str]:
        """Return unanswered steps that others wait for, or with a follow-up query; ``every`` adds searched parents."""
        parents = {parent for child in self.waiting.values() for parent in child.depends_on} - self.waiting.keys()
        parents |= self.next
        if every:
            parents |= {name for one in self.planned.values() for name in one.depends_on if self.searches_of([name])}
        return [step for step in self.planned if step in parents and not self.answers_of(step)]

    def started_children_of(self, search: str) -> list[SubQuery]:
        """Return the already searched steps that depend on a search's findings."""
        served = self._serves.get(search, {search})
        children = [step for step in self.planned.values() if not served.isdisjoint(step.depends_on)]
        return [step for step in children if self.searches_of([step.id])]

    def answers_of(self, step: str, *, partial: bool = False) -> list[Finding]:
        """Return a step's answers, the best of each of its searches first; partial ones only if ``partial`` is True."""
        by_search = [self.found.get(search, []) for search in self.searches_of([step])]
        if not any(by_search):
            by_search = [self.found.get(step, [])]  # read before it was searched
        distinct: dict[str, Finding] = {}
        for answer in (item for rank in zip_longest(*by_search) for item in rank if item is not None):
            if partial or answer.confidence is not Confidence.PARTIAL:
                distinct.setdefault(answer.value.casefold(), answer)
        return list(distinct.values())[:MAX_BRANCHES]

    def take(self, search: str, answers: Sequence[Finding]) -> list[Finding]:
        """Store the answers of a search, unless earlier ones are surer; return the earlier answers they correct."""
        before = self.found.get(search, [])
        sure, sure_before = (max((_SURE[one.confidence] for one in read), default=0) for read in (answers, before))
        if not answers or (sure < sure_before and (sure_before == _SURE[Confidence.STATED] or sure == 1)):
            return []
        self.found[search] = list(answers)
        same = {answer.value.casefold() for answer in answers} & {answer.value.casefold() for answer in before}
        return [] if same or sure_before == 1 else before

    def may_get(self, names: Iterable[str]) -> list[str]:
        """Return the sources that may get a query which a model writes now, after what it has read."""
        return [name for name in names if self.read <= self._learns[name]]

    def withhold(self, step: str, names: Iterable[str]) -> None:
        """Record that these sources did not get a query of a step or of a revision."""
        for name in names:
            self.withheld.setdefault(name, {})[step] = None

    def _queries_and_sources(self, step: SubQuery, query: str) -> dict[str, tuple[str, list[str]]]:
        """Return each query of a step, by its normal form, with the sources that may get it.

        What the planner wrote may go to all, as it read no passages; a source gets it in place of what it may not get.
        """
        texts = {normalize(text): text for text in ([query] if query else self._queries(step))}
        own = None if step.origin is SubQueryOrigin.REVISION else normalize(step.query)
        allowed = self.may_get(step.sources)
        held = [name for name in step.sources if name not in allowed] if {*texts} != {own} else []
        self.withhold(step.id, held)
        made = {form: (text, step.sources if form == own else allowed) for form, text in texts.items()}
        if held and own is not None:
            made.setdefault(own, (step.query, held))
        return {form: one for form, one in made.items() if one[1]}

    def searches_for(self, step: SubQuery, number: int, started: Sequence[SubQuery], query: str = "") -> list[SubQuery]:
        """Return one search for each combination of the answers that a step depends on, best first.

        What was searched before, or ``started`` in this round, is shared. ``query`` replaces the step's own.
        """
        known = {normalize(one.query): one for one in (*self.searched.values(), *started)}
        queries = self._queries_and_sources(step, query)
        alone = sum(form not in known for form in queries) == 1 and step.id not in self.searched
        branches = sum(one.part_of == step.id for one in self.searched.values())
        made: list[SubQuery] = []
        for form, (text, sources) in queries.items():
            if form in known:
                same = known[form]
                self._serves.setdefault(same.id, set()).add(step.id)
                if new := [name for name in sources if name not in same.sources]:
                    filters = {name: step.filters[name] for name in new if name in step.filters}
                    made.append(same.model_copy(update={"sources": new, "filters": filters, "wave": number}))
            elif branches + (step.id in self.searched) < MAX_SEARCHES:
                change: dict[str, object] = {"query": text, "sources": sources, "wave": number}
                if not alone:
                    branches += 1
                    change |= {"id": f"{step.id}.{branches}", "part_of": step.id}
                made.append(step.model_copy(update=change))
        return made

    def _queries(self, step: SubQuery) -> Iterator[str]:
        """Yield a step's queries, one per combination of its parents' answers; missing answers are described."""
        template, choices = step.template or step.query, []
        named = {parent for parent in step.depends_on if f"#{parent}" in template}
        for parent in step.depends_on:
            words = self.description_of(parent, named) if parent in named else ""
            choices.append([answer.value for answer in self.answers_of(parent)] or [words])
        for values in islice(product(*choices), MAX_BRANCHES):
            yield fill(template, dict(zip(step.depends_on, values, strict=True)))

    def description_of(self, name: str, named: Collection[str] = ()) -> str:
        """Return a step's partial answer, or its description with known answers filled in, but those ``named``."""
        step, nearer = self.planned[name], self.answers_of(name, partial=True)
        if nearer:
            return nearer[0].value
        text = self.finds.get(name) or step.template or step.finds or step.query
        parents = [one for one in step.depends_on if f"#{one}" in text or (one not in named and self.answers_of(one))]
        return asked_for(fill(text, {parent: self.words_for(parent) for parent in parents}))

    def words_for(self, name: str) -> str:
        """Return a step's answers, or a description of them if none is known."""
        return " or ".join(answer.value for answer in self.answers_of(name)) or self.description_of(name)

    def is_answered(self, search: str, least: Confidence = Confidence.IMPLIED) -> bool:
        """Return whether a search, or a step that needed none, has answers, all with a passage and at least so sure."""
        found = self.found.get(search, [])
        return bool(found) and all(one.node_id and _SURE[one.confidence] >= _SURE[least] for one in found)

    @property
    def are_answered(self) -> bool:
        """Whether each step has an answer with its passage, at least implied, and each of its searches has findings."""
        made = [self.searches_of([step.id]) or [step.id] for step in self.chain()]
        return bool(made) and all(any(map(self.is_answered, one)) and all(map(self.found.get, one)) for one in made)

    @property
    def open(self) -> list[str]:
        """The ids of steps and searches, but those of the question itself, that are not answered."""
        every = {**self.planned, **self.searched}
        asked = [name for name, one in every.items() if one.origin is not SubQueryOrigin.QUESTION]
        return [name for name in asked if not self.is_answered(name)]

    def chain(self) -> list[FoundStep]:
        """Return the steps with their findings; each step comes after those that it depends on."""
        made = []
        for step in sorted(self.planned.values(), key=lambda step: step.wave):
            if step.origin is not SubQueryOrigin.QUESTION:
                words = {parent: self.words_for(parent) for parent in step.depends_on}
                query = fill(step.template, words) if step.template else step.query
                made.append(FoundStep(step.id, query, self.answers_of(step.id, partial=True)))
        return made
