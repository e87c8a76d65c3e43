"""Doors into coroutines: ``run`` and ``iterate`` for sync callers, ``arun`` and ``aiterate`` for async ones.

A sync door drives a private event loop in the caller's own thread; where a loop runs there already (a notebook), a
helper thread drives it while the caller waits. No client ever lives on the private loop: leaf calls run on worker
threads or on the background loop (``calls.Call``).
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, Generic, Self, TypeVar

from llama_index_agentic_kb._aio.calls import END, Scope, close_unstarted, scope_of_run
from llama_index_agentic_kb._aio.threads import WorkerPool

__all__ = ["aiterate", "arun", "iterate", "run"]

T = TypeVar("T")

_HELPERS = WorkerPool("bridge", max_workers=256)
"""Drives private loops for callers whose own thread runs an event loop already."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Perform a coroutine and return its result. Works inside a running event loop too (and blocks it)."""
    with _Bridge(work, contextvars.copy_context()) as bridge:
        bridge.drive(bridge.root)
        return bridge.root.result()


async def arun(work: Coroutine[Any, Any, T]) -> T:
    """Perform a coroutine and return its result. Cancelling the caller's task cancels all that it started."""
    scope = Scope(threads=False)
    try:
        return await scope.create_task(scope_of_run(scope, work, None))
    finally:
        close_unstarted(work)
        await scope.close()


def iterate(work: Coroutine[Any, Any, Any], context: contextvars.Context | None = None) -> Generator[Any, None, None]:
    """Perform a coroutine and yield the items that it emits; its error, if any, is raised after them.

    Args:
        work: Begins when the first item is asked for.
        context: What the coroutine sees; None is a copy of the context at that time.
    """
    items = _iterate(work, context)
    weakref.finalize(items, close_unstarted, work)  # one that is never read
    return items


def _iterate(work: Coroutine[Any, Any, Any], context: contextvars.Context | None) -> Generator[Any, None, None]:
    with _Bridge(work, context or contextvars.copy_context()) as bridge:
        while not bridge.root.done():
            bridge.drive(bridge.root, until_emitted=True)
            while bridge.emitted:
                yield bridge.emitted.popleft()
        bridge.root.result()


def aiterate(work: Coroutine[Any, Any, Any], context: contextvars.Context | None = None) -> AsyncGenerator[Any, None]:
    """Perform a coroutine and yield the items that it emits; see ``iterate``."""
    items = _aiterate(work, context)
    weakref.finalize(items, close_unstarted, work)
    return items


async def _aiterate(work: Coroutine[Any, Any, Any], context: contextvars.Context | None) -> AsyncGenerator[Any, None]:
    emitted: asyncio.Queue[Any] = asyncio.Queue()
    scope = Scope(threads=False)
    root = scope.create_task(scope_of_run(scope, work, emitted.put_nowait), context or contextvars.copy_context())
    root.add_done_callback(lambda _: emitted.put_nowait(END))
    try:
        while (item := await emitted.get()) is not END:
            yield item
        root.result()
    finally:
        await scope.close()
        close_unstarted(work)


_open_loops: set[asyncio.AbstractEventLoop] = set()
"""Loops of bridges that are not closed yet.

They are held here, so that the collector closes a stream that was dropped half read before it takes the stream's loop.
"""


@atexit.register
def _close_loops() -> None:
    """Close the loops of streams that are still open when the interpreter exits."""
    for loop in _open_loops:
        if not loop.is_running():
            loop.close()


class _Bridge(Generic[T]):
    """A private event loop that performs one coroutine."""

    def __init__(self, work: Coroutine[Any, Any, T], context: contextvars.Context) -> None:
        self._work = work
        self._scope = Scope(threads=True)
        self._loop = asyncio.new_event_loop()
        _open_loops.add(self._loop)
        self.emitted: deque[Any] = deque()
        self._pending: asyncio.Future[None] | None = None
        self.root: asyncio.Task[T] = self._loop.create_task(
            scope_of_run(self._scope, work, self._receive), context=context
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if not self.root.done():
                self.root.cancel()
            self.drive(self._loop.create_task(self._close()))
        finally:
            close_unstarted(self._work)
            self._loop.close()
            _open_loops.discard(self._loop)

    async def _close(self) -> None:
        await self._scope.close()
        for _ in range(10):
            if self.root.done():
                break
            await asyncio.sleep(0)
        if self.root.done() and not self.root.cancelled():
            self.root.exception()
        await self._loop.shutdown_asyncgens()

    def _receive(self, item: Any) -> None:
        self.emitted.append(item)
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(None)

    def drive(self, task: asyncio.Task[Any], *, until_emitted: bool = False) -> None:
        """Run the loop until the task is done, or until something was emitted."""
        work = self._until(task, until_emitted=until_emitted)
        if asyncio._get_running_loop() is None:  # noqa: SLF001 (get_running_loop would be the cause of every error)
            self._loop.run_until_complete(work)
        else:
            self._drive_on_helper(work)

    async def _until(self, task: asyncio.Task[Any], *, until_emitted: bool) -> None:
        waiting: list[asyncio.Future[Any]] = [task]
        if until_emitted:
            self._pending = self._loop.create_future()
            waiting.append(self._pending)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def _drive_on_helper(self, work: Coroutine[Any, Any, None]) -> None:
        done = threading.Event()
        failures: list[BaseException] = []

        def drive() -> None:
            try:
                self._loop.run_until_complete(work)
            except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
                failures.append(error)
            finally:
                done.set()

        _HELPERS.submit(drive)
        try:
            done.wait()
        except BaseException:  # the user's interrupt: the loop must stand still before it is closed
            self._loop.call_soon_threadsafe(self.root.cancel)
            done.wait()
            raise
        if failures:
            raise failures[0]
