"""What is the async driver's own: tasks, cancellation and the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llama_index_agentic_kb._aio import Call, Job, aiterate, arun, deadline_after, emit, open_stream, start, wait
from llama_index_agentic_kb.errors import DeadlineExceededError
from tests.aio.conftest import collect


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


class Sleeper:
    """A native call that tells what became of it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def __call__(self) -> None:
        self.told.append("began")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.told.append("cancelled")
            raise


async def test_cancelling_the_caller_cancels_everything() -> None:
    """Cancelling the task that awaits a flow cancels its native calls, its flows and its streams, and they end."""
    sleeper, other, told = Sleeper(), Sleeper(), []

    async def items() -> AsyncIterator[int]:
        await other()
        yield 1

    async def opens() -> AsyncIterator[int]:
        return items()

    async def child() -> None:
        try:
            await Call(native=sleeper)
        finally:
            told.append("child closed")

    async def flow() -> None:
        try:
            stream = open_stream(native=opens)
            job: Job[None] = start(child())
            await collect(stream)
            await wait([job])
        finally:
            told.append("root closed")

    task = asyncio.create_task(arun(flow()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sleeper.told == other.told == ["began", "cancelled"]
    assert sorted(told) == ["child closed", "root closed"]
    assert others() == set()


@pytest.mark.parametrize("how", ["deadline", "caller", "close"])
async def test_clean_up_is_not_broken_off(how: str) -> None:
    """What is stopped is cancelled once: a client that closes its connection then can finish doing so."""
    told: list[str] = []

    async def slow_to_close() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            told.append("closed")

    async def items() -> AsyncIterator[int]:
        yield 1
        await slow_to_close()

    async def opens() -> AsyncIterator[int]:
        return items()

    async def flow() -> None:
        stream = open_stream(native=opens)
        start(Call(native=slow_to_close))
        await emit(await stream.next())
        await stream.next(deadline=deadline_after(0.05 if how == "deadline" else 60))

    if how == "close":
        generator = aiterate(flow())
        await anext(generator)
        await asyncio.sleep(0.01)
        await generator.aclose()
    else:
        task = asyncio.create_task(arun(flow()))
        await asyncio.sleep(0.02)
        if how == "caller":
            task.cancel()
        with pytest.raises((asyncio.CancelledError, DeadlineExceededError)):
            await task
    await asyncio.gather(*others(), return_exceptions=True)
    assert told == ["closed", "closed"]


def test_a_loop_that_is_closed_before_a_thread_answers() -> None:
    """A thread that delivers to a loop that is gone disturbs nobody."""
    closed, answered = threading.Event(), threading.Event()

    def slow() -> None:
        closed.wait(30)
        answered.set()

    async def flow() -> None:
        await Call(sync=slow, deadline=deadline_after(0.5))

    with pytest.raises(DeadlineExceededError):
        asyncio.run(arun(flow()))
    closed.set()
    assert answered.wait(30)


async def test_an_item_is_read_before_the_flow_goes_on() -> None:
    """A reader that waits sees each item before the flow emits the next."""
    told: list[str] = []

    async def flow() -> None:
        for n in range(3):
            await emit(n)
            told.append(f"emitted {n}")

    async for item in aiterate(flow()):
        told.append(f"read {item}")
    assert told == ["read 0", "emitted 0", "read 1", "emitted 1", "read 2", "emitted 2"]
