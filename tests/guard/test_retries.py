"""One policy of retries: what is worth one, how long is waited, and where it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tenacity import RetryCallState, Retrying

from llama_index_agentic_kb._aio import Call, arun, deadline_after, run
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, LLMError
from llama_index_agentic_kb.guard.retries import (
    NO_RETRIES,
    RetryBudget,
    RetryPolicy,
    _Wait,
    is_transient,
    retried,
    retry_after,
    status_of,
)

QUICK = RetryPolicy(first_wait=0.01, longest_wait=0.02)


def refusal(status: int, headers: dict[str, str] | None = None, body: Any = None) -> openai.APIStatusError:
    """What OpenAI's client raises for a status."""
    response = httpx.Response(status, headers=headers, request=httpx.Request("POST", "http://model.test"))
    kind = openai.RateLimitError if status == 429 else openai.APIStatusError
    return kind("refused", response=response, body=body)


def unreached() -> openai.APIConnectionError:
    error = openai.APIConnectionError(request=httpx.Request("POST", "http://model.test"))
    error.__cause__ = httpx.ConnectError("refused")
    return error


class Trouble:
    """A call that fails so many times, and then gives its number."""

    def __init__(self, error: BaseException, times: int = 1) -> None:
        self.error = error
        self.times = times
        self.made = 0
        self.deadlines: list[float | None] = []

    async def __call__(self, deadline: float | None) -> int:
        self.deadlines.append(deadline)
        made: int = await Call(sync=self._work)
        return made

    def _work(self) -> int:
        self.made += 1
        if self.made <= self.times:
            raise self.error
        return self.made


@pytest.fixture(params=["sync", "async"])
def perform(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Each driver."""
    return run if request.param == "sync" else lambda flow: asyncio.run(arun(flow))


# -- what is worth it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_a_server_in_trouble_is_worth_another_attempt(status: int) -> None:
    """Limits, timeouts and a server's own failures pass."""
    assert is_transient(refusal(status))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 422, 501])
def test_a_wrong_request_is_not(status: int) -> None:
    """What the server refuses it will refuse again."""
    assert not is_transient(refusal(status))
    assert status_of(refusal(status)) == status


@pytest.mark.parametrize(
    "error",
    [
        unreached(),
        openai.APITimeoutError(request=httpx.Request("POST", "http://model.test")),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("hung up"),
        ConnectionResetError("reset"),
        DeadlineExceededError("late"),
    ],
)
def test_a_connection_that_breaks_is_worth_it(error: Exception) -> None:
    """Connections that are refused, reset or cut, and attempts that took too long."""
    assert is_transient(error)
    wrapped = LLMError("wrapped")
    wrapped.__cause__ = error
    assert is_transient(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours"),
        LLMError("the model refused"),
        FileNotFoundError("no such file"),
        httpx.UnsupportedProtocol("ftp"),
        refusal(429, body={"code": "insufficient_quota"}),
    ],
)
def test_what_no_waiting_changes_is_not_worth_it(error: Exception) -> None:
    """Refusals, a quota that is used up, and whatever is no transport's failure."""
    assert not is_transient(error)


def test_the_server_has_the_last_word() -> None:
    """Its x-should-retry header decides against the status."""
    assert not is_transient(refusal(500, {"x-should-retry": "false"}))
    assert is_transient(refusal(400, {"x-should-retry": "true"}))


# -- how long is waited ----------------------------------------------------------------------------------------------


def test_retry_after_is_read_in_all_its_forms() -> None:
    """Seconds, milliseconds and HTTP dates; nonsense is none."""
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    past = format_datetime(datetime.now(UTC) - timedelta(seconds=30), usegmt=True)
    assert retry_after(refusal(429, {"Retry-After": "3"})) == 3
    assert retry_after(refusal(429, {"Retry-After": "1.5"})) == 1.5
    assert retry_after(refusal(429, {"retry-after-ms": "250", "Retry-After": "9"})) == 0.25
    assert retry_after(refusal(429, {"Retry-After": soon})) == pytest.approx(30, abs=5)
    assert retry_after(refusal(429, {"Retry-After": past})) == 0
    for nonsense in ("", "soon", "nan", "inf", "Wed, 99 Foo 2026 00:00:00 GMT"):
        assert retry_after(refusal(429, {"Retry-After": nonsense})) is None
    assert retry_after(refusal(429, {"Retry-After": "-5"})) == 0
    assert retry_after(unreached()) is None


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_no_header_breaks_it(text: str) -> None:
    """Whatever stands in the header, it is a number of seconds or nothing."""
    error = OSError("bad")
    error.headers = {"Retry-After": text}  # type: ignore[attr-defined]
    seconds = retry_after(error)
    assert seconds is None or seconds >= 0


def test_retry_after_is_honoured(perform: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """The next attempt begins no sooner than the server asked for."""
    trouble = Trouble(refusal(429, {"retry-after-ms": "200"}))
    started = time.monotonic()
    assert perform(retried(trouble, policy=QUICK, budget=RetryBudget(), deadline=deadline_after(30))) == 2
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize("header", [{"Retry-After": "40"}, {"Retry-After": "100"}])
def test_a_retry_after_that_does_not_fit_ends_it_at_once(
    perform: Callable[[Coroutine[Any, Any, Any]], Any], header: dict[str, str]
) -> None:
    """Nothing is waited for where the deadline or the longest wait comes first; the failure is the server's own."""
    trouble = Trouble(refusal(429, header))
    deadline = deadline_after(30) if header["Retry-After"] == "40" else None
    started = time.monotonic()
    with pytest.raises(openai.RateLimitError):
        perform(retried(trouble, policy=QUICK, budget=RetryBudget(), deadline=deadline))
    assert time.monotonic() - started < 10
    assert trouble.made == 1


def waits(policy: RetryPolicy) -> list[float]:
    """The pauses that a call asks for which never succeeds, taken without waiting for them."""
    wait, asked = _Wait(policy), []
    for number in range(1, policy.attempts):
        state = RetryCallState(Retrying(), None, (), {})
        state.attempt_number = number
        state.set_exception((ConnectionResetError, ConnectionResetError("reset"), None))
        asked.append(wait(state))
    return asked


def test_waits_grow_with_full_jitter() -> None:
    """Before retry n a random time is waited, at most first_wait doubled n - 1 times, at most longest_wait."""
    asked = [waits(RetryPolicy(attempts=5, first_wait=10, longest_wait=40)) for _ in range(200)]
    for number, bound in enumerate((10, 20, 40, 40)):
        taken = [one[number] for one in asked]
        assert min(taken) < bound * 0.1
        assert bound * 0.9 < max(taken) <= bound


# -- where it ends ---------------------------------------------------------------------------------------------------


def test_it_goes_on_until_it_succeeds(perform: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """The attempts of one call are counted once as a call, and each further one as a retry."""
    budget = RetryBudget()
    assert perform(retried(Trouble(unreached(), 2), policy=QUICK, budget=budget)) == 3
    assert (budget.calls, budget.retries) == (1, 2)


def test_it_ends_after_its_attempts(perform: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """The last attempt's own failure is raised."""
    trouble = Trouble(unreached(), 99)
    with pytest.raises(openai.APIConnectionError):
        perform(retried(trouble, policy=QUICK, budget=RetryBudget()))
    assert trouble.made == 3
    never = Trouble(unreached(), 99)
    with pytest.raises(openai.APIConnectionError):
        perform(retried(never, policy=NO_RETRIES, budget=RetryBudget()))
    assert never.made == 1


def test_what_is_not_worth_it_is_raised_at_once(perform: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """A refusal is tried once; a caller may decide for itself what is worth it."""
    budget = RetryBudget()
    trouble = Trouble(refusal(401), 99)
    with pytest.raises(openai.APIStatusError):
        perform(retried(trouble, policy=QUICK, budget=budget))
    assert (trouble.made, budget.retries) == (1, 0)
    assert perform(retried(Trouble(ValueError("mine")), policy=QUICK, budget=budget, worth=lambda _: True)) == 2


def test_a_request_has_so_many_retries(perform: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """All calls of a request share its retries: when they are used up, failures stand."""
    budget = RetryBudget(share=0, least=3)
    made = []
    for _ in range(4):
        trouble = Trouble(unreached(), 99)
        with pytest.raises(openai.APIConnectionError):
            perform(retried(trouble, policy=QUICK, budget=budget))
        made.append(trouble.made)
    assert made == [3, 2, 1, 1]


def test_the_share_grows_with_the_calls() -> None:
    """A fifth of the calls may be retried, and never fewer than the least; also when many threads ask at once."""
    budget = RetryBudget(share=0.2, least=2)
    for _ in range(100):
        budget.call()
    taken: list[bool] = []
    threads = [threading.Thread(target=lambda: taken.extend(budget.take() for _ in range(10))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sum(taken), budget.retries) == (20, 20)
    small = RetryBudget(share=0.2, least=2)
    assert [small.take(), small.take(), small.take()] == [True, True, False]


def test_no_retry_begins_that_cannot_end_in_time(perform: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """Where less than the least time is left, the failure stands and no time is waited away."""
    trouble = Trouble(unreached(), 99)
    policy = RetryPolicy(attempts=99, first_wait=0, least_time=60)
    with pytest.raises(openai.APIConnectionError):
        perform(retried(trouble, policy=policy, budget=RetryBudget(), deadline=deadline_after(30)))
    assert trouble.made == 1


def test_one_attempt_may_be_given_up_early(perform: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """An attempt that hangs ends after its own time, and the next one has the rest."""
    hang = threading.Event()
    made: list[float | None] = []

    async def attempt(deadline: float | None) -> str:
        made.append(deadline)
        if len(made) == 1:
            await Call(sync=lambda: hang.wait(30), deadline=deadline)
        return "there"

    policy = RetryPolicy(first_wait=0.01, attempt_seconds=0.1)
    end = time.monotonic() + 30
    assert perform(retried(attempt, policy=policy, budget=RetryBudget(), deadline=end)) == "there"
    hang.set()
    assert len(made) == 2
    assert all(deadline is not None and deadline < end for deadline in made)


def test_an_attempt_gets_the_earlier_deadline(perform: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """Its own, or the whole's."""
    trouble = Trouble(unreached(), 0)
    perform(retried(trouble, policy=RetryPolicy(attempt_seconds=60), budget=RetryBudget(), deadline=1e18))
    perform(retried(trouble, policy=RetryPolicy(), budget=RetryBudget(), deadline=1e18))
    perform(retried(trouble, policy=RetryPolicy(), budget=RetryBudget()))
    own, whole, none = trouble.deadlines
    assert own is not None
    assert own < time.monotonic() + 61
    assert (whole, none) == (1e18, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"first_wait": -1},
        {"longest_wait": float("nan")},
        {"longest_retry_after": float("inf")},
        {"attempt_seconds": 0},
        {"least_time": -0.1},
        {"share": -1},
        {"least": -1},
    ],
)
def test_wrong_numbers_are_told(wrong: dict[str, Any]) -> None:
    """The error names the field."""
    with pytest.raises(ConfigurationError, match=f"RetryPolicy.{next(iter(wrong))}"):
        RetryPolicy(**wrong)


def test_a_policy_makes_the_budget() -> None:
    """Its share and least are the request's; a budget of nonsense is refused."""
    budget = RetryPolicy(share=0.5, least=7).budget()
    assert (budget.share, budget.least) == (0.5, 7)
    with pytest.raises(ConfigurationError, match="0 or more"):
        RetryBudget(share=-1)
