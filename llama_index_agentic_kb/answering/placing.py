"""Puts a ledger's claims where they stand in another form of the same answer: markers taken out, or renumbered."""

from __future__ import annotations

from itertools import pairwise

from llama_index_agentic_kb.grounding.citations import MarkerCuts
from llama_index_agentic_kb.schema.grounding import GroundedClaim, GroundingLedger, Span

__all__ = ["placed_ledger"]


def placed_ledger(ledger: GroundingLedger, text: str) -> GroundingLedger:
    """Give a ledger whose spans are in a text, which may differ from the checked answer in its markers.

    Claims that the text does not hold (it was cut, or rewritten) are left out, and so are their conflicts; what was
    found of the others stays as it is.

    Args:
        ledger: The claims of an answer.
        text: The answer as it is given.
    """
    if all(claim.span.of(text) == claim.text for claim in ledger.claims):
        return ledger
    bare = _Bare(text)
    claims: list[GroundedClaim] = []
    places: dict[int, int] = {}
    position = 0
    for number, claim in enumerate(ledger.claims):
        words = _Bare(claim.text).text.strip()
        at = bare.text.find(words, position) if words else -1
        if at < 0:
            continue
        position = at + len(words)
        span = bare.span(at, position)
        places[number] = len(claims)
        claims.append(claim.model_copy(update={"span": span, "text": span.of(text)}))
    conflicts = [one.model_copy(update={"claim": places[one.claim]}) for one in ledger.conflicts if one.claim in places]
    scored = any(claim.score is not None for claim in claims)
    return ledger.model_copy(
        update={
            "claims": claims,
            "conflicts": conflicts,
            "grounding_score": ledger.grounding_score if scored else None,
        }
    )


class _Bare:
    """A text without its markers, and where its characters stand in the whole."""

    def __init__(self, whole: str) -> None:
        self._markers = MarkerCuts(whole).spans
        edges = [0, *(edge for span in self._markers for edge in span), len(whole)]
        kept = [(start, end) for start, end in list(pairwise(edges))[::2] if start < end]
        self.text = "".join(whole[start:end] for start, end in kept)
        self._places = [place for start, end in kept for place in range(start, end)]

    def span(self, start: int, end: int) -> Span:
        """Give where a stretch stands in the whole, with the markers right behind it."""
        last = self._places[end - 1] + 1
        for begins, ends in self._markers:
            if begins == last:
                last = ends
        return Span(start=self._places[start], end=last)
