"""Bounded pools of daemon threads: one bulkhead for each thing that may hang.

``concurrent.futures`` is no help here: its threads keep the interpreter from exiting while one of them hangs, and
the event loop's default pool is shared, so that one hung source starves the healthy ones.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

__all__ = ["WorkerPool"]

IDLE_SECONDS = 10.0
"""An idle thread ends after this many seconds."""

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


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
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        """Start empty; also in a forked child, whose copies of the threads do not run."""
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting = 0
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
        with self._lock:
            self._work.put(work)
            spare = self._waiting - self._work.qsize()
            if spare >= 0 or self._threads >= self.max_workers:
                return
            self._threads += 1
            self._serial += 1
            serial = self._serial
        threading.Thread(target=self._serve, name=f"agentic-kb-{self.name}-{serial}", daemon=True).start()

    def _serve(self) -> None:
        """Do one piece of work after another; end when none came for a while."""
        while True:
            with self._lock:
                self._waiting += 1
            try:
                work = self._work.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    self._waiting -= 1
                    if not self._work.empty():
                        continue
                    self._threads -= 1
                    return
            with self._lock:
                self._waiting -= 1
            work()
            del work


def _reset_all() -> None:
    for pool in list(_pools):
        pool._reset()  # noqa: SLF001 (this module's own class)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
