"""The account of one request: its budget, its activity log, and the reports of both to LlamaIndex.

Each entry point sets the budget once per request in a context variable, and all code that runs for the request reads
it. The log has one record per stage (planning, a search, an answer), reported as callback events, dispatcher events and
log lines. Callback handlers are wrapped ("guarded"): an exception of a user's handler is logged and never breaks a
query.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import InitVar, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base import global_stack_trace
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.settings import Settings
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import NullEventHandler

from llama_index_agentic_kb._aio import deadline_after, earliest, outside_loop
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.account.logs import activity_logger, logger, redacted_leaves
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import AgenticKBError
from llama_index_agentic_kb.schema import ActivityError, ActivityRecord, Outcome

dispatcher = get_dispatcher(__name__)

ACTIVITY_KEY: Final = "agentic_kb.activity"
"""Key of the ``ActivityRecord`` in a callback event's payload."""

TRACE_LIMIT: Final = 10_000
"""Maximum number of parents in a trace map; the end of a trace, which resets the map, may never be reported."""

C = TypeVar("C")
R = TypeVar("R", bound=ActivityRecord)


# -- the budget --------------------------------------------------------------------------------------------------------

LAST_SHARE: Final = 0.05
LAST_SECONDS: Final = 0.5
"""The time reserved after the answer's deadline, to return a partial answer: this share of all, at most so much."""


@dataclass(slots=True, eq=False)
class RetryBudget:
    """Limits the retries of a request to a share of its calls, so that retries don't overload services.

    A request with 4 calls may make 5 retries, one with 100 calls may make 20. Envoy's ``retry_budget`` works like this
    (share 20 %), and the Google SRE book (chapter 22) recommends it.

    Args:
        share: Number of retries per call.
        minimum: Number of retries that are always allowed.
    """

    share: float = 0.2
    minimum: int = 5
    calls: int = 0
    """Number of calls so far, without retries."""
    retries: int = 0
    """Number of retries so far."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def take(self) -> bool:
        """Count a retry if one is left, and return whether it is allowed. Thread-safe."""
        with self._lock:
            left = self.retries < max(self.minimum, int(self.share * self.calls))
            self.retries += left
            return left


@dataclass(slots=True)
class Budget:
    """The limits of a request. All timeouts in the package are derived from it.

    Args:
        seconds: The time from now in which the response must be complete; None is no limit.
        answer_share: Share of the total time, 0 to 1, that is reserved for the answer.
        output_tokens: Maximum number of tokens of the extracted data or the answer; None is no limit.
        output_documents: Maximum number of documents in the response; None is no limit.
        retrieval_seconds: Maximum duration of the retrieval; if None, only ``deadline`` limits it.
        retries: Retry budget that all calls of the request share.
        started: ``time.monotonic()`` of the request's arrival.
    """

    seconds: float | None = None
    answer_share: float = 0.4
    output_tokens: int | None = None
    output_documents: int | None = None
    retrieval_seconds: float | None = None
    retries: RetryBudget = field(default_factory=RetryBudget)
    started: float = field(default_factory=time.monotonic)

    deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` by which the response must be complete; None is no limit, as with all deadlines."""
    answer_deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` at which the answer is stopped, so that a partial answer can be returned in time."""
    check_deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` at which the check of an answer is abandoned, in the middle of the reserve after it."""
    retrieval_deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` at which the retrieval ends, so that the answer's share of the time is left."""
    evidence_deadline: float | None = field(init=False, default=None)
    """``time.monotonic()`` by which the evidence must be complete, when half of the answer's share is left: so
    postprocessors have time even if searches or a reranker use all of the retrieval's."""

    def __post_init__(self) -> None:
        """Derive the deadlines."""
        if self.retrieval_seconds is not None:
            self.retrieval_deadline = self.started + self.retrieval_seconds
        if self.seconds is not None:
            share, reserve = self.answer_share * self.seconds, min(LAST_SECONDS, LAST_SHARE * self.seconds)
            self.deadline = end = self.started + self.seconds
            self.answer_deadline, self.check_deadline = end - reserve, end - reserve / 2
            self.evidence_deadline = end - share / 2
            self.retrieval_deadline = earliest(self.retrieval_deadline, end - share)

    @property
    def left(self) -> float | None:
        """Seconds until the deadline, at least 0; None if there is no deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def retrieval_share(self, part: float, seconds: float) -> float | None:
        """Return an early stage's deadline: ``seconds`` from now, or ``part`` (0 to 1) of the retrieval if earlier."""
        searching = self.retrieval_deadline
        share = None if searching is None else self.started + part * (searching - self.started)
        return earliest(share, deadline_after(seconds))


_current: ContextVar[Budget | None] = ContextVar("agentic_kb_budget", default=None)


set_budget: Final = _current.set
"""Sets the budget of the current context."""


def current_budget() -> Budget:
    """Return the budget of the current request; outside of a request, a new budget without limits."""
    return _current.get() or Budget()


# -- the activity log --------------------------------------------------------------------------------------------------


class _ActivityEvent(BaseEvent):
    activity: JsonObject

    @classmethod
    def class_name(cls) -> str:
        return f"AgenticKB{cls.__name__}"


class ActivityStartEvent(_ActivityEvent):
    """A stage has begun; ``activity`` is its open activity record in JSON form."""


class ActivityEndEvent(_ActivityEvent):
    """A stage has ended; ``activity`` is its closed activity record in JSON form."""


def is_heard() -> bool:
    """Return whether an event handler is registered for the dispatcher's events."""
    listening: Any = dispatcher
    while listening is not None:
        for handler in listening.event_handlers:
            if not isinstance(handler, NullEventHandler):
                return True
        listening = listening.parent if listening.propagate else None
    return False


@dataclass(slots=True, eq=False)
class ActivityLog:
    """The activity records of one request, in the order in which their stages began.

    No lock is needed: the stages of one request never call its methods concurrently. ``observer`` is called with each
    record when it is opened and when it is closed; its exceptions are logged. ``recorded`` means that the caller
    reads ``records``.
    """

    manager: CallbackManager
    observer: Callable[[ActivityRecord], None] | None = None
    recorded: InitVar[bool] = True
    is_read: bool = field(init=False)
    """Whether anybody reads the records: the caller, the observer, a callback handler or an event handler."""
    records: list[ActivityRecord] = field(default_factory=list)
    _open: dict[int, tuple[float, CBEventType, str]] = field(default_factory=dict)
    _is_heard: bool = field(default_factory=is_heard)

    def __post_init__(self, recorded: bool) -> None:
        """Look who reads the records."""
        self.is_read = recorded or self._is_heard or self.observer is not None or bool(self.manager.handlers)

    @contextmanager
    def record(
        self, kind: type[R], event: CBEventType, payload: dict[Any, object] | None = None, **fields: Any
    ) -> Iterator[R]:
        """Open a record for the body of a ``with`` statement, and close it when the body ends.

        The body may close it earlier, with its results. If the body raises or is cancelled, the record gets an error.
        It is added to ``payload``, that of the stage's start event.
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
        began, started_at = time.monotonic(), datetime.now(UTC)
        if since is not None:
            began, started_at = since, started_at - timedelta(seconds=began - since)
        record = kind(id=len(self.records), started_at=started_at, **fields)
        self.records.append(record)
        event_id = str(uuid.uuid4()) if self.manager.handlers else ""
        self._open[record.id] = (began, event, event_id)
        if event_id:
            self.manager.on_event_start(event, payload={**(payload or {}), ACTIVITY_KEY: record}, event_id=event_id)
        if self._is_heard or self.observer is not None:
            self._report(record, ActivityStartEvent)
        return record

    def close(self, record: ActivityRecord, payload: dict[Any, object] | None = None, **fields: object) -> None:
        """Set fields of an open record, close it, and report it, with ``payload`` in its end event."""
        if record.id not in self._open:
            return
        started, event, event_id = self._open.pop(record.id)
        elapsed = round((time.monotonic() - started) * 1000)
        _set(record, {**fields, "completed_at": datetime.now(UTC), "elapsed_ms": elapsed})
        if event_id:
            self.manager.on_event_end(event, payload={**(payload or {}), ACTIVITY_KEY: record}, event_id=event_id)
        if self._is_heard or self.observer is not None:
            self._report(record, ActivityEndEvent)

    def fail(self, record: ActivityRecord, error: BaseException, target: str | None = None, **fields: Any) -> None:
        """Close the record of a failed stage with its error."""
        described = describe_error(error, target, record.type)
        self.close(record, error=described, **{"outcome": Outcome.ERROR, **fields})

    def cancel(self, record: ActivityRecord) -> None:
        """Close the record of a stage whose request was cancelled."""
        error = ActivityError(code="cancelled", message="the request was cancelled before the stage was done")
        self.close(record, outcome=Outcome.SKIPPED, error=error)

    def amend(self, record: ActivityRecord, **fields: object) -> None:
        """Update a closed record with later results. The observer is called again, callback handlers are not."""
        _set(record, fields)
        if self.observer is not None:
            self._report(record)

    def last(self, kind: type[R], purpose: str | None = None) -> R | None:
        """Return the newest record of a class, with a purpose if one is given; None if there is none."""
        for record in reversed(self.records):
            if isinstance(record, kind) and purpose in (None, getattr(record, "purpose", None)):
                return record
        return None

    def _report(self, record: ActivityRecord, event: type[_ActivityEvent] | None = None) -> None:
        """Send an event, whose JSON form is built only if a handler is registered, and call the observer."""
        if event is not None and self._is_heard:
            dispatcher.event(event(activity=record.to_dict()))
        if self.observer is None:
            return
        try:
            with outside_loop():
                self.observer(record)
        except Exception:  # noqa: BLE001 (an observer must not break the request)
            logger.warning("an activity observer failed", exc_info=True)


def _set(record: ActivityRecord, fields: JsonObject) -> None:
    """Set fields of a record, without pydantic's ``__setattr__``: 50 calls of it are a tenth of a plain retrieval."""
    assert fields.keys() <= type(record).__pydantic_fields__.keys()
    vars(record).update(fields)
    record.__pydantic_fields_set__.update(fields)


def describe_error(error: BaseException, target: str | None = None, stage: str | None = None) -> ActivityError:
    """Return an error as data, with the code of the package's own errors or the class name of any other."""
    code = error.code if isinstance(error, AgenticKBError) else type(error).__name__
    return ActivityError(code=code, message=error_message(error), target=target, stage=stage)


# -- callback handlers ------------------------------------------------------------------------------------------------


class EventHandler(BaseCallbackHandler):
    """A callback handler of events, which ignores traces. Subclasses must implement ``on_event_end``."""

    def __init__(self) -> None:
        super().__init__(event_starts_to_ignore=[], event_ends_to_ignore=[])

    def on_event_start(
        self, event_type: CBEventType, payload: JsonObject | None = None, event_id: str = "", *_: Any, **__: Any
    ) -> str:
        """Ignore the start of an event."""
        del event_type, payload
        return event_id

    def start_trace(self, trace_id: str | None = None) -> None:
        """Ignore the start of a trace."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Ignore the end of a trace."""


class ActivityCallbackHandler(EventHandler):
    """Collects and logs the activity records of all queries.

    Each closed record is logged to ``llama_index_agentic_kb.activity`` as one line of JSON (level INFO, or WARNING for
    a failed stage), passed to ``on_activity`` and appended to ``records``. In the log, text that looks like a secret
    is replaced by ``***``, also in questions and queries.

    Args:
        on_activity: Function that is called with each closed record.
        log: Whether records are logged. Defaults to True.
        limit: Maximum number of records in ``records``; the oldest are removed. Defaults to 10,000.
    """

    def __init__(
        self, on_activity: Callable[[ActivityRecord], None] | None = None, *, log: bool = True, limit: int = 10_000
    ) -> None:
        super().__init__()
        self.records: list[ActivityRecord] = []
        self._on_activity = on_activity
        self._log = activity_logger if log else None
        self._limit = limit

    def on_event_end(
        self, event_type: CBEventType, payload: JsonObject | None = None, *_: object, **__: object
    ) -> None:
        """Store, log and report the record of an ended stage."""
        del event_type
        record = (payload or {}).get(ACTIVITY_KEY)
        if not isinstance(record, ActivityRecord):
            return
        self.records.append(record)
        del self.records[: max(0, len(self.records) - self._limit)]
        if self._log is not None:
            level = logging.WARNING if record.outcome is not None and record.outcome.failed else logging.INFO
            self._log.log(level, "%s", json.dumps(redacted_leaves(record.to_dict()), ensure_ascii=False))
        if self._on_activity is not None:
            self._on_activity(record)


class _GuardedHandler(BaseCallbackHandler):
    """Forwards all events to a handler, without secrets; its exceptions are logged and not raised."""

    def __init__(self, handler: BaseCallbackHandler) -> None:
        super().__init__(list(handler.event_starts_to_ignore), list(handler.event_ends_to_ignore))
        self.handler = handler

    @classmethod
    def of(cls, handler: BaseCallbackHandler) -> _GuardedHandler:
        return handler if isinstance(handler, cls) else cls(handler)

    def on_event_start(
        self, event_type: CBEventType, payload: JsonObject | None = None, *args: object, **kwargs: object
    ) -> str:
        self._try(self.handler.on_event_start, event_type, _without_secrets(payload), *args, **kwargs)
        return str(kwargs.get("event_id", ""))

    def on_event_end(
        self, event_type: CBEventType, payload: JsonObject | None = None, *args: object, **kwargs: object
    ) -> None:
        self._try(self.handler.on_event_end, event_type, _without_secrets(payload), *args, **kwargs)

    def start_trace(self, *args: object, **kwargs: object) -> None:
        self._try(self.handler.start_trace, *args, **kwargs)

    def end_trace(self, *args: object, **kwargs: object) -> None:
        self._try(self.handler.end_trace, *args, **kwargs)

    def _try(self, method: Callable[..., object], *args: object, **kwargs: object) -> None:
        try:
            with outside_loop():
                method(*args, **kwargs)
        except Exception:  # noqa: BLE001 (any error of a handler is only logged)
            logger.warning("a callback handler failed: %s", type(self.handler).__name__, exc_info=True)


class GuardedCallbackManager(CallbackManager):
    """A callback manager that logs the exceptions of its handlers instead of raising them.

    Of another manager the current handlers are used at each event. Events are added to the trace of ``traces``.
    """

    def __init__(
        self, handlers: Sequence[BaseCallbackHandler] | CallbackManager, traces: GuardedCallbackManager | None = None
    ) -> None:
        # Not super().__init__: it would add the global handler a second time.
        self._source = handlers if isinstance(handlers, CallbackManager) else None
        self._own = [] if isinstance(handlers, CallbackManager) else [_GuardedHandler.of(one) for one in handlers]
        self._wrapped: dict[int, _GuardedHandler] = {}
        self._traces = traces
        self._own_trace_map: dict[str, list[str]] = defaultdict(list)

    @property
    def _trace_map(self) -> dict[str, list[str]]:
        """The event ids of the current trace, by parent id; LlamaIndex core reads this attribute."""
        return self._own_trace_map if self._traces is None else self._traces._trace_map  # noqa: SLF001 (of its own class)

    @_trace_map.setter
    def _trace_map(self, trace_map: dict[str, list[str]]) -> None:
        if self._traces is None:
            self._own_trace_map = trace_map
        else:
            self._traces._trace_map = trace_map  # noqa: SLF001 (same)

    @property
    def handlers(self) -> list[BaseCallbackHandler]:
        """The handlers, each in its one wrapper, which logs its exceptions and removes secrets from what it gets."""
        given = self._source.handlers if self._source is not None else []
        if not given:
            return [*self._own]
        live = [self._wrapped.setdefault(id(handler), _GuardedHandler.of(handler)) for handler in given]
        return [*live, *self._own]

    @handlers.setter
    def handlers(self, handlers: Sequence[BaseCallbackHandler]) -> None:
        self._source, self._own = None, [_GuardedHandler.of(handler) for handler in handlers]

    def on_event_start(self, *args: Any, **kwargs: Any) -> str:
        """Forward the start of an event; reset the trace map if it exceeds ``TRACE_LIMIT``."""
        if len(self._trace_map) > TRACE_LIMIT:
            self._trace_map = defaultdict(list)
        return super().on_event_start(*args, **kwargs)

    def add_handler(self, handler: BaseCallbackHandler) -> None:
        """Wrap and add a handler."""
        self._own.append(_GuardedHandler.of(handler))

    def remove_handler(self, handler: BaseCallbackHandler) -> None:
        """Remove a handler, given in its wrapped or original form."""
        self._own = [guard for guard in self._own if handler not in (guard, guard.handler)]
        if self._source is not None and handler in self._source.handlers:
            self._source.remove_handler(handler)


def _without_secrets(payload: JsonObject | None) -> JsonObject | None:
    """Return an event's payload, with a redacted error: servers repeat keys and headers in error messages."""
    error = (payload or {}).get(EventPayload.EXCEPTION)
    if payload is None or not isinstance(error, BaseException):
        return payload
    message = error_message(error)
    if message == (str(error) or type(error).__name__):
        return payload
    return {**payload, EventPayload.EXCEPTION: AgenticKBError(f"{type(error).__name__}: {message}")}


@contextmanager
def resumed_trace(manager: CallbackManager, events: Sequence[str]) -> Iterator[None]:
    """Open a trace whose events stand below others that have ended: a stream's synthesis below its query.

    ``events`` are their ids from the root on, as ``open_events`` returned them while the last was open.
    """
    with manager.as_trace("query"):
        global_stack_trace.set([*events])
        yield


def open_events() -> list[str]:
    """Return the ids of the callback events that are open in this context, from the root on."""
    return [*global_stack_trace.get()]


def guarded(manager: CallbackManager | None) -> GuardedCallbackManager:
    """Return a manager with the same handlers, wrapped; ``manager`` defaults to ``Settings.callback_manager``."""
    if isinstance(manager, GuardedCallbackManager):
        return manager
    return GuardedCallbackManager(manager or Settings.callback_manager)


class GuardedCallbacks(NotPickled):
    """Mixin with a ``callback_manager`` property whose handlers are always wrapped (``GuardedCallbackManager``)."""

    _guarded: GuardedCallbackManager

    @property
    def callback_manager(self) -> CallbackManager:
        """The component's callback manager."""
        return self._guarded

    @callback_manager.setter
    def callback_manager(self, manager: CallbackManager | None) -> None:
        self._guarded = guarded(manager)


def with_handlers(component: C, manager: CallbackManager | None = None) -> C:
    """Return a shallow copy of a component whose handlers, and those of ``manager``, are wrapped.

    The component itself is returned if no handler has to be added or wrapped; it is never changed.
    """
    own: CallbackManager | None = getattr(component, "callback_manager", None)
    every = [] if manager is None else list(manager.handlers)
    every += own.handlers if isinstance(own, CallbackManager) else ()
    handlers = {id(getattr(handler, "handler", handler)): handler for handler in every} if every else {}
    if not handlers or (isinstance(own, GuardedCallbackManager) and len(own.handlers) == len(handlers)):
        return component
    twin = copy.copy(component)
    traces = manager if isinstance(manager, GuardedCallbackManager) else None
    twin.callback_manager = GuardedCallbackManager(list(handlers.values()), traces)  # type: ignore[attr-defined]
    return twin
