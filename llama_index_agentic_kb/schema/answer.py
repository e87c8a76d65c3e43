"""Answers, the query for one, the pieces of a streamed one, and the sessions that store answers as turns.

The fields are those of Google's ``Answer`` (Discovery Engine v1): text, citations, references, search steps and the
reasons for withholding it. ``wire.google`` converts them to Google's JSON. Spans count Python characters of
``Answer.text``, end exclusive; sources are indices into ``references``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import AwareDatetime, Field, model_validator

from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.schema._model import Model, Shown
from llama_index_agentic_kb.schema.activity import QueryClass, QueryClassification
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.schema.grounding import (
    CITATION_THRESHOLD,
    FilteringLevel,
    GroundingLedger,
    Span,
    UnitScore,
    Verdict,
)
from llama_index_agentic_kb.schema.request import MAX_DOCUMENTS, Message, RetrievalRequest
from llama_index_agentic_kb.schema.response import MissingPart, RetrievalResponse, SkippedReason

NEW_SESSION: Final = "-"


class AnswerState(StrEnum):
    """The state of an answer. A deliberately withheld answer has ``SUCCEEDED``, and has ``skipped_reasons``."""

    IN_PROGRESS = "inProgress"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    STREAMING = "streaming"


class Citation(Span):
    """The span of a claim, and the references that it cites."""

    sources: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)  # indices into the answer's references


class GroundingSupport(Citation):
    """The check result of a claim, and the references that support it."""

    score: UnitScore | None = None
    check_required: bool | None = None  # False for sentences without a factual claim ("Here is what I found.")

    @model_validator(mode="after")
    def _nothing_without_check(self) -> Self:
        if self.check_required is False and (self.score is not None or self.sources):
            raise ValueError("score: a claim that needs no check has neither a score nor sources")
        return self


class ChunkContent(Model):
    """A passage of a document."""

    content: str = ""
    page_identifier: str = ""
    relevance_score: UnitScore | None = None


class _Document(Model):
    """The name, URI and title of a document."""

    document: str = ""
    uri: str = ""
    title: str = ""


class DocumentReference(_Document):
    """A document, with the passages used for the answer."""

    kind: Literal["document"] = "document"
    chunks: list[ChunkContent] = Field(default_factory=list)
    metadata: dict[str, object] = Field(default_factory=dict)


class ChunkReference(_Document, ChunkContent):
    """One passage, with the name, URI and title of its document."""

    kind: Literal["chunk"] = "chunk"
    chunk: str = ""  # id of the passage's LlamaIndex node
    metadata: dict[str, object] = Field(default_factory=dict)


class StructuredReference(_Document):
    """A structured record instead of text."""

    kind: Literal["structured"] = "structured"
    data: dict[str, object] = Field(default_factory=dict)


AnswerReference: TypeAlias = Annotated[
    DocumentReference | ChunkReference | StructuredReference, Field(discriminator="kind")
]
"""A reference of an answer: a document, passage or record that the model read, cited or not."""


class Snippet(Model):
    """A short excerpt around the matching words."""

    snippet: str = ""
    status: str = "SUCCESS"


class SearchObservation(_Document):
    """One document that a search found."""

    snippets: list[Snippet] = Field(default_factory=list)
    chunks: list[ChunkReference] = Field(default_factory=list)  # Google's JSON has only name, content and score
    metadata: dict[str, object] = Field(default_factory=dict)


class AnswerStepAction(Model):
    """One search: the query and its results."""

    query: str | None = None
    results: list[SearchObservation] | None = None


class AnswerStep(Model):
    """One step of the search for an answer."""

    state: AnswerState = AnswerState.SUCCEEDED
    description: str = ""
    thought: str = ""
    actions: list[AnswerStepAction] = Field(default_factory=list)


class HarmCategory(StrEnum):
    """The kind of harm that a safety rating is about."""

    HATE_SPEECH = "hateSpeech"
    DANGEROUS_CONTENT = "dangerousContent"
    HARASSMENT = "harassment"
    SEXUALLY_EXPLICIT = "sexuallyExplicit"
    CIVIC_INTEGRITY = "civicIntegrity"


class HarmLevel(StrEnum):
    """The probability or the severity of a harm."""

    NEGLIGIBLE = "negligible"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class SafetyRating(Model):
    """A rating by a user-defined safety hook; this library itself rates nothing."""

    category: HarmCategory
    probability: HarmLevel | None = None
    probability_score: UnitScore = 0.0
    severity: HarmLevel | None = None
    severity_score: UnitScore = 0.0
    blocked: bool = False


_OFFENSIVE: Final = {
    SkippedReason.ADVERSARIAL_QUERY_IGNORED,
    SkippedReason.JAIL_BREAKING_QUERY_IGNORED,
    SkippedReason.POTENTIAL_POLICY_VIOLATION,
    SkippedReason.CUSTOMER_POLICY_VIOLATION,
    SkippedReason.USER_DEFINED_CLASSIFICATION_QUERY_IGNORED,
}


class Answer(Model):
    """One answer, complete or in progress."""

    id: str | None = None  # id of the answer within its session; None without a session
    state: AnswerState = AnswerState.SUCCEEDED
    text: str = ""  # answer, possibly in Markdown; if it was withheld, a notice instead
    language: str | None = None
    grounding_score: UnitScore | None = None  # mean score of the claims that need a check; None if no claim was checked
    citations: list[Citation] = Field(default_factory=list)
    grounding_supports: list[GroundingSupport] = Field(default_factory=list)
    references: list[AnswerReference] = Field(default_factory=list)
    related_questions: list[str] = Field(default_factory=list)
    steps: list[AnswerStep] = Field(default_factory=list)
    query_classifications: list[QueryClassification] | None = None  # None: not classified, which does not mean harmless
    skipped_reasons: list[SkippedReason] = Field(default_factory=list)
    created_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    safety_ratings: list[SafetyRating] = Field(default_factory=list)

    @property
    def is_kept_from_prompts(self) -> bool:
        """Whether later prompts leave out the turn: it failed, or was withheld as an attack, by label or policy."""
        return self.state is AnswerState.FAILED or bool(_OFFENSIVE.intersection(self.skipped_reasons))

    @model_validator(mode="after")
    def _spans_and_sources_exist(self) -> Self:
        for field, claims in (("citations", self.citations), ("groundingSupports", self.grounding_supports)):
            for position, claim in enumerate(claims):
                where, size, last = f"{field}.{position}", len(self.text), max(claim.sources, default=-1)
                if claim.end > size:
                    raise ValueError(f"{where}.end: {claim.end} is beyond the text of {size} characters")
                if last >= (known := len(self.references)):
                    raise ValueError(f"{where}.sources: there is no reference {last}; there are {known}")
        return self


def ledger_citations(ledger: GroundingLedger, reference_ids: Sequence[str]) -> list[Citation]:
    """Return the citations of the claims: the references that the model cited, and those that support the claims.

    Cited references remain citations even without support; ``ledger_supports`` contains only supporting references.
    ``reference_ids`` are in the order of ``Answer.references``.
    """
    citations = []
    for claim, support in zip(ledger.claims, ledger_supports(ledger, reference_ids), strict=True):
        own = [position for position, reference_id in enumerate(reference_ids) if reference_id in claim.cited]
        if sources := list(dict.fromkeys([*own, *support.sources])):
            citations.append(Citation(start=claim.span.start, end=claim.span.end, sources=sources))
    return citations


def ledger_supports(
    ledger: GroundingLedger, reference_ids: Sequence[str], *, threshold: float = CITATION_THRESHOLD
) -> list[GroundingSupport]:
    """Return the check result of every claim, supported or not, and the references that support it.

    ``threshold`` is the minimum score of a support; nothing supports a claim that is contradicted.
    """
    index = {reference_id: position for position, reference_id in enumerate(reference_ids)}
    supports = []
    for claim in ledger.claims:
        good = [one.reference_id for one in claim.supports if one.score >= threshold]
        sources = dict.fromkeys(
            index[one] for one in good if one in index and claim.verdict is not Verdict.CONTRADICTED
        )
        checked = {"score": claim.score, "check_required": claim.check_required, "sources": list(sources)}
        supports.append(GroundingSupport.model_validate({**dict(claim.span), **checked}))
    return supports


# -- sessions ---------------------------------------------------------------------------------------------------------


class SessionState(StrEnum):
    """The state of a session. Google's API has this one state only, also for ended sessions."""

    IN_PROGRESS = "inProgress"


class Turn(Model):
    """One question and its answer."""

    session_id: str
    number: int = Field(ge=1)  # position in the session: 1, 2, ... without gaps
    query: str
    query_id: str = ""
    answer_id: str
    answer: Answer | None = None  # full answer; None if only its name was requested
    query_config: dict[str, str] = Field(default_factory=dict)
    created_at: AwareDatetime  # time of the question if the answer contains it; else the time when the turn was stored
    completed_at: AwareDatetime


class Session(Model):
    """A conversation of one owner."""

    id: str
    display_name: str = ""  # name shown to users; defaults to the first question
    state: SessionState = SessionState.IN_PROGRESS
    user_pseudo_id: str = ""
    turns: list[Turn] = Field(default_factory=list)
    labels: list[str] = Field(default_factory=list)
    is_pinned: bool = False
    started_at: AwareDatetime
    updated_at: AwareDatetime  # time when the last turn was stored, or of the last other change
    ended_at: AwareDatetime | None = None  # when the last answer was completed; further turns may follow


class SessionPage(Model):
    """One page of an owner's sessions, without their turns."""

    sessions: list[Session] = Field(default_factory=list)
    next_page_token: str | None = None  # ``page_token`` of the next page; None on the last page


class SessionChanges(Model):
    """Changes to a session; a field that is None is not changed."""

    display_name: str | None = None
    labels: list[str] | None = None
    is_pinned: bool | None = None
    user_pseudo_id: str | None = None


class SessionOrder(Model):
    """A sort key for sessions."""

    key: Literal["updated_at", "started_at", "id", "is_pinned"]
    descending: bool = False


class SessionQuery(Model):
    """The filter, order and page of a list of an owner's sessions."""

    page_size: int = Field(default=50, ge=1, le=1000)
    page_token: str | None = None
    filters: FilterNode | None = None
    """A filter on ``id``, ``display_name``, ``user_pseudo_id``, ``state``, ``is_pinned``, ``labels`` (operator
    ``any``), ``started_at`` and ``updated_at`` (RFC 3339)."""
    order_by: list[SessionOrder] = Field(default_factory=lambda: [SessionOrder(key="updated_at", descending=True)])


# -- the query, and the pieces of a streamed answer --------------------------------------------------------------------


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
    """One question: the retrieval request, and the further options of Google's ``answer`` method."""

    request: RetrievalRequest  # retrieval request; its only user message is the question
    query_id: str = ""
    session: str | None = None  # id of the session to continue; ``-`` starts one; None stores nothing
    user_pseudo_id: str = ""
    user_labels: dict[str, str] = Field(default_factory=dict)
    filters: FilterNode | None = None
    result_mode: ResultMode | None = None
    data_stores: list[DataStoreQuery] = Field(default_factory=list)
    search_results: list[AnswerReference] | None = None  # results to answer from instead of searching; None to search
    end_user_chunks: list[EndUserChunk] = Field(default_factory=list)
    classify: list[QueryClass] = Field(default_factory=list)  # the result is only reported
    max_rephrase_steps: int = Field(default=1, ge=0, le=5)  # above 1 the effort is medium unless it is set
    unsupported: list[str] = Field(default_factory=list)
    """What the caller asked for and has no effect, by name (``orderBy``); the response's warnings say so."""
    preamble: str = ""
    language: str | None = None  # language of the answer as a BCP 47 tag; defaults to the language of the question
    include_citations: bool = False
    ignore_adversarial_query: bool = False
    ignore_non_answer_seeking_query: bool = False
    ignore_jail_breaking_query: bool = False
    ignore_low_relevant_content: bool | None = None
    """By a calibrated reranker's best score: True withholds the answer if the evidence is barely relevant, None only if
    it is unrelated, False never. Without evidence there is never an answer."""
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
    """A claim of a streamed answer, with references that its markers cite, or at the end those that checks found.

    The sources of all pieces with the same span are those of the whole answer's citation, but for a paragraph that a
    later line makes a heading: its pieces are in the stream alone.
    """

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

    account: RetrievalResponse | None = None  # None if nothing was searched
    missing: list[MissingPart] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.answer.text

    def __str__(self) -> str:
        """Return the answer's text."""
        return self.answer.text

    def _shown(self) -> JsonObject:
        account = RetrievalResponse() if self.account is None else self.account
        missing = [part.to_dict() for part in self.missing]
        return {
            **account.to_dict(),
            "statusCode": 206 if any(part.outcome.failed for part in self.missing) else 200,
            "missing": missing,
            "response": [Message.model_validate({"role": "assistant", "content": self.text}).to_dict()],
            "relatedQuestions": self.answer.related_questions,
        }
