"""What is the sync driver's own: the caller's thread, timers and interruption."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb import (
    ActivityCallbackHandler,
    AgenticRetriever,
    KnowledgeSource,
    RetrieverOptions,
    interleave,
)
from llama_index_agentic_kb._aio import (
    Call,
    WorkerPool,
    _open_loops,
    aiterate,
    arun,
    deadline_after,
    emit,
    iterate,
    read_ahead,
    start,
)
from llama_index_agentic_kb._aio import calls as workers
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.aio.conftest import until


def test_a_slow_reader_meets_no_deadline_that_was_kept() -> None:
    """Items that came in time are given although the reader of the iteration took longer than the deadline."""

    async def flow() -> None:
        deadline = deadline_after(0.1)
        through = partial(Call.perform, deadline=deadline)
        async for item in read_ahead(sync=lambda: iter(range(3)), deadline=deadline, through=through):
            await emit(item)

    seen = []
    for item in iterate(flow()):
        seen.append(item)
        time.sleep(0.1)
    assert seen == [0, 1, 2]


def test_an_item_is_read_before_its_emitter_continues() -> None:
    """Work that blocks the loop after an emit does not hold the item up."""
    log = list[str]()

    async def flow() -> None:
        for item in "ab":
            await emit(item)
            log.append(f"after {item}")

    for item in iterate(flow()):
        log.append(item)
    assert log == ["a", "after a", "b", "after b"]


def test_a_sync_callback_may_start_a_loop_of_its_own() -> None:
    """Observers, handlers and fusion functions of a sync call may be sync wrappers of async code."""
    ran: list[int] = []

    def fuse(lists: Any) -> Any:
        ran.append(asyncio.run(asyncio.sleep(0, 3)))
        return interleave(lists)

    class Handler(ActivityCallbackHandler):
        def on_event_end(self, *args: Any, **kwargs: Any) -> None:
            ran.append(asyncio.run(asyncio.sleep(0, 2)))

    sources = [KnowledgeSource(name, retriever=MemoryRetriever([f"rain {name}"])) for name in "ab"]
    manager = CallbackManager([Handler(log=False)])
    retriever = AgenticRetriever(
        sources,
        options=RetrieverOptions(fusion=fuse),
        observer=lambda _: ran.append(asyncio.run(asyncio.sleep(0, 1))),
        callback_manager=manager,
    )
    assert len(retriever.retrieve("rain")) == 2
    assert {1, 2, 3} == set(ran)


def test_a_stream_dropped_half_read_closes_its_loop() -> None:
    """The collector closes a stream in a cycle before it takes the stream's loop: no loop is left unclosed."""

    class Holder:
        items: Any
        itself: Any

    async def work() -> None:
        await emit(1)
        await emit(2)

    holder = Holder()
    holder.items, holder.itself = iterate(work()), holder
    assert next(holder.items) == 1
    before = len(_open_loops)
    assert before > 0
    del holder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
    assert len(_open_loops) < before


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


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
        stream = read_ahead(native=opens, deadline=deadline_after(0.05 if how == "deadline" else 60))
        start(Call(native=slow_to_close))
        await emit(await anext(stream))
        await anext(stream)

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


def test_work_never_waits_behind_work_while_a_thread_may_be_started() -> None:
    """However submissions fall between a thread's waking and its taking, each piece of work gets a thread."""
    for _ in range(150):
        pool, warm = WorkerPool("race", 2), threading.Event()
        pool.submit(warm.set)  # its thread is about to wait when the next work comes
        assert warm.wait(30)
        gate = threading.Barrier(3)  # passed only by three at once

        def meet(gate: threading.Barrier = gate) -> None:
            gate.wait(30)

        pool.submit(meet)
        pool.submit(meet)
        gate.wait(30)


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread without work ends after a while, and work after that gets a new one."""
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.02)
    pool = WorkerPool("idles", 2)
    for _ in range(2):
        done = threading.Event()
        pool.submit(done.set)
        assert done.wait(5)
        assert until(lambda: pool.threads == 0)


def in_a_process(code: str) -> str:
    script = "from llama_index_agentic_kb._aio import *\nimport time, threading, os, sys, asyncio\n"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert [line for line in done.stderr.splitlines() if " took " not in line] == []  # a busy machine's slow callbacks
    assert done.returncode == 0
    return done.stdout.strip()


def test_the_interpreter_exits_although_a_worker_hangs() -> None:
    """A hung sync call, and a hung native one on the background loop, keep no program from ending."""
    started = time.monotonic()
    out = in_a_process("""
        async def hang():
            await asyncio.sleep(600)

        async def flow():
            works = [Call(sync=lambda: time.sleep(600)), Call(native=hang)]
            jobs = await gather(works, deadline=deadline_after(0.1))
            return [type(job.error).__name__ for job in jobs]

        print(run(flow()))
        print(asyncio.run(arun(flow())))
    """)
    assert out.splitlines() == ["['DeadlineExceededError', 'DeadlineExceededError']"] * 2
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("door", ["run", "list_of"])
def test_an_interrupt_ends_a_sync_call(door: str) -> None:
    """The user's Ctrl-C: what runs is cancelled, and nothing of asyncio's is left behind."""
    out = in_a_process(f"""
        import signal

        async def flow():
            await emit(1)
            try:
                await Call(sync=lambda: time.sleep(600))
            finally:
                print("closed")

        def list_of(work):
            return list(iterate(work))

        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background of a shell
        interrupt = [threading.main_thread().ident, signal.SIGINT]
        threading.Timer(0.3, signal.pthread_kill, interrupt).start()
        try:
            {door}(flow())
        except KeyboardInterrupt:
            print("interrupted")
    """)
    assert out.splitlines() == ["closed", "interrupted"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_run_flows() -> None:
    """After a fork the child has no threads, and makes its own: sync, native and async calls work, as in the parent."""
    out = in_a_process("""
        async def native():
            return 2

        async def flow():
            jobs = await gather([Call(sync=lambda: 1), Call(native=native)], deadline=deadline_after(5))
            return [job.result() for job in jobs]

        hold = threading.Event()
        pool = WorkerPool("held", 1)
        pool.submit(lambda: hold.wait(5))

        async def held():
            return await Call(sync=lambda: 3, pool=pool, deadline=deadline_after(5))

        assert run(flow()) == [1, 2]
        pid = os.fork()
        if pid == 0:
            ok = run(flow()) == asyncio.run(arun(flow())) == [1, 2] and run(held()) == 3
            os._exit(0 if ok else 1)
        assert run(flow()) == [1, 2]
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    assert out == "0"
