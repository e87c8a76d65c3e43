"""From text to terms, the same way for documents and queries.

    text ─▶ NFKC, casefold ─▶ words, and pairs of characters in scripts without spaces ─▶ stems ─▶ without accents

Words are runs of letters, digits and their marks; numbers keep the points and commas inside them (as in Unicode's word
boundaries, UAX #29). Runs of Han, Hiragana, Katakana and Hangul become overlapping pairs of characters, as Lucene's
CJKBigramFilter makes them: a single character between other scripts stays one, so that a query of one character finds
only such places. Thai, Lao, Khmer and Burmese, which have no spaces either, are treated alike.

Stems are Snowball's (Porter 2001), in tantivy's implementation: the pure-Python one takes 165 microseconds a word. Each
document is stemmed in its own language, and each query word in every language that the index holds: whatever a document
was taken for, the same word in a query finds it.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Final

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.search.languages import DEFAULT_LANGUAGE, FUNCTION_WORDS, LANGUAGES, detect_language

__all__ = ["ANALYSIS", "Analyzer", "split_words"]

ANALYSIS: Final = "1"
"""Names the way from text to terms: an index that was made another way has other terms, and is made again."""

MAX_QUERY_WORDS: Final = 256
"""Distinct words of a query that are searched; further ones say little, and cost as much."""

_LONGEST: Final = 255
"""Characters of a word that count; longer ones are no words."""

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
        language: Of all texts, by its Snowball name ("german"). None finds out for each document.

    Raises:
        ConfigurationError: There is no stemmer for the language.
    """

    def __init__(self, language: str | None = None) -> None:
        if language is not None and language not in LANGUAGES:
            raise ConfigurationError(f"language: {language!r} is unknown; known are {', '.join(sorted(LANGUAGES))}")
        self.language = language

    def document(self, text: str) -> tuple[str, str]:
        """Give a document's language, and its terms with spaces between them."""
        words = split_words(text)
        language = self.language or detect_language(words)
        return language, stem_words(words, language)

    def query(self, text: str, languages: Iterable[str]) -> list[tuple[str, ...]]:
        """Give the terms of a query.

        Args:
            text: Any text.
            languages: Those of the documents that are searched.

        Returns:
            For each distinct word its different terms, one or more. The function words of the query's language are
            left out if other words remain; no more than the first 256 words are kept.
        """
        words = list(dict.fromkeys(split_words(text)))
        ignored = FUNCTION_WORDS.get(self.language or detect_language(words), frozenset[str]())
        telling = [word for word in words if word not in ignored] or words
        known = sorted(languages) or [self.language or DEFAULT_LANGUAGE]
        terms = (
            dict.fromkeys(stem_words([word], language) for language in known) for word in telling[:MAX_QUERY_WORDS]
        )
        return [tuple(term for term in forms if term) for forms in terms if any(forms)]


def split_words(text: str) -> list[str]:
    """Give the words of a text in order, casefolded, accents kept; pairs of characters where there are no spaces."""
    if text.isascii():
        plain = text.lower()
        return _PLAIN_WORD.findall(_POSSESSIVE.sub("", plain) if "'" in plain else plain)
    folded = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text).casefold())
    return _runs(_POSSESSIVE.sub("", folded))


def _runs(text: str) -> list[str]:
    special, word = _patterns()
    if special.search(text) is None:
        return _WORD.findall(text)
    return list(itertools.chain.from_iterable(map(_pairs, word.findall(text))))


def _pairs(run: str) -> Iterable[str]:
    """Give the pairs of a run without spaces; a word, or a single character, as it is."""
    return map("".join, itertools.pairwise(run)) if _PAIR.match(run) else (run,)


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Give the pattern of what makes a text special, runs without spaces and marks, and that of its runs and words."""
    letter, marks = rf"[^\W_{_PAIRED}]", _marks()
    word = rf"{letter}+(?:(?:[{marks}]+|(?<=[0-9])[.,][0-9]){letter}*)*"
    return re.compile(f"[{_PAIRED}{marks}]"), re.compile(f"[{_PAIRED}]+|{word}")


def _marks() -> str:
    """Give the combining marks that aren't part of a script without spaces, as ``re`` has no name for them."""
    every = map(chr, (*range(0x300, 0x2000), *range(0x20D0, 0x2100), *range(0xA800, 0xAC00)))
    return "".join(char for char in every if unicodedata.category(char).startswith("M") and not _PAIR.match(2 * char))


def stem_words(words: Sequence[str], language: str) -> str:
    """Give the terms of words of one language, with spaces between them.

    Accents go last, as stemmers know those of their language; English has none, so "André" and "Andre" are one. Terms
    of other languages are marked: the French stem of "fort" is no English "for".
    """
    if max(map(len, words), default=0) > _LONGEST:
        words = [word[:_LONGEST] for word in words]
    text = " ".join(words)
    if language == DEFAULT_LANGUAGE:
        return " ".join(_stemmer(language).analyze(_without_accents(text)))
    stems = _without_accents(" ".join(_stemmer(language).analyze(text))).split()
    return " ".join([f"{stem}~{language[:2]}" for stem in stems])


def _without_accents(text: str) -> str:
    """Take accents off Latin, Greek and Cyrillic letters; marks of other scripts are letters of their own."""
    if text.isascii():
        return text
    plain = _ACCENTS.sub("", unicodedata.normalize("NFD", text).translate(_LETTERS))
    return unicodedata.normalize("NFC", plain)


@functools.cache
def _stemmer(language: str) -> Any:
    import tantivy  # noqa: PLC0415 (who searches no words needs none)

    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace())
    return builder.filter(tantivy.Filter.stemmer(language)).build()
