"""Questions about text that is brought along: is an answer grounded in these facts, how do these records rank."""

from __future__ import annotations

from pydantic import Field

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.answer import UnitScore
from llama_index_agentic_kb.schema.answer_claims import CITATION_THRESHOLD

__all__ = ["Fact", "GroundingQuery", "RankQuery", "RankRecord"]


class Fact(Model):
    """A text that an answer may rest on."""

    text: str
    attributes: dict[str, str] = Field(default_factory=dict)
    """Part of the premise: "Wikipedia says ..." is grounded where the author is Wikipedia."""


class GroundingQuery(Model):
    """Whether an answer is grounded in facts."""

    answer: str
    facts: list[Fact] = Field(default_factory=list)
    citation_threshold: UnitScore = CITATION_THRESHOLD
    """The least score with which a fact is cited for a claim."""
    claim_scores: bool = False
    """Whether each claim's own score is wanted."""


class RankRecord(Model):
    """A record to rank, by its title, its content, or both."""

    id: str = ""
    title: str = ""
    content: str = ""
    score: UnitScore = 0.0


class RankQuery(Model):
    """How records rank for a query."""

    query: str = ""
    records: list[RankRecord] = Field(min_length=1)
    top_n: int | None = Field(default=None, ge=1)
    """None gives all."""
    model: str = ""
    ids_only: bool = False
    """Whether titles and contents are left out of the response."""
