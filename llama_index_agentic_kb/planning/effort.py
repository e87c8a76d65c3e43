"""Limits: what each level of reasoning effort may spend, and how large a request may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from llama_index_agentic_kb.account import Budget
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, by_value
from llama_index_agentic_kb.schema import EffortUse, FilterNode, ReasoningEffort, RetrievalRequest
from llama_index_agentic_kb.schema.filters import Condition

MAX_SOURCES: Final = 10  # of one planned sub-query; the question itself is searched in all sources
MAX_RANKED: Final = 50  # fused documents passed to rerankers and postprocessors; a cross-encoder scores 50 in about 1 s


@dataclass(frozen=True, slots=True)
class EffortLimits:
    """The limits of one level of effort. Every limit except ``revisions`` must be above 0.

    Args:
        sub_queries: Maximum number of planned sub-queries (without the original question), or of intents.
        rounds: Maximum number of search rounds. With 3, a sub-query may depend on answers found in two earlier ones.
            With 1, all sub-queries are independent and the model reads no passages.
        revisions: How often the model checks the evidence for gaps. Each revision may add one round to ``rounds``,
            and ``sub_queries`` further searches.
        tokens: Input and output tokens of the language model before the answer, after which it is not called again.
        searches: Maximum number of searches, one per (sub-query, source) pair. Further ones are skipped and reported.
        seconds: Time limit of the whole retrieval, unless the request's deadline is earlier.
        documents_per_search: Maximum number of documents in each ranked list of a search.
        documents: Number of documents in the result, unless the request sets one.
        planning_seconds: Time limit of the planning call, and of each model call between rounds.
        search_seconds: Time limit of one search, unless the source sets its own.
    """

    sub_queries: int = 3
    rounds: int = 1
    revisions: int = 0
    tokens: int = 20_000
    searches: int = 200
    seconds: float = 60.0
    documents_per_search: int = 50
    documents: int = 10
    planning_seconds: float = 20.0
    search_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Raise ``ConfigurationError`` if a limit is negative, or 0 where it must be positive."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name != "revisions"):
                raise ConfigurationError(f"EffortLimits.{field.name} must be above 0, got {value}")


_DEEP: Final = EffortLimits(sub_queries=8, rounds=4, revisions=1, tokens=60_000, documents=15, planning_seconds=30.0)

DEFAULT_LIMITS: Final[Mapping[ReasoningEffort, EffortLimits]] = MappingProxyType(
    {
        ReasoningEffort.MINIMAL: EffortLimits(sub_queries=10),
        ReasoningEffort.LOW: EffortLimits(sub_queries=4),
        ReasoningEffort.MEDIUM: _DEEP,
        ReasoningEffort.AUTO: _DEEP,
    }
)
"""Default limits of each level of effort; a retriever can override them."""


def as_effort(value: ReasoningEffort | str) -> ReasoningEffort:
    """Return the level of effort with this name; raise ``ConfigurationError`` if it is unknown."""
    return by_value(ReasoningEffort, value, "effort")


def as_limits(own: Mapping[ReasoningEffort, EffortLimits] | None) -> dict[ReasoningEffort, EffortLimits]:
    """Return the limits of every level of effort: the entries of ``own``, else the defaults."""
    if own is not None and not isinstance(own, Mapping):
        raise ConfigurationError("limits: expected a mapping from efforts to EffortLimits, {'low': EffortLimits(...)}")
    return {**DEFAULT_LIMITS, **{as_effort(effort): limits for effort, limits in (own or {}).items()}}


def planned_use(limits: EffortLimits, planned: bool, budget: Budget) -> EffortUse:
    """Return the limits of a request; without a planning model they are one round and no tokens."""
    seconds = limits.seconds
    if budget.retrieval_deadline is not None:
        seconds = min(seconds, budget.retrieval_deadline - budget.started)
    return EffortUse(
        sub_queries=limits.sub_queries * planned,
        sources=MAX_SOURCES,
        waves=limits.rounds if planned else 1,
        revisions=limits.revisions * planned,
        tokens=limits.tokens * planned,
        seconds=round(seconds, 3),
        documents_ranked=MAX_RANKED,
    )


# -- how large a request may be: a larger one is rejected before any work is done -------------------------------------

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
