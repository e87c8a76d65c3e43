"""What both drivers do alike: the same bodies run by each of them."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, Resilience
from llama_index_agentic_kb._aio import (
    Call,
    Job,
    WorkerPool,
    arun,
    call_deadline,
    cancel,
    deadline_after,
    emit,
    emitting,
    gather,
    iterate,
    read_ahead,
    run,
    start,
    wait,
)
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError
from llama_index_agentic_kb.sources.tool import _on_one_loop
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.aio.conftest import until

if TYPE_CHECKING:
    from tests.aio.conftest import Driver, Leaves

VAR: contextvars.ContextVar[str] = contextvars.ContextVar("VAR", default="unset")


def fail(error: BaseException) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


def counting(stop: int | None = None) -> Iterator[int]:
    number = 0
    while stop is None or number < stop:
        yield number
        number += 1


def test_each_driver_has_its_favourite(driver: Driver) -> None:
    """Where a call has both functions, sync calls the sync one on a thread, async awaits the native one in its own."""

    async def native() -> str:
        return threading.current_thread().name

    async def flow() -> Any:
        return await Call(sync=lambda: threading.current_thread().name, native=native, pool=WorkerPool("own"))

    assert driver.run(flow()) == ("MainThread" if driver.is_async else "agentic-kb-own-1")


@pytest.mark.parametrize("error", [StopIteration("it"), SystemExit(3), GeneratorExit()], ids=repr)
def test_what_is_no_exception_ends_only_the_call(driver: Driver, error: BaseException) -> None:
    """A worker thread that raises what is no Exception, or a StopIteration, gives an error with that cause."""

    async def flow() -> Any:
        try:
            await Call(sync=fail(error), deadline=deadline_after(5))
        except AgenticKBError as caught:
            return caught

    caught = driver.run(flow())
    assert type(error).__name__ in str(caught)
    assert caught.__cause__ is error


def test_a_deadline_ends_a_call(driver: Driver, leaves: Leaves) -> None:
    """A call that is late raises the error that names it, and its late result disturbs nothing after it."""

    async def flow() -> Any:
        with pytest.raises(DeadlineExceededError, match="slow thing was still running"):
            await leaves.call(lambda: "late", 0.6, deadline=deadline_after(0.02), what="slow thing")
        return await leaves.call(lambda: "right", 0.8)

    assert driver.run(flow()) == "right"


def test_what_is_late_already_is_not_begun(driver: Driver, leaves: Leaves) -> None:
    """A call whose deadline has passed is not made at all."""
    made: list[int] = []

    async def flow() -> None:
        with pytest.raises(DeadlineExceededError, match="x was not begun"):
            await leaves.call(lambda: made.append(1), deadline=time.monotonic() - 1, what="x")
        await leaves.call(lambda: None, 0.05)

    driver.run(flow())
    assert made == []


@pytest.mark.parametrize("ended", [True, False], ids=["after the call", "while it runs"])
async def test_what_outlives_a_call_is_not_bound_by_it(ended: bool) -> None:
    """A task that a source's own code starts may use the library when the call's deadline has passed."""
    release, tasks = asyncio.Event(), []

    async def later() -> float | None:
        await release.wait()
        return call_deadline()

    class Starts(MemoryRetriever):
        async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            tasks.append(asyncio.create_task(later()))
            if not ended:
                release.set()
                await asyncio.wait(tasks)
            return []

    source = KnowledgeSource("starts", retriever=Starts([], mode="async"), resilience=Resilience(timeout=60))
    await AgenticRetriever([source]).aretrieve("rain")
    release.set()
    assert (await tasks[0] is None) == ended


def test_wait_for_the_first(driver: Driver, leaves: Leaves) -> None:
    """Wait(first) comes back with the first job, though others go on; each further wait finds one done already."""

    async def flow() -> list[bool]:
        slow = start(leaves.call(lambda: "slow", 0.3))
        fast = start(leaves.call(lambda: "fast", 0.01))
        await wait([slow, fast], first=True)
        first = [slow.done, fast.done]
        await wait([slow, fast], first=True)
        assert not slow.done
        await wait([slow, slow])
        return [*first, slow.done]

    assert driver.run(flow()) == [False, True, True]


def test_gather_leaves_out_what_is_late(driver: Driver, leaves: Leaves) -> None:
    """Gather keeps the order, cancels what is late at its deadline, and costs no result that was in time."""
    closed: list[str] = []

    async def late() -> None:
        try:
            await leaves.call(lambda: None, 2.0)
        finally:
            closed.append("late")

    async def flow() -> list[Job[Any]]:
        return await gather([late(), leaves.call(lambda: "in time")], deadline=deadline_after(0.1))

    started = time.monotonic()
    first, second = driver.run(flow())
    assert time.monotonic() - started < 1.9
    assert closed == ["late"]
    assert isinstance(first.error, DeadlineExceededError)
    assert second.result() == "in time"


def test_cancel_closes_the_flow(driver: Driver, leaves: Leaves) -> None:
    """A cancelled job's flow is closed at once; cancelling twice, or what is done, changes nothing."""
    told: list[str] = []

    async def victim() -> None:
        try:
            await leaves.call(lambda: told.append("ran on"), 0.2)
            told.append("resumed")
        finally:
            told.append("closed")

    async def flow() -> list[Job[Any]]:
        job: Job[None] = start(victim())
        done: Job[int] = start(leaves.call(lambda: 1))
        await wait([done])
        await cancel(job)
        assert told == ["closed"]
        await cancel(job)
        await cancel(done)
        return [job, done]

    job, done = driver.run(flow())
    with pytest.raises(DeadlineExceededError, match="stopped"):
        job.result()
    assert done.result() == 1
    assert "resumed" not in told


def test_what_was_started_ends_with_the_root(driver: Driver, leaves: Leaves) -> None:
    """A flow that returns leaves nothing running: what it started and never waited for is closed, begun or not."""
    told: list[str] = []

    async def child(name: str) -> None:
        try:
            told.append(f"{name} began")
            await leaves.call(lambda: None, 2.0)
        finally:
            told.append(f"{name} closed")

    async def flow() -> str:
        start(child("one"))
        await leaves.call(lambda: None, 0.02)
        start(child("two"))
        start(leaves.call(lambda: None))
        return "root"

    started = time.monotonic()
    assert driver.run(flow()) == "root"
    assert time.monotonic() - started < 1.9
    assert "one closed" in told
    assert ("two began" in told) == ("two closed" in told)


def test_abandoned_calls_are_not_made_later(driver: Driver) -> None:
    """A call that waited in vain for a thread of a hung pool is not made when the pool recovers."""
    pool = WorkerPool("recovers", 1)
    release, made = threading.Event(), []

    async def flow() -> None:
        deadline = deadline_after(0.1)
        works: list[Call[Any]] = [Call(sync=release.wait, pool=pool, deadline=deadline)]
        works += [Call(sync=lambda: made.append(1), pool=pool, deadline=deadline) for _ in range(3)]
        await gather(works)

    driver.run(flow())
    release.set()
    driver.run(Call(sync=lambda: made.append(2), pool=pool, deadline=deadline_after(5)).perform())
    assert made == [2]


def test_each_flow_and_each_leaf_has_its_own_context(driver: Driver, leaves: Leaves) -> None:
    """Each sees what its parent had set when it was started; what it sets, its parent never sees."""

    def leaf() -> str:
        seen = VAR.get()
        VAR.set("leaf")
        return seen

    def source() -> Iterator[str]:
        yield leaf()
        yield VAR.get()

    async def child() -> list[str]:
        seen = [VAR.get(), await leaves.call(leaf)]
        VAR.set("child")
        return [*seen, await leaves.call(VAR.get)]

    async def flow() -> list[Any]:
        VAR.set("parent")
        job, stream = start(child()), leaves.open(source)
        items = [await anext(stream)]
        VAR.set("changed after the start")
        await wait([job])
        return [*job.result(), *items, *[item async for item in stream], VAR.get()]

    VAR.set("caller")
    assert driver.run(flow()) == ["parent", "parent", "child", "parent", "leaf", "changed after the start"]
    assert VAR.get() == "caller"


def test_a_stream_that_fails_midway(driver: Driver, leaves: Leaves) -> None:
    """A stream's error comes after the items before it, at the yield, and the stream is over then."""

    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("cut")

    async def flow() -> list[Any]:
        stream = leaves.open(source)
        items = [await anext(stream), await anext(stream)]
        try:
            await anext(stream)
        except OSError as error:
            items.append(str(error))
        return [*items, await anext(stream, "over")]

    assert driver.run(flow()) == [1, 2, "cut", "over"]


def test_a_streams_item_is_late(driver: Driver) -> None:
    """A stream that goes silent raises at the deadline and is over then; items before it were given."""

    def source() -> Iterator[int]:
        yield 0
        time.sleep(0.4)
        yield 1

    async def flow() -> list[Any]:
        stream = read_ahead(sync=source, deadline=deadline_after(0.2), what="the stream")
        items: list[Any] = [await anext(stream)]
        with pytest.raises(DeadlineExceededError, match="the stream was still running"):
            await anext(stream)
        await Call(sync=lambda: time.sleep(0.4))
        return [*items, await anext(stream, "over")]

    assert driver.run(flow()) == [0, "over"]


def test_a_stream_whose_call_is_over_is_read_no_further(driver: Driver) -> None:
    """Also where its deadline has passed, and nobody closed it."""
    go_on, read = threading.Event(), list[int | str]()

    def source() -> Iterator[int]:
        try:
            for number in counting(9):
                read.append(number)
                yield number
                go_on.wait(10)
        finally:
            read.append("closed")

    async def flow() -> Any:
        stream = read_ahead(sync=source, through=partial(Call.perform, deadline=deadline_after(0.3)))
        item = await anext(stream)
        await asyncio.sleep(0.4)
        go_on.set()
        return item

    assert driver.run(flow()) == 0
    assert until(lambda: read[-1] == "closed")
    assert read == [0, 1, "closed"]


def test_a_stream_is_over_when_its_call_is(driver: Driver) -> None:
    """The reader goes on when the iterator is closed: the stream's connection and its place are free by then."""
    log = list[str]()

    class Source:
        def __init__(self) -> None:
            self.items = iter("ab")

        def __iter__(self) -> Iterator[str]:
            return self

        def __next__(self) -> str:
            return next(self.items)

        def close(self) -> None:
            time.sleep(0.1)
            log.append("closed")

    async def flow() -> list[str]:
        log.extend([item async for item in read_ahead(sync=Source)])
        return log

    assert driver.run(flow()) == ["closed", "a", "b"]


def test_a_streams_end_may_be_late(driver: Driver) -> None:
    """Who reads a stream slowly gets no error because nothing more came before the deadline."""

    def source() -> Iterator[int]:
        yield 0
        time.sleep(0.3)

    async def flow() -> list[int]:
        items = []
        async for item in read_ahead(sync=source, deadline=deadline_after(0.2)):
            items.append(item)
            await asyncio.sleep(0.5)
        return items

    assert driver.run(flow()) == [0]


async def slept(log: list[str]) -> None:
    """Take ten seconds, and log the end."""
    try:
        await asyncio.sleep(10)
    finally:
        log.append("ended")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_leaves_nothing_behind(
    driver: Driver, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """What was started is ended, and asyncio has nothing to complain about."""
    log = list[str]()

    async def flow() -> None:
        start(slept(log))
        await asyncio.sleep(0)
        raise kind

    gc.collect()  # what other tests left
    caplog.clear()
    with pytest.raises(kind):
        driver.run(flow())
    gc.collect()
    assert log == ["ended"]
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_call_in_a_task_of_the_callers_ends_with_the_flow() -> None:
    """User code may await a call in a task that it made itself."""
    log, tasks = list[str](), list[asyncio.Task[None]]()

    async def flow() -> None:
        tasks.append(asyncio.create_task(Call(native=partial(slept, log)).perform()))
        await asyncio.sleep(0.01)

    await arun(flow())
    assert log == ["ended"]
    with pytest.raises(AgenticKBError, match="CancelledError"):
        await tasks[0]


def test_items_are_emitted_in_order(driver: Driver, leaves: Leaves) -> None:
    """What a flow and those it runs emit comes in the order of the emits; ``run`` lets it all go."""

    async def child() -> None:
        await emit("child 1")
        await leaves.call(lambda: None, 0.01)
        await emit("child 2")

    async def flow() -> str:
        await emit("root 1")
        await gather([child()])
        await emit("root 2")
        return "result"

    assert driver.items(flow()) == ["root 1", "child 1", "child 2", "root 2"]
    assert driver.run(flow()) == "result"


def test_closing_halfway_stops_everything(driver: Driver, leaves: Leaves) -> None:
    """A reader that goes away closes the flow, what it started, and the streams it reads."""
    told: list[str] = []

    def source() -> Iterator[int]:
        try:
            yield from counting()
        finally:
            told.append("stream")

    async def child() -> None:
        try:
            await leaves.call(lambda: None, 0.4)
        finally:
            told.append("child")

    async def flow() -> None:
        try:
            start(child())
            stream = leaves.open(source, pause=0.01)
            while True:
                await emit(await anext(stream))
        finally:
            told.append("flow")

    assert driver.items(flow(), take=3) == [0, 1, 2]
    assert until(lambda: sorted(told) == ["child", "flow", "stream"])


def test_items_are_changed_and_all_else_passes() -> None:
    """What is empty is not emitted; the result and an error are the flow's."""

    async def flow(*, fails: bool) -> str:
        for item in "abc":
            await emit(item)
        return "x" if not fails else str(1 / 0)

    def change(item: str) -> str:
        return "" if item == "b" else item.upper()

    assert list(iterate(emitting(flow(fails=False), change, lambda: "rest"))) == ["A", "C", "rest"]
    assert run(emitting(flow(fails=False), change)) == "x"
    with pytest.raises(ZeroDivisionError):
        run(emitting(flow(fails=True), change))


async def where() -> tuple[int, str]:
    return id(asyncio.get_running_loop()), threading.current_thread().name


async def ask() -> Any:
    return await Call(native=where)


@pytest.mark.parametrize("further", [lambda: run(ask()), lambda: _on_one_loop(where)], ids=["a call", "an MCP client"])
def test_waiting_for_oneself_further_down_is_an_error_too(further: Callable[[], Any]) -> None:
    """The sync call that holds the loop may lie several calls up, on another thread; a later one is free to use it."""
    inner: list[BaseException] = []

    async def on_a_thread() -> Any:
        return await Call(sync=further, deadline=deadline_after(30))

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


def test_a_cancel_before_the_start_makes_no_call() -> None:
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
