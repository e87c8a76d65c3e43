from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from llama_index_agentic_kb._aio import Call, Job, arun, cancel, deadline_after, gather, run, start, wait
from llama_index_agentic_kb.errors import BulkheadFullError, DeadlineExceededError
from llama_index_agentic_kb.guard.bulkhead import Bulkhead, Place, call_deadline

WAYS = ["sync", "async"]


def done(way: str, flow: Coroutine[Any, Any, Any]) -> Any:
    return run(flow) if way == "sync" else asyncio.run(arun(flow))


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


class Counting:
    """Counts how many calls run at once; each takes a moment."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds
        self.running = self.most = self.made = 0
        self._lock = threading.Lock()

    def _change(self, by: int) -> None:
        with self._lock:
            self.running += by
            self.made += by > 0
            self.most = max(self.most, self.running)

    def call(self) -> str:
        self._change(1)
        time.sleep(self.seconds)
        self._change(-1)
        return "done"

    async def acall(self) -> str:
        self._change(1)
        await asyncio.sleep(self.seconds)
        self._change(-1)
        return "done"


async def many(bulkhead: Bulkhead, call: Call, number: int) -> list[Job[Any]]:
    return await gather([bulkhead.call(call) for _ in range(number)])


@pytest.mark.parametrize(("places", "waiting"), [(0, 1), (1, -1)])
def test_a_bulkhead_needs_a_place(places: int, waiting: int) -> None:
    """Numbers that let nothing through are refused."""
    with pytest.raises(ValueError, match="places must be at least 1"):
        Bulkhead("none", places, waiting)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("native", [False, True], ids=["threads", "native"])
def test_no_more_run_at_once_than_there_are_places(way: str, *, native: bool) -> None:
    """Thirty calls over three places all answer, three at a time, on threads and on event loops."""
    counting, bulkhead = Counting(), Bulkhead("narrow", 3)
    call = Call(sync=None if native else counting.call, native=counting.acall)
    jobs = done(way, many(bulkhead, call, 30))
    assert [job.result() for job in jobs] == ["done"] * 30
    assert counting.most == 3
    assert (bulkhead.state.at_work, bulkhead.state.waiting, bulkhead.state.abandoned) == (0, 0, 0)


def test_threads_and_event_loops_share_the_places() -> None:
    """Sync callers, and two event loops, are counted together."""
    counting, bulkhead = Counting(), Bulkhead("shared", 2)
    native, sync = Call(native=counting.acall), Call(sync=counting.call)
    works = [lambda: done("sync", many(bulkhead, sync, 6)), *[lambda: done("async", many(bulkhead, native, 6))] * 2]
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.most == 2
    assert counting.made == 18


@pytest.mark.parametrize("way", WAYS)
def test_a_full_queue_answers_at_once(way: str) -> None:
    """One more than may wait is refused without waiting; the others are served."""
    counting, bulkhead = Counting(), Bulkhead("queue", 1, most_waiting=2)
    jobs = done(way, many(bulkhead, Call(sync=counting.call, what="the call"), 5))
    refused = [job.error for job in jobs if job.error is not None]
    assert [type(error) for error in refused] == [BulkheadFullError] * 2
    assert str(refused[0]) == "the call was not begun: 1 calls are under way, and 2 wait already"
    assert counting.made == 3


@pytest.mark.parametrize("way", WAYS)
def test_what_waits_beyond_its_deadline_is_never_begun(way: str) -> None:
    """It is told that it was not begun, and its place in the queue is free."""
    bulkhead, release, begun = Bulkhead("slow", 1), threading.Event(), []

    async def flow() -> tuple[BaseException | None, Any]:
        first: Job[Any] = start(bulkhead.call(Call(sync=lambda: release.wait(10))))
        late = await gather([bulkhead.call(Call(sync=lambda: begun.append(1), deadline=deadline_after(0.1)))])
        assert bulkhead.state.waiting == 0
        release.set()
        await wait([first])
        return late[0].error, (await bulkhead.call(Call(sync=lambda: "next")))

    error, following = done(way, flow())
    assert isinstance(error, DeadlineExceededError)
    assert "was not begun: its deadline passed while 1 others were under way" in str(error)
    assert following == "next"
    assert begun == []


@pytest.mark.parametrize("way", WAYS)
def test_abandoned_calls_hold_their_places_until_they_return(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted; when all places are held so, calls are refused soon; and all is well when they return."""
    monkeypatch.setattr("llama_index_agentic_kb.guard.bulkhead.HANGS_AFTER", 0.1)
    bulkhead, release = Bulkhead("hangs", 2), threading.Event()

    async def hang() -> list[Job[Any]]:
        call = Call(sync=lambda: release.wait(30), deadline=deadline_after(0.1), what="source 'x'")
        return await gather([bulkhead.call(call) for _ in range(2)])

    try:
        jobs = done(way, hang())
        assert all(isinstance(job.error, DeadlineExceededError) for job in jobs)
        assert until(lambda: bulkhead.state.abandoned == 2)
        with pytest.raises(BulkheadFullError, match="all its 2 places are held by calls that were given up"):
            done(way, bulkhead.call(Call(sync=lambda: 1, what="source 'x'")))
    finally:
        release.set()
    assert until(lambda: bulkhead.state.abandoned == 0)
    counting = Counting()
    assert len(done(way, many(bulkhead, Call(sync=counting.call), 6))) == 6
    assert counting.most == 2


@pytest.mark.parametrize("way", WAYS)
def test_calls_that_are_only_late_cost_nobody_else(way: str) -> None:
    """Callers in a hurry give up calls that end in a moment: who waits behind them is served."""
    bulkhead = Bulkhead("late", 2)

    async def flow() -> list[Job[Any]]:
        late = [Call(sync=lambda: time.sleep(0.3), deadline=deadline_after(0.1)) for _ in range(2)]
        patient = [Call(sync=lambda: "served", deadline=deadline_after(20)) for _ in range(3)]
        return await gather([bulkhead.call(call) for call in (*late, *patient)])

    jobs = done(way, flow())
    assert all(isinstance(job.error, DeadlineExceededError) for job in jobs[:2])
    assert [job.result() for job in jobs[2:]] == ["served"] * 3


@pytest.mark.parametrize("way", WAYS)
def test_who_waits_for_calls_that_hang_is_refused(way: str) -> None:
    """A call in the queue does not wait for its own deadline behind calls that were given up."""
    bulkhead, release = Bulkhead("stuck", 1), threading.Event()

    async def flow() -> Job[Any]:
        hung = Call(sync=lambda: release.wait(30), deadline=deadline_after(0.2))
        waiting = Call(sync=lambda: 1, deadline=deadline_after(20), what="source 'x'")
        jobs = await gather([bulkhead.call(hung), bulkhead.call(waiting)])
        return jobs[1]

    started = time.monotonic()
    try:
        error = done(way, flow()).error
    finally:
        release.set()
    assert isinstance(error, BulkheadFullError)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("native", [False, True], ids=["thread", "native"])
def test_a_cancelled_call_gives_its_place_back(*, native: bool) -> None:
    """What takes its cancellation is free at once; a call on a thread when it returns; one that waits, at once."""
    counting, bulkhead = Counting(seconds=0.3), Bulkhead("cancelled", 1)

    async def flow() -> Any:
        call = Call(sync=None if native else counting.call, native=counting.acall)
        first: Job[Any] = start(bulkhead.call(call))
        second: Job[Any] = start(bulkhead.call(call))
        await wait([first], deadline=deadline_after(0.05))
        await cancel(second)
        await cancel(first)
        assert bulkhead.state.waiting == 0
        if native:
            return await bulkhead.call(Call(sync=lambda: "next", deadline=deadline_after(5)))
        return "next"

    assert asyncio.run(arun(flow())) == "next"
    assert until(lambda: bulkhead.state.at_work + bulkhead.state.abandoned == 0)
    assert counting.made == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_caller_leaves_no_place_taken(way: str) -> None:
    """Flows that end while their calls wait or run leave the bulkhead as it was."""
    bulkhead, release = Bulkhead("left", 2), threading.Event()

    async def flow() -> str:
        for _ in range(5):
            start(bulkhead.call(Call(sync=lambda: release.wait(30))))
        await wait([(start(Call(sync=lambda: time.sleep(0.05))))])
        return "over"

    assert done(way, flow()) == "over"
    assert bulkhead.state.waiting == 0
    assert bulkhead.state.abandoned == 2
    release.set()
    assert until(lambda: bulkhead.state.abandoned == 0)


@pytest.mark.parametrize("way", WAYS)
def test_code_that_is_called_knows_its_deadline(way: str) -> None:
    """A client that can end itself in time may read it; outside there is none."""
    deadline = deadline_after(5)

    async def native() -> float | None:
        return call_deadline()

    for call in (Call(sync=call_deadline, deadline=deadline), Call(native=native, deadline=deadline)):
        assert done(way, Bulkhead("told").call(call)) == deadline
    assert call_deadline() is None


@pytest.mark.parametrize("way", WAYS)
def test_a_place_tells_when_its_call_began_and_ended(way: str) -> None:
    """Whoever hands a place in sees what became of it, errors included."""
    told: list[BaseException | None] = []
    place = Place(on_end=lambda _, error: told.append(error))
    error = SystemExit("no")

    def leave() -> None:
        raise error

    async def flow() -> Any:
        return await gather([Bulkhead("told").call(Call(sync=leave), place)])

    (job,) = done(way, flow())
    assert job.error is not None
    assert told == [error]
    assert place.began is not None
    assert place.ended is not None
    assert place.ended >= place.began


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_begins_with_free_places() -> None:
    """What hangs in the parent holds no place in its child."""
    bulkhead, release = Bulkhead("forked", 1), threading.Event()
    call = Call(sync=lambda: release.wait(30), deadline=deadline_after(0.05))
    with pytest.raises(DeadlineExceededError):
        run(bulkhead.call(call))
    pid = os.fork()
    if pid == 0:
        answer = run(bulkhead.call(Call(sync=lambda: 7, deadline=deadline_after(5))))
        os._exit(0 if answer == 7 and bulkhead.state.abandoned == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bulkhead.state.abandoned == 1
    release.set()
