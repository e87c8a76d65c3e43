"""What a request is about: the question, and the conversation that gives it its meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llama_index.core.base.llms.types import ChatMessage

from llama_index_agentic_kb.planning.classification import ClassificationSpec
from llama_index_agentic_kb.schema import RetrievalRequest

__all__ = ["Scope"]


@dataclass(frozen=True, slots=True)
class Scope:
    """The question and what was said before it.

    Args:
        question: The last user message.
        history: (role, text) pairs before it, oldest first.
        intents: Queries that need no planning; then there is no single question.
        classification: What the question is to be classified as; None classifies nothing.
    """

    question: str
    history: tuple[tuple[str, str], ...] = ()
    intents: tuple[str, ...] = ()
    classification: ClassificationSpec | None = None

    @classmethod
    def of(
        cls,
        request: RetrievalRequest,
        memory: Sequence[ChatMessage] = (),
        classification: ClassificationSpec | None = None,
    ) -> Scope:
        """Return the scope of a request; ``memory`` is the history where the request has none."""
        said = tuple((message.role, message.text) for message in request.history if message.text.strip())
        intents = tuple(intent.search for intent in request.intents or ())
        return cls(request.question, said or _remembered(memory, request.question), intents, classification)


def _remembered(memory: Sequence[ChatMessage], question: str) -> tuple[tuple[str, str], ...]:
    """Return a memory's turns without the question: some chat engines store it before they ask, some after."""
    pairs = [(message.role.value, message.content or "") for message in memory]
    if pairs and pairs[-1][0] == "user" and pairs[-1][1].strip() == question:
        pairs.pop()
    return tuple((role, text) for role, text in pairs if text.strip() and role in ("user", "assistant"))
