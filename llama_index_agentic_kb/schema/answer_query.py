"""The query for an ``Answer``, and the pieces of a streamed answer.

``AnswerQuery`` contains the retrieval request and the further options of Google's ``answer`` method.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from llama_index_agentic_kb.schema._model import Model, Shown
from llama_index_agentic_kb.schema.activity import QueryClass
from llama_index_agentic_kb.schema.answer import Answer, AnswerReference, AnswerStep, Citation, HarmCategory, Session
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.schema.grounding import FilteringLevel
from llama_index_agentic_kb.schema.request import MAX_DOCUMENTS, Message, RetrievalRequest
from llama_index_agentic_kb.schema.response import MissingPart, RetrievalResponse

NEW_SESSION: Final = "-"


class ResultMode(StrEnum):
    """The kind of search results."""

    DOCUMENTS = "documents"
    CHUNKS = "chunks"


class HarmBlockThreshold(StrEnum):
    """The minimum probability of harm for which an answer is withheld."""

    BLOCK_LOW_AND_ABOVE = "blockLowAndAbove"
    BLOCK_MEDIUM_AND_ABOVE = "blockMediumAndAbove"
    BLOCK_ONLY_HIGH = "blockOnlyHigh"
    BLOCK_NONE = "blockNone"
    OFF = "off"


class DataStoreQuery(Model):
    """The search options of one data store. If any are listed, only these data stores are searched."""

    data_store: str
    filters: FilterNode | None = None
    max_results: int | None = Field(default=None, ge=1, le=MAX_DOCUMENTS)


class SafetySetting(Model):
    """The threshold of one kind of harm for withholding an answer."""

    category: HarmCategory
    threshold: HarmBlockThreshold


class EndUserChunk(Model):
    """A text supplied by the end user. The model may read it, but never cites it."""

    content: str
    title: str = ""


class AnswerQuery(Model):
    """One question, with the options for search and answer."""

    request: RetrievalRequest
    """The retrieval request; its only user message is the question."""
    query_id: str = ""
    session: str | None = None
    """The id (not the resource name) of the session to continue; ``-`` starts a new one. None stores nothing."""
    user_pseudo_id: str = ""
    user_labels: dict[str, str] = Field(default_factory=dict)
    filters: FilterNode | None = None
    result_mode: ResultMode | None = None
    data_stores: list[DataStoreQuery] = Field(default_factory=list)
    search_results: list[AnswerReference] | None = None
    """Results to answer from instead of searching; None to search."""
    end_user_chunks: list[EndUserChunk] = Field(default_factory=list)
    classify: list[QueryClass] = Field(default_factory=list)
    """The classes to check the query for; the result is only reported."""
    max_rephrase_steps: int = Field(default=1, ge=0, le=5)
    """Into how many searches in turn the question may be split. Above 1 the effort is medium unless it is set."""
    unsupported: list[str] = Field(default_factory=list)
    """What the caller asked for and has no effect, by name (``orderBy``); the response's warnings say so."""
    preamble: str = ""
    language: str | None = None
    """The language of the answer as a BCP 47 tag; defaults to the language of the question."""
    include_citations: bool = False
    ignore_adversarial_query: bool = False
    ignore_non_answer_seeking_query: bool = False
    ignore_jail_breaking_query: bool = False
    ignore_low_relevant_content: bool | None = None
    """Whether to withhold the answer if nothing relevant was found; None uses the setting of the service."""
    related_questions: bool = False
    grounding_supports: bool = False
    filtering_level: FilteringLevel | None = None
    safety: bool = False
    safety_settings: list[SafetySetting] = Field(default_factory=list)
    """The thresholds by category; others are ``OFF``. If empty, ``BLOCK_LOW_AND_ABOVE`` applies to all categories."""

    @property
    def question(self) -> str:
        """The text of the question."""
        return self.request.question

    @property
    def makes_session(self) -> bool:
        """Whether the query starts a new session."""
        return self.session == NEW_SESSION

    @model_validator(mode="after")
    def _results_or_search(self) -> Self:
        if self.search_results is not None and (self.filters is not None or self.data_stores):
            raise ValueError("searchResults: they are not searched; leave out what narrows a search")
        return self


class StepsPiece(Model):
    """The steps of the answer; the first piece of a stream."""

    kind: Literal["steps"] = "steps"
    steps: list[AnswerStep]


class ReferencesPiece(Model):
    """All references; they precede the text."""

    kind: Literal["references"] = "references"
    references: list[AnswerReference]


class TextPiece(Model):
    """The next part of the answer's text."""

    kind: Literal["text"] = "text"
    text: str


class CitationPiece(Model):
    """A claim with the references that its markers cite; the final answer also has supporting references."""

    kind: Literal["citation"] = "citation"
    citation: Citation


class WholePiece(Model):
    """The complete answer; the last piece. It replaces all earlier pieces."""

    kind: Literal["whole"] = "whole"
    answer: Answer
    session: Session | None = None  # session in which the turn was stored, without its turns; None without a session


AnswerPiece: TypeAlias = StepsPiece | ReferencesPiece | TextPiece | CitationPiece | WholePiece
"""A piece of a streamed answer. Order: steps, references, text and citations alternately, the complete answer."""


class AnswerResponse(Shown, WholePiece):
    """An answer with its activity log, missing parts and warnings."""

    account: RetrievalResponse | None = None
    """The activity records, the plan and the grounding ledger; None if nothing was searched."""
    missing: list[MissingPart] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.answer.text

    def __str__(self) -> str:
        """Return the answer's text."""
        return self.answer.text

    def _shown(self) -> dict[str, Any]:
        account = RetrievalResponse() if self.account is None else self.account
        missing = [part.to_dict() for part in self.missing]
        return {
            **account.to_dict(),
            "statusCode": 206 if any(part.outcome.failed for part in self.missing) else 200,
            "missing": missing,
            "response": [Message.model_validate({"role": "assistant", "content": self.text}).to_dict()],
            "relatedQuestions": self.answer.related_questions,
        }
