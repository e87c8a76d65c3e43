"""The bulkhead: a limit of concurrent calls of one service, which keeps a service that hangs from blocking others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeVar

from llama_index_agentic_kb._aio import (
    Call,
    Stream,
    WorkerPool,
    call_deadline,
    earliest,
    on_loop,
    open_stream,
    reset_after_fork,
    settle,
)
from llama_index_agentic_kb.errors import (
    BulkheadFullError,
    DeadlineExceededError,
)

T = TypeVar("T")

MAX_WAITING: Final = 4_096
"""The maximum number of calls that wait for a permit. At 300 calls a second, 3,000 take 10 s."""

HANGS_AFTER: Final = 0.5
"""Seconds after which an abandoned call counts as hanging. If hanging calls occupy all permits, new calls fail at once.
Before that, the call may just be a little late for a short deadline."""


@dataclass(slots=True, eq=False)
class Permit:
    """A place in a bulkhead, for one attempt: waited for, entered (``with``), and released.

    Args:
        on_end: Called with the permit and the error, if any, when the function returns, however late.
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

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done when the place is free, or when somebody settles it to look."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        self.wake = partial(on_loop, loop, settle, granted, None, None)
        return granted

    def __enter__(self) -> None:
        """Mark the function as started, unless the permit was released before."""
        if self.bulkhead is None or not self.bulkhead.begin(self):
            raise DeadlineExceededError("given up before it was begun")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Mark the function as ended, release the permit and call ``on_end``."""
        self.ended = time.monotonic()
        if self.bulkhead is not None:
            self.bulkhead.leave(self)
        if self.on_end is not None:
            self.on_end(self, error)


class BulkheadState(NamedTuple):
    """The numbers of running, waiting and abandoned calls of a bulkhead at one moment; see ``Health``."""

    at_work: int
    waiting: int
    abandoned: int


class Bulkhead:
    """A limit of concurrent calls, on threads and event loops together; more calls wait in order of arrival.

    Args:
        name: The name used in thread names.
        max_concurrency: The maximum number of running calls. Default 8.
    """

    def __init__(self, name: str, max_concurrency: int = 8) -> None:
        self.max_concurrency = max_concurrency
        self._pool = WorkerPool(name, max_workers=max_concurrency)
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Return to the empty state: a forked child runs none of the parent's calls."""
        # Reentrant: the garbage collector may close a coroutine, which calls leave(), on a thread that has the lock.
        self._lock = threading.RLock()
        self._held: set[Permit] = set()
        self._waiting: OrderedDict[Permit, None] = OrderedDict()

    @property
    def state(self) -> BulkheadState:
        """The number of running, waiting and abandoned calls."""
        with self._lock:
            abandoned = sum(permit.abandoned_at is not None for permit in self._held)
            return BulkheadState(len(self._held) - abandoned, len(self._waiting), abandoned)

    async def call(self, call: Call[T], permit: Permit | None = None, *, deadline: float | None = None) -> T:
        """Make a call on this bulkhead's pool once a permit is available; without one by its deadline, never.

        Raises:
            BulkheadFullError: Too many calls are waiting, or hanging calls occupy all permits.
            DeadlineExceededError: No permit was available in time, or the call did not return in time.
        """
        permit = permit or Permit()
        deadline = earliest(deadline, call.deadline)
        await self._enter(permit, call.what, deadline)
        try:
            return await Call(call.sync, call.native, deadline, self._pool, call.what, permit).perform()
        finally:
            if permit.ended is None:
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
        """Open a stream once a permit is available; see ``call``. The reader must ``leave`` the permit at the end."""
        await self._enter(permit, what, deadline)
        try:
            return open_stream(sync=sync, native=native, pool=self._pool, what=what, within=permit)
        except BaseException:
            self.leave(permit)
            raise

    def begin(self, permit: Permit) -> bool:
        """Record the start time of a permit's function, and return False if the permit was released before."""
        with self._lock:
            if permit in self._held:
                permit.began = time.monotonic()
            return permit.began is not None

    async def _enter(self, permit: Permit, what: str, deadline: float | None) -> None:
        permit.bulkhead, deadline = self, earliest(deadline, call_deadline())
        with self._lock:
            if len(self._held) < self.max_concurrency and not self._waiting:
                self._held.add(permit)
                return
            self._refuse_if_hung(what)
            if len(self._waiting) >= MAX_WAITING:
                raise BulkheadFullError(
                    f"{what} was not begun: {self.max_concurrency} calls are under way, and {len(self._waiting)} wait "
                    "already"
                )
            self._waiting[permit] = None
            granted = permit.wait()
        try:
            while True:
                left = HANGS_AFTER if deadline is None else min(HANGS_AFTER, deadline - time.monotonic())
                timer = granted.get_loop().call_later(max(0.0, left), settle, granted, None, None)
                try:
                    await granted
                finally:
                    timer.cancel()
                with self._lock:
                    if permit in self._held:
                        return
                    self._refuse_if_hung(what, deadline)
                    granted = permit.wait()
        except BaseException:
            self.leave(permit)
            raise

    def _refuse_if_hung(self, what: str, deadline: float | None = None) -> None:
        """Raise after the deadline, or if calls abandoned more than ``HANGS_AFTER`` seconds ago occupy all permits."""
        now, places = time.monotonic(), self.max_concurrency
        if deadline is not None and now >= deadline:
            raise DeadlineExceededError(
                f"{what} was not begun: its deadline passed while {places} others were under way"
            )
        since = [now if held.abandoned_at is None else held.abandoned_at for held in self._held]
        if len(since) >= places and max(since) <= now - HANGS_AFTER:
            raise BulkheadFullError(
                f"{what} was not begun: all its {places} places are held by calls that were given up and still hang"
            )

    def leave(self, permit: Permit) -> None:
        """Release a permit and wake the next waiting call; if its function still runs, mark it as abandoned."""
        with self._lock:
            self._waiting.pop(permit, None)
            if permit not in self._held:  # released already, or granted in the parent of a forked child
                return
            if permit.at_work:
                permit.abandoned_at = permit.abandoned_at or time.monotonic()
                return
            self._held.discard(permit)
            while self._waiting and len(self._held) < self.max_concurrency:
                following, _ = self._waiting.popitem(last=False)
                self._held.add(following)
                if following.wake is not None:
                    following.wake()
