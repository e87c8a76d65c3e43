"""Numbers that a source doesn't tell and that follow from it: the years between two dates, the length of a list."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Final

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis, Item
from llama_index_agentic_kb.grounding.alignment.numerals import UNITS

__all__ = ["DERIVED", "are_listed", "derived"]

DERIVED: Final = 0.9
"""How far such a number is borne out."""
_LISTING: Final = frozenset(["and", "or", "und", "oder", "et", "y", "e", "well", "as"])
_YEAR: Final = UNITS["years"][1]
_SHORTEST_LIST: Final = 2
_LONGEST_LIST: Final = 20


def derived(item: Item, source: Analysis, sentences: Collection[int]) -> Item | None:
    """Give the first item of the source that a claim's number is worked out from; None where it is not.

    Args:
        item: Of the claim.
        source: The source.
        sentences: Its sentences that bear the claim.
    """
    fact = item.fact
    if fact is None or fact.kind != "number":
        return None
    if fact.dimension == "time" and fact.factor == _YEAR:
        return _span_of(round(fact.value / _YEAR), source, sentences)
    if not fact.dimension and _SHORTEST_LIST <= fact.value <= _LONGEST_LIST:
        return _list_of(int(fact.value), source, sentences)
    return None


def _span_of(years: int, source: Analysis, sentences: Collection[int]) -> Item | None:
    dated = [
        (other.fact.date[0], other)
        for other in source.items
        if other.fact is not None and other.fact.date[0] and source.tokens[other.first].sentence in sentences
    ]
    pairs = itertools.pairwise(dated)
    return next((one for (begin, one), (end, _) in pairs if begin and end and end - begin == years), None)


def _list_of(count: int, source: Analysis, sentences: Collection[int]) -> Item | None:
    names = [item for item in source.items if item.kind == "name" and source.tokens[item.first].sentence in sentences]
    return next((run[0] for run in _runs(names, source) if len(run) == count), None)


def _runs(names: Sequence[Item], source: Analysis) -> list[list[Item]]:
    """Group names with nothing but commas and "and" between them."""
    runs: list[list[Item]] = []
    for name in names:
        if runs and are_listed(source, runs[-1][-1].last, name.first):
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def are_listed(text: Analysis, last: int, first: int) -> bool:
    """Whether nothing but commas and "and" stands between two items: whatever is said, is said of both."""
    between = text.tokens[last + 1 : first]
    return last < first and all(token.word in _LISTING for token in between)
