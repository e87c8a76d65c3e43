from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from llama_index_agentic_kb.errors import (
    AgenticKBError,
    BulkheadFullError,
    CircuitOpenError,
    ConfigurationError,
    DeadlineExceededError,
    DeniedError,
    InvalidRequestError,
)
from llama_index_agentic_kb.guard.breaker import BreakerPolicy, CircuitBreaker, is_outage


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock | None = None, **fields: Any) -> CircuitBreaker:
    return CircuitBreaker("source 'x'", BreakerPolicy(**fields), clock or Clock())


def state(one: CircuitBreaker) -> str:
    return one.state.value


def told(one: CircuitBreaker, error: BaseException | None, seconds: float = 1.0) -> None:
    one.ended(one.admit(), error, seconds)


def opened(clock: Clock, **fields: Any) -> CircuitBreaker:
    one = breaker(clock, **{"failures": 1, **fields})
    told(one, ConnectionError("refused"))
    assert state(one) == "open"
    return one


@pytest.mark.parametrize(
    "fields",
    [
        {"failures": 0},
        {"window": 0},
        {"failure_rate": 0},
        {"failure_rate": 1.1},
        {"cool_down": -1},
        {"least_seconds": float("nan")},
    ],
)
def test_a_policy_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(ConfigurationError, match=next(iter(fields))):
        BreakerPolicy(**fields)


def test_failures_in_a_row_open_it() -> None:
    """A success between them starts the count anew."""
    one = breaker(failures=3)
    for error in (ConnectionError(), ConnectionError(), None, ConnectionError(), ConnectionError()):
        told(one, error)
    assert state(one) == "closed"
    told(one, ConnectionError("connection refused"))
    assert state(one) == "open"
    with pytest.raises(CircuitOpenError, match=r"was not asked: circuit open until \d\d:\d\d:\d\d UTC \(3 failures"):
        one.admit()
    assert "connection refused" in (one.reason or "")


def test_a_failure_rate_opens_it() -> None:
    """Half of a whole window opens it, also where no two failures follow each other."""
    one = breaker(failures=100, failure_rate=0.5, window=10)
    for number in range(9):
        told(one, ConnectionError("down") if number % 2 else None)
    assert state(one) == "closed"
    told(one, ConnectionError("down"))
    assert state(one) == "open"
    assert "50% of the last 10 calls failed" in (one.reason or "")


def test_after_its_time_one_probe_is_let_through() -> None:
    """Its success closes the circuit, and everything passes again."""
    clock = Clock()
    one = opened(clock, cool_down=10)
    clock.now += 9.9
    with pytest.raises(CircuitOpenError):
        one.admit()
    clock.now += 0.2
    assert state(one) == "halfOpen"
    probe = one.admit()
    with pytest.raises(CircuitOpenError):
        one.admit()
    one.ended(probe, None, 0.1)
    assert state(one) == "closed"
    assert one.reason is None
    one.admit()


def test_a_probe_that_fails_opens_it_again() -> None:
    """For the same time once more."""
    clock = Clock()
    one = opened(clock, cool_down=10)
    clock.now += 11
    told(one, DeadlineExceededError("late"), 2.0)
    assert state(one) == "open"
    assert "the probe failed" in (one.reason or "")
    clock.now += 11
    told(one, None)
    assert state(one) == "closed"


def test_a_probe_without_an_outcome_lets_the_next_one_through() -> None:
    """A caller that was cancelled, or had no place, decides nothing."""
    clock = Clock()
    one = opened(clock)
    clock.now += 11
    one.dropped(one.admit())
    assert state(one) == "halfOpen"
    told(one, None)
    assert state(one) == "closed"


def test_one_probe_among_many_threads() -> None:
    """However many ask at once, one passes."""
    clock = Clock()
    one = opened(clock)
    clock.now += 11
    barrier = threading.Barrier(16)

    def ask(_: int) -> bool:
        barrier.wait(10)
        try:
            one.admit()
        except CircuitOpenError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(ask, range(16))) == 1


def test_a_call_with_hardly_any_time_says_nothing() -> None:
    """A caller's own hurry does not cut others off; a deadline that was long enough does."""
    one = breaker(failures=1, least_seconds=0.1)
    told(one, DeadlineExceededError("late"), 0.05)
    assert state(one) == "closed"
    told(one, DeadlineExceededError("late"), 0.2)
    assert state(one) == "open"


def test_an_answer_that_comes_late_shows_that_the_source_is_there() -> None:
    """It is slow, not gone: failures before it no longer count, and an open circuit lets a probe through."""
    clock = Clock()
    one = breaker(clock, failures=3)
    for _ in range(4):
        passage = one.admit()
        one.ended(passage, DeadlineExceededError("late"), 1.0)
        one.came_late(passage)
    assert state(one) == "closed"
    told(one, ConnectionError(), 1)
    told(one, ConnectionError(), 1)
    late = one.admit()
    one.ended(late, DeadlineExceededError("late"), 1.0)
    assert state(one) == "open"
    one.came_late(late)
    assert state(one) == "halfOpen"


def test_an_end_is_told_once() -> None:
    """What is told after it changes nothing."""
    one = breaker(failures=2)
    passage = one.admit()
    for _ in range(5):
        one.ended(passage, ConnectionError(), 1.0)
    one.dropped(passage)
    assert state(one) == "closed"


def test_the_reason_holds_no_password() -> None:
    """What a client says of its address is redacted."""
    one = breaker(failures=1)
    told(one, ConnectionError("no route to http://admin:hunter22@db:8000"))
    assert "hunter22" not in (one.reason or "")
    assert "***" in (one.reason or "")


def answered(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://x")
    return httpx.HTTPStatusError("said no", request=request, response=httpx.Response(status, request=request))


class NotFoundError(Exception):
    """As Chroma's errors tell their status."""

    def code(self) -> int:
        return 404


class InternalError(NotFoundError):
    def code(self) -> int:
        return 500


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError(),
        TimeoutError(),
        OSError(),
        DeadlineExceededError(),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        answered(500),
        answered(503),
        answered(429),
        RuntimeError("who knows"),
        InternalError(),
        AgenticKBError("SystemExit was raised"),
    ],
    ids=repr,
)
def test_outages_count(error: BaseException) -> None:
    """What speaks of the source opens the circuit."""
    one = breaker(failures=1)
    told(one, error)
    assert is_outage(error)
    assert state(one) == "open"


@pytest.mark.parametrize(
    "error",
    [
        DeniedError("filter"),
        InvalidRequestError("bad"),
        BulkheadFullError("full"),
        ValueError("bad query"),
        TypeError(),
        KeyError("x"),
        NotImplementedError(),
        RecursionError(),
        answered(400),
        answered(401),
        answered(404),
        NotFoundError(),
    ],
    ids=repr,
)
def test_refusals_and_bad_requests_do_not(error: BaseException) -> None:
    """One caller's bad request never cuts the others off."""
    one = breaker(failures=1)
    for _ in range(30):
        told(one, error)
    assert state(one) == "closed"
