"""Leaf calls on the threads of bounded pools or on event loops, concurrent jobs, and streams, all with deadlines.

An error of a leaf call is always delivered as an ``Exception``: a ``SystemExit`` or a ``CancelledError`` that a source
raises ends neither a loop nor a thread, and blocks no caller. No caller waits for a cancellation either, which may
itself hang: it awaits a plain future, which fails at the deadline if the leaf call has not completed it.

An error's frames must not hold the future that holds the error: only a pass of the garbage collector would free them.
So functions that wait or deliver delete their references when they end.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from llama_index_agentic_kb._types import Work
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# -- threads ----------------------------------------------------------------------------------------------------------

# ``concurrent.futures`` is unsuitable: its threads prevent the interpreter from exiting while one of them hangs, and
# the event loop's default pool is shared, so that one source that hangs would block the healthy ones.

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


_BACKGROUND = _BackgroundLoop()


# -- deadlines and scopes ----------------------------------------------------------------------------------------------

_STOPPED: Final = "stopped before it was done"

PARTING_TURNS: Final = 10
"""The number of event loop iterations that cancelled tasks get to finish, before the caller continues."""


Deliver: TypeAlias = Callable[[Any, "Exception | None"], None]
"""A callback that takes the result of a call, or its error."""

_NOTHING: Final = nullcontext()

receiver = contextvars.ContextVar[Callable[[object], None] | None]("agentic_kb_receiver", default=None)
"""What is called with each item that is emitted in the context."""


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


current_scope = contextvars.ContextVar["Scope"]("agentic_kb_scope")


class Scope:
    """The tasks of one ``run``, ``arun``, ``iterate`` or ``aiterate``, which end with it.

    With ``threads`` the caller is sync, and sync functions on worker threads are preferred.
    """

    def __init__(self, *, threads: bool) -> None:
        self.threads = threads
        self.tasks: set[asyncio.Task[object]] = set()
        self._outer = current_scope.get(None)
        self._on_background = threads and threading.current_thread() is _BACKGROUND.thread  # and so blocks its loop
        self._closed = False

    @property
    def holds_background(self) -> bool:
        """Whether this run, or an outer run, blocks the background loop until it has ended."""
        return not self._closed and (self._on_background or (self._outer is not None and self._outer.holds_background))

    def perform(
        self, work: Work[T], context: contextvars.Context, receive: Callable[[object], None] | None = None
    ) -> Job[T]:
        """Start the coroutine of this scope; ``receive`` is called with each item that is emitted in the context."""
        context.run(current_scope.set, self)
        context.run(receiver.set, receive)
        return start(work, context, self)

    def abandon(self, task: asyncio.Task[None]) -> None:
        """Cancel the task of a call for which nobody waits any more; it has until the scope is closed to end."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        cancel_once(task)

    async def close(self) -> None:
        """Cancel all running tasks; sync calls are abandoned on their threads."""
        self._closed = True
        for task in list(self.tasks):
            cancel_once(task)
        for _ in range(PARTING_TURNS):
            if not self.tasks:
                return
            await asyncio.sleep(0)


NO_SCOPE: Final = Scope(threads=False)
"""The scope of coroutines that are awaited outside of all entry points: on the caller's loop, with async clients."""


def start_in_background(work: Work[None], context: contextvars.Context) -> Callable[[], object]:
    """Start a coroutine on the background loop in a copy of a context, and return a function that cancels it, once.

    Raises:
        AgenticKBError: The loop waits for a sync call that this call is part of.
    """
    if context.get(current_scope, NO_SCOPE).holds_background:
        work.close()
        raise AgenticKBError(
            "async code that a sync call runs made a sync call, which needs the loop that it holds: await the async "
            "method in its place"
        )
    return context.run(asyncio.run_coroutine_threadsafe, work, _BACKGROUND.get()).cancel


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
        context, loop, scope = contextvars.copy_context(), asyncio.get_running_loop(), current_scope.get(NO_SCOPE)
        bound = _Bound(deadline, _bound.get())
        answer: asyncio.Future[T] = loop.create_future()
        context.run(_bound.set, bound)
        deliver: Deliver = partial(_deliver, loop, bound, answer)
        abandon: Callable[[], object] | None = None
        if self.native is not None and not scope.threads:
            work = _awaited(self.native, within, deliver, answer, scope.tasks)
            task = loop.create_task(work, context=context)
            scope.tasks.add(task)
            abandon = partial(scope.abandon, task)
        elif self.sync is not None:
            perform = partial(context.run, self.sync)
            (pool or self.pool or SHARED_POOL).submit(partial(_run_on_thread, perform, within, deliver, answer))
        elif self.native is None:
            raise TypeError(f"{self.what}: a call needs a sync or a native function")
        else:
            abandon = start_in_background(_awaited(self.native, within, deliver, answer, set()), context)
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
    tasks: set[asyncio.Task[object]],
) -> None:
    try:
        if answer.done():
            return
        with within:
            result = await native()
    except BaseException as error:
        deliver(None, as_exception(error))
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # the user's Ctrl-C, which only the main thread receives
    else:
        deliver(result, None)
    finally:
        tasks.discard(asyncio.current_task())
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
    tasks = (scope or current_scope.get(NO_SCOPE)).tasks
    coroutine = work.perform() if isinstance(work, Call) else work
    job = Job(asyncio.get_running_loop().create_task(coroutine, context=context), tasks)
    tasks.add(job.task)
    job.task.add_done_callback(job.end)
    return job


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
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


async def _aread(iterate: Callable[[], Awaitable[AsyncIterator[object]]], put: Put) -> None:
    async for item in await iterate():
        put((time.monotonic(), item))


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
    job.task.add_done_callback(lambda _: arrived.put_nowait((-math.inf, END)))  # late or not, all items are there
    timer = at(deadline, arrived.put_nowait, (math.inf, END))
    try:
        while True:
            came, item = await arrived.get()
            if came == math.inf and job.done:  # over since: what came tells whether it was late
                continue
            if deadline is not None and came > deadline:
                raise DeadlineExceededError(f"{what} was still running at its deadline")
            if item is END:
                job.result()  # raises the error of a call that failed
                break
            yield item
    finally:
        job.cancel()
        if timer is not None:
            timer.cancel()
