"""What of a claim stands in the evidence: exact features, and the sentences that could bear the claim.

Nothing here decides. Terms, numbers, names and negation are looked for, weighted by how rare they are in the evidence,
and counted; ``scorers.lexical`` learns from labelled claims what the counts mean.
"""

# ruff: noqa: RUF001 (typographic and full-width signs are the point)
from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Final

from llama_index_agentic_kb.search.tokenizing import (
    DEFAULT_LANGUAGE,
    FUNCTION_WORDS,
    detect_language,
    split_words,
    stem_words,
)

__all__ = [
    "FEATURES",
    "Corpus",
    "Passage",
    "Reading",
    "Window",
    "is_negated",
    "numbers_of",
    "passage_sentences",
    "words",
]

FEATURES: Final = (
    "coverage_1", "coverage_2", "coverage_3", "coverage_4", "neighbours", "title", "pairs", "numbers", "numbers_near",
    "names", "names_near", "missing_rarest", "missing_share", "negation_claim", "negation_differs", "length",
)  # fmt: skip
"""Names of the features, in the order of ``Reading.features``."""

MAX_CHARACTERS: Final = 50_000
"""Characters of a passage that are read."""
MAX_CLAIM: Final = 1_000
"""Characters of a claim that are read."""
WINDOW_WORDS: Final = 64
"""Words of evidence that a window holds at most, beside its title."""
_MOST_SENTENCES: Final = 4
_LONGEST_SENTENCE: Final = 600
"""Characters after which a stretch without a mark is cut."""
_SMOOTHING: Final = 4.0
_MOST_WINDOWS: Final = 8
_WHOLE: Final = 0.85
"""Coverage from which no second passage is looked for."""
_ADDS: Final = 0.2
"""Share of a claim that a second passage must add."""

# A mark, closing quotes or brackets, space, and no small letter; not after an initial or a short title (Dr., St.).
_END: Final = re.compile(
    r"(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\bMrs)(?<!\bvs)(?<!\bNo)[.!?…]+[\"'”’»)\]]*\s+(?![a-z])|[。！？．｡]+[」』”’）]*|\n+"
)
_NUMBER: Final = re.compile(r"\d+(?:[.,:]\d+)*")
_NAME: Final = re.compile(r"(?<![.!?]\s)(?<!^)\b[^\W\d_a-z][\w’'-]*", re.UNICODE)


def words(text: str) -> frozenset[str]:
    """Return the words of a list that is written as a text."""
    return frozenset(text.split())


_NEGATIONS: Final = words(
    "not no never none neither nor without cannot nobody nothing nowhere hardly barely t n't "  # English, with don't
    "nicht kein keine keinen keiner keines nie niemals ohne weder "
    "ne pas jamais aucun aucune sans ni non nunca sin ningún ninguna nessun nessuna mai senza "
    "niet geen nooit zonder não nunca sem nem ikke ingen aldrig inte ingen aldrig utan ei eivät не нет никогда без"
)
_COUNTED: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_SPOKEN: Final = {word: str(value) for value, word in enumerate(_COUNTED.split())}
_CALENDAR: Final = (
    "january february march april may june july august september october november december "
    "januar februar märz april mai juni juli august september oktober november dezember "
    "janvier février mars avril mai juin juillet août septembre octobre novembre décembre "
    "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre"
)
_MONTHS: Final = {word: f"month{place % 12 + 1}" for place, word in enumerate(_CALENDAR.split())}
_ALSO_VERBS: Final = frozenset(["may", "march", "mars", "mai"])
"""Months that are words as well, and months only with a capital letter."""
_LETTERS: Final = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage taken apart.

    Args:
        text: What it says.
        head: Its title and attributes.
    """

    text: str
    head: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """Sentences of one passage, in its order, that could bear a claim.

    Args:
        passage: Which one, by its position.
        spans: Of the sentences, in its text, best first.
        text: Head and sentences, for a model that reads both sides.
        coverage: Share of the claim's terms in it, by weight.
    """

    passage: int
    spans: tuple[tuple[int, int], ...]
    text: str
    coverage: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A claim read against the evidence.

    Args:
        features: In the order of ``FEATURES``.
        windows: The best window of each passage that has something of the claim, best first.
        partner: Position of a second window without which the first lacks much of the claim; None where there is none.
        telling: How many terms of the claim are no function words.
        named: Whether it has a name or a number.
        sentences: How many the passage of the best window has.
    """

    features: tuple[float, ...]
    windows: tuple[Window, ...]
    partner: int | None = None
    telling: int = 1
    named: bool = True
    sentences: int = 0

    @property
    def evidence(self) -> str:
        """The text that a model reads beside the claim: the best window, and its partner."""
        texts = [self.windows[0].text] if self.windows else []
        return " ".join(texts if self.partner is None else [*texts, self.windows[self.partner].text])


@dataclass(slots=True)
class _Sentence:
    passage: int
    number: int
    start: int
    end: int
    terms: frozenset[str]
    order: tuple[str, ...]
    words: int
    negated: bool


@dataclass(slots=True)
class _Claim:
    terms: dict[str, float] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    pairs: frozenset[tuple[str, str]] = frozenset()
    negated: bool = False
    words: int = 0


def passage_sentences(text: str) -> list[tuple[int, int]]:
    """Return where the sentences of a passage stand; titles, list items and lines are sentences of their own."""
    spans: list[tuple[int, int]] = []
    start = 0
    for match in _END.finditer(text):
        _append(spans, text, start, match.end())
        start = match.end()
    _append(spans, text, start, len(text))
    return spans


def _append(spans: list[tuple[int, int]], text: str, start: int, end: int) -> None:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    while end - start > _LONGEST_SENTENCE:
        cut = text.rfind(" ", start, start + _LONGEST_SENTENCE)
        cut = cut if cut > start else start + _LONGEST_SENTENCE
        spans.append((start, cut))
        start = cut + (text[cut : cut + 1] == " ")
    if end > start:
        spans.append((start, end))


@lru_cache(maxsize=4096)
def _plain_number(digits: str) -> str:
    """Return a number without separators of thousands ("1,500" and "1.500" are 1500, "3.50" is 3.5)."""
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", digits):
        digits = digits.replace(",", "")
    elif re.fullmatch(r"\d{1,3}(?:\.\d{3})+", digits):
        digits = digits.replace(".", "")
    if re.fullmatch(r"\d+[.,]\d+", digits):
        digits = digits.replace(",", ".").rstrip("0").rstrip(".")
    return digits.lstrip("0") or "0"


def numbers_of(text: str) -> frozenset[str]:
    """Return the numbers and months of a text in one form."""
    found = {_plain_number(number) for number in _NUMBER.findall(text)}
    for word in _LETTERS.findall(text):
        folded = word.casefold()
        value = _SPOKEN.get(folded) or ((folded != word or folded not in _ALSO_VERBS) and _MONTHS.get(folded))
        if value:
            found.add(value)
    return frozenset(found)


def _terms(text: str, language: str) -> list[str]:
    words = [_SPOKEN.get(word, word) for word in split_words(text)]
    return [_plain_number(word) if word[:1].isdigit() else word for word in stem_words(words, language).split()]


@lru_cache(maxsize=32)
def _function_stems(language: str) -> frozenset[str]:
    return frozenset(stem_words(sorted(FUNCTION_WORDS.get(language, ())), language).split())


def _negated(words: Iterable[str]) -> bool:
    return not _NEGATIONS.isdisjoint(words)


def is_negated(text: str) -> bool:
    """Return whether a text has a word of negation."""
    return _negated(split_words(text))


class Corpus:
    """Passages that claims are read against.

    Args:
        passages: The evidence.
        language: Of all of it, by its Snowball name; None finds out.
    """

    def __init__(self, passages: Sequence[Passage], language: str | None = None) -> None:
        self.passages = passages
        sample = " ".join(passage.text[:400] for passage in passages[:8])
        self.language = language or (detect_language(split_words(sample)) if sample else DEFAULT_LANGUAGE)
        self.sentences: list[_Sentence] = []
        self.heads = [frozenset(_terms(passage.head, self.language)) for passage in passages]
        self._numbers: set[str] = set()
        self._firsts: list[int] = []
        for number, passage in enumerate(passages):
            self._firsts.append(len(self.sentences))
            text = passage.text[:MAX_CHARACTERS]
            self._numbers |= numbers_of(passage.head)
            self._numbers |= numbers_of(text)
            for place, (start, end) in enumerate(passage_sentences(text)):
                words = split_words(text[start:end])
                terms = _terms(text[start:end], self.language)
                self.sentences.append(
                    _Sentence(number, place, start, end, frozenset(terms), tuple(terms), len(words), _negated(words))
                )
        self._firsts.append(len(self.sentences))
        counts: Counter[str] = Counter()
        self._holders: dict[str, list[int]] = {}
        for place, sentence in enumerate(self.sentences):
            for term in sentence.terms:
                counts[term] += 1
                self._holders.setdefault(term, []).append(place)
        self._total = len(self.sentences) + _SMOOTHING
        self._counts = counts
        self._all = frozenset(counts).union(*self.heads) if self.heads else frozenset(counts)

    def weight(self, term: str) -> float:
        """Return how telling a term is (Spärck Jones's inverse document frequency over the sentences)."""
        return math.log(1 + self._total / (self._counts.get(term, 0) + 1))

    def read(self, claim: str) -> Reading:
        """Return a claim's features and the windows that could bear it."""
        claim = claim[:MAX_CLAIM]
        asked = self._claim(claim)
        held: dict[int, float] = {}
        for term, weight in asked.terms.items():
            for place in self._holders.get(term, ()):
                held[place] = held.get(place, 0.0) + weight
        total = sum(asked.terms.values()) or 1.0
        windows = self._windows(asked, held, total)
        features = self._features(asked, held, total, windows)
        telling = len(asked.terms.keys() - _function_stems(self.language))
        named = bool(asked.names or asked.numbers)
        best = windows[0].passage if windows else 0
        length = self._firsts[best + 1] - self._firsts[best] if windows else 0
        return Reading(features, tuple(windows), self._partner(asked, windows, total), telling, named, length)

    def _partner(self, claim: _Claim, windows: Sequence[Window], total: float) -> int | None:
        """Return the window that adds most to the first, where the first alone lacks much."""
        if len(windows) < 2 or windows[0].coverage >= _WHOLE:  # noqa: PLR2004 (a partner needs two)
            return None
        covered = self._terms_of(windows[0])
        gains = [
            sum(weight for term, weight in claim.terms.items() if term not in covered and term in self._terms_of(one))
            for one in windows[1:]
        ]
        best = max(range(len(gains)), key=lambda one: gains[one])
        return best + 1 if gains[best] >= _ADDS * total else None

    def _terms_of(self, window: Window) -> frozenset[str]:
        return self.heads[window.passage].union(*(sentence.terms for sentence in self._near(window)))

    def _claim(self, claim: str) -> _Claim:
        terms = _terms(claim, self.language)
        ignored = _function_stems(self.language)
        telling = [term for term in terms if term not in ignored] or terms
        names = {term for name in _NAME.findall(claim) for term in _terms(name, self.language)} - ignored
        return _Claim(
            {term: self.weight(term) for term in telling},
            numbers_of(claim),
            frozenset(names),
            frozenset(pairwise(telling)),
            _negated(split_words(claim)),
            len(terms),
        )

    def _windows(self, claim: _Claim, held: Mapping[int, float], total: float) -> list[Window]:
        """Return one window a passage: sentences picked greedily by what they add."""
        by_passage: dict[int, list[int]] = {}
        for place in sorted(held, key=lambda one: -held[one]):
            by_passage.setdefault(self.sentences[place].passage, []).append(place)
        if len(self.passages) <= _MOST_WINDOWS:  # what is said in other words shares none with its passage
            for number in range(len(self.passages)):
                if self._firsts[number] < self._firsts[number + 1]:
                    by_passage.setdefault(number, [self._firsts[number]])
        ranked = sorted(by_passage, key=lambda one: -self._potential(one, by_passage[one], held, claim, total))
        ranked = ranked[:_MOST_WINDOWS]
        windows = [self._window(number, by_passage[number], claim, total) for number in ranked]
        return sorted(windows, key=lambda one: -one.coverage)

    def _potential(
        self, number: int, places: Sequence[int], held: Mapping[int, float], claim: _Claim, total: float
    ) -> float:
        head = sum(weight for term, weight in claim.terms.items() if term in self.heads[number])
        return (
            sum(held.get(place, 0.0) / (rank + 1) for rank, place in enumerate(places[:3])) / total + 0.5 * head / total
        )

    def _window(self, number: int, places: Sequence[int], claim: _Claim, total: float) -> Window:
        covered = set(self.heads[number])
        chosen: list[int] = []
        words = 0
        for _ in range(_MOST_SENTENCES):
            gains = [(self._gain(place, claim, covered), -place) for place in places[:24] if place not in chosen]
            gain, place = max(gains, default=(0.0, 0))
            place = -place
            if chosen and (gain < 0.04 * total or words + self.sentences[place].words > WINDOW_WORDS):
                break
            if gain <= 0 and not chosen:
                place = places[0]
            chosen.append(place)
            words += self.sentences[place].words
            covered |= self.sentences[place].terms
        picked = list(chosen)
        # The neighbours say whom a pronoun means; what is said in other words may stand anywhere in a short passage.
        first, last = self._firsts[number], self._firsts[number + 1]
        for near in (chosen[0] - 1, chosen[0] + 1, *range(first, last)):
            if not first <= near < last or near in picked:
                continue
            if words + self.sentences[near].words <= WINDOW_WORDS:
                picked.append(near)
                words += self.sentences[near].words
            elif near not in (chosen[0] - 1, chosen[0] + 1):
                break
        passage = self.passages[number]
        parts = [passage.head] if passage.head else []
        parts += [passage.text[self.sentences[place].start : self.sentences[place].end] for place in sorted(picked)]
        share = sum(weight for term, weight in claim.terms.items() if term in covered) / total
        spans = tuple((self.sentences[place].start, self.sentences[place].end) for place in chosen)
        return Window(number, spans, " ".join(parts), share)

    def _gain(self, place: int, claim: _Claim, covered: set[str]) -> float:
        terms = self.sentences[place].terms
        return sum(weight for term, weight in claim.terms.items() if term in terms and term not in covered)

    def _features(
        self, claim: _Claim, held: Mapping[int, float], total: float, windows: Sequence[Window]
    ) -> tuple[float, ...]:
        best = windows[0] if windows else None
        head = self.heads[best.passage] if best else frozenset[str]()
        coverages = self._greedy(claim, held, total, head)
        near = self._near(best)
        near_terms = head.union(*(sentence.terms for sentence in near))
        near_text = best.text if best else ""
        near_pairs = {pair for sentence in near for pair in _pairs_of(sentence, claim)}
        near_numbers = numbers_of(near_text)
        everywhere = self._all
        missing = [term for term in claim.terms if term not in near_terms]
        first = near[0] if near else None
        return (
            *coverages,
            sum(claim.terms[term] for term in claim.terms if term in near_terms) / total,
            sum(claim.terms[term] for term in claim.terms if term in head) / total,
            len(near_pairs & claim.pairs) / len(claim.pairs) if claim.pairs else 1.0,
            _share(claim.numbers, self._numbers),
            _share(claim.numbers, near_numbers),
            _share(claim.names, everywhere),
            _share(claim.names, near_terms),
            max((self.weight(term) for term in missing), default=0.0) / math.log(1 + self._total),
            len(missing) / max(1, len(claim.terms)),
            float(claim.negated),
            float(first is not None and claim.negated != any(sentence.negated for sentence in near[:2])),
            math.log1p(claim.words) / 4,
        )

    def _greedy(self, claim: _Claim, held: Mapping[int, float], total: float, head: frozenset[str]) -> list[float]:
        """Return the share of the claim's terms in the best one to four sentences of all passages."""
        covered = set(head)
        reached = sum(weight for term, weight in claim.terms.items() if term in covered)
        shares = []
        places = sorted(held, key=lambda one: -held[one])[:40]
        for _ in range(_MOST_SENTENCES):
            gain, place = max(((self._gain(one, claim, covered), -one) for one in places), default=(0.0, 0))
            reached += gain
            if gain > 0:
                covered |= self.sentences[-place].terms
            shares.append(reached / total)
        return shares

    def _near(self, window: Window | None) -> list[_Sentence]:
        if window is None:
            return []
        wanted = {start: rank for rank, (start, _) in enumerate(window.spans)}
        inside = self.sentences[self._firsts[window.passage] : self._firsts[window.passage + 1]]
        return sorted((one for one in inside if one.start in wanted), key=lambda one: wanted[one.start])


def _pairs_of(sentence: _Sentence, claim: _Claim) -> set[tuple[str, str]]:
    kept = [term for term in sentence.order if term in claim.terms]
    return set(pairwise(kept))


def _share(wanted: frozenset[str], there: Iterable[str]) -> float:
    return len(wanted & frozenset(there)) / len(wanted) if wanted else 1.0
