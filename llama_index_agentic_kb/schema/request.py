"""The request: a conversation or intents, how hard to think, which sources, and how much of everything."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.schema.principal import Principal

__all__ = [
    "MAX_DOCUMENTS",
    "EffortField",
    "ImageContent",
    "Intent",
    "Message",
    "OutputMode",
    "ReasoningEffort",
    "ResultsProcessing",
    "RetrievalRequest",
    "SourceParams",
    "TextContent",
]

MAX_DOCUMENTS: Final = 10_000
"""Documents that a request may ask for; several times what a model reads. A search engine allocates for as many."""
MAX_TOKENS: Final = 10_000_000
"""Tokens of an answer or of extracted data; more than any model has."""
MAX_SECONDS: Final = 86_400
"""A day. Timers of the operating system do not take any number."""


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


def _made_in_python(value: Any) -> Any:
    """Accept only a principal that a program made: data of a caller prove nothing."""
    if value is not None and not isinstance(value, Principal):
        raise ValueError("principal can't be sent in a request: the program that has authenticated its caller sets it")
    return value


def _unwrap_kind(value: Any) -> Any:
    """Accept both ``"low"`` and the wire's ``{"kind": "low"}``."""
    return value["kind"] if isinstance(value, dict) and set(value) == {"kind"} else value


EffortField: TypeAlias = Annotated[
    ReasoningEffort,
    BeforeValidator(_unwrap_kind),
    PlainSerializer(lambda effort: {"kind": ReasoningEffort(effort).value}, return_type=dict[str, str]),
]
"""An effort; on the wire it is ``{"kind": ...}``."""


def _writable(value: Any) -> Any:
    return without_surrogates(value) if isinstance(value, str) else value


Text: TypeAlias = Annotated[str, BeforeValidator(_writable)]
"""Text that can be written as UTF-8: lone surrogates become U+FFFD."""


class TextContent(Model):
    """A piece of text in a message."""

    type: Literal["text"] = "text"
    text: Text


class ImageUrl(Model):
    """Where an image is."""

    url: Text


class ImageContent(Model):
    """An image in a message. No stage reads it yet."""

    type: Literal["image"] = "image"
    image: ImageUrl


class Message(Model):
    """One message of a conversation, or of a response."""

    role: Text = "user"
    content: list[Annotated[TextContent | ImageContent, Field(discriminator="type")]]

    @field_validator("content", mode="before")
    @classmethod
    def _text_is_content(cls, value: Any) -> Any:
        return [{"type": "text", "text": value}] if isinstance(value, str) else value

    @property
    def text(self) -> str:
        """All text of the message, pieces joined by line breaks."""
        return "\n".join(part.text for part in self.content if isinstance(part, TextContent))


class Intent(Model):
    """A query to search as it is, without planning."""

    type: Literal["semantic"] = "semantic"
    search: Text = Field(min_length=1)


class SourceParams(Model):
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
    include_references: bool = True
    include_reference_source_data: bool | None = None
    always_query_source: bool = False
    never_query_source: bool = False
    fail_on_error: bool = False
    reranker_threshold: float | None = Field(default=None, ge=0, le=4)
    """Documents whose reranker score is below it are dropped, on the scale of 0 to 4. Needs a calibrated reranker;
    without one the source's activity says so."""
    results_processing: ResultsProcessing | None = None
    """None is the request's, then the retriever's own."""
    max_output_documents: int | None = Field(default=None, ge=1, le=MAX_DOCUMENTS)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.always_query_source and self.never_query_source:
            raise ValueError(
                f"alwaysQuerySource and neverQuerySource exclude each other ({self.knowledge_source_name})"
            )
        if self.include_reference_source_data and not self.include_references:
            raise ValueError(
                f"includeReferenceSourceData needs includeReferences to be true ({self.knowledge_source_name})"
            )
        if self.results_processing is ResultsProcessing.NONE and self.reranker_threshold is not None:
            raise ValueError(f"rerankerThreshold needs resultsProcessing to be 'rerank' ({self.knowledge_source_name})")
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of fields that were set and that this library does not act on."""
        return tuple(sorted(self.model_extra or ()))


class RetrievalRequest(Model):
    """One question to a knowledge base.

    Exactly one of ``messages`` and ``intents`` is set. What is unset comes from the knowledge base's defaults.
    """

    messages: list[Message] | None = None
    """The conversation, oldest first; the last user message is the question."""
    intents: list[Intent] | None = None
    """Queries that need no planning."""
    retrieval_reasoning_effort: EffortField | None = None
    output_mode: OutputMode | None = None
    include_activity: bool = True
    max_runtime_in_seconds: (
        Annotated[float, PlainSerializer(lambda seconds: int(seconds) if float(seconds).is_integer() else seconds)]
        | None
    ) = Field(default=None, gt=0, le=MAX_SECONDS, allow_inf_nan=False)
    max_output_size_in_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, validation_alias=AliasChoices("maxOutputSizeInTokens", "maxOutputSize")
    )
    """The budget of the extracted data, or of the answer, in tokens."""
    max_output_documents: int | None = Field(default=None, ge=1, le=MAX_DOCUMENTS)
    results_processing: ResultsProcessing | None = None
    """For every source whose parameters say nothing else; None is the retriever's own."""
    knowledge_source_params: list[SourceParams] = Field(default_factory=list)
    principal: Annotated[SkipJsonSchema[InstanceOf[Principal] | None], BeforeValidator(_made_in_python)] = Field(
        default=None, exclude=True
    )
    """Who asks. Set by the program that has authenticated its caller; never read from wire data, nor written."""

    @model_validator(mode="before")
    @classmethod
    def _one_output_size(cls, data: Any) -> Any:
        """Azure's versions have two names for one thing, and an SDK sends both: the newer name wins."""
        if isinstance(data, dict) and "maxOutputSize" in data and "maxOutputSizeInTokens" in data:
            return {name: value for name, value in data.items() if name != "maxOutputSize"}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.messages and self.intents:
            raise ValueError("messages and intents exclude each other: send one of them")
        if not self.intents and not self.question:
            raise ValueError("messages: a request needs a user message with text, or intents")
        names = Counter(params.knowledge_source_name for params in self.knowledge_source_params)
        twice = sorted(name for name, count in names.items() if count > 1)
        if twice:
            raise ValueError(f"knowledgeSourceParams: {', '.join(twice[:20])} is named twice")
        for params in self.knowledge_source_params:
            if params.reranker_threshold is not None and params.results_processing is None:
                self._check_processed(params.knowledge_source_name)
        return self

    def _check_processed(self, source: str) -> None:
        if self.results_processing is ResultsProcessing.NONE:
            raise ValueError(f"rerankerThreshold needs resultsProcessing to be 'rerank' ({source})")

    @property
    def question(self) -> str:
        """The text of the last user message; with intents, theirs joined by line breaks."""
        if self.intents:
            return "\n".join(intent.search for intent in self.intents)
        for message in reversed(self.messages or []):
            if message.role == "user" and message.text.strip():
                return message.text.strip()
        return ""

    @property
    def history(self) -> list[Message]:
        """The messages before the question, oldest first."""
        messages = self.messages or []
        for position in range(len(messages) - 1, -1, -1):
            if messages[position].role == "user" and messages[position].text.strip():
                return messages[:position]
        return []

    def params_for(self, source: str) -> SourceParams:
        """Return the parameters of a source; the defaults where the request has none."""
        for params in self.knowledge_source_params:
            if params.knowledge_source_name == source:
                return params
        return SourceParams(knowledge_source_name=source)
