"""How much one request may ask for: what is larger is refused before anything is spent on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.schema.filters import Condition, FilterNode
from llama_index_agentic_kb.schema.request import RetrievalRequest

MAX_NAME: Final = 1_000
"""Characters of a source's name."""

MAX_FILTER_LEVELS: Final = 64
"""Groups inside each other in one filter: it is walked by recursion."""

MAX_CHARACTERS_PER_VALUE: Final = 100
"""Characters of a filter, for each value that it may hold."""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The most that one request may hold. Every number must be at least 1.

    Args:
        question_characters: Characters of the question, of one intent, or of one ``filterAddOn``. Default 32,000.
        conversation_characters: Characters of all messages together. Default 1,000,000.
        entries: Messages of the conversation, its pieces of content, intents, and ``knowledgeSourceParams``, each.
            Default 1,000.
        filter_values: Values that one source's ``filters`` compare with, in all their conditions; a hundred times as
            many characters. Default 10,000.

    Raises:
        ConfigurationError: A number is below 1.
    """

    question_characters: int = 32_000
    conversation_characters: int = 1_000_000
    entries: int = 1_000
    filter_values: int = 10_000

    def __post_init__(self) -> None:
        """Refuse what lets nothing through."""
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ConfigurationError(f"InputLimits.{item.name} must be at least 1: {getattr(self, item.name)}")

    def check(self, request: RetrievalRequest) -> None:
        """Refuse a request that holds more.

        Raises:
            InvalidRequestError: It does; the message names the field, its size and the limit.
        """
        for field_name, size, limit in self._sizes(request):
            maximum = limit if isinstance(limit, int) else getattr(self, limit)
            if size > maximum:
                named = "" if isinstance(limit, int) else f" (InputLimits.{limit})"
                raise InvalidRequestError(f"{field_name}: {size:,} are too many; at most {maximum:,}{named}")

    def _sizes(self, request: RetrievalRequest) -> Iterator[tuple[str, int, str | int]]:
        """Yield fields with sizes and limits; counts first, so that no long list is read whole for nothing."""
        messages, intents = request.messages or [], request.intents or []
        yield "messages: messages", len(messages), "entries"
        yield "intents: intents", len(intents), "entries"
        yield "messages: pieces of content", sum([len(message.content) for message in messages]), "entries"
        lengths = [len(getattr(part, "text", "")) for message in messages for part in message.content]
        yield "messages: characters", sum(lengths), "conversation_characters"
        asked = len(request.question) if messages else 0
        yield "messages: characters of the question", asked, "question_characters"
        for number, intent in enumerate(intents):
            yield f"intents[{number}].search: characters", len(intent.search), "question_characters"
        yield "knowledgeSourceParams: entries", len(request.knowledge_source_params), "entries"
        for number, params in enumerate(request.knowledge_source_params):
            name = params.knowledge_source_name
            yield f"knowledgeSourceParams[{number}].knowledgeSourceName: characters", len(name), MAX_NAME
            where = f"knowledgeSourceParams[{name}]"
            yield f"{where}.filterAddOn: characters", len(params.filter_add_on or ""), "question_characters"
            if params.filters is not None:
                yield from self._sizes_of(params.filters, f"{where}.filters")

    def _sizes_of(self, tree: FilterNode, where: str) -> Iterator[tuple[str, int, str | int]]:
        """Yield the sizes of a filter, level by level: one that is too deep is not walked to its end."""
        level: list[FilterNode] = [tree]
        levels = values = characters = 0
        while level and levels <= MAX_FILTER_LEVELS:
            levels += 1
            conditions = [node for node in level if isinstance(node, Condition)]
            values += sum(len(node.values) for node in conditions)
            characters += sum(len(node.key) + sum(len(str(value)) for value in node.values) for node in conditions)
            level = [child for node in level if not isinstance(node, Condition) for child in node.filters]
        yield f"{where}: levels", levels, MAX_FILTER_LEVELS
        yield f"{where}: values", values, "filter_values"
        maximum = MAX_CHARACTERS_PER_VALUE * self.filter_values
        yield f"{where}: characters", characters, maximum


DEFAULT_INPUT_LIMITS: Final = InputLimits()
"""What a retriever allows unless it is given its own."""
