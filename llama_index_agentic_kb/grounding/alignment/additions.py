"""What a claim adds: clauses of which the source has no word, and superlatives of another quality."""

# ruff: noqa: RUF001 (dashes between clauses)
# ruff: noqa: RUF001 (dashes between clauses)
from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis
from llama_index_agentic_kb.grounding.alignment.lexicon import GRADED
from llama_index_agentic_kb.grounding.alignment.matching import Match
from llama_index_agentic_kb.grounding.alignment.vocabulary import concept_of

__all__ = ["added_clauses", "is_another_extreme"]

_CUT: Final = re.compile(
    r"[,;:()–—]|\b(?:and|but|because(?: of)?|due to|owing to|thanks to|while|whereas|which|who|whose|where|when|after"
    r"|before|although|though|despite|in order to|so that|as well as|und|aber|weil|wegen|während|nachdem|obwohl|um)\b",
    re.IGNORECASE,
)
_LEAST: Final = 2
"""Words that a clause needs to say something of its own."""


def added_clauses(claim: Analysis, matches: Sequence[Match]) -> int:
    """Count the clauses of a claim with at least two words that are told of nowhere in the source, and none that is.

    A clause that the claim consists of as a whole does not count: that is what coverage measures.
    """
    clauses = list(_clauses(claim))
    if len(clauses) < _LEAST:
        return 0
    found = {match.at: bool(match.places) for match in matches}
    named = {at for item in claim.items for at in range(item.first, item.last + 1)}
    added = 0
    for clause in clauses:
        known = [found[at] for at in clause if at in found]
        added += len(known) >= _LEAST and not any(known) and not named.intersection(clause)
    return added


def _clauses(claim: Analysis) -> Iterator[list[int]]:
    cuts = [cut.start() for cut in _CUT.finditer(claim.text)]
    clause: list[int] = []
    position = 0
    for at, token in enumerate(claim.tokens):
        apart = False
        while position < len(cuts) and cuts[position] <= token.start:
            position, apart = position + 1, True
        if apart and clause:
            yield clause
            clause = []
        clause.append(at)
    if clause:
        yield clause


def is_another_extreme(claim: Analysis, source: Analysis, sentences: Collection[int]) -> bool:
    """Whether claim and source name an extreme each, and not the same: the largest, the deepest."""
    claimed = _extremes(claim, range(len(claim.sentences)))
    if not claimed:
        return False
    told = _extremes(source, sentences)
    return bool(told) and not any(_alike(one, other) for one in claimed for other in told)


def _extremes(text: Analysis, sentences: Collection[int]) -> set[str]:
    words = (text.tokens[at].word for at in text.within(sentences))
    return {GRADED[word] for word in words if word in GRADED}


def _alike(one: str, other: str) -> bool:
    return one == other or bool(set(concept_of(one)) & set(concept_of(other)))
