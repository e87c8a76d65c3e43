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
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

from llama_index_agentic_kb._aio.calls import (
    END,
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
    outside_loop,
    read_ahead,
    set_deadline,
    start,
    wait,
)
from llama_index_agentic_kb._aio.threads import WorkerPool, reset_after_fork
from llama_index_agentic_kb._types import Work

__all__ = [
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
    "outside_loop",
    "read_ahead",
    "reset_after_fork",
    "run",
    "set_deadline",
    "start",
    "wait",
]

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")

PARTING_SECONDS: Final = 0.1
"""The time that an interrupted coroutine gets to finish."""

_HELPERS = WorkerPool("bridge", max_workers=256)


def run(work: Work[T]) -> T:
    """Perform a coroutine and return its result. Works inside a running event loop too (and blocks it)."""
    loop = asyncio.new_event_loop()
    _open_loops.add(loop)
    try:
        return _drive(loop, arun(work, Scope(threads=True)))
    finally:
        _close(loop)


def bridged(method: Callable[Concatenate[S, P], Work[T]]) -> Callable[Concatenate[S, P], T]:
    """Return the sync form of an async method ``a...``."""

    @wraps(method)
    def sync(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    sync.__name__ = method.__name__.removeprefix("a")
    sync.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{sync.__name__}"
    return cast("Callable[Concatenate[S, P], T]", sync)


async def arun(work: Work[T], scope: Scope | None = None) -> T:
    """Perform a coroutine and return its result. Cancelling the caller's task cancels all tasks that it started."""
    scope = scope or Scope(threads=False)
    try:
        return await scope.perform(work, contextvars.copy_context()).task
    finally:
        await scope.close()


def iterate(work: Work[object], context: contextvars.Context | None = None) -> Generator[Any, None, None]:
    """Perform a coroutine and yield the items that it emits; its error, if any, is raised after them.

    It starts when the first item is requested, in ``context`` or a copy of the context at that time.
    """
    items = _iterate(work, context)
    weakref.finalize(items, close_unstarted, work)  # one that is never read
    return items


def _iterate(work: Work[object], context: contextvars.Context | None) -> Generator[Any, None, None]:
    loop = asyncio.new_event_loop()
    _open_loops.add(loop)
    scope = Scope(threads=True)
    items = _aiterate(work, context or contextvars.copy_context(), scope)

    async def following() -> object:
        return await anext(items, END)

    try:
        while (item := _drive(loop, following())) is not END:
            yield item
    finally:
        _close(loop, scope.close())


def aiterate(work: Work[object], context: contextvars.Context | None = None) -> AsyncGenerator[Any, None]:
    """Perform a coroutine and yield the items that it emits; see ``iterate``."""
    items = _aiterate(work, context)
    weakref.finalize(items, close_unstarted, work)
    return items


async def _aiterate(
    work: Work[object], context: contextvars.Context | None, scope: Scope | None = None
) -> AsyncGenerator[Any, None]:
    emitted, scope = asyncio.Queue[object](), scope or Scope(threads=False)
    root = scope.perform(work, context or contextvars.copy_context(), emitted.put_nowait).task
    root.add_done_callback(lambda _: emitted.put_nowait(END))
    try:
        while (item := await emitted.get()) is not END:
            yield item
        root.result()
    finally:
        await scope.close()


# -- private loops ----------------------------------------------------------------------------------------------------

_open_loops: set[asyncio.AbstractEventLoop] = set()
"""The private loops that are not closed: a stream that is dropped half read is garbage-collected before its loop."""


@atexit.register
def _close_loops() -> None:
    """Close the loops of streams that are still open when the interpreter exits."""
    for loop in _open_loops:
        if not loop.is_running():
            loop.close()


def _drive(loop: asyncio.AbstractEventLoop, work: Work[T]) -> T:
    """Perform a coroutine on a private loop, in this thread or, if a loop runs here already, in a helper thread."""
    task = loop.create_task(work)
    if asyncio._get_running_loop() is None:  # noqa: SLF001 (get_running_loop would be the context of every error)
        try:
            return loop.run_until_complete(task)
        finally:
            if not task.done():  # the user's interrupt
                task.cancel()
                loop.run_until_complete(asyncio.wait([task], timeout=PARTING_SECONDS))
    ended: Future[T] = Future()

    def run_loop() -> None:
        try:
            ended.set_result(loop.run_until_complete(task))
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            ended.set_exception(error)

    _HELPERS.submit(run_loop)
    try:
        return ended.result()
    except BaseException:  # the user's interrupt: the loop must stop before it is closed
        if not ended.done():
            loop.call_soon_threadsafe(task.cancel)
            ended.exception()
        raise


def _close(loop: asyncio.AbstractEventLoop, *last: Work[None]) -> None:
    """Close a private loop, after some last coroutines and the generators that were not read to their end."""
    try:
        for work in (*last, loop.shutdown_asyncgens()):
            _drive(loop, work)
    finally:
        loop.close()
        _open_loops.discard(loop)
