"""What scores claims against passages: one protocol for features, classifiers and language models."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.schema.grounding import CITATION_THRESHOLD, ConflictKind, Span, Verdict

PARTIAL_THRESHOLD: Final = 0.35
"""Score from which a part of a claim is supported."""


@dataclass(frozen=True, slots=True)
class Premise:
    """A passage that claims are held against.

    Args:
        text: What it says.
        title: What it is about; part of what it says.
        attributes: Further facts of it ("author": "Wikipedia"); part of what it says.
    """

    text: str
    title: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one passage says of a claim.

    Args:
        premise: Which passage, by its position.
        score: How far it alone supports the claim, 0 to 1.
        spans: The sentences that say so, in the passage's text, best first; empty where the scorer can't tell.
    """

    premise: int
    score: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Rival:
    """What a passage says in the place of what the claim says.

    Args:
        kind: What differs.
        claimed: The claim's words.
        quote: The passage's words.
        premise: Which passage, by its position.
        span: Where ``quote`` stands, in the passage's text.
        strength: How surely it is of the same, 0 to 1.
    """

    kind: ConflictKind
    claimed: str
    quote: str
    premise: int
    span: Span
    strength: float = 1.0


@dataclass(slots=True)
class ClaimScore:
    """What came of scoring one claim.

    Args:
        score: How far the passages together support it, 0 to 1; None where the scorer could not judge it.
        verdict: What that means.
        evidence: By passage, best first; passages that say nothing of it may be left out.
        rivals: What passages say otherwise.
        left_out: Whether it was to be judged and was not, as where a model's reply leaves a claim out.
        parts: Of passages that bear a part of it; ``ground`` adds them.
        lacking: The part that lacks support where another has it, in the answer; ``ground`` adds it.
    """

    score: float | None
    verdict: Verdict
    evidence: list[Evidence] = field(default_factory=list)
    rivals: list[Rival] = field(default_factory=list)
    left_out: bool = False
    parts: list[Evidence] = field(default_factory=list)
    lacking: Span | None = None


@runtime_checkable
class ClaimScorer(Protocol):
    """Scores claims against passages."""

    name: str

    def score(
        self, claims: Sequence[Claim], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> Coroutine[Any, Any, list[ClaimScore]]:
        """Score claims, all at once.

        Args:
            claims: Each needs a check.
            premises: The passages.
            deadline: ``time.monotonic()`` at which it is given up; None waits.

        Returns:
            One score for each claim, in order.

        Raises:
            DeadlineExceededError: It was late.
            AgenticKBError: It failed.
        """
        ...


def verdict_of(score: float, *, contradicted: bool = False) -> Verdict:
    """Return what a score from 0 to 1 means; ``contradicted`` where a passage says otherwise."""
    if score >= CITATION_THRESHOLD:
        return Verdict.SUPPORTED
    if contradicted:
        return Verdict.CONTRADICTED
    return Verdict.PARTIALLY_SUPPORTED if score >= PARTIAL_THRESHOLD else Verdict.UNSUPPORTED
