"""Retries, circuit breaker and bulkhead: what each promises, over any driver."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError

import httpx
import openai
import pytest

from llama_index_agentic_kb._aio import (
    Call,
    Job,
    arun,
    call_deadline,
    cancel,
    deadline_after,
    gather,
    run,
    set_deadline,
    start,
    wait,
)
from llama_index_agentic_kb.account import Budget, RetryBudget, set_budget
from llama_index_agentic_kb.errors import (
    AgenticKBError,
    BulkheadFullError,
    CircuitOpenError,
    ConfigurationError,
    DeadlineExceededError,
    DeniedError,
    InvalidRequestError,
    LLMError,
)
from llama_index_agentic_kb.guard import resilience
from llama_index_agentic_kb.guard.failures import is_outage, is_transient, retry_after, status_of
from llama_index_agentic_kb.guard.resilience import (
    NO_RETRIES,
    BreakerPolicy,
    Bulkhead,
    CallProgress,
    CircuitBreaker,
    Resilience,
    ResilientCalls,
    RetryPolicy,
    retried,
)
from llama_index_agentic_kb.llm import refuses_form
from tests.aio.conftest import until

QUICK = RetryPolicy(first_wait=0.01, max_wait=0.02)
Perform = Callable[[Coroutine[Any, Any, Any]], Any]


def refusal(status: int, headers: dict[str, str] | None = None, body: Any = None) -> openai.APIStatusError:
    response = httpx.Response(status, headers=headers, request=httpx.Request("POST", "http://model.test"))
    kind = openai.RateLimitError if status == 429 else openai.APIStatusError
    return kind("refused", response=response, body=body)


class ChromaError(Exception):
    """Chroma's errors have their status as a method."""

    def code(self) -> int:
        return int(self.args[0])


class ClientError(Exception):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(attributes)
        self.__dict__.update(attributes)


def unreached() -> openai.APIConnectionError:
    error = openai.APIConnectionError(request=httpx.Request("POST", "http://model.test"))
    error.__cause__ = httpx.ConnectError("refused")
    return error


WAITED = [
    *map(refusal, (408, 409, 429, 500, 502, 503, 504)), unreached(), httpx.ReadTimeout("slow"),
    httpx.RemoteProtocolError("hung up"), ConnectionResetError("reset"), DeadlineExceededError("late"),
    refusal(400, {"x-should-retry": "true"}),
]  # fmt: skip
LASTING = [
    *map(refusal, (400, 401, 403, 404, 405, 413, 415, 422, 501)), ValueError("ours"), LLMError("the model refused"),
    FileNotFoundError("no such file"), httpx.UnsupportedProtocol("ftp"),
    refusal(429, body={"code": "insufficient_quota"}), refusal(500, {"x-should-retry": "false"}),
]  # fmt: skip


@pytest.mark.parametrize("error", [*WAITED, *LASTING], ids=repr)
def test_trouble_of_a_server_or_a_connection_is_worth_another_attempt(error: Exception) -> None:
    """Also where a client wraps it; not refusals, a used up quota, and whatever is no failure of a transport."""
    wrapped = LLMError("wrapped")
    wrapped.__cause__ = error
    assert is_transient(error) == is_transient(wrapped) == (error in WAITED)


def test_retry_after_is_read_in_all_its_forms() -> None:
    """Seconds, milliseconds and HTTP dates; nonsense is none."""
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    past = format_datetime(datetime.now(UTC) - timedelta(seconds=30), usegmt=True)
    assert retry_after(refusal(429, {"Retry-After": "1.5"})) == 1.5
    assert retry_after(refusal(429, {"retry-after-ms": "250", "Retry-After": "9"})) == 0.25
    assert retry_after(refusal(429, {"Retry-After": soon})) == pytest.approx(30, abs=10)
    assert retry_after(refusal(429, {"Retry-After": past})) == retry_after(refusal(429, {"Retry-After": "-5"})) == 0
    for nonsense in ("", "soon", "nan", "inf", "Wed, 99 Foo 2026 00:00:00 GMT"):
        assert retry_after(refusal(429, {"Retry-After": nonsense})) is None
    assert retry_after(unreached()) is None
    assert status_of(refusal(404)) == 404


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (HTTPError("http://model.test", 502, "bad gateway", Message(), None), 502), (ClientError(status=503), 503),
        (ClientError(response=ClientError(status=429)), 429),
        (ClientError(response=ClientError(status_code=404)), 404), (ChromaError(HTTPStatus.TOO_MANY_REQUESTS), 429),
        (ChromaError("no number"), None), (ClientError(status="503"), None), (ClientError(status=True), None),
        (ClientError(status=200), None), (ClientError(code=503), None),
    ],
    ids=["urllib", "aiohttp", "a response", "requests", "Chroma", "raises", "text", "bool", "success", "some code"],
)  # fmt: skip
def test_the_status_is_read_from_every_client(error: Exception, status: int | None) -> None:
    """So the classes of a failure are the same, whichever client met it."""
    assert status_of(error) == status
    assert is_transient(error) == (status in (429, 502, 503))
    assert is_outage(error) == (status != 404)
    assert refuses_form(error) == (status == 404)


class Trouble:
    """A call that fails so many times, and then returns its number."""

    def __init__(self, error: BaseException, times: int = 1) -> None:
        self.error = error
        self.times = times
        self.made = 0
        self.deadlines: list[float | None] = []

    async def __call__(self, deadline: float | None) -> int:
        self.deadlines.append(deadline)
        return await Call(sync=self._work)

    def _work(self) -> int:
        self.made += 1
        if self.made <= self.times:
            raise self.error
        return self.made


async def tried(trouble: Any, policy: RetryPolicy = QUICK, budget: RetryBudget | None = None, **kwargs: Any) -> Any:
    set_budget(Budget(retries=budget or RetryBudget()))
    return await retried(trouble, policy=policy, **kwargs)


def test_a_call_is_made_again_until_it_succeeds(perform: Perform) -> None:
    """One call is counted, and each further attempt as a retry; the last attempt's own failure is raised."""
    budget = RetryBudget()
    assert perform(tried(Trouble(unreached(), 2), budget=budget)) == 3
    assert (budget.calls, budget.retries) == (1, 2)
    for policy, error, made in ((QUICK, unreached(), 3), (NO_RETRIES, unreached(), 1), (QUICK, refusal(401), 1)):
        trouble = Trouble(error, 99)
        with pytest.raises(type(error)):
            perform(tried(trouble, policy))
        assert trouble.made == made
    assert perform(tried(Trouble(ValueError("mine")), is_worth=lambda _: True)) == 2


def test_a_wait_that_does_not_fit_ends_the_attempts(perform: Perform) -> None:
    """Where Retry-After is beyond the deadline, or longer than is ever waited, the failure stands at once."""
    for seconds, deadline in (("40", deadline_after(30)), ("100", None)):
        trouble = Trouble(refusal(429, {"Retry-After": seconds}))
        with pytest.raises(openai.RateLimitError):
            perform(tried(trouble, deadline=deadline))
        assert trouble.made == 1


def test_waits_grow_with_full_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before retry n a random time is waited, at most first_wait doubled n - 1 times, at most max_wait."""
    bounds: list[float] = []

    def no_wait(_: float, bound: float) -> float:
        bounds.append(bound)
        return 0.0

    monkeypatch.setattr(random, "uniform", no_wait)
    with pytest.raises(ConnectionResetError):
        run(tried(Trouble(ConnectionResetError(), 99), RetryPolicy(attempts=5, first_wait=10, max_wait=40)))
    assert bounds == [10, 20, 40, 40]


def test_calls_of_a_request_share_its_retries(perform: Perform) -> None:
    """Where they are used up, a call's first failure stands."""
    budget, made = RetryBudget(share=0, minimum=3), []
    for _ in range(4):
        trouble = Trouble(unreached(), 99)
        with pytest.raises(openai.APIConnectionError):
            perform(tried(trouble, budget=budget))
        made.append(trouble.made)
    assert made == [3, 2, 1, 1]


def test_a_request_has_so_many_retries() -> None:
    """A fifth of many calls may be retried, however many threads ask; of few calls, a minimum."""
    budget = RetryBudget(share=0.2, minimum=2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    budget.calls += 100
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: budget.take(), range(80))) == 18
    assert budget.retries == 20


def test_no_attempt_begins_that_can_not_end_in_time(perform: Perform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where less than an attempt needs is left, the failure stands."""
    monkeypatch.setattr(resilience, "MIN_ATTEMPT", 60)
    trouble = Trouble(unreached(), 99)
    with pytest.raises(openai.APIConnectionError):
        perform(tried(trouble, deadline=deadline_after(30)))
    assert trouble.made == 1


def test_attempts_get_the_deadline(perform: Perform) -> None:
    """Each attempt has the deadline of all; without one it has none."""
    trouble = Trouble(unreached())
    perform(tried(trouble, deadline=1e18))
    perform(tried(trouble))
    assert trouble.deadlines == [1e18, 1e18, None]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (RetryPolicy, {"attempts": 0}), (RetryPolicy, {"attempts": 1.5}), (RetryPolicy, {"first_wait": "1"}),
        (RetryPolicy, {"first_wait": -1}), (RetryPolicy, {"max_wait": float("nan")}),
        (BreakerPolicy, {"failures": 0}), (BreakerPolicy, {"cool_down": -1}),
        (Resilience, {"timeout": 0}), (BreakerPolicy, {"failures": 1.5}), (Resilience, {"max_concurrency": 0}),
        (Resilience, {"max_concurrency": 0.5}), (Resilience, {"max_concurrency": 2.5}),
        *((Resilience, {"straggler_grace": grace}) for grace in (-1, float("nan"), "long", True)),
    ],
)  # fmt: skip
def test_wrong_numbers_are_refused(kind: Any, wrong: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(ConfigurationError, match=f"{kind.__name__}.{next(iter(wrong))}"):
        kind(**wrong)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock | None = None, **fields: Any) -> CircuitBreaker:
    return CircuitBreaker("source 'x'", BreakerPolicy(**fields), clock or Clock())


def ended(one: CircuitBreaker, error: BaseException | None, seconds: float | None = 1.0) -> None:
    one.ended(error, seconds, probe=one.admit())


def opened(clock: Clock) -> CircuitBreaker:
    one = breaker(clock, failures=1)
    ended(one, ConnectionError("refused"))
    assert one.state == "open"
    clock.now += 11
    assert one.state == "halfOpen"
    return one


def test_failures_in_a_row_open_it() -> None:
    """A success between them starts the count anew. The reason holds no words of another request's error."""
    one = breaker(failures=3)
    for error in (ConnectionError(), ConnectionError(), None, ConnectionError(), ConnectionError()):
        ended(one, error)
    assert one.state == "closed"
    ended(one, ConnectionError("http://admin:hunter22@db: who directed Titanic?"))
    reason = r"circuit open until [\d:]{8} UTC \(3 failures in a row; the last: ConnectionError at [\d:]{8} UTC\)$"
    with pytest.raises(CircuitOpenError, match=f"was not asked: {reason}"):
        one.admit()


def test_after_its_time_one_probe_decides() -> None:
    """One that fails opens it again, one without an outcome lets the next through, one that succeeds closes it."""
    clock = Clock()
    one = opened(clock)
    ended(one, DeadlineExceededError("late"), 2.0)
    assert "the probe failed" in (one.reason or "")
    clock.now += 11
    barrier, probes = threading.Barrier(16), []

    def ask(_: int) -> None:
        barrier.wait(10)
        try:
            probes.append(one.admit())
        except CircuitOpenError:
            return

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(16)))
    assert probes == [True]
    one.ended(asyncio.CancelledError(), 1.0, probe=True)
    assert one.state == "halfOpen"
    ended(one, None)
    assert (one.state, one.reason) == ("closed", None)


def test_a_call_with_hardly_any_time_says_nothing() -> None:
    """Nor does one that was not begun; a deadline that was long enough does."""
    one = breaker(failures=2)
    ended(one, DeadlineExceededError("late"), 0.05)
    ended(one, DeadlineExceededError("late"), 0.2)
    for error in (BulkheadFullError("full"), DeadlineExceededError("late"), asyncio.CancelledError()):
        ended(one, error, None)
    assert one.state == "closed"
    ended(one, DeadlineExceededError("late"), 0.2)
    assert one.state == "open"


def test_an_answer_that_comes_late_shows_that_the_source_is_there() -> None:
    """It is slow, not gone: failures before it no longer count, and an open circuit lets a probe through."""
    one = breaker(failures=2)
    for _ in range(4):
        ended(one, DeadlineExceededError("late"))
        one.came_late()
    assert one.state == "closed"
    ended(one, ConnectionError())
    ended(one, DeadlineExceededError("late"))
    assert one.state == "open"
    one.came_late()
    assert one.state == "halfOpen"


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        *((error, True) for error in (ConnectionError(), TimeoutError(), OSError(), DeadlineExceededError())),
        *((error, True) for error in (httpx.ConnectError("x"), httpx.ReadTimeout("x"), RuntimeError("who knows"))),
        *((error, True) for error in (*map(refusal, (429, 500, 503)), ChromaError(500), AgenticKBError("SystemExit"))),
        *((error, False) for error in (DeniedError("x"), InvalidRequestError("x"), BulkheadFullError("x"))),
        *((error, False) for error in (ValueError(), TypeError(), KeyError(), NotImplementedError(), RecursionError())),
        *((error, False) for error in (*map(refusal, (400, 401, 404)), ChromaError(404))),
    ],
    ids=repr,
)
def test_outages_count_and_bad_requests_do_not(error: Exception, counts: bool) -> None:
    """One caller's bad request never cuts the others off."""
    one = breaker(failures=1)
    ended(one, error)
    assert is_outage(error) == counts == (one.state == "open")


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


async def many(bulkhead: Bulkhead, call: Call[Any], number: int) -> list[Job[Any]]:
    return await gather([bulkhead.call(call) for _ in range(number)])


def test_no_more_run_at_once_than_may() -> None:
    """Sync callers, and two event loops, on threads and as tasks, are counted together."""
    counting, bulkhead = Counting(), Bulkhead("shared", 2)
    native, sync = Call(native=counting.acall), Call(sync=counting.call)
    works = [lambda: run(many(bulkhead, sync, 6)), *[lambda: asyncio.run(arun(many(bulkhead, native, 6)))] * 2]
    with ThreadPoolExecutor(3) as pool:
        jobs = [job for made in pool.map(lambda work: work(), works) for job in made]
    assert [job.result() for job in jobs] == ["done"] * 18
    assert (counting.most, counting.made, bulkhead.state) == (2, 18, (0, 0, 0))


def test_a_full_queue_answers_at_once(perform: Perform, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than may wait is refused without waiting; the others are served."""
    monkeypatch.setattr(resilience, "MAX_WAITING", 2)
    bulkhead, release = Bulkhead("queue", 1), threading.Event()

    async def work() -> list[Job[bool]]:
        call = Call(sync=lambda: release.wait(60), what="the call")
        jobs = [start(bulkhead.call(call)) for _ in range(5)]
        await wait(jobs[3:])
        release.set()
        await wait(jobs)
        return jobs

    jobs = perform(work())
    assert [type(job.error) for job in jobs] == [type(None)] * 3 + [BulkheadFullError] * 2
    assert str(jobs[-1].error) == "the call was not begun: 1 calls are under way, and 2 wait already"


def test_what_waits_beyond_its_deadline_is_never_begun(perform: Perform) -> None:
    """The error says that it was not begun, and its place in the queue is free; a context's deadline counts too."""
    bulkhead, release, begun = Bulkhead("slow", 1), threading.Event(), []
    call = Call(sync=lambda: begun.append(1))

    async def in_context() -> None:
        set_deadline(deadline_after(0.1))
        await bulkhead.call(call)

    async def work() -> tuple[list[BaseException | None], Any]:
        first = start(bulkhead.call(Call(sync=lambda: release.wait(10))))
        late = await gather([bulkhead.call(call, deadline=deadline_after(0.1)), in_context()])
        assert bulkhead.state.waiting == 0
        release.set()
        await wait([first])
        return [job.error for job in late], await bulkhead.call(Call(sync=lambda: "next"))

    errors, following = perform(work())
    for error in errors:
        assert "was not begun: its deadline passed while 1 others were under way" in str(error)
    assert (following, begun) == ("next", [])


def test_calls_that_hang_hold_their_permits_and_nobody_waits_for_them(perform: Perform) -> None:
    """Who waits behind them is refused, soon; callers behind calls that are only late are served."""
    bulkhead, release = Bulkhead("hangs", 1), threading.Event()

    async def behind(work: Callable[[], Any]) -> Job[Any]:
        late = Call(sync=work, deadline=deadline_after(0.1))
        patient = Call(sync=lambda: "served", deadline=deadline_after(60), what="source 'x'")
        jobs = await gather([bulkhead.call(late), bulkhead.call(patient)])
        assert isinstance(jobs[0].error, DeadlineExceededError)
        return jobs[1]

    assert perform(behind(lambda: time.sleep(0.2))).result() == "served"
    try:
        error = perform(behind(lambda: release.wait(60))).error
        assert "all its 1 places are held by calls that were given up and still hang" in str(error)
        assert bulkhead.state == (0, 0, 1)
    finally:
        release.set()
    assert until(lambda: bulkhead.state.abandoned == 0)
    assert perform(bulkhead.call(Call(sync=lambda: "again"))) == "again"


@pytest.mark.parametrize("native", [False, True], ids=["thread", "native"])
def test_a_cancelled_call_gives_its_permit_back(*, native: bool) -> None:
    """What takes its cancellation is free at once; a call on a thread when it returns; one that waits, at once."""
    counting, bulkhead = Counting(seconds=0.3), Bulkhead("cancelled", 1)

    async def work() -> None:
        call = Call(sync=None if native else counting.call, native=counting.acall)
        first, second = start(bulkhead.call(call)), start(bulkhead.call(call))
        await wait([first], deadline=deadline_after(0.05))
        await cancel(second)
        await cancel(first)
        assert bulkhead.state.waiting == 0

    asyncio.run(arun(work()))
    assert until(lambda: bulkhead.state.at_work + bulkhead.state.abandoned == 0)
    assert counting.made == 1


def test_code_that_is_called_knows_its_deadline(perform: Perform) -> None:
    """A client that can end itself in time may read it; outside there is none."""
    deadline = deadline_after(60)

    async def native() -> float | None:
        return call_deadline()

    for call in (Call(sync=call_deadline, deadline=deadline), Call(native=native, deadline=deadline)):
        assert perform(Bulkhead("x").call(call)) == deadline
    assert call_deadline() is None


def test_attempts_are_counted_and_an_open_circuit_ends_them(perform: Perform) -> None:
    """Each attempt is one for the breaker; the progress tells retries; late answers are learned from."""
    calls = ResilientCalls("x", Resilience(retries=QUICK, breaker=BreakerPolicy(failures=2)))
    progress, failures = CallProgress(), [ConnectionRefusedError()]

    def work() -> str:
        if failures:
            raise failures.pop()
        return "there"

    assert perform(calls.call(Call(sync=work), progress)) == "there"
    assert (progress.calls, progress.attempts) == (1, 2)
    assert calls.median_seconds is not None
    failures.extend(ConnectionRefusedError() for _ in range(9))
    with pytest.raises(CircuitOpenError):
        perform(calls.call(Call(sync=work)))
    assert (len(failures), calls.health.circuit) == (7, "open")
    refused = CallProgress()
    with pytest.raises(CircuitOpenError):
        perform(calls.call(Call(sync=work), refused))
    assert (refused.calls, refused.attempts) == (1, 0)  # no attempt was made


@pytest.mark.parametrize("given_up", [None, "too slow"])
def test_a_cancelled_call_is_its_fault_only_where_it_was_given_up(given_up: str | None) -> None:
    """A caller that leaves counts for nothing; a call that was given up for being slow is a failure."""
    calls, progress = ResilientCalls("x", Resilience(breaker=BreakerPolicy(failures=1))), CallProgress()

    async def hang() -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        job = start(calls.call(Call(native=hang), progress))
        await wait([job], deadline=deadline_after(0.2))
        assert progress.at_work_since is not None
        progress.given_up = given_up
        await cancel(job)

    asyncio.run(arun(work()))
    assert calls.health.circuit == ("closed" if given_up is None else "open")


def test_a_forked_child_begins_with_free_permits() -> None:
    """What hangs in the parent holds no permit in its child."""
    bulkhead, release = Bulkhead("forked", 1), threading.Event()
    with pytest.raises(DeadlineExceededError):
        run(bulkhead.call(Call(sync=lambda: release.wait(30), deadline=deadline_after(0.05))))
    pid = os.fork()
    if pid == 0:
        answer = run(bulkhead.call(Call(sync=lambda: 7, deadline=deadline_after(30))))
        os._exit(0 if answer == 7 and bulkhead.state.abandoned == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bulkhead.state.abandoned == 1
    release.set()
