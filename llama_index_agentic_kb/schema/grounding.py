"""Grounding: what each claim of an answer rests on, and how well; and questions about text that is brought along.

Spans count characters (Python's: Unicode code points), end exclusive; ``grounding.spans`` turns them into UTF-8 bytes
(Google's Answer) and UTF-16 units (browsers). Pydantic checks what Google's protos don't: scores from 0 to 1, spans
that are not empty, no score and no support where there is nothing to check.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Final, Self, TypeAlias

from pydantic import Field, model_validator

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema._model import Model

CITATION_THRESHOLD: Final = 0.6
"""A reference that supports a claim less than this is no source of it (Google: ``citationThreshold``)."""

# Google's limits of CheckGrounding and Rank, and ours.
MAX_FACTS: Final = 200
MAX_FACT_CHARACTERS: Final = 10_000
MAX_ANSWER_TOKENS: Final = 4_096
MAX_RECORDS: Final = 200

UnitScore: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
"""A score from 0 to 1."""


class Verdict(StrEnum):
    """What the evidence says of a claim."""

    SUPPORTED = "supported"
    """The evidence says all of it."""
    PARTIALLY_SUPPORTED = "partiallySupported"
    """The evidence says a part of it. Google counts it as not grounded."""
    UNSUPPORTED = "unsupported"
    """The evidence does not say it."""
    CONTRADICTED = "contradicted"
    """The evidence speaks of the same and says otherwise: another number, date, name, or the opposite."""
    NOT_CHECKABLE = "notCheckable"
    """There is nothing to check ("Here is what I found."), or the scorer could not judge it."""


class ClaimFlag(StrEnum):
    """What is remarkable of a claim beside its verdict."""

    MISATTRIBUTED = "misattributed"
    """A marker names a reference that doesn't support the claim, while another one does."""
    UNCITED = "uncited"
    """Evidence supports the claim, and it bears no marker."""
    CITED_WITHOUT_SUPPORT = "citedWithoutSupport"
    """It bears markers, and no evidence supports it."""
    CONFLICTING_SOURCES = "conflictingSources"
    """Some evidence supports the claim and some contradicts it."""
    NOT_SCORED = "notScored"
    """It needs a check that was not made: the scorer failed, or time was over."""


class ConflictKind(StrEnum):
    """What sources disagree in."""

    NUMBER = "number"
    DATE = "date"
    NAME = "name"
    POLARITY = "polarity"
    OTHER = "other"


class ChangeKind(StrEnum):
    """What repairing did to a claim."""

    DROPPED = "dropped"
    REWRITTEN = "rewritten"


class FilteringLevel(StrEnum):
    """How well an answer must be grounded. Below, it is withheld."""

    LOW = "low"
    HIGH = "high"


class Span(Model):
    """A stretch of a text, in characters; not empty. The end is exclusive."""

    start: int = Field(ge=0)
    end: int = Field(ge=1)

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.start >= self.end:
            raise ValueError(f"start ({self.start}) must be below end ({self.end})")
        return self

    def of(self, text: str) -> str:
        """Return the stretch of a text."""
        return text[self.start : self.end]

    def moved(self, by: int) -> Span:
        """Return the same stretch, so many characters further on."""
        return Span(start=self.start + by, end=self.end + by)


class Support(Model):
    """Where a reference speaks of a claim."""

    reference_id: str
    """The N of ``[ref_id:N]``, as in ``Reference.id``."""
    node_id: str
    span: Span
    """In the node's text."""
    quote: str
    """What stands there, to the letter."""
    score: UnitScore
    """How well it supports the claim; where two references are needed, how well both do together."""


class GroundedClaim(Model):
    """One claim of an answer, and what it rests on."""

    text: str
    """What stands at ``span``, to the letter, with its markers."""
    span: Span
    """In the answer."""
    check_required: bool = True
    """Whether it says something of the world ("Here is what I found." doesn't)."""
    verdict: Verdict = Verdict.NOT_CHECKABLE
    score: UnitScore | None = None
    """Of the evidence together. None where no check is required or none was made."""
    supports: list[Support] = Field(default_factory=list)
    """What supports it (or, where contradicted, contradicts it), best first: one for each stretch of a reference."""
    cited: list[str] = Field(default_factory=list)
    """Ids that the model's own markers name."""
    flags: list[ClaimFlag] = Field(default_factory=list)
    misattributed: list[str] = Field(default_factory=list)
    """Those of ``cited`` that the evidence does not bear out."""
    lacking: Span | None = None
    """The part, in the answer, that keeps the claim from being supported: what stands before it is. None: unknown."""

    @model_validator(mode="after")
    def _scores_what_is_checked(self) -> Self:
        if not self.check_required and (self.score is not None or self.supports):
            raise ValueError("score, supports: a claim that needs no check has none")
        if (self.score is None) != (self.verdict is Verdict.NOT_CHECKABLE):
            raise ValueError("score: a claim has one if it has a verdict, and none if it is not checkable")
        return self


class ConflictingValue(Model):
    """One side of a conflict."""

    value: str
    """What this source says, in its own words ("1969", "3 March"), or the whole quote."""
    support: Support
    date: str | None = None
    """When the source was written, where its metadata says so."""


class Conflict(Model):
    """Sources that say different things of the same."""

    claim: int = Field(ge=0)
    """Which of the ledger's claims it concerns."""
    kind: ConflictKind
    values: list[ConflictingValue] = Field(min_length=2)
    """Each value with one place that says it."""


class AnswerChange(Model):
    """What repairing did to one claim."""

    kind: ChangeKind
    before: str
    after: str = ""
    """Empty where dropped."""
    span: Span
    """Of ``before``, in the answer as it was."""
    verdict: Verdict
    """Of ``before``."""
    reason: str = ""


class GroundingLedger(Model):
    """The claims of an answer with their evidence, in the answer's order."""

    claims: list[GroundedClaim] = Field(default_factory=list)
    grounding_score: UnitScore | None = None
    """The mean score over the claims that need a check and got one; None without any."""
    scorer: str = ""
    """Names what scored."""
    conflicts: list[Conflict] = Field(default_factory=list)
    changes: list[AnswerChange] = Field(default_factory=list)
    """What repairing changed; the claims are those of the repaired answer."""
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
        """The references that the answer's markers name, each once, in order of first mention."""
        return list(dict.fromkeys(reference for claim in self.claims for reference in claim.cited))

    def quoting(self, shown: Collection[str]) -> GroundingLedger:
        """Return the ledger without the words of references that are not among these, by their ids."""

        def bare(support: Support) -> Support:
            return support if support.reference_id in shown else support.model_copy(update={"quote": ""})

        claims = [one.model_copy(update={"supports": list(map(bare, one.supports))}) for one in self.claims]
        conflicts = []
        for conflict in self.conflicts:
            values = [
                side if side.support.reference_id in shown else ConflictingValue(value="", support=bare(side.support))
                for side in conflict.values
            ]
            conflicts.append(conflict.model_copy(update={"values": values}))
        return self.model_copy(update={"claims": claims, "conflicts": conflicts})

    def check_spans(self, answer: str) -> None:
        """Check that each claim stands in the answer where its span says.

        Raises:
            InvalidRequestError: One does not.
        """
        for number, claim in enumerate(self.claims):
            if claim.span.of(answer) != claim.text:
                raise InvalidRequestError(f"claims[{number}].span: the answer does not say {claim.text[:60]!r} there")


# -- questions about text that is brought along -----------------------------------------------------------------------


def answer_tokens(answer: str) -> int:
    """Count an answer's tokens as Google does: a word is one, and so is a full stop."""
    return len(re.findall(r"\w+|[^\w\s]", answer))


class Fact(Model):
    """A text that an answer may rest on."""

    text: str
    attributes: dict[str, str] = Field(default_factory=dict)
    """Part of the premise: "Wikipedia says ..." is grounded where the author is Wikipedia."""


class GroundingQuery(Model):
    """Whether an answer is grounded in facts."""

    answer: str
    facts: list[Fact] = Field(default_factory=list)
    citation_threshold: UnitScore = CITATION_THRESHOLD
    """The least score with which a fact is cited for a claim."""
    claim_scores: bool = False
    """Whether each claim's own score is wanted."""


class RankRecord(Model):
    """A record to rank, by its title, its content, or both."""

    id: str = ""
    title: str = ""
    content: str = ""
    score: UnitScore = 0.0

    @property
    def text(self) -> str:
        """Title and content."""
        return f"{self.title}\n{self.content}".strip()


class RankQuery(Model):
    """How records rank for a query."""

    query: str = ""
    records: list[RankRecord] = Field(min_length=1)
    top_n: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """None gives all."""
    model: str = ""
    ids_only: bool = False
    """Whether titles and contents are left out of the response."""
