"""One claim against one source: how far the source says it, where, and what it says otherwise."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from llama_index_agentic_kb.grounding.alignment.additions import added_clauses
from llama_index_agentic_kb.grounding.alignment.analysis import Analysis, Item
from llama_index_agentic_kb.grounding.alignment.matching import TOPIC, Match, match_words
from llama_index_agentic_kb.grounding.alignment.polarity import polarity
from llama_index_agentic_kb.grounding.alignment.slots import Slot, fill_slots
from llama_index_agentic_kb.grounding.alignment.subjects import other_subject

__all__ = ["Pairing", "pair"]

_STEEPNESS: Final = 9.0
_MIDDLE: Final = 0.42
"""Share of a claim's words, by weight, at which it is as likely said as not."""
_ELSEWHERE: Final = 0.6
"""What a word counts that stands in the source, and not in the sentences that bear the claim."""
_GAIN: Final = 0.12
"""Share of the claim that a further sentence must add to be one of those that bear it."""
_MOST_SENTENCES: Final = 3
_OPENING: Final = 6
_FACT_WEIGHT: Final = 1.2
WRONG: Final = 0.12
"""What is left of the score where a number, date or name is wrong."""
TURNED: Final = 0.1
"""What is left where the source says the opposite."""
ADDED: Final = 0.5
"""What is left for each clause of which the source has no word."""
ELSEWHOSE: Final = 0.3
"""What is left where a part of the claim is said of something that the claim does not name."""


@dataclass(slots=True)
class Pairing:
    """What came of aligning a claim with a source.

    Args:
        score: How far the source supports the claim, 0 to 1.
        coverage: The share of the claim's words that the source has, by weight.
        sentences: The source's sentences that bear it, best first.
        slots: Its numbers, dates and names.
        polarity: From 0, the opposite is said, to 1.
        coherent: Whether all parts are said of what the claim names.
    """

    score: float = 0.0
    coverage: float = 0.0
    sentences: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    polarity: float = 1.0
    coherent: bool = True


def pair(
    claim: Analysis,
    source: Analysis,
    weights: Mapping[str, float],
    default: float,
    known: Collection[str] = frozenset(),
) -> Pairing:
    """Align a claim with a source.

    Args:
        claim: The claim.
        source: A passage, or several joined.
        weights: Of stems: the rarer, the more.
        default: The weight of stems that have none.
        known: Stems that are names in other sources: as a sentence's first word, too.
    """
    claim = with_names_of(claim, source, known)
    matches = match_words(claim, source, weights, default)
    facts = [item for item in claim.items if item.fact is not None]
    total = sum(match.weight for match in matches) + _FACT_WEIGHT * len(facts)
    if not total:
        return Pairing()
    sentences = _bearing(claim, source, matches, total)
    slots = fill_slots(claim, source, matches, sentences)
    sentences = _with_items(sentences, slots)
    subject = other_subject(claim, source, matches, sentences)
    slots += [subject] if subject is not None else []
    said = sum(match.weight * _likeness(match, source, sentences) for match in matches)
    said += _FACT_WEIGHT * sum(slot.place is not None for slot in slots if slot.item.fact is not None)
    coverage = said / total
    agreed = polarity(claim, source, matches, sentences)
    coherent = _is_coherent(claim, source, sentences)
    score = _likelihood(coverage)
    for doubt in sorted(slot.score for slot in slots)[:2]:
        score *= WRONG + (1 - WRONG) * doubt
    score *= TURNED + (1 - TURNED) * agreed
    score *= ADDED ** added_clauses(claim, matches)
    score *= 1.0 if coherent else ELSEWHOSE
    return Pairing(score, coverage, sentences, slots, agreed, coherent)


def _likelihood(coverage: float) -> float:
    """Give how likely a claim is said whose words stand in the source to some share: a logistic curve from 0 to 1."""
    none, some, every = (1 / (1 + math.exp(-_STEEPNESS * (share - _MIDDLE))) for share in (0.0, coverage, 1.0))
    return max(0.0, min(1.0, (some - none) / (every - none)))


def with_names_of(claim: Analysis, source: Analysis, known: Collection[str] = frozenset()) -> Analysis:
    """Give a claim in which the first word of a sentence is a name if it is one in the source, or known for one."""
    found: list[Item] = []
    named = {at for item in claim.items for at in range(item.first, item.last + 1)}
    for first in claim.firsts[:-1]:
        if first >= len(claim.tokens) or first in named:
            continue
        token = claim.tokens[first]
        is_capital = token.content and claim.text[token.start].isupper()
        places = source.places.get(token.stem, ()) if is_capital else ()
        is_known = is_capital and not places and token.stem in known
        if is_known or any(source.tokens[place].name for place in places) or (places and token.stem in source.topic):
            found.append(Item("name", first, first, (token.word,)))
    if not found:
        return claim
    return replace(claim, items=sorted([*claim.items, *found], key=lambda item: item.first))


def _bearing(claim: Analysis, source: Analysis, matches: Sequence[Match], total: float) -> list[int]:
    """Give the sentences that have most of the claim: the best, then those that add enough."""
    by_sentence: dict[int, dict[int, float]] = {}
    for number, match in enumerate(matches):
        for place in match.places:
            by_sentence.setdefault(source.sentence_of[place], {})[number] = match.likeness
    for sentence, held in by_sentence.items():
        for number, match in enumerate(matches):
            if match.stem in source.topics[sentence]:
                held.setdefault(number, TOPIC)
    chosen: list[int] = []
    best_so_far: dict[int, float] = {}
    while by_sentence and len(chosen) < _MOST_SENTENCES:
        gains = {
            sentence: sum(
                matches[number].weight * max(0.0, likeness - best_so_far.get(number, 0.0))
                for number, likeness in found.items()
            )
            for sentence, found in by_sentence.items()
        }
        best = max(gains, key=lambda sentence: (gains[sentence], -sentence))
        if chosen and (gains[best] < _GAIN * total or not _adds(claim, matches, by_sentence[best], best_so_far)):
            break
        chosen.append(best)
        for number, likeness in by_sentence.pop(best).items():
            best_so_far[number] = max(likeness, best_so_far.get(number, 0.0))
    return chosen


def _adds(claim: Analysis, matches: Sequence[Match], found: Mapping[int, float], known: Mapping[int, float]) -> bool:
    """Whether a sentence has two further words of the claim, or a name: one word stands in many sentences."""
    new = [matches[number].at for number, likeness in found.items() if likeness > known.get(number, 0.0)]
    return len(new) >= 2 or any(claim.tokens[at].name for at in new)  # noqa: PLR2004 (two)


def _with_items(sentences: list[int], slots: Sequence[Slot]) -> list[int]:
    """Add the sentences where the claim's numbers and dates stand."""
    further = [slot.sentence for slot in slots if slot.item.fact is not None and slot.sentence is not None]
    return list(dict.fromkeys([*sentences, *further]))


def _likeness(match: Match, source: Analysis, sentences: Collection[int]) -> float:
    if any(source.tokens[place].sentence in sentences for place in match.places):
        return match.likeness
    if any(match.stem in source.topics[sentence] for sentence in sentences) or match.stem in source.topic:
        return TOPIC
    return _ELSEWHERE * match.likeness


def _is_coherent(claim: Analysis, source: Analysis, sentences: Sequence[int]) -> bool:
    """Whether the sentences that bear a claim speak of one thing, or of things that the claim names.

    A sentence that begins with a name of its own, which the claim doesn't have, speaks of something else.
    """
    claimed = {token.stem for token in claim.tokens if token.content}
    spoken_of = [_spoken_of(source, sentence) for sentence in sentences]
    named = [subject for subject in spoken_of if subject]
    strange = [subject for subject in named if not subject & claimed]
    if not strange or len(named) < 2:  # noqa: PLR2004 (one sentence is always about itself)
        return True
    first = strange[0]
    return all(subject & first for subject in named)


def _spoken_of(source: Analysis, sentence: int) -> frozenset[str]:
    """Give what a sentence speaks of: the name that it begins with, or the text's topic."""
    begin, behind = source.firsts[sentence], source.firsts[sentence + 1]
    opening = source.tokens[begin : min(behind, begin + _OPENING)]
    return source.topics[sentence] or frozenset(token.stem for token in opening if token.name)
