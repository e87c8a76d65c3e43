"""Limits: what each level of reasoning effort may spend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError, by_value
from llama_index_agentic_kb.schema import ReasoningEffort

MAX_SOURCES: Final = 10  # of one planned sub-query; the question itself is searched in all sources
MAX_RANKED: Final = 50  # fused documents passed to rerankers and postprocessors; a cross-encoder scores 50 in about 1 s


@dataclass(frozen=True, slots=True)
class EffortLimits:
    """The limits of one level of effort. Every limit except ``revisions`` must be above 0.

    Args:
        sub_queries: Maximum number of planned sub-queries (without the original question), or of intents.
        rounds: Maximum number of search rounds. With 3, a sub-query may depend on answers found in two earlier ones.
            With 1, all sub-queries are independent and the model reads no passages.
        revisions: How often the model checks the evidence for gaps. Each revision may add one round to ``rounds``,
            and ``sub_queries`` further searches.
        tokens: Input and output tokens of the language model before the answer, after which it is not called again.
        searches: Maximum number of searches, one per (sub-query, source) pair. Further ones are skipped and reported.
        seconds: Time limit of the whole retrieval, unless the request's deadline is earlier.
        documents_per_search: Maximum number of documents in each ranked list of a search.
        documents: Number of documents in the result, unless the request sets one.
        planning_seconds: Time limit of the planning call, and of each model call between rounds.
        search_seconds: Time limit of one search, unless the source sets its own.
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
        """Raise ``ConfigurationError`` if a limit is negative, or 0 where it must be positive."""
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
"""Default limits of each level of effort; a retriever can override them."""


def as_effort(value: ReasoningEffort | str) -> ReasoningEffort:
    """Return the level of effort with this name; raise ``ConfigurationError`` if it is unknown."""
    return by_value(ReasoningEffort, value, "effort")


def as_limits(own: Mapping[ReasoningEffort, EffortLimits] | None) -> dict[ReasoningEffort, EffortLimits]:
    """Return the limits of every level of effort: the entries of ``own``, else the defaults."""
    if own is not None and not isinstance(own, Mapping):
        raise ConfigurationError("limits: expected a mapping from efforts to EffortLimits, {'low': EffortLimits(...)}")
    return {**DEFAULT_LIMITS, **{as_effort(effort): limits for effort, limits in (own or {}).items()}}
