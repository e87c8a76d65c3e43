"""A question that is answered with an ``Answer``, and the pieces in which the answer is streamed.

``AnswerQuery`` is the retrieval request and what Google's ``answer`` method adds to it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.activity import QueryClass
from llama_index_agentic_kb.schema.answer import Answer, AnswerReference, AnswerStep, Citation, HarmCategory, Session
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.schema.grounding import FilteringLevel
from llama_index_agentic_kb.schema.request import MAX_DOCUMENTS, RetrievalRequest
from llama_index_agentic_kb.schema.response import MissingPart, RetrievalResponse

NEW_SESSION: Final = "-"


class ResultMode(StrEnum):
    """What searches find."""

    DOCUMENTS = "documents"
    CHUNKS = "chunks"


class HarmBlockThreshold(StrEnum):
    """From which probability of harm on an answer is withheld."""

    BLOCK_LOW_AND_ABOVE = "blockLowAndAbove"
    BLOCK_MEDIUM_AND_ABOVE = "blockMediumAndAbove"
    BLOCK_ONLY_HIGH = "blockOnlyHigh"
    BLOCK_NONE = "blockNone"
    OFF = "off"


class DataStoreQuery(Model):
    """What is asked of one data store; only those that are named are searched."""

    data_store: str
    """Its full resource name."""
    filters: FilterNode | None = None
    boosts: list[dict[str, object]] = Field(default_factory=list)
    custom_search_operators: str = ""
    max_results: int | None = Field(default=None, ge=1, le=MAX_DOCUMENTS)


class Rephrasing(Model):
    """How far a query may be taken apart before it is searched."""

    disabled: bool = False
    max_steps: int = Field(default=1, ge=0, le=5)
    large_model: bool = True


class SafetySetting(Model):
    """From when on one kind of harm withholds an answer."""

    category: HarmCategory
    threshold: HarmBlockThreshold


class EndUserChunk(Model):
    """A text from the end user. The model may read it; it is never cited."""

    content: str
    title: str = ""


class AnswerQuery(Model):
    """One question, how it is searched, and how it is answered."""

    request: RetrievalRequest
    """The question, as the one user message."""
    query_id: str = ""
    serving_config: str | None = None
    """The resource that was asked."""
    session: str | None = None
    """None keeps nothing; the id of a session continues it, and ``-`` starts one. Of a resource name only the id."""
    session_name: str | None = None
    """The name as it was sent."""
    user_pseudo_id: str = ""
    user_labels: dict[str, str] = Field(default_factory=dict)
    filters: FilterNode | None = None
    """For every source."""
    boosts: list[dict[str, object]] = Field(default_factory=list)
    """Rules that raise or lower documents, as Google writes them: kept as data, not acted on."""
    order_by: str = ""
    result_mode: ResultMode | None = None
    data_stores: list[DataStoreQuery] = Field(default_factory=list)
    search_results: list[AnswerReference] | None = None
    """Results to answer from instead of searching; None searches."""
    end_user_chunks: list[EndUserChunk] = Field(default_factory=list)
    classify: list[QueryClass] = Field(default_factory=list)
    """The classes that the query is judged for; the result is only reported."""
    rephrasing: Rephrasing = Field(default_factory=Rephrasing)
    spell_correction: bool = True
    model_version: str = ""
    preamble: str = ""
    language: str | None = None
    """BCP 47; None is the question's."""
    include_citations: bool = False
    ignore_adversarial_query: bool = False
    ignore_non_answer_seeking_query: bool = False
    ignore_jail_breaking_query: bool = False
    ignore_low_relevant_content: bool | None = None
    """True withholds the answer where nothing relevant was found, False never does; None leaves it to the service."""
    related_questions: bool = False
    grounding_supports: bool = False
    filtering_level: FilteringLevel | None = None
    safety: bool = False
    safety_settings: list[SafetySetting] = Field(default_factory=list)
    """Empty, with ``safety``: from low probability on, in every category."""

    @property
    def question(self) -> str:
        """What is asked."""
        return self.request.question

    @property
    def makes_session(self) -> bool:
        """Whether a new session is to be made."""
        return self.session == NEW_SESSION

    @model_validator(mode="after")
    def _results_or_search(self) -> Self:
        searched = self.filters is not None or self.boosts or self.data_stores or self.order_by
        if self.search_results is not None and searched:
            raise ValueError("searchResults: they are not searched; leave out what narrows a search")
        return self


class StepsPiece(Model):
    """The steps; first in a stream."""

    kind: Literal["steps"] = "steps"
    steps: list[AnswerStep]


class ReferencesPiece(Model):
    """All references; before the text."""

    kind: Literal["references"] = "references"
    references: list[AnswerReference]


class TextPiece(Model):
    """The next part of the text."""

    kind: Literal["text"] = "text"
    text: str


class CitationPiece(Model):
    """A claim's sources by its own markers; the whole answer has the sources that support it."""

    kind: Literal["citation"] = "citation"
    citation: Citation


class WholePiece(Model):
    """The whole answer; last. It replaces the pieces before it."""

    kind: Literal["whole"] = "whole"
    answer: Answer
    session: Session | None = None
    """The session that keeps the turn, without its turns; None without a session."""


AnswerPiece: TypeAlias = StepsPiece | ReferencesPiece | TextPiece | CitationPiece | WholePiece
"""A piece of a streamed answer: steps, references, text and citations in turns, and the whole answer."""


class AnswerResponse(WholePiece):
    """An answer with what belongs to it."""

    account: RetrievalResponse | None = None
    """The activity, the plan, and the ledger of the answer's claims; None where nothing was searched."""
    missing: list[MissingPart] = Field(default_factory=list)
    """Parts that the answer lacks, sub-questions without evidence included."""
    warnings: list[str] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.answer.text

    def __str__(self) -> str:
        """Return the answer's text."""
        return self.answer.text
