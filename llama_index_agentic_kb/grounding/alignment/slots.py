"""Slots: whether a number, a date or a name stands in the source where the claim has it, or another one does.

Each item of a claim has anchors, the words around it. What the source has near the same anchors competes for the item's
place: "born in 1937" is borne out by a 1937 near "born", and contradicted by a 1950 that is nearer. Verbs are read with
their voice, so that "A beat B" and "B was beaten by A" are one, and "B beat A" is another.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis, Item
from llama_index_agentic_kb.grounding.alignment.derivation import DERIVED, are_listed, derived
from llama_index_agentic_kb.grounding.alignment.matching import Match, match_items
from llama_index_agentic_kb.grounding.alignment.voice import Sides

__all__ = ["Slot", "fill_slots"]

NEAR: Final = 5.0
"""Words apart at which an anchor counts half."""
SENTENCE: Final = 8
"""Words that a sentence's end counts for."""
WRONG_SIDE: Final = 0.45
"""What an anchor counts for a name on its other side: who does is not whom it is done to."""
OTHER_PREPOSITION: Final = 0.6
_BORNE_OUT: Final = 0.5
"""Likeness from which a candidate is the claimed item."""
_LOW: Final = 0.5
_HIGH: Final = 0.85
"""Shares of the best candidate's fit between which an item's place is doubtful."""
_DIRECTIONS: Final = frozenset(
    ["from", "to", "until", "since", "by", "after", "before", "over", "under", "against", "above", "below"]
)
EXCHANGED: Final = 0.1
CLEARLY: Final = 1.12
"""By how much two items must fit better in each other's places to be taken for exchanged."""
TAKEN: Final = 0.6
COUNTED: Final = 2.0
FRONTED: Final = 4
_OPENING: Final = 3
_MOST_CANDIDATES: Final = 12
_MOST_ITEMS: Final = 40
"""Items of a claim that are looked for; a sentence has few."""
_IMPLIED: Final = 0.9


@dataclass(slots=True)
class Slot:
    """How one item of a claim stands in a source.

    Args:
        item: The claim's.
        score: From 0, it is not there or another is in its place, to 1.
        place: The source's token where it stands; None where it doesn't.
        rival: What stands in its place instead, if something does.
        sentence: The source's sentence with the item, or with its rival.
    """

    item: Item
    score: float
    place: int | None
    rival: Item | None
    sentence: int | None


def fill_slots(claim: Analysis, source: Analysis, matches: Sequence[Match], sentences: Collection[int]) -> list[Slot]:
    """Find each item of a claim in a source.

    Args:
        claim: The claim.
        source: The source.
        matches: Where the claim's content words stand in the source.
        sentences: The source's sentences that bear the claim.
    """
    setting = _Setting(claim, source, matches, sentences)
    seekers = [_Seeker(item, setting) for item in claim.items[:_MOST_ITEMS]]
    taken: set[int] = set()
    for seeker in sorted(seekers, key=lambda one: -one.best_fit):
        seeker.settle(taken)
    explained = {seeker.place for seeker in seekers if seeker.place is not None}
    slots = [seeker.slot(explained) for seeker in seekers]
    for one, other in itertools.combinations(range(len(seekers)), 2):
        if _are_exchanged(seekers[one], seekers[other]):
            for number in (one, other):
                slots[number].score = min(slots[number].score, EXCHANGED)
                slots[number].rival = seekers[other if number == one else one].found
    return slots


class _Setting:
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


class _Seeker:
    """An item of a claim, and where it may stand."""

    def __init__(self, item: Item, setting: _Setting) -> None:
        self.item = item
        self.setting = setting
        self.anchors = setting.anchors(item)
        self.place: int | None = None
        self.found: Item | None = None
        self.fit = 0.0
        self.likeness = 0.0
        candidates = [*match_items(item, setting.source), *_unnamed(item, setting)]
        if len(candidates) > _MOST_CANDIDATES:
            tokens = setting.source.tokens
            candidates.sort(key=lambda one: (one[0] < _BORNE_OUT, tokens[one[1]].sentence not in setting.sentences))
            candidates = candidates[:_MOST_CANDIDATES]
        self._own: list[tuple[float, float, int, Item | None]] = []
        self._others: list[tuple[float, Item]] = []
        for likeness, place, other in candidates:
            if likeness >= _BORNE_OUT:
                self._own.append((self.fit_at(place, other), likeness, place, other))
            elif other is not None and (weight := _rivalry(item, other)):
                self._others.append((weight * self.fit_at(place, other), other))
        self._own.sort(key=lambda one: -one[0] * one[1])
        self.best_fit = self._own[0][0] if self._own else 0.0

    def fit_at(self, place: int, other: Item | None, without: Collection[int] = ()) -> float:
        """Tell how well a place of the source fits what stands around the item in the claim."""
        anchors = [(match, weight) for match, weight in self.anchors if match.at not in without] if without else None
        return _fit(self.item, place, other, self.anchors if anchors is None else anchors, self.setting)

    def settle(self, taken: set[int]) -> None:
        """Take the best place; one that a number or date of the claim has taken already counts less."""
        best = 0.0
        for fit, likeness, place, other in self._own:
            worth = fit * likeness * (TAKEN if self.item.fact is not None and place in taken else 1.0)
            if self.place is None or worth > best:
                best, self.fit, self.likeness, self.place, self.found = worth, worth / likeness, likeness, place, other
        if self.place is not None:
            taken.add(self.place)

    def slot(self, explained: Collection[int]) -> Slot:
        """Judge the item: whether something that no other item of the claim explains stands in its place."""
        rivals = [(fit, other) for fit, other in self._others if other.first not in explained]
        best_rival, rival = max(rivals, key=lambda one: one[0], default=(0.0, None))
        tokens = self.setting.source.tokens
        if self.place is None and (worked_out := derived(self.item, self.setting.source, self.setting.sentences)):
            return Slot(self.item, DERIVED, worked_out.first, None, tokens[worked_out.first].sentence)
        if self.place is None:
            return Slot(self.item, 0.0, None, rival, None if rival is None else tokens[rival.first].sentence)
        own = self.fit * self.likeness
        share = 1.0 if own >= best_rival else own / best_rival
        score = self.likeness * min(1.0, max(0.0, (share - _LOW) / (_HIGH - _LOW)))
        rival = rival if share < _HIGH else None
        at = self.place if rival is None else rival.first
        return Slot(self.item, score, self.place, rival, tokens[at].sentence)


def _are_exchanged(one: _Seeker, other: _Seeker) -> bool:
    """Whether two items of a claim would fit the source better if each stood where the other does."""
    if one.place is None or other.place is None or one.place == other.place or one.item.kind != other.item.kind:
        return False
    if (
        one.item.fact is not None
        and other.item.fact is not None
        and one.item.fact.dimension != other.item.fact.dimension
    ):
        return False
    setting = one.setting
    if are_listed(setting.claim, one.item.last, other.item.first):
        return False
    first, second = sorted(((one.place, one.found), (other.place, other.found)), key=lambda found: found[0])
    if are_listed(setting.source, first[0] if first[1] is None else first[1].last, second[0]):
        return False
    both = {*range(one.item.first, one.item.last + 1), *range(other.item.first, other.item.last + 1)}
    as_said = one.fit_at(one.place, one.found, both) + other.fit_at(other.place, other.found, both)
    exchanged = one.fit_at(other.place, other.found, both) + other.fit_at(one.place, one.found, both)
    return exchanged > CLEARLY * as_said


def _rivalry(item: Item, other: Item | None) -> float:
    """Tell how far one item could stand in the place of another: one of the same kind and dimension."""
    if other is None or other.kind != item.kind:
        return 0.5 if other is not None and other.fact is not None and item.fact is not None else 0.0
    if item.fact is not None and other.fact is not None and item.fact.dimension != other.fact.dimension:
        return 0.8 if item.fact.value == other.fact.value else 0.6
    return 1.0


def _gap(at: int, item: Item) -> int:
    return item.first - at if at < item.first else at - item.last


def _unnamed(item: Item, setting: _Setting) -> list[tuple[float, int, Item | None]]:
    """Give where a name's words stand without being a name there, or are implied by what the sentence is about."""
    source = setting.source
    if item.kind == "number":
        return _in_titles(item, setting)
    own = [match for match in setting.every_match if item.first <= match.at <= item.last]
    if item.kind != "name" or not own:
        return []
    places: list[tuple[float, int, Item | None]] = []
    if all(match.places for match in own):
        least = min(match.likeness for match in own)
        places += [(least, place, None) for place in own[0].places if not source.tokens[place].name]
    stems = {setting.claim.tokens[match.at].stem for match in own}
    for sentence, topic in enumerate(source.topics):
        if topic and (stems <= topic or topic <= stems):
            places.append((_IMPLIED, source.firsts[sentence], None))
    return [(likeness, place, other) for likeness, place, other in places if place < len(source.tokens)]


def _in_titles(item: Item, setting: _Setting) -> list[tuple[float, int, Item | None]]:
    """Give the sentences that speak of what has a number in its name ("Apollo 11")."""
    source = setting.source
    word = setting.claim.tokens[item.first].word
    numbered = item.first == item.last and item.first > 0 and setting.claim.tokens[item.first - 1].content
    if not numbered:
        return []
    return [
        (_IMPLIED, source.firsts[sentence], None)
        for sentence, topic in enumerate(source.topics)
        if word in topic and source.firsts[sentence] < len(source.tokens)
    ]


def _fit(
    item: Item, place: int, other: Item | None, anchors: Sequence[tuple[Match, float]], setting: _Setting
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
        for at in match.places:
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
        if topic and best < _IMPLIED and match.stem in topic:
            best = max(best, 2 * NEAR / (2 * NEAR + place - source.firsts[sentence]))
        total += weight * best
    return total * _prepositions(item.first, place, setting.claim, source)


def _prepositions(at: int, place: int, claim: Analysis, source: Analysis) -> float:
    """Lower the fit where different words of direction stand in front ("from 5", "to 5")."""
    if at == 0 or place == 0:
        return 1.0
    claimed, told = claim.tokens[at - 1].word, source.tokens[place - 1].word
    differ = claimed != told and claimed in _DIRECTIONS and told in _DIRECTIONS
    return OTHER_PREPOSITION if differ else 1.0
