"""The plan: which queries are searched, where, and why."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.answer import QueryClassification
from llama_index_agentic_kb.schema.filters import FilterNode

__all__ = ["Confidence", "Finding", "QueryPlan", "SubQuery", "SubQueryOrigin"]


class SubQueryOrigin(StrEnum):
    """Where a sub-query comes from."""

    QUESTION = "question"
    """The question itself; it is always searched."""
    INTENT = "intent"
    """An intent of the request."""
    PLANNER = "planner"
    """The language model."""
    REVISION = "revision"
    """The language model, after it had read what the plan found."""


class SubQuery(Model):
    """One query of a plan."""

    id: str
    query: str = Field(min_length=1)
    sources: list[str]
    """Names of the sources that it goes to, in declaration order."""
    depends_on: list[str] = Field(default_factory=list)
    """Ids of the sub-queries whose findings it builds on."""
    origin: SubQueryOrigin = SubQueryOrigin.PLANNER
    filters: dict[str, FilterNode] = Field(default_factory=dict)
    """The planner's filter, by the name of each source that declares its fields; it joins the effective filter."""
    finds: str | None = None
    """What its answer will be, in the question's own words: "the director of Titanic"."""
    template: str | None = None
    """The query as it was planned, ``#q1`` standing for what q1 finds; None where it depends on nothing."""
    part_of: str | None = None
    """The planned sub-query of which this is a branch, with one of several answers put in."""
    wave: int = Field(default=1, ge=1)
    """The round of searches that it belongs to."""


class Confidence(StrEnum):
    """How certain a finding is."""

    STATED = "stated"
    """A passage says it in so many words."""
    IMPLIED = "implied"
    """It follows from the passages, or does not stand in the passage that was named for it."""


class Finding(Model):
    """What a sub-query found, as the model read it in the passages."""

    sub_query_id: str
    value: str = Field(min_length=1)
    """The answer, qualified as a page's title would have it."""
    confidence: Confidence = Confidence.STATED
    node_id: str | None = None
    """The passage that says it; None where it is unknown."""
    title: str | None = None
    """The title of its document."""


class QueryPlan(Model):
    """All queries of a request, in the order in which their evidence is interleaved."""

    sub_queries: list[SubQuery]
    warnings: list[str] = Field(default_factory=list)
    """What was wrong with the model's plan, and what was done about it."""
    classifications: list[QueryClassification] | None = None
    """The classes that were asked for and judged. None, where it was not classified, never means harmless."""
    labels: list[str] = Field(default_factory=list)
    """Which of the user's own labels fit the question."""

    @property
    def sources(self) -> list[str]:
        """Every source that a sub-query goes to, once, in order of appearance."""
        return list(dict.fromkeys(name for sub_query in self.sub_queries for name in sub_query.sources))
