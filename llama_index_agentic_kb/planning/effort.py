"""What each level of effort may spend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from llama_index_agentic_kb.account import Budget
from llama_index_agentic_kb.errors import ConfigurationError, by_value
from llama_index_agentic_kb.schema import EffortUse, ReasoningEffort

MAX_SOURCES: Final = 10
"""Sources that one planned sub-query may go to; the question itself goes to all."""

MAX_RANKED: Final = 50
"""Fused documents that rerankers and node postprocessors see: a cross-encoder reads 50 in about a second."""


@dataclass(frozen=True, slots=True)
class EffortLimits:
    """The limits of one level of effort. Every number but ``revisions`` must be above 0.

    Args:
        sub_queries: Planned queries, the original question not counted; or intents.
        rounds: Rounds of searches, the first counted: in a plan of 3 rounds a step may build twice on what was found
            before. With 1, every sub-query is independent, and no passage is read while searching.
        revisions: How often what was found is checked for gaps, and missing searches added.
        tokens: Tokens that the language model may read and write before the answer. Once they are spent no further
            call is made.
        searches: Searches of a request, one a (sub-query, source) pair. Those beyond are not made, and are reported.
        seconds: Time of the whole retrieval, where the request's own deadline is not earlier.
        documents_per_search: Documents of each ranked list of a search.
        documents: Documents in the result, unless the request says a number.
        planning_seconds: Time of the planning call, and of each call between rounds.
        search_seconds: Time of one search, unless the source has its own.
    """

    sub_queries: int = 3
    rounds: int = 1
    revisions: int = 0
    tokens: int = 20_000
    searches: int = 200
    seconds: float = 60.0
    documents_per_search: int = 50
    documents: int = 10
    planning_seconds: float = 20.0
    search_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Raise ``ConfigurationError`` for a limit that lets nothing through."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name != "revisions"):
                raise ConfigurationError(f"EffortLimits.{field.name} must be above 0, got {value}")


_DEEP: Final = EffortLimits(sub_queries=8, rounds=4, revisions=1, tokens=60_000, documents=15, planning_seconds=30.0)

DEFAULT_LIMITS: Final[Mapping[ReasoningEffort, EffortLimits]] = MappingProxyType(
    {
        ReasoningEffort.MINIMAL: EffortLimits(sub_queries=10),
        ReasoningEffort.LOW: EffortLimits(sub_queries=4),
        ReasoningEffort.MEDIUM: _DEEP,
        ReasoningEffort.AUTO: _DEEP,
    }
)
"""The limits of each effort, unless a retriever has its own."""


def as_effort(value: ReasoningEffort | str) -> ReasoningEffort:
    """Return an effort by its name.

    Raises:
        ConfigurationError: The name is unknown.
    """
    return by_value(ReasoningEffort, value, "effort")


def as_limits(own: Mapping[ReasoningEffort, EffortLimits] | None) -> dict[ReasoningEffort, EffortLimits]:
    """Return the limits of every effort: ``own`` where it has some, else the defaults.

    Raises:
        ConfigurationError: It is no mapping, or names an unknown effort.
    """
    if own is not None and not isinstance(own, Mapping):
        raise ConfigurationError("limits: expected a mapping from efforts to EffortLimits, {'low': EffortLimits(...)}")
    return {**DEFAULT_LIMITS, **{as_effort(effort): limits for effort, limits in (own or {}).items()}}


def planned_use(limits: EffortLimits, planned: bool, budget: Budget) -> EffortUse:
    """Return what a request may spend; where no model plans, there is one round, and no token is spent."""
    seconds = limits.seconds
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
