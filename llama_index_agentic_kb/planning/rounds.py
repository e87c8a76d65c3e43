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
from typing import Final

from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call, earliest, start, wait
from llama_index_agentic_kb.account import ActivityLog, Budget
from llama_index_agentic_kb.evidence.candidates import Fusion
from llama_index_agentic_kb.guard.spotlighting import Spotlighting
from llama_index_agentic_kb.llm import LanguageModel, Usage
from llama_index_agentic_kb.planning.classification import classify, requested
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.findings import (
    MAX_PASSAGES,
    PASSAGES_PER_QUERY,
    FindingsReader,
    OpenSteps,
    PassageSet,
    best_of,
)
from llama_index_agentic_kb.planning.model_calls import Allowance, ModelCall
from llama_index_agentic_kb.planning.parsing import Proposal
from llama_index_agentic_kb.planning.plan_graph import PlanGraph, PlannerSource, plain_plan
from llama_index_agentic_kb.planning.planner import Planner, Planning
from llama_index_agentic_kb.planning.revision import Reviser, Revision
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.planning.signals import evidence_strength, is_simple
from llama_index_agentic_kb.planning.steps import MAX_BRANCHES, Steps
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
from llama_index_agentic_kb.sources.base import NodeKey, NodeList, node_key
from llama_index_agentic_kb.sources.fan_out import Batch, FanOut, SourceSearch
from llama_index_agentic_kb.sources.stragglers import RunningSearch

__all__ = ["MultiHopSearch", "PlanOutcome", "PlanningModels", "Task", "search_question"]

NEWS_DEPTH: Final = 5
"""Documents of each search that are compared to see whether a round brought anything new."""


class PlanningModels:
    """What asks the language model: one object a kind of call.

    Args:
        model: The language model.
        spotlighting: How passages are marked as data.
    """

    def __init__(self, model: LanguageModel, spotlighting: Spotlighting | None) -> None:
        self.planner = Planner(model)
        self.findings = FindingsReader(model, spotlighting=spotlighting)
        self.reviser = Reviser(model, spotlighting=spotlighting)
        self._by_prompt: dict[str, Planner | FindingsReader | Reviser] = {
            "planner_prompt": self.planner,
            "findings_prompt": self.findings,
            "revision_prompt": self.reviser,
        }

    @property
    def prompts(self) -> dict[str, BasePromptTemplate]:
        """Their templates, by the names under which LlamaIndex's ``update_prompts`` changes them."""
        return {name: asker.template for name, asker in self._by_prompt.items()}

    def update(self, prompts: Mapping[str, BasePromptTemplate]) -> None:
        """Take other templates; those of other names are left alone."""
        for name in prompts.keys() & self._by_prompt.keys():
            self._by_prompt[name].template = prompts[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one request searches, and with what.

    Args:
        scope: The question.
        effort: How hard to think.
        limits: The effort's limits.
        models: What asks the language model; None where there is no model, and so no plan.
        fusion: How ranked lists of different corpora are fused for the model to read.
        fan_out: Searches the selected sources.
        budget: The request's.
        log: The request's account.
    """

    scope: Scope
    effort: ReasoningEffort
    limits: EffortLimits
    models: PlanningModels | None
    fusion: Fusion
    fan_out: FanOut
    budget: Budget
    log: ActivityLog


@dataclass(slots=True)
class PlanOutcome:
    """What was searched, and what came of it.

    Args:
        plan: Every query that was searched, in the order in which their evidence is fused.
        searches: One search a (query, source) pair, in the plan's order.
        findings: What steps found, in the order in which it was read.
        usage: Tokens and calls of the language model.
        rounds: Rounds of searches.
        revisions: How often gaps were looked for.
        planned: Whether a model planned.
        decision: Why it planned or not, and why it stopped.
        signals: How strong the question's own evidence was, where that decided.
    """

    plan: QueryPlan
    searches: list[SourceSearch] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    rounds: int = 1
    revisions: int = 0
    planned: bool = False
    decision: str = ""
    signals: dict[str, float] | None = None

    def spent(self, budget: Budget, ranked: int) -> EffortUse:
        """Return what the search spent, in the terms of its limits.

        Args:
            budget: The request's; its clock has the time.
            ranked: Documents that were ranked.
        """
        queries = [one for one in self.plan.sub_queries if one.origin is not SubQueryOrigin.QUESTION]
        return EffortUse(
            sub_queries=len(queries),
            sources=max((len(one.sources) for one in queries), default=0),
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
    if task.models is None or task.effort is ReasoningEffort.MINIMAL or scope.intents:
        classify(plain, scope.classification, None)
        return PlanOutcome(plain, await fan_out.search(plain))
    loop = MultiHopSearch(task, task.models, sources)
    if task.effort is not ReasoningEffort.AUTO:
        return await loop.search(plain)
    if requested(scope.classification) is not None:
        return _because("planned: the question is to be classified", await loop.search(plain))
    if is_simple(scope):
        return PlanOutcome(plain, await fan_out.search(plain), decision="not planned: a simple question")
    first = await fan_out.begin(plain)
    await wait([first.whole])
    strength = evidence_strength(scope, first.done, task.fusion)
    if strength.sufficient:
        return PlanOutcome(plain, first.done, signals=strength.signals, decision=strength.reason)
    outcome = await loop.search(plain, first)
    outcome.signals = strength.signals
    return _because(strength.reason, outcome)


def _because(reason: str, outcome: PlanOutcome) -> PlanOutcome:
    """Add why a search was planned, before why it stopped."""
    outcome.decision = "; ".join(part for part in (reason, outcome.decision) if part)
    return outcome


class MultiHopSearch:
    """The searches of one request that a model plans.

    Args:
        task: What is searched.
        models: What asks the language model.
        sources: The sources, as the planner sees them.
    """

    def __init__(self, task: Task, models: PlanningModels, sources: Sequence[PlannerSource]) -> None:
        self._task = task
        self._models = models
        self._sources = sources
        self._limits = task.limits
        self._stops_early = task.effort is ReasoningEffort.AUTO  # after a round that brings nothing new
        self._searches = RunningSearches(task.fan_out, [one.name for one in sources], task.budget.retrieval_deadline)
        self._steps = Steps(self._searches.sub_queries)
        self._waiting: dict[str, SubQuery] = {}
        self._early: list[SourceSearch] = []  # of steps that needed no search
        self._outcome = PlanOutcome(QueryPlan(sub_queries=[]), planned=True)
        self._allowance = Allowance(task.limits, task.budget, self._outcome.usage)

    async def search(self, question: QueryPlan, first: Batch | None = None) -> PlanOutcome:
        """Plan and search until everything is found, spent or settled.

        Args:
            question: The plan without a model; it is searched while the model plans.
            first: Its search, where that was started already.
        """
        planning = start(self._plan())
        await self._search(question.sub_queries, first)
        await wait([planning])
        self._take_plan(planning.result())
        await self._search_independent()
        await self._follow()
        await self._revise()
        await self._searches.finish()
        return self._finished()

    async def _plan(self) -> Planning:
        return await self._models.planner.recorded_plan(
            self._task.scope,
            self._sources,
            self._limits,
            deadline=self._allowance.call_deadline,
            log=self._task.log,
            begin=self._search,
        )

    def _take_plan(self, planning: Planning) -> None:
        self._allowance.add(planning)
        plan, planned = self._outcome.plan, planning.plan
        plan.warnings, plan.classifications, plan.labels = planned.warnings, planned.classifications, planned.labels
        self._steps.planned |= {one.id: one for one in planned.sub_queries}
        self._waiting = {one.id: one for one in planned.sub_queries if one.depends_on}

    async def _search(self, sub_queries: Sequence[SubQuery], batch: Batch | None = None) -> None:
        """Start to search; what is ready together is embedded in one batch."""
        for one in sub_queries:
            self._steps.add_search(one)
            self._outcome.rounds = max(self._outcome.rounds, one.wave)
        if sub_queries:
            await self._searches.add(sub_queries, batch)

    async def _search_steps(self, steps: Sequence[SubQuery], number: int) -> None:
        """Search steps with what is known by now."""
        started: list[SubQuery] = []
        for step in steps:
            started += self._steps.searches_for(step, number, started)
        await self._search(started)

    async def _search_independent(self) -> None:
        """Search what builds on nothing, and was not started while the plan was written."""
        steps = self._steps.planned.values()
        waiting, searched = self._waiting, self._searches.sub_queries
        await self._search_steps([one for one in steps if one.id not in searched and one.id not in waiting], 1)

    # -- rounds ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Search what depends on answers, as its answers are read."""
        number = 1
        while self._waiting and number < self._limits.rounds and self._may_ask():
            number += 1
            steps = self._steps_to_read()
            await self._searches.wait_for(self._steps.searches_of(steps))
            if number > 2 and self._brought_nothing_new(number - 1):  # noqa: PLR2004 (the first round is always news)
                break
            if not self._may_ask():
                break
            call = await self._read(steps, number)
            self._allowance.add(call)
            if call.error is not None:
                self._warn(
                    "what the searches found could not be read; the rest is searched in the question's own words"
                )
                break
            await self._search_ready(number, read=steps)
        if self._waiting:
            await self._stop_waiting(number)

    def _steps_to_read(self) -> list[str]:
        """Return the steps that were searched, have no answer yet, and are waited for."""
        parents = {parent for child in self._waiting.values() for parent in child.depends_on}
        open_parents = parents - self._waiting.keys()
        return [one for one in self._steps.planned if one in open_parents and not self._steps.answers_of(one)]

    async def _read(self, steps: Sequence[str], number: int) -> ModelCall:
        """Read what the steps found; their children's searches start as soon as answers are there."""
        searches = self._steps.searches_of(steps)
        open_steps = OpenSteps(
            {name: self._searches.sub_queries[name].query for name in searches},
            {one.id: one.template or one.query for one in self._waiting.values()},
            {name: answers for name, answers in self._steps.found.items() if answers},
        )

        async def take(name: str, answers: list[Finding]) -> None:
            self._take(name, answers)
            await self._search_ready(number)
            started = [one for one in self._steps.children_of(name) if self._steps.searches_of([one.id])]
            await self._search_steps(started, number)  # with a further branch's answers, or corrected ones

        return await self._models.findings.read(
            self._task.scope.question,
            open_steps,
            await Call(sync=partial(self._passages, searches), what="choosing passages"),
            take,
            limit=MAX_BRANCHES,
            deadline=self._allowance.call_deadline,
            log=self._task.log,
        )

    def _take(self, name: str, answers: list[Finding]) -> None:
        """Keep a step's answers. A step that waits needs no search where a passage states its answer."""
        if name in self._waiting:
            answers = [answer for answer in answers if answer.confidence is Confidence.STATED and answer.node_id]
            if answers:
                self._early += _searches_of_answers(
                    self._waiting.pop(name), answers, self._searches.done, self._task.log
                )
        before = self._steps.take(name, answers)
        if before:
            values = "; ".join(answer.value for answer in answers)
            self._warn(f"{name} was read again: {values}, not {'; '.join(answer.value for answer in before)}")

    async def _search_ready(self, number: int, read: Collection[str] = ()) -> None:
        """Search the waiting steps whose parents all have answers, or were read without one.

        Where there is no answer, the step is searched in the question's own words, never with a blank.
        """
        started: list[SubQuery] = []
        while ready := [one for one in self._waiting.values() if self._is_ready(one, read)]:
            for child in ready:  # one that shares another's search may have its answers at once: look again
                del self._waiting[child.id]
                started += self._steps.searches_for(child, number, started)
                for parent in child.depends_on:
                    if not self._steps.answers_of(parent):
                        self._warn(f"{parent} found no answer; {child.id} was searched in the question's own words")
        await self._search(started)

    def _is_ready(self, child: SubQuery, read: Collection[str]) -> bool:
        return all(self._steps.answers_of(parent) or parent in read for parent in child.depends_on)

    async def _stop_waiting(self, number: int) -> None:
        """Search what still waits with what is known by now, and else in the question's own words."""
        if number >= self._limits.rounds:
            self._warn(
                f"{len(self._waiting)} sub-queries lie deeper than the effort goes (EffortLimits.rounds is "
                f"{self._limits.rounds}); they were searched in the question's own words"
            )
        steps = [*self._waiting.values()]
        self._waiting.clear()
        await self._search_steps(steps, min(number + 1, self._limits.rounds))

    # -- gaps ------------------------------------------------------------------------------------------------------

    async def _revise(self) -> None:
        """Look for gaps in what was found, and search what is missing."""
        while self._outcome.revisions < self._limits.revisions and self._may_ask():
            await self._searches.wait_for(self._searches.sub_queries)
            last = self._outcome.rounds
            if (last > 1 and self._brought_nothing_new(last)) or not self._may_ask():
                return
            self._outcome.revisions += 1
            revision = await self._look_for_gaps()
            self._allowance.add(revision)
            if revision.error is not None or revision.sufficient:
                self._decide("the evidence is sufficient" if revision.sufficient else "no verdict on the evidence")
                return
            for warning in revision.warnings:
                self._warn(warning)
            added = self._added(revision.proposals, last + 1)
            if not added:
                self._decide("something is missing, and no search for it was left")
                return
            self._decide(f"revised: {'; '.join(revision.gaps) or 'something was missing'}")
            await self._search(added)

    async def _look_for_gaps(self) -> Revision:
        newest_first = list(self._searches.sub_queries)[::-1]
        return await self._models.reviser.revise(
            self._task.scope.question,
            self._searches_and_answers(),
            await Call(sync=partial(self._passages, newest_first), what="choosing passages"),
            self._sources,
            limit=self._limits.sub_queries,
            deadline=self._allowance.call_deadline,
            log=self._task.log,
        )

    def _added(self, proposals: Sequence[Proposal], number: int) -> list[SubQuery]:
        """Return the searches of a revision that are new, or go to further sources; the plan itself is not changed."""
        prefix = f"r{self._outcome.revisions}."
        searched = self._searches.sub_queries
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

    def _searches_and_answers(self) -> str:
        """Return what was searched and found, one search a line."""
        lines = []
        for one in self._searches.sub_queries.values():
            values = "; ".join(answer.value for answer in self._steps.found.get(one.id, []))
            lines.append(f"- {one.query}" + (f" -> {values}" if values else ""))
        return "\n".join(lines)

    # -- what both read and decide by --------------------------------------------------------------------------------

    def _passages(self, first: Sequence[str]) -> PassageSet:
        """Return the best passages of all searches, those of some sub-queries first."""
        share = max(1, MAX_PASSAGES // max(1, len(first)))
        passages = PassageSet(min(share, PASSAGES_PER_QUERY))
        by_query: dict[str, list[SourceSearch]] = {}
        for search in self._searches.done:
            by_query.setdefault(search.sub_query.id, []).append(search)
        for name in dict.fromkeys([*first, *by_query]):
            searches = by_query.get(name, [])
            if searches:
                passages.add(searches[0].sub_query.query, best_of(searches, self._task.fusion))
        return passages

    def _brought_nothing_new(self, number: int) -> bool:
        """Return whether a round is a reason to stop: auto effort ends where one brings nothing new."""
        if not self._stops_early or _brings_news(self._searches.done, number):
            return False
        self._decide(f"round {number} brought nothing new")
        return True

    def _may_ask(self) -> bool:
        """Return whether the model may be called again; what is spent is a warning."""
        if self._allowance.model_lost:
            return False
        lacking = self._allowance.lacking
        if lacking is not None:
            self._warn(lacking)
        return lacking is None

    def _warn(self, text: str) -> None:
        if text not in self._outcome.plan.warnings:
            self._outcome.plan.warnings.append(text)

    def _decide(self, text: str) -> None:
        self._outcome.decision = "; ".join(part for part in (self._outcome.decision, text) if part)

    def _finished(self) -> PlanOutcome:
        """Return the outcome, and put into the plan's record what came out after that was closed."""
        outcome, searches = self._outcome, self._searches.done
        outcome.plan.sub_queries = list(self._searches.sub_queries.values())
        outcome.findings = list(self._steps)
        _favour(searches, outcome.findings)
        outcome.searches = [*searches, *self._early]
        warning = "; ".join(outcome.plan.warnings) or None
        for record in self._task.log.records:
            if (
                isinstance(record, ModelQueryPlanningActivity)
                and record.purpose == "plan"
                and record.warning != warning
            ):
                self._task.log.amend(record, warning=warning)
        return outcome


class RunningSearches:
    """What was started to search, in the order in which it was planned.

    Args:
        fan_out: Searches.
        names: The sources' names, in order.
        deadline: ``time.monotonic()`` at which searching ends.
    """

    def __init__(self, fan_out: FanOut, names: Sequence[str], deadline: float | None) -> None:
        self.sub_queries: dict[str, SubQuery] = {}
        """What was started, by id; each with all the sources that it was started at."""
        self._fan_out = fan_out
        self._names = names
        self._deadline = deadline
        self._batches: list[Batch] = []

    async def add(self, sub_queries: Sequence[SubQuery], batch: Batch | None = None) -> None:
        """Start to search, or note the searches of a batch that was started already."""
        copies = [one.model_copy() for one in sub_queries]  # what is noted here may get further sources
        for one in sub_queries:
            known = self.sub_queries.setdefault(one.id, one)
            chosen = {*known.sources, *one.sources}
            known.sources = [name for name in self._names if name in chosen]
        self._batches.append(batch or await self._fan_out.begin(QueryPlan(sub_queries=copies)))

    async def wait_for(self, ids: Collection[str]) -> None:
        """Wait for the searches of some sub-queries, as long as searching may take.

        Where each sub-query has found something, the rest is waited for as a slow source is when the others have
        answered (see ``sources.stragglers``), and goes on beside what follows: a source that hangs costs a round a
        second, even where it is not given up.
        """
        stragglers = self._fan_out.stragglers
        while pending := [one for one in self._of(ids) if not one.job.done]:
            if self._each_found_something(ids) and stragglers.waited_enough(pending):
                return
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return
            until = earliest(self._deadline, stragglers.next_look(pending))
            await wait([one.job for one in pending], deadline=until, first=True)

    def _of(self, ids: Collection[str]) -> list[RunningSearch]:
        return [one for batch in self._batches for one in batch.of(ids)]

    def _each_found_something(self, ids: Collection[str]) -> bool:
        searches = self._of(ids)
        found = {one.sub_query_id for one in searches if one.found_something}
        return all(one.sub_query_id in found for one in searches)

    async def finish(self) -> None:
        """Wait until every search has ended."""
        await wait([batch.whole for batch in self._batches])

    @property
    def done(self) -> list[SourceSearch]:
        """What is there, in the order in which it was planned."""
        searches = [search for batch in self._batches for search in batch.done]
        order = {name: position for position, name in enumerate(self.sub_queries)}
        return sorted(searches, key=lambda search: order[search.sub_query.id])


def _brings_news(searches: Sequence[SourceSearch], number: int) -> bool:
    """Return whether a round's searches brought a document among their best that no earlier one had brought."""
    before: set[NodeKey] = set()
    after: set[NodeKey] = set()
    for search in searches:
        keys = {node_key(node.node) for node in search.nodes[:NEWS_DEPTH]}
        (before if search.sub_query.wave < number else after).update(keys)
    return bool(after - before)


def _searches_of_answers(
    step: SubQuery, answers: Sequence[Finding], searches: Sequence[SourceSearch], log: ActivityLog
) -> Iterator[SourceSearch]:
    """Yield the passages that answer a step without a search, so that they have a place in the evidence.

    Args:
        step: Its answers were read before it was searched.
        answers: Each with its passage.
        searches: What was found by now.
        log: Gets a record of each.
    """
    node_ids = {answer.node_id for answer in answers}
    for search in searches:
        nodes = [node for node in search.nodes if node.node_id in node_ids]
        if nodes:
            yield _early_search(step, search, nodes, log)
            node_ids -= {node.node_id for node in nodes}


def _early_search(step: SubQuery, found: SourceSearch, nodes: list[NodeWithScore], log: ActivityLog) -> SourceSearch:
    note = f"not searched: answered by what {found.sub_query.id} found"
    name = found.source.name
    question = SubQuestionAnswerPair(sub_q=SubQuestion(sub_question=step.query, tool_name=name))
    with log.record(
        SourceActivity,
        CBEventType.SUB_QUESTION,
        {EventPayload.SUB_QUESTION: question},
        type=found.source.kind,
        knowledge_source_name=name,
        sub_query_id=step.id,
    ) as record:
        shown = SearchLane(kind="earlier", count=len(nodes), candidates=len(nodes), note=note)
        log.close(record, outcome=Outcome.OK, count=len(nodes), candidates=len(nodes), lanes=[shown])
    return SourceSearch(step, found.source, record, (NodeList("earlier", nodes),))


def _favour(searches: Sequence[SourceSearch], findings: Sequence[Finding]) -> None:
    """Count the passages that state what steps found once more in their own searches."""
    stated = {(one.sub_query_id, one.node_id) for one in findings if one.confidence is Confidence.STATED}
    for search in searches:
        nodes = [node for node in search.nodes if (search.sub_query.id, node.node_id) in stated]
        if nodes:  # without their scores: they may be of any list
            search.lists = (*search.lists, NodeList("finding", [NodeWithScore(node=node.node) for node in nodes]))
