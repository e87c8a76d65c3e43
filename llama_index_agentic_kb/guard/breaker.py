"""A circuit breaker: what failed again and again is left alone for a while, then tried with one call.

Closed, calls pass; open, they are refused at once; half open, one probe passes and decides (Nygard, "Release It!",
2007; Fowler, "CircuitBreaker", 2014).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from llama_index_agentic_kb._aio.threads import reset_after_fork
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import AgenticKBError, CircuitOpenError, ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.guard.retries import status_of

__all__ = ["BreakerPolicy", "CircuitBreaker", "CircuitState", "Passage", "is_outage"]

OUTAGE_STATUSES: Final = frozenset({408, 425, 429})
"""HTTP statuses below 500 that speak of the server and not of the request."""


class CircuitState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "halfOpen"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a circuit opens, and for how long.

    Args:
        failures: Failures in a row that open it. Default 5.
        failure_rate: Share of the last ``window`` calls that failed which opens it, 0 to 1. Default 0.5.
        window: Calls that the rate is worked out over; fewer open nothing by their rate. Default 20.
        cool_down: Seconds until a probe is let through. Default 10.
        least_seconds: A call that was given up counts as a failure only if it had at least so many seconds: a caller
            with hardly any time must not cut others off. Default 0.1.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    failures: int = 5
    failure_rate: float = 0.5
    window: int = 20
    cool_down: float = 10.0
    least_seconds: float = 0.1

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("failures", "window"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"BreakerPolicy.{name} must be at least 1: {getattr(self, name)}")
        if not 0 < self.failure_rate <= 1:
            raise ConfigurationError(f"BreakerPolicy.failure_rate must be above 0 and at most 1: {self.failure_rate}")
        for name in ("cool_down", "least_seconds"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigurationError(f"BreakerPolicy.{name} must be a number of 0 or more: {value}")


class Passage:
    """One call that a breaker let through. Its end is told once; an answer that came late may still be told after."""

    __slots__ = ("failed", "is_probe", "told")

    def __init__(self, *, is_probe: bool) -> None:
        self.is_probe = is_probe
        self.told = False
        self.failed = False


class CircuitBreaker:
    """Counts the failures of one thing that is called. Safe to use from any number of threads.

    Args:
        name: For errors and the log.
        policy: When it opens.
        clock: Gives seconds; a test has its own.
    """

    def __init__(
        self, name: str, policy: BreakerPolicy | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.policy = policy or BreakerPolicy()
        self._clock = clock
        self._recent: deque[Passage] = deque(maxlen=self.policy.window)
        self._in_a_row = 0
        self._open_until: float | None = None
        self._probe: Passage | None = None
        self._because = self._why = ""
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin with a lock that nobody holds; a forked child knows what its parent knew, but runs no probe."""
        self._lock = threading.RLock()
        self._probe = None

    @property
    def state(self) -> CircuitState:
        """What it lets through now."""
        with self._lock:
            if self._open_until is None:
                return CircuitState.CLOSED
            return CircuitState.OPEN if self._clock() < self._open_until else CircuitState.HALF_OPEN

    @property
    def reason(self) -> str | None:
        """Why it is open, and until when; None where it is closed."""
        with self._lock:
            return None if self._open_until is None else self._told()

    def admit(self) -> Passage:
        """Let a call through.

        Raises:
            CircuitOpenError: It is open, or half open with a probe under way.
        """
        with self._lock:
            if self._open_until is None:
                return Passage(is_probe=False)
            if self._clock() < self._open_until or self._probe is not None:
                raise CircuitOpenError(f"{self.name} was not asked: {self._told()}")
            self._probe = Passage(is_probe=True)
            return self._probe

    def ended(self, passage: Passage, error: BaseException | None, seconds: float) -> None:
        """Tell how a call ended.

        Args:
            passage: What ``admit`` gave.
            error: What it raised; what is no outage (``is_outage``) shows that the thing is there.
            seconds: How long it was under way; 0 where it was never begun.
        """
        with self._lock:
            if passage.told:
                return
            passage.told = True
            late = isinstance(error, DeadlineExceededError)
            if error is not None and late and seconds < self.policy.least_seconds:
                self._ended_unknown(passage)
            elif error is not None and is_outage(error):
                self._failed(passage, error)
            else:
                self._succeeded(passage)

    def dropped(self, passage: Passage) -> None:
        """Tell that a call ended without an outcome: its caller was cancelled, or there was no place for it."""
        with self._lock:
            if not passage.told:
                passage.told = True
                self._ended_unknown(passage)

    def came_late(self, passage: Passage) -> None:
        """Tell that a call that was given up has answered after all: the thing is slow, and not gone."""
        with self._lock:
            passage.failed = False
            self._in_a_row = 0
            if self._open_until is not None:
                self._open_until = min(self._open_until, self._clock())

    # -- under the lock --------------------------------------------------------------------------------------------

    def _ended_unknown(self, passage: Passage) -> None:
        if passage is self._probe:
            self._probe = None  # the next call may be one

    def _succeeded(self, passage: Passage) -> None:
        self._recent.append(passage)
        self._in_a_row = 0
        if passage is self._probe:
            self._probe = self._open_until = None
            self._recent.clear()
            logger.info("%s answers again: its circuit is closed", self.name)

    def _failed(self, passage: Passage, error: BaseException) -> None:
        passage.failed = True
        self._recent.append(passage)
        self._in_a_row += 1
        self._why = one_line(error_message(error, 1_000), 120)
        if passage is self._probe:
            self._probe = None
            self._open("the probe failed")
        elif self._open_until is None and self._in_a_row >= self.policy.failures:
            self._open(f"{self._in_a_row} failures in a row")
        elif self._open_until is None and self._rate() >= self.policy.failure_rate:
            self._open(f"{self._rate():.0%} of the last {self.policy.window} calls failed")

    def _rate(self) -> float:
        if len(self._recent) < self.policy.window:
            return 0.0
        return sum(passage.failed for passage in self._recent) / self.policy.window

    def _open(self, because: str) -> None:
        self._because = because
        self._open_until = self._clock() + self.policy.cool_down
        self._recent.clear()
        self._in_a_row = 0
        logger.warning("%s: %s", self.name, self._told())

    def _told(self) -> str:
        assert self._open_until is not None
        left = max(0.0, self._open_until - self._clock())
        until = datetime.now(UTC) + timedelta(seconds=left)
        return f"circuit open until {until:%H:%M:%S} UTC ({self._because}; the last: {self._why})"


def is_outage(error: BaseException) -> bool:
    """Tell whether a failure speaks of the thing that was called, and not of what it was asked.

    No for our own refusals, for what Python raises where a request or a program is wrong (``ValueError``,
    ``TypeError``, ``LookupError``, ...), and for HTTP statuses below 500 but for 408, 425 and 429.
    """
    if isinstance(error, DeadlineExceededError):
        return True
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in OUTAGE_STATUSES  # noqa: PLR2004 (server errors)
    if isinstance(error, AgenticKBError):
        return type(error) is AgenticKBError  # what a source raised that is no Exception
    if isinstance(error, OSError):
        return True
    wrong = (ValueError, TypeError, LookupError, AttributeError, AssertionError, NotImplementedError, RecursionError)
    return not isinstance(error, wrong) and not _is_refusal(error)


def _is_refusal(error: BaseException) -> bool:
    """Whether a Chroma error says that the request was wrong: these tell their status by a method."""
    code = getattr(error, "code", None)
    try:
        status = code() if callable(code) else None
    except Exception:  # noqa: BLE001 (somebody else's method)
        return False
    return isinstance(status, int) and 400 <= status < 500 and status not in OUTAGE_STATUSES  # noqa: PLR2004
