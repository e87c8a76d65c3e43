"""The event loop of async-only calls made by sync flows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from llama_index_agentic_kb._aio import Call, deadline_after, emit, gather, iterate, open_stream, run
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError


async def where() -> tuple[int, str]:
    return id(asyncio.get_running_loop()), threading.current_thread().name


async def ask() -> Any:
    return await Call(native=where)


def test_a_late_call_is_cancelled() -> None:
    """A native call that is late is cancelled on the loop, and its clean-up runs there."""
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def flow() -> None:
        await Call(native=hang, deadline=deadline_after(0.05))

    with pytest.raises(DeadlineExceededError):
        run(flow())
    assert cancelled.wait(5)


def test_a_stream_that_is_left_is_cancelled() -> None:
    """Closing a half-read iteration closes the async iterator behind it."""
    closed = threading.Event()

    async def items() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    async def opens() -> AsyncIterator[int]:
        return items()

    async def flow() -> None:
        stream = open_stream(native=opens)
        while True:
            await emit(await stream.next())

    generator = iterate(flow())
    assert [next(generator), next(generator)] == [1, 1]
    generator.close()
    assert closed.wait(5)


def test_waiting_for_oneself_is_an_error_not_a_hang() -> None:
    """Async code on the loop that makes a sync call which needs the loop is told so."""

    async def nests() -> Any:
        return run(ask())

    async def flow() -> Any:
        return await Call(native=nests, deadline=deadline_after(5))

    with pytest.raises(AgenticKBError, match="await the async method"):
        run(flow())


def test_waiting_for_oneself_further_down_is_an_error_too() -> None:
    """The sync call that holds the loop may lie several calls up, on another thread; a later one is free to use it."""
    inner: list[BaseException] = []

    async def on_a_thread() -> Any:
        return await Call(sync=lambda: run(ask()), deadline=deadline_after(30))

    async def nests() -> Any:
        try:
            return run(on_a_thread())
        except AgenticKBError as error:
            inner.append(error)
            raise

    async def flow() -> Any:
        return await Call(native=nests, deadline=deadline_after(30))

    began = time.monotonic()
    with pytest.raises(AgenticKBError, match="await the async method"):
        run(flow())
    assert time.monotonic() - began < 20
    assert len(inner) == 1
    assert run(ask())[1] == "agentic-kb-loop"
    assert run(on_a_thread())[1] == "agentic-kb-loop"


def test_the_loop_survives_what_runs_on_it() -> None:
    """A native call that raises SystemExit is an error of its own; the loop goes on for the others."""

    async def leave() -> None:
        raise SystemExit(1)

    async def flow() -> Any:
        works: list[Call[Any]] = [Call(native=leave), Call(native=where)]
        jobs = await gather(works, deadline=deadline_after(5))
        return [type(jobs[0].error), jobs[1].result()[1]]

    assert run(flow()) == [AgenticKBError, "agentic-kb-loop"]


def test_a_cancel_before_the_start_makes_no_call(until: Callable[[Callable[[], bool]], bool]) -> None:
    """A native call that is stopped before the loop came to it is never made, nor its coroutine left unawaited."""
    made: list[int] = []

    async def native() -> None:
        made.append(1)

    async def child() -> None:
        await Call(sync=lambda: blocked.wait(5))
        await Call(native=native)

    blocked = threading.Event()

    async def block() -> None:
        blocked.set()
        time.sleep(0.5)  # noqa: ASYNC251 (the loop is to be blocked)

    async def flow() -> None:
        works: list[Any] = [Call(native=block), child()]
        jobs = await gather(works, deadline=deadline_after(0.2))
        assert isinstance(jobs[1].error, DeadlineExceededError)

    run(flow())
    run(ask())
    assert made == []
