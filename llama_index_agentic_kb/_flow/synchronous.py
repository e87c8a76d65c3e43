"""Performs flows with threads: all flow bodies run in the caller's thread, only leaf calls on workers.

A small scheduler, so that any number of flows may wait side by side while none of them holds a thread: pools can't
deadlock on their own children.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, TypeVar

from llama_index_agentic_kb._flow.background import start_in_background
from llama_index_agentic_kb._flow.leaves import close_flow, deliver_awaited, deliver_result, pump, pump_async
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
from llama_index_agentic_kb.errors import DeadlineExceededError

__all__ = ["iterate", "run"]

T = TypeVar("T")


def run(flow: Flow[T]) -> T:
    """Perform a flow and give its result. Works inside a running event loop too (and blocks it)."""
    driver = _Driver()
    root = driver.spawn(flow, contextvars.copy_context())
    for _ in driver.items(root):
        pass
    result: T = root.job.result()
    return result


def iterate(flow: Flow[Any], context: contextvars.Context | None = None) -> Generator[Any, None, None]:
    """Perform a flow and give the items that it emits; its error, if any, is raised after them.

    Args:
        flow: Begins when the first item is asked for.
        context: What the flow sees; None is a copy of the context at that time.
    """
    driver = _Driver()
    root = driver.spawn(flow, context or contextvars.copy_context())
    yield from driver.items(root)
    root.job.result()


def _as_flow(work: Flow[Any] | Call) -> Flow[Any]:
    return _call_flow(work) if isinstance(work, Call) else work


def _call_flow(call: Call) -> Flow[Any]:
    return (yield call)


class _Task:
    """A flow under way."""

    def __init__(self, flow: Flow[Any], context: contextvars.Context) -> None:
        self.flow = flow
        self.context = context
        self.job: Job[Any] = Job()
        self.job.handle = self
        self.turn = 0  # counts waits: what answers an earlier wait is late, and ignored
        self.abandon: Callable[[], None] | None = None


class _Waiter:
    """A task that waits for so many more jobs to be done."""

    def __init__(self, task: _Task, needed: int) -> None:
        self.task = task
        self.turn = task.turn
        self.needed = needed


class _Channel:
    """Items read ahead from a stream, each with the time it came, and the one task that may wait for them."""

    def __init__(self) -> None:
        self.items: deque[tuple[Any, Exception | None, float]] = deque()
        self.reader: tuple[_Task, int, Next] | None = None
        self.closed = threading.Event()
        self.abandon: Callable[[], None] | None = None

    def close(self) -> None:
        """Read no more."""
        self.closed.set()
        if self.abandon is not None:
            self.abandon()


class _Driver:
    """Runs tasks until the root is done."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._tasks: set[_Task] = set()
        self._channels: list[_Channel] = []
        self._waiters: dict[Job[Any], list[_Waiter]] = {}
        self._emitted: deque[Any] = deque()

    # -- the loop ------------------------------------------------------------------------------------------------

    def items(self, root: _Task) -> Iterator[Any]:
        """Run until the root is done, giving what is emitted on the way."""
        try:
            while not root.job.done:
                self._turn()
                while self._emitted:
                    yield self._emitted.popleft()
        finally:
            self._close()

    def _turn(self) -> None:
        """Do one thing that is ready; where nothing is, wait for a result or a deadline.

        What came before a deadline was seen is taken; and deadlines are seen however fast results come.
        """
        if self._ready:
            self._ready.popleft()()
            return
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        try:
            self._inbox.get(timeout=timeout)()
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()
        except queue.Empty:
            pass
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _close(self) -> None:
        """Stop everything still under way: close flows, cancel what can be, abandon the rest."""
        for channel in self._channels:
            channel.close()
        for task in list(self._tasks):
            self._stop(task)

    # -- tasks ---------------------------------------------------------------------------------------------------

    def spawn(self, flow: Flow[Any], context: contextvars.Context) -> _Task:
        """Make a task of a flow and let it start."""
        task = _Task(flow, context)
        self._tasks.add(task)
        self._resume(task, None, None)
        return task

    def _resume(self, task: _Task, value: Any, error: BaseException | None) -> None:
        task.turn += 1
        task.abandon = None
        turn = task.turn
        self._ready.append(lambda: self._advance(task, turn, value, error))

    def _answer(self, task: _Task, turn: int, value: Any, error: BaseException | None = None) -> None:
        """Resume a task that waits, unless it no longer waits for this."""
        if task.turn == turn and not task.job.done:
            self._resume(task, value, error)

    def _advance(self, task: _Task, turn: int, value: Any, error: BaseException | None) -> None:
        if task.job.done or task.turn != turn:
            return
        try:
            if error is not None:
                step = task.context.run(task.flow.throw, error)
            else:
                step = task.context.run(task.flow.send, value)
        except StopIteration as stop:
            self._finish(task, stop.value, None)
        except Exception as failure:  # noqa: BLE001 (kept in the job, raised by whoever asks for its result)
            self._finish(task, None, failure)
        else:
            try:
                self._perform(task, step)
            except Exception as failure:  # noqa: BLE001 (raised inside the flow, at its yield)
                self._resume(task, None, failure)

    def _finish(self, task: _Task, value: Any, error: BaseException | None) -> None:
        self._tasks.discard(task)
        task.job.finish(value, error)
        for waiter in self._waiters.pop(task.job, []):
            waiter.needed -= 1
            if waiter.needed <= 0:
                self._answer(waiter.task, waiter.turn, None)

    def _stop(self, task: _Task) -> None:
        self._tasks.discard(task)
        task.turn += 1
        if task.abandon is not None:
            task.abandon()
        task.context.run(close_flow, task.flow)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _perform(self, task: _Task, step: Step) -> None:
        match step:
            case Call():
                self._call(task, step)
            case Start():
                child = self.spawn(_as_flow(step.work), task.context.copy())
                self._resume(task, child.job, None)
            case Wait():
                self._wait(task, step)
            case Pause():
                turn = task.turn
                self._at(step.until, lambda: self._answer(task, turn, None))
            case Cancel():
                self._cancel(task, step.job)
            case Open():
                self._open(task, step)
            case Next():
                self._next(task, step)
            case Emit():
                self._emitted.append(step.item)
                self._resume(task, None, None)
            case _:
                raise TypeError(f"a flow yielded {step!r}, which is no step")

    def _call(self, task: _Task, call: Call) -> None:
        turn = task.turn
        check_begun_in_time(call)

        def deliver(value: Any, error: Exception | None) -> None:
            self._inbox.put(lambda: self._answer(task, turn, value, error))

        def wanted() -> bool:
            return task.turn == turn

        context = task.context.copy()
        if call.sync is not None:
            work = call.sync
            pool = call.pool or SHARED_POOL
            pool.submit(lambda: deliver_result(context, work, deliver, wanted))
        elif call.native is not None:
            task.abandon = start_in_background(partial(deliver_awaited, call.native, deliver), context)
        else:
            raise TypeError(f"{call.what}: a call needs a sync or a native function")
        self._expire(task, call.deadline, call.what)

    def _expire(self, task: _Task, deadline: float | None, what: str) -> None:
        """End the task's present wait with an error at the deadline."""
        if deadline is None:
            return
        turn = task.turn

        def late() -> None:
            if task.turn == turn and not task.job.done:
                if task.abandon is not None:
                    task.abandon()
                self._resume(task, None, still_running(what))

        self._at(deadline, late)

    def _at(self, deadline: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (deadline, next(self._order), action))

    def _wait(self, task: _Task, step: Wait) -> None:
        waiting = [job for job in step.jobs if not job.done]
        if not waiting or (step.first and len(waiting) < len(step.jobs)):
            self._resume(task, None, None)
            return
        waiter = _Waiter(task, needed=1 if step.first else len(waiting))
        for job in waiting:
            self._waiters.setdefault(job, []).append(waiter)
        if step.deadline is not None:
            self._at(step.deadline, lambda: self._answer(task, waiter.turn, None))

    def _cancel(self, task: _Task, job: Job[Any]) -> None:
        if not job.done:
            self._stop(job.handle)
            self._finish(job.handle, None, DeadlineExceededError("stopped before it was done"))
        self._resume(task, None, None)

    # -- streams -------------------------------------------------------------------------------------------------

    def _open(self, task: _Task, step: Open) -> None:
        channel = _Channel()
        self._channels.append(channel)
        context = task.context.copy()

        def deliver(value: Any, error: Exception | None) -> None:
            item = (value, error, time.monotonic())
            self._inbox.put(lambda: self._arrive(channel, item))

        if step.sync is not None:
            source = step.sync
            pool = step.pool or SHARED_POOL
            pool.submit(lambda: pump(context, source, channel.closed, deliver))
        elif step.native is not None:
            channel.abandon = start_in_background(partial(pump_async, step.native, deliver), context)
        else:
            raise TypeError(f"{step.what}: a stream needs a sync or a native function")
        self._resume(task, Stream(step.what, channel), None)

    def _arrive(self, channel: _Channel, item: tuple[Any, Exception | None, float]) -> None:
        channel.items.append(item)
        if channel.reader is not None:
            task, turn, step = channel.reader
            channel.reader = None
            if task.turn == turn and not task.job.done:
                self._hand(task, step)

    def _next(self, task: _Task, step: Next) -> None:
        channel: _Channel = step.stream.handle
        if channel.closed.is_set():
            self._resume(task, END, None)
        elif channel.items:
            self._hand(task, step)
        else:
            channel.reader = (task, task.turn, step)
            task.abandon = channel.close
            self._expire(task, step.deadline, step.stream.what)

    def _hand(self, task: _Task, step: Next) -> None:
        """Give a task the item that it waits for; one that came too late ends the stream."""
        channel: _Channel = step.stream.handle
        value, error, came = channel.items.popleft()
        if step.deadline is not None and came > step.deadline:
            channel.close()
            error = still_running(step.stream.what)
        elif value is END:
            channel.closed.set()
        self._resume(task, value, error)
