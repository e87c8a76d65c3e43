"""Searches a question unplanned, or by a model's plan in rounds that depend on one another (multi-hop search).

    search_question ─▶ the question as it is (minimal effort; auto effort if its evidence is strong)
           └▶ MultiHopSearch: plan ─▶ search independent steps ─▶ read their answers ─▶ search dependent steps ─▶ …
                                   ─▶ look for gaps, search for missing evidence

The question itself is searched while the model plans, and a sub-query as soon as it is in the plan. A dependent step is
searched as soon as the answers that it needs are read. If a model call fails, the steps that wait for its answers are
searched with descriptions of these answers, in the question's own words.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from llama_index_agentic_kb._aio import Call, deadline_after, earliest, start, wait
from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.account.budget import current_budget
from llama_index_agentic_kb.errors import LLMError, PlanningError
from llama_index_agentic_kb.evidence.candidates import Proof
from llama_index_agentic_kb.planning.classification import classify, requested
from llama_index_agentic_kb.planning.findings import (
    MAX_BRANCHES,
    StepAnswer,
    Verdict,
    as_found,
    look_for_gaps,
    read_findings,
)
from llama_index_agentic_kb.planning.passages import MAX_PASSAGES, PASSAGES_PER_QUERY, PassageSet, best_passages
from llama_index_agentic_kb.planning.plan_graph import (
    PlanGraph,
    PlannerSource,
    plain_plan,
)
from llama_index_agentic_kb.planning.planner import ModelCall, Planning, PlanningModel, plan_searches
from llama_index_agentic_kb.planning.scope import evidence_strength, is_simple
from llama_index_agentic_kb.planning.steps import PlanOutcome, Steps, Task
from llama_index_agentic_kb.schema import (
    Confidence,
    Finding,
    MissingPart,
    ModelQueryPlanningActivity,
    Outcome,
    QueryPlan,
    ReasoningEffort,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.sources.fan_out import SourceSearch

OTHERS_SECONDS: Final = 1.0
"""Seconds that the model call of a round waits for searches that none of its steps depends on."""

QUESTIONS_OWN: Final = 2
"""Passages in a verdict's prompt of what the question itself found: a plan may have missed a part of it."""

WHOLE: Final = 2
"""Passages of each search without a stated answer that a verdict's prompt shows whole: a cut may cost a revision."""


async def search_question(task: Task) -> PlanOutcome:
    """Search the question as it is, or by a model's plan; only the planner's call classifies it."""
    scope, fan_out = task.scope, task.fan_out
    sources = [
        PlannerSource(name, chosen.source.description, chosen.params.always_query_source, chosen.source.filterable)
        for name, chosen in fan_out.selected.items()
    ]
    plain = plain_plan(scope, sources, task.limits)
    if task.model is None or task.effort is ReasoningEffort.MINIMAL or scope.intents:
        if scope.classification is not None:
            classify(plain, scope.classification, None)
        return PlanOutcome(plain, await fan_out.search(plain))
    loop = MultiHopSearch(task, task.model, sources)
    if task.effort is not ReasoningEffort.AUTO:
        return await loop.search(plain)
    if scope.classification is not None and requested(scope.classification) is not None:
        return await loop.search(plain, why="planned: the question is to be classified")
    if is_simple(scope):
        return PlanOutcome(plain, await fan_out.search(plain), decision="not planned: a simple question")
    found = await fan_out.search(plain)
    strength = evidence_strength(scope, found, task.fusion)
    if strength.sufficient:
        return PlanOutcome(plain, found, signals=strength.signals, decision=strength.reason)
    outcome = await loop.search(plain, found, why=strength.reason)
    outcome.signals = strength.signals
    return outcome


class MultiHopSearch:
    """The planned search of one request, in rounds that depend on one another."""

    def __init__(self, task: Task, model: PlanningModel, sources: Sequence[PlannerSource]) -> None:
        self._task = task
        self._model = model
        self._sources = sources
        self._limits = task.limits
        self._deadline = current_budget().retrieval_deadline
        every = {name: chosen.source for name, chosen in task.fan_out.selected.items()}
        self._learns = {
            name: {other for other, read in every.items() if source.may_learn_from(read)}
            for name, source in every.items()
        }
        self._planned = self._readable = {*every}  # see ``_take_plan``
        self._steps = Steps(self._learns)
        self._running: list[SourceSearch] = []  # started searches, in the order in which they were planned
        self._in_full: set[str] = set()  # ids of passages whose full text the model asked for
        self._seen: set[int] = set()  # ids of the records of searches whose passages a model call was shown
        self._rests_on: list[str] = []  # ids of passages that support a verdict
        self._outcome = PlanOutcome(QueryPlan(sub_queries=[]), planned=True)
        self._model_lost = False
        """Whether a call got no reply. The model is then not called again: each call would use its full timeout."""

    async def search(
        self, question: QueryPlan, first: Sequence[SourceSearch] | None = None, why: str = ""
    ) -> PlanOutcome:
        """Plan and search, beside the question, until the evidence is complete or a limit is reached."""
        if why:
            self._decide(why)
        deadline, log, begin = self._call_deadline, self._task.log, self._search
        scope = self._task.scope
        work = plan_searches(self._model, scope, self._sources, self._limits, deadline=deadline, log=log, begin=begin)
        planning = start(work)
        await asyncio.sleep(0)  # the planning call is recorded first
        await self._search(question.sub_queries, first)
        await wait([planning])
        self._take_plan(planning.result())
        await self._follow(1)
        while self._outcome.revisions < self._limits.revisions and await self._revised():
            await self._follow(self._outcome.rounds + 1)
        await wait([search.job for search in self._running])
        return self._finished()

    async def _search(self, sub_queries: Sequence[SubQuery], running: Sequence[SourceSearch] | None = None) -> None:
        """Start the searches of sub-queries (embedded in one batch), or record ``running`` searches as started."""
        if not sub_queries:
            return
        copies = [one.model_copy() for one in sub_queries]  # the recorded ones may get further sources later
        names = [source.name for source in self._sources]
        for one in sub_queries:
            self._steps.note(one, names)
            self._outcome.rounds = max(self._outcome.rounds, one.wave)
        self._running += running or self._task.fan_out.begin(QueryPlan(sub_queries=copies))

    async def _search_steps(self, steps: Sequence[SubQuery], number: int) -> None:
        """Search steps, with the answers that are known so far filled in."""
        started: list[SubQuery] = []
        for step in steps:
            started += self._steps.searches_for(step, number, started)
        await self._search(started)

    async def _wait_for(self, ids: Collection[str]) -> None:
        """Wait for these searches, and shortly for all others: prompts must not depend on which search was first."""
        await self._task.fan_out.wait_for([search for search in self._running if search.sub_query.id in ids])
        jobs = [search.job for search in self._running if not search.job.done]
        await wait(jobs, deadline=earliest(self._deadline, deadline_after(OTHERS_SECONDS)))
        for search in self._running:
            if not search.job.done:
                name = search.source.name
                self._warn(f"the model read without what {name} finds for {search.sub_query.id}: it was too slow")

    @property
    def _done(self) -> list[SourceSearch]:
        """The results of finished searches, in the order in which they were planned."""
        order = {name: position for position, name in enumerate(self._steps.searched)}
        searches = [search for search in self._running if search.job.done]
        return sorted(searches, key=lambda search: order[search.sub_query.id])

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _take_plan(self, planning: Planning) -> None:
        self._count(planning)
        plan, planned = self._outcome.plan, planning.plan
        plan.warnings, plan.classifications, plan.labels = planned.warnings, planned.classifications, planned.labels
        self._steps.plan(planned.sub_queries, planning.finds)
        chosen = [one.sources for one in planned.sub_queries if one.origin is SubQueryOrigin.PLANNER]
        self._planned = {name for names in chosen or [[*self._learns]] for name in names}
        # Passages that only the question found are not read if a planned source could then get no further query.
        common = set[str].intersection(*({*self._learns[name]} for name in self._planned))
        self._readable = self._planned | common

    async def _follow(self, number: int) -> None:
        """Search the independent steps, then dependent ones as answers are read; ``number`` is the first round's."""
        steps, revised = self._steps, self._outcome.revisions > 0
        new = [
            one
            for name, one in steps.planned.items()
            if name not in steps.waiting and not (steps.searches_of([name]) or steps.answers_of(name))
        ]
        await self._search_steps(new, number)
        if steps.waiting:
            await self._search_ready(number)
        last = self._last_round
        while (steps.waiting or revised) and number < last and self._may_ask():
            to_read, revised = steps.to_read(every=revised), False
            if not (to_read or steps.waiting):
                break
            number += 1
            await self._wait_for(steps.searches_of(to_read))
            if not self._may_ask():
                break
            asked = set[str]()  # searches of which the model asked for the whole of a passage
            call = await self._read(to_read, number, asked)
            self._count(call)
            if call.error is not None:
                unread = "what the searches found could not be read"
                self._warn(f"{unread}; the rest is searched in the question's own words")
                break
            again = {step for step in to_read if step in steps.next or not asked.isdisjoint(steps.searches_of([step]))}
            await self._search_ready(number, read={*to_read} - again)  # the others are read once more
        else:
            if steps.waiting and number >= last:
                self._warn(
                    f"{len(steps.waiting)} sub-queries lie deeper than the effort goes (EffortLimits.rounds is "
                    f"{self._limits.rounds}); they were searched in the question's own words"
                )
        rest = [*steps.waiting.values()]  # with known answers filled in, and missing ones described
        steps.waiting.clear()
        await self._search_steps(rest, min(number + 1, last))

    async def _read(self, to_read: Sequence[str], number: int, asked: set[str]) -> ModelCall:
        """Read the answers of steps; searches of dependent steps start as soon as answers arrive."""
        steps, shown = self._steps, frozenset(self._in_full)
        searches = steps.searches_of(to_read)

        async def take(name: str, read: StepAnswer) -> None:
            self._take(name, read.findings[:MAX_BRANCHES])
            if not shown.issuperset(read.whole):
                asked.add(name)
            self._in_full.update(read.whole)
            if more := [one.value for one in read.findings[MAX_BRANCHES:]]:
                self._warn(f"{name} has more than {MAX_BRANCHES} answers; not used: {'; '.join(more)}")
            await self._search_next(name, read, number)
            await self._search_ready(number)
            # with a further branch's answers, or corrected ones
            await self._search_steps(steps.started_children_of(name), number)

        share = min(max(1, MAX_PASSAGES // max(1, len(searches))), PASSAGES_PER_QUERY)
        passages = await self._passages(dict.fromkeys([*searches, *self._unread], share))
        return await read_findings(
            self._model,
            self._task.scope.question,
            {name: steps.searched[name].query for name in searches},
            passages,
            take,
            later={one.id: one.template or one.query for one in steps.waiting.values()},
            known={name: answers for name, answers in steps.found.items() if answers},
            deadline=self._call_deadline,
            log=self._task.log,
        )

    def _take(self, name: str, answers: list[Finding]) -> None:
        """Store a step's answers; a step that waits needs no search if a passage states its answer."""
        if name in self._steps.waiting:
            early = [one for one in answers if one.confidence is not Confidence.PARTIAL and one.node_id]
            stated = [one for one in early if one.confidence is Confidence.STATED]
            answers = stated or early
            if stated:
                del self._steps.waiting[name]
                self._decide(f"{name} needed no search: a passage states its answer")
        if before := self._steps.take(name, answers):
            values = "; ".join(answer.value for answer in answers)
            self._warn(f"{name} was read again: {values}, not {'; '.join(answer.value for answer in before)}")

    async def _search_next(self, name: str, read: StepAnswer, number: int) -> None:
        """Search the follow-up query of steps whose findings are only partial."""
        steps = self._steps
        served = [step for step in steps.planned if name in steps.searches_of([step])]
        for step in served:
            steps.next.discard(step)
            if read.search and not steps.answers_of(step) and number < self._last_round:
                started = steps.searches_for(steps.planned[step], number, (), read.search)
                if started:
                    steps.next.add(step)
                await self._search(started)

    async def _search_ready(self, number: int, read: Collection[str] = ()) -> None:
        """Search the waiting steps whose parents have answers, or were read; missing answers are described."""
        steps, started = self._steps, list[SubQuery]()
        while ready := [
            one
            for one in steps.waiting.values()
            if all(parent in read or steps.answers_of(parent) for parent in one.depends_on)
        ]:
            for child in ready:  # a step that shares a search may have answers at once: check again
                del steps.waiting[child.id]
                started += steps.searches_for(child, number, started)
                for parent in child.depends_on:
                    if not steps.answers_of(parent):
                        self._warn(f"{parent} found no answer; {child.id} was searched in the question's own words")
        await self._search(started)

    async def _revised(self) -> bool:
        """Ask the model for gaps in the evidence and add its new searches to the plan; return whether it had any."""
        outcome, steps = self._outcome, self._steps
        if not self._may_ask():
            return False
        if steps.are_answered:
            outcome.sufficient = True
            self._decide("the evidence is sufficient without a verdict: every step has an answer with its passage")
            return False
        await self._wait_for(steps.searched)
        if not self._may_ask():
            return False
        outcome.revisions += 1
        verdict = await self._judge()
        self._count(verdict)
        if verdict.error is not None or verdict.sufficient:
            outcome.sufficient = bool(verdict.sufficient and (verdict.refs or steps.are_answered))
            self._decide("the evidence is sufficient" if verdict.sufficient else "no verdict on the evidence")
            return False
        for warning in verdict.warnings:
            self._warn(warning)
        plan = QueryPlan(sub_queries=[one.model_copy(deep=True) for one in steps.searched.values()])
        known = {name: one for name, one in steps.planned.items() if one.origin is not SubQueryOrigin.QUESTION}
        allowed = self._may_revise
        if verdict.proposals:
            held = [one.name for one in self._sources if one.name in self._planned and one not in allowed]
            steps.withhold(f"r{outcome.revisions}", held)
        graph = PlanGraph(
            plan, allowed, self._limits, revision=outcome.revisions, steps=known, first_round=outcome.rounds + 1
        )
        graph.add(verdict.proposals)
        graph.finish()
        added = [one for one in graph.plan.sub_queries if one.id not in steps.searched]
        for warning in graph.plan.warnings:
            self._warn(warning)
        if not added:
            self._decide("something is missing, and no search for it was left")
            return False
        self._decide(f"revised: {'; '.join(verdict.gaps) or 'something was missing'}")
        steps.plan(added, graph.finds)
        return True

    async def _judge(self) -> Verdict:
        """Ask the model whether evidence is missing; store the values of open steps, and what supports the verdict."""
        steps = self._steps
        own = steps.searches_of([step.id for step in steps.chain()])
        unstated = [name for name in reversed(steps.searched) if not steps.is_answered(name, Confidence.STATED)]
        share = min(max(1, MAX_PASSAGES // max(1, len(unstated))), PASSAGES_PER_QUERY)
        shown = {name: share if name in own or not own else min(share, QUESTIONS_OWN) for name in unstated}
        passages = await self._passages(shown, whole=WHOLE)
        verdict = await look_for_gaps(
            self._model,
            self._task.scope.question,
            dict(self._account_of_searches(passages.refs())),
            steps.open,
            passages,
            self._may_revise,
            limit=self._limits.sub_queries,
            deadline=self._call_deadline,
            log=self._task.log,
            instructions=self._task.scope.retrieval_instructions,
        )
        self._rests_on += [passages.passages[ref].node.node_id for ref in verdict.refs]
        for name, found in verdict.values.items():
            self._take(name, found)
        return verdict

    @property
    def _may_revise(self) -> list[PlannerSource]:
        """The sources that a revision may search: those of the plan that may get what is written now."""
        allowed = self._steps.may_get(self._planned)
        return [one for one in self._sources if one.name in allowed]

    def _account_of_searches(self, refs: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield the id, query and findings of each step's searches, and of each step that needed none."""
        steps = self._steps
        with_nodes = {search.sub_query.id for search in self._readable_searches if search.nodes}
        for step in steps.chain():
            early = [step.id] if step.id in steps.found and step.id not in steps.searched else []
            for name in (*steps.searches_of([step.id]), *early):
                query = steps.searched[name].query if name in steps.searched else step.query
                found = as_found(steps.found.get(name, []), refs)
                nothing = "" if name in with_nodes else "nothing was found"
                yield name, query + (f" -> {found or nothing}" if found or nothing else "")

    # -- shared by reading and judging -------------------------------------------------------------------------------

    @property
    def _readable_searches(self) -> list[SourceSearch]:
        return [search for search in self._done if search.source.name in self._readable]

    @property
    def _unread(self) -> list[str]:
        """The searches that no model call has read, and those for findings that name no passage."""
        unproven = {name for name, read in self._steps.found.items() if any(one.node_id is None for one in read)}
        names = [(search.sub_query.id, search.record.id) for search in self._readable_searches]
        return [name for name, record in names if record not in self._seen or name in unproven]

    async def _passages(self, per_query: Mapping[str, int], *, whole: int = 0) -> PassageSet:
        """Return the passages for a model call: those that support findings, then so many of each of these searches.

        Their sources are recorded as read before the call can write a query.
        """
        found = self._readable_searches
        self._steps.read.update(search.source.name for search in found if search.nodes)
        self._seen.update(search.record.id for search in found)
        choose = partial(
            best_passages,
            found,
            per_query,
            self._task.fusion,
            proof=[one.node_id for one in self._proof()],
            in_full=frozenset(self._in_full),
            known={normalize(one.value) for read in self._steps.found.values() for one in read},
            whole=whole,
        )
        return await Call(sync=choose, what="choosing passages")

    def _proof(self) -> list[Proof]:
        """Return the passages that support findings, in the chain's order, then those that support verdicts."""
        made: list[Proof] = []
        for step in self._steps.chain():
            made += [Proof(one.node_id, step.id, one.value) for one in step.findings if one.node_id is not None]
        return [*made, *(Proof(node_id, "verdict") for node_id in self._rests_on)]

    @property
    def _last_round(self) -> int:
        """The number of the last round that may search: each revision adds one to the effort's rounds."""
        return self._limits.rounds + self._outcome.revisions

    @property
    def _call_deadline(self) -> float | None:
        """``time.monotonic()`` at which a model call that starts now is abandoned."""
        return earliest(self._deadline, deadline_after(self._limits.planning_seconds))

    def _count(self, call: ModelCall) -> None:
        """Add a call's token usage, and record if the model gave no reply (its error has the client's as its cause)."""
        self._outcome.usage.add(call.usage)
        error = call.error
        has_replied = isinstance(error, PlanningError) or (isinstance(error, LLMError) and error.__cause__ is None)
        self._model_lost = self._model_lost or (error is not None and not has_replied)

    def _may_ask(self) -> bool:
        """Return whether the model may be called again; add a warning if its tokens or its time are used up."""
        spent = self._outcome.usage.tokens or 0
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
        """Complete and return the outcome; add later warnings to the planning call's closed record."""
        outcome = self._outcome
        for name, ids in self._steps.withheld.items():
            read = ", ".join(sorted(self._steps.read - self._learns[name]))
            reason = (
                f"it did not get what was written for {', '.join(ids)} after reading {read} (KnowledgeSource.trust)"
            )
            self._warn(f"{name}: {reason}")
            outcome.withheld.append(MissingPart(what=name, outcome=Outcome.SKIPPED, reason=reason))
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
