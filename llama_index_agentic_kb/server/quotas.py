"""Who may ask how much, and whose question is next: rates, and a fair queue in front of the answering.

Each tenant's questions wait in a line of their own. A free place goes to the tenant with the fewest running questions
for its weight, so a flood of one tenant lengthens its own line and nobody else's. When the whole queue is full, the
longest line loses its newest question. Each server counts for itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from llama_index_agentic_kb.server.errors import TooManyRequestsError

_MAX_BUCKETS: Final = 100_000  # maximum number of callers whose rates are kept
_NEW_SHARE: Final = 0.1  # how much of the mean time of an answer the newest one makes up


class Bucket:
    """A token bucket: so many requests may be made at once, and as many more in each minute."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute, self._left, self._filled_at = per_minute, float(per_minute), time.monotonic()

    def has_room(self) -> bool:
        """Take a token, and return whether there was one."""
        now = time.monotonic()
        self._left = min(self._per_minute, self._left + (now - self._filled_at) * self._per_minute / 60)
        self._filled_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    @property
    def seconds(self) -> float:
        """The time until there is a token."""
        return (1 - self._left) * 60 / self._per_minute


@dataclass(slots=True)
class Rates:
    """The rate of each caller or tenant on this server."""

    per_minute: int | None  # number of requests that each may make in a minute; None means no limit
    who: str = "caller"  # what each is, for messages
    what: str = "requests"  # what is counted, for messages
    _buckets: dict[str, Bucket] = field(default_factory=dict)

    def count(self, name: str) -> None:
        """Count a request; raise ``TooManyRequestsError`` if it is one too many."""
        if self.per_minute is None:
            return
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.clear()  # of users long gone, mostly; the others start anew
        bucket = self._buckets.setdefault(name, Bucket(self.per_minute))
        if not bucket.has_room():
            message = f"this {self.who} is allowed {self.per_minute} {self.what} a minute"
            raise TooManyRequestsError(message, bucket.seconds)


@dataclass(frozen=True)
class Quotas:
    """The limits of questions, which cost more than other requests."""

    running: int = 200  # questions that are answered at the same time; further ones wait
    tenant_running: int | None = None  # how many of them may be one tenant's; None means all
    tenant_per_minute: int | None = None  # questions of each tenant in a minute; None means no limit
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant, beside others, whose weight is 1


@dataclass(slots=True)
class _Line:
    """The questions of one tenant."""

    weight: float
    running: int = 0
    served: int = 0  # number of the last place that it got: the smallest is the longest ago
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class FairQueue:
    """Hands out places for running questions, used on one event loop; ``capacity`` counts those that run or wait."""

    def __init__(self, quotas: Quotas, capacity: int) -> None:
        self._quotas, self._capacity = quotas, capacity
        self._running = min(quotas.running, max(1, capacity // 2))  # the rest may wait
        self._tenant_running = quotas.tenant_running or self._running
        self._rates = Rates(quotas.tenant_per_minute, "tenant", "questions")
        self._lines: dict[str, _Line] = {}
        self._served = 0
        self._seconds = 1.0

    @property
    def running(self) -> int:
        """The number of questions that are being answered."""
        return sum(line.running for line in self._lines.values())

    @property
    def waiting(self) -> int:
        """The number of questions that wait."""
        return sum(len(line.waiting) for line in self._lines.values())

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Wait until a question may run, and hold its place while it does.

        Raises ``TooManyRequestsError`` if the tenant exceeded its rate, or the queue is full and its line the longest.
        """
        self._rates.count(tenant)
        line = self._lines.setdefault(tenant, _Line(self._quotas.weights.get(tenant, 1.0)))
        try:
            await self._enter(line)
            began = time.monotonic()
            try:
                yield
            finally:
                self._seconds += _NEW_SHARE * (time.monotonic() - began - self._seconds)
                self._leave(line)
        finally:
            if not line.running and not line.waiting and self._lines.get(tenant) is line:
                del self._lines[tenant]

    async def _enter(self, line: _Line) -> None:
        if self.running + self.waiting >= self._capacity:
            self._make_room(line)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append(place)
        self._fill()
        try:
            await place
        except BaseException:
            if place.cancel() or place in line.waiting:  # nobody waits any longer
                line.waiting.remove(place)
            elif not place.cancelled() and place.exception() is None:  # it got the place at the same moment
                self._leave(line)
            raise

    def _leave(self, line: _Line) -> None:
        line.running -= 1
        self._fill()

    def _fill(self) -> None:
        """Hand out the free places."""
        while self.running < self._running:
            ready = [line for line in self._lines.values() if line.waiting and line.running < self._tenant_running]
            if not ready:
                return
            line = min(ready, key=lambda line: (line.running / line.weight, line.served))
            place = line.waiting.popleft()
            if not place.done():  # else it was cancelled, and its task has not run since
                self._served += 1
                line.running, line.served = line.running + 1, self._served
                place.set_result(None)

    def _make_room(self, line: _Line) -> None:
        """Refuse the newest question of the longest line; of equal ones, the one that arrives."""
        longest = max(self._lines.values(), key=lambda line: len(line.waiting) / line.weight)
        if longest is line or len(longest.waiting) / longest.weight <= (len(line.waiting) + 1) / line.weight:
            raise self._refusal(line)
        last = longest.waiting.pop()
        if not last.done():
            last.set_exception(self._refusal(longest))

    def _refusal(self, line: _Line) -> TooManyRequestsError:
        seconds = len(line.waiting) * self._seconds / max(1, line.running)
        return TooManyRequestsError("this tenant has too many questions in the queue", seconds)
