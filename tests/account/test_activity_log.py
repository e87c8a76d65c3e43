"""Opening, closing and telling records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher
from pydantic import PrivateAttr

from llama_index_agentic_kb.account import ActivityEndEvent, ActivityLog, ActivityStartEvent, guarded
from llama_index_agentic_kb.account.activity_log import describe_error
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
    assert (planning.id, search.id) == (0, 1)
    assert planning.started_at is not None
    assert planning.completed_at is None
    log.close(search, outcome=Outcome.OK, count=2)
    log.close(planning, outcome=Outcome.OK)
    log.close(search, outcome=Outcome.ERROR, count=9)
    assert (search.outcome, search.count) == (Outcome.OK, 2)
    assert search.completed_at is not None
    assert search.started_at is not None
    assert search.completed_at >= search.started_at
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


def test_errors_as_data() -> None:
    """Our errors go by their code, others by their class; one without words by its name."""
    assert describe_error(DeniedError("no")).to_dict() == {"code": "denied", "message": "no"}
    assert describe_error(ValueError()).to_dict() == {"code": "ValueError", "message": "ValueError"}


def test_a_failing_observer_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What an observer raises is logged."""

    def fails(_: ActivityRecord) -> None:
        raise RuntimeError("observer")

    log = log_with(fails)
    log.close(open_search(log))
    assert caplog.text.count("an activity observer failed") == 2


class Events(BaseEventHandler):
    """Collects our events, or raises."""

    _seen: list[BaseEvent] = PrivateAttr(default_factory=list)
    _fails: bool = PrivateAttr(default=False)

    @classmethod
    def class_name(cls) -> str:
        return "events"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        if self._fails:
            raise RuntimeError("handler")
        self._seen.append(event)


@pytest.fixture
def events() -> Iterator[Events]:
    """A handler at the root dispatcher."""
    handler, dispatcher = Events(), get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield handler
    dispatcher.event_handlers.remove(handler)


def test_the_dispatcher_tells_typed_events(events: Events) -> None:
    """Each record gives a start event and an end event with its wire form at that time."""
    log = log_with()
    record = open_search(log)
    log.close(record, outcome=Outcome.EMPTY, count=0)
    start, end = events._seen
    assert isinstance(start, ActivityStartEvent)
    assert isinstance(end, ActivityEndEvent)
    assert "completedAt" not in start.activity
    assert end.activity == record.to_dict()
    assert (start.class_name(), end.class_name()) == ("AgenticKBActivityStartEvent", "AgenticKBActivityEndEvent")
