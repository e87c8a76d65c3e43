"""What comes of an ``AnswerQuery``: the answer, the session that keeps it, and the account of how it came about."""

from __future__ import annotations

from pydantic import Field

from llama_index_agentic_kb.schema.answer_pieces import WholePiece
from llama_index_agentic_kb.schema.response import MissingPart, RetrievalResponse

__all__ = ["AnswerResponse"]


class AnswerResponse(WholePiece):
    """An answer with what belongs to it."""

    account: RetrievalResponse | None = None
    """The activity, the plan, and the ledger of the answer's claims; None where nothing was searched."""
    missing: list[MissingPart] = Field(default_factory=list)
    """What was wanted and could not be had, the sub-questions without evidence among it."""
    warnings: list[str] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.answer.text

    def __str__(self) -> str:
        """Give the answer's text."""
        return self.answer.text
