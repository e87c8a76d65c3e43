"""From text to terms, the same way for documents and queries.

    text -> NFKC, casefold -> words, and pairs of characters in scripts without spaces -> stems -> without accents

Words are runs of letters, digits and their marks; numbers keep the points and commas inside them (as in Unicode's word
boundaries, UAX #29). Runs of Han, Hiragana, Katakana and Hangul become overlapping pairs of characters, as Lucene's
CJKBigramFilter makes them: a single character between other scripts stays one, so that a query of one character finds
only such places. Thai, Lao, Khmer and Burmese, which have no spaces either, are treated alike.

Stems are Snowball's (Porter 2001), in tantivy's implementation: the pure-Python one takes 165 microseconds a word. Each
document is stemmed in its own language, and each query word in every language that the index holds: whatever language
a document was taken for, the same word in a query finds it. The language of a text is found by its script and its
function words: cheap, and enough to choose a stemmer.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from llama_index_agentic_kb.errors import ConfigurationError

if TYPE_CHECKING:
    import tantivy

ANALYSIS: Final = "1"
"""The version of the way from text to terms: an index of another version has other terms, and is made again."""
MAX_QUERY_WORDS: Final = 256
"""Distinct words of a query that are searched; further ones say little, and cost as much."""
MAX_WORD_LENGTH: Final = 255
"""Characters of a word that count; longer ones are no words."""
DEFAULT_LANGUAGE: Final = "english"
"""What a text is taken for that shows nothing else: names, numbers, lists, single words."""
_SAMPLE: Final = 150
"""How many words of a text are looked at for its language."""
_MIN_FOREIGN: Final = 2
"""Function words that the default language lacks and another one has, for a text to be taken for that one."""

_LINES: Final = Path(__file__).with_name("function_words.txt").read_text("utf-8").splitlines()
FUNCTION_WORDS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {line.partition(": ")[0]: frozenset(line.partition(": ")[2].split()) for line in _LINES if not line.startswith("#")}
)
"""The function words of each language that is detected by them."""

_SCRIPTS: Final = {"CYRILLIC": "russian", "GREEK": "greek", "ARABIC": "arabic", "TAMIL": "tamil"}

LANGUAGES: Final = (*sorted(FUNCTION_WORDS), *sorted(_SCRIPTS.values()))
"""Every language that a text may be taken for, by the names of the Snowball stemmers."""

_LANGUAGES_OF: Final = {
    word: tuple(language for language, words in FUNCTION_WORDS.items() if word in words)
    for word in sorted(frozenset[str]().union(*FUNCTION_WORDS.values()))
    if len(word) > 1  # letters may be initials
}
_FOREIGN: Final = frozenset(word for word, languages in _LANGUAGES_OF.items() if DEFAULT_LANGUAGE not in languages)

_PAIRED: Final = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U000323af\u1100-\u11ff\uac00-\ud7ff"  # Han, Hiragana, Katakana, Hangul
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ebd\u0ec0-\u0ecd\u1780-\u17d3\u1000-\u103f"  # Thai, Lao, Khmer, Burmese
)
_POSSESSIVE: Final = re.compile("['\u2019]s\\b")
_INVISIBLE: Final = re.compile("[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff]")
_PLAIN_WORD: Final = re.compile(r"[a-z0-9]+(?:(?<=[0-9])[.,][0-9][a-z0-9]*)*")
_WORD: Final = re.compile(r"[^\W_]+(?:(?<=[0-9])[.,][0-9][^\W_]*)*")
_PAIR: Final = re.compile(f"[{_PAIRED}]{{2}}")
_ACCENTS: Final = re.compile("[\u0300-\u036f]+")
_LETTERS: Final = str.maketrans(
    {"æ": "ae", "œ": "oe", "ø": "o", "đ": "d", "ð": "d", "ł": "l", "þ": "th", "\u0131": "i"}
)


class Analyzer:
    """Makes terms of documents and queries.

    Args:
        language: Of all texts, by its Snowball name ("german"). None detects it for each document.

    Raises:
        ConfigurationError: There is no stemmer for the language.
    """

    def __init__(self, language: str | None = None) -> None:
        if language is not None and language not in LANGUAGES:
            raise ConfigurationError(f"language: {language!r} is unknown; known are {', '.join(sorted(LANGUAGES))}")
        self.language = language

    def document(self, text: str) -> tuple[str, str]:
        """Return a document's language, and its terms with spaces between them."""
        words = split_words(text)
        language = self.language or detect_language(words)
        return language, stem_words(words, language)

    def query(self, text: str, languages: Iterable[str]) -> list[tuple[str, ...]]:
        """Return the different terms of each distinct word of a query, in the languages that are searched.

        The function words of the query's language are left out if other words remain; no more than the first 256
        words are kept.
        """
        words = list(dict.fromkeys(split_words(text)))
        ignored = FUNCTION_WORDS.get(self.language or detect_language(words), frozenset[str]())
        content = [word for word in words if word not in ignored] or words
        known = sorted(languages) or [self.language or DEFAULT_LANGUAGE]
        terms = (
            dict.fromkeys(stem_words([word], language) for language in known) for word in content[:MAX_QUERY_WORDS]
        )
        return [tuple(term for term in forms if term) for forms in terms if any(forms)]


# -- words ------------------------------------------------------------------------------------------------------------


def split_words(text: str) -> list[str]:
    """Return the words of a text in order, casefolded, with accents; pairs of characters where there are no spaces."""
    if text.isascii():
        plain = text.lower()
        return _PLAIN_WORD.findall(_POSSESSIVE.sub("", plain) if "'" in plain else plain)
    folded = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text).casefold())
    folded = _POSSESSIVE.sub("", folded)
    special, word = _patterns()
    if special.search(folded) is None:
        return _WORD.findall(folded)
    return list(itertools.chain.from_iterable(map(_pairs, word.findall(folded))))


def _pairs(run: str) -> Iterable[str]:
    """Return the pairs of a run without spaces; a word, or a single character, as it is."""
    return map("".join, itertools.pairwise(run)) if _PAIR.match(run) else (run,)


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of what makes a text special, runs without spaces and marks, and that of its runs and words.

    Marks are the combining ones that aren't part of a script without spaces; ``re`` has no name for them.
    """
    combining = map(chr, (*range(0x300, 0x2000), *range(0x20D0, 0x2100), *range(0xA800, 0xAC00)))
    marks = "".join(
        char for char in combining if unicodedata.category(char).startswith("M") and not _PAIR.match(2 * char)
    )
    letter = rf"[^\W_{_PAIRED}]"
    word = rf"{letter}+(?:(?:[{marks}]+|(?<=[0-9])[.,][0-9]){letter}*)*"
    return re.compile(f"[{_PAIRED}{marks}]"), re.compile(f"[{_PAIRED}]+|{word}")


# -- stems ------------------------------------------------------------------------------------------------------------


def stem_words(words: Sequence[str], language: str) -> str:
    """Return the terms of words of one language, with spaces between them.

    Accents go last, as stemmers know those of their language; English has none, so "André" and "Andre" are one. Terms
    of other languages are marked: the French stem of "fort" is no English "for".
    """
    if max(map(len, words), default=0) > MAX_WORD_LENGTH:
        words = [word[:MAX_WORD_LENGTH] for word in words]
    text = " ".join(words)
    if language == DEFAULT_LANGUAGE:
        return " ".join(_stemmer(language).analyze(_without_accents(text)))
    stems = _without_accents(" ".join(_stemmer(language).analyze(text))).split()
    return " ".join([f"{stem}~{language[:2]}" for stem in stems])


def _without_accents(text: str) -> str:
    """Remove accents from Latin, Greek and Cyrillic letters; marks of other scripts are letters of their own."""
    if text.isascii():
        return text
    plain = _ACCENTS.sub("", unicodedata.normalize("NFD", text).translate(_LETTERS))
    return unicodedata.normalize("NFC", plain)


@functools.cache
def _stemmer(language: str) -> tantivy.TextAnalyzer:
    import tantivy  # noqa: PLC0415 (only lexical search needs it)

    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace())
    return builder.filter(tantivy.Filter.stemmer(language)).build()


# -- languages --------------------------------------------------------------------------------------------------------


def detect_language(words: Sequence[str]) -> str:
    """Return the language of a text, by its words, casefolded.

    It is that of the script that most words are in; among those of the Latin script the one whose function words are
    most, ``DEFAULT_LANGUAGE`` unless another is plainly ahead.
    """
    sample = set(words[:_SAMPLE])
    scripts: Counter[str] = Counter()
    for word in sample:
        script = "" if word.isascii() else unicodedata.name(word[0], "").partition(" ")[0]
        if script in _SCRIPTS:
            scripts[_SCRIPTS[script]] += 1
    best = max(sorted(scripts), key=scripts.__getitem__, default=DEFAULT_LANGUAGE)
    if 2 * scripts[best] > len(sample):
        return best
    if len(_FOREIGN & sample) < _MIN_FOREIGN:  # most texts: no need to count
        return DEFAULT_LANGUAGE
    counts: Counter[str] = Counter()
    shares: defaultdict[str, float] = defaultdict(float)  # a word of many languages says little about each
    known = _LANGUAGES_OF.keys() & sample
    for word in known:
        for language in _LANGUAGES_OF[word]:
            counts[language] += 1
            shares[language] += 1 / len(_LANGUAGES_OF[word])
    best = max(sorted(counts), key=lambda name: (counts[name], shares[name]))
    foreign = sum(best in _LANGUAGES_OF[word] and word in _FOREIGN for word in known)
    return best if counts[best] > counts[DEFAULT_LANGUAGE] and foreign >= _MIN_FOREIGN else DEFAULT_LANGUAGE
