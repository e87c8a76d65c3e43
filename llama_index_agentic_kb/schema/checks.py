"""Questions about text that is brought along: is an answer grounded in these facts, how do these records rank."""

from __future__ import annotations

import re
from typing import Final

from pydantic import Field

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.answer import CITATION_THRESHOLD, UnitScore

__all__ = [
    "MAX_ANSWER_TOKENS",
    "MAX_FACTS",
    "MAX_FACT_CHARACTERS",
    "MAX_RECORDS",
    "Fact",
    "GroundingQuery",
    "RankQuery",
    "RankRecord",
    "answer_tokens",
]

MAX_FACTS: Final = 200
MAX_FACT_CHARACTERS: Final = 10_000
MAX_ANSWER_TOKENS: Final = 4_096
MAX_RECORDS: Final = 200
"""Google's limits, and ours."""

_TOKEN: Final = re.compile(r"\w+|[^\w\s]")


def answer_tokens(answer: str) -> int:
    """Count an answer's tokens as Google does: a word is one, and so is a full stop."""
    return sum(1 for _ in _TOKEN.finditer(answer))


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

    @property
    def text(self) -> str:
        """Title and content."""
        return f"{self.title}\n{self.content}".strip()


class RankQuery(Model):
    """How records rank for a query."""

    query: str = ""
    records: list[RankRecord] = Field(min_length=1)
    top_n: int | None = Field(default=None, ge=1)
    """None gives all."""
    model: str = ""
    ids_only: bool = False
    """Whether titles and contents are left out of the response."""
