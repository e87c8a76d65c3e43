"""Bulkheads: how many calls of one thing may be under way at once, and how many may wait for it.

What hangs fills its own bulkhead and no other (Nygard, "Release It!", 2007). Beyond some number, calls that run at
once slow each other down without doing more: a Chroma server answers 305 queries a second at 8 callers (p99 37 ms),
and 58 a second at 1,000 (p99 15.8 s); measured over HTTP, 20,000 x 384.

A place belongs to a call until the function that was called has returned, not until the caller has given it up: a
thread that hangs keeps its place, is counted as abandoned, and gives it back when it returns.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from llama_index_agentic_kb._aio import Call, WorkerPool
from llama_index_agentic_kb._aio.threads import reset_after_fork
from llama_index_agentic_kb.errors import BulkheadFullError, DeadlineExceededError

__all__ = ["MOST_WAITING", "Bulkhead", "BulkheadState", "Place", "call_deadline"]

MOST_WAITING: Final = 4_096
"""Calls that may wait. At 300 a second and 10 s for each, what came after the first 3,000 would be late anyway."""

HANGS_AFTER: Final = 0.5
"""Seconds after which calls that were given up are taken to hang: where they hold every place, nobody waits for them.
Before, they may just be a little late for callers in a hurry."""

_deadline: ContextVar[float | None] = ContextVar("agentic_kb_call_deadline", default=None)


def call_deadline() -> float | None:
    """Give the deadline (``time.monotonic()``) of the call that this code runs in; None where there is none.

    For what can end itself in time: a client that takes a timeout for each request.
    """
    return _deadline.get()


@dataclass(frozen=True, slots=True)
class BulkheadState:
    """A bulkhead at one moment.

    Args:
        at_work: Calls under way that somebody waits for.
        waiting: Calls that wait for a place.
        abandoned: Calls under way that nobody waits for any more: they were given up, and hold their places.
        places: How many calls may be under way, abandoned ones included.
    """

    at_work: int
    waiting: int
    abandoned: int
    places: int


class Place:
    """One call's place: asked for, had, begun in, left. Changed by its bulkhead alone, under the bulkhead's lock."""

    __slots__ = ("abandoned", "admitted", "began", "ended", "granted", "on_end", "on_thread", "refusal", "what")

    def __init__(self, on_end: Callable[[Place, BaseException | None], None] | None = None) -> None:
        self.what = ""
        self.granted = False
        self.abandoned = False
        self.on_thread = False
        self.admitted: Callable[[], None] | None = None
        self.refusal: str | None = None
        self.began: float | None = None
        self.ended: float | None = None
        self.on_end = on_end

    @property
    def at_work(self) -> bool:
        """Whether the function has been called and has not returned."""
        return self.began is not None and self.ended is None


class Bulkhead:
    """Lets so many calls run at once, on threads and event loops together; further ones wait in order of arrival.

    Args:
        name: For threads and errors.
        places: Calls under way at once. At least 1. Default 8.
        most_waiting: Calls that may wait; one more is refused at once. Default 4,096.
    """

    def __init__(self, name: str, places: int = 8, most_waiting: int = MOST_WAITING) -> None:
        if places < 1 or most_waiting < 0:
            raise ValueError(f"places must be at least 1 and most_waiting at least 0, got {places} and {most_waiting}")
        self.name = name
        self.places = places
        self.most_waiting = most_waiting
        self._pool = WorkerPool(name, max_workers=places)
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Start empty: in a forked child nothing of the parent's runs."""
        # Reentrant: the garbage collector may close a flow, which leaves its place, on a thread that holds the lock.
        self._lock = threading.RLock()
        self._held: set[Place] = set()
        self._waiting: OrderedDict[Place, None] = OrderedDict()
        self._abandoned = 0
        self._given_up = 0  # of these, the ones on threads: a task that was cancelled ends in a moment
        self._stuck_since: float | None = None  # when the last place went to one of them
        self._watched = False

    @property
    def state(self) -> BulkheadState:
        """How it stands."""
        with self._lock:
            return BulkheadState(len(self._held) - self._abandoned, len(self._waiting), self._abandoned, self.places)

    async def call(self, call: Call, place: Place | None = None) -> Any:
        """Make a call when there is a place for it.

        Args:
            call: Its deadline bounds the wait for a place too: what is late by then is never begun.
            place: Tells afterwards whether it was begun, and when; None makes one.

        Raises:
            BulkheadFullError: Too many wait already, or calls that hang hold every place.
            DeadlineExceededError: There was no place in time, or the call did not return in time.
        """
        place = place or Place()
        place.what = call.what
        self._enter(place)
        try:
            if not place.granted:
                await self._wait(place, call)
            sync = None if call.sync is None else partial(self._run, place, call.sync, call.deadline)
            native = None if call.native is None else partial(self._arun, place, call.native, call.deadline)
            return await Call(sync, native, call.deadline, self._pool, call.what)
        finally:
            self._leave(place)

    async def _wait(self, place: Place, call: Call) -> None:
        try:
            await Call(
                sync=partial(_admit, place), pool=_Turnstile(self, place), deadline=call.deadline, what=self.name
            )
        except DeadlineExceededError:
            raise DeadlineExceededError(
                f"{call.what} was not begun: its deadline passed while {self.places} others were under way"
            ) from None

    # -- places ----------------------------------------------------------------------------------------------------

    def _enter(self, place: Place) -> None:
        with self._lock:
            if self._is_stuck():
                raise BulkheadFullError(_stuck(place.what, self.places))
            if len(self._held) < self.places and not self._waiting:
                self._grant(place)
                return
            if len(self._waiting) >= self.most_waiting:
                many = len(self._waiting)
                raise BulkheadFullError(
                    f"{place.what} was not begun: {self.places} calls are under way, and {many} wait already"
                )
            self._waiting[place] = None

    def _grant(self, place: Place) -> None:
        place.granted = True
        self._held.add(place)

    def _leave(self, place: Place) -> None:
        """End the caller's interest in a place; one where a function still runs stays taken."""
        admitted: list[Callable[[], None]] = []
        with self._lock:
            self._waiting.pop(place, None)
            if place not in self._held:
                return
            if place.at_work:
                place.abandoned = True
                self._abandoned += 1
                self._given_up += place.on_thread
                self._note_stuck()
            else:
                admitted = self._free(place)
        _run_all(admitted)

    def _free(self, place: Place) -> list[Callable[[], None]]:
        """Give a place to whoever waits first."""
        self._held.discard(place)
        admitted = []
        while self._waiting and len(self._held) < self.places:
            following, _ = self._waiting.popitem(last=False)
            self._grant(following)
            if following.admitted is not None:
                admitted.append(following.admitted)
        return admitted

    def _is_stuck(self) -> bool:
        return self._stuck_since is not None and time.monotonic() - self._stuck_since >= HANGS_AFTER

    def _note_stuck(self) -> None:
        """Note whether calls that were given up hold every place; if so, look again when they are taken to hang."""
        if self._given_up < self.places:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.monotonic()
        if self._stuck_since is not None and not self._watched:
            self._watched = True
            timer = threading.Timer(HANGS_AFTER + 0.01, self._look_again)
            timer.daemon = True
            timer.start()

    def _look_again(self) -> None:
        """Let nobody wait for calls that hang."""
        refused: list[Place] = []
        with self._lock:
            self._watched = False
            if self._is_stuck():
                refused = list(self._waiting)
                self._waiting.clear()
            else:
                self._note_stuck()
        for place in refused:
            place.refusal = _stuck(place.what, self.places)
        _run_all([place.admitted for place in refused if place.admitted is not None])

    def when_admitted(self, place: Place, work: Callable[[], None]) -> None:
        """Do work when a place is granted or refused, on the thread that does so: it has to be short."""
        with self._lock:
            if place in self._waiting:
                place.admitted = work
                return
        work()

    # -- calls -----------------------------------------------------------------------------------------------------

    def _begin(self, place: Place, *, on_thread: bool = False) -> None:
        with self._lock:
            if place not in self._held:
                raise DeadlineExceededError(f"{self.name}: given up before it was begun")
            place.on_thread = on_thread
            place.began = time.monotonic()

    def _end(self, place: Place, error: BaseException | None) -> None:
        admitted: list[Callable[[], None]] = []
        with self._lock:
            place.ended = time.monotonic()
            if place in self._held:  # not so in a forked child
                self._abandoned -= place.abandoned
                self._given_up -= place.abandoned and place.on_thread
                self._note_stuck()
                admitted = self._free(place)
        _run_all(admitted)
        if place.on_end is not None:
            place.on_end(place, error)

    def _run(self, place: Place, sync: Callable[[], Any], deadline: float | None) -> Any:
        self._begin(place, on_thread=True)
        _deadline.set(deadline)  # the context is this call's own
        error: BaseException | None = None
        try:
            return sync()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._end(place, error)

    async def _arun(self, place: Place, native: Callable[[], Awaitable[Any]], deadline: float | None) -> Any:
        self._begin(place)
        _deadline.set(deadline)
        error: BaseException | None = None
        try:
            return await native()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._end(place, error)


class _Turnstile:
    """Where a call waits for its place without holding a thread: a pool whose only work is to let it through."""

    def __init__(self, bulkhead: Bulkhead, place: Place) -> None:
        self._bulkhead = bulkhead
        self._place = place

    def submit(self, work: Callable[[], None]) -> None:
        self._bulkhead.when_admitted(self._place, work)


def _admit(place: Place) -> None:
    if place.refusal is not None:
        raise BulkheadFullError(place.refusal)


def _stuck(what: str, places: int) -> str:
    return f"{what} was not begun: all its {places} places are held by calls that were given up and still hang"


def _run_all(works: list[Callable[[], None]]) -> None:
    for work in works:
        work()
