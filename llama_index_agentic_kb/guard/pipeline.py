"""Everything that stands around a call of something that may fail or hang, in one order.

    retries ─▶ hedging ─▶ circuit breaker ─▶ bulkhead ─▶ the call

The order is Polly's and Resilience4j's: each attempt is counted by the breaker, and holds a place only while it runs.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from llama_index_agentic_kb._aio import Call, Job, cancel, earliest, start, wait
from llama_index_agentic_kb._aio.threads import reset_after_fork
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.guard.breaker import BreakerPolicy, CircuitBreaker, CircuitState, Passage
from llama_index_agentic_kb.guard.bulkhead import Bulkhead, Place
from llama_index_agentic_kb.guard.retries import NO_RETRIES, RetryBudget, RetryPolicy, is_transient, retried

__all__ = ["Health", "Latencies", "Progress", "ResiliencePipeline", "as_hedge_after"]

FEWEST: Final = 10
"""Answers that have to be known before a percentile of their times means anything."""


@dataclass(frozen=True, slots=True)
class Health:
    """How something that is called stands at one moment.

    Args:
        at_work: Calls under way that somebody waits for.
        waiting: Calls that wait for a place.
        abandoned: Calls under way that were given up; each holds a place until it returns.
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


class Progress:
    """How far one search has come: read by who waits for it, and decides that it has waited long enough.

    Args:
        budget: The request's retries; None makes one for this search alone.
    """

    def __init__(self, budget: RetryBudget | None = None) -> None:
        self.budget = budget or RetryBudget()
        self.attempts = 0
        """Calls, retries counted and hedges not."""
        self.calls = 0
        """Calls through pipelines, whatever became of them: attempts less these are retries."""
        self.hedges = 0
        """Calls that were made beside one that was slow."""
        self.given_up: str | None = None
        """Why it was given up before its deadline."""
        self._places: list[Place] = []
        self._jobs: list[Job[Any]] = []
        self._shared: list[Progress] = []

    @property
    def retries(self) -> int:
        """Calls that were made again."""
        return max(0, self.attempts - self.calls)

    @property
    def at_work_since(self) -> float | None:
        """``time.monotonic()`` at which the oldest call that is still under way began; None while none is."""
        own = [place.began for place in self._places if place.at_work and place.began is not None]
        shared = [since for one in self._shared if (since := one.at_work_since) is not None]
        return min([*own, *shared], default=None)

    def builds_on(self, shared: Progress) -> None:
        """Count the work of another one as this one's: what several searches wait for together."""
        self._shared.append(shared)

    def note(self, place: Place) -> None:
        """Add a call's place."""
        self._places.append(place)

    def started(self, job: Job[Any]) -> None:
        """Add a call's job."""
        self._jobs.append(job)

    async def give_up(self, reason: str) -> None:
        """Stop all calls: each raises ``DeadlineExceededError`` with the reason where it is waited for."""
        self.given_up = reason
        for job in self._jobs:
            await cancel(job)
        for one in self._shared:
            if one.at_work_since is not None:
                await one.give_up(reason)

    def result_of(self, job: Job[Any]) -> Any:
        """Give a call's result, or raise why there is none."""
        if self.given_up is not None and isinstance(job.error, DeadlineExceededError):
            raise DeadlineExceededError(self.given_up)
        return job.result()


class Latencies:
    """How long the last answers took, in seconds. Safe to use from any number of threads."""

    def __init__(self, most: int = 64) -> None:
        self._recent: deque[float] = deque(maxlen=most)
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin with a lock that nobody holds."""
        self._lock = threading.RLock()

    def add(self, seconds: float) -> None:
        """Add an answer's time."""
        with self._lock:
            self._recent.append(seconds)

    def percentile(self, percent: float, fewest: int = 1) -> float | None:
        """Give the time within which so many per cent of the last answers came; None where there are too few."""
        with self._lock:
            times = sorted(self._recent)
        if len(times) < fewest:
            return None
        return times[min(len(times) - 1, int(len(times) * percent / 100))]

    @property
    def median(self) -> float | None:
        """The time of an answer; None before the first."""
        return self.percentile(50)


class ResiliencePipeline:
    """Makes the calls of one thing. Safe to use from any number of threads and event loops.

    Args:
        name: Of what is called, for threads and errors: "source 'docs'".
        places: Calls under way at once; see ``Bulkhead``.
        breaker: When it is left alone; None never does.
        retries: How often a failure that is worth it is tried again.
        hedge_after: Seconds after which a call that has not answered is made a second time beside the first, or a
            percentile of the last answers ("p95"); None never does.
    """

    def __init__(
        self,
        name: str,
        *,
        places: int = 8,
        breaker: BreakerPolicy | None = None,
        retries: RetryPolicy = NO_RETRIES,
        hedge_after: float | str | None = None,
    ) -> None:
        self._bulkhead = Bulkhead(name, places)
        self._breaker = None if breaker is None else CircuitBreaker(name, breaker)
        self._retries = retries
        self._hedge_after = as_hedge_after(hedge_after)
        self.latencies = Latencies()

    @property
    def health(self) -> Health:
        """How it stands."""
        state, breaker = self._bulkhead.state, self._breaker
        return Health(
            at_work=state.at_work,
            waiting=state.waiting,
            abandoned=state.abandoned,
            places=state.places,
            circuit=None if breaker is None else breaker.state,
            reason=None if breaker is None else breaker.reason,
            median_seconds=self.latencies.median,
        )

    async def plain_call(self, call: Call) -> Any:
        """Make a call that only needs a place: work of ours over what came back, or what a search needs beside it."""
        return await self._bulkhead.call(call)

    async def call(self, call: Call, progress: Progress) -> Any:
        """Make a call.

        Args:
            call: Its deadline bounds the whole: waiting for a place, all attempts, and what is waited between them.
            progress: Told of each attempt.

        Raises:
            CircuitOpenError: It failed too often lately.
            BulkheadFullError: Too many calls wait already, or hang.
            DeadlineExceededError: It did not answer in time, or was given up before.
            Exception: What the call raised in its last attempt.
        """
        progress.calls += 1
        return await retried(
            partial(self._hedged, call, progress),
            policy=self._retries,
            budget=progress.budget,
            deadline=call.deadline,
            worth=_is_worth_another,
        )

    # -- hedging ---------------------------------------------------------------------------------------------------

    async def _hedged(self, call: Call, progress: Progress, deadline: float | None) -> Any:
        """Make one attempt, and a second one beside it where it is slow; the first answer wins."""
        progress.attempts += 1
        first = await self._start(call, progress, deadline)
        seconds = self._hedge_seconds()
        if seconds is not None:
            await wait([first], deadline=earliest(deadline, time.monotonic() + seconds))
            if not first.done and progress.budget.take():
                progress.hedges += 1
                second = await self._start(call, progress, deadline)
                return await _first_answer(first, second, progress)
        await wait([first])
        return progress.result_of(first)

    def _hedge_seconds(self) -> float | None:
        if isinstance(self._hedge_after, str):
            return self.latencies.percentile(float(self._hedge_after[1:]), FEWEST)
        return self._hedge_after

    async def _start(self, call: Call, progress: Progress, deadline: float | None) -> Job[Any]:
        bounded = call if deadline == call.deadline else replace(call, deadline=deadline)
        job: Job[Any] = start(self._attempt(bounded, progress))
        progress.started(job)
        return job

    # -- one attempt -----------------------------------------------------------------------------------------------

    async def _attempt(self, call: Call, progress: Progress) -> Any:
        if self._breaker is None:
            place = Place(on_end=self._timed)
            progress.note(place)
            return await self._bulkhead.call(call, place)
        passage = self._breaker.admit()
        place = Place(on_end=partial(self._returned, self._breaker, passage))
        progress.note(place)
        try:
            value = await self._bulkhead.call(call, place)
        except asyncio.CancelledError:
            self._stopped(self._breaker, passage, place, progress)
            raise
        except Exception as error:
            if place.began is None:
                self._breaker.dropped(passage)
            else:
                self._breaker.ended(passage, error, time.monotonic() - place.began)
            raise
        self._breaker.ended(passage, None, 0.0)
        return value

    @staticmethod
    def _stopped(breaker: CircuitBreaker, passage: Passage, place: Place, progress: Progress) -> None:
        """Tell of a call that was stopped: that is its fault only where it was given up for being slow."""
        if progress.given_up is None or place.began is None:
            breaker.dropped(passage)
        else:
            error = DeadlineExceededError(progress.given_up)
            breaker.ended(passage, error, time.monotonic() - place.began)

    def _timed(self, place: Place, error: BaseException | None) -> None:
        if error is None and place.began is not None and place.ended is not None:
            self.latencies.add(place.ended - place.began)

    def _returned(self, breaker: CircuitBreaker, passage: Passage, place: Place, error: BaseException | None) -> None:
        """Learn from an answer, also from one that nobody waits for any more."""
        self._timed(place, error)
        if place.abandoned and error is None:
            breaker.came_late(passage)


async def _first_answer(first: Job[Any], second: Job[Any], progress: Progress) -> Any:
    """Give what answers first, and stop the other; where one fails, wait for the other."""
    await wait([first, second], first=True)
    if (first if first.done else second).error is not None:
        await wait([first, second])
    winner, other = (second, first) if second.done and second.error is None else (first, second)
    await cancel(other)
    return progress.result_of(winner)


def _is_worth_another(error: BaseException) -> bool:
    """Whether a source may well answer if it is asked again; a deadline of ours has used its time up."""
    return not isinstance(error, AgenticKBError) and is_transient(error)


def as_hedge_after(value: float | str | None) -> float | str | None:
    """Check when a call is hedged.

    Raises:
        ConfigurationError: It is neither a number of seconds nor a percentile.
    """
    if isinstance(value, str):
        percentile = re.fullmatch(r"p([1-9]\d?)", value)
        if percentile is not None:
            return value
    elif value is None or (not isinstance(value, bool) and value > 0):
        return value
    raise ConfigurationError(f"hedge_after must be seconds above 0, or a percentile such as 'p95', got {value!r}")
