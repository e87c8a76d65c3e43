"""The account of one request: every stage opens a record here and closes it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import NullEventHandler

from llama_index_agentic_kb._aio import outside_loop
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account.callbacks import ACTIVITY_KEY, ActivityEndEvent, ActivityStartEvent
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import AgenticKBError
from llama_index_agentic_kb.schema import ActivityError, ActivityRecord, Outcome

dispatcher = get_dispatcher(__name__)

R = TypeVar("R", bound=ActivityRecord)


class ActivityLog:
    """Records of one request, in the order in which their stages began.

    Its methods are called from flow bodies, which never run two at a time for one request: no lock is needed.

    Args:
        manager: Told of each record by a callback event whose payload holds it under ``ACTIVITY_KEY``.
        observer: Called with each record when it is opened and again when it is closed (``completed_at`` is set
            then). What it raises is logged.
    """

    def __init__(self, manager: CallbackManager, observer: Callable[[ActivityRecord], None] | None = None) -> None:
        self.manager = manager
        self.records: list[ActivityRecord] = []
        self._observer = observer
        self._open: dict[int, tuple[float, CBEventType, str]] = {}

    @contextmanager
    def record(
        self, kind: type[R], event: CBEventType, payload: dict[Any, Any] | None = None, **fields: Any
    ) -> Iterator[R]:
        """Open a record for the body of a ``with`` statement; it is closed however the body ends.

        The body closes it with what it has found out. Where it raises, the record has the error; where the request is
        cancelled, the record says so.

        Args:
            kind: The record's class.
            event: The callback event that stands for the stage.
            payload: The event's payload; the record is added to it.
            fields: The record's fields, as far as known.

        Yields:
            The open record.
        """
        record = self.open(kind, event, payload, **fields)
        try:
            yield record
        except Exception as error:
            self.fail(record, error)
            raise
        except BaseException:  # a cancellation, or a coroutine that is closed before its end
            self.cancel(record)
            raise
        self.close(record)

    def open(self, kind: type[R], event: CBEventType, payload: dict[Any, Any] | None = None, **fields: Any) -> R:
        """Begin a stage; see ``record``."""
        record = kind(id=len(self.records), started_at=datetime.now(UTC), **fields)
        self.records.append(record)
        event_id = str(uuid.uuid4()) if self.manager.handlers else ""
        self._open[record.id] = (time.monotonic(), event, event_id)
        if event_id:
            self.manager.on_event_start(event, payload={**(payload or {}), ACTIVITY_KEY: record}, event_id=event_id)
        _dispatch(ActivityStartEvent, record)
        self._observe(record)
        return record

    def close(self, record: ActivityRecord, payload: dict[Any, Any] | None = None, **fields: Any) -> None:
        """End a stage with what its body has found out, and report it. Closing twice changes nothing.

        The end event has ``payload``, with the record added to it; ``fields`` are set on the record.
        """
        if record.id not in self._open:
            return
        started, event, event_id = self._open.pop(record.id)
        for name, value in fields.items():
            setattr(record, name, value)
        record.completed_at = datetime.now(UTC)
        record.elapsed_ms = round((time.monotonic() - started) * 1000)
        if event_id:
            self.manager.on_event_end(event, payload={**(payload or {}), ACTIVITY_KEY: record}, event_id=event_id)
        _dispatch(ActivityEndEvent, record)
        self._observe(record)

    def fail(self, record: ActivityRecord, error: BaseException, target: str | None = None, **fields: Any) -> None:
        """End a stage that failed."""
        described = describe_error(error, target, record.type)
        self.close(record, error=described, **{"outcome": Outcome.ERROR, **fields})

    def cancel(self, record: ActivityRecord) -> None:
        """End a stage whose request was cancelled."""
        error = ActivityError(code="cancelled", message="the request was cancelled before the stage was done")
        self.close(record, outcome=Outcome.SKIPPED, error=error)

    def amend(self, record: ActivityRecord, **fields: Any) -> None:
        """Correct a closed record: a later stage knows more. The observer is called again, handlers are not."""
        for name, value in fields.items():
            setattr(record, name, value)
        self._observe(record)

    def last(self, kind: type[R]) -> R | None:
        """Return the newest record of a class."""
        return next((record for record in reversed(self.records) if isinstance(record, kind)), None)

    def _observe(self, record: ActivityRecord) -> None:
        if self._observer is None:
            return
        try:
            with outside_loop():
                self._observer(record)
        except Exception:  # noqa: BLE001 (an observer must not break what it watches)
            logger.warning("an activity observer failed", exc_info=True)


def is_heard() -> bool:
    """Return whether anybody listens to the dispatcher's events."""
    listening: Any = dispatcher
    while listening is not None:
        if any(not isinstance(handler, NullEventHandler) for handler in listening.event_handlers):
            return True
        listening = listening.parent if listening.propagate else None
    return False


def _dispatch(kind: type[ActivityStartEvent | ActivityEndEvent], record: ActivityRecord) -> None:
    """Send an event, unless nobody listens: its wire form costs more than all the rest of a record."""
    if is_heard():
        dispatcher.event(kind(activity=record.to_dict()))


def describe_error(error: BaseException, target: str | None = None, stage: str | None = None) -> ActivityError:
    """Return an error as data: our own by their code, others by their class."""
    code = error.code if isinstance(error, AgenticKBError) else type(error).__name__
    return ActivityError(code=code, message=error_message(error), target=target, stage=stage)
