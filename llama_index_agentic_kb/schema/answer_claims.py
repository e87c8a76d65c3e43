"""The ledger of an answer's claims, as the citations and grounding supports of an ``Answer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llama_index_agentic_kb.schema.answer import Citation, GroundingSupport
from llama_index_agentic_kb.schema.grounding import GroundedClaim, GroundingLedger, Verdict

__all__ = ["CITATION_THRESHOLD", "ledger_citations", "ledger_supports"]

CITATION_THRESHOLD: Final = 0.6
"""A reference that supports a claim less than this is no source of it (Google: ``citationThreshold``)."""


def ledger_citations(
    ledger: GroundingLedger, reference_ids: Sequence[str], *, threshold: float = CITATION_THRESHOLD
) -> list[Citation]:
    """Give the citations of the claims that references support.

    Args:
        ledger: The claims of an answer, with spans in that answer's text.
        reference_ids: The ids of the answer's references, in their order.
        threshold: The least score, 0 to 1, with which a reference is a source.
    """
    citations = []
    for claim in ledger.claims:
        sources = _sources(claim, reference_ids, threshold)
        if sources:
            citations.append(Citation(start=claim.span.start, end=claim.span.end, sources=sources))
    return citations


def ledger_supports(
    ledger: GroundingLedger, reference_ids: Sequence[str], *, threshold: float = CITATION_THRESHOLD
) -> list[GroundingSupport]:
    """Give every claim as it was checked, those without support included; see ``ledger_citations``."""
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
    """Give the indices of the references that support a claim; what contradicts it is no source."""
    if claim.verdict is Verdict.CONTRADICTED:
        return []
    index = {reference_id: position for position, reference_id in enumerate(reference_ids)}
    good = [index[one.reference_id] for one in claim.supports if one.score >= threshold and one.reference_id in index]
    return list(dict.fromkeys(good))
