"""Stems, and which stems say the same or the opposite."""

from __future__ import annotations

import functools

from llama_index_agentic_kb.grounding.alignment.lexicon import ANTONYMS, IRREGULAR, SYNONYMS
from llama_index_agentic_kb.search.tokenizing import DEFAULT_LANGUAGE, stem_words

__all__ = ["concept_of", "fellows_of", "opposites_of", "stems_of"]


@functools.lru_cache(maxsize=8192)
def stems_of(words: tuple[str, ...], language: str) -> tuple[str, ...]:
    """Give the stems of words of one language, one each."""
    if not words:
        return ()
    if language == DEFAULT_LANGUAGE:
        words = tuple([IRREGULAR.get(word, word) for word in words])
    stems = tuple(stem.partition("~")[0] for stem in stem_words(words, language).split())
    return stems if len(stems) == len(words) else words


@functools.cache
def _concepts() -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = {}
    for number, group in enumerate(SYNONYMS):
        for stem in stems_of(group, DEFAULT_LANGUAGE):
            found.setdefault(stem, set()).add(number)
    return {stem: tuple(sorted(numbers)) for stem, numbers in found.items()}


def concept_of(stem: str) -> tuple[int, ...]:
    """Give the groups of synonyms that a stem belongs to."""
    return _concepts().get(stem, ())


@functools.cache
def _sides() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Give the stems that say the opposite of each, and those that stand on its side."""
    opposites: dict[str, set[str]] = {}
    fellows: dict[str, set[str]] = {}
    for one, other in ANTONYMS:
        sides = [set(stems_of(tuple(sorted(side)), DEFAULT_LANGUAGE)) for side in (one, other)]
        for side, opposite in (sides, sides[::-1]):
            for stem in side:
                opposites.setdefault(stem, set()).update(opposite - side)
                fellows.setdefault(stem, set()).update(side)
    return opposites, fellows


def opposites_of(stem: str) -> set[str]:
    """Give the stems that say the opposite of one."""
    return _sides()[0].get(stem, set())


def fellows_of(stem: str) -> set[str]:
    """Give the stems whose opposites are the same, it included."""
    return _sides()[1].get(stem, set())
