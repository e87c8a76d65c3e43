"""What each level of effort may spend: one dataclass, yours to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from llama_index_agentic_kb.account import Budget
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import EffortUse, ReasoningEffort

__all__ = ["DEFAULT_LIMITS", "EffortLimits", "as_effort", "as_limits", "planned_use"]


@dataclass(frozen=True, slots=True)
class EffortLimits:
    """The limits of one level of effort. Every number must be above 0.

    Args:
        sub_queries: Queries of the planner, the original question not counted; or intents.
        sources: Sources that one sub-query of the planner may go to; the question goes to all.
        waves: Rounds of searches, the first counted: a plan of 3 may build twice on what was found before. 1 makes
            every sub-query independent, and no passage is read while searching.
        branches: Searches that one sub-query may become where what it builds on has several answers (three
            directors, two candidates).
        revisions: How often what was found is checked for gaps, and missing searches added.
        tokens: Tokens of the language model, read and written, after which no further call is begun before the
            answer.
        searches: Searches of a request in all, (sub-query x source) each; those beyond are not made, and told.
        seconds: Time of the whole retrieval, where the request's own deadline is not earlier.
        documents_per_search: Documents of each ranked list of a (sub-query x source) search.
        documents_ranked: Fused documents that rerankers and node postprocessors see.
        documents: Documents in the result, unless the request says a number.
        passages: Passages of each sub-query that the model reads between waves.
        passage_words: Words of such a passage, around what the sub-query asks for.
        planning_seconds: Time of the planning call, and of each call between waves.
        search_seconds: Time of one search, unless the source says its own.
        history_messages: Messages before the question that the planner reads.
        skip_simple: Whether a question that is recognised as simple goes straight to search, without a model.
    """

    sub_queries: int = 3
    sources: int = 10
    waves: int = 1
    branches: int = 3
    revisions: int = 0
    tokens: int = 20_000
    searches: int = 200
    seconds: float = 60.0
    documents_per_search: int = 50
    documents_ranked: int = 50
    documents: int = 10
    passages: int = 5
    passage_words: int = 110
    planning_seconds: float = 20.0
    search_seconds: float = 10.0
    history_messages: int = 10
    skip_simple: bool = False

    def __post_init__(self) -> None:
        """Refuse a limit that lets nothing through."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("revisions", "skip_simple") else 1e-9
            if value < least:
                raise ConfigurationError(f"EffortLimits.{field.name} must be above 0, got {value}")


DEFAULT_LIMITS: Final[Mapping[ReasoningEffort, EffortLimits]] = MappingProxyType(
    {
        ReasoningEffort.MINIMAL: EffortLimits(sub_queries=10),
        ReasoningEffort.LOW: EffortLimits(sub_queries=4),
        ReasoningEffort.MEDIUM: EffortLimits(
            sub_queries=8, waves=4, revisions=1, tokens=60_000, documents=15, planning_seconds=30.0
        ),
        ReasoningEffort.AUTO: EffortLimits(
            sub_queries=8, waves=4, revisions=1, tokens=60_000, documents=15, planning_seconds=30.0, skip_simple=True
        ),
    }
)
"""The limits of each effort, unless a retriever is given its own."""


def as_effort(value: ReasoningEffort | str) -> ReasoningEffort:
    """Give an effort by its name.

    Raises:
        ConfigurationError: There is none of that name.
    """
    try:
        return ReasoningEffort(value)
    except ValueError:
        known = ", ".join(effort.value for effort in ReasoningEffort)
        raise ConfigurationError(f"effort: {value!r} is unknown; known are {known}") from None


def as_limits(given: Mapping[ReasoningEffort, EffortLimits] | None) -> dict[ReasoningEffort, EffortLimits]:
    """Give the limits of every effort: those given, else the defaults.

    Raises:
        ConfigurationError: It is no mapping, or names an effort that there is not.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigurationError("limits: give a mapping from efforts to EffortLimits, {'low': EffortLimits(...)}")
    return {**DEFAULT_LIMITS, **{as_effort(effort): limits for effort, limits in (given or {}).items()}}


def planned_use(limits: EffortLimits, planned: bool, budget: Budget) -> EffortUse:
    """Give what a request may spend, to be reported beside what it spent.

    Args:
        limits: The effort's.
        planned: Whether a model plans; else there is one wave and no token.
        budget: The request's own limits.
    """
    seconds = limits.seconds
    if budget.retrieval_deadline is not None:
        seconds = min(seconds, budget.retrieval_deadline - budget.started)
    return EffortUse(
        sub_queries=limits.sub_queries if planned else 0,
        sources=limits.sources,
        waves=limits.waves if planned else 1,
        revisions=limits.revisions if planned else 0,
        tokens=limits.tokens if planned else 0,
        seconds=round(seconds, 3),
        documents_ranked=limits.documents_ranked,
    )
