"""What each level of effort may spend: one dataclass, yours to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import ReasoningEffort

__all__ = ["DEFAULT_LIMITS", "EffortLimits"]


@dataclass(frozen=True, slots=True)
class EffortLimits:
    """The limits of one level of effort. Every one must be above 0.

    Args:
        sub_queries: Queries of the planner, the original question not counted; or intents.
        sources: Sources that one sub-query of the planner may go to; the question goes to all.
        documents_per_search: Documents of each (sub-query x source) search.
        documents_ranked: Fused documents that node postprocessors see.
        documents: Documents in the result, unless the request says a number.
        planning_seconds: Time of the planning call.
        search_seconds: Time of one search, unless the source says its own.
        history_messages: Messages before the question that the planner reads.
    """

    sub_queries: int = 3
    sources: int = 10
    documents_per_search: int = 10
    documents_ranked: int = 50
    documents: int = 10
    planning_seconds: float = 20.0
    search_seconds: float = 10.0
    history_messages: int = 10

    def __post_init__(self) -> None:
        """Refuse a limit that lets nothing through."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise ConfigurationError(f"EffortLimits.{field.name} must be above 0, got {value}")


DEFAULT_LIMITS: Final[Mapping[ReasoningEffort, EffortLimits]] = MappingProxyType(
    {
        ReasoningEffort.MINIMAL: EffortLimits(sub_queries=10),
        ReasoningEffort.LOW: EffortLimits(sub_queries=4),
        ReasoningEffort.MEDIUM: EffortLimits(sub_queries=8, documents=15, planning_seconds=30.0),
        ReasoningEffort.AUTO: EffortLimits(sub_queries=4),
    }
)
"""The limits of each effort, unless a retriever is given its own."""
