"""Searches a plan while it is written, wave by wave: what depends on an answer waits for it, and for nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from llama_index_agentic_kb._aio import Call, start, wait
from llama_index_agentic_kb.account import ActivityLog, Budget
from llama_index_agentic_kb.evidence.options import EvidenceOptions
from llama_index_agentic_kb.planning.allowance import Allowance
from llama_index_agentic_kb.planning.answers import Answers
from llama_index_agentic_kb.planning.branching import Branching
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.findings import Findings, Wanted
from llama_index_agentic_kb.planning.graph import Candidate, PlanGraph
from llama_index_agentic_kb.planning.lanes import brings_news, favour, pointing
from llama_index_agentic_kb.planning.parsing import Proposal
from llama_index_agentic_kb.planning.planner import Planning
from llama_index_agentic_kb.planning.reading import MOST_PASSAGES, Reading, best_of
from llama_index_agentic_kb.planning.revision import Revision
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.planning.searched import Agents, Searched
from llama_index_agentic_kb.planning.under_way import SearchesUnderWay
from llama_index_agentic_kb.schema import (
    Confidence,
    Finding,
    ModelQueryPlanningActivity,
    QueryPlan,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.sources.fan_out import Batch, FanOut, SourceSearch

__all__ = ["WaveSearch"]


class WaveSearch:
    """The searches of one request that a model plans.

    Args:
        agents: What asks the language model.
        fan_out: Searches.
        scope: The question.
        candidates: The sources.
        limits: The effort's.
        budget: The request's.
        log: The request's account.
        options: How ranked lists are fused.
        stop_at_nothing_new: Whether a wave that brings no new document among its best ends the search (auto effort).
    """

    def __init__(
        self,
        agents: Agents,
        fan_out: FanOut,
        scope: Scope,
        candidates: Sequence[Candidate],
        limits: EffortLimits,
        budget: Budget,
        log: ActivityLog,
        options: EvidenceOptions,
        *,
        stop_at_nothing_new: bool = False,
    ) -> None:
        self._agents = agents
        self._scope = scope
        self._candidates = candidates
        self._limits = limits
        self._budget = budget
        self._log = log
        self._options = options
        self._stop_at_nothing_new = stop_at_nothing_new
        names = [candidate.name for candidate in candidates]
        self._searches = SearchesUnderWay(fan_out, names, budget.retrieval_deadline)
        self._searched = self._searches.sub_queries
        self._answers = Answers(limits.branches)
        self._waiting: dict[str, SubQuery] = {}
        self._planned: dict[str, SubQuery] = {}
        self._branching = Branching(self._planned, self._searched, self._answers, limits.branches)
        self._early: list[SourceSearch] = []
        self._result = Searched(QueryPlan(sub_queries=[]), planned=True)
        self._allowance = Allowance(limits, budget, self._result.usage)

    async def search(self, question: QueryPlan, begun: Batch | None = None) -> Searched:
        """Plan and search until everything is found, spent or settled.

        Args:
            question: The plan without a model; it is searched while the model plans.
            begun: Its search, where it was begun already.
        """
        planning = start(self._plan())
        if begun is None:
            await self._begin(question.sub_queries)
        else:
            self._searches.note(question.sub_queries, begun)
            self._note(question.sub_queries)
        await wait([planning])
        planned: Planning = planning.result()
        self._allowance.account(planned.usage, planned.error)
        self._result.plan.warnings = planned.plan.warnings
        self._result.plan.classifications = planned.plan.classifications
        self._result.plan.labels = planned.plan.labels
        self._planned.update((one.id, one) for one in planned.plan.sub_queries)
        self._waiting = {one.id: one for one in planned.plan.sub_queries if one.depends_on}
        await self._begin_open()
        await self._follow()
        await self._revise()
        await self._searches.finished()
        return self._whole()

    async def _plan(self) -> Planning:
        return await self._agents.planner.recorded_plan(
            self._scope,
            self._candidates,
            self._limits,
            deadline=self._allowance.call_deadline,
            log=self._log,
            begin=self._begin,
        )

    # -- searches ------------------------------------------------------------------------------------------------

    async def _begin(self, sub_queries: Sequence[SubQuery]) -> None:
        """Start to search; those ready together are embedded in one batch."""
        if sub_queries:
            self._note(sub_queries)
            await self._searches.begin(sub_queries)

    def _note(self, sub_queries: Sequence[SubQuery]) -> None:
        for one in sub_queries:
            self._answers.add_search(one)
            self._result.waves = max(self._result.waves, one.wave)

    async def _begin_open(self) -> None:
        """Search what builds on nothing, and was not begun while the plan was written."""
        begun: list[SubQuery] = []
        for one in self._planned.values():
            if one.id not in self._searched and one.id not in self._waiting:
                begun += self._branching.of(one, 1, begun)
        await self._begin(begun)

    # -- waves ---------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Search what depends on answers, as its answers are read."""
        wave = 1
        while self._waiting and wave < self._limits.waves and self._may_ask():
            wave += 1
            steps = self._steps()
            await self._searches.arrived(self._answers.searches_of(steps))
            if self._stop_at_nothing_new and wave > 2 and not brings_news(self._searches.lanes, wave - 1):  # noqa: PLR2004 (a first wave is)
                self._decide(f"wave {wave - 1} brought nothing new")
                break
            if not self._may_ask():
                break
            findings = await self._find(steps, wave)
            self._allowance.account(findings.usage, findings.error)
            if findings.error is not None:
                self._warn(
                    "what the searches found could not be read; the rest is searched in the question's own words"
                )
                break
            await self._begin_children(wave, read=steps)
        if self._waiting:
            await self._give_up_waiting(wave)

    def _steps(self) -> list[str]:
        """Give the planned sub-queries that were searched, have no answer yet, and are waited for."""
        wanted = {parent for child in self._waiting.values() for parent in child.depends_on}
        return [one for one in self._planned if one in wanted - self._waiting.keys() and not self._answers.of(one)]

    async def _find(self, steps: Sequence[str], wave: int) -> Findings:
        """Read what the steps found; children begin as soon as their parents have answers."""
        searches = self._answers.searches_of(steps)
        wanted = Wanted(
            {name: self._searched[name].query for name in searches},
            {one.id: one.template or one.query for one in self._waiting.values()},
            {name: answers for name, answers in self._answers.found.items() if answers},
        )

        async def found(name: str, answers: list[Finding]) -> None:
            self._take(name, answers)
            await self._begin_children(wave)
            await self._begin_again(name, wave)

        choose = partial(self._reading, searches)
        reading = await Call(sync=choose, what="choosing passages")
        return await self._agents.findings.read(
            self._scope.question,
            wanted,
            reading,
            found,
            most=self._limits.branches,
            deadline=self._allowance.call_deadline,
            log=self._log,
        )

    def _take(self, name: str, answers: list[Finding]) -> None:
        """Keep a step's answers; what waits is answered early, and not searched, only where a passage says so."""
        if name in self._waiting:
            answers = [answer for answer in answers if answer.confidence is Confidence.STATED and answer.node_id]
            if answers:
                self._early += pointing(self._waiting.pop(name), answers, self._searches.lanes, self._log)
        before = self._answers.take(name, answers)
        if before:
            told = "; ".join(answer.value for answer in answers)
            self._warn(f"{name} was read again: {told}, not {'; '.join(answer.value for answer in before)}")

    async def _begin_children(self, wave: int, read: Collection[str] = ()) -> None:
        """Search the waiting sub-queries whose parents all have answers, or were read without giving one.

        What has no answer is searched in the question's own words, never as a blank.
        """
        begun: list[SubQuery] = []
        while ready := [one for one in self._waiting.values() if self._is_ready(one, read)]:
            for child in ready:
                del self._waiting[child.id]
                begun += self._branching.of(child, wave, begun)
                for parent in child.depends_on:
                    if not self._answers.of(parent):
                        self._warn(f"{parent} found no answer; {child.id} was searched in the question's own words")
        await self._begin(begun)

    def _is_ready(self, child: SubQuery, read: Collection[str]) -> bool:
        return all(self._answers.of(parent) or parent in read for parent in child.depends_on)

    async def _begin_again(self, name: str, wave: int) -> None:
        """Search what has begun also with the answers that came later: another branch's, or one that was corrected."""
        steps = set(self._answers.steps_of(name))
        children = [one for one in self._planned.values() if steps & {*one.depends_on}]
        begun: list[SubQuery] = []
        for child in children:
            if self._answers.searches_of([child.id]):
                begun += self._branching.of(child, wave, begun)
        await self._begin(begun)

    async def _give_up_waiting(self, wave: int) -> None:
        """Search what waits still, with what is known by now, and else in the question's own words."""
        if wave >= self._limits.waves:
            self._warn(
                f"{len(self._waiting)} sub-queries lie deeper than the effort goes (EffortLimits.waves is "
                f"{self._limits.waves}); they were searched in the question's own words"
            )
        begun: list[SubQuery] = []
        for child in self._waiting.values():
            begun += self._branching.of(child, min(wave + 1, self._limits.waves), begun)
        self._waiting.clear()
        await self._begin(begun)

    # -- gaps ----------------------------------------------------------------------------------------------------

    async def _revise(self) -> None:
        """Look for gaps in what was found, and search what is missing."""
        while self._result.revisions < self._limits.revisions and self._may_ask():
            await self._searches.arrived(self._searched)
            last = self._result.waves
            if self._stop_at_nothing_new and last > 1 and not brings_news(self._searches.lanes, last):
                self._decide(f"wave {last} brought nothing new")
                return
            if not self._may_ask():
                return
            self._result.revisions += 1
            revision = await self._look_for_gaps()
            self._allowance.account(revision.usage, revision.error)
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
            await self._begin(added)

    async def _look_for_gaps(self) -> Revision:
        choose = partial(self._reading, list(self._searched)[::-1])
        reading = await Call(sync=choose, what="choosing passages")
        return await self._agents.reviser.revise(
            self._scope.question,
            self._told(),
            reading,
            self._candidates,
            most=self._limits.sub_queries,
            deadline=self._allowance.call_deadline,
            log=self._log,
        )

    def _added(self, proposals: Sequence[Proposal], wave: int) -> list[SubQuery]:
        """Give the searches of a revision that are new, or go to further sources; what was planned stays as it is."""
        prefix = f"r{self._result.revisions}."
        known = QueryPlan(sub_queries=[one.model_copy(deep=True) for one in self._searched.values()])
        graph = PlanGraph(known, self._candidates, self._limits, prefix=prefix)
        added = []
        for number, one in enumerate(graph.add(proposals), start=1):
            fields: dict[str, object] = {"wave": wave, "origin": SubQueryOrigin.REVISION}
            if one.id in self._searched:
                fields |= {"id": f"{prefix}again{number}", "filters": {}, "depends_on": []}
                fields |= {"part_of": None, "template": None}
            added.append(one.model_copy(update=fields))
        return added

    def _told(self) -> str:
        """Give what was searched and found, one search a line."""
        lines = []
        for one in self._searched.values():
            values = "; ".join(answer.value for answer in self._answers.found.get(one.id, []))
            lines.append(f"- {one.query}" + (f" -> {values}" if values else ""))
        return "\n".join(lines)

    # -- what the model reads --------------------------------------------------------------------------------------

    def _reading(self, first: Sequence[str]) -> Reading:
        """Give the best passages of all searches, those of some sub-queries first."""
        share = max(1, MOST_PASSAGES // max(1, len(first)))
        reading = Reading(min(share, self._limits.passages), self._limits.passage_words)
        by_query: dict[str, list[SourceSearch]] = {}
        for lane in self._searches.lanes:
            by_query.setdefault(lane.sub_query.id, []).append(lane)
        for name in dict.fromkeys([*first, *by_query]):
            lanes = by_query.get(name, [])
            if lanes:
                reading.add(lanes[0].sub_query.query, best_of(lanes, self._options))
        return reading

    # -- account -------------------------------------------------------------------------------------------------

    def _may_ask(self) -> bool:
        """Whether the model may be called again; what is lacking is told."""
        if self._allowance.model_lost:
            return False
        lacking = self._allowance.lacking
        if lacking is not None:
            self._warn(lacking)
        return lacking is None

    def _warn(self, text: str) -> None:
        if text not in self._result.plan.warnings:
            self._result.plan.warnings.append(text)

    def _decide(self, text: str) -> None:
        self._result.decision = "; ".join(part for part in (self._result.decision, text) if part)

    def _whole(self) -> Searched:
        self._result.plan.sub_queries = list(self._searched.values())
        self._result.findings = list(self._answers)
        lanes = self._searches.lanes
        favour(lanes, self._result.findings)
        self._result.lanes = [*lanes, *self._early]
        self._tell_warnings()
        return self._result

    def _tell_warnings(self) -> None:
        """Put into the plan's record what came out after it was closed."""
        warning = "; ".join(self._result.plan.warnings) or None
        for record in self._log.records:
            told = isinstance(record, ModelQueryPlanningActivity) and record.purpose == "plan"
            if told and record.warning != warning:
                self._log.amend(record, warning=warning)
