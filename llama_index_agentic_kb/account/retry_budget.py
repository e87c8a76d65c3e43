"""How many retries one request may make, over all its calls."""

from __future__ import annotations

import threading
from contextvars import ContextVar

from llama_index_agentic_kb.errors import ConfigurationError

__all__ = ["DEFAULT_LEAST", "DEFAULT_SHARE", "RetryBudget", "share_retries", "shared_retries"]

DEFAULT_SHARE = 0.2
"""Envoy's ``retry_budget.budget_percent`` of 20 %."""

DEFAULT_LEAST = 5


class RetryBudget:
    """Bounds the retries of a request by a share of its calls, so that trouble is not multiplied. Thread-safe.

    With a share of 0.2 and a least of 5, a request of four calls may retry five times, one of a hundred calls twenty
    times. Bounding by a share is Envoy's ``retry_budget``, and the Google SRE book's advice (chapter 22).

    Args:
        share: Retries per call, 0 or more.
        least: Retries that are allowed however few calls were made, 0 or more.

    Raises:
        ConfigurationError: A number is negative.
    """

    def __init__(self, share: float = DEFAULT_SHARE, least: int = DEFAULT_LEAST) -> None:
        if not (share >= 0 and least >= 0):
            raise ConfigurationError(f"a retry budget's share and least must be 0 or more, got {share} and {least}")
        self.share = share
        self.least = least
        self._calls = 0
        self._retries = 0
        self._lock = threading.Lock()

    @property
    def calls(self) -> int:
        """How many calls were made, retries not counted."""
        return self._calls

    @property
    def retries(self) -> int:
        """How many retries were made."""
        return self._retries

    def call(self) -> None:
        """Note a call's first attempt."""
        with self._lock:
            self._calls += 1

    def take(self) -> bool:
        """Take one retry, and tell whether there was one left."""
        with self._lock:
            left = self._retries < max(self.least, int(self.share * self._calls))
            self._retries += left
            return left


_shared: ContextVar[RetryBudget | None] = ContextVar("agentic_kb_retries", default=None)


def share_retries(budget: RetryBudget) -> None:
    """Make a budget the one of all calls that are made from here on in this context: a request does so once."""
    _shared.set(budget)


def shared_retries() -> RetryBudget:
    """Give the budget of the request that this code runs for; outside of one, a new one."""
    return _shared.get() or RetryBudget()
