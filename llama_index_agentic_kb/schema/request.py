"""The request: principal, conversation or intents, reasoning effort, source parameters and limits."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    Strict,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import SkipJsonSchema

from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.conversation import DialogueState, ScopeState
from llama_index_agentic_kb.schema.filters import FilterGroup, FilterNode, conditions

MAX_DOCUMENTS: Final = 10_000  # protects search engines, which allocate memory for as many
MAX_TOKENS: Final = 10_000_000  # beyond any model's context size
MAX_SECONDS: Final = 86_400  # one day; timers of operating systems fail for very large numbers
MAX_NAME: Final = 256
MAX_GROUPS: Final = 10_000
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of invisible characters; rejected, so that names that look the same are the same."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity that makes a request. Immutable and hashable; names are compared case-sensitively.

    The program that authenticates the caller creates the principal, never from data that the caller sends.

        alice = Principal(tenant="acme", user="alice", groups=["engineering", "managers"])

    Args:
        tenant: The name of the organisation; None if there is only one.
        user: The name of the person or service.
        groups: The names of the principal's groups, in any order; stored as a frozenset.

    Raises:
        ConfigurationError: A name is empty, too long or contains hidden or control characters; there are too many
            groups; or tenant, user and groups are all unset.
    """

    tenant: str | None = None
    user: str | None = None
    groups: Iterable[str] = field(default=frozenset())

    def __post_init__(self) -> None:
        """Check all names, and convert the groups to a frozenset."""
        if isinstance(self.groups, (str, bytes)):
            raise ConfigurationError("Principal.groups: expected several names, got one text; put it into a list")
        groups = frozenset(self.groups)
        if len(groups) > MAX_GROUPS:
            raise ConfigurationError(f"Principal.groups: {len(groups)} groups are too many; at most {MAX_GROUPS}")
        object.__setattr__(self, "groups", groups)
        own = [("tenant", self.tenant), ("user", self.user)]
        names: list[tuple[str, object]] = [(part, name) for part, name in own if name is not None]
        names += [("groups", group) for group in groups]
        if not names:
            raise ConfigurationError("Principal: give a tenant, a user or groups; one who is nobody may see nothing")
        for part, name in names:
            _check_name(part, name)


def _check_name(part: str, name: object) -> None:
    if not isinstance(name, str):
        raise ConfigurationError(f"Principal.{part}: expected text, got {type(name).__name__}")
    if not name.strip():
        raise ConfigurationError(f"Principal.{part}: a name must not be empty")
    if len(name) > MAX_NAME:
        raise ConfigurationError(f"Principal.{part}: a name of {len(name)} characters; at most {MAX_NAME}")
    if any(unicodedata.category(character) in _HIDDEN for character in name):
        raise ConfigurationError(f"Principal.{part}: a name has control or hidden characters: {name!r}")


class ReasoningEffort(StrEnum):
    """How much a request is planned (Azure: ``retrievalReasoningEffort``); without a language model as ``minimal``."""

    MINIMAL = "minimal"
    """No language model: the question, expanded if it leans on its conversation, or each intent, is searched."""
    LOW = "low"
    MEDIUM = "medium"  # a plan with dependent sub-queries, searched in several rounds, and one check for gaps
    AUTO = "auto"  # no planning if a first search of the question finds strong evidence; else as ``medium``


class OutputMode(StrEnum):
    """The content of a response (Azure: ``outputMode``)."""

    EXTRACTIVE_DATA = "extractiveData"  # the passages themselves, as a JSON array
    ANSWER_SYNTHESIS = "answerSynthesis"  # one answer with ``[ref_id:N]`` markers


class ResultsProcessing(StrEnum):
    """How the results of the searches are combined (Azure: ``resultsProcessing``)."""

    RERANK = "rerank"  # results are fused, reranked if there is a reranker, and neighbouring chunks are joined
    NONE = "none"  # results remain in the order of their source; the lists of the searches are interleaved


EffortField: TypeAlias = Annotated[
    ReasoningEffort,
    BeforeValidator(lambda value: value["kind"] if isinstance(value, dict) and set(value) == {"kind"} else value),
    PlainSerializer(lambda effort: {"kind": ReasoningEffort(effort).value}, return_type=dict[str, str]),
]
"""A reasoning effort; in JSON ``{"kind": "low"}``. Input may also be plain text, ``"low"``."""

Text: TypeAlias = Annotated[
    str, BeforeValidator(lambda value: without_surrogates(value) if isinstance(value, str) else value)
]
"""Text that can be encoded as UTF-8: lone surrogates become U+FFFD."""

_SIZES: Final = ("maxOutputSizeInTokens", "max_output_size_in_tokens", "maxOutputSize", "max_output_size")
"""The accepted names of the token budget of a response, the newest first."""
_SET_BY_PROGRAMS: Final[Mapping[str, tuple[type, str]]] = {
    "principal": (Principal, "authenticated its caller"),
    "dialogue": (DialogueState, "keeps the conversation"),
    **dict.fromkeys(("scope_state", "scopeState"), (ScopeState, "keeps the conversation")),
}
Documents: TypeAlias = Annotated[int, Strict(), Field(ge=1, le=MAX_DOCUMENTS)]
Tokens: TypeAlias = Annotated[int, Strict(), Field(ge=1, le=MAX_TOKENS)]
Seconds: TypeAlias = Annotated[
    float,
    Strict(),
    Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False),
    PlainSerializer(lambda seconds: int(seconds) if float(seconds).is_integer() else seconds),
]
Flag: TypeAlias = Annotated[bool, Strict()]  # a strict boolean: "yes" and 1 are rejected


INSTRUCTING: Final = frozenset({"system", "developer"})
"""The roles of messages that are instructions of the application, not part of the conversation."""


class _Sent(Model):
    """Base of the models that callers send. A null counts as absent: it does not override the field's other name."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        if not isinstance(data, dict) or None not in data.values():
            return data
        return {name: value for name, value in data.items() if value is not None}


class TextContent(_Sent):
    """A piece of text in a message."""

    type: Literal["text"] = "text"
    text: Text


class ImageUrl(_Sent):
    """The address of an image."""

    url: Text


class ImageContent(_Sent):
    """An image in a message. Images are accepted, but not used yet."""

    type: Literal["image"] = "image"
    image: ImageUrl


class Message(_Sent):
    """One message of a conversation, or of a response."""

    role: Text = "user"
    content: list[Annotated[TextContent | ImageContent, Field(discriminator="type")]]

    @field_validator("content", mode="before")
    @classmethod
    def _text_is_content(cls, value: object) -> object:
        return [{"type": "text", "text": value}] if isinstance(value, str) else value

    @property
    def text(self) -> str:
        """The text parts of the message, joined by line breaks."""
        return "\n".join([part.text for part in self.content if isinstance(part, TextContent)])


class Intent(_Sent):
    """A query to search unchanged, without planning."""

    type: Literal["semantic"] = "semantic"
    search: Text = Field(min_length=1)


class SourceParams(_Sent):
    """The parameters of one source. They configure the source, but do not select it.

    Unknown fields are accepted, and reported as ignored in the source's activity record. JSON has the fields that were
    given, as the others may be stored with the source (``over``).
    """

    model_config = ConfigDict(extra="allow")

    knowledge_source_name: Text = Field(min_length=1)
    kind: Text | None = None  # expected kind of the source; a request with another kind is invalid
    filters: FilterNode | None = None  # combined (AND) with the source's mandatory filter
    filter_add_on: Text | None = None
    """A further filter as OData text (see ``schema.odata``), combined (AND) with ``filters``."""
    include_references: Flag = True
    include_reference_source_data: Flag | None = None  # False leaves out the documents' text
    always_query_source: Flag = False
    never_query_source: Flag = False
    fail_on_error: Flag = False
    reranker_threshold: Annotated[float, Strict()] | None = Field(default=None, ge=0, le=4, allow_inf_nan=False)
    """The minimum reranker score, 0 to 4, of a document. It needs a calibrated reranker; without one it has no effect,
    and the source's activity record has a warning."""
    results_processing: ResultsProcessing | None = None  # defaults to the request's setting, then the retriever's
    max_output_documents: Documents | None = None

    @model_serializer(mode="wrap")
    def _as_given(self, serialize: SerializerFunctionWrapHandler) -> JsonObject:
        data: JsonObject = serialize(self)
        for name in type(self).model_fields.keys() - self.model_fields_set:
            data.pop(name, None)
            data.pop(to_camel(name), None)
        return data

    def over(self, stored: SourceParams) -> SourceParams:
        """Return these parameters, with the stored ones where a field is not given."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if self.always_query_source or self.never_query_source:  # what is stored may say the opposite
            given = {"always_query_source": False, "never_query_source": False, **given}
        return stored.model_copy(update=given)

    def contradiction(self, processing: ResultsProcessing | None) -> str | None:
        """Return the reason why these options conflict, given the request's processing; None if they don't."""
        if self.always_query_source and self.never_query_source:
            return "alwaysQuerySource and neverQuerySource exclude each other"
        if self.include_reference_source_data and not self.include_references:
            return "includeReferenceSourceData needs includeReferences to be true"
        is_processed = (self.results_processing or processing) is not ResultsProcessing.NONE
        if self.reranker_threshold is not None and not is_processed:
            return "rerankerThreshold needs resultsProcessing to be 'rerank'"
        return None


class RetrievalRequest(_Sent):
    """A retrieval request to a knowledge base.

    Exactly one of ``messages`` and ``intents`` is set. Unset options default to those of the knowledge base.
    """

    messages: list[Message] | None = None  # the conversation, oldest first; the last user message is the question
    intents: list[Intent] | None = None
    retrieval_reasoning_effort: EffortField | None = None
    output_mode: OutputMode | None = None
    include_activity: Flag = True
    max_runtime_in_seconds: Seconds | None = None
    max_output_size_in_tokens: Tokens | None = Field(default=None, validation_alias=AliasChoices(*_SIZES))
    """The budget of the extracted data, or of the answer, in tokens."""
    max_output_documents: Documents | None = None  # set without a token budget, it replaces the default token budget
    results_processing: ResultsProcessing | None = None  # for sources whose parameters set none
    retrieval_instructions: Text | None = None  # the application's, for planning; replace the knowledge base's
    answer_instructions: Text | None = None  # the application's (tone, form, language); replace the knowledge base's
    knowledge_source_params: list[SourceParams] = Field(default_factory=list)
    principal: SkipJsonSchema[InstanceOf[Principal] | None] = Field(default=None, exclude=True)
    """The caller's identity, set by the program that authenticated the caller; never read from or written to JSON."""
    dialogue: SkipJsonSchema[InstanceOf[DialogueState] | None] = Field(default=None, exclude=True)
    """The state of the conversation after its last turn (``RetrievalResponse.dialogue``), for sources that are tools.
    Set by the program that keeps the conversation; never read from or written to JSON."""
    scope_state: SkipJsonSchema[InstanceOf[ScopeState] | None] = Field(default=None, exclude=True)
    """The documents that the conversation was about (``RetrievalResponse.scope_state``); set like ``dialogue``."""

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: object) -> object:
        """Reject a principal or a state in the data, and of several names of the token budget use only the newest."""
        if not isinstance(data, dict):
            return data
        for name in filter(data.__contains__, _SET_BY_PROGRAMS):
            kind, program = _SET_BY_PROGRAMS[name]
            if data[name] is not None and not isinstance(data[name], kind):
                raise ValueError(f"{name} can't be sent in a request: the program that {program} sets it")
        if len(data.keys() & _SIZES) > 1:
            older = [name for name in _SIZES if data.get(name) is not None][1:]
            return {name: value for name, value in data.items() if name not in older}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.messages and self.intents:
            raise ValueError("messages and intents exclude each other: send one of them")
        if not self.question:
            raise ValueError("messages: a request needs a user message with text, or intents")
        seen = set()
        for params in self.knowledge_source_params:
            name = params.knowledge_source_name
            if name in seen:
                raise ValueError(f"knowledgeSourceParams: {name} is named twice")
            if reason := params.contradiction(self.results_processing):
                raise ValueError(f"{reason} ({name})")
            seen.add(name)
        return self

    @property
    def question(self) -> str:
        """The text of the last user message, or the queries of the intents, joined by line breaks."""
        if self.intents:
            return "\n".join([intent.search for intent in self.intents])
        for message in reversed(self.messages or ()):
            if message.role == "user" and (text := message.text.strip()):
                return text
        return ""

    @property
    def history(self) -> list[Message]:
        """The messages before the question, oldest first; all messages if there is no question."""
        messages = self.messages or []
        for position in range(len(messages) - 1, -1, -1):
            if messages[position].role == "user" and messages[position].text.strip():
                return messages[:position]
        return messages

    @property
    def system(self) -> str:
        """The text of the system and developer messages, which are instructions of the application."""
        texts = [message.text.strip() for message in self.messages or [] if message.role in INSTRUCTING]
        return "\n".join(filter(None, texts))

    @property
    def unread(self) -> list[str]:
        """A sentence for each kind of content of the messages that is ignored, such as images; usually empty."""
        messages = self.messages or []
        if len(messages) == 1 and len(messages[0].content) == 1:
            return []  # the question alone
        images = sum([isinstance(part, ImageContent) for message in messages for part in message.content])
        later = [one for one in messages[len(self.history) + 1 :] if one.role in ("user", "assistant")]
        parts = [(images, "images in the messages"), (len(later), "messages after the last question")]
        return [f"{count} {what} were not read" for count, what in parts if count]

    def params_for(self, source: str) -> SourceParams:
        """Return the parameters of a source; the defaults if the request has none for it."""
        for params in self.knowledge_source_params:
            if params.knowledge_source_name == source:
                return params
        return SourceParams(knowledge_source_name=source)


# -- how large a request may be: a larger one is rejected before any work is done -------------------------------------

MAX_SOURCE_NAME: Final = 1_000  # characters of a source's name
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

    def check(self, request: RetrievalRequest, instructions: str = "") -> None:
        """Raise ``InvalidRequestError`` if a request exceeds a limit; it names the field, its size and the limit.

        ``instructions`` are those for planning of a request that has none.
        """
        for field_name, size, limit in self._sizes(request, instructions):
            maximum = limit if isinstance(limit, int) else getattr(self, limit)
            if size > maximum:
                named = "" if isinstance(limit, int) else f" (InputLimits.{limit})"
                raise InvalidRequestError(f"{field_name}: {size:,} are too many; at most {maximum:,}{named}")

    def _sizes(self, request: RetrievalRequest, instructions: str) -> Iterator[tuple[str, int, str | int]]:
        """Yield fields with sizes and limits; counts come first, so that overlong lists are rejected unread."""
        messages, intents = request.messages or [], request.intents or []
        yield "messages: messages", len(messages), "entries"
        yield "intents: intents", len(intents), "entries"
        parts = [*chain.from_iterable(map(attrgetter("content"), messages))]
        yield "messages: pieces of content", len(parts), "entries"
        yield "messages: characters", sum([len(getattr(part, "text", "")) for part in parts]), "conversation_characters"
        asked = len(request.question) if messages else 0
        yield "messages: characters of the question", asked, "question_characters"
        planning = instructions if request.retrieval_instructions is None else request.retrieval_instructions
        yield "retrievalInstructions: characters", len(planning), "question_characters"
        yield "answerInstructions: characters", len(request.answer_instructions or ""), "question_characters"
        for number, intent in enumerate(intents):
            yield f"intents[{number}].search: characters", len(intent.search), "question_characters"
        yield "knowledgeSourceParams: entries", len(request.knowledge_source_params), "entries"
        for number, params in enumerate(request.knowledge_source_params):
            name = params.knowledge_source_name
            yield f"knowledgeSourceParams[{number}].knowledgeSourceName: characters", len(name), MAX_SOURCE_NAME
            where = f"knowledgeSourceParams[{name}]"
            yield f"{where}.filterAddOn: characters", len(params.filter_add_on or ""), "question_characters"
            if params.filters is not None:
                yield from self._sizes_of(params.filters, f"{where}.filters")

    def _sizes_of(self, tree: FilterNode, where: str) -> Iterator[tuple[str, int, str | int]]:
        level, levels = [tree], 0
        while level and levels <= MAX_FILTER_LEVELS:
            levels += 1
            level = [child for node in level if isinstance(node, FilterGroup) for child in node.filters]
        yield f"{where}: levels", levels, MAX_FILTER_LEVELS
        leaves = list(conditions(tree))  # recursive
        yield f"{where}: values", sum([len(one.values) for one in leaves]), "filter_values"
        characters = sum([len(one.key) + sum(map(len, map(str, one.values))) for one in leaves])
        yield f"{where}: characters", characters, MAX_CHARACTERS_PER_VALUE * self.filter_values


DEFAULT_INPUT_LIMITS: Final = InputLimits()
