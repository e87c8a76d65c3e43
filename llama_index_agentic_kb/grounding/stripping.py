"""An answer without its markers, and its ledger with it."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index_agentic_kb.grounding.citations import marker_spans, without_markers
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
    cuts = marker_spans(text)
    if not cuts:
        return text, ledger
    left, at = [], 0
    for start, end in cuts:
        left.append(text[at:start])
        at = end
    left.append(text[at:])
    shorter = "".join(left)
    claims = [_moved(claim, cuts, shorter) for claim in ledger.claims]
    return shorter, ledger.model_copy(update={"claims": claims})


def _moved(claim: GroundedClaim, cuts: Sequence[tuple[int, int]], shorter: str) -> GroundedClaim:
    span = Span(start=without_markers(claim.span.start, cuts), end=without_markers(claim.span.end, cuts))
    return claim.model_copy(update={"span": span, "text": span.of(shorter)})
