"""What a passage that speaks of the same as a claim says otherwise."""

from __future__ import annotations

from typing import Final

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis, Item
from llama_index_agentic_kb.grounding.alignment.pairing import Pairing
from llama_index_agentic_kb.grounding.scorers.base import Rival
from llama_index_agentic_kb.schema.grounding import ConflictKind, Span

__all__ = ["rivals_of"]

_SAME_MATTER: Final = 0.55
"""Coverage from which a passage speaks of the same as the claim, so that what differs contradicts it."""
_KINDS: Final = {"number": ConflictKind.NUMBER, "date": ConflictKind.DATE, "name": ConflictKind.NAME}


def rivals_of(text: str, number: int, pairing: Pairing, source: Analysis) -> list[Rival]:
    """Give what a passage that speaks of the same says otherwise."""
    if pairing.coverage < _SAME_MATTER or not pairing.sentences:
        return []
    found = []
    if pairing.polarity == 0.0:
        start, end = source.sentences[pairing.sentences[0]]
        span = Span(start=start, end=end)
        found.append(Rival(ConflictKind.POLARITY, text, source.text[start:end], number, span, pairing.coverage))
    for slot in pairing.slots:
        if slot.rival is not None and slot.score < 1 - _SAME_MATTER and _is_of_a_kind(slot.item, slot.rival):
            span = _item_span(slot.rival, source)
            claimed = " ".join(slot.item.words)
            if slot.item.fact is not None:
                claimed = text[slot.item.fact.start : slot.item.fact.end]
            strength = pairing.coverage * (1 - slot.score)
            found.append(Rival(_KINDS[slot.item.kind], claimed, span.of(source.text), number, span, strength))
    return found


def _is_of_a_kind(claimed: Item, told: Item) -> bool:
    """Whether two items can contradict each other: a length does not contradict a year."""
    if claimed.fact is None or told.fact is None:
        return True
    one, other = claimed.fact, told.fact
    is_unit = bool(one.factor and other.factor) and one.value * other.factor == other.value * one.factor
    return one.dimension == other.dimension or is_unit


def _item_span(item: Item, source: Analysis) -> Span:
    if item.fact is not None:
        return Span(start=item.fact.start, end=item.fact.end)
    return Span(start=source.tokens[item.first].start, end=source.tokens[item.last].end)
