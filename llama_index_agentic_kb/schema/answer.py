"""Answers, and the sessions that store answers as turns.

The fields are those of Google's ``Answer`` (Discovery Engine v1): text, citations, references, search steps and the
reasons for withholding it. ``wire.google_answer`` converts them to Google's JSON. Spans count Python characters of
``Answer.text``, end exclusive; sources are indices into ``references``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import AwareDatetime, Field, model_validator

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.activity import QueryClassification
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.schema.grounding import (
    CITATION_THRESHOLD,
    GroundedClaim,
    GroundingLedger,
    Span,
    UnitScore,
    Verdict,
)
from llama_index_agentic_kb.schema.response import SkippedReason


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


class ChunkReference(_Document):
    """One passage, with the name, URI and title of its document."""

    kind: Literal["chunk"] = "chunk"
    chunk: str = ""  # id of the passage's LlamaIndex node
    content: str = ""
    relevance_score: UnitScore | None = None
    page_identifier: str = ""
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
    chunks: list[ChunkReference] = Field(default_factory=list)
    """The passages found; Google's JSON contains only name, content and score."""
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

    id: str | None = None
    """The id of the answer within its session; None without a session."""
    state: AnswerState = AnswerState.SUCCEEDED
    text: str = ""
    """The answer, possibly in Markdown; if it was withheld, a notice instead."""
    language: str | None = None
    grounding_score: UnitScore | None = None
    """The mean score of the claims that need a check; None if no claim was checked."""
    citations: list[Citation] = Field(default_factory=list)
    grounding_supports: list[GroundingSupport] = Field(default_factory=list)
    references: list[AnswerReference] = Field(default_factory=list)
    related_questions: list[str] = Field(default_factory=list)
    steps: list[AnswerStep] = Field(default_factory=list)
    query_classifications: list[QueryClassification] | None = None
    """The results for the requested classes; None if the query was not classified (this does not mean harmless)."""
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
                if claim.end > len(self.text):
                    reason = f"end: {claim.end} is beyond the text of {len(self.text)} characters"
                    raise ValueError(f"{field}.{position}.{reason}")
                if (last := max(claim.sources, default=-1)) >= len(self.references):
                    reason = f"sources: there is no reference {last}; there are {len(self.references)}"
                    raise ValueError(f"{field}.{position}.{reason}")
        return self


def ledger_citations(
    ledger: GroundingLedger, reference_ids: Sequence[str], *, threshold: float = CITATION_THRESHOLD
) -> list[Citation]:
    """Return the citations of the claims: the references that the model cited, and those that support the claims.

    Cited references remain citations even without support; ``ledger_supports`` contains only supporting references.
    ``reference_ids`` are in the order of ``Answer.references``; ``threshold`` is the minimum score of a support.
    """
    citations = []
    for claim in ledger.claims:
        own = [position for position, reference_id in enumerate(reference_ids) if reference_id in claim.cited]
        sources = list(dict.fromkeys([*own, *_sources(claim, reference_ids, threshold)]))
        if sources:
            citations.append(Citation(start=claim.span.start, end=claim.span.end, sources=sources))
    return citations


def ledger_supports(
    ledger: GroundingLedger, reference_ids: Sequence[str], *, threshold: float = CITATION_THRESHOLD
) -> list[GroundingSupport]:
    """Return the check result of every claim, supported or not; see ``ledger_citations`` for the arguments."""
    return [
        GroundingSupport(
            start=claim.span.start,
            end=claim.span.end,
            score=claim.score,
            check_required=claim.check_required,
            sources=_sources(claim, reference_ids, threshold) if claim.check_required else [],
        )
        for claim in ledger.claims
    ]


def _sources(claim: GroundedClaim, reference_ids: Sequence[str], threshold: float) -> list[int]:
    """Return the indices of the references that support a claim; an empty list if it is contradicted."""
    if claim.verdict is Verdict.CONTRADICTED:
        return []
    index = {reference_id: position for position, reference_id in enumerate(reference_ids)}
    good = [index[one.reference_id] for one in claim.supports if one.score >= threshold and one.reference_id in index]
    return list(dict.fromkeys(good))


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
    ended_at: AwareDatetime | None = None
    """The time when the last answer was completed; None before the first. Further turns may follow."""


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
