"""What a request is about: the question, and the conversation that gives it its meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llama_index.core.base.llms.types import ChatMessage

from llama_index_agentic_kb.planning.classification import ClassificationSpec
from llama_index_agentic_kb.schema import Message, RetrievalRequest

__all__ = ["Scope"]


@dataclass(frozen=True, slots=True)
class Scope:
    """The question and what was said before it.

    Contracting the searched documents by the conversation has its place here; today the scope is the whole of each
    source.

    Args:
        question: The last user message.
        history: (role, text) pairs before it, oldest first.
        intents: Queries that need no planning; then there is no single question.
        classification: What the question is to be classified as; None classifies nothing.
    """

    question: str
    history: tuple[tuple[str, str], ...] = ()
    intents: tuple[str, ...] = field(default=())
    classification: ClassificationSpec | None = None

    @classmethod
    def of(
        cls,
        request: RetrievalRequest,
        memory: Sequence[ChatMessage] = (),
        classification: ClassificationSpec | None = None,
    ) -> Scope:
        """Read a request; ``memory`` stands in for the history where the request has none."""
        history = _pairs(request.history) or _remembered(memory, request.question)
        intents = tuple(intent.search for intent in request.intents or ())
        return cls(request.question, history, intents, classification)


def _pairs(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, message.text) for message in messages if message.text.strip())


def _remembered(memory: Sequence[ChatMessage], question: str) -> tuple[tuple[str, str], ...]:
    """Chat engines differ in when they store the user's message: it is no history of itself."""
    pairs = [(message.role.value, message.content or "") for message in memory]
    if pairs and pairs[-1][0] == "user" and pairs[-1][1].strip() == question:
        pairs.pop()
    return tuple((role, text) for role, text in pairs if text.strip() and role in ("user", "assistant"))
