"""Retries, circuit breaker and bulkhead around each call of a service that may fail or hang.

    retries -> circuit breaker -> bulkhead -> the call

The order is that of Polly and Resilience4j: the breaker counts each attempt, and an attempt occupies a place of the
bulkhead only while it runs. A call keeps its place until the called function has returned, even if the caller has
stopped waiting: it then counts as abandoned.

Beyond some number, concurrent calls slow each other down without a higher throughput: a Chroma server answers 305
queries a second with 8 callers (p99 37 ms), and 58 with 1,000 (p99 15.8 s); over HTTP, 20,000 vectors.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cached_property, partial
from typing import Final, Literal, NamedTuple, TypeVar

from llama_index_agentic_kb._aio import Call, WorkerPool, call_deadline, earliest, on_loop, reset_after_fork
from llama_index_agentic_kb._types import Work
from llama_index_agentic_kb.account import current_budget
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import (
    AgenticKBError,
    BulkheadFullError,
    CircuitOpenError,
    ConfigurationError,
    DeadlineExceededError,
)
from llama_index_agentic_kb.guard.failures import is_outage, is_transient, retry_after

T = TypeVar("T")

MAX_RETRY_AFTER: Final = 60.0
"""The longest Retry-After in seconds that is honoured; after a longer one, the call fails at once."""

MIN_ATTEMPT: Final = 0.05
"""The minimum time in seconds for an attempt; a retry with less time left is not started."""

STRAGGLER_GRACE: Final = 1.0
"""The default wait in seconds for a slow source after the others have answered; see ``sources.fan_out``."""

MIN_COUNTED: Final = 0.1
"""The minimum time in seconds after which an expired deadline counts as a failure of the called service."""

MAX_WAITING: Final = 4_096
"""The maximum number of calls that wait for a permit. At 300 calls a second, 3,000 take 10 s."""

HANGS_AFTER: Final = 0.5
"""Seconds after which an abandoned call counts as hanging. If hanging calls occupy all permits, new calls fail at once.
Before that, the call may just be a little late for a short deadline."""


# -- options ----------------------------------------------------------------------------------------------------------


def _check(policy: object, minimum: float, *names: str, above: bool = False, whole: bool = False) -> None:
    """Raise if a named attribute is not a finite number of at least the minimum (with ``above``: greater than it)."""
    for name in names:
        value = getattr(policy, name)
        is_number = isinstance(value, int if whole else (int, float)) and math.isfinite(value)
        if not is_number or not (value > minimum if above else value >= minimum):
            bound = f"above {minimum:g}" if above else f"{minimum:g} or more"
            bound = f"a whole number of {bound}" if whole else bound
            raise ConfigurationError(f"{type(policy).__name__}.{name} must be {bound}, got {value}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of retries of a failed call, and the waits before them.

    Before retry n it waits a random time of up to ``min(max_wait, first_wait * 2 ** (n - 1))`` seconds (full jitter:
    Brooker, "Exponential Backoff and Jitter", 2015), or as long as the server's Retry-After says, plus up to
    ``first_wait``. If that exceeds the deadline or 60 s, the call fails at once.

    Args:
        attempts: The maximum number of attempts, the first included. Default 3.
        first_wait: The upper bound of the first wait in seconds. Default 0.5.
        max_wait: The upper bound of every wait in seconds, except for a Retry-After. Default 8.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    attempts: int = 3
    first_wait: float = 0.5
    max_wait: float = 8.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check(self, 1, "attempts", whole=True)
        _check(self, 0, "first_wait", "max_wait")


NO_RETRIES: Final = RetryPolicy(attempts=1)

SEARCH_RETRIES: Final = RetryPolicy(attempts=2, first_wait=0.2, max_wait=2.0)


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """The conditions under which a circuit opens, and for how long.

    Args:
        failures: The number of consecutive failures that open the circuit. Default 5.
        cool_down: The time in seconds until a probe is allowed. Default 10.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    failures: int = 5
    cool_down: float = 10.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check(self, 1, "failures", whole=True)
        _check(self, 0, "cool_down")


@dataclass(frozen=True)
class Resilience:
    """Resilience settings for the calls of a service that may fail or hang.

    Args:
        timeout: The timeout of a call in seconds, its retries included. Defaults to the number set by the effort.
        max_concurrency: The maximum number of concurrent calls; more calls wait. An abandoned call counts until it
            returns. Default 8: a Chroma server is no faster with more.
        retries: The policy for retries after transient failures (a refused or reset connection, the statuses 429 and
            503), within the request's retry budget. Default one retry; ``NO_RETRIES`` for none.
        breaker: The circuit breaker's policy. By default the circuit opens after 5 consecutive failures, for 10 s;
            None disables it.
        straggler_grace: The wait in seconds for a running source after the others have answered (three times as long
            before its first answer; twice its usual duration, or the others', if that is longer). None waits for its
            whole timeout. Default "auto": 1 s, or None if a ``timeout`` is set.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    timeout: float | None = None
    max_concurrency: int = 8
    retries: RetryPolicy = SEARCH_RETRIES
    breaker: BreakerPolicy | None = field(default_factory=BreakerPolicy)
    straggler_grace: float | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check(self, 1, "max_concurrency", whole=True)
        if self.timeout is not None:
            _check(self, 0, "timeout", above=True)
        grace = self.straggler_grace
        if grace not in ("auto", None) and (isinstance(grace, str | bool) or not (math.isfinite(grace) and grace >= 0)):
            raise ConfigurationError(f"Resilience.straggler_grace must be 0 or more, None, or 'auto', got {grace!r}")

    @cached_property
    def grace(self) -> float | None:
        """The wait in seconds for a slow source after the others have answered; None waits for its whole timeout."""
        if self.straggler_grace == "auto":
            return STRAGGLER_GRACE if self.timeout is None else None
        return self.straggler_grace


# -- retries ----------------------------------------------------------------------------------------------------------


async def retried(
    attempt: Callable[[float | None], Coroutine[object, object, T]],
    *,
    policy: RetryPolicy,
    deadline: float | None = None,
    is_worth: Callable[[BaseException], bool] = is_transient,
) -> T:
    """Return the result of the first successful attempt; raise the last one's error.

    Args:
        attempt: Makes one attempt; its argument is the deadline.
        policy: The number of retries, and the waits before them.
        deadline: The deadline of all attempts together (``time.monotonic()``); the context's own applies too.
        is_worth: Returns whether a failure is worth another attempt.
    """
    budget, deadline, number = current_budget().retries, earliest(deadline, call_deadline()), 1
    budget.calls += 1
    while True:
        try:
            return await attempt(deadline)
        except Exception as error:
            pause = _pause(error, number, policy, deadline) if is_worth(error) else None
            if pause is None or not budget.take():  # last, so that no retry is deducted in vain
                raise
        number += 1
        await asyncio.sleep(pause)


def _pause(error: BaseException, number: int, policy: RetryPolicy, deadline: float | None) -> float | None:
    """Return the number of seconds to wait before the next attempt; None if there is no further attempt."""
    if number >= policy.attempts:
        return None
    asked = retry_after(error)
    if asked is None:
        pause = random.uniform(0, min(policy.max_wait, policy.first_wait * 2 ** min(number - 1, 32)))  # noqa: S311
    elif asked > MAX_RETRY_AFTER:
        return None
    else:
        pause = asked + random.uniform(0, policy.first_wait)  # noqa: S311 (jitter)
    return pause if deadline is None or time.monotonic() + pause + MIN_ATTEMPT < deadline else None


# -- circuit breaker --------------------------------------------------------------------------------------------------


class CircuitState(StrEnum):
    """The state of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "halfOpen"


class CircuitBreaker:
    """Counts the failures of one service, and blocks calls while it is down. Thread-safe.

    A service that fails repeatedly is not called for a while, then probed with one call (Nygard, "Release It!", 2007).
    """

    def __init__(self, name: str, policy: BreakerPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._policy = policy
        self._clock = clock
        self.in_a_row = 0
        self.open_until: float | None = None
        self._reason = ""
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Clear the probe; a forked child keeps the parent's failure count."""
        self._lock = threading.RLock()
        self._probing = False

    @property
    def state(self) -> CircuitState:
        """The current state of the circuit."""
        with self._lock:
            if self.open_until is None:
                return CircuitState.CLOSED
            return CircuitState.OPEN if self._clock() < self.open_until else CircuitState.HALF_OPEN

    @property
    def reason(self) -> str | None:
        """Why the circuit is open, and until when; None if it is closed. It has no message of another request."""
        with self._lock:
            if self.open_until is None:
                return None
            until = datetime.now(UTC) + timedelta(seconds=max(0.0, self.open_until - self._clock()))
            return f"circuit open until {until:%H:%M:%S} UTC ({self._reason})"

    def admit(self) -> bool:
        """Admit an attempt, and return whether it is the probe of a half-open circuit.

        Raises:
            CircuitOpenError: The circuit is open, or half open with a probe running.
        """
        with self._lock:
            if self.open_until is None:
                return False
            if self._clock() < self.open_until or self._probing:
                raise CircuitOpenError(f"{self._name} was not asked: {self.reason}")
            self._probing = True
            return True

    def ended(self, error: BaseException | None, seconds: float | None, *, probe: bool = False) -> None:
        """Count the outcome of an attempt; an error that is not an outage counts as a success: the service is up.

        Not counted is an attempt that was not started (``seconds`` is None), was cancelled, or timed out within
        ``MIN_COUNTED`` seconds. ``probe`` is what ``admit`` returned.
        """
        hurried = isinstance(error, DeadlineExceededError) and (seconds or 0.0) < MIN_COUNTED
        dropped = error is not None and (seconds is None or hurried or not isinstance(error, Exception))
        with self._lock:
            if probe:
                self._probing = False
            if dropped:
                return
            if error is None or not is_outage(error):
                self.in_a_row = 0
                if probe:
                    self.open_until = None
                    logger.info("%s answers again: its circuit is closed", self._name)
                return
            self.in_a_row += 1
            if probe or (self.open_until is None and self.in_a_row >= self._policy.failures):
                because = "the probe failed" if probe else f"{self.in_a_row} failures in a row"
                self._reason = f"{because}; the last: {type(error).__name__} at {datetime.now(UTC):%H:%M:%S} UTC"
                self.open_until = self._clock() + self._policy.cool_down
                self.in_a_row = 0
                logger.warning("%s: %s", self._name, self.reason)

    def came_late(self) -> None:
        """Record that an abandoned call has returned: the service is slow, not down, so a probe is allowed now."""
        with self._lock:
            self.in_a_row = 0
            if self.open_until is not None:
                self.open_until = min(self.open_until, self._clock())


# -- bulkhead ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Permit:
    """A place in a bulkhead, for one attempt: waited for, entered (``with``), and released.

    ``on_end`` is called with the permit and the error, if any, when the function returns, however late.
    """

    on_end: Callable[[Permit, BaseException | None], None] | None = None
    began: float | None = None
    ended: float | None = None
    abandoned_at: float | None = None
    wake: Callable[[], None] | None = None
    bulkhead: Bulkhead | None = None

    @property
    def at_work(self) -> bool:
        """Whether the function has been called and has not returned."""
        return self.began is not None and self.ended is None

    def __enter__(self) -> None:
        """Mark the function as started, unless the permit was released before."""
        assert self.bulkhead is not None
        with self.bulkhead.lock:
            if self not in self.bulkhead.held:
                raise DeadlineExceededError("given up before it was begun")
            self.began = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Mark the function as ended, release the permit and call ``on_end``."""
        assert self.bulkhead is not None
        self.ended = time.monotonic()
        self.bulkhead.leave(self)
        if self.on_end is not None:
            self.on_end(self, error)


class BulkheadState(NamedTuple):
    """The numbers of calls of a bulkhead at one moment; see ``Health``."""

    at_work: int
    waiting: int
    abandoned: int


class Bulkhead:
    """A limit of concurrent calls, on threads and event loops together; more calls wait in order of arrival."""

    def __init__(self, name: str, max_concurrency: int = 8) -> None:
        self.max_concurrency = max_concurrency
        self._pool = WorkerPool(name, max_workers=max_concurrency)
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Return to the empty state: a forked child runs none of the parent's calls."""
        # Reentrant: the garbage collector may close a coroutine, which calls leave(), on a thread that has the lock.
        self.lock = threading.RLock()
        self.held: set[Permit] = set()
        self._waiting: OrderedDict[Permit, None] = OrderedDict()

    @property
    def state(self) -> BulkheadState:
        """The number of running, waiting and abandoned calls."""
        with self.lock:
            abandoned = sum(permit.abandoned_at is not None for permit in self.held)
            return BulkheadState(len(self.held) - abandoned, len(self._waiting), abandoned)

    async def call(self, call: Call[T], permit: Permit | None = None, *, deadline: float | None = None) -> T:
        """Make a call on this bulkhead's pool once a permit is available; without one by its deadline, never."""
        permit = permit or Permit()
        permit.bulkhead = self
        try:
            with self.lock:
                granted = None
                if len(self.held) < self.max_concurrency and not self._waiting:
                    self.held.add(permit)
                else:
                    granted = self._queued(permit, call.what)
            if granted is not None:
                await self._wait(permit, granted, call.what, earliest(deadline, call.deadline, call_deadline()))
            return await call.perform(deadline, self._pool, permit)
        finally:
            if permit.ended is None:
                self.leave(permit)

    def _queued(self, permit: Permit, what: str) -> asyncio.Future[None]:
        """Return a future that is done when a permit that now waits is woken."""
        self._refuse_if_hung(what)
        if (waiting := len(self._waiting)) >= MAX_WAITING:
            raise BulkheadFullError(
                f"{what} was not begun: {self.max_concurrency} calls are under way, and {waiting} wait already"
            )
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        permit.wake = partial(on_loop, loop, granted.set_result, None)
        self._waiting[permit] = None
        return granted

    async def _wait(self, permit: Permit, granted: asyncio.Future[None], what: str, deadline: float | None) -> None:
        while True:
            left = HANGS_AFTER if deadline is None else min(HANGS_AFTER, max(0.0, deadline - time.monotonic()))
            await asyncio.wait([granted], timeout=left)
            with self.lock:
                if permit in self.held:
                    return
                self._refuse_if_hung(what, deadline)

    def _refuse_if_hung(self, what: str, deadline: float | None = None) -> None:
        """Raise after the deadline, or if calls abandoned more than ``HANGS_AFTER`` seconds ago occupy all permits."""
        now, places = time.monotonic(), self.max_concurrency
        if deadline is not None and now >= deadline:
            raise DeadlineExceededError(
                f"{what} was not begun: its deadline passed while {places} others were under way"
            )
        since = [now if held.abandoned_at is None else held.abandoned_at for held in self.held]
        if len(since) >= places and max(since) <= now - HANGS_AFTER:
            raise BulkheadFullError(
                f"{what} was not begun: all its {places} places are held by calls that were given up and still hang"
            )

    def leave(self, permit: Permit) -> None:
        """Release a permit and wake the next waiting call; if its function still runs, mark it as abandoned."""
        with self.lock:
            self._waiting.pop(permit, None)
            if permit not in self.held:  # released already, or granted in the parent of a forked child
                return
            if permit.began is not None and permit.ended is None:  # it is at work
                permit.abandoned_at = permit.abandoned_at or time.monotonic()
                return
            self.held.discard(permit)
            while self._waiting and len(self.held) < self.max_concurrency:
                following, _ = self._waiting.popitem(last=False)
                self.held.add(following)
                if following.wake is not None:
                    following.wake()


# -- all of it --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class CallProgress:
    """The calls, attempts and permits of one search; a waiting caller uses them to decide whether to cancel it."""

    calls: int = 0
    attempts: int = 0
    given_up: str | None = None
    """The reason why the search was cancelled before its deadline; None if it was not."""
    permits: list[Permit] = field(default_factory=list)

    @property
    def at_work_since(self) -> float | None:
        """The start time of the oldest running call as a ``time.monotonic()`` value; None if no call is running."""
        return min([p.began for p in self.permits if p.began is not None and p.ended is None], default=None)


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a called service at one moment.

    Args:
        at_work: The number of running calls, without abandoned ones.
        waiting: The number of calls that wait for a permit.
        abandoned: The number of abandoned calls that still run; each occupies a permit until it returns.
        places: The maximum number of concurrent calls.
        circuit: The state of its circuit breaker; None if it has no breaker.
        reason: Why the circuit is open, and until when; None if it is closed.
        median_seconds: The median duration of recent answers in seconds; None before the first.
    """

    at_work: int
    waiting: int
    abandoned: int
    places: int
    circuit: CircuitState | None
    reason: str | None
    median_seconds: float | None


class ResilientCalls:
    """Makes the calls of one service with its resilience settings. Thread-safe, for any number of event loops."""

    def __init__(self, name: str, resilience: Resilience) -> None:
        self.bulkhead = Bulkhead(name, resilience.max_concurrency)
        self._breaker = None if resilience.breaker is None else CircuitBreaker(name, resilience.breaker)
        self._retries = resilience.retries
        self._seconds: deque[float] = deque(maxlen=64)

    @property
    def health(self) -> Health:
        """The current state of the service."""
        breaker, places = self._breaker, self.bulkhead.max_concurrency
        circuit, reason = (None, None) if breaker is None else (breaker.state, breaker.reason)
        return Health(*self.bulkhead.state, places, circuit, reason, self.median_seconds)

    @property
    def median_seconds(self) -> float | None:
        """The median duration of recent answers in seconds; None before the first."""
        seconds = sorted(self._seconds.copy())
        return seconds[len(seconds) // 2] if seconds else None

    def call(self, call: Call[T], progress: CallProgress | None = None) -> Work[T]:
        """Return a coroutine that makes a call with retries, circuit breaker and bulkhead.

        The call's deadline includes all waits and attempts.

        Raises:
            CircuitOpenError: The circuit is open after repeated failures.
            BulkheadFullError: Too many calls are waiting, or hanging calls occupy all permits.
            DeadlineExceededError: The call did not return in time.
            Exception: The exception of the last attempt.
        """
        progress = progress or CallProgress()
        progress.calls += 1
        attempt = partial(self._attempt, call, progress)
        return retried(attempt, policy=self._retries, deadline=call.deadline, is_worth=_is_worth_another)

    async def _attempt(self, call: Call[T], progress: CallProgress, deadline: float | None) -> T:
        """Make one attempt; its cancellation counts as a failure only if the search was given up for being slow."""
        permit, breaker = Permit(self._returned), self._breaker
        probe = breaker is not None and breaker.open_until is not None and breaker.admit()
        progress.attempts += 1
        progress.permits.append(permit)
        failure: BaseException | None = None
        try:
            return await self.bulkhead.call(call, permit, deadline=deadline)
        except BaseException as error:
            given_up = isinstance(error, asyncio.CancelledError) and progress.given_up
            failure = DeadlineExceededError(given_up) if given_up else error
            raise
        finally:
            if breaker is not None and (failure is not None or probe or breaker.in_a_row):
                breaker.ended(failure, None if permit.began is None else time.monotonic() - permit.began, probe=probe)
            failure = None  # its frames include this one, and would be kept until a garbage collection

    def _returned(self, permit: Permit, error: BaseException | None) -> None:
        """Record the duration of a successful call, and notify the breaker if the call had been abandoned."""
        if error is None and permit.began is not None and permit.ended is not None:
            self._seconds.append(permit.ended - permit.began)
            if permit.abandoned_at is not None and self._breaker is not None:
                self._breaker.came_late()


def _is_worth_another(error: BaseException) -> bool:
    """Return whether a failure is transient and not one of this package's own errors, such as a deadline."""
    return not isinstance(error, AgenticKBError) and is_transient(error)
