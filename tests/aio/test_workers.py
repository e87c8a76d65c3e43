"""Pools of daemon threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from llama_index_agentic_kb._aio import WorkerPool
from llama_index_agentic_kb._aio import threads as workers
from tests.aio.conftest import until


def test_threads_are_started_as_needed_and_no_more() -> None:
    """A thread that is free is used again; a busy one gets company, up to the limit."""
    pool = WorkerPool("grows", 2)
    release, told = threading.Event(), []
    for n in range(5):
        done = threading.Event()
        pool.submit(done.set)
        assert done.wait(5)
        time.sleep(0.01 * (n == 0))
    assert pool.threads == 1
    done = threading.Event()

    def hold() -> None:
        release.wait(10)
        told.append(1)
        if len(told) == 4:
            done.set()

    for _ in range(4):
        pool.submit(hold)
    assert pool.threads == 2
    release.set()
    assert done.wait(5)


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


def in_a_process(code: str, seconds: float = 20) -> str:
    script = "from llama_index_agentic_kb._aio import *\nimport time, threading, os, sys, asyncio\n" + textwrap.dedent(
        code
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=seconds,
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
