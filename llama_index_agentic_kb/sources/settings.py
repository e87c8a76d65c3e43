"""Defaults of a source's settings, and the checks of what it is given."""

from __future__ import annotations

import math
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.guard.breaker import BreakerPolicy
from llama_index_agentic_kb.guard.retries import RetryPolicy

__all__ = ["SEARCH_BREAKER", "SEARCH_RETRIES", "STRAGGLER_GRACE", "check_numbers", "grace_of"]

STRAGGLER_GRACE: Final = 1.0
"""Seconds that a slow source is waited for when the others have answered; see ``sources.stragglers``."""

SEARCH_RETRIES: Final = RetryPolicy(attempts=2, first_wait=0.2, longest_wait=2.0)
"""A connection that was refused or reset, or a server that is busy, is asked once more."""

SEARCH_BREAKER: Final = BreakerPolicy()


def check_numbers(name: str, weight: float, top_k: int | None, timeout: float | None, concurrency: int) -> None:
    """Check a source's name and numbers.

    Raises:
        ConfigurationError: The name is empty, or a number is not above 0.
    """
    if not name.strip():
        raise ConfigurationError("a source's name must not be empty")
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigurationError(f"source {name!r}: weight must be above 0, got {weight}")
    for field, value in (("similarity_top_k", top_k), ("timeout", timeout), ("max_concurrency", concurrency)):
        if value is not None and value <= 0:
            raise ConfigurationError(f"source {name!r}: {field} must be above 0, got {value}")


def grace_of(name: str, grace: float | str | None, timeout: float | None) -> float | None:
    """Give a source's grace; by default, one that was given a time of its own has all of it.

    Raises:
        ConfigurationError: It is no number of seconds, nor None, nor "auto".
    """
    if grace == "auto":
        return STRAGGLER_GRACE if timeout is None else None
    if grace is not None and (isinstance(grace, str | bool) or not (math.isfinite(grace) and grace >= 0)):
        raise ConfigurationError(f"source {name!r}: straggler_grace must be 0 or more, None, or 'auto', got {grace!r}")
    return grace
