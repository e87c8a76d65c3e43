"""An answer without its markers, and its ledger with it."""

from __future__ import annotations

from llama_index_agentic_kb.grounding.citations import MarkerCuts
from llama_index_agentic_kb.schema.grounding import GroundedClaim, GroundingLedger, Span

__all__ = ["strip_markers"]


def strip_markers(text: str, ledger: GroundingLedger) -> tuple[str, GroundingLedger]:
    """Take the reference markers out of an answer; its ledger's spans become those of the shorter text.

    What a claim cited stays in ``cited``. The changes of a repair speak of the answer before it, and stay.

    Args:
        text: The answer.
        ledger: Its ledger.

    Returns:
        The text without markers, and a ledger of it.
    """
    cuts = MarkerCuts(text)
    if not cuts.spans:
        return text, ledger
    shorter = cuts.applied(text)
    claims = [_moved(claim, cuts, shorter) for claim in ledger.claims]
    return shorter, ledger.model_copy(update={"claims": claims})


def _moved(claim: GroundedClaim, cuts: MarkerCuts, shorter: str) -> GroundedClaim:
    start, end = cuts.position(claim.span.start), cuts.position(claim.span.end)
    while start < end - 1 and shorter[start].isspace():  # behind a marker that the claim began with
        start += 1
    span = Span(start=start, end=end)
    return claim.model_copy(update={"span": span, "text": span.of(shorter)})
