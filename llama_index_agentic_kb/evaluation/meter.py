"""What each question costs, from LlamaIndex's callback events: the same counting for every system."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload

from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.llm.replies import text_of, usage_of
from llama_index_agentic_kb.replay import RecordedReply

__all__ = ["Cost", "Meter", "Reading"]


@dataclass(slots=True)
class Cost:
    """What one question cost.

    Args:
        llm_calls: Calls of language models.
        input_tokens: Tokens read, as billed; without a bill, as LlamaIndex's tokenizer counts.
        output_tokens: Tokens written, likewise.
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
class Reading:
    """What was counted for one question: its cost, and the replies of language models, in order."""

    cost: Cost = field(default_factory=Cost)
    replies: list[RecordedReply] = field(default_factory=list)


class Meter(BaseCallbackHandler):
    """A callback handler that counts calls, and keeps replies, for each question apart.

    It belongs to the models (and to plain retrievers) that a question uses; questions may be asked side by side, for
    each has a context of its own. What happens outside a question's context is not counted.
    """

    def __init__(self) -> None:
        super().__init__([], [])
        self._question: ContextVar[Reading | None] = ContextVar("question", default=None)
        self._open: dict[str, tuple[Reading, CBEventType, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def question(self) -> Iterator[Reading]:
        """Count what happens in this context, and in those made from it."""
        reading = Reading()
        token = self._question.set(reading)
        try:
            yield reading
        finally:
            self._question.reset(token)

    def start_trace(self, trace_id: str | None = None) -> None:
        """Ignore traces."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Ignore traces."""

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
        reading = self._question.get()
        if reading is None or event_type not in {CBEventType.LLM, CBEventType.EMBEDDING, CBEventType.RETRIEVE}:
            return event_id
        with self._lock:
            if event_type is CBEventType.LLM:
                if parent_id in self._open and self._open[parent_id][1] is CBEventType.LLM:
                    return event_id
                reading.cost.llm_calls += 1
            self._open[event_id] = reading, event_type, payload or {}
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **_: Any
    ) -> None:
        """Count an event."""
        with self._lock:
            opened = self._open.pop(event_id, None)
            if opened is None:
                return
            reading, kind, asked = opened
            if kind is CBEventType.LLM:
                _count_reply(reading, asked, payload or {})
            elif event_type is CBEventType.RETRIEVE:
                reading.cost.searches += 1
            else:
                reading.cost.embedding_calls += 1
                reading.cost.embedded_texts += len((payload or {}).get(EventPayload.CHUNKS) or ())


def _count_reply(reading: Reading, asked: dict[str, Any], ended: dict[str, Any]) -> None:
    """Count a language model's tokens, and keep its reply; a call that failed has none."""
    response = ended.get(EventPayload.RESPONSE) or ended.get(EventPayload.COMPLETION)
    if response is None:
        return
    messages: list[ChatMessage] = list(asked.get(EventPayload.MESSAGES) or ())
    texts = [message.content or "" for message in messages] or [str(asked.get(EventPayload.PROMPT) or "")]
    content, usage = text_of(response), usage_of(response)
    reading.cost.input_tokens += usage.input_tokens or count_tokens("\n".join(texts))
    reading.cost.output_tokens += usage.output_tokens or count_tokens(content)
    if content and texts[-1]:
        reading.replies.append(RecordedReply.of(texts[-1], content))
