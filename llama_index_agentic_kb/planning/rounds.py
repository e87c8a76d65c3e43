"""Searches a question: as it is, or as a model plans it, in rounds that build on one another.

    search_question ─▶ the question as it is (minimal effort; auto effort where its evidence is strong)
           └▶ MultiHopSearch: plan ─▶ search what builds on nothing ─▶ read answers ─▶ search what waited for them ─▶ …
                                   ─▶ look for gaps, search what is missing

The question itself is searched while the model plans, and a sub-query as soon as it stands in the plan. A step that
waits for an answer is searched as soon as that is read, and waits for nothing else. A failure of the model costs its
own call alone: what waits is searched in the question's own words.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product, zip_longest
from typing import Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call, deadline_after, earliest, start, wait
from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.account import ActivityLog, Budget
from llama_index_agentic_kb.errors import LLMError, PlanningError
from llama_index_agentic_kb.evidence.candidates import Fusion, Proof, best_of
from llama_index_agentic_kb.evidence.provenance import provenance
from llama_index_agentic_kb.llm import Usage
from llama_index_agentic_kb.planning.classification import classify, requested
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.findings import (
    MAX_BRANCHES,
    MAX_PASSAGES,
    PASSAGES_PER_QUERY,
    OpenSteps,
    PassageSet,
    Reading,
    StepAnswer,
    Verdict,
    as_found,
    look_for_gaps,
    read_findings,
)
from llama_index_agentic_kb.planning.plan_graph import (
    PlanGraph,
    PlannerSource,
    asked_for,
    fill,
    plain_plan,
)
from llama_index_agentic_kb.planning.planner import ModelCall, Planning, PlanningModel, plan_searches
from llama_index_agentic_kb.planning.scope import Scope, evidence_strength, is_simple
from llama_index_agentic_kb.schema import (
    Confidence,
    EffortUse,
    Finding,
    ModelQueryPlanningActivity,
    QueryPlan,
    ReasoningEffort,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.sources.fan_out import FanOut, RunningSearch, SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, node_key

_SURE: Final = {Confidence.PARTIAL: 1, Confidence.IMPLIED: 2, Confidence.STATED: 3}

MAX_SEARCHES: Final = 2 * MAX_BRANCHES
"""Searches of one step in all: its branches as its parents were read first, and once more as they were corrected. A
model that reads one step again and again would otherwise search without end."""

OTHERS_SECONDS: Final = 1.0
"""How long a round of reading waits for searches that none of its steps needs."""

NEWS_DEPTH: Final = 5
"""Documents of each search that are compared to see whether a round brought anything new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one request searches, and with what."""

    scope: Scope
    effort: ReasoningEffort
    limits: EffortLimits
    model: PlanningModel | None
    """Plans and reads; None where there is no model, and so no plan."""
    fusion: Fusion
    """How ranked lists of different corpora are fused for the model to read."""
    fan_out: FanOut
    budget: Budget
    log: ActivityLog


@dataclass(frozen=True, slots=True)
class FoundStep:
    """A step of the chain: what it asks, with what it builds on put in, and what was found."""

    id: str
    query: str
    findings: list[Finding]


@dataclass(slots=True)
class PlanOutcome:
    """What was searched, and what came of it."""

    plan: QueryPlan
    """Every query that was searched, in the order in which their evidence is fused."""
    searches: list[SourceSearch] = field(default_factory=list)
    """One a (query, source) pair, in the plan's order."""
    findings: list[Finding] = field(default_factory=list)
    """In the order in which they were read."""
    chain: list[FoundStep] = field(default_factory=list)
    """The steps with what was found for each, those that others build on first."""
    proof: list[Proof] = field(default_factory=list)
    """The passages behind the chain, and behind the verdict on it."""
    usage: Usage = field(default_factory=Usage)
    rounds: int = 1
    revisions: int = 0
    planned: bool = False
    decision: str = ""
    """Why a model planned or not, and why it stopped."""
    signals: dict[str, float] | None = None
    """How strong the question's own evidence was, where that decided."""

    def spent(self, budget: Budget, ranked: int) -> EffortUse:
        """Return what the search spent, in the terms of its limits; ``ranked`` documents were ranked."""
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
    """Return the chain as the prompt of the answer has it, a step a line, with the references of what proves it."""
    refs: dict[str, int] = {}
    for ref, node in enumerate(nodes):
        for part in (provenance(node) or {}).get("parts") or [{"node_id": node.node.node_id}]:
            refs.setdefault(part["node_id"], ref)
    return [f"- {step.query} -> {as_found(step.findings, refs)}" for step in chain if step.findings]


async def search_question(task: Task) -> PlanOutcome:
    """Search the question as it is, or what a model plans.

    A question that is to be classified is planned, however simple it is and however strong its evidence: the planner's
    call says its class. At minimal effort, with intents and without a model it stays unclassified.
    """
    scope, fan_out = task.scope, task.fan_out
    sources = [
        PlannerSource(name, chosen.source.description, chosen.always, chosen.source.filterable)
        for name, chosen in fan_out.selected.items()
    ]
    plain = plain_plan(scope, sources, task.limits)
    if task.model is None or task.effort is ReasoningEffort.MINIMAL or scope.intents:
        classify(plain, scope.classification, None)
        return PlanOutcome(plain, await fan_out.search(plain))
    loop = MultiHopSearch(task, task.model, sources)
    if task.effort is not ReasoningEffort.AUTO:
        return await loop.search(plain)
    if requested(scope.classification) is not None:
        return await loop.search(plain, why="planned: the question is to be classified")
    if is_simple(scope):
        return PlanOutcome(plain, await fan_out.search(plain), decision="not planned: a simple question")
    first = await fan_out.begin(plain)
    await wait([search.job for search in first])
    found = [search.job.result() for search in first]
    strength = evidence_strength(scope, found, task.fusion)
    if strength.sufficient:
        return PlanOutcome(plain, found, signals=strength.signals, decision=strength.reason)
    outcome = await loop.search(plain, first, why=strength.reason)
    outcome.signals = strength.signals
    return outcome


class Steps:
    """What was planned, what was searched for it, and what was found.

    A step is a planned sub-query. It is served by the search of its own query, by one search for each answer that was
    put into it, or by another step's search where both come to the same query.
    """

    def __init__(self) -> None:
        self.planned: dict[str, SubQuery] = {}
        self.waiting: dict[str, SubQuery] = {}
        """Steps that build on answers which are not known yet."""
        self.searched: dict[str, SubQuery] = {}
        """Every query whose search was started, by id; each with all the sources that it was started at."""
        self.found: dict[str, list[Finding]] = {}
        """By the id of the search that they were read for, or of the step that needed none."""
        self.finds: dict[str, str] = {}
        """What each step finds, with references; see ``PlanGraph.finds``."""
        self.next: dict[str, str] = {}
        """What to search next for a step whose findings are partial."""
        self._serves: dict[str, list[str]] = {}  # steps by search

    def note(self, sub_query: SubQuery, names: Sequence[str]) -> None:
        """Note that a search was started; ``names`` are all sources in order."""
        self._share(sub_query.id, sub_query.part_of or sub_query.id)
        known = self.searched.setdefault(sub_query.id, sub_query)
        chosen = {*known.sources, *sub_query.sources}
        known.sources = [name for name in names if name in chosen]

    def _share(self, search: str, step: str) -> None:
        steps = self._serves.setdefault(search, [])
        if step not in steps:
            steps.append(step)

    def searches_of(self, steps: Collection[str]) -> list[str]:
        """Return the searches that serve any of some steps."""
        return [search for search, served in self._serves.items() if any(step in served for step in steps)]

    def plan(self, sub_queries: Sequence[SubQuery], finds: Mapping[str, str]) -> None:
        """Take the steps of a plan, or of a revision."""
        self.finds |= finds
        for one in sub_queries:
            self.planned[one.id] = one
            if one.depends_on:
                self.waiting[one.id] = one

    def to_read(self, *, every: bool = False) -> list[str]:
        """Return the steps that were searched, have no answer yet, and are waited for; or every one that had none."""
        parents = {parent for child in self.waiting.values() for parent in child.depends_on} - self.waiting.keys()
        if every:
            parents |= {name for one in self.planned.values() for name in one.depends_on if self.searches_of([name])}
        return [step for step in self.planned if step in parents and not self.answers_of(step)]

    def started_children_of(self, search: str) -> list[SubQuery]:
        """Return the steps that build on what a search finds, and were searched already."""
        served = {*self._serves.get(search, [search])}
        children = [step for step in self.planned.values() if not served.isdisjoint(step.depends_on)]
        return [step for step in children if self.searches_of([step.id])]

    def answers_of(self, step: str, *, partial: bool = False) -> list[Finding]:
        """Return a step's answers: the best of each of its searches before the second of any.

        Those that are only nearer to what was asked are no answers, and are among them where ``partial`` ones are
        wanted too.
        """
        by_search = [self.found.get(search, []) for search in self.searches_of([step])] or [self.found.get(step, [])]
        distinct: dict[str, Finding] = {}
        for answer in (item for rank in zip_longest(*by_search) for item in rank if item is not None):
            if partial or answer.confidence is not Confidence.PARTIAL:
                distinct.setdefault(answer.value.casefold(), answer)
        return list(distinct.values())[:MAX_BRANCHES]

    def take(self, search: str, answers: Sequence[Finding]) -> list[Finding]:
        """Keep what was read for a search, in place of what was read for it before.

        What merely follows from passages does not replace what a passage says.

        Returns:
            The answers that it corrects, if any.
        """
        before = self.found.get(search, [])
        sure, sure_before = (max((_SURE[one.confidence] for one in read), default=0) for read in (answers, before))
        if not answers or (sure < sure_before and (sure_before == _SURE[Confidence.STATED] or sure == 1)):
            return []
        self.found[search] = list(answers)
        same = {answer.value.casefold() for answer in answers} & {answer.value.casefold() for answer in before}
        return [] if same or sure_before == 1 else before

    def searches_for(self, step: SubQuery, number: int, started: Sequence[SubQuery], query: str = "") -> list[SubQuery]:
        """Return one search for each combination of the answers that a step builds on, best first.

        A query that is searched already, or ``started`` in this round, is not searched again, and serves both steps.
        ``query`` is searched in place of the step's own.
        """
        known = {normalize(one.query): one for one in (*self.searched.values(), *started)}
        queries = {normalize(query): query for query in ([query] if query else self._queries(step))}
        alone = sum(form not in known for form in queries) == 1 and step.id not in self.searched
        branches = sum(one.part_of == step.id for one in self.searched.values())
        made: list[SubQuery] = []
        for form, text in queries.items():
            if form in known:
                same = known[form]
                self._share(same.id, step.id)
                if new := [name for name in step.sources if name not in same.sources]:
                    filters = {name: step.filters[name] for name in new if name in step.filters}
                    made.append(same.model_copy(update={"sources": new, "filters": filters, "wave": number}))
            elif branches + (step.id in self.searched) < MAX_SEARCHES:
                change: dict[str, object] = {"query": text, "wave": number}
                if not alone:
                    branches += 1
                    change |= {"id": f"{step.id}.{branches}", "part_of": step.id}
                made.append(step.model_copy(update=change))
        return made

    def _queries(self, step: SubQuery) -> Iterator[str]:
        """Yield the queries that a step becomes; what is not known is described, with all that is known put in."""
        template, choices = step.template or step.query, []
        for parent in step.depends_on:
            words = self.description_of(parent) if f"#{parent}" in template else ""
            choices.append([answer.value for answer in self.answers_of(parent)] or [words])
        for values in islice(product(*choices), MAX_BRANCHES):
            yield fill(template, dict(zip(step.depends_on, values, strict=True)))

    def description_of(self, name: str) -> str:
        """Return what a step finds in words that can be searched: with the values of its own parents, where known."""
        step, nearer = self.planned[name], self.answers_of(name, partial=True)
        words = {parent: self.words_for(parent) for parent in step.depends_on}
        text = self.next.get(name) or fill(self.finds.get(name, ""), words, add=False)
        if not text:
            text = fill(step.template, words, add=False) if step.template else step.finds or step.query
        return " ".join([asked_for(text), *(one.value for one in nearer[:1] if one.value not in text)])

    def words_for(self, name: str) -> str:
        """Return a step's best answer, or else its description."""
        answers = self.answers_of(name)
        return answers[0].value if answers else self.description_of(name)

    def chain(self) -> list[FoundStep]:
        """Return the steps with what was found for each, those that others build on first."""
        steps = sorted(self.planned.values(), key=lambda step: step.wave)
        made = []
        for step in steps:
            if step.origin is not SubQueryOrigin.QUESTION:
                words = {parent: self.words_for(parent) for parent in step.depends_on}
                query = fill(step.template, words) if step.template else step.query
                made.append(FoundStep(step.id, query, self.answers_of(step.id, partial=True)))
        return made


class MultiHopSearch:
    """The searches of one request that a model plans."""

    def __init__(self, task: Task, model: PlanningModel, sources: Sequence[PlannerSource]) -> None:
        self._task = task
        self._model = model
        self._sources = sources
        self._limits = task.limits
        self._deadline = task.budget.retrieval_deadline
        self._steps = Steps()
        self._running: list[RunningSearch] = []  # what was started, in the order in which it was planned
        self._in_full: set[str] = set()  # passages that the model asked to read whole
        self._rests_on: list[str] = []  # passages that a verdict rests on
        self._outcome = PlanOutcome(QueryPlan(sub_queries=[]), planned=True)
        self._model_lost = False
        """Whether the model did not answer at all. It is not asked again: each call would cost its whole time."""

    async def search(
        self, question: QueryPlan, first: Sequence[RunningSearch] | None = None, why: str = ""
    ) -> PlanOutcome:
        """Plan and search until everything is found, spent or settled.

        The question is searched while the model plans; ``first`` is its search, where that was started already.
        """
        self._decide(why)
        planning = start(
            plan_searches(
                self._model,
                self._task.scope,
                self._sources,
                self._limits,
                deadline=self._call_deadline,
                log=self._task.log,
                begin=self._search,
            )
        )
        await self._search(question.sub_queries, first)
        await wait([planning])
        self._take_plan(planning.result())
        await self._follow(1)
        while await self._revised():
            await self._follow(self._outcome.rounds + 1)
        await wait([search.job for search in self._running])
        return self._finished()

    # -- searching -------------------------------------------------------------------------------------------------

    async def _search(self, sub_queries: Sequence[SubQuery], running: Sequence[RunningSearch] | None = None) -> None:
        """Start to search, or note what was started already; what is ready together is embedded in one batch."""
        if not sub_queries:
            return
        copies = [one.model_copy() for one in sub_queries]  # what is noted here may get further sources
        names = [source.name for source in self._sources]
        for one in sub_queries:
            self._steps.note(one, names)
            self._outcome.rounds = max(self._outcome.rounds, one.wave)
        self._running += running or await self._task.fan_out.begin(QueryPlan(sub_queries=copies))

    async def _search_steps(self, steps: Sequence[SubQuery], number: int) -> None:
        """Search steps with what is known by now."""
        started: list[SubQuery] = []
        for step in steps:
            started += self._steps.searches_for(step, number, started)
        await self._search(started)

    async def _wait_for(self, ids: Collection[str]) -> None:
        """Wait for some searches as long as they are worth waiting for, see ``FanOut.wait_for``, then for the others.

        So what is read depends on what was searched, not on which search came first. The others, which no step waits
        for, get a moment; what is read without is reported.
        """
        await self._task.fan_out.wait_for([search for search in self._running if search.sub_query_id in ids])
        jobs = [search.job for search in self._running if not search.job.done]
        await wait(jobs, deadline=earliest(self._deadline, deadline_after(OTHERS_SECONDS)))
        for search in self._running:
            if not search.job.done:
                name = search.chosen.source.name
                self._warn(f"the model read without what {name} finds for {search.sub_query_id}: it was too slow")

    @property
    def _done(self) -> list[SourceSearch]:
        """What is there, in the order in which it was planned."""
        order = {name: position for position, name in enumerate(self._steps.searched)}
        searches = [search.job.result() for search in self._running if search.job.done]
        return sorted(searches, key=lambda search: order[search.sub_query.id])

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _take_plan(self, planning: Planning) -> None:
        self._count(planning)
        plan, planned = self._outcome.plan, planning.plan
        plan.warnings, plan.classifications, plan.labels = planned.warnings, planned.classifications, planned.labels
        self._steps.plan(planned.sub_queries, planning.finds)

    async def _follow(self, number: int) -> None:
        """Search the steps that build on nothing, and then the others, as the answers they build on are read.

        ``number`` is the first round. A revision's findings are read for every step that has no answer yet.
        """
        steps, revised = self._steps, self._outcome.revisions > 0
        new = [
            one
            for name, one in steps.planned.items()
            if name not in steps.waiting and not (steps.searches_of([name]) or steps.answers_of(name))
        ]
        await self._search_steps(new, number)
        await self._search_ready(number)
        last = self._limits.rounds + self._outcome.revisions
        while (steps.waiting or revised) and number < last and self._may_ask():
            to_read, revised = steps.to_read(every=revised), False
            if not (to_read or steps.waiting):
                break
            number += 1
            await self._wait_for(steps.searches_of(to_read))
            if number > 2 and self._brought_nothing_new(number - 1):  # noqa: PLR2004 (the first round is always news)
                break
            if not self._may_ask():
                break
            call = await self._read(to_read, number)
            self._count(call)
            self._in_full |= call.in_full
            if call.error is not None:
                self._warn(
                    "what the searches found could not be read; the rest is searched in the question's own words"
                )
                break
            await self._search_ready(number, read=[step for step in to_read if step not in steps.next])
        if steps.waiting:
            await self._search_rest(number)

    async def _read(self, to_read: Sequence[str], number: int) -> Reading:
        """Read what the steps found; their children's searches start as soon as answers are there."""
        steps = self._steps
        searches = steps.searches_of(to_read)

        async def take(name: str, read: StepAnswer) -> None:
            self._take(name, read.findings)
            await self._search_next(name, read, number)
            await self._search_ready(number)
            # with a further branch's answers, or corrected ones
            await self._search_steps(steps.started_children_of(name), number)

        return await read_findings(
            self._model,
            self._task.scope.question,
            OpenSteps(
                {name: steps.searched[name].query for name in searches},
                {one.id: one.template or one.query for one in steps.waiting.values()},
                {name: answers for name, answers in steps.found.items() if answers},
            ),
            await Call(sync=partial(self._passages, searches), what="choosing passages"),
            take,
            deadline=self._call_deadline,
            log=self._task.log,
        )

    def _take(self, name: str, answers: list[Finding]) -> None:
        """Keep a step's answers. A step that waits needs no search where a passage states its answer."""
        if name in self._steps.waiting:
            answers = [answer for answer in answers if answer.confidence is Confidence.STATED and answer.node_id]
            if answers:
                del self._steps.waiting[name]
                self._decide(f"{name} needed no search: a passage states its answer")
        if before := self._steps.take(name, answers):
            values = "; ".join(answer.value for answer in answers)
            self._warn(f"{name} was read again: {values}, not {'; '.join(answer.value for answer in before)}")

    async def _search_next(self, name: str, read: StepAnswer, number: int) -> None:
        """Search on for a step whose findings are only nearer to what it asks."""
        steps = self._steps
        served = [step for step in steps.planned if name in steps.searches_of([step])]
        for step in served:
            steps.next.pop(step, None)
            if read.search and not steps.answers_of(step) and number < self._limits.rounds:
                started = steps.searches_for(steps.planned[step], number, (), read.search)
                if started:
                    steps.next[step] = read.search
                await self._search(started)

    async def _search_ready(self, number: int, read: Collection[str] = ()) -> None:
        """Search the waiting steps whose parents all have answers, or were read without one.

        Where there is no answer, the step is searched in the question's own words, never with a blank.
        """
        steps, started = self._steps, list[SubQuery]()
        while ready := [
            one
            for one in steps.waiting.values()
            if all(parent in read or steps.answers_of(parent) for parent in one.depends_on)
        ]:
            for child in ready:  # one that shares another's search may have its answers at once: look again
                del steps.waiting[child.id]
                started += steps.searches_for(child, number, started)
                for parent in child.depends_on:
                    if not steps.answers_of(parent):
                        self._warn(f"{parent} found no answer; {child.id} was searched in the question's own words")
        await self._search(started)

    async def _search_rest(self, number: int) -> None:
        """Search what still waits with what is known by now, and else in the question's own words."""
        rest = [*self._steps.waiting.values()]
        if number >= self._limits.rounds:
            self._warn(
                f"{len(rest)} sub-queries lie deeper than the effort goes (EffortLimits.rounds is "
                f"{self._limits.rounds}); they were searched in the question's own words"
            )
        self._steps.waiting.clear()
        await self._search_steps(rest, min(number + 1, self._limits.rounds))

    # -- gaps ------------------------------------------------------------------------------------------------------

    async def _revised(self) -> bool:
        """Look for gaps in what was found, and take the plan of what is missing; return whether there is one."""
        outcome, steps = self._outcome, self._steps
        if outcome.revisions >= self._limits.revisions or not self._may_ask():
            return False
        await self._wait_for(steps.searched)
        last = outcome.rounds
        if (last > 1 and self._brought_nothing_new(last)) or not self._may_ask():
            return False
        outcome.revisions += 1
        verdict = await self._judge()
        self._count(verdict)
        if verdict.error is not None or verdict.sufficient:
            self._decide("the evidence is sufficient" if verdict.sufficient else "no verdict on the evidence")
            return False
        for warning in verdict.warnings:
            self._warn(warning)
        plan = QueryPlan(sub_queries=[one.model_copy(deep=True) for one in steps.searched.values()])
        known = {name: one for name, one in steps.planned.items() if one.origin is not SubQueryOrigin.QUESTION}
        graph = PlanGraph(
            plan, self._sources, self._limits, revision=outcome.revisions, steps=known, first_round=last + 1
        )
        # A known query at further sources is a search of its own: what was planned is not changed by what was read.
        change: dict[str, object] = {
            "filters": {},
            "depends_on": [],
            "part_of": None,
            "template": None,
            "origin": SubQueryOrigin.REVISION,
        }
        further = [
            one.model_copy(update={**change, "id": f"r{outcome.revisions}.again{place}", "wave": last + 1})
            for place, one in enumerate(graph.add(verdict.proposals), start=1)
            if one.id in steps.searched
        ]
        graph.finish()
        added = [one for one in graph.plan.sub_queries if one.id not in steps.searched]
        for warning in graph.plan.warnings:
            self._warn(warning)
        if not (added or further):
            self._decide("something is missing, and no search for it was left")
            return False
        self._decide(f"revised: {'; '.join(verdict.gaps) or 'something was missing'}")
        steps.plan(added, graph.finds)
        await self._search(further)
        return True

    async def _judge(self) -> Verdict:
        """Ask whether anything is missing, with what was searched and found, one search a line."""
        passages = await Call(sync=partial(self._passages, [*self._steps.searched][::-1]), what="choosing passages")
        verdict = await look_for_gaps(
            self._model,
            self._task.scope.question,
            "\n".join(self._account_of_searches(passages.refs())),
            passages,
            self._sources,
            limit=self._limits.sub_queries,
            deadline=self._call_deadline,
            log=self._task.log,
        )
        for ref in verdict.refs:
            if (passage := passages.passages.get(ref)) is not None:
                self._rests_on.append(passage.node.node_id)
        return verdict

    def _account_of_searches(self, refs: Mapping[str, int]) -> Iterator[str]:
        """Yield what was searched and found, a search a line, and the steps that needed none."""
        steps, nodes = self._steps, dict[str, int]()
        for search in self._done:
            nodes[search.sub_query.id] = nodes.get(search.sub_query.id, 0) + len(search.nodes)
        early = {name: one.query for name, one in steps.planned.items() if not steps.searches_of([name])}
        for name, query in ({name: one.query for name, one in steps.searched.items()} | early).items():
            found = as_found(steps.found.get(name, []), refs)
            nothing = "" if nodes.get(name) or name in early else "nothing was found"
            yield f"- {name}: {query}" + (f" -> {found or nothing}" if found or nothing else "")

    # -- what both read and decide by --------------------------------------------------------------------------------

    def _passages(self, first: Sequence[str]) -> PassageSet:
        """Return the passages that prove findings, in full, and the best of all searches, some queries' first."""
        proof = [one.node_id for one in self._proof()]
        share = min(max(1, MAX_PASSAGES // max(1, len(first))), PASSAGES_PER_QUERY)
        passages = PassageSet(share, {*proof, *self._in_full})
        by_query: dict[str, list[SourceSearch]] = {name: [] for name in first}
        for search in self._done:
            by_query.setdefault(search.sub_query.id, []).append(search)
        best = [(found[0].sub_query.query, best_of(found, self._task.fusion)) for found in by_query.values() if found]
        by_id = {one.node.node.node_id: (query, [one]) for query, found in reversed(best) for one in found}
        for query, found in [*(by_id[node_id] for node_id in proof if node_id in by_id), *best]:
            passages.add(query, found)
        return passages

    def _proof(self) -> list[Proof]:
        """Return the passages behind the findings, in the chain's order, and behind verdicts."""
        made: list[Proof] = []
        for step in self._steps.chain():
            made += [Proof(one.node_id, step.id, one.value) for one in step.findings if one.node_id is not None]
        return [*made, *(Proof(node_id, "verdict") for node_id in self._rests_on)]

    def _brought_nothing_new(self, number: int) -> bool:
        """Return whether a round is a reason to stop: auto effort ends where one brings no new document."""
        if self._task.effort is not ReasoningEffort.AUTO:
            return False
        before: set[NodeKey] = set()
        after: set[NodeKey] = set()
        for search in self._done:
            seen = before if search.sub_query.wave < number else after
            seen.update(node_key(node.node) for node in search.nodes[:NEWS_DEPTH])
        if after - before:
            return False
        self._decide(f"round {number} brought nothing new")
        return True

    @property
    def _call_deadline(self) -> float | None:
        """``time.monotonic()`` at which a call that is made now is given up."""
        return self._task.budget.retrieval_stage(self._limits.planning_seconds)

    def _count(self, call: ModelCall) -> None:
        """Add a call's bill, and note whether the model replied; what its client raised is an error's cause."""
        self._outcome.usage.add(call.usage)
        error = call.error
        has_replied = isinstance(error, PlanningError) or (isinstance(error, LLMError) and error.__cause__ is None)
        self._model_lost = self._model_lost or (error is not None and not has_replied)

    def _may_ask(self) -> bool:
        """Return whether the model may be called again; what is spent is a warning."""
        spent = (self._outcome.usage.input_tokens or 0) + (self._outcome.usage.output_tokens or 0)
        if self._model_lost:
            return False
        if spent >= self._limits.tokens:
            self._warn(f"{spent} tokens were spent before the search was done (EffortLimits.tokens)")
            return False
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._warn(
                "the time for searching was over before the plan was done (EffortLimits.seconds, or the request's)"
            )
            return False
        return True

    def _warn(self, text: str) -> None:
        if text not in self._outcome.plan.warnings:
            self._outcome.plan.warnings.append(text)

    def _decide(self, text: str) -> None:
        self._outcome.decision = "; ".join(part for part in (self._outcome.decision, text) if part)

    def _finished(self) -> PlanOutcome:
        """Return the outcome, and put into the plan's record what came out after that was closed."""
        outcome = self._outcome
        outcome.plan.sub_queries = list(self._steps.searched.values())
        outcome.findings = [finding for found in self._steps.found.values() for finding in found]
        outcome.searches, outcome.chain, outcome.proof = self._done, self._steps.chain(), self._proof()
        warning = "; ".join(outcome.plan.warnings) or None
        for record in self._task.log.records:
            if isinstance(record, ModelQueryPlanningActivity) and record.purpose == "plan":
                if record.warning != warning:
                    self._task.log.amend(record, warning=warning)
                break
        return outcome
