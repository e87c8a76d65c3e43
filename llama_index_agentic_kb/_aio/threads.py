"""Bounded pools of daemon threads, one for each service that may hang, and the background event loop.

``concurrent.futures`` is unsuitable: its threads prevent the interpreter from exiting while one of them hangs, and the
event loop's default pool is shared, so that one source that hangs would block the healthy ones.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from llama_index_agentic_kb._types import Work

IDLE_SECONDS = 10.0
"""The time in seconds after which an idle thread ends."""


class Resettable(Protocol):
    """State that a forked child must not share: locks, threads, and counts of work that runs in the parent only."""

    def reset(self) -> None:
        """Return to the empty state."""


_resettable: weakref.WeakSet[Resettable] = weakref.WeakSet()


def reset_after_fork(item: Resettable) -> None:
    """Register an object, which is reset in each forked child as long as it exists."""
    _resettable.add(item)


def _reset_all() -> None:
    for item in list(_resettable):
        item.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)


class WorkerPool:
    """Runs submitted work on at most ``max_workers`` daemon threads, in order of arrival.

    Threads are started when needed and end when idle. Work that never returns occupies its thread, and no other pool's.
    """

    def __init__(self, name: str, max_workers: int = 8) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        self.name = name
        self.max_workers = max_workers
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Clear the pool; in a forked child the parent's threads do not run."""
        self.threads = 0
        """The number of live threads, idle or working."""
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._idle = 0  # waiting threads, including those that are notified and have not taken their work yet
        self._serial = itertools.count(1)

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work``, which never raises, on a thread of the pool as soon as one is free."""
        with self._changed:
            self._work.append(work)
            if self._idle >= len(self._work):
                self._changed.notify()
                return
            if self.threads >= self.max_workers:
                return
            self.threads += 1
            name = f"agentic-kb-{self.name}-{next(self._serial)}"
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        """Run submitted work until no more arrives for ``IDLE_SECONDS``."""
        while (work := self._take()) is not None:
            work()
            del work  # so that an idle thread has no reference to it

    def _take(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            came = self._changed.wait_for(self._work.__len__, timeout=IDLE_SECONDS)
            self._idle -= 1
            if came:
                return self._work.popleft()
            self.threads -= 1
            return None


SHARED_POOL = WorkerPool("shared", max_workers=64)
"""The pool for calls without a pool of their own: language models, postprocessors."""


class _BackgroundLoop:
    """The long-lived event loop on which sync entry points await async-only clients, so that connections persist."""

    def __init__(self) -> None:
        self._left_behind: list[asyncio.AbstractEventLoop] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Drop the loop, since its thread does not run in a forked child; ``get`` starts a new one."""
        if self._loop is not None:
            self._left_behind.append(self._loop)  # garbage collection would close the parent's sockets
        self._lock = threading.Lock()
        self._loop = None
        self.thread: threading.Thread | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; the first call starts it."""
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                self.thread = threading.Thread(target=self._loop.run_forever, name="agentic-kb-loop", daemon=True)
                self.thread.start()
            return self._loop


BACKGROUND = _BackgroundLoop()


def start_in_background(work: Work[None], context: contextvars.Context) -> Callable[[], object]:
    """Start a coroutine on the background loop in a copy of a context, and return a function that cancels it, once."""
    return context.run(asyncio.run_coroutine_threadsafe, work, BACKGROUND.get()).cancel
