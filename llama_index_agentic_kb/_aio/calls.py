"""Leaf calls, streams with deadlines, concurrent jobs, and items that a coroutine emits.

An error of a leaf call is always delivered as an ``Exception``: a ``SystemExit`` or a ``CancelledError`` that a source
raises ends neither a loop nor a thread, and blocks no caller. No caller waits for a cancellation either, which may
itself hang: it awaits a plain future, which fails at the deadline if the leaf call has not completed it.

An error's frames must not hold the future that holds the error: only a pass of the garbage collector would free them.
So functions that wait or deliver delete their references when they end.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

from llama_index_agentic_kb._aio.threads import BACKGROUND, SHARED_POOL, WorkerPool, start_in_background
from llama_index_agentic_kb._types import Work
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_STOPPED: Final = "stopped before it was done"

PARTING_TURNS: Final = 10
"""The number of event loop iterations that cancelled tasks get to finish, before the caller continues."""


Deliver: TypeAlias = Callable[[Any, "Exception | None"], None]
"""A callback that takes the result of a call, or its error."""

_NOTHING: Final = nullcontext()

_emit: contextvars.ContextVar[Callable[[object], None] | None] = contextvars.ContextVar("agentic_kb_emit", default=None)


@dataclass(slots=True, eq=False)
class _Bound:
    """A deadline of a context; once the limited work is over, tasks that still run have the outer deadline."""

    deadline: float | None
    outer: _Bound | None
    over: bool = False


_bound: contextvars.ContextVar[_Bound | None] = contextvars.ContextVar("agentic_kb_bound", default=None)


def deadline_after(seconds: float | None) -> float | None:
    """Return the ``time.monotonic()`` value ``seconds`` from now; None (no deadline) if ``seconds`` is None."""
    return None if seconds is None else time.monotonic() + seconds


def earliest(*deadlines: float | None) -> float | None:
    """Return the earliest of several deadlines; None if all are None."""
    first: float | None = None
    for deadline in deadlines:
        if deadline is not None and (first is None or deadline < first):
            first = deadline
    return first


def call_deadline() -> float | None:
    """Return the deadline for calls from this code as a ``time.monotonic()`` value; None if there is no deadline.

    Inside a leaf call it is the deadline of that call, for clients with a timeout per request.
    """
    bound = _bound.get()
    while bound is not None and bound.over:
        bound = bound.outer
    return None if bound is None else bound.deadline


def set_deadline(deadline: float | None) -> _Bound:
    """Set the deadline for later calls and tasks of this context until the result is ``over``; none becomes later."""
    bound = _Bound(earliest(deadline, call_deadline()), _bound.get())
    _bound.set(bound)
    return bound


_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("agentic_kb_scope", default=None)


class Scope:
    """The tasks of one ``run``, ``arun``, ``iterate`` or ``aiterate``, which end with it.

    With ``threads`` the caller is sync, and sync functions on worker threads are preferred.
    """

    def __init__(self, *, threads: bool) -> None:
        self.threads = threads
        self.tasks: set[asyncio.Task[object]] = set()
        self._outer = _scope.get()
        self._on_background = threads and threading.current_thread() is BACKGROUND.thread  # and so blocks its loop
        self._closed = False

    @property
    def holds_background(self) -> bool:
        """Whether this run, or an outer run, blocks the background loop until it has ended."""
        return not self._closed and (self._on_background or (self._outer is not None and self._outer.holds_background))

    def perform(
        self, work: Work[T], context: contextvars.Context, receive: Callable[[object], None] | None = None
    ) -> Job[T]:
        """Start the coroutine of this scope; ``receive`` is called with each item that is emitted in the context."""
        context.run(_scope.set, self)
        context.run(_emit.set, receive)
        return start(work, context, self)

    async def close(self) -> None:
        """Cancel all running tasks; sync calls are abandoned on their threads."""
        self._closed = True
        for task in list(self.tasks):
            cancel_once(task)
        for _ in range(PARTING_TURNS):
            if not self.tasks:
                return
            await asyncio.sleep(0)


_NO_DOOR: Final = Scope(threads=False)
"""The scope of coroutines that are awaited outside of all entry points: on the caller's loop, with async clients."""


# -- leaf calls -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Call(Generic[T]):
    """A leaf call: awaiting it calls the function and returns its result, or raises its exception.

    A sync entry point calls ``sync`` on a thread of ``pool``; without it, it awaits ``native`` on the background loop.
    An async entry point awaits ``native``; without it, it calls ``sync`` on a thread of ``pool``.

    Args:
        sync: Returns the result.
        native: Returns an awaitable of the result.
        deadline: The deadline as a ``time.monotonic()`` value; then the call fails with ``DeadlineExceededError``, or
            is not started. The context's deadline applies too.
        pool: The worker pool. Defaults to a pool shared by all calls without their own.
        what: The name of the call in errors.
    """

    sync: Callable[[], T] | None = None
    native: Callable[[], Awaitable[T]] | None = None
    deadline: float | None = None
    pool: WorkerPool | None = None
    what: str = "call"

    def __await__(self) -> Generator[object, None, T]:
        return self.perform().__await__()

    async def perform(
        self,
        deadline: float | None = None,
        pool: WorkerPool | None = None,
        within: AbstractContextManager[object] = _NOTHING,
    ) -> T:
        """Call the function once, by an earlier deadline or on another pool if these are set.

        ``within`` is entered before the function is called, and left when it has returned, however late.
        """
        deadline = earliest(deadline, self.deadline, call_deadline())
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceededError(f"{self.what} was not begun: its deadline had passed")
        context, loop, scope = contextvars.copy_context(), asyncio.get_running_loop(), _scope.get() or _NO_DOOR
        bound = _Bound(deadline, _bound.get())
        answer: asyncio.Future[T] = loop.create_future()
        context.run(_bound.set, bound)
        deliver: Deliver = partial(_deliver, loop, bound, answer)
        abandon: Callable[[], object] | None = None
        if self.native is not None and not scope.threads:
            task = loop.create_task(_awaited(self.native, within, deliver, answer), context=context)
            scope.tasks.add(task)
            task.add_done_callback(scope.tasks.discard)
            abandon = partial(cancel_once, task)
        elif self.sync is not None:
            work = partial(context.run, self.sync)
            (pool or self.pool or SHARED_POOL).submit(partial(_run_on_thread, work, within, deliver, answer))
        elif self.native is None:
            raise TypeError(f"{self.what}: a call needs a sync or a native function")
        elif scope.holds_background:
            raise AgenticKBError(
                "async code that a sync call runs made a sync call, which needs the loop that it holds: await the "
                "async method in its place"
            )
        else:
            abandon = start_in_background(_awaited(self.native, within, deliver, answer), context)
        timer = at(deadline, _end, answer, self.what)
        try:
            return await answer
        except (asyncio.CancelledError, DeadlineExceededError):
            if abandon is not None:
                abandon()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            del answer, deliver, abandon, timer


def _deliver(
    loop: asyncio.AbstractEventLoop, bound: _Bound, answer: asyncio.Future[Any], value: Any, error: Exception | None
) -> None:
    """Settle the future of a call on its loop, which may be closed by now: the work is over all the same."""
    bound.over = True
    on_loop(loop, _settle, answer, value, error)


def as_exception(error: BaseException) -> Exception:
    """Return an error as an ``Exception`` that a future accepts; other errors are wrapped in ``AgenticKBError``."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = AgenticKBError(f"{type(error).__name__} was raised: {error}".rstrip(": "))
    failure.__cause__ = error
    return failure


def _run_on_thread(
    work: Callable[[], object], within: AbstractContextManager[object], deliver: Deliver, answer: asyncio.Future[Any]
) -> None:
    if answer.done():  # no caller waits any more
        return
    try:
        with within:
            result = work()
    except BaseException as error:  # noqa: BLE001 (delivered to the coroutine that awaits the call)
        deliver(None, as_exception(error))
    else:
        deliver(result, None)
    finally:
        del deliver, answer


async def _awaited(
    native: Callable[[], Awaitable[object]],
    within: AbstractContextManager[object],
    deliver: Deliver,
    answer: asyncio.Future[Any],
) -> None:
    if answer.done():
        return
    try:
        with within:
            result = await native()
    except BaseException as error:
        deliver(None, as_exception(error))
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # the user's Ctrl-C, which only the main thread receives
    else:
        deliver(result, None)
    finally:
        del deliver, answer


def at(deadline: float | None, action: Callable[..., None], *arguments: object) -> asyncio.TimerHandle | None:
    """Return a timer that performs an action at a deadline; None without a deadline."""
    if deadline is None:
        return None
    return asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()), action, *arguments)


def _end(future: asyncio.Future[T], what: str) -> None:
    _settle(future, None, DeadlineExceededError(f"{what} was still running at its deadline"))


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def on_loop(loop: asyncio.AbstractEventLoop, action: Callable[..., None], *arguments: object) -> None:
    """Perform an action in a loop's thread: at once, or soon from another thread, unless the loop is closed by then."""
    if asyncio._get_running_loop() is loop:  # noqa: SLF001 (None in another thread)
        action(*arguments)
        return
    try:
        loop.call_soon_threadsafe(action, *arguments)
    except RuntimeError:  # an abandoned call's
        if not loop.is_closed():
            raise


def cancel_once(task: asyncio.Future[T]) -> None:
    """Cancel a task unless it is already cancelled: a second time would interrupt its clean-up."""
    if not isinstance(task, asyncio.Task) or not task.cancelling():
        task.cancel()


# -- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Job(Generic[T_co]):
    """Work that runs concurrently with its starter, as a task."""

    task: asyncio.Task[T_co]
    _tasks: set[asyncio.Task[object]]
    done: bool = False
    """Whether the job has finished, failed or been stopped."""
    error: BaseException | None = None
    """The exception if the job failed or was stopped; None otherwise."""

    def cancel(self) -> None:
        """Stop the job: cancel its coroutine, or abandon its sync call on the thread."""
        if self.task.done():
            self.end()
        elif not self.done:
            cancel_once(self.task)
            self.done, self.error = True, DeadlineExceededError(_STOPPED)

    def end(self, _: object = None) -> None:
        """Take over the outcome of the task, unless the job was stopped before."""
        self._tasks.discard(self.task)
        error = DeadlineExceededError(_STOPPED) if self.task.cancelled() else self.task.exception()
        if not self.done:  # the error is retrieved all the same: asyncio logs no late one of a stopped job
            self.done, self.error = True, error

    def result(self) -> T_co:
        """Return the result, or raise the error: ``DeadlineExceededError`` if the job is running, or was stopped."""
        if not self.done:
            raise DeadlineExceededError("the job was still running at its deadline")
        if self.error is not None:
            raise self.error
        return self.task.result()


def start(work: Work[T] | Call[T], context: contextvars.Context | None = None, scope: Scope | None = None) -> Job[T]:
    """Start work concurrently, in a copy of the current context or in a given one, and return its job at once.

    It is cancelled when its scope ends, by default that of the current context.
    """
    tasks = (scope or _scope.get() or _NO_DOOR).tasks
    coroutine = work.perform() if isinstance(work, Call) else work
    job = Job(asyncio.get_running_loop().create_task(coroutine, context=context), tasks)
    tasks.add(job.task)
    job.task.add_done_callback(job.end)
    return job


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


# -- streams ----------------------------------------------------------------------------------------------------------


class _End(Enum):
    END = "END"


END: Final = _End.END
"""The item after the last one."""


Put: TypeAlias = Callable[[tuple[float, Any]], None]
"""A callback that takes an item of a stream with its arrival time."""


def _read(iterate: Callable[[], Iterator[object]], put: Put, is_over: Callable[[], bool]) -> None:
    iterator = iter(iterate())
    for item in iterator:
        if is_over():  # the stream is closed, or its call has failed: nobody reads on
            break
        put((time.monotonic(), item))
    put((-math.inf, END))  # late or not, all items are there
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


async def _aread(iterate: Callable[[], Awaitable[AsyncIterator[object]]], put: Put) -> None:
    async for item in await iterate():
        put((time.monotonic(), item))
    put((-math.inf, END))


async def read_ahead(
    *,
    sync: Callable[[], Iterator[T]] | None = None,
    native: Callable[[], Awaitable[AsyncIterator[T]]] | None = None,
    deadline: float | None = None,
    what: str = "stream",
    through: Callable[[Call[None]], Work[None]] = Call.perform,
) -> AsyncGenerator[T, None]:
    """Yield the items of a stream, which a thread or a task reads ahead; see ``Call`` for the arguments.

    ``through`` performs the call that reads them, in one context. Items that arrived before the deadline are yielded,
    however late they are asked for.

    Raises:
        DeadlineExceededError: No further item arrived before the deadline, or the context's deadline.
        Exception: The exception that the stream raised.
    """
    deadline = earliest(deadline, call_deadline())
    arrived = asyncio.Queue[tuple[float, T | _End]]()
    put = partial(on_loop, asyncio.get_running_loop(), arrived.put_nowait)

    call = Call(
        sync=None if sync is None else partial(_read, sync, put, lambda: job.done),
        native=None if native is None else partial(_aread, native, put),
        what=what,
    )
    job: Job[None] = start(through(call))
    job.task.add_done_callback(lambda _: arrived.put_nowait((-math.inf, END)))  # where the call failed
    timer = at(deadline, arrived.put_nowait, (math.inf, END))
    try:
        while True:
            came, item = await arrived.get()
            if deadline is not None and came > deadline:
                raise DeadlineExceededError(f"{what} was still running at its deadline")
            if item is END:
                if job.done:
                    job.result()  # raises the error of a call that failed
                break
            yield item
    finally:
        job.cancel()
        if timer is not None:
            timer.cancel()


# -- items that a coroutine emits -------------------------------------------------------------------------------------


async def emit(item: object) -> None:
    """Pass an item to the reader of ``iterate`` or ``aiterate``; ``run`` and ``arun`` discard it."""
    receive = _emit.get()
    if receive is not None:
        receive(item)
    await asyncio.sleep(0)  # a reader that waits for the item goes first


async def emitting(work: Awaitable[T], change: Callable[[Any], object], rest: Callable[[], object] | None = None) -> T:
    """Await a coroutine, and replace each item that it emits by the result of ``change``, unless that is empty.

    ``rest`` returns one last item to emit after the coroutine has returned, unless it is empty.
    """
    receive = _emit.get()

    def changed(item: object) -> None:
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
    """Hide the private loop of a sync entry point while user code runs, so that this code may start its own loop.

    With an async entry point the user's own loop stays visible. A worker thread has no loop to hide.
    """
    loop = asyncio._get_running_loop()  # noqa: SLF001 (None if no loop runs)
    if loop is None or not (_scope.get() or _NO_DOOR).threads:
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
