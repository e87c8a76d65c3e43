"""The activity log of one request, with one record per stage (planning, a search, an answer)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
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
    """The activity records of one request, in the order in which their stages began.

    No lock is needed: the stages of one request never call its methods concurrently.

    Args:
        manager: Callback manager that gets an event for each record, with the record under ``ACTIVITY_KEY``.
        observer: Called with each record when it is opened and when it is closed. Its exceptions are logged.
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
        """Open a record for the body of a ``with`` statement, and close it when the body ends.

        The body may close it earlier, with its results. If the body raises or is cancelled, the record gets an error.

        Args:
            kind: The record's class.
            event: Type of the stage's callback event.
            payload: The start event's payload, to which the record is added.
            fields: Initial field values of the record.
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

    def open(
        self,
        kind: type[R],
        event: CBEventType,
        payload: dict[Any, Any] | None = None,
        *,
        since: float | None = None,
        **fields: Any,
    ) -> R:
        """Open a record for a stage that begins, or that began at ``time.monotonic()`` ``since``; see ``record``."""
        now = time.monotonic()
        began = now if since is None else since
        started_at = datetime.now(UTC) - timedelta(seconds=now - began)
        record = kind(id=len(self.records), started_at=started_at, **fields)
        self.records.append(record)
        event_id = str(uuid.uuid4()) if self.manager.handlers else ""
        self._open[record.id] = (began, event, event_id)
        if event_id:
            self.manager.on_event_start(event, payload={**(payload or {}), ACTIVITY_KEY: record}, event_id=event_id)
        _dispatch(ActivityStartEvent, record)
        self._observe(record)
        return record

    def close(self, record: ActivityRecord, payload: dict[Any, Any] | None = None, **fields: Any) -> None:
        """Set fields of an open record, close it, and report it, with ``payload`` in its end event."""
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
        """Close the record of a failed stage with its error."""
        described = describe_error(error, target, record.type)
        self.close(record, error=described, **{"outcome": Outcome.ERROR, **fields})

    def cancel(self, record: ActivityRecord) -> None:
        """Close the record of a stage whose request was cancelled."""
        error = ActivityError(code="cancelled", message="the request was cancelled before the stage was done")
        self.close(record, outcome=Outcome.SKIPPED, error=error)

    def amend(self, record: ActivityRecord, **fields: Any) -> None:
        """Update a closed record with later results. The observer is called again, callback handlers are not."""
        for name, value in fields.items():
            setattr(record, name, value)
        self._observe(record)

    def last(self, kind: type[R], **fields: object) -> R | None:
        """Return the newest record of a class whose fields have these values; None if there is none."""
        of_kind = (record for record in reversed(self.records) if isinstance(record, kind))
        return next((r for r in of_kind if all(getattr(r, name) == value for name, value in fields.items())), None)

    def _observe(self, record: ActivityRecord) -> None:
        if self._observer is None:
            return
        try:
            with outside_loop():
                self._observer(record)
        except Exception:  # noqa: BLE001 (an observer must not break the request)
            logger.warning("an activity observer failed", exc_info=True)


def is_heard() -> bool:
    """Return whether an event handler is registered for the dispatcher's events."""
    listening: Any = dispatcher
    while listening is not None:
        if any(not isinstance(handler, NullEventHandler) for handler in listening.event_handlers):
            return True
        listening = listening.parent if listening.propagate else None
    return False


def _dispatch(kind: type[ActivityStartEvent | ActivityEndEvent], record: ActivityRecord) -> None:
    """Send an event if a handler is registered; the record's JSON form is too costly to build otherwise."""
    if is_heard():
        dispatcher.event(kind(activity=record.to_dict()))


def describe_error(error: BaseException, target: str | None = None, stage: str | None = None) -> ActivityError:
    """Return an error as data, with the code of the package's own errors or the class name of any other."""
    code = error.code if isinstance(error, AgenticKBError) else type(error).__name__
    return ActivityError(code=code, message=error_message(error), target=target, stage=stage)
