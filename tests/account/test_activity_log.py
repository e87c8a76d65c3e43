"""Records and budgets of a request; handlers, guarded: what they are told, and that they break nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from llama_index_agentic_kb._aio import arun, gather, run
from llama_index_agentic_kb.account import (
    ACTIVITY_KEY,
    ActivityCallbackHandler,
    ActivityLog,
    Budget,
    GuardedCallbackManager,
    GuardedCallbacks,
    RetryBudget,
    current_budget,
    guarded,
    set_budget,
    with_handlers,
)
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import ActivityRecord, ModelQueryPlanningActivity, Outcome, SourceActivity
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM
from tests.test_llama_events import Tree


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


class Hearing(BaseEventHandler):
    def handle(self, event: BaseEvent, **_: object) -> None:
        """Hear an event."""


def test_a_plain_search_is_recorded_where_somebody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of nodes needs no records; an observer, callback handlers and event handlers each get them."""
    logs, heard = list[ActivityLog](), ActivityCallbackHandler(log=False)

    def made(*args: Any) -> ActivityLog:
        logs.append(ActivityLog(*args))
        return logs[-1]

    monkeypatch.setattr("llama_index_agentic_kb.retriever.ActivityLog", made)
    readers: list[dict[str, Any]] = [
        {},
        {"observer": lambda _: None},
        {"callback_manager": CallbackManager([heard])},
        {"verbose": True},
    ]
    for reader in readers:
        source = KnowledgeSource("docs", retriever=MemoryRetriever(["rain"]))
        assert len(AgenticRetriever([source], effort="minimal", **reader).retrieve("rain")) == 1
    monkeypatch.setattr("llama_index_agentic_kb.account.dispatcher.event_handlers", [Hearing()])
    assert ActivityLog(guarded(CallbackManager([])), recorded=False).is_read
    assert [len(log.records) for log in logs] == [0, 2, 2, 2]
    assert logs[2].records == sorted(heard.records, key=lambda record: record.id)


def test_a_failing_observer_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What an observer raises is logged."""

    def fails(_: ActivityRecord) -> None:
        raise RuntimeError("observer")

    log = log_with(fails)
    log.close(open_search(log))
    assert caplog.text.count("an activity observer failed") == 2


def test_deadlines_leave_time_for_what_follows() -> None:
    """Searching ends before the answer's share, or at its own limit; the answer a twentieth, at most 0.5 s, earlier."""
    for budget, *expected in [
        (Budget(10, answer_share=0.4), 10, 9.5, 6),
        (Budget(10, answer_share=0.4, retrieval_seconds=2), 10, 9.5, 2),
        (Budget(10, answer_share=0.4, retrieval_seconds=100), 10, 9.5, 6),
        (Budget(2, answer_share=0.5), 2, 1.9, 1),
        (Budget(retrieval_seconds=3), None, None, 3),
    ]:
        found = [budget.deadline, budget.answer_deadline, budget.retrieval_deadline]
        assert [None if one is None else round(one - budget.started, 3) for one in found] == expected


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


TEXTS = ["The moon is far away.", "The moon is made of rock.", "Mars is farther than the moon."]


class Recorder(Tree):
    def of(self, kind: CBEventType) -> list[tuple[str, str]]:
        return [(event, parent) for event, parent in self.parents.items() if self.kinds[event] is kind]

    def payload(self, event: str) -> Any:
        return self._event_pairs_by_id[event][0].payload


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a handler's own trouble")


class Failing(Recorder):
    on_event_start = on_event_end = start_trace = end_trace = fails


def retriever(*handlers: BaseCallbackHandler) -> AgenticRetriever:
    modes: list[Any] = ["sync", "async", "async_only"]
    sources = [KnowledgeSource(mode, retriever=MemoryRetriever(TEXTS, mode=mode, latency=0.01)) for mode in modes]
    return AgenticRetriever(sources, callback_manager=CallbackManager(list(handlers)), effort="minimal")


def ask(asked: AgenticRetriever, is_async: bool, question: str = "moon") -> int:
    return len(asyncio.run(asked.aretrieve(question)) if is_async else asked.retrieve(question))


@pytest.mark.parametrize("is_async", [False, True])
def test_parents_in_many_threads(is_async: bool) -> None:
    """Sixteen threads that share one manager: by parent ids each search belongs to its own question's retrieval."""
    recorder = Recorder()
    asked = retriever(recorder)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: ask(asked, is_async, f"moon {n}"), range(16)))
    questions = {
        event: str(recorder.payload(event)[EventPayload.QUERY_STR]) for event, _ in recorder.of(CBEventType.RETRIEVE)
    }
    assert sorted(questions.values()) == sorted(f"moon {n}" for n in range(16))
    told = defaultdict(list)
    for event, parent in recorder.of(CBEventType.SUB_QUESTION):
        told[questions[parent]].append(recorder.payload(event)[ACTIVITY_KEY].arguments.search)
    assert told == {question: [question] * 3 for question in questions.values()}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failing_handler_breaks_nothing(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A user's handler that raises everywhere is logged; the query works and the others are told all of it."""
    recorder, plain = Recorder(), Recorder()
    assert ask(retriever(Failing(), recorder), is_async) == ask(retriever(plain), is_async) > 0
    assert Counter(recorder.kinds.values()) == Counter(plain.kinds.values())
    assert "a callback handler failed: Failing" in caplog.text


def test_a_component_is_never_changed() -> None:
    """Handlers are added to a shallow copy, each once and guarded; a component with nothing to add is itself."""
    own, ours = Recorder(), Recorder()
    llm = ScriptedLLM("Hi", callback_manager=CallbackManager([own]))
    before, manager = llm.callback_manager, CallbackManager([ours, own])
    twin = with_handlers(llm, manager)
    assert twin is not llm
    assert (llm.callback_manager, llm.callback_manager.handlers) == (before, [own])
    twin.complete("?")
    assert len(own.of(CBEventType.LLM)) == len(ours.of(CBEventType.LLM)) == 1
    assert with_handlers(twin, manager) is twin
    assert with_handlers(ScriptedLLM(), CallbackManager([])).callback_manager.handlers == []
    bare = ScriptedLLM()
    assert with_handlers(bare) is bare
    assert with_handlers(object) is object
    assert with_handlers(llm) is not llm


def test_a_manager_that_is_set_later_is_guarded() -> None:
    """However a component's manager is set, None included, what it gives is guarded; handlers can be removed."""

    class Component(GuardedCallbacks):
        pass

    component = Component()
    component.callback_manager = CallbackManager([Failing()])
    manager, recorder = component.callback_manager, Recorder()
    manager.add_handler(recorder)
    with manager.event(CBEventType.QUERY) as event:
        event.on_start()
    assert [*recorder.kinds.values()] == [CBEventType.QUERY]
    manager.remove_handler(recorder)
    assert len(manager.handlers) == 1
    component.callback_manager = None
    assert isinstance(component.callback_manager, GuardedCallbackManager)


def test_activity_is_logged_as_json_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Each closed record is a line of JSON, a failed one a warning; the function and the list get the records."""
    caplog.set_level(logging.INFO, logger="llama_index_agentic_kb.activity")
    told: list[Any] = []
    handler = ActivityCallbackHandler(told.append)
    sources = [
        KnowledgeSource("good", retriever=MemoryRetriever(TEXTS)),
        KnowledgeSource("bad", retriever=MemoryRetriever(TEXTS, fault=OSError("gone"))),
    ]
    asked = AgenticRetriever(sources, effort="minimal", callback_manager=CallbackManager([handler]))
    asked.retrieve("moon")
    lines = [r for r in caplog.records if r.name == "llama_index_agentic_kb.activity"]
    data = [json.loads(line.getMessage()) for line in lines]
    assert data == [record.to_dict() for record in handler.records]
    assert told == handler.records
    assert {line["knowledgeSourceName"]: line["outcome"] for line in data if line["type"] == "searchIndex"} == {
        "good": "ok",
        "bad": "error",
    }
    assert [r.levelno for r in lines].count(logging.WARNING) == 1
    assert all("completedAt" in line for line in data)


def test_a_trace_at_its_limit_is_reported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the start of an event forgets old ones: the end of the trace has what there is."""
    monkeypatch.setattr("llama_index_agentic_kb.account.TRACE_LIMIT", 5)
    manager = GuardedCallbackManager([])
    with manager.as_trace("query"):
        for number in range(6):
            manager.on_event_start(CBEventType.LLM, event_id=f"e{number}", parent_id=f"p{number}")
    assert len(manager.trace_map) == 6


def test_the_trace_map_of_a_twin_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager inside another one's trace, which never sees it end, forgets old events at its limit."""
    monkeypatch.setattr("llama_index_agentic_kb.account.TRACE_LIMIT", 50)
    outer, twin = guarded(CallbackManager([])), GuardedCallbackManager([Recorder()])
    with outer.as_trace("query"):
        for _ in range(500):
            with twin.as_trace("chat"):
                twin.on_event_start(CBEventType.SUB_QUESTION)
    assert len(twin.trace_map) <= 52
