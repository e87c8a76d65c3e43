"""One deadline, shared out."""

from __future__ import annotations

import asyncio
import time

import pytest

from llama_index_agentic_kb._aio import arun, gather, run
from llama_index_agentic_kb.account.budget import Budget, RetryBudget, current_budget, set_budget


def test_the_answer_keeps_its_share() -> None:
    """Searching ends before the deadline, so that the answer has its part; a stage ends at the earlier of both."""
    budget = Budget(10, answer_share=0.4)
    assert budget.deadline == pytest.approx(budget.started + 10)
    assert budget.retrieval_deadline == pytest.approx(budget.started + 6)
    assert budget.retrieval_stage(100) == budget.retrieval_deadline
    stage = budget.retrieval_stage(1)
    assert stage is not None
    assert stage < budget.started + 2


def test_searching_may_have_a_limit_of_its_own() -> None:
    """The earlier of the request's share and the searches' own time is the end, with a deadline and without."""
    assert Budget(10, answer_share=0.4, retrieval_seconds=2).retrieval_deadline == pytest.approx(
        time.monotonic() + 2, abs=0.5
    )
    late = Budget(10, answer_share=0.4, retrieval_seconds=100)
    assert late.retrieval_deadline == pytest.approx(late.started + 6)
    alone = Budget(retrieval_seconds=3)
    assert alone.deadline is None
    assert alone.retrieval_deadline == pytest.approx(alone.started + 3)
    assert alone.retrieval_stage(100) == alone.retrieval_deadline


def test_the_answer_ends_a_little_before_the_request() -> None:
    """So that what arrived can be given in time: a twentieth of the whole, and half a second at most."""
    short, long, none = Budget(2), Budget(100), Budget()
    assert short.answer_deadline == pytest.approx(short.started + 1.9)
    assert long.answer_deadline == pytest.approx(long.started + 99.5)
    assert none.answer_deadline is None


def test_a_request_has_one_retry_budget() -> None:
    """Its calls share it, those of flows that it starts too; outside of a request each call has its own."""
    budget = Budget(2, retries=RetryBudget(share=0, minimum=1))

    async def call() -> bool:
        return current_budget().retries.take()

    async def request() -> list[bool]:
        set_budget(budget)
        jobs = await gather([call(), call()])
        return [job.result() for job in jobs]

    assert run(request()) == [True, False]
    assert asyncio.run(arun(request())) == [False, False]
    assert budget.retries.retries == 1
    assert current_budget().retries is not current_budget().retries
