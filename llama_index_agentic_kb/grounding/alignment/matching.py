"""Which words of a claim stand where in a source: by stem, by family, as a synonym, or not at all."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from llama_index_agentic_kb.grounding.alignment.agreement import agree
from llama_index_agentic_kb.grounding.alignment.analysis import PREFIX, Analysis, Item
from llama_index_agentic_kb.grounding.alignment.lexicon import COUNTRIES
from llama_index_agentic_kb.grounding.alignment.vocabulary import concept_of, opposites_of

__all__ = ["Match", "match_items", "match_words"]

SYNONYM: Final = 0.9
FAMILY: Final = 0.8
"""How far "director" stands for "directed"."""
TOPIC: Final = 0.95
"""How far a pronoun, or a sentence that says of no other, stands for the text's topic."""
_SHARED: Final = 0.7
_MOST_PLACES: Final = 12


@dataclass(slots=True)
class Match:
    """Where a word of a claim stands in a source.

    Args:
        at: The claim's token.
        stem: Its stem.
        weight: How much it says.
        likeness: Of what was found, 0 to 1.
        places: Tokens of the source.
        opposite: Where the source says its opposite instead.
    """

    at: int
    stem: str
    weight: float
    likeness: float
    places: Sequence[int]
    opposite: Sequence[int] = ()


def match_words(claim: Analysis, source: Analysis, weights: Mapping[str, float], default: float) -> list[Match]:
    """Find each content word of a claim in a source.

    Args:
        claim: The claim.
        source: Where it is looked for.
        weights: Of stems.
        default: Of stems that have none.
    """
    found: list[Match] = []
    for at, token in enumerate(claim.tokens):
        if token.content:
            likeness, places = _find(token.stem, source)
            opposite = () if likeness >= SYNONYM else _opposite(token.stem, source)
            weight = weights.get(token.stem, default)
            found.append(Match(at, token.stem, weight, likeness, places[:_MOST_PLACES], opposite))
    return found


def _find(stem: str, source: Analysis) -> tuple[float, Sequence[int]]:
    places = source.places.get(stem)
    if places:
        return 1.0, places
    like = [at for concept in concept_of(stem) for at in source.concepts.get(concept, ())]
    if like:
        return SYNONYM, sorted(set(like))
    family = [at for at in source.prefixes.get(stem[:PREFIX], ()) if _is_family(stem, source.tokens[at].stem)]
    return (FAMILY, family) if family else (0.0, ())


def _is_family(one: str, other: str) -> bool:
    """Whether two stems have most of their letters in common; of the shortest, all."""
    shorter, longer = sorted((one, other), key=len)
    shared = next((at for at, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    if len(shorter) <= PREFIX + 1:
        return shared == len(shorter) and len(longer) - shared <= PREFIX
    return shared >= max(PREFIX + 1, _SHARED * len(longer))


def _opposite(stem: str, source: Analysis) -> Sequence[int]:
    return [at for other in opposites_of(stem) for at in source.places.get(other, ())]


def match_items(item: Item, source: Analysis) -> list[tuple[float, int, Item | None]]:
    """Find what may be meant by a number, a date or a name of a claim.

    Returns:
        (likeness, token, item) of each candidate of the same kind, whatever its likeness, and of places where the
        words of a name stand without being one there.
    """
    if item.fact is not None:
        return [(agree(item.fact, other.fact), other.first, other) for other in source.items if other.fact is not None]
    found: list[tuple[float, int, Item | None]] = [
        (_same_name(item.words, other.words), other.first, other) for other in source.items if other.kind == "name"
    ]
    return found


@functools.lru_cache(maxsize=32_768)
def _same_name(claimed: tuple[str, ...], told: tuple[str, ...]) -> float:
    """Tell how far two names are one: 1 where one holds the other, or is its initials."""
    claimed, told = _countries(claimed), _countries(told)
    one, other = set(claimed), set(told)
    if one <= other or other <= one:
        return 1.0
    if _are_initials(claimed, told) or _are_initials(told, claimed):
        return 1.0
    alike = [word for word in one if any(_same_word(word, of) for of in other)]
    # One letter alone is no name's initial: the "H" of "H-IIA" is not Hayabusa.
    shared = (
        len(alike)
        if any(len(word) > 1 and any(len(of) > 1 and _same_word(word, of) for of in other) for word in alike)
        else 0
    )
    least = min(len(one), len(other))
    return 1.0 if shared >= least else 0.5 * shared / least


_UNITED: Final = {"states": "us", "kingdom": "uk"}


def _countries(words: tuple[str, ...]) -> tuple[str, ...]:
    """Give a name with one word for each country and its people."""
    found: list[str] = []
    for word in words:
        if found and found[-1] == "united" and word in _UNITED:
            found[-1] = _UNITED[word]
        elif not (found and found[-1] == "us" and word == "america"):
            found.append(COUNTRIES.get(word, word))
    return tuple(found)


def _same_word(one: str, other: str) -> bool:
    """Whether two words of names are one: an initial, or a people's name and its country's."""
    if one == other or (min(len(one), len(other)) == 1 and one[0] == other[0]):
        return True
    shorter, longer = sorted((one, other), key=len)
    if longer == shorter + "s":
        return True
    shared = next((at for at, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    return shared >= PREFIX and shared >= len(shorter) - 1 and len(longer) - shared <= PREFIX


def _are_initials(short: tuple[str, ...], long: tuple[str, ...]) -> bool:
    return len(short) == 1 and len(long) > 1 and short[0] == "".join(word[0] for word in long)
