"""The plan: which queries are searched, where, and why."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from llama_index_agentic_kb.schema._model import Model

__all__ = ["QueryPlan", "SubQuery", "SubQueryOrigin"]


class SubQueryOrigin(StrEnum):
    """Where a sub-query comes from."""

    QUESTION = "question"
    """The question itself; it always stays as a lane."""
    INTENT = "intent"
    """An intent of the request."""
    PLANNER = "planner"
    """The language model."""


class SubQuery(Model):
    """One query of a plan."""

    id: str
    query: str = Field(min_length=1)
    sources: list[str]
    """Names of the sources that it goes to, in declaration order."""
    depends_on: list[str] = Field(default_factory=list)
    """Ids of the sub-queries whose findings it builds on."""
    origin: SubQueryOrigin = SubQueryOrigin.PLANNER


class QueryPlan(Model):
    """All queries of a request, in the order in which their evidence is interleaved."""

    sub_queries: list[SubQuery]
    warnings: list[str] = Field(default_factory=list)
    """What was wrong with the model's plan, and what was done about it."""

    @property
    def sources(self) -> list[str]:
        """Every source that a sub-query goes to, once, in order of appearance."""
        return list(dict.fromkeys(name for sub_query in self.sub_queries for name in sub_query.sources))
