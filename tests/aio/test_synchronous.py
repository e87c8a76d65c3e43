"""What is the sync driver's own: the caller's thread, timers and interruption."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llama_index_agentic_kb._aio import (
    Call,
    Job,
    WorkerPool,
    deadline_after,
    emit,
    gather,
    iterate,
    open_stream,
    run,
    start,
    wait,
)
from llama_index_agentic_kb.errors import DeadlineExceededError


def test_flow_bodies_run_in_the_callers_thread() -> None:
    """Every flow's body runs in the thread that called, one at a time; only leaf calls run on workers."""
    seen: list[str] = []

    async def child() -> None:
        seen.append(threading.current_thread().name)
        seen.append(await Call(sync=lambda: threading.current_thread().name, pool=WorkerPool("leaf", 1)))
        seen.append(threading.current_thread().name)

    async def flow() -> None:
        await gather([child()])

    run(flow())
    assert seen == ["MainThread", "agentic-kb-leaf-1", "MainThread"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler: a shell starts what runs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_run_at_once() -> None:
    """Ctrl-C while a call hangs is raised at once, and closes every flow."""
    told: list[str] = []
    release = threading.Event()

    async def flow() -> None:
        try:
            await Call(sync=lambda: release.wait(30))
        finally:
            told.append("closed")

    def interrupt(main: int) -> None:
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main is not None
    started = time.monotonic()
    thread = threading.Thread(target=interrupt, args=(main,))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(flow())
    release.set()
    thread.join()
    assert told == ["closed"]
    assert time.monotonic() - started < 5


def test_a_slow_reader_meets_no_deadline_that_was_kept() -> None:
    """Items that came in time are given although the reader of the iteration took longer than the deadline."""

    async def flow() -> None:
        deadline = deadline_after(0.1)
        stream = open_stream(sync=lambda: iter(range(3)))
        for _ in range(3):
            await emit(await stream.next(deadline=deadline))

    seen = []
    for item in iterate(flow()):
        seen.append(item)
        time.sleep(0.1)
    assert seen == [0, 1, 2]


def test_a_dropped_iteration_ends_its_threads(until: Callable[[Callable[[], bool]], bool]) -> None:
    """A half-read iteration that is forgotten is closed; its stream's thread ends after the item it is at."""
    ended = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                time.sleep(0.01)
                yield 1
        finally:
            ended.set()

    async def flow() -> None:
        stream = open_stream(sync=source)
        while True:
            await emit(await stream.next())

    generator = iterate(flow())
    next(generator)
    del generator
    assert ended.wait(5)


def test_timers_that_are_stale_disturb_nothing() -> None:
    """Deadlines of waits that were over in time are let go by, in whatever order they were set."""

    async def flow() -> list[bool]:
        done = []
        for seconds in (0.05, 0.5, 0.02):
            job: Job[None] = start(Call(sync=lambda: time.sleep(0.005)))
            await wait([job], deadline=deadline_after(seconds))
            done.append(job.done)
        await Call(sync=lambda: time.sleep(0.1), deadline=deadline_after(5))
        return done

    assert run(flow()) == [True, True, True]


def test_a_pool_that_fails_to_start_a_thread() -> None:
    """An error of the driver's own step is raised in the flow, where it can be handled."""

    class Broken(WorkerPool):
        def submit(self, work: Callable[[], None]) -> None:
            raise RuntimeError("can't start new thread")

    async def flow() -> str:
        try:
            await Call(sync=lambda: None, pool=Broken("broken"))
        except RuntimeError as error:
            return str(error)
        return "no error"

    assert run(flow()) == "can't start new thread"


def test_runs_within_runs() -> None:
    """A leaf call may make a sync run of its own, several levels deep."""

    async def flow(depth: int) -> Any:
        if depth == 0:
            return 0
        return 1 + (await Call(sync=lambda: run(flow(depth - 1)), deadline=deadline_after(10)))

    assert run(flow(5)) == 5


def test_a_deadline_in_a_child_is_its_own() -> None:
    """One child's deadline is raised in that child alone."""

    async def child(seconds: float) -> str:
        await Call(sync=lambda: time.sleep(0.1), deadline=deadline_after(seconds))
        return "in time"

    async def flow() -> list[object]:
        jobs = await gather([child(0.01), child(5)])
        return [type(jobs[0].error), jobs[1].result()]

    assert run(flow()) == [DeadlineExceededError, "in time"]
