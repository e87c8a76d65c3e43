"""What stands around the items of a claim, and how well a place of a source fits it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from typing import Final

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis, Item
from llama_index_agentic_kb.grounding.alignment.matching import Match
from llama_index_agentic_kb.grounding.alignment.voice import Sides

__all__ = ["IMPLIED", "Setting", "fit_of"]

NEAR: Final = 5.0
"""Words apart at which an anchor counts half."""
SENTENCE: Final = 8
"""Words that a sentence's end counts for."""
WRONG_SIDE: Final = 0.45
"""What an anchor counts for a name on its other side: who does is not whom it is done to."""
OTHER_PREPOSITION: Final = 0.6
_DIRECTIONS: Final = frozenset(
    ["from", "to", "until", "since", "by", "after", "before", "over", "under", "against", "above", "below"]
)
COUNTED: Final = 2.0
FRONTED: Final = 4
_OPENING: Final = 3
IMPLIED: Final = 0.9
_FEW: Final = 3
"""Places that are looked at one by one sooner than they are searched."""


class Setting:
    """What all items of a claim have in common."""

    def __init__(self, claim: Analysis, source: Analysis, matches: Sequence[Match], sentences: Collection[int]) -> None:
        self.claim = claim
        self.source = source
        self.matches = [match for match in matches if match.places]
        self.every_match = matches
        self.sentences = sentences
        self.sides = Sides(claim, source)

    def anchors(self, item: Item) -> list[tuple[Match, float]]:
        """Give the words around an item, the nearer the weightier; the noun that a number counts most of all."""
        is_fronted = self._is_fronted(item)
        found = []
        for match in self.matches:
            if item.first <= match.at <= item.last:
                continue
            gap = FRONTED if is_fronted else abs(_gap(match.at, item))
            weight = match.weight * match.likeness / (1 + gap / NEAR)
            if item.kind == "number" and match.at == item.last + 1:
                weight *= COUNTED
            found.append((match, weight))
        return found

    def _is_fronted(self, item: Item) -> bool:
        """Whether a date opens its sentence, apart from what it dates ("In 1526, she married ...")."""
        tokens, sentence = self.claim.tokens, self.claim.tokens[item.first].sentence
        opens = item.first - self.claim.firsts[sentence] <= _OPENING
        return item.kind == "date" and opens and self.claim.text[tokens[item.last].end :][:1] == ","


def _gap(at: int, item: Item) -> int:
    return item.first - at if at < item.first else at - item.last


def fit_of(
    item: Item, place: int, other: Item | None, anchors: Sequence[tuple[Match, float]], setting: Setting
) -> float:
    """Tell how well a place of the source fits what stands around a claim's item. Where most of the time goes."""
    source, claimed, told = setting.source, setting.claim.tokens, setting.source.tokens
    sentence_of, is_name = source.sentence_of, item.kind == "name"
    last = place if other is None else other.last
    sentence = sentence_of[place]
    topic = source.topics[sentence]
    total = 0.0
    for match, weight in anchors:
        best = 0.0
        has_sides = is_name and not claimed[match.at].name
        for at in match.places if has_sides else _nearest(match.places, place, last):
            if place <= at <= last:
                continue
            apart = (place - at if at < place else at - last) - 1
            if sentence_of[at] != sentence:
                apart += SENTENCE * abs(sentence_of[at] - sentence)
            near = NEAR / (NEAR + apart)
            if near > best:
                is_verb = has_sides and sentence_of[at] == sentence and not told[at].name
                if is_verb and not setting.sides.agree(match.at, item.first, at, place):
                    near *= WRONG_SIDE
                    if near < best:
                        continue
                best = near
        if topic and best < IMPLIED and match.stem in topic:
            best = max(best, 2 * NEAR / (2 * NEAR + place - source.firsts[sentence]))
        total += weight * best
    return total * _prepositions(item.first, place, setting.claim, source)


def _nearest(places: Sequence[int], first: int, last: int) -> Sequence[int]:
    """Give, of places in order, the nearest before and the nearest behind a stretch: no other counts for more."""
    if len(places) <= _FEW:
        return places
    before, behind = bisect_left(places, first), bisect_right(places, last)
    return [*places[max(0, before - 1) : before], *places[behind : behind + 1]]


def _prepositions(at: int, place: int, claim: Analysis, source: Analysis) -> float:
    """Lower the fit where different words of direction stand in front ("from 5", "to 5")."""
    if at == 0 or place == 0:
        return 1.0
    claimed, told = claim.tokens[at - 1].word, source.tokens[place - 1].word
    differ = claimed != told and claimed in _DIRECTIONS and told in _DIRECTIONS
    return OTHER_PREPOSITION if differ else 1.0
