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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product, zip_longest
from typing import Final

from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call, start, wait
from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.account import ActivityLog, Budget
from llama_index_agentic_kb.errors import LLMError, PlanningError
from llama_index_agentic_kb.evidence.candidates import Fusion, best_of
from llama_index_agentic_kb.llm import Usage
from llama_index_agentic_kb.planning.classification import classify, requested
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.findings import (
    MAX_BRANCHES,
    MAX_PASSAGES,
    PASSAGES_PER_QUERY,
    OpenSteps,
    PassageSet,
    Verdict,
    look_for_gaps,
    read_findings,
)
from llama_index_agentic_kb.planning.plan_graph import (
    PlanGraph,
    PlannerSource,
    Proposal,
    description_of,
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
    Outcome,
    QueryPlan,
    ReasoningEffort,
    SearchLane,
    SourceActivity,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.sources.fan_out import FanOut, RunningSearch, SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, NodeList, node_key

MAX_SEARCHES: Final = 2 * MAX_BRANCHES
"""Searches of one step in all: its branches as its parents were read first, and once more as they were corrected. A
model that reads one step again and again would otherwise search without end."""

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


@dataclass(slots=True)
class PlanOutcome:
    """What was searched, and what came of it."""

    plan: QueryPlan
    """Every query that was searched, in the order in which their evidence is fused."""
    searches: list[SourceSearch] = field(default_factory=list)
    """One a (query, source) pair, in the plan's order."""
    findings: list[Finding] = field(default_factory=list)
    """In the order in which they were read."""
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

    def to_read(self) -> list[str]:
        """Return the steps that were searched, have no answer yet, and are waited for."""
        parents = {parent for child in self.waiting.values() for parent in child.depends_on} - self.waiting.keys()
        return [step for step in self.planned if step in parents and not self.answers_of(step)]

    def started_children_of(self, search: str) -> list[SubQuery]:
        """Return the steps that build on what a search finds, and were searched already."""
        served = {*self._serves.get(search, [search])}
        children = [step for step in self.planned.values() if not served.isdisjoint(step.depends_on)]
        return [step for step in children if self.searches_of([step.id])]

    def answers_of(self, step: str) -> list[Finding]:
        """Return a step's answers: the best of each of its searches before the second of any."""
        by_search = [self.found.get(search, []) for search in self.searches_of([step])] or [self.found.get(step, [])]
        distinct: dict[str, Finding] = {}
        for answer in (item for rank in zip_longest(*by_search) for item in rank if item is not None):
            distinct.setdefault(answer.value.casefold(), answer)
        return list(distinct.values())[:MAX_BRANCHES]

    def take(self, search: str, answers: Sequence[Finding]) -> list[Finding]:
        """Keep what was read for a search, in place of what was read for it before.

        What merely follows from passages does not replace what a passage says.

        Returns:
            The answers that it corrects, if any.
        """
        before = self.found.get(search, [])
        stated, stated_before = (
            any(answer.confidence is Confidence.STATED for answer in read) for read in (answers, before)
        )
        if not answers or (stated_before and not stated):
            return []
        self.found[search] = list(answers)
        same = {answer.value.casefold() for answer in answers} & {answer.value.casefold() for answer in before}
        return [] if same else before

    def searches_for(self, step: SubQuery, number: int, started: Sequence[SubQuery]) -> list[SubQuery]:
        """Return one search for each combination of the answers that a step builds on, best first.

        A query that is searched already, or ``started`` in this round, is not searched again, and serves both steps.
        """
        known = {normalize(one.query): one for one in (*self.searched.values(), *started)}
        queries = {normalize(query): query for query in self._queries(step)}
        alone = sum(form not in known for form in queries) == 1 and step.id not in self.searched
        branches = sum(one.part_of == step.id for one in self.searched.values())
        made: list[SubQuery] = []
        for form, query in queries.items():
            if form in known:
                same = known[form]
                self._share(same.id, step.id)
                if new := [name for name in step.sources if name not in same.sources]:
                    filters = {name: step.filters[name] for name in new if name in step.filters}
                    made.append(same.model_copy(update={"sources": new, "filters": filters, "wave": number}))
            elif branches + (step.id in self.searched) < MAX_SEARCHES:
                change: dict[str, object] = {"query": query, "wave": number}
                if not alone:
                    branches += 1
                    change |= {"id": f"{step.id}.{branches}", "part_of": step.id}
                made.append(step.model_copy(update=change))
        return made

    def _queries(self, step: SubQuery) -> Iterator[str]:
        """Yield the queries that a step becomes; what is not known is described in the question's own words."""
        template, choices = step.template or step.query, []
        for parent in step.depends_on:
            words = description_of(self.planned[parent]) if f"#{parent}" in template else ""
            choices.append([answer.value for answer in self.answers_of(parent)] or [words])
        for values in islice(product(*choices), MAX_BRANCHES):
            yield fill(template, dict(zip(step.depends_on, values, strict=True)))


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
        self._early: list[SourceSearch] = []  # of steps that needed no search
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
        await self._follow()
        await self._revise()
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
        """Wait for some searches as long as they are worth waiting for, see ``FanOut.wait_for``."""
        await self._task.fan_out.wait_for([search for search in self._running if search.sub_query_id in ids])

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
        for one in planned.sub_queries:
            self._steps.planned[one.id] = one
            if one.depends_on:
                self._steps.waiting[one.id] = one

    async def _follow(self) -> None:
        """Search the steps that build on nothing, and then the others, as the answers they build on are read."""
        steps, number = self._steps, 1
        await self._search_steps(
            [one for name, one in steps.planned.items() if name not in steps.searched and name not in steps.waiting], 1
        )
        while steps.waiting and number < self._limits.rounds and self._may_ask():
            number += 1
            to_read = steps.to_read()
            await self._wait_for(steps.searches_of(to_read))
            if number > 2 and self._brought_nothing_new(number - 1):  # noqa: PLR2004 (the first round is always news)
                break
            if not self._may_ask():
                break
            call = await self._read(to_read, number)
            self._count(call)
            if call.error is not None:
                self._warn(
                    "what the searches found could not be read; the rest is searched in the question's own words"
                )
                break
            await self._search_ready(number, read=to_read)
        if steps.waiting:
            await self._search_rest(number)

    async def _read(self, to_read: Sequence[str], number: int) -> ModelCall:
        """Read what the steps found; their children's searches start as soon as answers are there."""
        steps = self._steps
        searches = steps.searches_of(to_read)

        async def take(name: str, answers: list[Finding]) -> None:
            self._take(name, answers)
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
                step = self._steps.waiting.pop(name)
                self._early += _searches_of_answers(step, answers, self._done, self._task.log)
        if before := self._steps.take(name, answers):
            values = "; ".join(answer.value for answer in answers)
            self._warn(f"{name} was read again: {values}, not {'; '.join(answer.value for answer in before)}")

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

    async def _revise(self) -> None:
        """Look for gaps in what was found, and search what is missing."""
        outcome, steps = self._outcome, self._steps
        while outcome.revisions < self._limits.revisions and self._may_ask():
            await self._wait_for(steps.searched)
            last = outcome.rounds
            if (last > 1 and self._brought_nothing_new(last)) or not self._may_ask():
                return
            outcome.revisions += 1
            verdict = await self._judge()
            self._count(verdict)
            if verdict.error is not None or verdict.sufficient:
                self._decide("the evidence is sufficient" if verdict.sufficient else "no verdict on the evidence")
                return
            for warning in verdict.warnings:
                self._warn(warning)
            added = self._added(verdict.proposals, last + 1)
            if not added:
                self._decide("something is missing, and no search for it was left")
                return
            self._decide(f"revised: {'; '.join(verdict.gaps) or 'something was missing'}")
            await self._search(added)

    async def _judge(self) -> Verdict:
        """Ask whether anything is missing, with what was searched and found, one search a line."""
        lines = []
        for one in self._steps.searched.values():
            values = "; ".join(answer.value for answer in self._steps.found.get(one.id, []))
            lines.append(f"- {one.query} -> {values}" if values else f"- {one.query}")
        return await look_for_gaps(
            self._model,
            self._task.scope.question,
            "\n".join(lines),
            await Call(sync=partial(self._passages, [*self._steps.searched][::-1]), what="choosing passages"),
            self._sources,
            limit=self._limits.sub_queries,
            deadline=self._call_deadline,
            log=self._task.log,
        )

    def _added(self, proposals: Sequence[Proposal], number: int) -> list[SubQuery]:
        """Return the searches of a revision that are new, or go to further sources; the plan itself is not changed."""
        prefix, searched = f"r{self._outcome.revisions}.", self._steps.searched
        known = QueryPlan(sub_queries=[one.model_copy(deep=True) for one in searched.values()])
        graph = PlanGraph(known, self._sources, self._limits, prefix=prefix)
        added = []
        for position, one in enumerate(graph.add(proposals), start=1):
            change: dict[str, object] = {"wave": number, "origin": SubQueryOrigin.REVISION}
            if one.id in searched:
                change |= {"id": f"{prefix}again{position}", "filters": {}, "depends_on": []}
                change |= {"part_of": None, "template": None}
            added.append(one.model_copy(update=change))
        return added

    # -- what both read and decide by --------------------------------------------------------------------------------

    def _passages(self, first: Sequence[str]) -> PassageSet:
        """Return the best passages of all searches, those of some queries first."""
        passages = PassageSet(min(max(1, MAX_PASSAGES // max(1, len(first))), PASSAGES_PER_QUERY))
        by_query: dict[str, list[SourceSearch]] = {name: [] for name in first}
        for search in self._done:
            by_query.setdefault(search.sub_query.id, []).append(search)
        for searches in filter(None, by_query.values()):
            passages.add(searches[0].sub_query.query, best_of(searches, self._task.fusion))
        return passages

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
        """Return the outcome, and put into the plan's record what came out after that was closed.

        The passages that state what steps found count once more in their own searches; without their scores, which may
        be of any list.
        """
        outcome, searches = self._outcome, self._done
        outcome.plan.sub_queries = list(self._steps.searched.values())
        outcome.findings = [finding for found in self._steps.found.values() for finding in found]
        stated = {(one.sub_query_id, one.node_id) for one in outcome.findings if one.confidence is Confidence.STATED}
        for search in searches:
            nodes = [NodeWithScore(node=n.node) for n in search.nodes if (search.sub_query.id, n.node_id) in stated]
            if nodes:
                search.lists = (*search.lists, NodeList("finding", nodes))
        outcome.searches = [*searches, *self._early]
        warning = "; ".join(outcome.plan.warnings) or None
        for record in self._task.log.records:
            if isinstance(record, ModelQueryPlanningActivity) and record.purpose == "plan":
                if record.warning != warning:
                    self._task.log.amend(record, warning=warning)
                break
        return outcome


def _searches_of_answers(
    step: SubQuery, answers: Sequence[Finding], searches: Sequence[SourceSearch], log: ActivityLog
) -> Iterator[SourceSearch]:
    """Yield the passages that answer a step without a search, so that they have a place in the evidence."""
    node_ids = {answer.node_id for answer in answers}
    for search in searches:
        nodes = [node for node in search.nodes if node.node_id in node_ids]
        if not nodes:
            continue
        node_ids -= {node.node_id for node in nodes}
        name, count = search.source.name, len(nodes)
        question = SubQuestionAnswerPair(sub_q=SubQuestion(sub_question=step.query, tool_name=name))
        with log.record(
            SourceActivity,
            CBEventType.SUB_QUESTION,
            {EventPayload.SUB_QUESTION: question},
            type=search.source.kind,
            knowledge_source_name=name,
            sub_query_id=step.id,
        ) as record:
            note = f"not searched: answered by what {search.sub_query.id} found"
            lane = SearchLane(kind="earlier", count=count, candidates=count, note=note)
            log.close(record, outcome=Outcome.OK, count=count, candidates=count, lanes=[lane])
        yield SourceSearch(step, search.source, record, (NodeList("earlier", nodes),))
