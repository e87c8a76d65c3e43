"""The score of a claim of several facts, from the scores of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from llama_index_agentic_kb.grounding.alignment.clauses import Clause
from llama_index_agentic_kb.grounding.scorers.base import (
    CITATION_THRESHOLD,
    PARTIAL_THRESHOLD,
    ClaimScore,
    Evidence,
    verdict_of,
)
from llama_index_agentic_kb.schema.grounding import Span, Verdict

__all__ = ["by_parts", "may_matter"]

_NOT_WHOLE: Final = CITATION_THRESHOLD - 0.05
"""The most that a claim scores of which a part is not supported."""
_DENIED: Final = PARTIAL_THRESHOLD - 0.05
"""The most that a claim scores of which a part is contradicted."""


def by_parts(whole: ClaimScore, parts: Sequence[ClaimScore], clauses: Sequence[Clause]) -> ClaimScore:
    """Give the score of a claim from those of its parts, where they are borne by different passages.

    Args:
        whole: The claim's score as one.
        parts: The scores of its parts.
        clauses: The parts.

    Returns:
        ``whole`` where one passage bears all parts: then it is judged better as one.
    """
    denied = [part for part in parts if part.verdict is Verdict.CONTRADICTED]
    if len(_bearing(parts)) < 2 and not (_is_joint(whole) and denied):  # noqa: PLR2004 (two passages)
        return whole
    scores = [(part.score or 0.0) if clause.sound else 0.0 for part, clause in zip(parts, clauses, strict=True)]
    weights = [clause.weight for clause in clauses]
    score = sum(one * weight for one, weight in zip(scores, weights, strict=True)) / sum(weights)
    if denied:
        score = min(score, _DENIED)
    elif min(scores) < CITATION_THRESHOLD:
        score = min(score, _NOT_WHOLE)
    rivals = [rival for part in denied for rival in part.rivals]
    told = denied or [part for part in parts if part.verdict is Verdict.SUPPORTED]
    return ClaimScore(score, verdict_of(score, contradicted=bool(denied)), _evidence(told), rivals)


def may_matter(whole: ClaimScore, parts: Sequence[ClaimScore], left: int) -> bool:
    """Tell whether the parts that are yet to be judged can change a claim's score.

    Args:
        whole: The claim's score as one.
        parts: The scores of its first parts.
        left: How many are to come.
    """
    return _is_joint(whole) or len(_bearing(parts)) + left >= 2  # noqa: PLR2004 (two passages)


def _bearing(parts: Sequence[ClaimScore]) -> set[int]:
    """Give the passages that bear parts best."""
    return {part.evidence[0].premise for part in parts if part.verdict is Verdict.SUPPORTED and part.evidence}


def _is_joint(whole: ClaimScore) -> bool:
    return whole.verdict is Verdict.SUPPORTED and len(whole.evidence) > 1


def _evidence(parts: Sequence[ClaimScore]) -> list[Evidence]:
    """Give what bears the parts: of each passage its best score, and the sentences for all of them."""
    found: dict[int, Evidence] = {}
    for part in parts:
        for one in part.evidence:
            if one.score < CITATION_THRESHOLD and one is not part.evidence[0]:
                continue
            known = found.get(one.premise)
            spans: tuple[Span, ...] = (
                one.spans if known is None else (*known.spans, *(span for span in one.spans if span not in known.spans))
            )
            best = one.score if known is None else max(known.score, one.score)
            found[one.premise] = replace(one, score=best, spans=spans)
    return sorted(found.values(), key=lambda one: -one.score)
