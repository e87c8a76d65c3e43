"""Whether claim and source say yes to the same: negation, opposites, hedges, all and some."""

# ruff: noqa: RUF001 (typographic signs are the point)
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from llama_index_agentic_kb.grounding.alignment.additions import is_another_extreme
from llama_index_agentic_kb.grounding.alignment.analysis import Analysis
from llama_index_agentic_kb.grounding.alignment.lexicon import HEDGES, NEGATION_PREFIXES, NEGATIONS
from llama_index_agentic_kb.grounding.alignment.matching import Match
from llama_index_agentic_kb.grounding.alignment.succession import is_reversed
from llama_index_agentic_kb.grounding.alignment.vocabulary import fellows_of

__all__ = ["Polarity", "polarity"]

_SCOPE: Final = 7
"""Words behind a negation that it may turn."""
_BACK: Final = 3
"""Words before "nicht" and "pas" that they may turn."""
_BREAKS: Final = frozenset(["but", "although", "though", "whereas", "while", "however", "aber", "sondern", "obwohl"])
_BACKWARD: Final = frozenset(["nicht", "pas"])
_WIDE_NEGATIONS: Final = ("不", "没", "未", "ない", "なかった", "ません")
_UNIVERSAL: Final = frozenset(["all", "every", "always", "only", "entirely", "everyone", "alle", "immer", "nur"])
_PARTIAL: Final = frozenset(["some", "most", "many", "several", "often", "sometimes", "usually", "partly", "few"])
_FIRST_WORDS: Final = 3
"""Content words behind a negation among which the turned one is looked for."""
_LONG_ENOUGH: Final = 4

Polarity = float
"""From 0, the opposite is said, to 1."""
HEDGED: Final = 0.8
GENERALIZED: Final = 0.75
UNCERTAIN: Final = 0.5
"""A negation of words that the source does not have."""


def polarity(claim: Analysis, source: Analysis, matches: Sequence[Match], sentences: Collection[int]) -> Polarity:
    """Tell how far claim and source agree in saying yes or no.

    Args:
        claim: The claim.
        source: The source.
        matches: Where the claim's content words stand in the source.
        sentences: The source's sentences that bear the claim.
    """
    here, there = _Negations(claim, range(len(claim.sentences))), _Negations(source, sentences)
    if _says_otherwise(claim, source, matches, sentences, here.turned, there.turned):
        return 0.0
    agreed = _negations_agree(claim, source, matches, sentences, here, there)
    if is_another_extreme(claim, source, sentences):
        return 0.0
    if agreed and _overstates(claim, source, sentences):
        return min(agreed, GENERALIZED)
    if agreed and _words(source, sentences) & HEDGES and not _words(claim, range(len(claim.sentences))) & HEDGES:
        return min(agreed, HEDGED)
    return agreed


def _words(text: Analysis, sentences: Collection[int]) -> set[str]:
    return {text.tokens[at].word for at in text.within(sentences)}


def _overstates(claim: Analysis, source: Analysis, sentences: Collection[int]) -> bool:
    claimed, told = _words(claim, range(len(claim.sentences))), _words(source, sentences)
    return bool(claimed & _UNIVERSAL and not told & _UNIVERSAL and told & _PARTIAL and not claimed & _PARTIAL)


def _says_otherwise(
    claim: Analysis,
    source: Analysis,
    matches: Sequence[Match],
    sentences: Collection[int],
    turned_here: Collection[int],
    turned_there: Collection[int],
) -> bool:
    """Whether the source has a word's opposite where the claim has the word, and neither is negated."""
    named = {place for match in matches for place in match.places}  # the claim has both: "opens" and "closes"
    for match in matches:
        if any(source.tokens[place].sentence in sentences for place in match.places):
            continue
        stem = claim.tokens[match.at].stem
        if any(_stands_in(other, source, sentences) for other in fellows_of(stem)):
            continue
        opposite = [*match.opposite, *_prefixed(stem, source)]
        there = [place for place in opposite if source.tokens[place].sentence in sentences and place not in named]
        if there and not any((match.at in turned_here) != (place in turned_there) for place in there):
            return True
    return False


def _stands_in(stem: str, source: Analysis, sentences: Collection[int]) -> bool:
    return any(source.tokens[place].sentence in sentences for place in source.places.get(stem, ()))


def _prefixed(stem: str, source: Analysis) -> list[int]:
    """Give where a word stands with a prefix that negates it, or without the one that it has."""
    if len(stem) < _LONG_ENOUGH:
        return []
    forms = [prefix + stem for prefix in NEGATION_PREFIXES]
    forms += [
        stem.removeprefix(prefix)
        for prefix in NEGATION_PREFIXES
        if stem.startswith(prefix) and len(stem) - len(prefix) >= _LONG_ENOUGH
    ]
    return [place for form in forms for place in source.places.get(form, ())]


def _negations_agree(
    claim: Analysis,
    source: Analysis,
    matches: Sequence[Match],
    sentences: Collection[int],
    here: _Negations,
    there: _Negations,
) -> float:
    places = {
        match.at: [place for place in match.places if source.tokens[place].sentence in sentences] for match in matches
    }
    turned_here, turned_there = here.turned, there.turned
    every = range(len(claim.sentences))
    if _wide_negations(claim, every) != _wide_negations(source, sentences):
        return 0.0
    if is_reversed(claim, source, places, sentences):
        return 0.0
    agreed = 1.0
    for scope in here.scopes:
        found = next((at for at in scope if places.get(at)), None)
        if found is None:
            agreed = min(agreed, 1.0 if turned_there else UNCERTAIN)
        elif not any(place in turned_there for place in places[found]):
            return 0.0
    claimed_at: Mapping[int, int] = {place: at for at, found in places.items() for place in found}
    for scope in there.scopes:
        content = [at for at in scope if source.tokens[at].content][:_FIRST_WORDS]
        reached = [claimed_at[place] for place in content if place in claimed_at]
        # Of a word that stands elsewhere as well ("only JSON export"), the others tell which is meant.
        only = [at for at in reached if all(place in turned_there for place in places[at])]
        if only and (only[0] == reached[0] or len(only) > 1) and not any(at in turned_here for at in reached):
            return 0.0
    return agreed


class _Negations:
    """What the negations of some sentences turn.

    Args:
        text: The text.
        sentences: Of it.
    """

    def __init__(self, text: Analysis, sentences: Collection[int]) -> None:
        self.scopes = list(_scopes(text, sentences))
        turned: set[int] = set()
        for scope in self.scopes:
            turned ^= set(scope)
        self.turned = frozenset(turned)
        """The tokens within the reach of a negation; two negations cancel each other."""


def _scopes(text: Analysis, sentences: Collection[int]) -> Iterator[list[int]]:
    """Give the tokens that each negation may turn."""
    tokens = text.tokens
    for at in text.within(sentences):
        token = tokens[at]
        if not (token.word in NEGATIONS or token.word.endswith("n't")):
            continue
        if token.word in ("not", "nicht") and at + 1 < len(tokens) and tokens[at + 1].word in ("only", "nur"):
            continue
        scope: list[int] = []
        for reached in range(at + 1, min(len(tokens), at + 1 + _SCOPE)):
            if (
                tokens[reached].sentence != token.sentence
                or tokens[reached].word in _BREAKS
                or _is_apart(text, reached)
            ):
                break
            scope.append(reached)
        if token.word in _BACKWARD:
            scope += [
                before
                for before in range(at - 1, max(-1, at - 1 - _BACK), -1)
                if tokens[before].sentence == token.sentence
            ]
        yield scope


def _is_apart(text: Analysis, at: int) -> bool:
    between = text.text[text.tokens[at - 1].end : text.tokens[at].start]
    return any(sign in between for sign in (";", ":", ",", " – ", " — ", "(", ")"))


def _wide_negations(text: Analysis, sentences: Collection[int]) -> bool:
    """Whether a text in Chinese or Japanese is negated, an odd number of times."""
    if text.text.isascii():
        return False
    told = "".join(text.text[start:end] for number, (start, end) in enumerate(text.sentences) if number in sentences)
    return sum(told.count(word) for word in _WIDE_NEGATIONS) % 2 == 1
