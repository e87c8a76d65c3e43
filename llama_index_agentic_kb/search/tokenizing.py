"""Conversion of text to terms, for documents and queries alike.

    text -> NFKC, casefold -> words, and pairs of characters in scripts without spaces -> stems -> without accents

Words are runs of letters, digits and their marks; numbers keep the points and commas inside them (as in Unicode's word
boundaries, UAX #29). Runs of Han, Hiragana, Katakana and Hangul become overlapping pairs of characters, as in Lucene's
CJKBigramFilter; a single character between other scripts remains a term, and a query of one character finds only such
characters. Thai, Lao, Khmer and Burmese, which have no spaces either, are treated alike.

Stems are Snowball's (Porter 2001), in tantivy's implementation: the pure-Python one takes 165 microseconds a word. Each
document is stemmed in its own language, and each query word in every language of the index: whatever the detected
language of a document, the same word in a query finds it. The language of a text is detected by its script and its
function words: fast, and sufficient to choose a stemmer.
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

if TYPE_CHECKING:
    import tantivy

ANALYSIS: Final = "1"  # the version of this conversion: an index of another one has other terms, and must be rebuilt
MAX_QUERY_WORDS: Final = 256  # maximum number of distinct words of a query; further words are ignored
MAX_WORD_LENGTH: Final = 255  # maximum number of characters of a word; the rest is cut off
DEFAULT_LANGUAGE: Final = "english"  # of texts whose language can't be detected: names, numbers, lists, single words
_SAMPLE: Final = 150  # number of words of a text used for language detection
_MIN_FOREIGN: Final = 2  # minimum number of function words that are not in the default language, to detect another one

_LINES: Final = Path(__file__).with_name("function_words.txt").read_text("utf-8").splitlines()
FUNCTION_WORDS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {line.partition(": ")[0]: frozenset(line.partition(": ")[2].split()) for line in _LINES if not line.startswith("#")}
)
"""The function words of each language that has a list of them."""

_SCRIPTS: Final = {"CYRILLIC": "russian", "GREEK": "greek", "ARABIC": "arabic", "TAMIL": "tamil"}

LANGUAGES: Final = (*sorted(FUNCTION_WORDS), *sorted(_SCRIPTS.values()))
"""All languages that can be detected, by the names of their Snowball stemmers."""

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


def document_terms(text: str) -> tuple[str, str]:
    """Return a document's language and its terms, separated by spaces."""
    words = split_words(text)
    language = detect_language(words)
    return language, stem_words(words, language)


def query_terms(text: str, languages: Iterable[str], own: str | None = None) -> list[tuple[str, ...]]:
    """Return the distinct terms of each distinct word of a query, in the given languages.

    The function words of the query's own language, which is detected if None, are omitted if other words remain. Only
    the first 256 words are used.
    """
    words = list(dict.fromkeys(split_words(text)))
    ignored = FUNCTION_WORDS.get(own or detect_language(words), frozenset[str]())
    content = [word for word in words if word not in ignored] or words
    known = sorted(languages) or [DEFAULT_LANGUAGE]
    terms = (dict.fromkeys(stem_words([word], language) for language in known) for word in content[:MAX_QUERY_WORDS])
    return [tuple(filter(None, forms)) for forms in terms if any(forms)]


# -- words ------------------------------------------------------------------------------------------------------------


def split_words(text: str) -> list[str]:
    """Return the words of a text in order, casefolded, with accents; character pairs for scripts without spaces."""
    if text.isascii():
        plain = text.lower()
        return _PLAIN_WORD.findall(_POSSESSIVE.sub("", plain) if "'" in plain else plain)
    folded = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text).casefold())
    folded = _POSSESSIVE.sub("", folded)
    special, word = _patterns()
    if special.search(folded) is None:
        return _WORD.findall(folded)
    split: list[str] = []
    for run in word.findall(folded):
        split += map("".join, itertools.pairwise(run)) if _PAIR.match(run) else (run,)
    return split


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of special characters, and the pattern that splits a text into runs of them and words."""
    # Scripts without spaces and combining marks of other scripts are special; ``re`` has no class for such marks.
    combining = map(chr, (*range(0x300, 0x2000), *range(0x20D0, 0x2100), *range(0xA800, 0xAC00)))
    marks = "".join(
        char for char in combining if unicodedata.category(char).startswith("M") and not _PAIR.match(2 * char)
    )
    letter = rf"[^\W_{_PAIRED}]"
    word = rf"{letter}+(?:(?:[{marks}]+|(?<=[0-9])[.,][0-9]){letter}*)*"
    return re.compile(f"[{_PAIRED}{marks}]"), re.compile(f"[{_PAIRED}]+|{word}")


# -- stems ------------------------------------------------------------------------------------------------------------


def stem_words(words: Sequence[str], language: str) -> str:
    """Return the terms of words of one language, separated by spaces.

    Accents are removed after stemming, as stemmers use them; for English before it, so "André" equals "Andre". Terms of
    other languages have a suffix ("~fr"), so that equal stems of different languages do not match.
    """
    if max(map(len, words), default=0) > MAX_WORD_LENGTH:
        words = [word[:MAX_WORD_LENGTH] for word in words]
    text = " ".join(words)
    if language == DEFAULT_LANGUAGE:
        return " ".join(_stemmer(language).analyze(_without_accents(text)))
    stems = _without_accents(" ".join(_stemmer(language).analyze(text))).split()
    return " ".join([f"{stem}~{language[:2]}" for stem in stems])


def _without_accents(text: str) -> str:
    """Remove accents from Latin, Greek and Cyrillic letters; marks of other scripts are kept."""
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
    """Detect the language of a text from its casefolded words.

    If most words have a script of one language, such as Greek, it is that language. Otherwise it is the language with
    the most function words, or ``DEFAULT_LANGUAGE`` if no other has clearly more.
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
    shares: defaultdict[str, float] = defaultdict(float)  # a word of several languages counts less for each
    known = sorted(_LANGUAGES_OF.keys() & sample)  # the sum of shares depends on the order
    for word in known:
        for language in _LANGUAGES_OF[word]:
            counts[language] += 1
            shares[language] += 1 / len(_LANGUAGES_OF[word])
    best = max(sorted(counts), key=lambda name: (counts[name], shares[name]))
    foreign = sum(best in _LANGUAGES_OF[word] and word in _FOREIGN for word in known)
    return best if counts[best] > counts[DEFAULT_LANGUAGE] and foreign >= _MIN_FOREIGN else DEFAULT_LANGUAGE
