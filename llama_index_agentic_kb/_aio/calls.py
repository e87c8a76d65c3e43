"""Leaf calls, concurrent jobs, streams with deadlines, and items that a coroutine emits.

An error of a leaf call is always delivered as an ``Exception``: a ``SystemExit`` or a ``CancelledError`` that a source
raises ends neither a loop nor a thread, and blocks no caller. No caller waits for a cancellation either, which may
itself hang: it awaits a plain future, which fails at the deadline if the leaf call has not completed it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from llama_index_agentic_kb._aio.threads import SHARED_POOL, WorkerPool, on_background_thread, start_in_background
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError

T = TypeVar("T")

PARTING_TURNS: Final = 10
"""The number of event loop iterations that cancelled tasks get to finish, before the caller continues."""


Deliver: TypeAlias = Callable[[Any, "Exception | None"], None]
"""A callback that takes the result of a call, or its error."""

_emit: contextvars.ContextVar[Callable[[Any], None] | None] = contextvars.ContextVar("agentic_kb_emit", default=None)


@dataclass(slots=True, eq=False)
class _Bound:
    """A deadline of a context; once the limited work is over, tasks that still run have the outer deadline."""

    deadline: float | None
    outer: _Bound | None
    over: bool = False

    def end(self, *_: object) -> None:
        self.over = True


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


def set_deadline(deadline: float | None) -> None:
    """Set the deadline for all later calls and tasks of the current task; a deadline can only become earlier."""
    bound = _Bound(earliest(deadline, call_deadline()), _bound.get())
    _bound.set(bound)
    if (task := asyncio.current_task()) is not None:
        task.add_done_callback(bound.end)


_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("agentic_kb_scope", default=None)


class Closable(Protocol):
    """A stream that can be closed."""

    def close(self) -> None:
        """Stop reading."""


class Scope:
    """The tasks and streams of one ``run``, ``arun``, ``iterate`` or ``aiterate``, which end with it.

    With ``threads`` the caller is sync, so that sync functions on worker threads are preferred.
    """

    def __init__(self, *, threads: bool) -> None:
        self.threads = threads
        self._outer = _scope.get()
        self._on_background = threads and on_background_thread()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams: list[Closable] = []

    @property
    def holds_background(self) -> bool:
        """Whether this run, or an outer run, blocks the background loop until it has ended."""
        return not self._closed and (self._on_background or (self._outer is not None and self._outer.holds_background))

    async def perform(self, work: Awaitable[T], receive: Callable[[Any], None] | None) -> T:
        """Await work as the scope's outermost coroutine; ``receive`` is called with each item that it emits."""
        _scope.set(self)
        _emit.set(receive)
        return await work

    def create_task(self, work: Coroutine[Any, Any, T], context: contextvars.Context | None = None) -> asyncio.Task[T]:
        """Create a task that is cancelled when the scope ends."""
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def add_stream(self, stream: Closable) -> None:
        """Register a stream, which is closed when the scope ends."""
        self._streams.append(stream)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: asyncio logs no late error of an abandoned task

    async def close(self) -> None:
        """Cancel all running tasks and close all streams; sync calls are abandoned on their threads."""
        self._closed = True
        for stream in self._streams:
            stream.close()
        for task in list(self._tasks):
            cancel_once(task)
        for _ in range(PARTING_TURNS):
            if not self._tasks:
                return
            await asyncio.sleep(0)


_NO_DOOR: Final = Scope(threads=False)
"""The scope of coroutines that are awaited outside of all entry points: on the caller's loop, with async clients."""


def current_scope() -> Scope:
    return _scope.get() or _NO_DOOR


# -- leaf calls -------------------------------------------------------------------------------------------------------


def _nothing() -> None:
    """Stand for the cancellation of a call on a thread, which has none."""


@dataclass(frozen=True, slots=True)
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

    def __await__(self) -> Generator[Any, None, T]:
        return self.perform().__await__()

    async def perform(self) -> T:
        """Call the function once.

        Raises:
            DeadlineExceededError: The deadline has passed, or passes before the function returns.
        """
        deadline = earliest(self.deadline, call_deadline())
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceededError(f"{self.what} was not begun: its deadline had passed")
        context, loop = contextvars.copy_context(), asyncio.get_running_loop()
        bound, answer = _Bound(deadline, _bound.get()), loop.create_future()
        context.run(_bound.set, bound)
        deliver, from_thread = partial(_deliver, bound, answer, None), partial(_deliver, bound, answer, loop)
        scope, abandon = current_scope(), _nothing
        if self.native is not None and not scope.threads:
            abandon = partial(cancel_once, scope.create_task(_deliver_awaited(self.native, deliver), context))
        elif self.sync is not None:
            (self.pool or SHARED_POOL).submit(partial(_run_on_thread, context, self.sync, from_thread, answer))
        elif self.native is not None:
            abandon = in_background(partial(_deliver_awaited, self.native, from_thread), context, scope)
        else:
            raise TypeError(f"{self.what}: a call needs a sync or a native function")
        try:
            return await until(answer, deadline, self.what)
        except (asyncio.CancelledError, DeadlineExceededError):
            abandon()
            raise
        finally:
            del answer, deliver, from_thread, abandon  # see ``until``


def _deliver(
    bound: _Bound,
    answer: asyncio.Future[Any],
    loop: asyncio.AbstractEventLoop | None,
    value: Any,
    error: Exception | None,
) -> None:
    """Settle the future of a call, on its loop if it is another thread's."""
    bound.end()
    if loop is None:
        settle(answer, value, error)
    else:
        call_soon(loop, settle, answer, value, error)


def as_exception(error: BaseException) -> Exception:
    """Return an error as an ``Exception`` that a future accepts; other errors are wrapped in ``AgenticKBError``."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = AgenticKBError(f"{type(error).__name__} was raised: {error}".rstrip(": "))
    failure.__cause__ = error
    return failure


def _run_on_thread(
    context: contextvars.Context, work: Callable[[], Any], deliver: Deliver, answer: asyncio.Future[Any]
) -> None:
    if answer.done():  # no caller waits any more
        return
    try:
        result = context.run(work)
    except BaseException as error:  # noqa: BLE001 (delivered to the coroutine that awaits the call)
        deliver(None, as_exception(error))
    else:
        deliver(result, None)
    finally:
        del deliver, answer  # see ``until``


async def _deliver_awaited(native: Callable[[], Awaitable[Any]], deliver: Deliver) -> None:
    try:
        result = await native()
    except BaseException as error:  # noqa: BLE001 (delivered to the coroutine that awaits the call)
        deliver(None, as_exception(error))
        raise_interrupt(error)
    else:
        deliver(result, None)
    finally:
        del deliver  # see ``until``


def raise_interrupt(error: BaseException) -> None:
    """Raise the error again if it is the user's Ctrl-C, which only the main thread receives."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


def in_background(
    make: Callable[[], Coroutine[Any, Any, None]], context: contextvars.Context, scope: Scope
) -> Callable[[], None]:
    if scope.holds_background:
        raise AgenticKBError(
            "async code that a sync call runs made a sync call, which needs the loop that it holds: await the async "
            "method in its place"
        )
    return start_in_background(make, context)


async def until(future: asyncio.Future[T], deadline: float | None, what: str) -> T:
    """Await a future; at the deadline it fails with ``DeadlineExceededError`` if it is not done.

    An error's frames must not hold the future, which holds the error: only a pass of the garbage collector would free
    all of them.
    """
    timer = None
    if deadline is not None:
        late = DeadlineExceededError(f"{what} was still running at its deadline")
        left = max(0.0, deadline - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left, settle, future, None, late)
        del late
    try:
        return await future
    finally:
        if timer is not None:
            timer.cancel()
        del future, timer


def settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def call_soon(loop: asyncio.AbstractEventLoop, action: Callable[..., None], *arguments: Any) -> None:
    """Schedule an action on a loop from any thread; ignored if the loop is closed, as after an abandoned call."""
    if asyncio._get_running_loop() is loop:  # noqa: SLF001 (None in another thread, where the loop must be woken)
        loop.call_soon(action, *arguments)
        return
    try:
        loop.call_soon_threadsafe(action, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


def cancel_once(task: asyncio.Future[Any]) -> None:
    """Cancel a task unless it is already cancelled: a second time would interrupt its clean-up."""
    if not isinstance(task, asyncio.Task) or not task.cancelling():
        task.cancel()


# -- jobs -------------------------------------------------------------------------------------------------------------


class Job(Generic[T]):
    """Work that runs concurrently with its starter, as a task, or a future that already has the result."""

    __slots__ = ("_stopped", "task")

    def __init__(self, task: asyncio.Future[T]) -> None:
        self.task = task
        self._stopped = False

    @property
    def done(self) -> bool:
        """Whether the job has finished, failed or been stopped."""
        return self._stopped or self.task.done()

    @property
    def error(self) -> BaseException | None:
        """The exception if the job failed or was stopped; None otherwise."""
        if self._stopped or self.task.cancelled():
            return DeadlineExceededError("stopped before it was done")
        return self.task.exception() if self.task.done() else None

    def cancel(self) -> None:
        """Stop the job: cancel its coroutine, or abandon its sync call on the thread."""
        if not self.done:
            cancel_once(self.task)
            self._stopped = True

    def result(self) -> T:
        """Return the result, or raise the error: ``DeadlineExceededError`` if the job is running, or was stopped."""
        if not self.done:
            raise DeadlineExceededError("the job was still running at its deadline")
        error = self.error
        if error is not None:
            raise error
        return self.task.result()


def start(work: Coroutine[Any, Any, T] | Call[T], context: contextvars.Context | None = None) -> Job[T]:
    """Start work concurrently, in a copy of the current context or in a given one, and return its job at once."""
    return Job(current_scope().create_task(work.perform() if isinstance(work, Call) else work, context))


async def wait(jobs: Sequence[Job[Any]], *, deadline: float | None = None, first: bool = False) -> None:
    """Wait until all jobs are done (with ``first``: any of them), or the deadline passes.

    Errors of jobs are not raised here; ``Job.done`` tells which jobs have ended. Other coroutines always get a turn.
    """
    tasks = [job.task for job in jobs if not job.done]
    if not tasks or (first and len(tasks) < len(jobs)):
        await asyncio.sleep(0)
        return
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED if first else asyncio.ALL_COMPLETED)


async def cancel(job: Job[Any]) -> None:
    """Stop a job, and give its coroutine a turn to clean up."""
    job.cancel()
    await asyncio.sleep(0)


async def gather(works: Iterable[Coroutine[Any, Any, T] | Call[T]], *, deadline: float | None = None) -> list[Job[T]]:
    """Run coroutines and calls concurrently, and return their jobs in order; late ones are cancelled."""
    jobs = [start(work) for work in works]
    await wait(jobs, deadline=deadline)
    for job in jobs:
        if not job.done:
            await cancel(job)
    return jobs


# -- items that a coroutine emits -------------------------------------------------------------------------------------


async def emit(item: Any) -> None:
    """Pass an item to the reader of ``iterate`` or ``aiterate``; ``run`` and ``arun`` discard it."""
    receive = _emit.get()
    if receive is not None:
        receive(item)
    await asyncio.sleep(0)  # a reader that waits for the item goes first


async def emitting(work: Awaitable[T], change: Callable[[Any], Any], rest: Callable[[], Any] | None = None) -> T:
    """Await a coroutine, and replace each item that it emits by the result of ``change``, unless that is empty.

    ``rest`` returns one last item to emit after the coroutine has returned, unless it is empty.
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
    """Hide the private loop of a sync entry point while user code runs, so that this code may start its own loop.

    With an async entry point the user's own loop stays visible. A worker thread has no loop to hide.
    """
    loop = asyncio._get_running_loop()  # noqa: SLF001 (None if no loop runs)
    if loop is None or not current_scope().threads:
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
    """Close a coroutine that was never started, so that Python does not warn that it was never awaited."""
    if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        work.close()
