"""The account as LlamaIndex sees it: callback events, dispatcher events, and a handler that collects it.

Handlers are guarded: one of the user's that raises is logged and never breaks a query.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.settings import Settings

from llama_index_agentic_kb._aio import outside_loop
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account.logs import activity_logger, logger, redacted_leaves
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import AgenticKBError
from llama_index_agentic_kb.schema import ActivityRecord

ACTIVITY_KEY: Final = "agentic_kb.activity"
"""Where a callback event's payload holds its ``ActivityRecord``."""

TRACE_LIMIT: Final = 10_000
"""Parents that a manager's trace map holds at most: a twin inside another manager's trace never sees it end."""

C = TypeVar("C")


class ActivityStartEvent(BaseEvent):
    """A stage has begun. ``activity`` is the open record's wire form."""

    activity: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name the event's class."""
        return "AgenticKBActivityStartEvent"


class ActivityEndEvent(BaseEvent):
    """A stage has ended. ``activity`` is the closed record's wire form."""

    activity: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name the event's class."""
        return "AgenticKBActivityEndEvent"


class ActivityCallbackHandler(BaseCallbackHandler):
    """Collects the activity of every query and logs it.

    Each closed record goes to the logger ``llama_index_agentic_kb.activity`` as one line of JSON (level INFO; a
    failed stage WARNING), to ``on_activity`` if given, and to ``records``. In the log, what looks like a secret is
    ``***`` in questions and queries too.

    Args:
        on_activity: Called with each closed record.
        log: Whether to log. Default True.
        limit: How many records are kept; older ones are let go. Default 10,000.
    """

    def __init__(
        self, on_activity: Callable[[ActivityRecord], None] | None = None, *, log: bool = True, limit: int = 10_000
    ) -> None:
        super().__init__(event_starts_to_ignore=[], event_ends_to_ignore=[])
        self.records: list[ActivityRecord] = []
        self._on_activity = on_activity
        self._log = activity_logger if log else None
        self._limit = limit

    def on_event_start(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", *_: Any, **__: Any
    ) -> str:
        """Ignore the start of an event."""
        del event_type, payload
        return event_id

    def on_event_end(self, event_type: CBEventType, payload: dict[str, Any] | None = None, *_: Any, **__: Any) -> None:
        """Take the record of an ended stage."""
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

    def start_trace(self, trace_id: str | None = None) -> None:
        """Traces are not needed: records name what they belong to."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Traces are not needed."""


class _GuardedHandler(BaseCallbackHandler):
    """Passes everything on to a handler; what it raises is logged, and goes no further."""

    def __init__(self, handler: BaseCallbackHandler) -> None:
        super().__init__(list(handler.event_starts_to_ignore), list(handler.event_ends_to_ignore))
        self.handler = handler

    def on_event_start(self, *args: Any, **kwargs: Any) -> str:
        """Pass the start of an event on."""
        self._try(self.handler.on_event_start, *args, **kwargs)
        return str(kwargs.get("event_id", ""))

    def on_event_end(self, *args: Any, **kwargs: Any) -> None:
        """Pass the end of an event on."""
        self._try(self.handler.on_event_end, *args, **kwargs)

    def start_trace(self, *args: Any, **kwargs: Any) -> None:
        """Pass the start of a trace on."""
        self._try(self.handler.start_trace, *args, **kwargs)

    def end_trace(self, *args: Any, **kwargs: Any) -> None:
        """Pass the end of a trace on."""
        self._try(self.handler.end_trace, *args, **kwargs)

    def _try(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            with outside_loop():
                method(*args, **kwargs)
        except Exception:  # noqa: BLE001 (whatever it is, it stays here and is logged)
            logger.warning("a callback handler failed: %s", type(self.handler).__name__, exc_info=True)


def _guard(handler: BaseCallbackHandler) -> _GuardedHandler:
    return handler if isinstance(handler, _GuardedHandler) else _GuardedHandler(handler)


class GuardedCallbackManager(CallbackManager):
    """A manager whose handlers can't break what they watch.

    Args:
        handlers: They are wrapped, not changed. Those wrapped already are taken as they are. A manager stands for
            the handlers that it has at any time.
        traces: Whose trace its events belong to; None is its own.
    """

    def __init__(
        self, handlers: Sequence[BaseCallbackHandler] | CallbackManager, traces: GuardedCallbackManager | None = None
    ) -> None:
        # Not super().__init__: it would add the global handler a second time.
        self._source = handlers if isinstance(handlers, CallbackManager) else None
        self._own = [] if isinstance(handlers, CallbackManager) else [_guard(handler) for handler in handlers]
        self._wrapped: dict[int, _GuardedHandler] = {}
        self._traces = traces
        self._own_trace_map: dict[str, list[str]] = defaultdict(list)

    @property
    def _trace_map(self) -> dict[str, list[str]]:
        """The events of the trace under way, by parent; core's name."""
        return self._own_trace_map if self._traces is None else self._traces._trace_map  # noqa: SLF001 (of its own class)

    @_trace_map.setter
    def _trace_map(self, trace_map: dict[str, list[str]]) -> None:
        if self._traces is None:
            self._own_trace_map = trace_map
        else:
            self._traces._trace_map = trace_map  # noqa: SLF001 (same)

    @property
    def handlers(self) -> list[BaseCallbackHandler]:
        """The handlers, guarded; each one's guard is made once."""
        given = self._source.handlers if self._source is not None else []
        live = [self._wrapped.setdefault(id(handler), _guard(handler)) for handler in given]
        return [*live, *self._own]

    @handlers.setter
    def handlers(self, handlers: Sequence[BaseCallbackHandler]) -> None:
        self._source, self._own = None, [_guard(handler) for handler in handlers]

    def on_event_start(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> str:
        """Pass an event on without secrets; forget the trace map where nobody ends the trace that resets it."""
        if len(self._trace_map) > TRACE_LIMIT:
            self._trace_map = defaultdict(list)
        return super().on_event_start(event_type, _without_secrets(payload), *args, **kwargs)

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Pass an event on without secrets."""
        super().on_event_end(event_type, _without_secrets(payload), *args, **kwargs)

    def add_handler(self, handler: BaseCallbackHandler) -> None:
        """Add a handler, guarded."""
        self._own.append(_guard(handler))

    def remove_handler(self, handler: BaseCallbackHandler) -> None:
        """Remove a handler, guarded or not."""
        self._own = [guard for guard in self._own if handler not in (guard, guard.handler)]
        if self._source is not None and handler in self._source.handlers:
            self._source.remove_handler(handler)


def _without_secrets(payload: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return an event's payload; an error in it that quotes secrets is replaced by one that doesn't.

    LlamaIndex tells handlers of its clients' own errors, and servers repeat keys and headers in them.
    """
    error = (payload or {}).get(EventPayload.EXCEPTION)
    if payload is None or not isinstance(error, BaseException):
        return payload
    message = error_message(error)
    if message == (str(error) or type(error).__name__):
        return payload
    return {**payload, EventPayload.EXCEPTION: AgenticKBError(f"{type(error).__name__}: {message}")}


def guarded(manager: CallbackManager | None) -> GuardedCallbackManager:
    """Return a manager with the same handlers, guarded; None stands for ``Settings.callback_manager``."""
    if isinstance(manager, GuardedCallbackManager):
        return manager
    return GuardedCallbackManager(manager or Settings.callback_manager)


class GuardedCallbacks(NotPickled):
    """Returns a component a ``callback_manager`` that is guarded, however it is set."""

    _guarded: GuardedCallbackManager

    @property
    def callback_manager(self) -> CallbackManager:
        """The component's callback manager."""
        return self._guarded

    @callback_manager.setter
    def callback_manager(self, manager: CallbackManager | None) -> None:
        self._guarded = guarded(manager)


def with_handlers(component: C, manager: CallbackManager) -> C:
    """Return a component (a language model, an embedding model) that tells our handlers and its own, all guarded.

    Args:
        component: Left as it is; where there is nothing to add or guard, it is returned itself.
        manager: Ours.

    Returns:
        A shallow copy with a manager that has each handler once.
    """
    own: CallbackManager | None = getattr(component, "callback_manager", None)
    own_handlers = list(own.handlers) if isinstance(own, CallbackManager) else []
    handlers = {id(getattr(h, "handler", h)): h for h in [*manager.handlers, *own_handlers]}
    if not handlers or (isinstance(own, GuardedCallbackManager) and len(own.handlers) == len(handlers)):
        return component
    twin = copy.copy(component)
    traces = manager if isinstance(manager, GuardedCallbackManager) else None
    twin.callback_manager = GuardedCallbackManager(list(handlers.values()), traces)  # type: ignore[attr-defined]
    return twin


def guard_component(component: C) -> C:
    """Return a component whose own handlers are guarded: itself where it has none, else a shallow copy."""
    own: CallbackManager | None = getattr(component, "callback_manager", None)
    if not isinstance(own, CallbackManager) or not own.handlers:
        return component
    return with_handlers(component, own)
