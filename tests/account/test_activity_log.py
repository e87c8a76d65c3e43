"""Opening, closing and telling records."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType

from llama_index_agentic_kb._aio import arun, gather, run
from llama_index_agentic_kb.account import ActivityLog, guarded
from llama_index_agentic_kb.account.budget import Budget, RetryBudget, current_budget, set_budget
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import ActivityRecord, ModelQueryPlanningActivity, Outcome, SourceActivity


def log_with(observer: Any = None) -> ActivityLog:
    return ActivityLog(guarded(CallbackManager([])), observer)


def open_search(log: ActivityLog, name: str = "s") -> SourceActivity:
    return log.open(SourceActivity, CBEventType.SUB_QUESTION, knowledge_source_name=name, sub_query_id="q0")


def test_a_record_is_opened_and_closed() -> None:
    """Ids count up in the order of opening; closing sets times and fields, once."""
    log = log_with()
    planning = log.open(ModelQueryPlanningActivity, CBEventType.AGENT_STEP)
    search = open_search(log)
    assert (planning.id, search.id, planning.completed_at) == (0, 1, None)
    log.close(search, outcome=Outcome.OK, count=2)
    log.close(planning, outcome=Outcome.OK)
    log.close(search, outcome=Outcome.ERROR, count=9)
    assert (search.outcome, search.count) == (Outcome.OK, 2)
    assert search.elapsed_ms is not None
    assert log.records == [planning, search]
    assert log.last(SourceActivity) is search
    assert log_with().last(SourceActivity) is None


def test_failing_and_amending() -> None:
    """A failed stage tells code, message and target; a closed record may be corrected, which the observer is told."""
    told: list[tuple[int, Any]] = []
    log = log_with(lambda record: told.append((record.id, record.outcome)))
    record = open_search(log)
    log.fail(record, OSError("gone"), "s", count=0)
    assert record.error is not None
    assert (record.error.code, record.error.message, record.error.target) == ("OSError", "gone", "s")
    assert (record.outcome, record.count) == (Outcome.ERROR, 0)
    denied = open_search(log)
    log.fail(denied, DeniedError("no"), outcome=Outcome.DENIED)
    log.amend(record, warning="late news")
    assert record.warning == "late news"
    assert told == [(0, None), (0, "error"), (1, None), (1, "denied"), (0, "error")]


def test_a_failing_observer_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What an observer raises is logged."""

    def fails(_: ActivityRecord) -> None:
        raise RuntimeError("observer")

    log = log_with(fails)
    log.close(open_search(log))
    assert caplog.text.count("an activity observer failed") == 2


def test_the_answer_keeps_its_share() -> None:
    """Searching ends before the deadline, so that the answer has its part."""
    budget = Budget(10, answer_share=0.4)
    assert budget.deadline == pytest.approx(budget.started + 10)
    assert budget.retrieval_deadline == pytest.approx(budget.started + 6)


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
