"""How a request is searched: as it is, planned at once, or planned only where its own evidence is weak."""

from __future__ import annotations

from dataclasses import dataclass

from llama_index_agentic_kb._aio import wait
from llama_index_agentic_kb.account import ActivityLog, Budget
from llama_index_agentic_kb.evidence.options import EvidenceOptions
from llama_index_agentic_kb.planning.classification import classify, wanted
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.graph import Candidate, plain_plan
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.planning.searched import Agents, Searched
from llama_index_agentic_kb.planning.signals import evidence_strength, is_simple
from llama_index_agentic_kb.planning.waves import WaveSearch
from llama_index_agentic_kb.schema import QueryPlan, ReasoningEffort
from llama_index_agentic_kb.sources.fan_out import FanOut

__all__ = ["Strategy"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How hard a request is thought about.

    Args:
        effort: The effort that is asked for.
        limits: Its limits.
        agents: What asks the language model; None where there is no model, and so no plan.
        options: How ranked lists are fused for the model to read.
    """

    effort: ReasoningEffort
    limits: EffortLimits
    agents: Agents | None
    options: EvidenceOptions

    async def search(self, scope: Scope, fan_out: FanOut, budget: Budget, log: ActivityLog) -> Searched:
        """Search the question as it is, or what a model plans; the question itself is searched while it plans.

        A question that is to be classified is planned, however simple it is and however strong its evidence: the
        planner's call tells its class. At minimal effort, with intents and without a model it stays unclassified.

        Args:
            scope: The question.
            fan_out: Searches the selected sources.
            budget: The request's.
            log: The request's account.
        """
        candidates = [
            Candidate(name, chosen.source.description, chosen.always, chosen.source.filterable)
            for name, chosen in fan_out.selected.items()
        ]
        plain = plain_plan(scope, candidates, self.limits)
        if self.agents is None or self.effort is ReasoningEffort.MINIMAL or scope.intents:
            classify(plain, scope.classification, None)
            return Searched(plain, (await fan_out.search(plain)))
        classified = wanted(scope.classification) is not None
        if self.limits.skip_simple and not classified and is_simple(scope):
            decision = "not planned: a simple question"
            return Searched(plain, (await fan_out.search(plain)), decision=decision)
        auto = self.effort is ReasoningEffort.AUTO
        waves = WaveSearch(
            self.agents,
            fan_out,
            scope,
            candidates,
            self.limits,
            budget,
            log,
            self.options,
            stop_at_nothing_new=auto,
        )
        if not auto:
            return await waves.search(plain)
        if classified:
            return _because("planned: the question is to be classified", (await waves.search(plain)))
        return await self._search_first(waves, plain, scope, fan_out)

    async def _search_first(self, waves: WaveSearch, plain: QueryPlan, scope: Scope, fan_out: FanOut) -> Searched:
        """Search without planning, and plan only where what was found is weak."""
        first = await fan_out.begin(plain)
        await wait([first.whole])
        strength = evidence_strength(scope, first.lanes, self.options)
        if strength.sufficient:
            return Searched(plain, first.lanes, signals=strength.signals, decision=strength.reason)
        searched = await waves.search(plain, first)
        searched.signals = strength.signals
        return _because(strength.reason, searched)


def _because(reason: str, searched: Searched) -> Searched:
    """Tell why a search was planned, before why it stopped."""
    searched.decision = "; ".join(part for part in (reason, searched.decision) if part)
    return searched
