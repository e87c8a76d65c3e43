"""One budget a request: a deadline, how much it may return, and how many retries its calls may make.

A door sets it once in the context (``set_budget``); whatever the request calls reads it there (``current_budget``).
"""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from llama_index_agentic_kb._aio import deadline_after, earliest
from llama_index_agentic_kb.errors import ConfigurationError

DEFAULT_SHARE: Final = 0.2
"""Retries per call: Envoy's ``retry_budget.budget_percent`` of 20 %."""

MIN_RETRIES: Final = 5
"""Retries of a request, however few calls it makes."""

LAST_SHARE: Final = 0.05
"""The part of the whole time that is kept after the answer, to give what arrived where it came too late ..."""

LAST_SECONDS: Final = 0.5
"""... and seconds of it at most."""


class RetryBudget:
    """Bounds the retries of a request by a share of its calls, so that trouble is not multiplied. Thread-safe.

    With a share of 0.2 and a minimum of 5, a request of four calls may retry five times, one of a hundred calls twenty
    times. Bounding by a share is Envoy's ``retry_budget``, and the Google SRE book's advice (chapter 22).

    Args:
        share: Retries per call, 0 or more.
        minimum: Retries that are allowed however few calls were made, 0 or more.

    Raises:
        ConfigurationError: A number is negative.
    """

    def __init__(self, share: float = DEFAULT_SHARE, minimum: int = MIN_RETRIES) -> None:
        if not (share >= 0 and minimum >= 0):
            raise ConfigurationError(f"a retry budget's share and minimum must be 0 or more: {share}, {minimum}")
        self.share = share
        self.minimum = minimum
        self.calls = 0
        """How many calls were made, retries not counted."""
        self.retries = 0
        """How many retries were made."""
        self._lock = threading.Lock()

    def count_call(self) -> None:
        """Count a call's first attempt."""
        with self._lock:
            self.calls += 1

    def take(self) -> bool:
        """Take one retry, and return whether there was one left."""
        with self._lock:
            left = self.retries < max(self.minimum, int(self.share * self.calls))
            self.retries += left
            return left


@dataclass(frozen=True, slots=True)
class Budget:
    """What a request may spend. Every wait in the package takes its timeout from it.

    Args:
        started: ``time.monotonic()`` of the request's arrival.
        deadline: ``time.monotonic()`` by which the response must be there; None is no limit.
        answer_share: The part of the time, 0 to 1, that is kept for the answer.
        output_tokens: Tokens of the extracted data or the answer; None is no limit.
        output_documents: Documents in the response; None is no limit.
        retrieval_seconds: Time that searching may take at most; None is no limit of its own.
        retries: How many retries all calls of the request may make together.
    """

    started: float
    deadline: float | None = None
    answer_share: float = 0.4
    output_tokens: int | None = None
    output_documents: int | None = None
    retrieval_seconds: float | None = None
    retries: RetryBudget = field(default_factory=RetryBudget)

    @classmethod
    def start(
        cls,
        seconds: float | None = None,
        *,
        answer_share: float = 0.4,
        output_tokens: int | None = None,
        output_documents: int | None = None,
        retrieval_seconds: float | None = None,
        retries: RetryBudget | None = None,
    ) -> Budget:
        """Start the clock: the deadline is ``seconds`` from now, None is no deadline."""
        now = time.monotonic()
        deadline = None if seconds is None else now + seconds
        limits = (output_tokens, output_documents, retrieval_seconds)
        return cls(now, deadline, answer_share, *limits, retries or RetryBudget())

    @property
    def left(self) -> float | None:
        """Seconds until the deadline, at least 0; None is no limit."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def answer_deadline(self) -> float | None:
        """``time.monotonic()`` at which the answer is given up, so that what arrived can still be given in time."""
        if self.deadline is None:
            return None
        return self.deadline - min(LAST_SECONDS, LAST_SHARE * (self.deadline - self.started))

    @property
    def check_deadline(self) -> float | None:
        """``time.monotonic()`` at which an answer's check is given up: half of what is kept after the answer."""
        answer = self.answer_deadline
        return None if answer is None or self.deadline is None else (answer + self.deadline) / 2

    @property
    def retrieval_deadline(self) -> float | None:
        """``time.monotonic()`` at which searching ends, so that the answer keeps its share."""
        longest = None if self.retrieval_seconds is None else self.started + self.retrieval_seconds
        return earliest(longest, self._before_answer(1.0))

    @property
    def evidence_deadline(self) -> float | None:
        """``time.monotonic()`` at which the evidence must stand: half of the answer's share after that of searching.

        Where searches or a reranker hang, nothing would else be left for the postprocessors that come after them.
        """
        return self._before_answer(0.5)

    def _before_answer(self, part: float) -> float | None:
        """Return the time at which ``part`` of the answer's share is left."""
        if self.deadline is None:
            return None
        return self.deadline - part * self.answer_share * (self.deadline - self.started)

    def retrieval_share(self, part: float, seconds: float) -> float | None:
        """Return the deadline of what comes before searching: ``seconds``, or ``part`` (0 to 1) of its time if less."""
        searching = self.retrieval_deadline
        share = None if searching is None else self.started + part * (searching - self.started)
        return earliest(share, deadline_after(seconds))

    def retrieval_stage(self, seconds: float | None) -> float | None:
        """Return the deadline of a stage of the retrieval that may take ``seconds`` from now."""
        return earliest(self.retrieval_deadline, deadline_after(seconds))


_current: ContextVar[Budget | None] = ContextVar("agentic_kb_budget", default=None)


def set_budget(budget: Budget) -> None:
    """Make a budget the one of all that is called from here on in this context: a door does so once a request."""
    _current.set(budget)


def current_budget() -> Budget:
    """Return the budget of the request that this code runs for; outside of one, a new one without limits."""
    return _current.get() or Budget.start()
