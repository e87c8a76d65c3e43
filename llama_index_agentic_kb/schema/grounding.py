"""Grounding: the evidence and score of each claim of an answer; and queries that check or rank texts of the caller.

Spans count Python characters (Unicode code points), end exclusive; ``grounding.spans`` converts them to UTF-8 bytes
(Google's Answer) and UTF-16 units (browsers). The models validate more than Google's protos: scores from 0 to 1,
no empty spans, and neither score nor support for claims that need no check.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Final, Self, TypeAlias

from pydantic import Field, model_validator

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema._model import Model

CITATION_THRESHOLD: Final = 0.6  # minimum support score for citing a reference (Google: ``citationThreshold``)

# The limits of Google's CheckGrounding and Rank methods, also used here.
MAX_FACTS: Final = 200
MAX_FACT_CHARACTERS: Final = 10_000
MAX_ANSWER_TOKENS: Final = 4_096
MAX_RECORDS: Final = 200

UnitScore: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Verdict(StrEnum):
    """The relation of the evidence to a claim."""

    SUPPORTED = "supported"
    PARTIALLY_SUPPORTED = "partiallySupported"  # a part of the claim; Google counts it as not grounded
    UNSUPPORTED = "unsupported"
    CONTRADICTED = "contradicted"  # evidence contradicts the claim: another number, date or name, or the opposite
    NOT_CHECKABLE = "notCheckable"  # no factual content ("Here is what I found."), or the scorer could not score it


class ClaimFlag(StrEnum):
    """A further observation about a claim, besides its verdict."""

    MISATTRIBUTED = "misattributed"  # a marker names a reference that doesn't support the claim, while another one does
    UNCITED = "uncited"  # evidence supports the claim, but the claim has no citation marker
    CITED_WITHOUT_SUPPORT = "citedWithoutSupport"  # claim has citation markers, but no evidence supports it
    CONFLICTING_SOURCES = "conflictingSources"  # some evidence supports the claim and some contradicts it
    NOT_SCORED = "notScored"  # claim needs a check, but the scorer failed or the time ran out


class ConflictKind(StrEnum):
    """The kind of disagreement between sources."""

    NUMBER = "number"
    DATE = "date"
    NAME = "name"
    POLARITY = "polarity"
    OTHER = "other"


class ChangeKind(StrEnum):
    """The kind of change made to a claim by repair."""

    DROPPED = "dropped"
    REWRITTEN = "rewritten"


class FilteringLevel(StrEnum):
    """The grounding level that an answer needs; an answer below it is withheld."""

    LOW = "low"
    HIGH = "high"


class Span(Model):
    """A non-empty range of characters in a text; the end is exclusive."""

    start: int = Field(ge=0)
    end: int = Field(ge=1)

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.start >= self.end:
            raise ValueError(f"start ({self.start}) must be below end ({self.end})")
        return self

    def of(self, text: str) -> str:
        """Return the part of a text that the span covers."""
        return text[self.start : self.end]


class Support(Model):
    """The place in a reference that supports or contradicts a claim."""

    reference_id: str  # the N of ``[ref_id:N]``, as in ``Reference.id``
    node_id: str
    span: Span  # position in the node's text
    quote: str  # node's text at ``span``, verbatim
    score: UnitScore  # support for the claim, or for the part of it that cites the reference


class GroundedClaim(Model):
    """One claim of an answer, with its evidence."""

    text: str  # answer's text at ``span``, verbatim, including citation markers
    span: Span  # position in the answer
    check_required: bool = True  # whether the claim has factual content ("Here is what I found." doesn't)
    verdict: Verdict = Verdict.NOT_CHECKABLE
    score: UnitScore | None = None  # support by all evidence together; None if the claim was not checked
    supports: list[Support] = Field(default_factory=list)  # or contradict it, if that is its verdict; best first
    cited: list[str] = Field(default_factory=list)  # reference ids in the model's citation markers
    flags: list[ClaimFlag] = Field(default_factory=list)
    misattributed: list[str] = Field(default_factory=list)  # ids in ``cited`` whose references do not support the claim
    lacking: Span | None = None  # unsupported end of a claim whose start is supported; None if unknown

    @model_validator(mode="after")
    def _scores_what_is_checked(self) -> Self:
        if not self.check_required and (self.score is not None or self.supports):
            raise ValueError("score, supports: a claim that needs no check has none")
        if (self.score is None) != (self.verdict is Verdict.NOT_CHECKABLE):
            raise ValueError("score: a claim has one if it has a verdict, and none if it is not checkable")
        return self


class ConflictingValue(Model):
    """One side of a conflict."""

    value: str  # value as written in the source ("1969", "3 March"), or the whole quote
    support: Support
    date: str | None = None


class Conflict(Model):
    """A disagreement between sources."""

    claim: int = Field(ge=0)  # index of the claim in the ledger
    kind: ConflictKind
    values: list[ConflictingValue] = Field(min_length=2)  # differing values, each with one passage that states it


class AnswerChange(Model):
    """One claim of an answer that was dropped or rewritten because its evidence did not support it."""

    kind: ChangeKind
    before: str
    after: str = ""  # rewritten claim; empty if the claim was dropped
    span: Span  # position of ``before`` in the original answer
    verdict: Verdict
    reason: str = ""


class GroundingLedger(Model):
    """The claims of an answer with their evidence, in the answer's order."""

    claims: list[GroundedClaim] = Field(default_factory=list)
    grounding_score: UnitScore | None = None  # mean score of the checked claims; None if no claim was checked
    scorer: str = ""
    conflicts: list[Conflict] = Field(default_factory=list)
    changes: list[AnswerChange] = Field(default_factory=list)  # by repair; ``claims`` are those of the repaired answer
    warnings: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        position, scored = 0, False
        for number, claim in enumerate(self.claims):
            if claim.span.start < position:
                raise ValueError(f"claims[{number}].span: starts inside of the claim before it")
            position, scored = claim.span.end, scored or claim.score is not None
        if self.grounding_score is not None and not scored:
            raise ValueError("grounding_score: no claim has a score")
        for conflict in self.conflicts:
            if conflict.claim >= len(self.claims):
                raise ValueError("conflicts.claim: there is no such claim")
        return self

    @property
    def cited(self) -> list[str]:
        """The distinct reference ids in the answer's citation markers, in order of first mention."""
        return list(dict.fromkeys(reference for claim in self.claims for reference in claim.cited))

    def check_spans(self, answer: str) -> None:
        """Raise ``InvalidRequestError`` if the answer does not contain each claim's text at the claim's span."""
        for number, claim in enumerate(self.claims):
            if claim.span.of(answer) != claim.text:
                raise InvalidRequestError(f"claims[{number}].span: the answer does not say {claim.text[:60]!r} there")


# -- queries that check or rank texts of the caller -------------------------------------------------------------------


def answer_tokens(answer: str) -> int:
    """Count an answer's tokens as Google does: each word and each punctuation mark is one token."""
    return len(re.findall(r"\w+|[^\w\s]", answer))


class Fact(Model):
    """A text that may support an answer."""

    text: str
    attributes: dict[str, str] = Field(default_factory=dict)
    """Metadata that counts as evidence too: "Wikipedia says ..." is grounded if the author is Wikipedia."""


class GroundingQuery(Model):
    """A request to check whether an answer is grounded in facts."""

    answer: str
    facts: list[Fact] = Field(default_factory=list)
    citation_threshold: UnitScore = CITATION_THRESHOLD  # minimum score for citing a fact for a claim
    claim_scores: bool = False


class RankRecord(Model):
    """A record to rank, by its title, its content, or both."""

    id: str = ""
    title: str = ""
    content: str = ""
    score: UnitScore = 0.0

    @property
    def text(self) -> str:
        """The title and content, joined by a line break."""
        return f"{self.title}\n{self.content}".strip()


class RankQuery(Model):
    """A request to rank records for a query."""

    query: str = ""
    records: list[RankRecord] = Field(min_length=1)
    top_n: int | None = Field(default=None, ge=1, le=2**31 - 1)  # maximum number of records to return; None returns all
    model: str = ""
    ids_only: bool = False  # whether the response omits titles and contents
