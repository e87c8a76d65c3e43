"""Performs flows with asyncio: every flow is a task in its own context; what has no native async runs on a thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

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
    Start,
    Step,
    Stream,
    Wait,
)
from llama_index_agentic_kb._flow.synchronous import deliver_result, pump
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError

__all__ = ["aiterate", "arun"]

T = TypeVar("T")


async def arun(flow: Flow[T]) -> T:
    """Perform a flow and give its result. Cancelling the caller's task cancels all that the flow started."""
    driver = _Driver(emit=None)
    try:
        return await driver.root(flow)
    finally:
        driver.close()


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
        driver.close()


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

    def close(self) -> None:
        """Cancel everything still under way; sync calls are abandoned on their threads."""
        for channel in self._channels:
            channel.closed.set()
        for task in list(self._tasks):
            task.cancel()

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
            flow.close()

    async def _perform(self, step: Step) -> Any:  # noqa: PLR0911 (one return a step is the clearest table)
        match step:
            case Call():
                return await self._call(step)
            case Start():
                return self._start(step)
            case Wait():
                return await self._wait(step)
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
        context = contextvars.copy_context()
        if call.native is not None:
            work = self.start(_awaited(call.native), context)
            return await _until(work, call.deadline, call.what)
        if call.sync is None:
            raise TypeError(f"{call.what}: a call needs a sync or a native function")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        sync, pool = call.sync, call.pool or SHARED_POOL

        def deliver(value: Any, error: BaseException | None) -> None:
            _call_soon(loop, lambda: _settle(answer, value, error))

        pool.submit(lambda: deliver_result(context, sync, deliver))
        return await _until(answer, call.deadline, call.what)

    def _start(self, step: Start) -> Job[Any]:
        job: Job[Any] = Job()
        work = self._call(step.work) if isinstance(step.work, Call) else self.drive(step.work)
        job.handle = self.start(_record(work, job), contextvars.copy_context())
        return job

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
            job.handle.cancel()
            job.finish(error=DeadlineExceededError("stopped before it was done"))
        await asyncio.sleep(0)  # lets the cancelled task close its flow now

    # -- streams -------------------------------------------------------------------------------------------------

    def _open(self, step: Open) -> Stream:
        channel = _Channel()
        self._channels.append(channel)
        context = contextvars.copy_context()
        if step.native is not None:
            self.start(_apump(step.native, channel), context)
            return Stream(step.what, channel)
        if step.sync is None:
            raise TypeError(f"{step.what}: a stream needs a sync or a native function")
        loop = asyncio.get_running_loop()
        source, pool = step.sync, step.pool or SHARED_POOL

        def deliver(value: Any, error: BaseException | None) -> None:
            _call_soon(loop, lambda: channel.items.put_nowait((value, error)))

        pool.submit(lambda: pump(context, source, channel.closed, deliver))
        return Stream(step.what, channel)

    async def _next(self, step: Next) -> Any:
        channel: _Channel = step.stream.handle
        if channel.items.empty():
            item = asyncio.ensure_future(channel.items.get())
            value, error = await _until(item, step.deadline, step.stream.what)
        else:
            value, error = channel.items.get_nowait()
        if error is not None:
            raise error
        if value is END:
            channel.items.put_nowait((END, None))  # asking again gives END again
        return value


class _Channel:
    """Items read ahead from a stream."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[tuple[Any, BaseException | None]] = asyncio.Queue()
        self.closed = threading.Event()


async def _awaited(native: Callable[[], Awaitable[Any]]) -> Any:
    return await native()


async def _record(work: Coroutine[Any, Any, Any], job: Job[Any]) -> None:
    """Perform work and note its end in the job; errors wait there for whoever asks."""
    value: Any = None
    error: Exception | None = None
    try:
        value = await work
    except asyncio.CancelledError:
        error = DeadlineExceededError("stopped before it was done")
        raise
    except Exception as failure:  # noqa: BLE001 (kept in the job)
        error = failure
    finally:
        if not job.done:
            job.finish(value, error)


async def _until(future: asyncio.Future[Any], deadline: float | None, what: str) -> Any:
    """Wait for a future until the deadline; never wait for its cancellation, which may itself hang."""
    try:
        done, _ = await asyncio.wait([future], timeout=_left(deadline))
    except asyncio.CancelledError:
        future.cancel()
        raise
    if not done:
        future.cancel()
        raise DeadlineExceededError(f"{what} was still running at its deadline")
    if future.cancelled():
        raise AgenticKBError(f"{what} was cancelled from within")
    return future.result()


async def _apump(native: Callable[[], Awaitable[AsyncIterator[Any]]], channel: _Channel) -> None:
    """Read an async iterator to its end in a task of its own."""
    try:
        async for item in await native():
            channel.items.put_nowait((item, None))
    except Exception as error:  # noqa: BLE001 (delivered to the flow, which raises it)
        channel.items.put_nowait((None, error))
    channel.items.put_nowait((END, None))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
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
