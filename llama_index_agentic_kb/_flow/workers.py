"""Bounded pools of daemon threads: one bulkhead for each thing that may hang.

``concurrent.futures`` is no help here: its threads keep the interpreter from exiting while one of them hangs, and
the event loop's default pool is shared, so that one hung source starves the healthy ones.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["Pool", "WorkerPool", "reset_after_fork"]

IDLE_SECONDS = 10.0
"""An idle thread ends after this many seconds."""


class Pool(Protocol):
    """Whatever runs work that is submitted to it."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` at once or later; it delivers its own result, and never raises."""


class Resettable(Protocol):
    """What a forked child has to begin anew: locks, threads, and counts of what runs in the parent alone."""

    def reset(self) -> None:
        """Start empty."""


_resettable: weakref.WeakSet[Resettable] = weakref.WeakSet()


def reset_after_fork(one: Resettable) -> None:
    """Have an object start empty in each child that is forked while it lives."""
    _resettable.add(one)


class WorkerPool:
    """Runs submitted work on at most ``max_workers`` daemon threads, in order of arrival.

    Threads are started as they are needed and end when idle. Work that never returns keeps its thread: the pool is
    then smaller by one, and no other pool is touched.

    Args:
        name: Shown in the threads' names.
        max_workers: How many threads at most. At least 1.
    """

    def __init__(self, name: str, max_workers: int = 8) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        self.name = name
        self.max_workers = max_workers
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Start empty; also in a forked child, whose copies of the threads do not run."""
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._idle = 0  # threads that wait for work, those that were woken and have not taken theirs yet included
        self._serial = 0

    @property
    def threads(self) -> int:
        """How many threads are alive, idle or at work."""
        return self._threads

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` on a thread of the pool as soon as one is free.

        Args:
            work: Takes nothing, returns nothing and never raises: it delivers its own result.
        """
        with self._changed:
            self._work.append(work)
            if self._idle >= len(self._work):
                self._changed.notify()
                return
            if self._threads >= self.max_workers:
                return
            self._threads += 1
            self._serial += 1
            serial = self._serial
        threading.Thread(target=self._serve, name=f"agentic-kb-{self.name}-{serial}", daemon=True).start()

    def _serve(self) -> None:
        """Do one piece of work after another; end when none came for a while."""
        while (work := self._take()) is not None:
            work()
            del work  # an idle thread keeps nothing alive

    def _take(self) -> Callable[[], None] | None:
        """Give the next piece of work, or None when the thread shall end."""
        with self._changed:
            self._idle += 1
            came = self._changed.wait_for(lambda: bool(self._work), timeout=IDLE_SECONDS)
            self._idle -= 1
            if came:
                return self._work.popleft()
            self._threads -= 1
            return None


def _reset_all() -> None:
    for one in list(_resettable):
        one.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
