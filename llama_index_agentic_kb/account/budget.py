"""One budget a request: a deadline, and how much of everything it may give back."""

from __future__ import annotations

import time
from dataclasses import dataclass

from llama_index_agentic_kb._flow import deadline_after, earliest

__all__ = ["Budget"]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a request may spend. Every wait in the house takes its timeout from it.

    Args:
        started: ``time.monotonic()`` of the request's arrival.
        deadline: ``time.monotonic()`` by which the response must be there; None is no limit.
        answer_share: The part of the time, 0 to 1, that is kept for the answer.
        output_tokens: Tokens of the extracted data or the answer; None is no limit.
        output_documents: Documents in the response; None is no limit.
        retrieval_seconds: Time that searching may take at most; None is no limit of its own.
    """

    started: float
    deadline: float | None = None
    answer_share: float = 0.4
    output_tokens: int | None = None
    output_documents: int | None = None
    retrieval_seconds: float | None = None

    @classmethod
    def start(
        cls,
        seconds: float | None = None,
        *,
        answer_share: float = 0.4,
        output_tokens: int | None = None,
        output_documents: int | None = None,
        retrieval_seconds: float | None = None,
    ) -> Budget:
        """Start the clock: the deadline is ``seconds`` from now, None is no deadline."""
        now = time.monotonic()
        deadline = None if seconds is None else now + seconds
        return cls(now, deadline, answer_share, output_tokens, output_documents, retrieval_seconds)

    @property
    def left(self) -> float | None:
        """Seconds until the deadline, at least 0; None is no limit."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def retrieval_deadline(self) -> float | None:
        """``time.monotonic()`` at which searching ends, so that the answer keeps its share."""
        longest = None if self.retrieval_seconds is None else self.started + self.retrieval_seconds
        if self.deadline is None:
            return longest
        return earliest(longest, self.deadline - self.answer_share * (self.deadline - self.started))

    def retrieval_stage(self, seconds: float | None) -> float | None:
        """Give the deadline of a stage of the retrieval that may take ``seconds`` from now."""
        return earliest(self.retrieval_deadline, deadline_after(seconds))
