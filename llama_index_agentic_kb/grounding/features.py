"""Compares a claim with the evidence: exact features, and the sentences that could support the claim.

This module makes no decision. It finds and counts terms, numbers, names and negation, weighted by their rarity in the
evidence; ``scorers.lexical`` interprets the counts with models trained on labelled claims.
"""

# ruff: noqa: RUF001 (typographic and full-width signs are the point)
from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
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

MAX_CHARACTERS: Final = 50_000
"""Maximum number of characters read of a passage."""
MAX_CLAIM: Final = 1_000
"""Maximum number of characters read of a claim."""
WINDOW_WORDS: Final = 64
"""Maximum number of words of evidence in a window, without its title."""
_MOST_SENTENCES: Final = 4
_LONGEST_SENTENCE: Final = 600
"""Maximum characters of a sentence; longer text is split."""
_IN_ONE: Final = 0.95
"""Minimum share of a claim's terms in a sentence that is also read alone."""
_SMOOTHING: Final = 4.0
_MOST_WINDOWS: Final = 8
_COVERING: Final = 3
"""Number of sentences of which the coverage is a feature."""
_LEAST_GAIN: Final = 0.04
"""Minimum share of a claim that a further sentence must add."""

# A mark, closing quotes or brackets, space, and no small letter; not after an initial or a short title (Dr., St.).
_END: Final = re.compile(
    r"(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\bMrs)(?<!\bvs)(?<!\bNo)[.!?…]+[\"'”’»)\]]*\s+(?![a-z])|[。！？．｡]+[」』”’）]*|\n+"
)
_NUMBER: Final = re.compile(r"\d+(?:[.,:]\d+)*")
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
class Passage:
    """A passage of the evidence; ``head`` are its title and attributes."""

    text: str
    head: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """Sentences of the passage with index ``passage`` that could support a claim."""

    passage: int
    places: tuple[int, ...]
    """Indices in ``Corpus.sentences`` of the sentences that cover most of the claim, best first."""
    spans: tuple[Span, ...]
    """Positions of these sentences in the passage's text."""
    text: str
    """The passage's head, these sentences and their neighbours, as input for a cross-encoder."""
    coverage: float
    """Weighted share of the claim's terms in the window."""
    in_one: bool
    """Whether its best sentence has nearly all of them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The features of a claim, in the order of ``FEATURES``, and its windows in the evidence."""

    features: tuple[float, ...]
    windows: tuple[Window, ...]
    """The best window of each relevant passage, best first."""
    telling: int = 1
    """Number of the claim's terms that are not function words."""
    named: bool = True
    """Whether the claim has a name or a number."""
    sentences: int = 0
    """Number of sentences in the passage of the best window."""


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
    terms: dict[str, float]
    """The claim's terms with their weights."""
    total: float
    held: dict[int, float]
    """Weight of the claim's terms in each sentence, by the sentence's index."""
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
    """Indexed passages that claims are compared with; at most 50,000 characters of each are read.

    Args:
        passages: The passages of the evidence.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = passages
        sample = " ".join(passage.text[:400] for passage in passages[:8])
        self.language = detect_language(split_words(sample)) if sample else DEFAULT_LANGUAGE
        self.sentences: list[_Sentence] = []
        self.heads = [frozenset(_terms(passage.head, self.language)) for passage in passages]
        self.numbers = frozenset[str]().union(*(numbers_of(f"{one.head}\n{one.text}") for one in passages))
        self._firsts: list[int] = []
        """Index of the first sentence of each passage."""
        self._holders: dict[str, list[int]] = {}
        for number, passage in enumerate(passages):
            self._firsts.append(len(self.sentences))
            for start, end in passage_sentences(passage.text[:MAX_CHARACTERS]):
                said = split_words(passage.text[start:end])
                terms = frozenset(_terms(passage.text[start:end], self.language))
                for term in terms:
                    self._holders.setdefault(term, []).append(len(self.sentences))
                negated = not _NEGATIONS.isdisjoint(said)
                self.sentences.append(_Sentence(number, start, end, terms, len(said), negated))
        self._firsts.append(len(self.sentences))
        self._total = len(self.sentences) + _SMOOTHING

    def read(self, text: str) -> Reading:
        """Return a claim's features and the windows that could support it."""
        claim, telling = self._claim(text[:MAX_CLAIM])
        windows = self._windows(claim)
        best = windows[0].passage if windows else 0
        length = self._firsts[best + 1] - self._firsts[best] if windows else 0
        named = bool(claim.names or claim.numbers)
        return Reading(self._features(claim, windows), tuple(windows), telling, named, length)

    def _claim(self, text: str) -> tuple[_Claim, int]:
        """Return an analyzed claim, and the number of its terms that are not function words."""
        terms = _terms(text, self.language)
        ignored = _function_stems(self.language)
        content = [term for term in terms if term not in ignored]
        kept = content or terms
        # Spärck Jones's inverse document frequency over the sentences.
        weights = {term: math.log(1 + self._total / (len(self._holders.get(term, ())) + 1)) for term in kept}
        held: dict[int, float] = {}
        for term, weight in weights.items():
            for place in self._holders.get(term, ()):
                held[place] = held.get(place, 0.0) + weight
        names = frozenset(term for name in _NAME.findall(text) for term in _terms(name, self.language)) - ignored
        total = sum(weights.values()) or 1.0
        return _Claim(weights, total, held, numbers_of(text), names, is_negated(text)), len(set(content))

    def _windows(self, claim: _Claim) -> list[Window]:
        """Return one window for each of the passages that cover most of the claim."""
        places: dict[int, list[int]] = {}
        for place in sorted(claim.held, key=lambda one: -claim.held[one]):
            places.setdefault(self.sentences[place].passage, []).append(place)
        if len(self.passages) <= _MOST_WINDOWS:  # a paraphrase may share no term with its passage
            for number in range(len(self.passages)):
                if self._firsts[number] < self._firsts[number + 1]:
                    places.setdefault(number, [self._firsts[number]])

        def promise(number: int) -> float:
            best = sum(claim.held.get(place, 0.0) / rank for rank, place in enumerate(places[number][:3], 1))
            return best + 0.5 * claim.within(self.heads[number])

        ranked = sorted(places, key=promise, reverse=True)[:_MOST_WINDOWS]
        windows = [self._window(number, places[number], claim) for number in ranked]
        return sorted(windows, key=lambda one: -one.coverage)

    def _window(self, number: int, places: Sequence[int], claim: _Claim) -> Window:
        """Return a window of a passage: sentences chosen greedily by the coverage they add."""
        covered, chosen, words = set(self.heads[number]), list[int](), 0
        for _ in range(_MOST_SENTENCES):
            left = [place for place in places[:24] if place not in chosen]
            gain, place = self._best(claim, left, covered)
            place = place if gain else places[0]
            if chosen and (gain < _LEAST_GAIN * claim.total or words + self.sentences[place].words > WINDOW_WORDS):
                break
            chosen.append(place)
            words += self.sentences[place].words
            covered |= self.sentences[place].terms
        picked = list(chosen)
        # Neighbours resolve pronouns; in a short passage, a paraphrase may be in any sentence.
        first, last = self._firsts[number], self._firsts[number + 1]
        beside = (chosen[0] - 1, chosen[0] + 1)
        for near in (*beside, *range(first, last)):
            if not first <= near < last or near in picked:
                continue
            if words + self.sentences[near].words <= WINDOW_WORDS:
                picked.append(near)
                words += self.sentences[near].words
            elif near not in beside:
                break
        passage = self.passages[number]
        shown = (passage.text[self.sentences[place].start : self.sentences[place].end] for place in sorted(picked))
        text = " ".join(part for part in (passage.head, *shown) if part)
        spans = tuple(Span(start=self.sentences[place].start, end=self.sentences[place].end) for place in chosen)
        best = self.heads[number] | self.sentences[chosen[0]].terms
        in_one = claim.within(best) >= _IN_ONE * claim.total
        return Window(number, tuple(chosen), spans, text, claim.within(covered) / claim.total, in_one)

    def _features(self, claim: _Claim, windows: Sequence[Window]) -> tuple[float, ...]:
        places = windows[0].places if windows else ()
        head = self.heads[windows[0].passage] if windows else frozenset[str]()
        near = head.union(*(self.sentences[place].terms for place in places))
        denied = any(self.sentences[place].negated for place in places[:2])
        return (
            self._coverage(claim, head),
            _share(claim.numbers, self.numbers),
            _share(claim.names, near),
            float(bool(places) and claim.negated != denied),
        )

    def _best(self, claim: _Claim, places: Sequence[int], covered: Container[str]) -> tuple[float, int]:
        """Return the most coverage that a sentence adds, and its index; the lowest index on a tie."""
        gain, place = max(
            ((claim.within(self.sentences[one].terms, covered), -one) for one in places), default=(0.0, 0)
        )
        return gain, -place

    def _coverage(self, claim: _Claim, head: frozenset[str]) -> float:
        """Return the share of the claim's terms in the best three sentences of all passages."""
        covered = set(head)
        places = sorted(claim.held, key=lambda one: -claim.held[one])[:40]
        for _ in range(_COVERING):
            gain, place = self._best(claim, places, covered)
            covered |= self.sentences[place].terms if gain else frozenset()
        return claim.within(covered) / claim.total


def _share(wanted: frozenset[object], there: Collection[object]) -> float:
    return len(wanted.intersection(there)) / len(wanted) if wanted else 1.0
