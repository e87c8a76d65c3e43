"""What stands around each call of something that may fail or hang.

    retries -> circuit breaker -> bulkhead -> the call

The order is Polly's and Resilience4j's: the breaker counts each attempt, and an attempt holds a place of the bulkhead
only while it runs.

- Retries: exponential waits with full jitter, or the server's Retry-After, out of one retry budget a request.
- Circuit breaker: what failed again and again is left alone for a while, then tried with one call (Nygard, "Release
  It!", 2007; Fowler, "CircuitBreaker", 2014).
- Bulkhead: what hangs fills its own bulkhead and no other. Beyond some number, calls that run at once slow each other
  down without doing more: a Chroma server answers 305 queries a second at 8 callers (p99 37 ms), and 58 a second at
  1,000 (p99 15.8 s); measured over HTTP, 20,000 x 384.

A permit belongs to a call until the function that was called has returned, not until the caller has given it up: a
thread that hangs keeps its permit, is counted as abandoned, and gives it back when it returns.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeVar

from llama_index_agentic_kb._aio import (
    Call,
    Stream,
    WorkerPool,
    deadline_after,
    earliest,
    open_stream,
    pause_until,
    reset_after_fork,
)
from llama_index_agentic_kb.account.budget import DEFAULT_SHARE, MIN_RETRIES, RetryBudget, current_budget
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import (
    AgenticKBError,
    BulkheadFullError,
    CircuitOpenError,
    ConfigurationError,
    DeadlineExceededError,
)
from llama_index_agentic_kb.guard.failures import is_outage, is_transient, retry_after

__all__ = [
    "NO_RETRIES",
    "STRAGGLER_GRACE",
    "BreakerPolicy",
    "Bulkhead",
    "BulkheadState",
    "CallProgress",
    "CircuitBreaker",
    "CircuitState",
    "Health",
    "Permit",
    "Resilience",
    "ResilientCalls",
    "RetryPolicy",
    "call_deadline",
    "retried",
]

T = TypeVar("T")

MAX_RETRY_AFTER: Final = 60.0
"""Seconds; a server that asks for a longer wait ends the call."""

MIN_ATTEMPT: Final = 0.05
"""Seconds that an attempt needs; a retry that would have less is not begun."""

MAX_WAITING: Final = 4_096
"""Calls that may wait for a permit. At 300 a second and 10 s for each, those after the first 3,000 would be late."""

HANGS_AFTER: Final = 0.5
"""Seconds after which calls that were given up are taken to hang: where they hold every permit, nobody waits for them.
Before, they may just be a little late for callers in a hurry."""

STRAGGLER_GRACE: Final = 1.0
"""Seconds that a slow source is waited for when the others have answered; see ``sources.stragglers``."""

MIN_COUNTED: Final = 0.1
"""Seconds; a call that was given up after less is no sign of a failure: its caller had hardly any time."""


# -- options ----------------------------------------------------------------------------------------------------------


def _check_numbers(policy: Any, *names: str) -> None:
    for name in names:
        value = getattr(policy, name)
        if not (value >= 0 and math.isfinite(value)):
            raise ConfigurationError(f"{type(policy).__name__}.{name} must be a number of 0 or more: {value}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a failed call is tried again, and how long is waited before.

    Waits grow exponentially with full jitter: before retry n, a random time between 0 and ``min(max_wait, first_wait *
    2 ** (n - 1))`` (Brooker, "Exponential Backoff and Jitter", 2015). A server's Retry-After is honoured, with up to
    ``first_wait`` of jitter on top; where it does not fit before the deadline, or is longer than 60 s, the failure
    stands at once.

    Args:
        attempts: Attempts in all, the first included. 1 never retries. Default 3.
        first_wait: Seconds, the bound of the first wait. Default 0.5.
        max_wait: Seconds, the bound of every wait that no Retry-After asks for. Default 8.
        attempt_seconds: Seconds after which one attempt is given up, so that another may be made; None leaves each
            attempt all the time that is left. Default None.
        share: Retries of a request per call that it makes. Default 0.2.
        min_retries: Retries that a request may make however few calls it makes. Default 5.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    attempts: int = 3
    first_wait: float = 0.5
    max_wait: float = 8.0
    attempt_seconds: float | None = None
    share: float = DEFAULT_SHARE
    min_retries: int = MIN_RETRIES

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.attempts < 1:
            raise ConfigurationError(f"RetryPolicy.attempts must be at least 1 (which never retries): {self.attempts}")
        if self.attempt_seconds is not None and not self.attempt_seconds > 0:
            raise ConfigurationError(f"RetryPolicy.attempt_seconds must be above 0, or None: {self.attempt_seconds}")
        _check_numbers(self, "first_wait", "max_wait", "share", "min_retries")

    def budget(self) -> RetryBudget:
        """Return the retry budget of a new request."""
        return RetryBudget(self.share, self.min_retries)


NO_RETRIES: Final = RetryPolicy(attempts=1)
"""Never tries again."""

SEARCH_RETRIES: Final = RetryPolicy(attempts=2, first_wait=0.2, max_wait=2.0)
"""A connection that was refused or reset, or a server that is busy, is asked once more."""


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a circuit opens, and for how long.

    Args:
        failures: Failures in a row that open it. Default 5.
        cool_down: Seconds until a probe is let through. Default 10.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    failures: int = 5
    cool_down: float = 10.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.failures < 1:
            raise ConfigurationError(f"BreakerPolicy.failures must be at least 1: {self.failures}")
        _check_numbers(self, "cool_down")


@dataclass(frozen=True, slots=True)
class Resilience:
    """How one thing that may fail or hang is called.

    Args:
        timeout: Seconds that one call may take, its retries included; None is the effort's own number.
        max_concurrency: Calls that are under way at once, on threads and event loops together; more wait their turn.
            A call that was given up holds its place until it returns. Default 8: a Chroma server does no more with
            more.
        retries: How often a call is tried again whose failure is worth it (a refused or reset connection, the statuses
            429 and 503), out of the request's retry budget. Default once. ``NO_RETRIES`` never does.
        breaker: When it is left alone after failures, and for how long; None never leaves it alone. Default after 5
            failures in a row, for 10 s.
        straggler_grace: Seconds that are waited for a source when the others have answered and it is at work (three
            times as many before its first answer; twice its usual time, or the others', where that is more). None
            waits for its whole timeout. Default "auto": 1, and None where a ``timeout`` is set.

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
        for name in ("timeout", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"Resilience.{name} must be above 0, got {value}")
        grace = self.straggler_grace
        if grace not in ("auto", None) and (isinstance(grace, str | bool) or not (math.isfinite(grace) and grace >= 0)):
            raise ConfigurationError(f"Resilience.straggler_grace must be 0 or more, None, or 'auto', got {grace!r}")

    @property
    def grace(self) -> float | None:
        """Seconds that a slow source is waited for when the others have answered; None is its whole timeout."""
        if self.straggler_grace == "auto":
            return STRAGGLER_GRACE if self.timeout is None else None
        return self.straggler_grace


# -- retries ----------------------------------------------------------------------------------------------------------


async def retried(
    attempt: Callable[[float | None], Coroutine[Any, Any, T]],
    *,
    policy: RetryPolicy,
    deadline: float | None = None,
    is_worth: Callable[[BaseException], bool] = is_transient,
) -> T:
    """Make a call, and make it again while its failure is worth it.

    Clients bring retries of their own, one inside the other (a failing call of LlamaIndex's ``OpenAI`` is 12 HTTP
    requests); here they are ours alone, bounded by the policy, by the request's retry budget and by its deadline.

    Args:
        attempt: Makes one attempt, given its deadline (``time.monotonic()``; None for no deadline).
        policy: How often, and how long is waited.
        deadline: ``time.monotonic()`` by which the whole must have ended; a retry that can't is not begun.
        is_worth: Returns whether a failure is worth another attempt.

    Returns:
        What the first attempt that succeeds returns.

    Raises:
        Exception: The last attempt's own failure.
    """
    budget = current_budget().retries
    budget.count_call()
    number = 1
    while True:
        try:
            return await attempt(earliest(deadline, deadline_after(policy.attempt_seconds)))
        except Exception as error:
            pause = _pause(error, number, policy, deadline) if is_worth(error) else None
            if pause is None or not budget.take():  # asked last, so that no retry is taken in vain
                raise
        number += 1
        await pause_until(time.monotonic() + pause)


def _pause(error: BaseException, number: int, policy: RetryPolicy, deadline: float | None) -> float | None:
    """Return the seconds to wait before the next attempt; None where there is none."""
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


# -- permits and progress ---------------------------------------------------------------------------------------------


class Permit:
    """One attempt's right to run: requested, granted, in use, released. Its bulkhead alone changes it.

    Args:
        on_end: Called with the permit and the error, if any, when the function has returned, however late.
    """

    __slots__ = ("abandoned_at", "began", "counted", "ended", "granted", "is_probe", "on_end", "wake", "what")

    def __init__(self, on_end: Callable[[Permit, BaseException | None], None] | None = None) -> None:
        self.what = ""
        self.granted = False
        self.began: float | None = None
        self.ended: float | None = None
        self.abandoned_at: float | None = None
        self.on_end = on_end
        self.wake: Callable[[], None] | None = None
        self.is_probe = False  # the circuit breaker's: whether it tries a half-open circuit, ...
        self.counted = False  # ... and whether its end was counted

    @property
    def at_work(self) -> bool:
        """Whether the function has been called and has not returned."""
        return self.began is not None and self.ended is None


class CallProgress:
    """How far the calls of one search have come: read by who waits for it, and may decide to wait no longer."""

    __slots__ = ("attempts", "calls", "given_up", "permits")

    def __init__(self) -> None:
        self.calls = 0
        self.attempts = 0
        self.given_up: str | None = None
        """Why it was given up before its deadline."""
        self.permits: list[Permit] = []

    @property
    def retries(self) -> int:
        """Calls that were made again."""
        return max(0, self.attempts - self.calls)

    @property
    def at_work_since(self) -> float | None:
        """``time.monotonic()`` at which the oldest call that is still under way began; None while none is."""
        return min((p.began for p in self.permits if p.at_work and p.began is not None), default=None)


# -- circuit breaker --------------------------------------------------------------------------------------------------


class CircuitState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "halfOpen"


class CircuitBreaker:
    """Counts the failures of one thing that is called. Safe to use from any number of threads.

    Args:
        name: For errors and the log.
        policy: When it opens.
        clock: Returns seconds; a test has its own.
    """

    def __init__(
        self, name: str, policy: BreakerPolicy | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.policy = policy or BreakerPolicy()
        self._clock = clock
        self._in_a_row = 0
        self._open_until: float | None = None
        self._reason = ""
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin with a lock that nobody holds; a forked child knows what its parent knew, but runs no probe."""
        self._lock = threading.RLock()
        self._probe: Permit | None = None

    @property
    def state(self) -> CircuitState:
        """What it lets through now."""
        with self._lock:
            if self._open_until is None:
                return CircuitState.CLOSED
            return CircuitState.OPEN if self._clock() < self._open_until else CircuitState.HALF_OPEN

    @property
    def reason(self) -> str | None:
        """Why it is open, and until when; None where it is closed.

        It names the last error's class and time. Never its words: they are another request's.
        """
        with self._lock:
            if self._open_until is None:
                return None
            until = datetime.now(UTC) + timedelta(seconds=max(0.0, self._open_until - self._clock()))
            return f"circuit open until {until:%H:%M:%S} UTC ({self._reason})"

    def admit(self, permit: Permit) -> None:
        """Admit a call.

        Raises:
            CircuitOpenError: It is open, or half open with a probe under way.
        """
        with self._lock:
            if self._open_until is None:
                return
            if self._clock() < self._open_until or self._probe is not None:
                raise CircuitOpenError(f"{self.name} was not asked: {self.reason}")
            permit.is_probe = True
            self._probe = permit

    def ended(self, permit: Permit, error: BaseException | None, seconds: float) -> None:
        """Count how a call of so many seconds ended; an error that is no outage shows that the thing is there."""
        if error is not None and isinstance(error, DeadlineExceededError) and seconds < MIN_COUNTED:
            self.dropped(permit)
            return
        with self._lock:
            if permit.counted:
                return
            permit.counted = True
            if error is not None and is_outage(error):
                self._failed(permit, error)
            else:
                self._succeeded(permit)

    def dropped(self, permit: Permit) -> None:
        """Note that a call ended without an outcome: its caller was cancelled, or there was no permit for it."""
        with self._lock:
            if not permit.counted:
                permit.counted = True
                if permit is self._probe:
                    self._probe = None  # the next call may be one

    def came_late(self) -> None:
        """Note that a call that was given up has answered after all: the thing is slow, and not gone."""
        with self._lock:
            self._in_a_row = 0
            if self._open_until is not None:
                self._open_until = min(self._open_until, self._clock())

    def _succeeded(self, permit: Permit) -> None:
        self._in_a_row = 0
        if permit is self._probe:
            self._probe = self._open_until = None
            logger.info("%s answers again: its circuit is closed", self.name)

    def _failed(self, permit: Permit, error: BaseException) -> None:
        self._in_a_row += 1
        if permit is self._probe:
            self._probe = None
            self._open("the probe failed", error)
        elif self._open_until is None and self._in_a_row >= self.policy.failures:
            self._open(f"{self._in_a_row} failures in a row", error)

    def _open(self, because: str, error: BaseException) -> None:
        self._reason = f"{because}; the last: {type(error).__name__} at {datetime.now(UTC):%H:%M:%S} UTC"
        self._open_until = self._clock() + self.policy.cool_down
        self._in_a_row = 0
        logger.warning("%s: %s", self.name, self.reason)


# -- bulkhead ---------------------------------------------------------------------------------------------------------

_deadline: ContextVar[float | None] = ContextVar("agentic_kb_call_deadline", default=None)


def call_deadline() -> float | None:
    """Return the deadline (``time.monotonic()``) of the call that this code runs in; None where there is none.

    For what can end itself in time: a client that takes a timeout for each request.
    """
    return _deadline.get()


class BulkheadState(NamedTuple):
    """A bulkhead at one moment; see ``Health``."""

    at_work: int
    waiting: int
    abandoned: int


class Bulkhead:
    """A limit of calls that run at once, on threads and event loops together; further ones wait in order of arrival.

    Args:
        name: For threads and errors.
        max_concurrency: Calls under way at once. At least 1. Default 8.
        max_waiting: Calls that may wait; one more is refused at once. Default 4,096.
    """

    def __init__(self, name: str, max_concurrency: int = 8, max_waiting: int = MAX_WAITING) -> None:
        if max_concurrency < 1 or max_waiting < 0:
            raise ValueError(
                f"max_concurrency must be at least 1 and max_waiting at least 0, got {max_concurrency}, {max_waiting}"
            )
        self.name = name
        self.max_concurrency = max_concurrency
        self.max_waiting = max_waiting
        self._pool = WorkerPool(name, max_workers=max_concurrency)
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Start empty: in a forked child nothing of the parent's runs."""
        # Reentrant: the garbage collector may close a coroutine, which leaves, on a thread that holds the lock.
        self._lock = threading.RLock()
        self._held: set[Permit] = set()
        self._waiting: OrderedDict[Permit, None] = OrderedDict()

    @property
    def state(self) -> BulkheadState:
        """How many calls are at work, waiting, and abandoned."""
        with self._lock:
            abandoned = sum(permit.abandoned_at is not None for permit in self._held)
            return BulkheadState(len(self._held) - abandoned, len(self._waiting), abandoned)

    async def call(self, call: Call[T], permit: Permit | None = None) -> T:
        """Make a call when there is a permit for it; what has none by its deadline is never begun.

        Raises:
            BulkheadFullError: Too many wait already, or calls that hang hold every permit.
            DeadlineExceededError: There was no permit in time, or the call did not return in time.
        """
        permit = permit or Permit()
        await self._enter(permit, call.what, call.deadline)
        try:
            sync = None if call.sync is None else partial(self._run, permit, call.sync, call.deadline)
            native = None if call.native is None else partial(self._arun, permit, call.native, call.deadline)
            return await Call(sync, native, call.deadline, self._pool, call.what)
        finally:
            self.leave(permit)

    async def open(
        self,
        sync: Callable[[], Iterator[T]],
        native: Callable[[], Awaitable[AsyncIterator[T]]] | None,
        permit: Permit,
        *,
        deadline: float | None,
        what: str,
    ) -> Stream[T]:
        """Open a stream when there is a permit for it, see ``call``. Whoever reads it has to ``leave`` the permit.

        Args:
            sync: Returns the stream, for sync doors.
            native: Returns the stream, for async doors; None reads the sync one on a thread there too.
            permit: A new one.
            deadline: ``time.monotonic()`` until which a permit is waited for; None waits.
            what: Names the stream in errors.
        """
        await self._enter(permit, what, deadline)
        try:
            return open_stream(
                sync=partial(self._read, permit, sync),
                native=None if native is None else partial(self._aread, permit, native),
                pool=self._pool,
                what=what,
            )
        except BaseException:
            self.leave(permit)
            raise

    async def _enter(self, permit: Permit, what: str, deadline: float | None) -> None:
        permit.what = what
        with self._lock:
            if len(self._held) < self.max_concurrency and not self._waiting:
                permit.granted = True
                self._held.add(permit)
                return
            self._refuse_if_hung(permit)
            if len(self._waiting) >= self.max_waiting:
                raise BulkheadFullError(
                    f"{what} was not begun: {self.max_concurrency} calls are under way, and {len(self._waiting)} wait "
                    "already"
                )
            loop = asyncio.get_running_loop()
            granted: asyncio.Future[None] = loop.create_future()
            permit.wake = partial(_wake, loop, granted)
            self._waiting[permit] = None
        try:
            await self._wait(permit, granted, deadline)
        except BaseException:
            self.leave(permit)
            raise

    async def _wait(self, permit: Permit, granted: asyncio.Future[None], deadline: float | None) -> None:
        while True:
            left = HANGS_AFTER if deadline is None else min(HANGS_AFTER, deadline - time.monotonic())
            await asyncio.wait([granted], timeout=max(0.0, left))
            if granted.done():
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"{permit.what} was not begun: its deadline passed while {self.max_concurrency} others were under "
                    "way"
                )
            with self._lock:
                self._refuse_if_hung(permit)

    def _refuse_if_hung(self, permit: Permit) -> None:
        """Refuse to wait where calls that were given up a while ago hold every permit."""
        past = time.monotonic() - HANGS_AFTER
        if len(self._held) >= self.max_concurrency and all(
            held.abandoned_at is not None and held.abandoned_at <= past for held in self._held
        ):
            raise BulkheadFullError(
                f"{permit.what} was not begun: all its {self.max_concurrency} places are held by calls that were given "
                "up and still hang"
            )

    def leave(self, permit: Permit) -> None:
        """End the caller's interest in a permit; one whose function still runs stays taken until it returns."""
        with self._lock:
            self._waiting.pop(permit, None)
            if permit not in self._held:
                return
            if permit.at_work:
                permit.abandoned_at = permit.abandoned_at or time.monotonic()
                return
            woken = self._release(permit)
        for wake in woken:
            wake()

    def _release(self, permit: Permit) -> list[Callable[[], None]]:
        """Pass a permit on to whoever waits first; under the lock."""
        self._held.discard(permit)
        woken = []
        while self._waiting and len(self._held) < self.max_concurrency:
            following, _ = self._waiting.popitem(last=False)
            following.granted = True
            self._held.add(following)
            if following.wake is not None:
                woken.append(following.wake)
        return woken

    def _begin(self, permit: Permit, deadline: float | None) -> None:
        with self._lock:
            if permit not in self._held:
                raise DeadlineExceededError(f"{self.name}: given up before it was begun")
            permit.began = time.monotonic()
        _deadline.set(deadline)  # the context is this call's own

    def _end(self, permit: Permit, error: BaseException | None) -> None:
        with self._lock:
            permit.ended = time.monotonic()
            woken = self._release(permit) if permit in self._held else []  # not held in a forked child
        for wake in woken:
            wake()
        if permit.on_end is not None:
            permit.on_end(permit, error)

    @contextmanager
    def _using(self, permit: Permit, deadline: float | None = None) -> Iterator[None]:
        """Begin a permit's function and end it, whatever becomes of it."""
        self._begin(permit, deadline)
        error: BaseException | None = None
        try:
            yield
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._end(permit, error)

    def _run(self, permit: Permit, sync: Callable[[], T], deadline: float | None) -> T:
        with self._using(permit, deadline):
            return sync()

    async def _arun(self, permit: Permit, native: Callable[[], Awaitable[T]], deadline: float | None) -> T:
        with self._using(permit, deadline):
            return await native()

    def _read(self, permit: Permit, source: Callable[[], Iterator[T]]) -> Iterator[T]:
        with self._using(permit):
            yield from source()

    async def _aread(self, permit: Permit, source: Callable[[], Awaitable[AsyncIterator[T]]]) -> AsyncIterator[T]:
        async def items() -> AsyncIterator[T]:
            with self._using(permit):
                async for item in await source():
                    yield item

        return items()


def _wake(loop: asyncio.AbstractEventLoop, granted: asyncio.Future[None]) -> None:
    """Resume who waits for a permit, from any thread."""

    def resume() -> None:
        if not granted.done():
            granted.set_result(None)

    try:
        loop.call_soon_threadsafe(resume)
    except RuntimeError:
        if not loop.is_closed():
            raise


# -- all of it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Health:
    """How something that is called stands at one moment.

    Args:
        at_work: Calls under way that somebody waits for.
        waiting: Calls that wait for a permit.
        abandoned: Calls under way that were given up; each holds a permit until it returns.
        places: How many calls may be under way.
        circuit: Whether its breaker lets calls through; None where it has no breaker.
        reason: Why it does not, and until when.
        median_seconds: How long the last answers took; None before the first.
    """

    at_work: int
    waiting: int
    abandoned: int
    places: int
    circuit: CircuitState | None
    reason: str | None
    median_seconds: float | None


class ResilientCalls:
    """Makes the calls of one thing. Safe to use from any number of threads and event loops.

    Args:
        name: Of what is called, for threads and errors: "source 'docs'".
        resilience: How it is called.
    """

    def __init__(self, name: str, resilience: Resilience) -> None:
        self.bulkhead = Bulkhead(name, resilience.max_concurrency)
        self._breaker = None if resilience.breaker is None else CircuitBreaker(name, resilience.breaker)
        self._retries = resilience.retries
        self._seconds: deque[float] = deque(maxlen=64)

    @property
    def health(self) -> Health:
        """How it stands."""
        breaker, places = self._breaker, self.bulkhead.max_concurrency
        circuit = None if breaker is None else breaker.state
        reason = None if breaker is None else breaker.reason
        return Health(*self.bulkhead.state, places, circuit, reason, self.median_seconds)

    @property
    def median_seconds(self) -> float | None:
        """How long the last answers took, the middle one; None before the first."""
        seconds = sorted(self._seconds.copy())
        return seconds[len(seconds) // 2] if seconds else None

    async def call(self, call: Call[T], progress: CallProgress | None = None) -> T:
        """Make a call; its deadline bounds waiting for a permit, all attempts, and what is waited between them.

        Raises:
            CircuitOpenError: It failed too often lately.
            BulkheadFullError: Too many calls wait already, or hang.
            DeadlineExceededError: It did not answer in time.
            Exception: What the call raised in its last attempt.
        """
        progress = progress or CallProgress()
        progress.calls += 1
        attempt = partial(self._attempt, call, progress)
        return await retried(attempt, policy=self._retries, deadline=call.deadline, is_worth=_is_worth_another)

    async def _attempt(self, call: Call[T], progress: CallProgress, deadline: float | None) -> T:
        progress.attempts += 1
        permit, breaker = Permit(self._returned), self._breaker
        progress.permits.append(permit)
        if breaker is not None:
            breaker.admit(permit)
        try:
            value = await self.bulkhead.call(
                call if deadline == call.deadline else replace(call, deadline=deadline), permit
            )
        except BaseException as error:
            if breaker is not None:
                self._count(breaker, permit, error, progress)
            raise
        if breaker is not None:
            breaker.ended(permit, None, 0.0)
        return value

    @staticmethod
    def _count(breaker: CircuitBreaker, permit: Permit, error: BaseException, progress: CallProgress) -> None:
        """Count a failed attempt. One that was cancelled is its fault only where it was given up for being slow."""
        if isinstance(error, asyncio.CancelledError) and progress.given_up is not None:
            error = DeadlineExceededError(progress.given_up)
        if permit.began is None or not isinstance(error, Exception):
            breaker.dropped(permit)
        else:
            breaker.ended(permit, error, time.monotonic() - permit.began)

    def _returned(self, permit: Permit, error: BaseException | None) -> None:
        """Learn from an answer, also from one that nobody waits for any more."""
        if error is not None or permit.began is None or permit.ended is None:
            return
        self._seconds.append(permit.ended - permit.began)
        if permit.abandoned_at is not None and self._breaker is not None:
            self._breaker.came_late()


def _is_worth_another(error: BaseException) -> bool:
    """Return whether a source may well answer if it is asked again; its deadline has used its time up."""
    return not isinstance(error, AgenticKBError) and is_transient(error)
