"""The answer as a resource: its text, what each part of it rests on, how it was found, and why it was withheld.

The parts are those of Google's ``Answer`` (Discovery Engine v1); ``wire.google_answer`` writes them. Here spans are in
characters of ``Answer.text`` (Python's), start included and end excluded; sources are indices into ``references``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AwareDatetime, Field, model_validator

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.grounding import GroundedClaim, GroundingLedger, Span, Verdict

__all__ = [
    "CITATION_THRESHOLD",
    "Answer",
    "AnswerReference",
    "AnswerState",
    "AnswerStep",
    "AnswerStepAction",
    "ChunkContent",
    "ChunkReference",
    "Citation",
    "DocumentReference",
    "GroundingSupport",
    "HarmCategory",
    "HarmLevel",
    "QueryClass",
    "QueryClassification",
    "SafetyRating",
    "SearchObservation",
    "SkippedReason",
    "Snippet",
    "StepState",
    "StructuredReference",
    "UnitScore",
    "ledger_citations",
    "ledger_supports",
]

CITATION_THRESHOLD: Final = 0.6
"""A reference that supports a claim less than this is no source of it (Google: ``citationThreshold``)."""

UnitScore: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
"""A score from 0 to 1."""


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


class SkippedReason(StrEnum):
    """Why there is no answer."""

    ADVERSARIAL_QUERY_IGNORED = "adversarialQueryIgnored"
    NON_ANSWER_SEEKING_QUERY_IGNORED = "nonAnswerSeekingQueryIgnored"
    """Chit-chat."""
    OUT_OF_DOMAIN_QUERY_IGNORED = "outOfDomainQueryIgnored"
    """Nothing of high relevance was found: the question is about something else than the sources."""
    POTENTIAL_POLICY_VIOLATION = "potentialPolicyViolation"
    NO_RELEVANT_CONTENT = "noRelevantContent"
    """What was found holds nothing relevant, or nothing was found."""
    JAIL_BREAKING_QUERY_IGNORED = "jailBreakingQueryIgnored"
    CUSTOMER_POLICY_VIOLATION = "customerPolicyViolation"
    NON_ANSWER_SEEKING_QUERY_IGNORED_V2 = "nonAnswerSeekingQueryIgnoredV2"
    """The query has no clear intent."""
    LOW_GROUNDED_ANSWER = "lowGroundedAnswer"
    USER_DEFINED_CLASSIFICATION_QUERY_IGNORED = "userDefinedClassificationQueryIgnored"
    UNHELPFUL_ANSWER = "unhelpfulAnswer"


class QueryClass(StrEnum):
    """The classes of a query."""

    ADVERSARIAL_QUERY = "adversarialQuery"
    NON_ANSWER_SEEKING_QUERY = "nonAnswerSeekingQuery"
    JAIL_BREAKING_QUERY = "jailBreakingQuery"
    NON_ANSWER_SEEKING_QUERY_V2 = "nonAnswerSeekingQueryV2"
    USER_DEFINED_CLASSIFICATION_QUERY = "userDefinedClassificationQuery"


class QueryClassification(Model):
    """Whether a query is of a class. Classes that were not judged are absent."""

    type: QueryClass
    positive: bool


class Citation(Span):
    """A claim, and the references that it cites."""

    sources: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Indices into the answer's references."""


class GroundingSupport(Span):
    """A claim as it was checked."""

    score: UnitScore | None = None
    """How well the sources support it; None where it was not checked, or needs no check."""
    check_required: bool | None = None
    """False for sentences that claim nothing ("Here is what I found.")."""
    sources: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)

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


class DocumentReference(Model):
    """A document with the passages of it that were used."""

    kind: Literal["document"] = "document"
    document: str = ""
    uri: str = ""
    title: str = ""
    chunks: list[ChunkContent] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)


class ChunkReference(Model):
    """One passage, with what is known of its document."""

    kind: Literal["chunk"] = "chunk"
    chunk: str = ""
    """The name of the passage: a LlamaIndex node's id."""
    content: str = ""
    relevance_score: UnitScore | None = None
    document: str = ""
    uri: str = ""
    title: str = ""
    page_identifier: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)


class StructuredReference(Model):
    """A record: data instead of text."""

    kind: Literal["structured"] = "structured"
    document: str = ""
    uri: str = ""
    title: str = ""
    data: dict[str, Any] = Field(default_factory=dict)


AnswerReference: TypeAlias = Annotated[
    DocumentReference | ChunkReference | StructuredReference, Field(discriminator="kind")
]
"""What an answer may rest on: everything that the model read, cited or not."""


class Snippet(Model):
    """A few words around what was found."""

    snippet: str = ""
    status: str = "SUCCESS"


class SearchObservation(Model):
    """One document that a search found."""

    document: str = ""
    uri: str = ""
    title: str = ""
    snippets: list[Snippet] = Field(default_factory=list)
    chunks: list[ChunkReference] = Field(default_factory=list)
    """Only name, content and score are written."""
    metadata: dict[str, Any] = Field(default_factory=dict)


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
        spanned: dict[str, Sequence[Citation | GroundingSupport]] = {
            "citations": self.citations,
            "groundingSupports": self.grounding_supports,
        }
        for field, claims in spanned.items():
            for position, claim in enumerate(claims):
                if claim.end > len(self.text):
                    raise ValueError(
                        f"{field}.{position}.end: {claim.end} is beyond the text of {len(self.text)} characters"
                    )
                for source in claim.sources:
                    if source >= len(self.references):
                        raise ValueError(
                            f"{field}.{position}.sources: there is no reference {source}; there are "
                            f"{len(self.references)}"
                        )
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
