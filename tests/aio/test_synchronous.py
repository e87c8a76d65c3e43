"""What is the sync driver's own: the caller's thread, timers and interruption."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import warnings
from collections.abc import Iterator
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
from llama_index_agentic_kb._aio import Call, deadline_after, emit, iterate, open_stream, run
from llama_index_agentic_kb._aio.bridge import _open_loops
from llama_index_agentic_kb.testing import MemoryRetriever


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
