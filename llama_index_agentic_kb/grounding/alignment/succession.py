"""What comes before and what after: "A before B" is "B after A", and not "B before A"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis

__all__ = ["is_reversed"]

_BEFORE: Final = frozenset(["before", "bevor", "vor", "until", "avant", "antes"])
_AFTER: Final = frozenset(["after", "since", "nachdem", "nach", "seit", "après", "después"])
_REACH: Final = 8
"""Words behind "before" and "after" that they may be followed by."""


class _Succession(NamedTuple):
    """Two stretches of a sentence, the earlier and the later."""

    earlier: frozenset[int]
    later: frozenset[int]


def is_reversed(
    claim: Analysis, source: Analysis, places: Mapping[int, Collection[int]], sentences: Collection[int]
) -> bool:
    """Whether claim and source tell of the same two events, in opposite order.

    Args:
        claim: The claim.
        source: The source.
        places: Where each word of the claim stands in the source's sentences.
        sentences: The source's sentences that bear the claim.
    """
    claimed = _succession(claim, range(len(claim.sentences)))
    told = _succession(source, sentences)
    if claimed is None or told is None:
        return False
    same = min(_shared(claimed.earlier, told.earlier, places), _shared(claimed.later, told.later, places))
    turned = min(_shared(claimed.earlier, told.later, places), _shared(claimed.later, told.earlier, places))
    return turned > same


def _succession(text: Analysis, sentences: Collection[int]) -> _Succession | None:
    """Give the only succession of some sentences; None where there is none, or several."""
    found = [at for at in text.within(sentences) if text.tokens[at].word in _BEFORE or text.tokens[at].word in _AFTER]
    if len(found) != 1:
        return None
    at = found[0]
    begin, behind = text.firsts[text.tokens[at].sentence], text.firsts[text.tokens[at].sentence + 1]
    end = min(behind, at + 1 + _REACH)
    comma = next(
        (to for to in range(at + 2, end) if "," in text.text[text.tokens[to - 1].end : text.tokens[to].start]), end
    )
    ruled = frozenset(range(at + 1, comma))
    rest = frozenset(range(begin, behind)) - ruled - {at}
    return _Succession(rest, ruled) if text.tokens[at].word in _BEFORE else _Succession(ruled, rest)


def _shared(claimed: frozenset[int], told: frozenset[int], places: Mapping[int, Collection[int]]) -> int:
    return sum(any(place in told for place in places.get(at, ())) for at in claimed)
