from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from llama_index_agentic_kb._aio import Call, Job, arun, deadline_after, run, start, wait
from llama_index_agentic_kb.account.retry_budget import RetryBudget
from llama_index_agentic_kb.errors import CircuitOpenError, ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.guard.breaker import BreakerPolicy
from llama_index_agentic_kb.guard.pipeline import Latencies, Progress, ResiliencePipeline, as_hedge_after
from llama_index_agentic_kb.guard.retries import RetryPolicy

QUICK = RetryPolicy(attempts=3, first_wait=0.0, longest_wait=0.0)


def done(native: bool, flow: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(arun(flow)) if native else run(flow)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


class Answers:
    """Gives or raises one thing after another, the last for ever; a float is slept first."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.made = 0

    def __call__(self) -> Any:
        answer = self.answers[min(self.made, len(self.answers) - 1)]
        self.made += 1
        if isinstance(answer, float):
            time.sleep(answer)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def native(self) -> Any:
        answer = self.answers[min(self.made, len(self.answers) - 1)]
        self.made += 1
        if isinstance(answer, float):
            await asyncio.sleep(answer)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def call_of(answers: Answers, seconds: float = 10.0, *, is_native: bool = False) -> Call:
    sync, awaited = (None, answers.native) if is_native else (answers, None)
    return Call(sync=sync, native=awaited, deadline=deadline_after(seconds), what="the thing")


@pytest.mark.parametrize("value", [0, -1, True, "95", "p0", "p100", "fast"])
def test_a_hedge_is_seconds_or_a_percentile(value: Any) -> None:
    """Anything else is refused, and the error names both."""
    with pytest.raises(ConfigurationError, match="hedge_after must be seconds above 0, or a percentile"):
        as_hedge_after(value)


def test_failures_that_are_worth_it_are_tried_again(native: bool) -> None:
    """A refused connection is; the budget pays for it, and the progress counts it."""
    answers, progress = Answers(ConnectionRefusedError(), "there"), Progress(RetryBudget())
    pipeline = ResiliencePipeline("x", retries=QUICK)
    assert done(native, pipeline.call(call_of(answers), progress)) == "there"
    assert (progress.retries, progress.budget.retries, answers.made) == (1, 1, 2)


@pytest.mark.parametrize("error", [ValueError("bad"), DeadlineExceededError("late"), KeyError("x")], ids=repr)
def test_other_failures_are_not(native: bool, error: Exception) -> None:
    """What is wrong with the request stays wrong."""
    answers, progress = Answers(error), Progress()
    with pytest.raises(type(error)):
        done(native, ResiliencePipeline("x", retries=QUICK).call(call_of(answers), progress))
    assert (answers.made, progress.retries) == (1, 0)


def test_without_a_budget_nothing_is_tried_again(native: bool) -> None:
    """A request that has used its retries up gets the failure."""
    answers, progress = Answers(ConnectionRefusedError(), "there"), Progress(RetryBudget(share=0, least=0))
    with pytest.raises(ConnectionRefusedError):
        done(native, ResiliencePipeline("x", retries=QUICK).call(call_of(answers), progress))


def test_attempts_are_counted_by_the_breaker_and_an_open_one_ends_them(native: bool) -> None:
    """Two failures open it: the third attempt is not made, nor is the next call."""
    answers = Answers(ConnectionRefusedError("down"))
    pipeline = ResiliencePipeline("x", retries=QUICK, breaker=BreakerPolicy(failures=2))
    for _ in range(2):
        with pytest.raises(CircuitOpenError):
            done(native, pipeline.call(call_of(answers), Progress()))
    assert answers.made == 2
    assert pipeline.health.circuit == "open"
    assert "down" in (pipeline.health.reason or "")


@pytest.mark.parametrize("is_native", [False, True], ids=["threads", "native"])
def test_the_first_of_two_answers_wins(native: bool, *, is_native: bool) -> None:
    """A slow call is made again beside itself, out of the budget; the loser is stopped."""
    answers, progress = Answers(3.0, "quick"), Progress(RetryBudget())
    pipeline = ResiliencePipeline("x", hedge_after=0.05)
    started = time.monotonic()
    assert done(native, pipeline.call(call_of(answers, is_native=is_native), progress)) == "quick"
    assert time.monotonic() - started < 2.5
    assert (progress.hedges, progress.budget.retries, progress.retries) == (1, 1, 0)
    assert until(lambda: pipeline.health.at_work == 0)


@pytest.mark.parametrize(
    ("answers", "budget", "hedges"),
    [
        (("at once",), RetryBudget(), 0),
        ((0.1, "second"), RetryBudget(share=0, least=0), 0),
        ((0.2, ConnectionRefusedError()), RetryBudget(), 1),
    ],
    ids=["quick", "no budget", "the hedge fails"],
)
def test_a_hedge_never_costs_the_answer(native: bool, answers: Any, budget: RetryBudget, hedges: int) -> None:
    """None is made for a quick call or without a budget; one that fails leaves the first call's answer."""
    progress, asked = Progress(budget), Answers(*answers)
    found = done(native, ResiliencePipeline("x", hedge_after=0.05).call(call_of(asked), progress))
    assert found == answers[0]
    assert progress.hedges == hedges


def test_both_failing_is_a_failure(native: bool) -> None:
    """The error of the first is raised."""

    class Slowly(Answers):
        def __call__(self) -> Any:
            number = self.made
            self.made += 1
            time.sleep(0.15 if number == 0 else 0.0)
            raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 0"):
        done(native, ResiliencePipeline("x", hedge_after=0.03).call(call_of(Slowly()), Progress()))


def test_a_percentile_needs_answers() -> None:
    """Before ten answers are known no call is hedged; after them the slow ones are."""
    pipeline, progress = ResiliencePipeline("x", hedge_after="p90"), Progress()
    for _ in range(10):
        run(pipeline.call(call_of(Answers("quick")), progress))
    assert progress.hedges == 0
    assert run(pipeline.call(call_of(Answers(2.0, "quick")), progress)) == "quick"
    assert progress.hedges == 1


def test_percentiles() -> None:
    """They are of the last answers."""
    assert Latencies().median is None
    latencies = Latencies(most=10)
    for seconds in range(20):
        latencies.add(float(seconds))
    assert (latencies.percentile(0), latencies.median, latencies.percentile(99)) == (10.0, 15.0, 19.0)
    assert latencies.percentile(50, fewest=11) is None


async def given_up(pipeline: ResiliencePipeline, answers: Answers, progress: Progress) -> Any:
    """Make a call, and give it up when it is at work."""
    job: Job[Any] = start(pipeline.call(call_of(answers), progress))
    while progress.at_work_since is None:
        await wait([job], deadline=deadline_after(0.02))
    await wait([job], deadline=deadline_after(0.12))
    await progress.give_up("nobody waits any more")
    await wait([job])
    return progress.result_of(job)


def test_a_call_that_is_given_up_says_why(native: bool) -> None:
    """It is a timeout, it counts for the breaker, and it holds its place until it returns."""
    answers, progress = Answers(0.6), Progress()
    pipeline = ResiliencePipeline("x", breaker=BreakerPolicy(failures=1))
    with pytest.raises(DeadlineExceededError, match="nobody waits any more"):
        done(native, given_up(pipeline, answers, progress))
    assert pipeline.health.circuit == "open"
    assert pipeline.health.abandoned == 1
    assert until(lambda: pipeline.health.abandoned == 0)
    assert pipeline.health.circuit == "halfOpen", "a late answer shows that it is there"
    assert pipeline.health.median_seconds is not None
    assert pipeline.health.median_seconds > 0.5


def test_a_call_whose_caller_leaves_counts_for_nothing(native: bool) -> None:
    """A cancelled request is no fault of what it called."""
    pipeline, release = ResiliencePipeline("x", breaker=BreakerPolicy(failures=1)), threading.Event()

    async def flow() -> None:
        progress = Progress()
        job: Job[Any] = start(pipeline.call(Call(sync=lambda: release.wait(30)), progress))
        while progress.at_work_since is None:
            await wait([job], deadline=deadline_after(0.02))
        await wait([job], deadline=deadline_after(0.12))

    done(native, flow())
    assert pipeline.health.circuit == "closed"
    assert pipeline.health.abandoned == 1
    release.set()
    assert until(lambda: pipeline.health.abandoned == 0)
