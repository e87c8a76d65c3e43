"""Streams with deadlines: an iterator of a source, read ahead by a thread or a task."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import Enum
from functools import partial
from typing import Any, Final, Generic, TypeVar

from llama_index_agentic_kb._aio.calls import (
    as_exception,
    call_deadline,
    call_soon,
    cancel_once,
    current_scope,
    earliest,
    in_background,
    raise_interrupt,
    settle,
    until,
)
from llama_index_agentic_kb._aio.threads import SHARED_POOL, WorkerPool
from llama_index_agentic_kb.errors import DeadlineExceededError

T = TypeVar("T")


class _End(Enum):
    END = "END"

    def __repr__(self) -> str:
        return "END"


END: Final = _End.END
"""The return value of ``Stream.next`` at the end of the stream."""


class Stream(Generic[T]):
    """An open stream, read ahead by a thread or a task, so that the wait for each item can have a deadline."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.closed = threading.Event()
        self.abandon: Callable[[], None] | None = None
        self._items: deque[tuple[T | _End | None, Exception | None, float]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, value: T | _End | None, error: Exception | None, came: float) -> None:
        """Add an item, or the error that ended the stream, with its arrival time."""
        self._items.append((value, error, came))
        if self._waiter is not None:
            settle(self._waiter, None, None)

    async def next(self, deadline: float | None = None) -> T | _End:
        """Return the next item; ``END`` at and after the end of the stream.

        Raises:
            DeadlineExceededError: No item arrived before the deadline, or the context's deadline. The stream is closed.
            Exception: The exception that the stream raised.
        """
        if self.closed.is_set():
            return END
        deadline = earliest(deadline, call_deadline())
        try:
            while not self._items:
                self._waiter = asyncio.get_running_loop().create_future()
                await until(self._waiter, deadline, self.what)
        except (asyncio.CancelledError, DeadlineExceededError):
            self.close()
            raise
        value, error, came = self._items.popleft()
        if deadline is not None and came > deadline:
            self.close()
            raise DeadlineExceededError(f"{self.what} was still running at its deadline")
        if error is not None:
            raise error
        if value is END:
            self.closed.set()
        return value  # type: ignore[return-value]  # without an error there is a value

    def close(self) -> None:
        """Stop reading the stream."""
        self.closed.set()
        if self.abandon is not None:
            self.abandon()


def open_stream(
    *,
    sync: Callable[[], Iterator[T]] | None = None,
    native: Callable[[], Awaitable[AsyncIterator[T]]] | None = None,
    pool: WorkerPool | None = None,
    what: str = "stream",
) -> Stream[T]:
    """Open a stream; see ``Call`` for the arguments. The whole iterator runs in one context."""
    scope, context, stream = current_scope(), contextvars.copy_context(), Stream[T](what)
    scope.add_stream(stream)
    put = partial(call_soon, asyncio.get_running_loop(), stream.put)
    if native is not None and not scope.threads:
        stream.abandon = partial(cancel_once, scope.create_task(_pump_async(native, stream.put), context))
    elif sync is not None:
        (pool or SHARED_POOL).submit(partial(_pump, context, sync, stream.closed, put))
    elif native is not None:
        stream.abandon = in_background(partial(_pump_async, native, put), context, scope)
    else:
        raise TypeError(f"{what}: a stream needs a sync or a native function")
    return stream


def _pump(
    context: contextvars.Context,
    source: Callable[[], Iterator[Any]],
    closed: threading.Event,
    put: Callable[[Any, Exception | None, float], None],
) -> None:
    """Read an iterator to its end on a worker thread; stop and close it once the stream is closed."""

    def read() -> None:
        iterator = iter(source())
        for item in iterator:
            if closed.is_set():
                break
            put(item, None, time.monotonic())
        close = getattr(iterator, "close", None)
        if close is not None:
            close()

    if closed.is_set():
        return
    try:
        context.run(read)
    except BaseException as error:  # noqa: BLE001 (delivered to whoever reads the stream)
        put(None, as_exception(error), time.monotonic())
    put(END, None, time.monotonic())


async def _pump_async(
    native: Callable[[], Awaitable[AsyncIterator[Any]]], put: Callable[[Any, Exception | None, float], None]
) -> None:
    """Read an async iterator to its end; its task is cancelled when the stream is closed."""
    try:
        async for item in await native():
            put(item, None, time.monotonic())
    except BaseException as error:  # noqa: BLE001 (delivered to whoever reads the stream)
        put(None, as_exception(error), time.monotonic())
        raise_interrupt(error)
    put(END, None, time.monotonic())
