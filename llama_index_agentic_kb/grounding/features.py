"""Compares a claim with the evidence: exact features, and the sentences that could support the claim.

This module makes no decision. It finds and counts terms, numbers, names and negation, weighted by their rarity in the
evidence; ``scorers.lexical`` interprets the counts with models trained on labelled claims.
"""

# ruff: noqa: RUF001 (typographic and full-width signs are the point)
from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Final

from llama_index_agentic_kb.schema.grounding import Span
from llama_index_agentic_kb.search.tokenizing import (
    DEFAULT_LANGUAGE,
    FUNCTION_WORDS,
    detect_language,
    split_words,
    stem_words,
)

FEATURES: Final = ("coverage", "numbers", "names", "negation_differs")
"""Names of the features, in the order of ``Reading.features``: the shares of a claim's terms in the best three
sentences of all passages, of its numbers anywhere, of its names in the best window; whether negation differs there."""

MAX_CHARACTERS: Final = 50_000  # maximum number of characters read of a passage
MAX_CLAIM: Final = 1_000  # maximum number of characters read of a claim
WINDOW_WORDS: Final = 64  # maximum number of words of evidence in a window, without its title
_MOST_SENTENCES: Final = 4
_LONGEST_SENTENCE: Final = 600  # maximum characters of a sentence; longer text is split
_IN_ONE: Final = 0.95  # minimum share of a claim's terms in a sentence that is also read alone
_SMOOTHING: Final = 4.0
_MOST_WINDOWS: Final = 8
_MOST_FILLED: Final = 16  # number of a passage's first sentences that may fill a window
_COVERING: Final = 3  # number of sentences of which the coverage is a feature
_LEAST_GAIN: Final = 0.04  # minimum share of a claim that a further sentence must add

# A mark, closing quotes or brackets, space, and no small letter; not after an initial or a short title (Dr., St.).
_END: Final = re.compile(
    r"(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\bMrs)(?<!\bvs)(?<!\bNo)[.!?…]+[\"'”’»)\]]*\s+(?![a-z])|[。！？．｡]+[」』”’）]*|\n+"
)
_NUMBER: Final = re.compile(r"\d+(?:[.,:]\d+)*")
_IDENTIFIER: Final = re.compile(r"\S*[\d_/.]\S*")
"""A title that is a file name or a row id and does not describe the text."""
_NAME: Final = re.compile(r"(?<![.!?]\s)(?<!^)\b[^\W\d_a-z][\w’'-]*", re.UNICODE)


def words(text: str) -> frozenset[str]:
    """Return the words of a space-separated list."""
    return frozenset(text.split())


_NEGATIONS: Final = words(
    "not no never none neither nor without cannot nobody nothing nowhere hardly barely t n't "  # English, with don't
    "nicht kein keine keinen keiner keines nie niemals ohne weder "
    "ne pas jamais aucun aucune sans ni non nunca sin ningún ninguna nessun nessuna senza "
    "niet geen nooit zonder não nunca sem nem ikke ingen aldrig inte ingen aldrig utan ei eivät не нет никогда без"
)
EMOJI: Final = re.compile("[\U0001f000-\U0001faff\u2600-\u2712\u2714-\u274b\u2764-\u2767\u2b50\ufe0f\u200d]")
"""Emoji without meaning; \u2713 and \u2717 are not among them."""


@lru_cache(maxsize=4096)
def _plain_number(digits: str) -> str:
    """Return a number without thousands separators ("1,500" and "1.500" are 1500, "3.50" is 3.5)."""
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", digits):
        digits = digits.replace(",", "")
    elif re.fullmatch(r"\d{1,3}(?:\.\d{3})+", digits):
        digits = digits.replace(".", "")
    if re.fullmatch(r"\d+[.,]\d+", digits):
        digits = digits.replace(",", ".").rstrip("0").rstrip(".")
    return digits.lstrip("0") or "0"


def numbers_of(text: str) -> frozenset[str]:
    """Return the numbers of a text in normalized form."""
    return frozenset(map(_plain_number, _NUMBER.findall(text)))


def _terms(text: str, language: str) -> list[str]:
    words = [_plain_number(word) if word[:1].isdigit() else word for word in split_words(text)]
    return stem_words(words, language).split()


@lru_cache(maxsize=32)
def _function_stems(language: str) -> frozenset[str]:
    return frozenset(stem_words(sorted(FUNCTION_WORDS.get(language, ())), language).split())


def is_negated(text: str) -> bool:
    """Return whether a text contains a negation word."""
    return not _NEGATIONS.isdisjoint(split_words(text))


@dataclass(frozen=True, slots=True)
class Premise:
    """A passage that claims are checked against; its title and attributes ("author": ...) count as evidence too."""

    text: str
    title: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """The title, if it describes the text, and the attributes as a sentence."""
        title = "" if _IDENTIFIER.fullmatch(self.title) else self.title
        head = ". ".join(filter(None, (title, *map(str, self.attributes.values()))))
        return head + "." if head and not head.endswith(".") else head


@dataclass(frozen=True, slots=True)
class Window:
    """Sentences of the passage with index ``passage`` that could support a claim."""

    passage: int
    places: tuple[int, ...]  # indices in ``Corpus.sentences`` of the sentences that cover most of the claim, best first
    spans: tuple[Span, ...]  # positions of these sentences in the passage's text
    text: str  # the passage's title and attributes, these sentences and their neighbours, for a cross-encoder
    coverage: float  # weighted share of the claim's terms in the window
    alone: str
    """The same with the best sentence only, if this has nearly all of the claim's terms and is not the whole window."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The features of a claim, in the order of ``FEATURES``, and its windows in the evidence."""

    features: tuple[float, ...]
    windows: tuple[Window, ...]  # the best window of each relevant passage, best first
    telling: int = 1  # number of the claim's terms that are not function words
    named: bool = True  # whether the claim has a name or a number
    sentences: int = 0  # number of sentences in the passage of the best window


@dataclass(frozen=True, slots=True)
class _Sentence:
    passage: int
    start: int
    end: int
    terms: frozenset[str]
    words: int
    negated: bool


@dataclass(frozen=True, slots=True)
class _Claim:
    terms: dict[str, float]  # the claim's terms with their shares of its weight
    held: dict[int, float]  # weight of the claim's terms in each sentence, by the sentence's index
    numbers: frozenset[str]
    names: frozenset[str]
    negated: bool

    def within(self, there: Container[str], covered: Container[str] = ()) -> float:
        """Return the weight of the claim's terms that are in ``there`` and not in ``covered``."""
        return sum(weight for term, weight in self.terms.items() if term in there and term not in covered)


def passage_sentences(text: str) -> list[tuple[int, int]]:
    """Return the positions of a passage's sentences; titles, list items and lines are separate sentences."""
    spans: list[tuple[int, int]] = []
    ends = [match.end() for match in _END.finditer(text)]
    for start, end in pairwise([0, *ends, len(text)]):
        start += len(text[start:end]) - len(text[start:end].lstrip())  # noqa: PLW2901 (without space around it)
        end = start + len(text[start:end].rstrip())  # noqa: PLW2901 (same)
        while end - start > _LONGEST_SENTENCE:
            cut = text.rfind(" ", start + 1, start + _LONGEST_SENTENCE)
            cut = cut if cut > start else start + _LONGEST_SENTENCE
            spans.append((start, cut))
            start = cut + (text[cut : cut + 1] == " ")  # noqa: PLW2901 (what is left of it)
        if end > start:
            spans.append((start, end))
    return spans


class Corpus:
    """Indexed passages that claims are compared with; at most 50,000 characters of each are read."""

    def __init__(self, premises: Sequence[Premise]) -> None:
        self.texts = [EMOJI.sub(" ", premise.text[:MAX_CHARACTERS]) for premise in premises]
        sample = " ".join(text[:400] for text in self.texts[:8])
        self.language = detect_language(split_words(sample)) if sample else DEFAULT_LANGUAGE
        self.sentences: list[_Sentence] = []
        self._heads = [premise.head for premise in premises]
        self._head_terms = [frozenset(_terms(head, self.language)) for head in self._heads]
        self._numbers = frozenset[str]().union(*map(numbers_of, (*self._heads, *self.texts)))
        self._firsts: list[int] = []  # index of the first sentence of each passage
        self._holders: dict[str, list[int]] = {}
        for number, text in enumerate(self.texts):
            self._firsts.append(len(self.sentences))
            for start, end in passage_sentences(text):
                said = split_words(text[start:end])
                terms = frozenset(_terms(text[start:end], self.language))
                for term in terms:
                    self._holders.setdefault(term, []).append(len(self.sentences))
                negated = not _NEGATIONS.isdisjoint(said)
                self.sentences.append(_Sentence(number, start, end, terms, len(said), negated))
        self._firsts.append(len(self.sentences))
        self._total = len(self.sentences) + _SMOOTHING

    def read(self, text: str) -> Reading:
        """Return a claim's features and the windows that could support it."""
        text = text[:MAX_CLAIM]
        terms, ignored = _terms(text, self.language), _function_stems(self.language)
        content = [term for term in terms if term not in ignored]
        # Spärck Jones's inverse document frequency over the sentences.
        rarity = {term: math.log(1 + self._total / (len(self._holders.get(term, ())) + 1)) for term in content or terms}
        total = sum(rarity.values())
        weights = {term: weight / total for term, weight in rarity.items()}
        held: dict[int, float] = {}
        for term, weight in weights.items():
            for place in self._holders.get(term, ()):
                held[place] = held.get(place, 0.0) + weight
        names = frozenset(_terms(" ".join(_NAME.findall(text)), self.language)) - ignored
        claim = _Claim(weights, held, numbers_of(text), names, is_negated(text))
        windows = self._windows(claim)
        length = self._firsts[windows[0].passage + 1] - self._firsts[windows[0].passage] if windows else 0
        named = bool(claim.names or claim.numbers)
        return Reading(self._features(claim, windows), tuple(windows), len(set(content)), named, length)

    def _windows(self, claim: _Claim) -> list[Window]:
        """Return one window for each of the passages that cover most of the claim."""
        places: dict[int, list[int]] = {}
        for place in sorted(claim.held, key=lambda one: -claim.held[one]):
            places.setdefault(self.sentences[place].passage, []).append(place)
        if len(self.texts) <= _MOST_WINDOWS or not places:  # a paraphrase may share no term with its passage
            for number in range(min(len(self.texts), _MOST_WINDOWS)):
                if self._firsts[number] < self._firsts[number + 1]:
                    places.setdefault(number, [self._firsts[number]])

        def promise(number: int) -> float:
            return claim.held.get(places[number][0], 0.0) + 0.5 * claim.within(self._head_terms[number])

        ranked = sorted(places, key=promise, reverse=True)[:_MOST_WINDOWS]
        windows = [self._window(number, places[number], claim) for number in ranked]
        return sorted(windows, key=lambda one: -one.coverage)

    def _window(self, number: int, places: Sequence[int], claim: _Claim) -> Window:
        """Return a window of a passage: the sentences that cover most of the claim, and others beside them."""
        chosen = self._covering(claim, places[:24], self._head_terms[number], _MOST_SENTENCES) or [places[0]]
        picked = self._picked(chosen, self._firsts[number], self._firsts[number + 1])
        chosen = [place for place in chosen if place in picked]
        text, alone = self._text(number, sorted(picked)), self._text(number, chosen[:1])
        if text == alone or claim.within(self._known(number, chosen[:1])) < _IN_ONE:
            alone = ""
        best = [self.sentences[place] for place in chosen]
        spans = tuple(Span(start=sentence.start, end=sentence.end) for sentence in best)
        return Window(number, tuple(chosen), spans, text, claim.within(self._known(number, chosen)), alone)

    def _picked(self, chosen: Sequence[int], first: int, last: int) -> list[int]:
        """Return the sentences of a window: the chosen ones, and others from ``first`` to ``last`` that fit in."""
        picked, words = list[int](), 0
        # Neighbours resolve pronouns; in a short passage, a paraphrase may be in any sentence.
        for place in (*chosen, chosen[0] - 1, chosen[0] + 1, *range(first, min(last, first + _MOST_FILLED))):
            if first <= place < last and place not in picked:
                count = self.sentences[place].words
                if not picked or words + count <= WINDOW_WORDS:
                    picked.append(place)
                    words += count
        return picked

    def _text(self, passage: int, places: Sequence[int]) -> str:
        """Return a passage's head and some of its sentences."""
        said = (self.texts[passage][self.sentences[one].start : self.sentences[one].end] for one in places)
        return " ".join(filter(None, (self._heads[passage], *said)))

    def _known(self, passage: int, places: Sequence[int]) -> frozenset[str]:
        """Return the terms of a passage's head and of some sentences."""
        return self._head_terms[passage].union(*(self.sentences[place].terms for place in places))

    def _features(self, claim: _Claim, windows: Sequence[Window]) -> tuple[float, ...]:
        if not windows:
            return (0.0, _share(claim.numbers, self._numbers), _share(claim.names, ()), 0.0)
        best = windows[0]
        most = sorted(claim.held, key=lambda one: -claim.held[one])[:40]
        covering = self._covering(claim, most, self._head_terms[best.passage], _COVERING)
        denied = any(self.sentences[place].negated for place in best.places[:2])
        return (
            claim.within(self._known(best.passage, covering)),
            _share(claim.numbers, self._numbers),
            _share(claim.names, self._known(best.passage, best.places)),
            float(claim.negated != denied),
        )

    def _covering(self, claim: _Claim, places: Sequence[int], head: frozenset[str], most: int) -> list[int]:
        """Return sentences chosen greedily by the share of the claim that they add to a head; the first on a tie."""
        chosen, covered = list[int](), head
        for _ in range(most):
            gains = ((claim.within(self.sentences[one].terms, covered), -one) for one in places)
            gain, place = max(gains, default=(0.0, 0))
            if gain < _LEAST_GAIN:
                break
            chosen.append(-place)
            covered |= self.sentences[-place].terms
        return chosen


def _share(wanted: frozenset[object], there: Collection[object]) -> float:
    return len(wanted.intersection(there)) / len(wanted) if wanted else 1.0
