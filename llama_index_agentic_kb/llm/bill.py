"""Adds up what model calls cost: the calls of this package, and those that a LlamaIndex component makes by itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeVar

from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.llms import LLM
from pydantic import BaseModel

from llama_index_agentic_kb.account.activity_log import ActivityLog
from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.llm.calls import share_clients
from llama_index_agentic_kb.llm.replies import Usage, usage_of
from llama_index_agentic_kb.schema import ModelAnswerSynthesisActivity, ModelInfo, Outcome
from llama_index_agentic_kb.schema.activity import Purpose

C = TypeVar("C")

_bill: ContextVar[Usage | None] = ContextVar("agentic_kb_bill", default=None)


def current_bill() -> Usage | None:
    """Return the bill of the innermost ``billed`` block; None outside of one."""
    return _bill.get()


@contextmanager
def billed() -> Iterator[Usage]:
    """Yield a ``Usage`` to which the token usage of every model call inside the ``with`` block is added."""
    bill, outer = Usage(), _bill.get()
    _bill.set(bill)
    try:
        yield bill
    finally:
        _bill.set(outer)


@contextmanager
def recorded_calls(log: ActivityLog, purpose: Purpose) -> Iterator[None]:
    """Record the model calls of the ``with`` block in one activity record of their own; without calls there is none."""
    since, outcome = time.monotonic(), Outcome.ERROR
    with billed() as bill:
        try:
            yield
            outcome = Outcome.OK
        finally:
            if bill.calls:
                model = None if bill.model is None else ModelInfo(model_name=bill.model)
                kind, event = ModelAnswerSynthesisActivity, CBEventType.AGENT_STEP
                record = log.open(kind, event, since=since, purpose=purpose, model=model, calls=bill.calls)
                log.close(record, outcome=outcome, input_tokens=bill.input_tokens, output_tokens=bill.output_tokens)


@contextmanager
def metered(component: C, *, only_core: bool = False) -> Iterator[C]:
    """Yield a copy of a LlamaIndex component whose model's calls are added to the current bill.

    Without a bill, or if the component has no model of its own, it is the component itself. With ``only_core``, so is
    a component of a class that is not LlamaIndex's: a copy may lose what it changes in itself.
    """
    bill, fields = _bill.get(), ("llm", "_llm")
    name = next((name for name in fields if isinstance(getattr(component, name, None), LLM)), "")
    is_copied = not only_core or type(component).__module__.startswith("llama_index.")
    if bill is None or not name or not is_copied:
        yield component
        return
    meter, own = _Meter(), getattr(component, name)
    share_clients(own)
    model = with_handlers(own, CallbackManager([meter]))
    twin: Any = component.model_copy() if isinstance(component, BaseModel) else copy.copy(component)
    setattr(twin, name, model)
    for key, value in [*vars(twin).items()]:
        if getattr(value, "__self__", None) is component:  # a method of the original, which calls the original's model
            setattr(twin, key, MethodType(value.__func__, twin))
    try:
        yield twin
    finally:
        for usage in meter.usages:
            bill.add(usage)


class _Meter(BaseCallbackHandler):
    """Collects the usage of a model's calls; one inside another, such as ``complete`` inside ``chat``, is no other."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.usages: list[Usage] = []
        self._open: dict[str, bool] = {}
        """By event id, whether the call is inside another."""

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: dict[str, Any] | None = None,  # noqa: ARG002
        event_id: str = "",
        parent_id: str = "",
        **_: Any,
    ) -> str:
        """Note that a call began."""
        if event_type is CBEventType.LLM:
            self._open[event_id] = parent_id in self._open
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **_: Any
    ) -> None:
        """Count a call that ended with a reply."""
        ended = payload or {}
        response = ended.get(EventPayload.RESPONSE) or ended.get(EventPayload.COMPLETION)
        if event_type is CBEventType.LLM and not self._open.pop(event_id, False) and response is not None:
            self.usages.append(usage_of(response))

    def start_trace(self, trace_id: str | None = None) -> None:
        """Ignore the start of a trace."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Ignore the end of a trace."""
