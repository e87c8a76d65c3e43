"""The one long-lived event loop on which async-only work of sync calls runs."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from llama_index_agentic_kb.errors import AgenticKBError

__all__ = ["start_in_background"]

THREAD_NAME = "agentic-kb-loop"

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_left_behind: list[asyncio.AbstractEventLoop] = []


def _forget() -> None:
    """In a forked child the loop's thread does not run: make a new one when it is needed."""
    global _loop, _thread, _lock  # noqa: PLW0603
    if _loop is not None:
        _left_behind.append(_loop)  # the parent's: collecting it would close what is not the child's
    _loop = _thread = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _background_loop() -> asyncio.AbstractEventLoop:
    """Give the loop; async clients keep their connections on it from call to call."""
    global _loop, _thread  # noqa: PLW0603 (one loop for the process)
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name=THREAD_NAME, daemon=True)
            _thread.start()
        return _loop


def start_in_background(
    make: Callable[[], Coroutine[Any, Any, None]], context: contextvars.Context
) -> Callable[[], None]:
    """Start a coroutine on the background loop in a context; give a function that cancels it.

    Raises:
        AgenticKBError: The caller runs on that loop itself, and would wait for itself for ever.
    """
    if threading.current_thread() is _thread:
        raise AgenticKBError(
            "async code that a sync call runs made a sync call, which needs the loop that it holds: await the async "
            "method in its place"
        )
    loop = _background_loop()
    tasks: list[asyncio.Task[None]] = []
    cancelled = threading.Event()

    def start() -> None:
        if not cancelled.is_set():
            tasks.append(loop.create_task(make(), context=context))

    def cancel_now() -> None:
        for task in tasks:
            if not task.cancelling():  # a second time would break off its clean-up
                task.cancel()

    def cancel() -> None:
        cancelled.set()
        loop.call_soon_threadsafe(cancel_now)

    loop.call_soon_threadsafe(start)
    return cancel
