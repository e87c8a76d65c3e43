"""Searches a question unplanned, or by a model's plan in rounds that depend on one another (multi-hop search).

    search_question ─▶ the question as it is (minimal effort; auto effort if its evidence is strong)
           └▶ MultiHopSearch: plan ─▶ search independent steps ─▶ read their answers ─▶ search dependent steps ─▶ …
                                   ─▶ look for gaps, search for missing evidence

The question itself is searched while the model plans, and a sub-query as soon as it is in the plan. A dependent step is
searched as soon as the answers that it needs are read. If a model call fails, the steps that wait for its answers are
searched with descriptions of these answers, in the question's own words. ``Steps`` knows which steps wait, which were
searched, what was found, and which source may get what.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, product, zip_longest
from operator import attrgetter
from typing import Final

from llama_index_agentic_kb._aio import Call, deadline_after, earliest, start, wait
from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.account import Budget, current_budget
from llama_index_agentic_kb.errors import LLMError, PlanningError
from llama_index_agentic_kb.evidence.candidates import Proof
from llama_index_agentic_kb.llm import Usage
from llama_index_agentic_kb.planning.effort import MAX_RANKED, MAX_SOURCES, EffortLimits
from llama_index_agentic_kb.planning.findings import (
    MAX_BRANCHES,
    MAX_PASSAGES,
    PASSAGES_PER_QUERY,
    FoundStep,
    PassageSet,
    StepAnswer,
    Verdict,
    as_found,
    best_passages,
    look_for_gaps,
    read_findings,
)
from llama_index_agentic_kb.planning.plan_graph import PlanGraph, asked_for, fill, plain_plan
from llama_index_agentic_kb.planning.planner import ModelCall, PlanningModel, Task, classify, plan_searches
from llama_index_agentic_kb.planning.scope import coverage_of, is_simple
from llama_index_agentic_kb.schema import (
    Confidence,
    EffortUse,
    Finding,
    MissingPart,
    ModelQueryPlanningActivity,
    Outcome,
    QueryPlan,
    ReasoningEffort,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.sources.base import SelectedSource
from llama_index_agentic_kb.sources.fan_out import SourceSearch

OTHERS_SECONDS: Final = 1.0  # that the model call of a round waits for searches that none of its steps depends on
QUESTIONS_OWN: Final = 2  # passages of the question itself in a verdict's prompt: a plan may have missed a part of it
WHOLE: Final = 2  # passages of each open search that a verdict's prompt shows whole: a cut may cost a revision
MAX_SEARCHES: Final = 2 * MAX_BRANCHES  # of one step: a model that keeps correcting answers would search endlessly
_SURE: Final = {Confidence.PARTIAL: 1, Confidence.IMPLIED: 2, Confidence.STATED: 3}


@dataclass(slots=True)
class PlanOutcome:
    """The searches of a request, their findings and their costs."""

    plan: QueryPlan  # the plan of all searched queries, in the order in which their evidence is fused
    searches: list[SourceSearch] = field(default_factory=list)  # finished, one per (query, source), in the plan's order
    findings: list[Finding] = field(default_factory=list)  # all findings, in the order in which they were read
    chain: list[FoundStep] = field(default_factory=list)  # the steps in their order, if anything was read in passages
    # Whether the proof was found to hold all that the question needs: by a verdict that names passages, or because
    # every step has an answer with its passage.
    sufficient: bool = False
    # The passages that support the chain's findings, and those that support the verdict on the evidence.
    proof: list[Proof] = field(default_factory=list)
    # The sources that did not get queries, because these were written after reading passages that they may not get.
    withheld: list[MissingPart] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    rounds: int = 1
    revisions: int = 0
    planned: bool = False
    decision: str = ""  # explanation of why a model planned or not, and why the search stopped
    signals: dict[str, float] | None = None  # strength of the unplanned question's evidence, if it was rated

    def allowed(self, limits: EffortLimits, budget: Budget) -> EffortUse:
        """Return the resources that the search may use; without a planning model they are one round and no tokens."""
        seconds, planned = limits.seconds, self.planned
        if budget.retrieval_deadline is not None:
            seconds = min(seconds, budget.retrieval_deadline - budget.started)
        return EffortUse(
            sub_queries=limits.sub_queries * planned,
            sources=MAX_SOURCES,
            waves=limits.rounds if planned else 1,
            revisions=limits.revisions * planned,
            tokens=limits.tokens * planned,
            seconds=round(seconds, 3),
            documents_ranked=MAX_RANKED,
        )

    def spent(self, budget: Budget, ranked: int) -> EffortUse:
        """Return the resources that the search used; ``ranked`` is the number of ranked documents."""
        queries = [one for one in self.plan.sub_queries if one.origin is not SubQueryOrigin.QUESTION]
        return EffortUse(
            sub_queries=len(queries),
            sources=max(map(len, map(attrgetter("sources"), queries)), default=0),
            waves=self.rounds,
            revisions=self.revisions,
            tokens=self.usage.tokens or 0,
            seconds=round(time.monotonic() - budget.started, 3),
            documents_ranked=ranked,
        )


async def search_question(task: Task) -> PlanOutcome:
    """Search the question as it is, or by a model's plan; only the planner's call classifies it."""
    scope, fan_out = task.scope, task.fan_out
    plain = plain_plan(scope, [*fan_out.selected.values()], task.limits)
    if task.model is None or task.effort is ReasoningEffort.MINIMAL or scope.intents:
        if scope.classification is not None:
            classify(plain, scope.classification, {})
        return PlanOutcome(plain, await fan_out.search(plain))
    loop = MultiHopSearch(task, task.model)
    if task.effort is not ReasoningEffort.AUTO:
        return await loop.search(plain)
    if scope.classification is not None and scope.classification.keys:
        return await loop.search(plain, why="planned: the question is to be classified")
    if is_simple(scope):
        return PlanOutcome(plain, await fan_out.search(plain), decision="not planned: a simple question")
    found = await fan_out.search(plain)
    coverage, weak = coverage_of(scope, found, task.fusion)
    strong = PlanOutcome(plain, found, decision="not planned: the question's own evidence is strong")
    outcome = await loop.search(plain, found, why=f"planned: {weak}") if weak else strong
    outcome.signals = {"coverage": coverage}
    return outcome


class MultiHopSearch:
    """The planned search of one request, in rounds that depend on one another."""

    def __init__(self, task: Task, model: PlanningModel) -> None:
        self._task = task
        self._model = model
        self._sources = [*task.fan_out.selected.values()]
        self._limits = task.limits
        self._deadline = current_budget().retrieval_deadline
        every = list(map(attrgetter("source"), self._sources))
        learns = {one.name: {other.name for other in every if one.may_learn_from(other)} for one in every}
        self._planned = self._readable = {*learns}  # the names of sources; see ``search``
        self._steps = Steps(learns)
        self._running: list[SourceSearch] = []  # started searches, in the order in which they were planned
        self._in_full: set[str] = set()  # ids of passages whose full text the model asked for
        self._seen: set[int] = set()  # ids of the records of searches whose passages a model call was shown
        self._rests_on: list[str] = []  # ids of passages that support a verdict
        self._outcome = PlanOutcome(QueryPlan(sub_queries=[]), planned=True)
        # Whether a call got no reply. The model is then not called again: each call would use its full timeout.
        self._model_lost = False

    async def search(
        self, question: QueryPlan, first: Sequence[SourceSearch] | None = None, why: str = ""
    ) -> PlanOutcome:
        """Plan and search, beside the question, until the evidence is complete or a limit is reached."""
        task, outcome, steps = self._task, self._outcome, self._steps
        planning = start(plan_searches(task, self._model, self._search))
        await asyncio.sleep(0)  # the planning call is recorded first
        await self._search(question.sub_queries, first)
        await wait([planning])
        made = planning.result()
        self._count(made)
        plan, planned = made.graph.plan, set[str]()
        outcome.plan, outcome.decision = plan.model_copy(update={"sub_queries": []}), why
        steps.plan(plan.sub_queries, made.graph.finds)
        for one in plan.sub_queries:
            planned.update(one.sources if one.origin is SubQueryOrigin.PLANNER else ())
        self._planned = planned or {*steps.learns}
        # Passages that only the question found are not read if a planned source could then get no further query.
        self._readable = self._planned | {*steps.learns}.intersection(*map(steps.learns.__getitem__, self._planned))
        await self._follow(1)
        while outcome.revisions < task.limits.revisions and await self._revised():
            await self._follow(outcome.rounds + 1)
        await wait(list(map(attrgetter("job"), self._running)))
        self._finish()
        return outcome

    def _finish(self) -> None:
        """Store the results in the outcome, and warnings that are later than the planning call in its record."""
        log, outcome, steps = self._task.log, self._outcome, self._steps
        for name, ids in steps.withheld.items():
            read = ", ".join(sorted(steps.read - steps.learns[name]))
            written = f"it did not get what was written for {', '.join(ids)} after reading {read}"
            reason = f"{written} (KnowledgeSource.trust)"
            self._warn(f"{name}: {reason}")
            outcome.withheld.append(MissingPart(what=name, outcome=Outcome.SKIPPED, reason=reason))
        outcome.plan.sub_queries = list(steps.searched.values())
        outcome.findings = list(chain.from_iterable(steps.found.values()))
        outcome.searches = self._done
        if steps.found or self._rests_on:
            outcome.chain, outcome.proof = steps.chain(), self._proof()
        warning = "; ".join(outcome.plan.warnings) or None
        record = log.last(ModelQueryPlanningActivity, "plan")
        if record is not None and record.warning != warning:
            log.amend(record, warning=warning)

    async def _search(self, sub_queries: Sequence[SubQuery], running: Sequence[SourceSearch] | None = None) -> None:
        """Start the searches of sub-queries (embedded in one batch), or record ``running`` searches as started."""
        copies = list(map(SubQuery.model_copy, sub_queries))  # the recorded ones may get further sources later
        for one in sub_queries:
            self._steps.note(one)
            self._outcome.rounds = max(self._outcome.rounds, one.wave)
        if copies:
            self._running += running or self._task.fan_out.begin(QueryPlan(sub_queries=copies))

    async def _search_steps(self, steps: Iterable[SubQuery], number: int) -> None:
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
                late = f"{search.source.name} finds for {search.sub_query.id}"
                self._warn(f"the model read without what {late}: it was too slow")

    @property
    def _done(self) -> list[SourceSearch]:
        """The results of finished searches, in the order in which they were planned."""
        done = [search for search in self._running if search.job.done]
        return [search for name in self._steps.searched for search in done if search.sub_query.id == name]

    async def _follow(self, number: int) -> None:
        """Search the independent steps, then dependent ones as answers are read; ``number`` is the first round's."""
        steps, revised = self._steps, self._outcome.revisions > 0
        last = self._limits.rounds + self._outcome.revisions  # each revision adds one to the effort's rounds
        done = {*steps.waiting, *steps.served()}
        new = [one for name, one in steps.planned.items() if name not in done and not steps.answers_of(name)]
        if new:
            await self._search_steps(new, number)
        if steps.waiting:
            await self._search_ready(number)
        while (steps.waiting or revised) and number < last and self._may_ask():
            number += 1
            if not await self._read_round(steps.to_read(every=revised), number, last):
                break
            revised = False
        else:
            if steps.waiting and number >= last:
                deep = f"{len(steps.waiting)} sub-queries lie deeper than the effort goes (EffortLimits.rounds is"
                self._warn(f"{deep} {self._limits.rounds}); they were searched in the question's own words")
        if steps.waiting:  # with known answers filled in, and missing ones described
            left = [*steps.waiting.values()]
            steps.waiting.clear()
            await self._search_steps(left, min(number + 1, last))

    async def _read_round(self, to_read: Sequence[str], number: int, last: int) -> bool:
        """Read the answers of steps, and search what is ready then; return False if there are none, or on a failure."""
        steps = self._steps
        if not (to_read or steps.waiting):
            return False
        await self._wait_for(steps.searches_of(to_read))
        if not self._may_ask():
            return False
        asked = set[str]()  # searches of which the model asked for the whole of a passage
        call = await self._read(to_read, number, last, asked)
        self._count(call)
        if call.error is not None:
            self._warn("what the searches found could not be read; the rest is searched in the question's own words")
            return False
        again = steps.next | steps.served(asked)
        await self._search_ready(number, read={*to_read} - again)  # the others are read once more
        return True

    async def _read(self, to_read: Sequence[str], number: int, last: int, asked: set[str]) -> ModelCall:
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
            for step in filter(steps.served([name]).__contains__, steps.planned):
                steps.next.discard(step)
                if read.search and not steps.answers_of(step) and number < last:  # partial: search for more
                    started = steps.searches_for(steps.planned[step], number, (), read.search)
                    if started:
                        steps.next.add(step)
                    await self._search(started)
            await self._search_ready(number)
            answered, begun = {name} | steps.served([name]), steps.served()
            children = [
                one for one in steps.planned.values() if one.id in begun and answered.intersection(one.depends_on)
            ]
            await self._search_steps(children, number)  # with a further branch's answers, or corrected ones

        # Besides, the passages that no model call has read, and those of findings that name none.
        per_query = dict.fromkeys([*searches, *self._unread], _share(len(searches)))
        passages = await self._passages(per_query)
        asked_for = {name: steps.searched[name].query for name in searches}
        later = {one.id: one.template or one.query for one in steps.waiting.values()}
        known = {name: answers for name, answers in steps.found.items() if answers}
        return await read_findings(self._task, self._model, passages, take, steps=asked_for, later=later, known=known)

    def _take(self, name: str, answers: list[Finding]) -> None:
        """Store a step's answers; a step that waits needs no search if a passage states its answer."""
        if name in self._steps.waiting:
            answers = [one for one in answers if one.confidence is not Confidence.PARTIAL and one.node_id]
            if stated := [one for one in answers if one.confidence is Confidence.STATED]:
                answers = stated
                del self._steps.waiting[name]
                self._decide(f"{name} needed no search: a passage states its answer")
        if before := self._steps.take(name, answers):
            values, other = ("; ".join(map(attrgetter("value"), read)) for read in (answers, before))
            self._warn(f"{name} was read again: {values}, not {other}")

    async def _search_ready(self, number: int, read: Collection[str] = ()) -> None:
        """Search the waiting steps whose parents have answers, or were read; missing answers are described."""
        steps, started = self._steps, list[SubQuery]()

        def is_ready(child: SubQuery) -> bool:
            return all(parent in read or steps.answers_of(parent) for parent in child.depends_on)

        while ready := [*filter(is_ready, steps.waiting.values())]:
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
            outcome.sufficient = bool(verdict.sufficient and (verdict.proof or steps.are_answered))
            self._decide("the evidence is sufficient" if verdict.sufficient else "no verdict on the evidence")
            return False
        self._warn(*verdict.warnings)
        if self._extend(verdict):
            self._decide(f"revised: {'; '.join(verdict.gaps) or 'something was missing'}")
            return True
        self._decide("something is missing, and no search for it was left")
        return False

    def _extend(self, verdict: Verdict) -> bool:
        """Add a verdict's new searches, in the sources that may get them, to the steps; return whether it had any."""
        steps, number, first_round = self._steps, self._outcome.revisions, self._outcome.rounds + 1
        allowed = self._allowed
        if verdict.proposals:
            held = [one.name for one in self._sources if one.name in self._planned and one not in allowed]
            steps.withhold(held, f"r{number}")
        plan = QueryPlan(sub_queries=[one.model_copy(deep=True) for one in steps.searched.values()])
        graph = PlanGraph(plan, allowed, self._limits, revision=number, steps=steps.planned, first_round=first_round)
        graph.add(verdict.proposals)
        graph.finish()
        self._warn(*plan.warnings)
        added = [one for one in plan.sub_queries if one.id not in steps.searched]
        steps.plan(added, graph.finds)
        return bool(added)

    @property
    def _allowed(self) -> list[SelectedSource]:
        """The sources of the plan that may get what is written now."""
        return [one for one in self._sources if one.name in self._steps.may_get(self._planned)]

    async def _judge(self) -> Verdict:
        """Ask the model whether evidence is missing, and store what it read."""
        steps = self._steps
        own = steps.searches_of(steps.planned) or steps.searched
        unstated = [name for name in reversed(steps.searched) if not steps.is_answered(name, Confidence.STATED)]
        share = _share(len(unstated))
        shown = {name: share if name in own else min(share, QUESTIONS_OWN) for name in unstated}
        passages = await self._passages(shown, whole=WHOLE)
        with_nodes = {search.sub_query.id for search in self._readable_searches if search.nodes}
        searches = steps.as_found(passages.refs(), with_nodes)
        verdict = await look_for_gaps(self._task, self._model, passages, searches, steps.open, self._allowed)
        self._rests_on += verdict.proof
        for name, answers in verdict.values.items():
            self._take(name, answers)
        return verdict

    @property
    def _unread(self) -> list[str]:
        """The ids of searches whose passages no model call has read, and of those with findings that name none."""
        unproven = {name for name, read in self._steps.found.items() if any(one.node_id is None for one in read)}
        names = [(search.sub_query.id, search.number) for search in self._readable_searches]
        return [name for name, record in names if record not in self._seen or name in unproven]

    @property
    def _readable_searches(self) -> list[SourceSearch]:
        return [search for search in self._done if search.source.name in self._readable]

    async def _passages(self, per_query: Mapping[str, int], *, whole: int = 0) -> PassageSet:
        """Return the passages for a model call: those that support findings, then so many of each of these searches."""
        found, proof = self._readable_searches, [one.node_id for one in self._proof()]
        # Their sources are recorded as read before the call can write a query.
        self._steps.read.update(search.source.name for search in found if search.nodes)
        self._seen.update(search.number for search in found)
        known = {normalize(one.value) for read in self._steps.found.values() for one in read}
        in_full, fusion = frozenset(self._in_full), self._task.fusion
        choose = partial(best_passages, found, per_query, fusion, proof, in_full, known, whole)
        return await Call(sync=choose, what="choosing passages")

    def _proof(self) -> list[Proof]:
        """Return the passages that support findings, in the chain's order, then those that support verdicts."""
        found = [(one, step.id) for step in self._steps.chain() for one in step.findings]
        made = [Proof(one.node_id, step, one.value) for one, step in found if one.node_id is not None]
        return [*made, *[Proof(node_id, "verdict") for node_id in self._rests_on]]

    def _count(self, call: ModelCall) -> None:
        """Add a call's token usage, and record if the model gave no reply (its error has the client's as its cause)."""
        self._outcome.usage.add(call.usage)
        error = call.error
        has_replied = isinstance(error, PlanningError) or (isinstance(error, LLMError) and error.__cause__ is None)
        self._model_lost = self._model_lost or (error is not None and not has_replied)

    def _may_ask(self) -> bool:
        """Return whether the model may be called again; add a warning if its tokens or its time are used up."""
        spent, over = self._outcome.usage.tokens or 0, ""
        if spent >= self._limits.tokens:
            over = f"{spent} tokens were spent before the search was done (EffortLimits.tokens)"
        elif self._deadline is not None and time.monotonic() >= self._deadline:
            over = "the time for searching was over before the plan was done (EffortLimits.seconds, or the request's)"
        if over and not self._model_lost:
            self._warn(over)
        return not (over or self._model_lost)

    def _warn(self, *texts: str) -> None:
        warnings = self._outcome.plan.warnings
        warnings.extend(text for text in dict.fromkeys(texts) if text not in warnings)

    def _decide(self, text: str) -> None:
        self._outcome.decision = "; ".join(filter(None, (self._outcome.decision, text)))


def _share(searches: int) -> int:
    """Return the number of passages of each of so many searches in a prompt."""
    return min(max(1, MAX_PASSAGES // max(1, searches)), PASSAGES_PER_QUERY)


def _surest(answers: Iterable[Finding]) -> int:
    return max((_SURE[one.confidence] for one in answers), default=0)


class Steps:
    """The state of a multi-hop search: planned steps, their searches (shared where queries are equal) and findings."""

    def __init__(self, learns: Mapping[str, AbstractSet[str]]) -> None:
        self.planned: dict[str, SubQuery] = {}
        self.waiting: dict[str, SubQuery] = {}  # steps that depend on answers which are not known yet
        # Every query whose search was started, with all sources in which it is searched.
        self.searched: dict[str, SubQuery] = {}
        # Findings by the id of their search, or by the id of a step that needed no search.
        self.found: dict[str, list[Finding]] = {}
        self.finds: dict[str, str] = {}  # see ``PlanGraph.finds``
        self.next: set[str] = set()  # steps whose findings are partial, and whose follow-up query was searched
        self.read: set[str] = set()  # names of the sources whose passages a model call was shown
        # Ids of steps, or of revisions, by the name of a source that did not get their queries.
        self.withheld = defaultdict[str, dict[str, None]](dict)
        self.learns = learns  # by source, the names of the sources whose passages its queries may be made of
        self._serves: dict[str, set[str]] = {}  # ids of steps by the id of the search that provides their results

    def note(self, sub_query: SubQuery) -> None:
        """Record that a search was started."""
        self._serves.setdefault(sub_query.id, set()).add(sub_query.part_of or sub_query.id)
        known = self.searched.setdefault(sub_query.id, sub_query)
        known.sources = list(filter({*known.sources, *sub_query.sources}.__contains__, self.learns))

    def searches_of(self, steps: Collection[str]) -> list[str]:
        """Return the ids of the searches that provide results for any of these steps."""
        return [search for search, served in self._serves.items() if not served.isdisjoint(steps)]

    def plan(self, sub_queries: Sequence[SubQuery], finds: Mapping[str, str]) -> None:
        """Add a step for each new sub-query of a plan or revision; ``finds`` has by its id what it is to find."""
        self.finds |= finds
        for one in sub_queries:
            if one.origin is not SubQueryOrigin.QUESTION:
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

    def served(self, searches: Iterable[str] | None = None) -> set[str]:
        """Return the steps for which these searches, by default all, provide results."""
        names = self._serves if searches is None else filter(self._serves.__contains__, searches)
        return set[str]().union(*map(self._serves.__getitem__, names))

    def answers_of(self, step: str, *, partial: bool = False) -> list[Finding]:
        """Return a step's answers, the best of each of its searches first; partial ones only if ``partial`` is True."""
        by_search = [self.found.get(search, []) for search in self.searches_of([step])]
        if not any(by_search):
            by_search = [self.found.get(step, [])]  # read before it was searched
        distinct: dict[str, Finding] = {}
        for rank in zip_longest(*by_search):
            for answer in filter(None, rank):
                if partial or answer.confidence is not Confidence.PARTIAL:
                    distinct.setdefault(answer.value.casefold(), answer)
        return list(distinct.values())[:MAX_BRANCHES]

    def take(self, search: str, answers: Sequence[Finding]) -> list[Finding]:
        """Store the answers of a search, unless earlier ones are surer; return the earlier answers they correct."""
        before = self.found.get(search, [])
        sure, sure_before = _surest(answers), _surest(before)
        if not answers or (sure < sure_before and (sure_before == _SURE[Confidence.STATED] or sure == 1)):
            return []
        self.found[search] = list(answers)
        same = {answer.value.casefold() for answer in answers} & {answer.value.casefold() for answer in before}
        return [] if same or sure_before == 1 else before

    def may_get(self, names: Iterable[str]) -> list[str]:
        """Return those of the sources that may get a query which a model writes now, after what it has read."""
        return [name for name in names if self.read <= self.learns[name]]

    def withhold(self, names: Iterable[str], what: str) -> None:
        """Record that these sources did not get the queries of a step or a revision."""
        for name in names:
            self.withheld[name][what] = None

    def _queries_and_sources(self, step: SubQuery, query: str) -> dict[str, tuple[str, list[str]]]:
        """Return each query of a step, by its normal form, with the sources that may get it."""
        # What the planner wrote may go to all, as it read no passages; a source gets it where it may not get more.
        texts = {normalize(text): text for text in ([query] if query else self._queries(step))}
        own = None if step.origin is SubQueryOrigin.REVISION else normalize(step.query)
        allowed = self.may_get(step.sources)
        held = [] if {*texts} == {own} else [name for name in step.sources if name not in allowed]
        self.withhold(held, step.id)
        made = {form: (text, step.sources if form == own else allowed) for form, text in texts.items()}
        if held and own is not None:
            made.setdefault(own, (step.query, held))
        return {form: one for form, one in made.items() if one[1]}

    def searches_for(self, step: SubQuery, number: int, started: Sequence[SubQuery], query: str = "") -> list[SubQuery]:
        """Return one search (of ``query``, if any) for each combination of the answers that a step depends on."""
        # What was searched before, or started in this round, is shared.
        known = {normalize(one.query): one for one in (*self.searched.values(), *started)}
        queries = self._queries_and_sources(step, query)
        alone = sum(form not in known for form in queries) == 1 and step.id not in self.searched
        branches = sum(one.part_of == step.id for one in self.searched.values())
        made: list[SubQuery] = []
        for form, (text, sources) in queries.items():
            if form in known:
                made += self._shared(step, known[form], sources, number)
            elif branches + (step.id in self.searched) < MAX_SEARCHES:
                change: dict[str, object] = {"query": text, "sources": sources, "wave": number}
                if not alone:
                    branches += 1
                    change |= {"id": f"{step.id}.{branches}", "part_of": step.id}
                made.append(step.model_copy(update=change))
        return made

    def _shared(self, step: SubQuery, same: SubQuery, sources: Sequence[str], number: int) -> list[SubQuery]:
        """Return the search that provides a step's results too, for the step's further sources, if there are any."""
        self._serves.setdefault(same.id, set()).add(step.id)
        new = [name for name in sources if name not in same.sources]
        filters = {name: step.filters[name] for name in new if name in step.filters}
        return [same.model_copy(update={"sources": new, "filters": filters, "wave": number})] if new else []

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
        """Whether each step has an answer that a passage states or implies, and each of its searches has findings."""
        made = [self.searches_of([step.id]) or [step.id] for step in self.chain()]
        return bool(made) and all(any(map(self.is_answered, one)) and all(map(self.found.get, one)) for one in made)

    @property
    def open(self) -> list[str]:
        """The ids of steps and searches, but those of the question itself, that are not answered."""
        return [name for name in {**self.planned, **self.searched} if name != "q0" and not self.is_answered(name)]

    def as_found(self, refs: Mapping[str, int], with_nodes: Collection[str]) -> dict[str, str]:
        """Return the text of each search of a step, with its findings, or a note unless it is ``with_nodes``, by id."""
        made = {}
        for step in self.chain():
            names = list(self.searches_of([step.id]))
            if step.id in self.found:
                names.append(step.id)
            for name in names:
                found = as_found(self.found.get(name, []), refs) or ("" if name in with_nodes else "nothing was found")
                query = self.searched.get(name, step).query
                made[name] = f"{query} -> {found}" if found else query
        return made

    def chain(self) -> list[FoundStep]:
        """Return the steps with their findings; each step comes after those that it depends on."""
        made = []
        for step in sorted(self.planned.values(), key=attrgetter("wave")):
            query = step.query
            if step.template:
                query = fill(step.template, {parent: self.words_for(parent) for parent in step.depends_on})
            made.append(FoundStep(step.id, query, self.answers_of(step.id, partial=True)))
        return made
