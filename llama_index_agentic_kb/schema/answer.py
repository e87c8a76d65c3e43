"""The answer as a resource, and the sessions that keep answers as turns.

The parts are those of Google's ``Answer`` (Discovery Engine v1): the text, what each part of it rests on, how it was
found, and why it was withheld; ``wire.google_answer`` writes them. Here spans are in characters of ``Answer.text``
(Python's), start included and end excluded; sources are indices into ``references``.
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
    """How far an answer is. One that was withheld on purpose has succeeded, with ``skipped_reasons``."""

    IN_PROGRESS = "inProgress"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    STREAMING = "streaming"


class StepState(StrEnum):
    """How far a step is."""

    IN_PROGRESS = "inProgress"
    FAILED = "failed"
    SUCCEEDED = "succeeded"


class Citation(Span):
    """A claim, and the references that it cites."""

    sources: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Indices into the answer's references."""


class GroundingSupport(Citation):
    """A claim as it was checked, and the references that support it."""

    score: UnitScore | None = None
    """How well the sources support it; None where it was not checked, or needs no check."""
    check_required: bool | None = None
    """False for sentences that claim nothing ("Here is what I found.")."""

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
    """What is known of a document."""

    document: str = ""
    uri: str = ""
    title: str = ""


class DocumentReference(_Document):
    """A document with the passages of it that were used."""

    kind: Literal["document"] = "document"
    chunks: list[ChunkContent] = Field(default_factory=list)
    metadata: dict[str, object] = Field(default_factory=dict)


class ChunkReference(_Document):
    """One passage, with what is known of its document."""

    kind: Literal["chunk"] = "chunk"
    chunk: str = ""
    """The name of the passage: a LlamaIndex node's id."""
    content: str = ""
    relevance_score: UnitScore | None = None
    page_identifier: str = ""
    metadata: dict[str, object] = Field(default_factory=dict)


class StructuredReference(_Document):
    """A record: data instead of text."""

    kind: Literal["structured"] = "structured"
    data: dict[str, object] = Field(default_factory=dict)


AnswerReference: TypeAlias = Annotated[
    DocumentReference | ChunkReference | StructuredReference, Field(discriminator="kind")
]
"""What an answer may rest on: everything that the model read, cited or not."""


class Snippet(Model):
    """A few words around what was found."""

    snippet: str = ""
    status: str = "SUCCESS"


class SearchObservation(_Document):
    """One document that a search found."""

    snippets: list[Snippet] = Field(default_factory=list)
    chunks: list[ChunkReference] = Field(default_factory=list)
    """Only name, content and score are written."""
    metadata: dict[str, object] = Field(default_factory=dict)


class AnswerStepAction(Model):
    """One search: what was asked, and what it found."""

    query: str | None = None
    results: list[SearchObservation] | None = None
    """None where nothing was observed yet."""


class AnswerStep(Model):
    """One step on the way to the answer."""

    state: StepState = StepState.SUCCEEDED
    description: str = ""
    thought: str = ""
    actions: list[AnswerStepAction] = Field(default_factory=list)


class HarmCategory(StrEnum):
    """What a safety rating is about."""

    HATE_SPEECH = "hateSpeech"
    DANGEROUS_CONTENT = "dangerousContent"
    HARASSMENT = "harassment"
    SEXUALLY_EXPLICIT = "sexuallyExplicit"
    CIVIC_INTEGRITY = "civicIntegrity"


class HarmLevel(StrEnum):
    """How probable, or how severe, a harm is."""

    NEGLIGIBLE = "negligible"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class SafetyRating(Model):
    """The verdict of a user's own safety hook; this library makes none."""

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
    """One answer, whole or as far as it is."""

    id: str | None = None
    """Its id within its session; None without a session."""
    state: AnswerState = AnswerState.SUCCEEDED
    text: str = ""
    """May be Markdown. For a withheld answer: what is said instead."""
    language: str | None = None
    """BCP 47."""
    grounding_score: UnitScore | None = None
    """Mean support over the claims that need a check; None where nothing was checked."""
    citations: list[Citation] = Field(default_factory=list)
    grounding_supports: list[GroundingSupport] = Field(default_factory=list)
    references: list[AnswerReference] = Field(default_factory=list)
    related_questions: list[str] = Field(default_factory=list)
    steps: list[AnswerStep] = Field(default_factory=list)
    query_classifications: list[QueryClassification] | None = None
    """None where the query was not classified, which is not the same as harmless."""
    skipped_reasons: list[SkippedReason] = Field(default_factory=list)
    created_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    safety_ratings: list[SafetyRating] = Field(default_factory=list)

    @property
    def skipped(self) -> bool:
        """Whether the answer was withheld on purpose; ``skipped_reasons`` say why."""
        return bool(self.skipped_reasons)

    @property
    def is_kept_from_prompts(self) -> bool:
        """Whether its turn is left out of the conversation that later questions are read with.

        It failed, or was withheld for what was asked or said: of a class or a label that is ignored, against a policy.
        """
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
    """Return the citations of the claims: what the model cited, and what supports them.

    A marker stays a citation where support is missing; the ledger and ``ledger_supports`` show that it is.

    Args:
        ledger: The claims of an answer, with spans in that answer's text.
        reference_ids: The ids of the answer's references, in their order.
        threshold: The minimum score, 0 to 1, of a source.
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
    """Return every claim as it was checked, with or without support; see ``ledger_citations``."""
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
    """Return the indices of the references that support a claim. Evidence that contradicts it is no source."""
    if claim.verdict is Verdict.CONTRADICTED:
        return []
    index = {reference_id: position for position, reference_id in enumerate(reference_ids)}
    good = [index[one.reference_id] for one in claim.supports if one.score >= threshold and one.reference_id in index]
    return list(dict.fromkeys(good))


# -- sessions ---------------------------------------------------------------------------------------------------------


class SessionState(StrEnum):
    """How far a session is. Google's has no other state, ended or not."""

    IN_PROGRESS = "inProgress"


class Turn(Model):
    """One question and its answer."""

    session_id: str
    number: int = Field(ge=1)
    """Its place in the session; 1, 2, ... without a gap."""
    query: str
    query_id: str = ""
    answer_id: str
    answer: Answer | None = None
    """The whole answer; None where only its name was asked for."""
    query_config: dict[str, str] = Field(default_factory=dict)
    created_at: AwareDatetime
    """When the question was asked, as far as the answer says; else when the turn was stored."""
    completed_at: AwareDatetime
    """When the turn was stored."""


class Session(Model):
    """A conversation of one owner."""

    id: str
    display_name: str = ""
    """At first the first question."""
    state: SessionState = SessionState.IN_PROGRESS
    user_pseudo_id: str = ""
    turns: list[Turn] = Field(default_factory=list)
    labels: list[str] = Field(default_factory=list)
    is_pinned: bool = False
    started_at: AwareDatetime
    updated_at: AwareDatetime
    """When its last turn was stored, or it was last changed."""
    ended_at: AwareDatetime | None = None
    """When its last answer was complete; None before the first. Further turns may follow."""


class SessionPage(Model):
    """Some of an owner's sessions; their turns are not listed."""

    sessions: list[Session] = Field(default_factory=list)
    next_page_token: str | None = None
    """Asks for the next page; None on the last one."""


class SessionChanges(Model):
    """Changes of a session; None leaves a field as it is."""

    display_name: str | None = None
    labels: list[str] | None = None
    is_pinned: bool | None = None
    user_pseudo_id: str | None = None


class SessionOrder(Model):
    """The order of sessions."""

    key: Literal["updated_at", "started_at", "id", "is_pinned"]
    descending: bool = False


class SessionQuery(Model):
    """Which of an owner's sessions are listed, and in which order."""

    page_size: int = Field(default=50, ge=1, le=1000)
    page_token: str | None = None
    filters: FilterNode | None = None
    """Of ``id``, ``display_name``, ``user_pseudo_id``, ``state``, ``is_pinned``, ``labels`` (``any``), ``started_at``
    and ``updated_at`` (RFC 3339)."""
    order_by: list[SessionOrder] = Field(default_factory=lambda: [SessionOrder(key="updated_at", descending=True)])
