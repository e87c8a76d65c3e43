"""How much one request may ask for: what is larger is refused before anything is spent on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.schema.request import RetrievalRequest

__all__ = ["DEFAULT_INPUT_LIMITS", "InputLimits"]


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The most that one request may hold. Every number must be at least 1.

    Args:
        question_characters: Characters of the question, or of one intent.
        messages: Messages of the conversation, the question counted.
        conversation_characters: Characters of all messages together.
        intents: Intents of one request.
        filter_characters: Characters of one source's ``filterAddOn``.

    Raises:
        ConfigurationError: A number is below 1.
    """

    question_characters: int = 32_000
    messages: int = 1_000
    conversation_characters: int = 1_000_000
    intents: int = 100
    filter_characters: int = 32_000

    def __post_init__(self) -> None:
        """Refuse what lets nothing through."""
        for one in fields(self):
            if getattr(self, one.name) < 1:
                raise ConfigurationError(f"InputLimits.{one.name} must be at least 1: {getattr(self, one.name)}")

    def check(self, request: RetrievalRequest) -> None:
        """Refuse a request that holds more.

        Raises:
            InvalidRequestError: It does; the message names the field, its size and the limit.
        """
        for field_name, size, limit in self._sizes(request):
            most = getattr(self, limit)
            if size > most:
                raise InvalidRequestError(
                    f"{field_name}: {size:,} are too many; at most {most:,} (InputLimits.{limit})"
                )

    def _sizes(self, request: RetrievalRequest) -> Iterator[tuple[str, int, str]]:
        """Give fields with their sizes and limits; counts first, so that no long list is read whole for nothing."""
        messages, intents = request.messages or [], request.intents or []
        yield "messages: messages", len(messages), "messages"
        yield "intents: intents", len(intents), "intents"
        lengths = [sum(len(getattr(part, "text", "")) for part in message.content) for message in messages]
        yield "messages: characters", sum(lengths), "conversation_characters"
        yield "messages: characters of the question", len(request.question) if messages else 0, "question_characters"
        for number, intent in enumerate(intents):
            yield f"intents[{number}].search: characters", len(intent.search), "question_characters"
        for params in request.knowledge_source_params:
            where = f"knowledgeSourceParams[{params.knowledge_source_name}].filterAddOn: characters"
            yield where, len(params.filter_add_on or ""), "filter_characters"


DEFAULT_INPUT_LIMITS: Final = InputLimits()
"""What a retriever allows unless it is given its own."""
