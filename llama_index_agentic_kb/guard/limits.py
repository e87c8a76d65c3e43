"""Size limits of a request: larger requests are rejected before any work is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.schema.filters import Condition, FilterNode
from llama_index_agentic_kb.schema.request import RetrievalRequest

MAX_NAME: Final = 1_000  # characters of a source's name
MAX_FILTER_LEVELS: Final = 64  # a filter is traversed recursively
MAX_CHARACTERS_PER_VALUE: Final = 100  # of a filter


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The maximum size of a request. Every limit must be at least 1.

    Args:
        question_characters: The maximum length of the question, of instructions, of each intent and of each
            ``filterAddOn`` in characters. Default 32,000.
        conversation_characters: The maximum length of all messages together in characters. Default 1,000,000.
        entries: The maximum number of messages, of their content parts, of intents, and of ``knowledgeSourceParams``.
            Default 1,000.
        filter_values: The maximum number of values in one source's ``filters``; a filter may have a hundred times as
            many characters. Default 10,000.

    Raises:
        ConfigurationError: A number is below 1.
    """

    question_characters: int = 32_000
    conversation_characters: int = 1_000_000
    entries: int = 1_000
    filter_values: int = 10_000

    def __post_init__(self) -> None:
        """Check that every limit is at least 1."""
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ConfigurationError(f"InputLimits.{item.name} must be at least 1: {getattr(self, item.name)}")

    def check(self, request: RetrievalRequest) -> None:
        """Raise ``InvalidRequestError`` if a request exceeds a limit; it names the field, its size and the limit."""
        for field_name, size, limit in self._sizes(request):
            maximum = limit if isinstance(limit, int) else getattr(self, limit)
            if size > maximum:
                named = "" if isinstance(limit, int) else f" (InputLimits.{limit})"
                raise InvalidRequestError(f"{field_name}: {size:,} are too many; at most {maximum:,}{named}")

    def _sizes(self, request: RetrievalRequest) -> Iterator[tuple[str, int, str | int]]:
        """Yield fields with sizes and limits; counts come first, so that overlong lists are rejected unread."""
        messages, intents = request.messages or [], request.intents or []
        yield "messages: messages", len(messages), "entries"
        yield "intents: intents", len(intents), "entries"
        yield "messages: pieces of content", sum([len(message.content) for message in messages]), "entries"
        lengths = [len(getattr(part, "text", "")) for message in messages for part in message.content]
        yield "messages: characters", sum(lengths), "conversation_characters"
        asked = len(request.question) if messages else 0
        yield "messages: characters of the question", asked, "question_characters"
        yield "retrievalInstructions: characters", len(request.retrieval_instructions or ""), "question_characters"
        yield "answerInstructions: characters", len(request.answer_instructions or ""), "question_characters"
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
        yield f"{where}: characters", characters, MAX_CHARACTERS_PER_VALUE * self.filter_values


DEFAULT_INPUT_LIMITS: Final = InputLimits()
