"""Base types for scoring claims against passages: one protocol for features, classifiers and language models."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.schema.grounding import CITATION_THRESHOLD, ConflictKind, Span, Verdict

PARTIAL_THRESHOLD: Final = 0.35  # minimum score of a partially supported claim


@dataclass(frozen=True, slots=True)
class Premise:
    """A passage that claims are checked against; its title and attributes ("author": ...) count as evidence too."""

    text: str
    title: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of one passage for a claim."""

    premise: int  # index of the passage
    score: float  # how far the passage alone supports the claim, 0 to 1
    spans: tuple[Span, ...] = ()
    """Positions of the supporting sentences in the passage's text, best first; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A statement of a passage that differs from the claim: its ``quote``, at ``span`` in the passage's text."""

    kind: ConflictKind
    claimed: str
    quote: str
    premise: int
    span: Span
    strength: float = 1.0  # confidence that the passage contradicts the claim, 0 to 1


@dataclass(slots=True)
class ClaimScore:
    """The result of scoring one claim.

    Args:
        score: How far the passages together support the claim, 0 to 1. None if the scorer could not judge it.
        verdict: The verdict for this score.
        evidence: Evidence by passage, best first; irrelevant passages may be missing.
        rivals: Statements of passages that differ from the claim.
        left_out: Whether the scorer skipped the claim, for example a claim missing from a model's reply.
        parts: Evidence of passages that support only a part of the claim; added by ``ground``.
        lacking: Position in the answer of the part that lacks support; added by ``ground``. None if unknown.
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
        """Return one score for each claim, in order; ``deadline`` is a value of ``time.monotonic()``.

        Raises:
            DeadlineExceededError: The deadline has passed.
            AgenticKBError: The scorer failed.
        """
        ...


def verdict_of(score: float, *, contradicted: bool = False) -> Verdict:
    """Return the verdict for a score from 0 to 1; ``contradicted`` is True if a passage contradicts the claim."""
    if score >= CITATION_THRESHOLD:
        return Verdict.SUPPORTED
    if contradicted:
        return Verdict.CONTRADICTED
    return Verdict.PARTIALLY_SUPPORTED if score >= PARTIAL_THRESHOLD else Verdict.UNSUPPORTED
