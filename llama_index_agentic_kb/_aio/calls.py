"""Leaf calls, jobs that run side by side, streams with deadlines, and items that a coroutine emits.

Whatever a leaf raises is delivered as an ``Exception``: a ``SystemExit`` or a ``CancelledError`` of a source's own ends
neither a loop nor a thread, and leaves nobody waiting.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

from llama_index_agentic_kb._aio.threads import SHARED_POOL, Pool, start_in_background
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError

__all__ = [
    "END",
    "Call",
    "Job",
    "Scope",
    "Stream",
    "as_exception",
    "cancel",
    "close_unstarted",
    "deadline_after",
    "earliest",
    "emit",
    "emitting",
    "gather",
    "open_stream",
    "outside_loop",
    "pause_until",
    "scope_of_run",
    "start",
    "wait",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PARTING_TURNS = 10
"""How many turns of the loop cancelled tasks get to end in, before the caller goes on without them."""


class _End:
    """The type of ``END``."""

    def __repr__(self) -> str:
        return "END"


END: Final = _End()
"""What ``Stream.next`` returns when the stream is over."""


class Scope:
    """What one run of a door owns: its tasks and streams, which end with it, and which clients it prefers.

    Args:
        threads: Whether a sync door runs, which prefers sync functions on worker threads.
    """

    def __init__(self, *, threads: bool) -> None:
        self.threads = threads
        self.caller = threading.current_thread()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams: list[Stream[Any]] = []

    def create_task(self, work: Coroutine[Any, Any, T], context: contextvars.Context | None = None) -> asyncio.Task[T]:
        """Return a task that ends with the scope."""
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def add_stream(self, stream: Stream[Any]) -> None:
        """Close the stream when the scope ends."""
        self._streams.append(stream)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: an abandoned task's late error is nobody's news

    async def close(self) -> None:
        """Cancel all that still runs; sync calls are abandoned on their threads.

        What takes its cancellation in a few turns has ended then. Nothing else is waited for.
        """
        for stream in self._streams:
            stream.close()
        for task in list(self._tasks):
            _cancel_once(task)
        for _ in range(PARTING_TURNS):
            if not self._tasks:
                return
            await asyncio.sleep(0)


_NO_DOOR: Final = Scope(threads=False)
"""For coroutines that are awaited outside of any door: on the caller's loop, with async clients."""

_scope: contextvars.ContextVar[Scope] = contextvars.ContextVar("agentic_kb_scope", default=_NO_DOOR)
_emit: contextvars.ContextVar[Callable[[Any], None] | None] = contextvars.ContextVar("agentic_kb_emit", default=None)


async def scope_of_run(scope: Scope, work: Awaitable[T], receive: Callable[[Any], None] | None) -> T:
    """Await work as the outermost coroutine of a scope; ``receive`` takes what it emits. For ``bridge``."""
    _scope.set(scope)
    _emit.set(receive)
    return await work


# -- leaf calls -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A leaf call: awaiting it calls the function and returns its result, or raises its exception.

    A sync door calls ``sync`` on a thread of ``pool``; without it, it awaits ``native`` on the background loop. An
    async door awaits ``native``; without it, it calls ``sync`` on a thread of ``pool``.

    Args:
        sync: Takes nothing, returns the result.
        native: Takes nothing, returns an awaitable of the result.
        deadline: ``time.monotonic()`` at which waiting ends with ``DeadlineExceededError``; None waits without a limit.
            After it the function is not called at all.
        pool: The bulkhead; None is one shared by everything that has none of its own.
        what: Names the call in errors.
    """

    sync: Callable[[], T] | None = None
    native: Callable[[], Awaitable[T]] | None = None
    deadline: float | None = None
    pool: Pool | None = None
    what: str = "call"

    def __await__(self) -> Generator[Any, None, T]:
        return self.perform().__await__()

    async def perform(self) -> T:
        """Call the function once.

        Raises:
            DeadlineExceededError: The deadline has passed, or passes before the function returns.
        """
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlineExceededError(f"{self.what} was not begun: its deadline had passed")
        scope, context = _scope.get(), contextvars.copy_context()
        if self.native is not None and not scope.threads:
            work = scope.create_task(_awaited(self.native), context)
            return await _until(work, self.deadline, self.what)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        abandon: Callable[[], None] | None = None

        def deliver(value: Any, error: Exception | None) -> None:
            _call_soon(loop, lambda: _settle(answer, value, error))

        if self.sync is not None:
            sync, pool = self.sync, self.pool or SHARED_POOL
            pool.submit(lambda: _run_on_thread(context, sync, deliver, lambda: not answer.done()))
        elif self.native is not None:
            abandon = start_in_background(partial(_run_on_background_loop, self.native, deliver), context, scope.caller)
        else:
            raise TypeError(f"{self.what}: a call needs a sync or a native function")
        try:
            return await _until(answer, self.deadline, self.what)
        except (asyncio.CancelledError, DeadlineExceededError):
            if abandon is not None:
                abandon()
            raise


Deliver: TypeAlias = Callable[[Any, "Exception | None"], None]
"""Takes a value, or an error."""


def as_exception(error: BaseException) -> Exception:
    """Return an error that ends no more than the coroutine that it is raised in, and that a future can hold."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = AgenticKBError(f"{type(error).__name__} was raised: {error}".rstrip(": "))
    failure.__cause__ = error
    return failure


def _run_on_thread(
    context: contextvars.Context, work: Callable[[], Any], deliver: Deliver, is_awaited: Callable[[], bool]
) -> None:
    if not is_awaited():
        return
    try:
        result = context.run(work)
    except BaseException as error:  # noqa: BLE001 (delivered to the coroutine that awaits the call)
        deliver(None, as_exception(error))
    else:
        deliver(result, None)


async def _run_on_background_loop(native: Callable[[], Awaitable[Any]], deliver: Deliver) -> None:
    try:
        result = await native()
    except BaseException as error:  # noqa: BLE001 (delivered to the coroutine that awaits the call)
        deliver(None, as_exception(error))
    else:
        deliver(result, None)


async def _awaited(native: Callable[[], Awaitable[T]]) -> T:
    return await native()


async def _until(future: asyncio.Future[T], deadline: float | None, what: str) -> T:
    """Wait for a future until the deadline; never wait for its cancellation, which may itself hang."""
    if not future.done():
        await _first(future, deadline)  # asyncio.wait does the same in twice the time
        if not future.done():
            _drop(future)
            raise _still_running(what)
    if future.cancelled():
        raise AgenticKBError(f"{what} was cancelled from within")
    return future.result()


async def _first(future: asyncio.Future[Any], deadline: float | None) -> None:
    """Return when a future is done or the deadline has passed; a caller that is cancelled drops the future."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake(_: Any = None) -> None:
        if not woken.done():
            woken.set_result(None)

    future.add_done_callback(wake)
    timer = None if deadline is None else loop.call_later(max(0.0, deadline - time.monotonic()), wake)
    try:
        await woken
    except asyncio.CancelledError:
        _drop(future)
        raise
    finally:
        future.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()


# -- jobs -------------------------------------------------------------------------------------------------------------


class Job(Generic[T]):
    """Work that was started beside its starter.

    Attributes:
        started: ``time.monotonic()`` of its start.
        finished: ``time.monotonic()`` of its end; None while it runs.
        value: Its result, where it has one.
        error: Its exception, where it failed or was stopped.
    """

    __slots__ = ("_task", "error", "finished", "started", "value")

    def __init__(self, task: asyncio.Task[T] | None = None) -> None:
        self.started = time.monotonic()
        self.finished: float | None = None
        self.value: T | None = None
        self.error: BaseException | None = None
        self._task = task
        if task is not None:
            task.add_done_callback(self._note)

    def _note(self, task: asyncio.Task[T]) -> None:
        if self.done:
            return
        if task.cancelled():
            self.finish(error=DeadlineExceededError("stopped before it was done"))
        elif (error := task.exception()) is not None:
            self.finish(error=error)
        else:
            self.finish(task.result())

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.finished is not None

    def finish(self, value: T | None = None, error: BaseException | None = None) -> None:
        """Record the end."""
        self.value, self.error, self.finished = value, error, time.monotonic()

    def cancel(self) -> None:
        """Stop the work: a coroutine is cancelled, a sync call abandoned on its thread."""
        if not self.done:
            if self._task is not None:
                _cancel_once(self._task)
            self.finish(error=DeadlineExceededError("stopped before it was done"))

    def result(self) -> T:
        """Return the result, or raise the error.

        Raises:
            DeadlineExceededError: The job is still running.
        """
        if self.error is not None:
            raise self.error
        if not self.done:
            raise DeadlineExceededError("the job was still running at its deadline")
        return self.value  # type: ignore[return-value]  # a done job without an error holds a T

    @property
    def task(self) -> asyncio.Task[T] | None:
        """The task; None for a job that was made finished."""
        return self._task


def start(work: Coroutine[Any, Any, T] | Call[T]) -> Job[T]:
    """Start work beside its starter, in a copy of the context, and return its job at once."""
    return Job(_scope.get().create_task(work.perform() if isinstance(work, Call) else work))


async def wait(jobs: Sequence[Job[Any]], *, deadline: float | None = None, first: bool = False) -> None:
    """Wait until all jobs are done (or the ``first`` of them), or the deadline.

    Ask each job then whether it is ``done``. No job's error is raised here. Other coroutines get a turn in any case.
    """
    tasks = [job.task for job in jobs if not job.done and job.task is not None]
    if not tasks or (first and len(tasks) < len(jobs)):
        await asyncio.sleep(0)
        return
    when = asyncio.FIRST_COMPLETED if first else asyncio.ALL_COMPLETED
    await asyncio.wait(tasks, timeout=_seconds_left(deadline), return_when=when)


async def cancel(job: Job[Any]) -> None:
    """Stop a job, and give its coroutine a turn to clean up."""
    job.cancel()
    await asyncio.sleep(0)


async def gather(works: Iterable[Coroutine[Any, Any, T] | Call[T]], *, deadline: float | None = None) -> list[Job[T]]:
    """Run works side by side until all are done or the deadline passes; what is late is cancelled.

    Args:
        works: Coroutines and calls.
        deadline: ``time.monotonic()``; None waits for all.

    Returns:
        Their jobs in order. A late one holds a ``DeadlineExceededError``.
    """
    jobs = [start(work) for work in works]
    await wait(jobs, deadline=deadline)
    for job in jobs:
        if not job.done:
            await cancel(job)
    return jobs


async def pause_until(moment: float) -> None:
    """Sleep until ``time.monotonic()`` reaches ``moment``. No thread is held."""
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def deadline_after(seconds: float | None) -> float | None:
    """Return the ``time.monotonic()`` of ``seconds`` from now; None stays None (no deadline)."""
    return None if seconds is None else time.monotonic() + seconds


def earliest(*deadlines: float | None) -> float | None:
    """Return the first of several deadlines; None where none is set."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


# -- streams ----------------------------------------------------------------------------------------------------------


class Stream(Generic[T]):
    """An open stream: a thread or a task reads it ahead, so that waiting for each item can have a deadline."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.closed = threading.Event()
        self.abandon: Callable[[], None] | None = None
        self._items: asyncio.Queue[tuple[T | _End | None, Exception | None, float]] = asyncio.Queue()

    def put(self, value: T | _End | None, error: Exception | None, came: float | None = None) -> None:
        """Add an item, or the error that ended the stream."""
        self._items.put_nowait((value, error, time.monotonic() if came is None else came))

    async def next(self, deadline: float | None = None) -> T | _End:
        """Return the next item, or ``END``; asking again after the end returns ``END`` again.

        Raises:
            DeadlineExceededError: No item came before the deadline. The stream is closed.
            Exception: What the stream raised.
        """
        if self.closed.is_set():
            return END
        try:
            if self._items.empty():
                value, error, came = await _until(asyncio.ensure_future(self._items.get()), deadline, self.what)
            else:
                value, error, came = self._items.get_nowait()
            if deadline is not None and came > deadline:
                raise _still_running(self.what)
        except (asyncio.CancelledError, DeadlineExceededError):
            self.close()
            raise
        if error is not None:
            raise error
        if value is END:
            self.closed.set()
        return value  # type: ignore[return-value]  # without an error there is a value

    def close(self) -> None:
        """Read no more."""
        self.closed.set()
        if self.abandon is not None:
            self.abandon()


def open_stream(
    *,
    sync: Callable[[], Iterator[T]] | None = None,
    native: Callable[[], Awaitable[AsyncIterator[T]]] | None = None,
    pool: Pool | None = None,
    what: str = "stream",
) -> Stream[T]:
    """Open a stream; see ``Call`` for the arguments. The whole iterator runs in one context."""
    scope, context, stream = _scope.get(), contextvars.copy_context(), Stream[T](what)
    scope.add_stream(stream)
    if native is not None and not scope.threads:
        task = scope.create_task(_pump_async(native, stream.put), context)
        stream.abandon = partial(_cancel_once, task)
        return stream
    loop = asyncio.get_running_loop()

    def deliver(value: Any, error: Exception | None) -> None:
        came = time.monotonic()
        _call_soon(loop, lambda: stream.put(value, error, came))

    if sync is not None:
        source = sync
        (pool or SHARED_POOL).submit(lambda: _pump(context, source, stream.closed, deliver))
    elif native is not None:
        stream.abandon = start_in_background(partial(_pump_async, native, deliver), context, scope.caller)
    else:
        raise TypeError(f"{what}: a stream needs a sync or a native function")
    return stream


def _pump(
    context: contextvars.Context, source: Callable[[], Iterator[Any]], closed: threading.Event, deliver: Deliver
) -> None:
    """Read an iterator to its end on a worker thread; stop and close it when nobody listens any more."""

    def read() -> None:
        iterator = iter(source())
        for item in iterator:
            if closed.is_set():
                break
            deliver(item, None)
        close = getattr(iterator, "close", None)
        if close is not None:
            close()

    if closed.is_set():
        return
    try:
        context.run(read)
    except BaseException as error:  # noqa: BLE001 (delivered to the coroutine that awaits the call)
        deliver(None, as_exception(error))
    deliver(END, None)


async def _pump_async(native: Callable[[], Awaitable[AsyncIterator[Any]]], deliver: Deliver) -> None:
    """Read an async iterator to its end, in a task of its own; cancelled when nobody listens any more."""
    try:
        async for item in await native():
            deliver(item, None)
    except KeyboardInterrupt:  # on the user's own loop
        raise
    except BaseException as error:  # noqa: BLE001 (delivered to the coroutine that awaits the call)
        deliver(None, as_exception(error))
    deliver(END, None)


# -- what a coroutine emits -------------------------------------------------------------------------------------------


async def emit(item: Any) -> None:
    """Hand an item to the reader of ``iterate`` or ``aiterate``; ``run`` and ``arun`` drop it."""
    receive = _emit.get()
    if receive is not None:
        receive(item)
    await asyncio.sleep(0)  # a reader that waits for the item goes first


async def emitting(work: Awaitable[T], change: Callable[[Any], Any], rest: Callable[[], Any] | None = None) -> T:
    """Await work, each item that it emits changed on the way.

    Args:
        work: Any coroutine.
        change: Takes an item and returns what is emitted in its place; nothing is emitted for what is empty.
        rest: Returns what is emitted last, when the work has returned; empty is nothing.
    """
    receive = _emit.get()

    def changed(item: Any) -> None:
        out = change(item)
        if out and receive is not None:
            receive(out)

    token = _emit.set(changed)
    try:
        result = await work
    finally:
        _emit.reset(token)
    last = rest() if rest is not None else None
    if last:
        await emit(last)
    return result


# -- the loop ---------------------------------------------------------------------------------------------------------


@contextmanager
def outside_loop() -> Iterator[None]:
    """Hide a sync door's private loop while user code runs, so that it may start a loop of its own.

    On an async door the user's own loop stays visible. On a worker thread there is nothing to hide.
    """
    loop = asyncio._get_running_loop()  # noqa: SLF001 (None where none runs)
    if loop is None or not _scope.get().threads:
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


def close_unstarted(work: Coroutine[Any, Any, Any]) -> None:
    """Close a coroutine that nobody will await any more, so that it does not warn."""
    if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        work.close()


def _cancel_once(task: asyncio.Task[Any]) -> None:
    """Cancel a task; a second time would break off its clean-up, and leave its connection open."""
    if not task.cancelling():
        task.cancel()


def _drop(future: asyncio.Future[Any]) -> None:
    """Cancel a future that nobody waits for; mark one that failed just now as seen."""
    if future.done():
        _ = future.cancelled() or future.exception()
    elif isinstance(future, asyncio.Task):
        _cancel_once(future)
    else:
        future.cancel()


def _still_running(what: str) -> DeadlineExceededError:
    return DeadlineExceededError(f"{what} was still running at its deadline")


def _seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _call_soon(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    """Hand an action to a loop from a thread; the loop of an abandoned call may be closed by now."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        if not loop.is_closed():
            raise
