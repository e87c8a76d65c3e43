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
from llama_index_agentic_kb.grounding.alignment.setting import IMPLIED, Setting, fit_of

__all__ = ["Slot", "fill_slots"]

ATTRIBUTE: Final = 0.4
"""What a name counts as a rival that only tells of what kind something is."""
_ARTICLES: Final = frozenset(["a", "an", "the", "its", "their", "his", "her"])
_PLACING: Final = frozenset(["in", "at", "on", "near", "from", "to", "with", "for", "around", "under", "above"])
_LINKS: Final = frozenset(["and", "or", "but", "which", "who", "that", "to", "of", "in"])
_BORNE_OUT: Final = 0.5
"""Likeness from which a candidate is the claimed item."""
_LOW: Final = 0.5
_HIGH: Final = 0.85
"""Shares of the best candidate's fit between which an item's place is doubtful."""
EXCHANGED: Final = 0.1
CLEARLY: Final = 1.12
"""By how much two items must fit better in each other's places to be taken for exchanged."""
TAKEN: Final = 0.6
_MOST_CANDIDATES: Final = 12
_MOST_ITEMS: Final = 40
"""Items of a claim that are looked for; a sentence has few."""


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
    setting = Setting(claim, source, matches, sentences)
    seekers = [_Seeker(item, setting) for item in claim.items[:_MOST_ITEMS]]
    taken: set[int] = set()
    for seeker in sorted(seekers, key=lambda one: -one.best_fit):
        seeker.settle(taken)
    explained = {seeker.place for seeker in seekers if seeker.place is not None}
    slots = [
        seeker.slot(explained | {at for other in seekers if other is not seeker for at in other.named})
        for seeker in seekers
    ]
    for one, other in itertools.combinations(range(len(seekers)), 2):
        if _are_exchanged(seekers[one], seekers[other]):
            for number in (one, other):
                slots[number].score = min(slots[number].score, EXCHANGED)
                slots[number].rival = seekers[other if number == one else one].found
    return slots


class _Seeker:
    """An item of a claim, and where it may stand."""

    def __init__(self, item: Item, setting: Setting) -> None:
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
        self._others: list[tuple[float, int, Item]] = []
        for likeness, place, other in candidates:
            if likeness >= _BORNE_OUT:
                self._own.append((self.fit_at(place, other), likeness, place, other))
            elif other is not None and (weight := _rivalry(item, other)):
                is_attribute = _is_attribute(other, setting.source) and not _is_attribute(item, setting.claim)
                weight *= ATTRIBUTE if is_attribute else 1.0
                self._others.append((weight, place, other))
        self._own.sort(key=lambda one: -one[0] * one[1])
        self.named = {
            other.first for _, _, _, other in self._own if other is not None and other.words == item.words != ()
        }
        self.best_fit = self._own[0][0] if self._own else 0.0

    def fit_at(self, place: int, other: Item | None, without: Collection[int] = ()) -> float:
        """Tell how well a place of the source fits what stands around the item in the claim."""
        anchors = [(match, weight) for match, weight in self.anchors if match.at not in without] if without else None
        return fit_of(self.item, place, other, self.anchors if anchors is None else anchors, self.setting)

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
        rivals = [
            (weight * self.fit_at(place, other), other)
            for weight, place, other in self._others
            if other.first not in explained and self._may_be(other)
        ]
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

    def _may_be(self, other: Item) -> bool:
        """Whether something else can stand in the item's place: a mass in that of a mass, a subject in a subject's."""
        if self.place is None:
            return True
        if self.item.fact is not None:
            alike = other.fact is not None and other.fact.dimension == self.item.fact.dimension
            return alike or not self.item.fact.dimension
        if self.is_spoken_of():
            return self._does(other)
        return not self._is_placed_otherwise(other)

    def is_spoken_of(self) -> bool:
        """Whether the item is what the claim speaks of, and what the sentence that bears most of it speaks of."""
        claim, source = self.setting.claim, self.setting.source
        first = claim.firsts[claim.tokens[self.item.first].sentence]
        bearing = next(iter(self.setting.sentences), None)
        opens = self.is_owner() or not any(claim.tokens[at].content for at in range(first, self.item.first))
        if bearing is None or not opens:
            return False
        stems = {claim.tokens[at].stem for at in range(self.item.first, self.item.last + 1)}
        topic = source.topics[bearing] or subject_of(source, bearing)
        return bool(topic) and (stems <= topic or topic <= stems)

    def is_owner(self) -> bool:
        """Whether the claim speaks of something of the item ("The music of Low Tide")."""
        tokens, at = self.setting.claim.tokens, self.item.first - 1
        while at >= 0 and not tokens[at].content and tokens[at].word != "of":
            at -= 1
        first = self.setting.claim.firsts[tokens[self.item.first].sentence]
        return at > first and tokens[at].word == "of" and sum(token.content for token in tokens[first:at]) == 1

    def _does(self, other: Item) -> bool:
        """Whether another name does what the claim says: it stands before the word for it, or behind "by"."""
        source = self.setting.source
        if source.sentence_of[other.first] != next(iter(self.setting.sentences)):
            return False
        after = other.last + 1
        while (
            after < len(source.tokens) and not source.tokens[after].content and source.tokens[after].word not in _LINKS
        ):
            after += 1
        said = any(after in match.places for match in self.setting.matches)
        return said or (other.first > 0 and source.tokens[other.first - 1].word == "by")

    def _is_placed_otherwise(self, other: Item) -> bool:
        """Whether the item has the claim's preposition in the source, and the other has another ("near A in B")."""
        claim, source = self.setting.claim, self.setting.source
        if self.place is None or 0 in (self.item.first, self.place, other.first):
            return False
        before, instead = claim.tokens[self.item.first - 1].word, source.tokens[other.first - 1].word
        if instead == "by" and (before == "of" or before in _PLACING):
            return True
        if source.sentence_of[self.place] != source.sentence_of[other.first]:
            return False
        said, told = claim.tokens[self.item.first - 1].word, source.tokens[self.place - 1].word
        return said == told and said in _PLACING and source.tokens[other.first - 1].word in _PLACING - {said}


def subject_of(source: Analysis, sentence: int) -> frozenset[str]:
    """Give the stems of the name that a sentence begins with."""
    begin, behind = source.firsts[sentence], source.firsts[sentence + 1]
    opening = itertools.dropwhile(lambda token: not token.content, source.tokens[begin:behind])
    return frozenset(token.stem for token in itertools.takewhile(lambda token: token.name, opening))


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
    if _is_told_too_little(one, other):
        return False
    if are_listed(setting.claim, one.item.last, other.item.first):
        return False
    first, second = sorted(((one.place, one.found), (other.place, other.found)), key=lambda found: found[0])
    if are_listed(setting.source, first[0] if first[1] is None else first[1].last, second[0]):
        return False
    both = {*range(one.item.first, one.item.last + 1), *range(other.item.first, other.item.last + 1)}
    as_said = one.fit_at(one.place, one.found, both) + other.fit_at(other.place, other.found, both)
    exchanged = one.fit_at(other.place, other.found, both) + other.fit_at(one.place, one.found, both)
    return exchanged > CLEARLY * as_said


def _is_told_too_little(one: _Seeker, other: _Seeker) -> bool:
    """Whether where two items stand does not tell which is which: one of them is there by a pronoun alone."""
    setting = one.setting
    spoken_of = [seeker for seeker in (one, other) if seeker.is_spoken_of()]
    has_words = any(not setting.claim.tokens[match.at].name for match in setting.matches)
    if spoken_of and (not has_words or spoken_of[0].is_owner()):
        return True
    sentences = {setting.source.sentence_of[seeker.place] for seeker in (one, other) if seeker.place is not None}
    return (one.found is None or other.found is None) and len(sentences) > 1


def _rivalry(item: Item, other: Item | None) -> float:
    """Tell how far one item could stand in the place of another: one of the same kind and dimension."""
    if other is None or other.kind != item.kind:
        return 0.5 if other is not None and other.fact is not None and item.fact is not None else 0.0
    if item.fact is not None and other.fact is not None and item.fact.dimension != other.fact.dimension:
        return 0.8 if item.fact.value == other.fact.value else 0.6
    return 1.0


def _is_attribute(name: Item, source: Analysis) -> bool:
    """Whether a name tells of what kind something is ("the first NASA mission", "a Danish director")."""
    after = name.last + 1
    if name.kind != "name" or name.first == 0 or after >= len(source.tokens):
        return False
    before, following = source.tokens[name.first - 1], source.tokens[after]
    tight = source.text[source.tokens[name.last].end : following.start] == " "
    is_noun = following.content and not following.name and not following.word.endswith("ed")
    return tight and is_noun and (before.word in _ARTICLES or (before.content and not before.name))


def _unnamed(item: Item, setting: Setting) -> list[tuple[float, int, Item | None]]:
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
            places.append((IMPLIED, source.firsts[sentence], None))
    return [(likeness, place, other) for likeness, place, other in places if place < len(source.tokens)]


def _in_titles(item: Item, setting: Setting) -> list[tuple[float, int, Item | None]]:
    """Give the sentences that speak of what has a number in its name ("Apollo 11")."""
    source = setting.source
    word = setting.claim.tokens[item.first].word
    numbered = item.first == item.last and item.first > 0 and setting.claim.tokens[item.first - 1].content
    if not numbered:
        return []
    return [
        (IMPLIED, source.firsts[sentence], None)
        for sentence, topic in enumerate(source.topics)
        if word in topic and source.firsts[sentence] < len(source.tokens)
    ]
