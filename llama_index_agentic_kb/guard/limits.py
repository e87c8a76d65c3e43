"""How much one request may ask for: what is larger is refused before anything is spent on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.schema.filters import Condition, FilterNode
from llama_index_agentic_kb.schema.request import RetrievalRequest

__all__ = ["DEFAULT_INPUT_LIMITS", "InputLimits"]


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The most that one request may hold. Every number must be at least 1.

    Args:
        question_characters: Characters of the question, or of one intent.
        messages: Messages of the conversation, the question counted.
        conversation_characters: Characters of all messages together.
        parts: Pieces of content, texts and images, of all messages together.
        intents: Intents of one request.
        sources: Entries of ``knowledgeSourceParams``.
        name_characters: Characters of a source's name there.
        filter_characters: Characters of one source's ``filterAddOn``.
        filter_values: Values that one source's ``filters`` compare with, in all their conditions.
        filter_text: Characters of the keys and values of one source's ``filters``.
        filter_levels: Groups inside each other in one source's ``filters``.

    Raises:
        ConfigurationError: A number is below 1.
    """

    question_characters: int = 32_000
    messages: int = 1_000
    conversation_characters: int = 1_000_000
    parts: int = 10_000
    intents: int = 100
    sources: int = 1_000
    name_characters: int = 1_000
    filter_characters: int = 32_000
    filter_values: int = 10_000
    filter_text: int = 1_000_000
    filter_levels: int = 64

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
        yield "messages: pieces of content", sum(len(message.content) for message in messages), "parts"
        lengths = [sum(len(getattr(part, "text", "")) for part in message.content) for message in messages]
        yield "messages: characters", sum(lengths), "conversation_characters"
        yield "messages: characters of the question", len(request.question) if messages else 0, "question_characters"
        for number, intent in enumerate(intents):
            yield f"intents[{number}].search: characters", len(intent.search), "question_characters"
        yield "knowledgeSourceParams: entries", len(request.knowledge_source_params), "sources"
        for number, params in enumerate(request.knowledge_source_params):
            name = params.knowledge_source_name
            yield f"knowledgeSourceParams[{number}].knowledgeSourceName: characters", len(name), "name_characters"
            where = f"knowledgeSourceParams[{name}]"
            yield f"{where}.filterAddOn: characters", len(params.filter_add_on or ""), "filter_characters"
            if params.filters is not None:
                yield from _sizes_of(params.filters, f"{where}.filters", self.filter_levels)


def _sizes_of(tree: FilterNode, where: str, most_levels: int) -> Iterator[tuple[str, int, str]]:
    """Give the sizes of a filter, level by level: one that is too deep is not gone through to its end."""
    level: list[FilterNode] = [tree]
    levels = values = characters = 0
    while level and levels <= most_levels:
        levels += 1
        conditions = [one for one in level if isinstance(one, Condition)]
        values += sum(len(one.values) for one in conditions)
        characters += sum(len(one.key) + sum(len(str(value)) for value in one.values) for one in conditions)
        level = [child for one in level if not isinstance(one, Condition) for child in one.filters]
    yield f"{where}: levels", levels, "filter_levels"
    yield f"{where}: values", values, "filter_values"
    yield f"{where}: characters", characters, "filter_text"


DEFAULT_INPUT_LIMITS: Final = InputLimits()
"""What a retriever allows unless it is given its own."""
