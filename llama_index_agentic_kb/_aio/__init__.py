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
import inspect
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

from llama_index_agentic_kb._aio.calls import (
    END,
    NO_SCOPE,
    Call,
    Job,
    Scope,
    WorkerPool,
    as_exception,
    call_deadline,
    current_scope,
    deadline_after,
    earliest,
    on_loop,
    read_ahead,
    receiver,
    reset_after_fork,
    set_deadline,
    start,
    start_in_background,
)
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
    "start_in_background",
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
        return _complete(loop, task)
    ended: Future[T] = Future()

    def run_loop() -> None:
        try:
            ended.set_result(_complete(loop, task))
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


def _complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    try:
        return loop.run_until_complete(task)
    finally:
        if not task.done():  # the user's interrupt, or an exit of the program
            task.cancel()
            loop.run_until_complete(asyncio.wait([task], timeout=PARTING_SECONDS))


def _close(loop: asyncio.AbstractEventLoop, *last: Work[None]) -> None:
    """Close a private loop, after some last coroutines and the generators that were not read to their end."""
    try:
        for work in (*last, loop.shutdown_asyncgens()):
            _drive(loop, work)
    finally:
        loop.close()
        _open_loops.discard(loop)


# -- waiting for jobs -------------------------------------------------------------------------------------------------


async def wait(jobs: Sequence[Job[object]], *, deadline: float | None = None, first: bool = False) -> None:
    """Wait until all jobs are done (with ``first``: any of them), or the deadline passes.

    Errors of jobs are not raised here; ``Job.done`` tells which jobs have ended. Other coroutines always get a turn.
    """
    tasks = [job.task for job in jobs if not job.done]
    if not tasks or (first and len(tasks) < len(jobs)):
        await asyncio.sleep(0)
        return
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED if first else asyncio.ALL_COMPLETED)


async def cancel(job: Job[object]) -> None:
    """Stop a job, and give its coroutine a turn to clean up."""
    job.cancel()
    await asyncio.sleep(0)


async def gather(works: Iterable[Work[T] | Call[T]], *, deadline: float | None = None) -> list[Job[T]]:
    """Run coroutines and calls concurrently, and return their jobs in order; late ones are cancelled."""
    jobs = [start(work) for work in works]
    await wait(jobs, deadline=deadline)
    for job in jobs:
        if not job.done:
            await cancel(job)
    return jobs


# -- items that a coroutine emits -------------------------------------------------------------------------------------


READER_TURNS: Final = 3
"""The event loop iterations in which a reader gets an item before its emitter continues: the reader's task wakes, its
end is reported, and a private loop stops."""


async def emit(item: object) -> None:
    """Pass an item to the reader of ``iterate`` or ``aiterate``; ``run`` and ``arun`` discard it."""
    receive, turns = receiver.get(), 1
    if receive is not None:
        receive(item)
        turns = READER_TURNS
    for _ in range(turns):
        await asyncio.sleep(0)


async def emitting(work: Awaitable[T], change: Callable[[Any], object], rest: Callable[[], object] | None = None) -> T:
    """Await a coroutine, and replace each item that it emits by the result of ``change``, unless that is empty.

    ``rest`` returns one last item to emit after the coroutine has returned, unless it is empty.
    """
    receive = receiver.get()

    def changed(item: object) -> None:
        out = change(item)
        if out and receive is not None:
            receive(out)

    token = receiver.set(changed)
    try:
        result = await work
    finally:
        receiver.reset(token)
    last = rest() if rest is not None else None
    if last:
        await emit(last)
    return result


# -- the loop ---------------------------------------------------------------------------------------------------------


@contextmanager
def outside_loop() -> Iterator[None]:
    """Hide the private loop of a sync entry point while user code runs, so that this code may start its own loop.

    With an async entry point the user's own loop stays visible. A worker thread has no loop to hide.
    """
    loop = asyncio._get_running_loop()  # noqa: SLF001 (None if no loop runs)
    if loop is None or not current_scope.get(NO_SCOPE).threads:
        yield
        return
    task = asyncio.current_task()
    if task is not None:
        asyncio.tasks._leave_task(loop, task)  # noqa: SLF001 (documented for third-party task implementations)
    asyncio._set_running_loop(None)  # noqa: SLF001 (the hook that event loops use)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)  # noqa: SLF001
        if task is not None:
            asyncio.tasks._enter_task(loop, task)  # noqa: SLF001


def close_unstarted(work: Work[object]) -> None:
    """Close a coroutine that was never started, so that Python does not warn that it was never awaited."""
    if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        work.close()
