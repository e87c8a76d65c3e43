"""Performs flows with asyncio: every flow is a task in its own context; what has no native async runs on a thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from llama_index_agentic_kb._flow.leaves import close_flow, deliver_result, pump, pump_async
from llama_index_agentic_kb._flow.steps import (
    END,
    SHARED_POOL,
    Call,
    Cancel,
    Emit,
    Flow,
    Job,
    Next,
    Open,
    Pause,
    Start,
    Step,
    Stream,
    Wait,
    check_begun_in_time,
    still_running,
)
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError

__all__ = ["aiterate", "arun"]

T = TypeVar("T")

PARTING_TURNS = 10
"""How many turns of the loop cancelled tasks are given to end in, before the caller goes on without them."""


async def arun(flow: Flow[T]) -> T:
    """Perform a flow and give its result. Cancelling the caller's task cancels all that the flow started."""
    driver = _Driver(emit=None)
    try:
        return await driver.root(flow)
    finally:
        await driver.close()


async def aiterate(flow: Flow[Any], context: contextvars.Context | None = None) -> AsyncGenerator[Any, None]:
    """Perform a flow and give the items that it emits; its error, if any, is raised after them.

    Args:
        flow: Begins when the first item is asked for.
        context: What the flow sees; None is a copy of the context at that time.
    """
    emitted: asyncio.Queue[Any] = asyncio.Queue()
    driver = _Driver(emit=emitted.put_nowait)
    root = driver.start(driver.drive(flow), context or contextvars.copy_context())
    root.add_done_callback(lambda _: emitted.put_nowait(END))
    try:
        while (item := await emitted.get()) is not END:
            yield item
        root.result()
    finally:
        await driver.close()


class _Driver:
    """Performs steps; keeps its tasks so that they end with it."""

    def __init__(self, emit: Callable[[Any], None] | None) -> None:
        self._emit = emit
        self._tasks: set[asyncio.Task[Any]] = set()
        self._channels: list[_Channel] = []

    def start(self, work: Coroutine[Any, Any, T], context: contextvars.Context) -> asyncio.Task[T]:
        """Make a task that ends with the driver."""
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: an abandoned task's late error is nobody's news

    async def root(self, flow: Flow[T]) -> T:
        """Perform the outermost flow in a context of its own."""
        return await self.start(self.drive(flow), contextvars.copy_context())

    async def close(self) -> None:
        """Cancel everything still under way; sync calls are abandoned on their threads.

        What takes its cancellation in a few turns has ended then; what does not is not waited for.
        """
        for channel in self._channels:
            channel.close()
        for task in list(self._tasks):
            _cancel(task)
        for _ in range(PARTING_TURNS):
            if not self._tasks:
                return
            await asyncio.sleep(0)

    async def drive(self, flow: Flow[T]) -> T:
        """Perform one flow's steps until it returns."""
        value: Any = None
        error: Exception | None = None
        try:
            while True:
                try:
                    step = flow.send(value) if error is None else flow.throw(error)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                value, error = None, None
                try:
                    value = await self._perform(step)
                except Exception as failure:  # noqa: BLE001 (raised inside the flow, at its yield)
                    error = failure
        finally:
            close_flow(flow)

    async def _perform(self, step: Step) -> Any:  # noqa: PLR0911 (one return a step is the clearest table)
        match step:
            case Call():
                return await self._call(step)
            case Start():
                return self._start(step)
            case Wait():
                return await self._wait(step)
            case Pause():
                return await asyncio.sleep(max(0.0, step.until - time.monotonic()))
            case Cancel():
                return await self._cancel(step.job)
            case Open():
                return self._open(step)
            case Next():
                return await self._next(step)
            case Emit():
                if self._emit is not None:
                    self._emit(step.item)
                return await asyncio.sleep(0)  # a reader that waits for the item goes first
            case _:
                raise TypeError(f"a flow yielded {step!r}, which is no step")

    # -- calls and jobs ------------------------------------------------------------------------------------------

    async def _call(self, call: Call) -> Any:
        check_begun_in_time(call)
        context = contextvars.copy_context()
        if call.native is not None:
            work = self.start(_awaited(call.native), context)
            return await _until(work, call.deadline, call.what)
        if call.sync is None:
            raise TypeError(f"{call.what}: a call needs a sync or a native function")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        sync, pool = call.sync, call.pool or SHARED_POOL

        def deliver(value: Any, error: Exception | None) -> None:
            _call_soon(loop, lambda: _settle(answer, value, error))

        pool.submit(lambda: deliver_result(context, sync, deliver, lambda: not answer.done()))
        return await _until(answer, call.deadline, call.what)

    def _start(self, step: Start) -> Job[Any]:
        job: Job[Any] = Job()
        job.handle = self.start(self._record(step.work, job), contextvars.copy_context())
        return job

    async def _record(self, work: Flow[Any] | Call, job: Job[Any]) -> None:
        """Perform work and note its end in the job; errors wait there for whoever asks."""
        value: Any = None
        error: Exception | None = None
        try:
            value = await (self._call(work) if isinstance(work, Call) else self.drive(work))
        except asyncio.CancelledError:
            error = DeadlineExceededError("stopped before it was done")
            raise
        except Exception as failure:  # noqa: BLE001 (kept in the job)
            error = failure
        finally:
            if not job.done:
                job.finish(value, error)

    async def _wait(self, step: Wait) -> None:
        waiting = [job.handle for job in step.jobs if not job.done]
        if not waiting or (step.first and len(waiting) < len(step.jobs)):
            return
        await asyncio.wait(
            waiting,
            timeout=_left(step.deadline),
            return_when=asyncio.FIRST_COMPLETED if step.first else asyncio.ALL_COMPLETED,
        )

    async def _cancel(self, job: Job[Any]) -> None:
        if not job.done:
            _cancel(job.handle)
            job.finish(error=DeadlineExceededError("stopped before it was done"))
        await asyncio.sleep(0)  # lets the cancelled task close its flow now

    # -- streams -------------------------------------------------------------------------------------------------

    def _open(self, step: Open) -> Stream:
        channel = _Channel()
        self._channels.append(channel)
        context = contextvars.copy_context()
        if step.native is not None:
            channel.task = self.start(pump_async(step.native, channel.put), context)
            return Stream(step.what, channel)
        if step.sync is None:
            raise TypeError(f"{step.what}: a stream needs a sync or a native function")
        loop = asyncio.get_running_loop()
        source, pool = step.sync, step.pool or SHARED_POOL

        def deliver(value: Any, error: Exception | None) -> None:
            came = time.monotonic()
            _call_soon(loop, lambda: channel.put(value, error, came))

        pool.submit(lambda: pump(context, source, channel.closed, deliver))
        return Stream(step.what, channel)

    async def _next(self, step: Next) -> Any:
        channel: _Channel = step.stream.handle
        if channel.closed.is_set():
            return END
        try:
            if channel.items.empty():
                item = asyncio.ensure_future(channel.items.get())
                value, error, came = await _until(item, step.deadline, step.stream.what)
            else:
                value, error, came = channel.items.get_nowait()
            if step.deadline is not None and came > step.deadline:
                raise still_running(step.stream.what)
        except (asyncio.CancelledError, DeadlineExceededError):
            channel.close()
            raise
        if error is not None:
            raise error
        if value is END:
            channel.closed.set()  # asking again gives END again
        return value


class _Channel:
    """Items read ahead from a stream, each with the time it came."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[tuple[Any, Exception | None, float]] = asyncio.Queue()
        self.closed = threading.Event()
        self.task: asyncio.Task[None] | None = None

    def put(self, value: Any, error: Exception | None, came: float | None = None) -> None:
        """Add an item."""
        self.items.put_nowait((value, error, time.monotonic() if came is None else came))

    def close(self) -> None:
        """Read no more."""
        self.closed.set()
        if self.task is not None:
            _cancel(self.task)


async def _awaited(native: Callable[[], Awaitable[Any]]) -> Any:
    return await native()


async def _until(future: asyncio.Future[Any], deadline: float | None, what: str) -> Any:
    """Wait for a future until the deadline; never wait for its cancellation, which may itself hang."""
    try:
        done, _ = await asyncio.wait([future], timeout=_left(deadline))
    except asyncio.CancelledError:
        _drop(future)
        raise
    if not done:
        _drop(future)
        raise still_running(what)
    if future.cancelled():
        raise AgenticKBError(f"{what} was cancelled from within")
    return future.result()


def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, once: a second time would break off its clean-up, and leave its connection open."""
    if not task.cancelling():
        task.cancel()


def _drop(future: asyncio.Future[Any]) -> None:
    """Cancel a future that nobody waits for; one that failed just now is marked as seen."""
    if future.done():
        _ = future.cancelled() or future.exception()
    elif isinstance(future, asyncio.Task):
        _cancel(future)
    else:
        future.cancel()


def _left(deadline: float | None) -> float | None:
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
