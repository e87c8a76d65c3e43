"""The pieces of an answer while it is written: its text without markers, each claim's citations right after it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from llama_index_agentic_kb.grounding import MarkerFilter, Markers
from llama_index_agentic_kb.grounding.citations import MarkerCuts
from llama_index_agentic_kb.grounding.claims import Claim, split_claims
from llama_index_agentic_kb.schema.answer import Citation
from llama_index_agentic_kb.schema.answer_query import (
    CitationPiece,
    TextPiece,
)

__all__ = ["Pieces"]

ENDS: Final = frozenset(".!?]\n。！？")  # noqa: RUF001 (full-width ends of sentences)
"""Characters after which a claim may have ended."""

MOST: Final = 8_000
"""Characters of a paragraph whose claims are cited while it is written; of a longer one only the whole tells."""

OFTEN: Final = 20
"""How often a paragraph is read while it doubles."""

_FENCE: Final = re.compile(r"^[ \t]{0,3}(?:`{3,}|~{3,})", re.MULTILINE)


class Pieces:
    """Makes pieces of deltas.

    A claim is cited once the next one has begun: until then its markers may yet come. Spans are in the text without
    markers.

    Args:
        reference_ids: The N of ``[ref_id:N]`` of each reference, in the answer's order; others are not cited.
        cite: Whether citations are told at all.
    """

    def __init__(self, reference_ids: Sequence[str], *, cite: bool) -> None:
        self._index = {int(reference): position for position, reference in enumerate(reference_ids)}
        self._markers = MarkerFilter(range(max(self._index, default=-1) + 1), Markers.STRIP)
        self._cite = cite
        self._raw = ""
        self._shown = ""
        self._base = 0
        """Where the paragraph begins that is written: what stands before it was cited."""
        self._split = 0
        """Where the answer ended when it was read last."""
        self._cited = 0
        """Claims from there on that were told."""

    def feed(self, delta: str) -> list[TextPiece | CitationPiece]:
        """Take a delta of the answer, markers included, and give what can be told now."""
        self._raw += delta
        pieces = self._text(self._markers.feed(delta))
        if self._cite and self._is_due() and not ENDS.isdisjoint(delta):
            pieces += self._citations(whole=False)
        return pieces

    def close(self) -> list[TextPiece | CitationPiece]:
        """Give the rest, when all of the answer was taken."""
        pieces = self._text(self._markers.close())
        if self._cite and len(self._raw) - self._base <= MOST:
            pieces += self._citations(whole=True)
        return pieces

    def _is_due(self) -> bool:
        """Whether so much was added that the paragraph is read again: a twentieth of it, so that it costs little."""
        written = len(self._raw) - self._base
        return written <= MOST and (len(self._raw) - self._split) * OFTEN >= written

    def _text(self, shown: str) -> list[TextPiece | CitationPiece]:
        self._shown += shown
        return [TextPiece(text=shown)] if shown else []

    def _citations(self, *, whole: bool) -> list[TextPiece | CitationPiece]:
        cuts, base = MarkerCuts(self._raw), self._base
        self._split = len(self._raw)
        claims = split_claims(self._raw[base:])
        done = claims if whole else claims[:-1]
        pieces: list[TextPiece | CitationPiece] = []
        for claim in done[self._cited :]:
            start, end = (cuts.position(base + at) for at in (claim.span.start, claim.span.end))
            if end > len(self._shown):
                break
            self._cited += 1
            while start < end - 1 and self._shown[start].isspace():  # behind a marker that the claim began with
                start += 1
            sources = [self._index[number] for number in claim.cited if number in self._index]
            if sources and start < end:
                pieces.append(CitationPiece(citation=Citation(start=start, end=end, sources=sources)))
        if self._cited < len(claims):
            self._leave_paragraphs(claims)
        return pieces

    def _leave_paragraphs(self, claims: Sequence[Claim]) -> None:
        """Go on from the paragraph of the claim that is written: the whole is never read again and again.

        Not out of a block of code, which may hold empty lines.
        """
        base = self._base
        end = self._raw.rfind("\n\n", base, base + claims[self._cited].span.start)
        if end < 0 or len(_FENCE.findall(self._raw, base, end)) % 2:
            return
        self._base = end + 2
        self._cited = sum(claim.span.start >= self._base - base for claim in claims[: self._cited])
