"""What asks the model while searching, and what a search gave."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb.account import Budget
from llama_index_agentic_kb.llm import Usage
from llama_index_agentic_kb.planning.findings import FindingsReader
from llama_index_agentic_kb.planning.planner import Planner
from llama_index_agentic_kb.planning.revision import Reviser
from llama_index_agentic_kb.schema import EffortUse, Finding, QueryPlan, SubQueryOrigin
from llama_index_agentic_kb.sources.fan_out import SourceSearch

__all__ = ["Agents", "Searched", "spent_use"]


@dataclass(frozen=True, slots=True)
class Agents:
    """What asks the language model: one object a kind of call."""

    planner: Planner
    findings: FindingsReader
    reviser: Reviser

    @property
    def prompts(self) -> dict[str, BasePromptTemplate]:
        """Their templates, by the names under which LlamaIndex's ``update_prompts`` changes them."""
        return {
            "planner_prompt": self.planner.template,
            "findings_prompt": self.findings.template,
            "revision_prompt": self.reviser.template,
        }

    def update(self, prompts: Mapping[str, BasePromptTemplate]) -> None:
        """Take other templates; those of other names are left alone."""
        self.planner.template = prompts.get("planner_prompt", self.planner.template)
        self.findings.template = prompts.get("findings_prompt", self.findings.template)
        self.reviser.template = prompts.get("revision_prompt", self.reviser.template)


@dataclass(slots=True)
class Searched:
    """What was searched, and what came of it.

    Args:
        plan: Every query that was searched, in the order in which their evidence is fused.
        lanes: One a (query x source), in the plan's order.
        findings: What sub-queries found, in the order in which it was read.
        usage: Tokens and calls of the language model.
        waves: Rounds of searches.
        revisions: How often gaps were looked for.
        planned: Whether a model planned.
        decision: Why it planned or did not, and why it stopped.
    """

    plan: QueryPlan
    lanes: list[SourceSearch] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    waves: int = 1
    revisions: int = 0
    planned: bool = False
    decision: str = ""
    signals: dict[str, float] | None = None


def spent_use(searched: Searched, budget: Budget, ranked: int) -> EffortUse:
    """Give what a search spent, in the terms of its limits.

    Args:
        searched: The search.
        budget: The request's; its clock tells the time.
        ranked: Documents that were ranked.
    """
    queries = [one for one in searched.plan.sub_queries if one.origin is not SubQueryOrigin.QUESTION]
    usage = searched.usage
    return EffortUse(
        sub_queries=len(queries),
        sources=max((len(one.sources) for one in queries), default=0),
        waves=searched.waves,
        revisions=searched.revisions,
        tokens=(usage.input_tokens or 0) + (usage.output_tokens or 0),
        seconds=round(time.monotonic() - budget.started, 3),
        documents_ranked=ranked,
    )
