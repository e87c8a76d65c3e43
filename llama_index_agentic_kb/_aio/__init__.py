"""Coroutines for all internal code, with sync and async entry points.

Everything below the public methods is ``async def``. A sync method uses ``run``, which performs the coroutine on a
private event loop in the caller's own thread; if a loop already runs there (a notebook), a helper thread runs the
private one while the caller waits. Only leaf calls differ between the two: a ``Call`` has a sync function, an async
one, or both. A sync entry point prefers the sync function, on a worker thread; an async one prefers the async function,
on the caller's loop. So no method is written twice, and an async client is never used on the private loop: sync entry
points await async-only clients on one long-lived background loop.

    async def lookup(source, question):
        job = start(Call(sync=lambda: source.search(question)))
        await wait([job], deadline=deadline_after(0.5))
        return job.result() if job.done else []

The deadline of a context (``set_deadline``) limits every call that is made in it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from contextlib import closing
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from llama_index_agentic_kb._aio.calls import (
    END,
    PARTING_TURNS,
    Call,
    Job,
    Scope,
    as_exception,
    call_deadline,
    cancel,
    close_unstarted,
    deadline_after,
    earliest,
    emit,
    emitting,
    gather,
    on_loop,
    open_stream,
    outside_loop,
    set_deadline,
    start,
    wait,
)
from llama_index_agentic_kb._aio.threads import WorkerPool, reset_after_fork
from llama_index_agentic_kb._types import Work

__all__ = [
    "END",
    "Call",
    "Job",
    "WorkerPool",
    "aiterate",
    "arun",
    "as_exception",
    "bridged",
    "call_deadline",
    "cancel",
    "deadline_after",
    "earliest",
    "emit",
    "emitting",
    "gather",
    "iterate",
    "on_loop",
    "open_stream",
    "outside_loop",
    "reset_after_fork",
    "run",
    "set_deadline",
    "start",
    "wait",
]

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")

_HELPERS = WorkerPool("bridge", max_workers=256)


def run(work: Work[T]) -> T:
    """Perform a coroutine and return its result. Works inside a running event loop too (and blocks it)."""
    with closing(_Bridge(work, contextvars.copy_context())) as bridge:
        while not bridge.root.done():
            bridge.drive()
        return bridge.root.result()


def bridged(method: Callable[Concatenate[S, P], Work[T]]) -> Callable[Concatenate[S, P], T]:
    """Return the sync form of an async method ``a...``."""

    @wraps(method)
    def sync(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    sync.__name__ = method.__name__.removeprefix("a")
    sync.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{sync.__name__}"
    return cast("Callable[Concatenate[S, P], T]", sync)


async def arun(work: Work[T]) -> T:
    """Perform a coroutine and return its result. Cancelling the caller's task cancels all tasks that it started."""
    context = contextvars.copy_context()
    scope = Scope(threads=False, context=context)
    try:
        return await scope.create_task(work, context)
    finally:
        close_unstarted(work)
        await scope.close()


def iterate(work: Work[object], context: contextvars.Context | None = None) -> Generator[Any, None, None]:
    """Perform a coroutine and yield the items that it emits; its error, if any, is raised after them.

    It starts when the first item is requested, in ``context`` or a copy of the context at that time.
    """
    items = _iterate(work, context)
    weakref.finalize(items, close_unstarted, work)  # one that is never read
    return items


def _iterate(work: Work[object], context: contextvars.Context | None) -> Generator[Any, None, None]:
    with closing(_Bridge(work, context or contextvars.copy_context(), emits=True)) as bridge:
        while not bridge.root.done():
            bridge.drive()
            while bridge.emitted:
                yield bridge.emitted.popleft()
        bridge.root.result()


def aiterate(work: Work[object], context: contextvars.Context | None = None) -> AsyncGenerator[Any, None]:
    """Perform a coroutine and yield the items that it emits; see ``iterate``."""
    items = _aiterate(work, context)
    weakref.finalize(items, close_unstarted, work)
    return items


async def _aiterate(work: Work[object], context: contextvars.Context | None) -> AsyncGenerator[Any, None]:
    emitted: asyncio.Queue[object] = asyncio.Queue()
    context = context or contextvars.copy_context()
    scope = Scope(threads=False, context=context, receive=emitted.put_nowait)
    root = scope.create_task(work, context)
    root.add_done_callback(lambda _: emitted.put_nowait(END))
    try:
        while (item := await emitted.get()) is not END:
            yield item
        root.result()
    finally:
        await scope.close()
        close_unstarted(work)


_open_loops: set[asyncio.AbstractEventLoop] = set()
"""The loops of bridges that are not closed: a stream that is dropped half read is garbage-collected before its loop."""


@atexit.register
def _close_loops() -> None:
    """Close the loops of streams that are still open when the interpreter exits."""
    for loop in _open_loops:
        if not loop.is_running():
            loop.close()


class _Bridge(Generic[T]):
    """A private event loop that performs one coroutine; with ``emits``, emitted items are stored for a reader."""

    def __init__(self, work: Work[T], context: contextvars.Context, *, emits: bool = False) -> None:
        self._work = work
        self._loop = asyncio.new_event_loop()
        _open_loops.add(self._loop)
        self.emitted: deque[object] = deque()
        self._scope = Scope(threads=True, context=context, receive=self._receive if emits else None)
        self.root: asyncio.Task[T] = self._loop.create_task(work, context=context)
        self.root.add_done_callback(self._stop)

    def close(self) -> None:
        """Cancel what still runs, and close the loop."""
        try:
            self.root.cancel()
            ending = self._loop.create_task(self._close())
            ending.add_done_callback(self._stop)
            while not ending.done():
                self.drive()
        finally:
            close_unstarted(self._work)
            self._loop.close()
            _open_loops.discard(self._loop)

    async def _close(self) -> None:
        await self._scope.close()
        for _ in range(PARTING_TURNS):
            if self.root.done():
                break
            await asyncio.sleep(0)
        if self.root.done() and not self.root.cancelled():
            self.root.exception()  # marks it as seen
        await self._loop.shutdown_asyncgens()

    def _stop(self, _: object) -> None:
        self._loop.stop()

    def _receive(self, item: object) -> None:
        self.emitted.append(item)
        self._loop.stop()

    def drive(self) -> None:
        """Run the loop until an item is emitted, or the root task or the closing task ends."""
        if asyncio._get_running_loop() is None:  # noqa: SLF001 (get_running_loop would be the context of every error)
            self._loop.run_forever()
            return
        ended: Future[None] = Future()

        def run_loop() -> None:
            try:
                ended.set_result(self._loop.run_forever())
            except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
                ended.set_exception(error)

        _HELPERS.submit(run_loop)
        try:
            ended.result()
        except BaseException:  # the user's interrupt: the loop must stop before it is closed
            if not ended.done():
                self._loop.call_soon_threadsafe(self.root.cancel)
                ended.exception()
            raise
