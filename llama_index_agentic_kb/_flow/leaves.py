"""Runs what flows call, on the threads and loops where it runs, and delivers what came of it.

Whatever happens there is delivered, as an ``Exception``: a ``SystemExit`` or a ``CancelledError`` of a source's own
ends neither a driver nor a thread, and leaves nobody waiting.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import Any, TypeAlias

from llama_index_agentic_kb._flow.steps import END
from llama_index_agentic_kb.errors import AgenticKBError

__all__ = ["Deliver", "as_exception", "close_flow", "deliver_awaited", "deliver_result", "pump", "pump_async"]

logger = logging.getLogger("llama_index_agentic_kb")

Deliver: TypeAlias = Callable[[Any, "Exception | None"], None]
"""Takes a value, or an error."""


def as_exception(error: BaseException) -> Exception:
    """Give what can be raised inside a flow, and kept in a future, without ending more than the flow."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = AgenticKBError(f"{type(error).__name__} was raised: {error}".rstrip(": "))
    failure.__cause__ = error
    return failure


def close_flow(flow: Generator[Any, Any, Any]) -> None:
    """Close a flow that was stopped; what its clean-up raises is logged, for nobody waits for it any more."""
    try:
        flow.close()
    except Exception:
        logger.warning("a stopped flow failed while it was closed", exc_info=True)


def deliver_result(
    context: contextvars.Context, work: Callable[[], Any], deliver: Deliver, wanted: Callable[[], bool]
) -> None:
    """Run work on a worker thread, unless nobody waits for it any more, and deliver what came of it."""
    if not wanted():
        return
    try:
        result = context.run(work)
    except BaseException as error:  # noqa: BLE001 (delivered to the flow, which raises it)
        deliver(None, as_exception(error))
    else:
        deliver(result, None)


async def deliver_awaited(native: Callable[[], Awaitable[Any]], deliver: Deliver) -> None:
    """Await work on the background loop and deliver what came of it."""
    try:
        result = await native()
    except BaseException as error:  # noqa: BLE001 (delivered to the flow, which raises it)
        deliver(None, as_exception(error))
    else:
        deliver(result, None)


def pump(
    context: contextvars.Context,
    source: Callable[[], Iterator[Any]],
    closed: threading.Event,
    deliver: Deliver,
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
    except BaseException as error:  # noqa: BLE001 (delivered to the flow, which raises it)
        deliver(None, as_exception(error))
    deliver(END, None)


async def pump_async(native: Callable[[], Awaitable[AsyncIterator[Any]]], deliver: Deliver) -> None:
    """Read an async iterator to its end, in a task of its own; cancelled when nobody listens any more."""
    try:
        async for item in await native():
            deliver(item, None)
    except KeyboardInterrupt:  # on the user's own loop
        raise
    except BaseException as error:  # noqa: BLE001 (delivered to the flow, which raises it)
        deliver(None, as_exception(error))
    deliver(END, None)
