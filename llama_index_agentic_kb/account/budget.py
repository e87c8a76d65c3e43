"""The budget of a request: its deadline, the size of its response, and the number of retries.

Each entry point sets it once per request in a context variable, and all code that runs for the request reads it.
"""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from llama_index_agentic_kb._aio import deadline_after, earliest

LAST_SHARE: Final = 0.05
LAST_SECONDS: Final = 0.5
"""The time reserved after the answer's deadline, to return a partial answer: this share of all, at most so much."""


@dataclass(slots=True, eq=False)
class RetryBudget:
    """Limits the retries of a request to a share of its calls, so that retries don't overload services. Thread-safe.

    A request with 4 calls may make 5 retries, one with 100 calls may make 20. Envoy's ``retry_budget`` works like this
    (share 20 %), and the Google SRE book (chapter 22) recommends it.

    Args:
        share: Number of retries per call.
        minimum: Number of retries that are always allowed.
    """

    share: float = 0.2
    minimum: int = 5
    calls: int = 0
    """Number of calls so far, without retries."""
    retries: int = 0
    """Number of retries so far."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_call(self) -> None:
        """Count a call's first attempt."""
        with self._lock:
            self.calls += 1

    def take(self) -> bool:
        """Count a retry if one is left, and return whether it is allowed."""
        with self._lock:
            left = self.retries < max(self.minimum, int(self.share * self.calls))
            self.retries += left
            return left


@dataclass(slots=True)
class Budget:
    """The limits of a request. All timeouts in the package are derived from it.

    Args:
        seconds: The time from now in which the response must be complete; None is no limit.
        answer_share: Share of the total time, 0 to 1, that is reserved for the answer.
        output_tokens: Maximum number of tokens of the extracted data or the answer; None is no limit.
        output_documents: Maximum number of documents in the response; None is no limit.
        retrieval_seconds: Maximum duration of the retrieval; if None, only ``deadline`` limits it.
        retries: Retry budget that all calls of the request share.
        started: ``time.monotonic()`` of the request's arrival.
    """

    seconds: float | None = None
    answer_share: float = 0.4
    output_tokens: int | None = None
    output_documents: int | None = None
    retrieval_seconds: float | None = None
    retries: RetryBudget = field(default_factory=RetryBudget)
    started: float = field(default_factory=time.monotonic)

    deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` by which the response must be complete; None is no limit, as with all deadlines."""
    answer_deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` at which the answer is stopped, so that a partial answer can be returned in time."""
    check_deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` at which the check of an answer is abandoned, in the middle of the reserve after it."""
    retrieval_deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` at which the retrieval ends, so that the answer's share of the time is left."""
    evidence_deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` by which the evidence must be complete, when half of the answer's share is left: so
    postprocessors have time even if searches or a reranker use all of the retrieval's."""

    def __post_init__(self) -> None:
        """Derive the deadlines."""
        if self.retrieval_seconds is not None:
            self.retrieval_deadline = self.started + self.retrieval_seconds
        if self.seconds is not None:
            share, reserve = self.answer_share * self.seconds, min(LAST_SECONDS, LAST_SHARE * self.seconds)
            self.deadline = end = self.started + self.seconds
            self.answer_deadline, self.check_deadline = end - reserve, end - reserve / 2
            self.evidence_deadline = end - share / 2
            self.retrieval_deadline = earliest(self.retrieval_deadline, end - share)

    @property
    def left(self) -> float | None:
        """Seconds until the deadline, at least 0; None if there is no deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def retrieval_share(self, part: float, seconds: float) -> float | None:
        """Return an early stage's deadline: ``seconds`` from now, or ``part`` (0 to 1) of the retrieval if earlier."""
        searching = self.retrieval_deadline
        share = None if searching is None else self.started + part * (searching - self.started)
        return earliest(share, deadline_after(seconds))


_current: ContextVar[Budget | None] = ContextVar("agentic_kb_budget", default=None)


def set_budget(budget: Budget) -> None:
    """Set the budget of the current context."""
    _current.set(budget)


def current_budget() -> Budget:
    """Return the budget of the current request; outside of a request, a new budget without limits."""
    return _current.get() or Budget()
