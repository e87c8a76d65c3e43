"""What each question costs, as LlamaIndex's callback events tell it: the same counting for every system."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload

from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.llm.replies import text_of, usage_of
from llama_index_agentic_kb.replay import RecordedReply

__all__ = ["Cost", "Meter", "Metered"]

_COUNTED: Final = (CBEventType.LLM, CBEventType.EMBEDDING, CBEventType.RETRIEVE)


@dataclass(slots=True)
class Cost:
    """What one question cost.

    Args:
        llm_calls: Calls of language models.
        input_tokens: What they billed as read; where they did not say, what LlamaIndex's tokenizer counts.
        output_tokens: The same of what they wrote.
        embedding_calls: Calls of embedding models.
        embedded_texts: Texts that they embedded; those found in a cache are not counted.
        searches: Searches of sources.
    """

    llm_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    embedding_calls: int = 0
    embedded_texts: int = 0
    searches: int = 0


@dataclass(slots=True)
class Metered:
    """What was heard of one question.

    Args:
        cost: What it cost.
        replies: What language models replied, in order.
    """

    cost: Cost = field(default_factory=Cost)
    replies: list[RecordedReply] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Begun:
    """An event that has begun."""

    metered: Metered
    is_llm: bool = False
    payload: dict[str, Any] = field(default_factory=dict)


class Meter(BaseCallbackHandler):
    """A callback handler that counts calls, and keeps replies, for each question apart.

    It belongs to the models (and to plain retrievers) that a question uses; questions may be asked side by side, for
    each has a context of its own. What happens in no question's context is not counted.
    """

    def __init__(self) -> None:
        super().__init__([], [])
        self._question: ContextVar[Metered | None] = ContextVar("question", default=None)
        self._open: dict[str, _Begun] = {}
        self._lock = threading.Lock()

    @contextmanager
    def question(self) -> Iterator[Metered]:
        """Count what happens in this context, and those made from it."""
        metered = Metered()
        token = self._question.set(metered)
        try:
            yield metered
        finally:
            self._question.reset(token)

    def start_trace(self, trace_id: str | None = None) -> None:
        """Traces are none of its business."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Traces are none of its business."""

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: dict[str, Any] | None = None,
        event_id: str = "",
        parent_id: str = "",
        **_: Any,
    ) -> str:
        """Note whose event it is: a stream may end in another context.

        A model's chat that is made of its own completion (core's ``CustomLLM``) is one call.
        """
        metered = self._question.get()
        if metered is None or event_type not in _COUNTED:
            return event_id
        with self._lock:
            if event_type is CBEventType.LLM and parent_id in self._open and self._open[parent_id].is_llm:
                return event_id
            self._open[event_id] = _Begun(metered, event_type is CBEventType.LLM, payload or {})
            metered.cost.llm_calls += event_type is CBEventType.LLM
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **_: Any
    ) -> None:
        """Count an event."""
        with self._lock:
            begun, ended = self._open.pop(event_id, None), payload or {}
            if begun is None:
                return
            cost = begun.metered.cost
            if begun.is_llm:
                _count_reply(begun.metered, begun.payload, ended)
            elif event_type is CBEventType.RETRIEVE:
                cost.searches += 1
            elif event_type is CBEventType.EMBEDDING:
                cost.embedding_calls += 1
                cost.embedded_texts += len(ended.get(EventPayload.CHUNKS) or ())


def _count_reply(metered: Metered, begun: dict[str, Any], ended: dict[str, Any]) -> None:
    """Count a language model's tokens, and keep its reply; a call that failed has none."""
    cost = metered.cost
    response = ended.get(EventPayload.RESPONSE) or ended.get(EventPayload.COMPLETION)
    if response is None:
        return
    messages: list[ChatMessage] = list(begun.get(EventPayload.MESSAGES) or ())
    prompt = str(begun.get(EventPayload.PROMPT) or "")
    asked = "\n".join(message.content or "" for message in messages) or prompt
    last = (messages[-1].content or "" if messages else "") or prompt
    content, usage = text_of(response), usage_of(response)
    cost.input_tokens += count_tokens(asked) if usage.input_tokens is None else usage.input_tokens
    cost.output_tokens += count_tokens(content) if usage.output_tokens is None else usage.output_tokens
    if content and last:
        metered.replies.append(RecordedReply.of(last, content))
