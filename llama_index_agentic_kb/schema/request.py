"""The request: who asks, a conversation or intents, how hard to think, which sources, and how much of everything."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    Strict,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.filters import FilterNode

MAX_DOCUMENTS: Final = 10_000
"""Documents that a request may ask for; several times what a model reads. A search engine allocates for as many."""
MAX_TOKENS: Final = 10_000_000
"""Tokens of an answer or of extracted data; more than any model has."""
MAX_SECONDS: Final = 86_400
"""A day. Timers of the operating system do not take any number."""
MAX_NAME: Final = 256
"""Characters of a tenant's, a user's or a group's name."""
MAX_GROUPS: Final = 10_000
"""Groups of one principal."""
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of characters that nobody sees: two names must not differ in these alone."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. Immutable and hashable; names are compared exactly, letter case included.

    A principal is made by the program that has authenticated its caller, never out of what the caller sends.

        alice = Principal(tenant="acme", user="alice", groups=["engineering", "managers"])

    Args:
        tenant: The organisation; None where there is only one.
        user: The person or service.
        groups: What it belongs to, in any order; kept as a frozenset.

    Raises:
        ConfigurationError: A name is empty, has hidden or control characters, or is too long; there are too many
            groups; or nothing is set.
    """

    tenant: str | None = None
    user: str | None = None
    groups: Iterable[str] = field(default=frozenset())

    def __post_init__(self) -> None:
        """Check every name, and keep the groups as a frozenset."""
        if isinstance(self.groups, (str, bytes)):
            raise ConfigurationError("Principal.groups: expected several names, got one text; put it into a list")
        groups = frozenset(self.groups)
        if len(groups) > MAX_GROUPS:
            raise ConfigurationError(f"Principal.groups: {len(groups)} groups are too many; at most {MAX_GROUPS}")
        object.__setattr__(self, "groups", groups)
        if self.tenant is None and self.user is None and not groups:
            raise ConfigurationError("Principal: give a tenant, a user or groups; one who is nobody may see nothing")
        names: list[tuple[str, object]] = [("tenant", self.tenant), ("user", self.user)]
        for part, name in names + [("groups", group) for group in groups]:
            if name is None and part != "groups":
                continue
            if not isinstance(name, str):
                raise ConfigurationError(f"Principal.{part}: expected text, got {type(name).__name__}")
            if not name.strip():
                raise ConfigurationError(f"Principal.{part}: a name must not be empty")
            if len(name) > MAX_NAME:
                raise ConfigurationError(f"Principal.{part}: a name of {len(name)} characters; at most {MAX_NAME}")
            if any(unicodedata.category(character) in _HIDDEN for character in name):
                raise ConfigurationError(f"Principal.{part}: a name has control or hidden characters: {name!r}")


class ReasoningEffort(StrEnum):
    """How much a request plans (Azure: ``retrievalReasoningEffort``); as ``minimal`` without a language model."""

    MINIMAL = "minimal"
    """No language model: the question, or each intent, is searched as it is."""
    LOW = "low"
    """One planning call."""
    MEDIUM = "medium"
    """A plan whose sub-queries build on each other, in several rounds, and one look for gaps."""
    AUTO = "auto"
    """No planning where the question's own evidence is strong; else as ``medium``."""


class OutputMode(StrEnum):
    """What a response holds (Azure: ``outputMode``)."""

    EXTRACTIVE_DATA = "extractiveData"
    """The passages themselves, as a JSON array."""
    ANSWER_SYNTHESIS = "answerSynthesis"
    """One answer with ``[ref_id:N]`` markers."""


class ResultsProcessing(StrEnum):
    """How the results of the searches are combined (Azure: ``resultsProcessing``)."""

    RERANK = "rerank"
    """Fused, reranked where there is a reranker, neighbours joined."""
    NONE = "none"
    """Left as the sources ranked it; the searches take turns."""


EffortField: TypeAlias = Annotated[
    ReasoningEffort,
    BeforeValidator(lambda value: value["kind"] if isinstance(value, dict) and set(value) == {"kind"} else value),
    PlainSerializer(lambda effort: {"kind": ReasoningEffort(effort).value}, return_type=dict[str, str]),
]
"""An effort; on the wire it is ``{"kind": ...}``, and ``"low"`` is taken too."""

Text: TypeAlias = Annotated[
    str, BeforeValidator(lambda value: without_surrogates(value) if isinstance(value, str) else value)
]
"""Text that can be written as UTF-8: lone surrogates become U+FFFD."""

_SIZES: Final = ("maxOutputSizeInTokens", "max_output_size_in_tokens", "maxOutputSize", "max_output_size")
"""The names of a response's size in tokens, the newest first."""
Documents: TypeAlias = Annotated[int, Strict(), Field(ge=1, le=MAX_DOCUMENTS)]
Flag: TypeAlias = Annotated[bool, Strict()]
"""A truth value: "yes" and 1 are none."""


def _given(data: object) -> object:
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class _Sent(Model):
    """What a caller sends. Null is not given: it sets nothing, and removes no limit that another name of it set."""

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: object) -> object:
        return _given(data)


class TextContent(_Sent):
    """A piece of text in a message."""

    type: Literal["text"] = "text"
    text: Text


class ImageUrl(_Sent):
    """Where an image is."""

    url: Text


class ImageContent(_Sent):
    """An image in a message. No stage reads it yet."""

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
        """All text of the message, pieces joined by line breaks."""
        return "\n".join([part.text for part in self.content if isinstance(part, TextContent)])


class Intent(_Sent):
    """A query to search as it is, without planning."""

    type: Literal["semantic"] = "semantic"
    search: Text = Field(min_length=1)


class SourceParams(_Sent):
    """The parameters of one source. They configure the source; they do not select it.

    Unknown fields are kept, and named in the source's activity as ignored.
    """

    model_config = ConfigDict(extra="allow")

    knowledge_source_name: Text = Field(min_length=1)
    kind: Text | None = None
    """When set, it must be the source's kind."""
    filters: FilterNode | None = None
    """Narrows what the source returns, together with its mandatory filter; never widens it."""
    filter_add_on: Text | None = None
    """An OData filter (see ``schema.odata``); narrows as ``filters`` does."""
    include_references: Flag = True
    include_reference_source_data: Flag | None = None
    """False leaves no text of its documents in the references and the grounding."""
    always_query_source: Flag = False
    never_query_source: Flag = False
    fail_on_error: Flag = False
    reranker_threshold: Annotated[float, Strict()] | None = Field(default=None, ge=0, le=4, allow_inf_nan=False)
    """Documents whose reranker score is below it are dropped, on the scale of 0 to 4. Needs a calibrated reranker;
    without one the source's activity says so."""
    results_processing: ResultsProcessing | None = None
    """None is the request's, then the retriever's own."""
    max_output_documents: Documents | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of fields that were set and that this library does not act on."""
        return tuple(sorted(self.model_extra or ()))

    def contradiction(self, processing: ResultsProcessing | None) -> str | None:
        """Return what can't be together, with the results processing of the whole request; None where all is well."""
        if self.always_query_source and self.never_query_source:
            return "alwaysQuerySource and neverQuerySource exclude each other"
        if self.include_reference_source_data and not self.include_references:
            return "includeReferenceSourceData needs includeReferences to be true"
        is_processed = (self.results_processing or processing) is not ResultsProcessing.NONE
        if self.reranker_threshold is not None and not is_processed:
            return "rerankerThreshold needs resultsProcessing to be 'rerank'"
        return None


class RetrievalRequest(_Sent):
    """One question to a knowledge base.

    Exactly one of ``messages`` and ``intents`` is set. What is unset comes from the knowledge base's defaults.
    """

    messages: list[Message] | None = None
    """The conversation, oldest first; the last user message is the question."""
    intents: list[Intent] | None = None
    """Queries that need no planning."""
    retrieval_reasoning_effort: EffortField | None = None
    output_mode: OutputMode | None = None
    include_activity: Flag = True
    max_runtime_in_seconds: (
        Annotated[
            float, Strict(), PlainSerializer(lambda seconds: int(seconds) if float(seconds).is_integer() else seconds)
        ]
        | None
    ) = Field(default=None, gt=0, le=MAX_SECONDS, allow_inf_nan=False)
    max_output_size_in_tokens: Annotated[int, Strict()] | None = Field(
        default=None, ge=1, le=MAX_TOKENS, validation_alias=AliasChoices(*_SIZES)
    )
    """The budget of the extracted data, or of the answer, in tokens."""
    max_output_documents: Documents | None = None
    """Alone it replaces the default budget of the extracted data."""
    results_processing: ResultsProcessing | None = None
    """For every source whose parameters say nothing else; None is the retriever's own."""
    knowledge_source_params: list[SourceParams] = Field(default_factory=list)
    principal: SkipJsonSchema[InstanceOf[Principal] | None] = Field(default=None, exclude=True)
    """Who asks. Set by the program that has authenticated its caller; never read from wire data, nor written."""

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: object) -> object:
        """Azure's versions have two names for one size, and an SDK sends both: the newer wins."""
        sent = _given(data)
        if isinstance(sent, dict):
            who = sent.get("principal")
            if who is not None and not isinstance(who, Principal):
                raise ValueError(
                    "principal can't be sent in a request: the program that authenticated its caller sets it"
                )
            for name in [one for one in _SIZES if one in sent][1:]:
                del sent[name]
        return sent

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
        """The text of the last user message; with intents, theirs joined by line breaks."""
        if self.intents:
            return "\n".join([intent.search for intent in self.intents])
        rest = (self.messages or [])[len(self.history) :]
        return rest[0].text.strip() if rest else ""

    @property
    def history(self) -> list[Message]:
        """The messages before the question, oldest first; all of them where there is no question."""
        messages = self.messages or []
        for position in range(len(messages) - 1, -1, -1):
            if messages[position].role == "user" and messages[position].text.strip():
                return messages[:position]
        return messages

    def params_for(self, source: str) -> SourceParams:
        """Return the parameters of a source; the defaults where the request has none."""
        for params in self.knowledge_source_params:
            if params.knowledge_source_name == source:
                return params
        return SourceParams(knowledge_source_name=source)
