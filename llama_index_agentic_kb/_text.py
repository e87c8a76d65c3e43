"""Small work on plain text: cutting at sentence ends, squeezing, telling texts apart."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

__all__ = [
    "cut_to_fit",
    "excerpt",
    "normalize",
    "one_line",
    "printable",
    "redacted",
    "sentence_spans",
    "without_surrogates",
]

WINDOW = 2_000
"""How many characters before a cut are searched for a sentence end; the segmenter is slow on long text."""


_WORD: Final = re.compile(r"\S{1,16}")  # scripts without spaces are cut too
_MARKS: Final = ".,;:!?\"'()[]"


def normalize(text: str) -> str:
    """Give a form in which texts that read the same are equal: NFKC, lower case, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def one_line(text: str, limit: int = 200) -> str:
    """Give a text on one line, cut to ``limit`` characters with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: max(0, limit - 1)].rstrip() + "…"


def printable(text: str) -> str:
    """Give a text without what would steer a terminal or hide in it: control, format and surrogate characters.

    Line breaks and tabs stay.
    """
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs"))


def without_surrogates(text: str) -> str:
    """Give a text that can be written as UTF-8: lone surrogates become U+FFFD, pairs of them the character they mean.

    The same object where there are none.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


_SECRETS: Final = (
    (re.compile(r"(://)[^/\s:@]{1,100}:[^/\s@]{1,200}@"), r"\1***@"),  # user and password in a URL
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), r"\1 ***"),
    (re.compile(r"\b(sk|pk|key|ghp|xox[abp])[-_][\w-]{8,}"), r"\1-***"),
    (re.compile(r"(?i)\b(api[-_]?key|password|passwd|secret|token)(\s*[=:]\s*)[^\s,;&'\"]{4,}"), r"\1\2***"),
)


def redacted(text: str) -> str:
    """Give a text without what looks like a password or a key, for accounts and errors that others read."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Give the (start, end) character spans of the sentences of a text; they follow each other without a gap.

    Segmented by pySBD (Sadvilkar and Neumann 2020), the rule-based segmenter of the Golden Rule Set. What it leaves
    out (it drops a lone ``??`` at the start of a line) belongs to the sentence after it.
    """
    ends: list[int] = []
    for sentence in _segmenter().segment(text):
        end = _end_of(sentence, text, ends[-1] if ends else 0)
        if end is None:  # it changed the text: what is left is one sentence
            break
        ends.append(end)
    if not ends or text[ends[-1] :].strip():
        ends.append(len(text))
    return list(pairwise([0, *ends]))


def _end_of(part: str, text: str, position: int) -> int | None:
    start = text.find(part, position)
    return None if start < 0 else start + len(part)


@functools.cache
def _segmenter() -> Any:
    import pysbd  # noqa: PLC0415 (takes 50 ms, and minimal requests may never cut)

    return pysbd.Segmenter(language="en", clean=False)


def cut_to_fit(text: str, limit: int, count: Callable[[str], int]) -> str:
    """Give the longest start of a text that counts at most ``limit``, cut at a sentence end where there is one.

    Args:
        text: What to cut.
        limit: The most it may count. Below 1 nothing fits.
        count: Measures a text (tokens, say). Must not shrink as text grows.

    Returns:
        The text itself if it fits. Else whole sentences, or, where not even the first fits, whole words and an
        ellipsis. Empty where not even one character fits.
    """
    if limit < 1:
        return ""
    if _fits(text, limit, count):
        return text
    hard = _longest(text, limit, count)
    start = max(0, hard - WINDOW)
    ends = [start + end for _, end in sentence_spans(text[start : hard + 200])]
    whole = [end for end in ends if end <= hard]
    if whole and text[: whole[-1]].strip():
        return text[: whole[-1]].rstrip()
    words = text[:hard].rsplit(None, 1)[0] if " " in text[:hard].strip() else text[:hard]
    while words and not _fits(words + "…", limit, count):
        words = words[:-1]
    return words + "…" if words else ""


def _fits(text: str, limit: int, count: Callable[[str], int]) -> bool:
    """Counting is the cost: a text far too long is not counted whole (no token is longer than 32 characters)."""
    return count(text[: limit * 32 + 32]) <= limit and (len(text) <= limit * 32 + 32 or count(text) <= limit)


def _longest(text: str, limit: int, count: Callable[[str], int]) -> int:
    """Give the most characters of the start of a text that count at most ``limit``, by bisection."""
    low, high = 0, min(len(text), limit * 32)
    while low < high:
        middle = (low + high + 1) // 2
        if count(text[:middle]) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def excerpt(text: str, around: str, words: int) -> str:
    """Give the part of a text, at most so many words long, that holds most of the words of another.

    Args:
        text: What to cut.
        around: Whose words are looked for; those of one or two letters don't count.
        words: The most words of the excerpt.

    Returns:
        The text itself where it is short enough; else the best part, the earliest of several, with what stands before
        and after the words, and with ellipses.
    """
    spans = [match.span() for match in _WORD.finditer(text)]
    if len(spans) <= words:
        return text
    wanted = {word for word in _plain_words(around) if len(word) > 2}  # noqa: PLR2004 (of, in, is)
    found = [_plain(text[start:end]) for start, end in spans] if wanted else []
    starts = [*range(0, len(spans) - words, max(1, words // 8)), len(spans) - words]
    first = starts[_middle_of_best([len(wanted.intersection(found[at : at + words])) for at in starts])]
    start, end = spans[first][0], spans[first + words - 1][1]
    return ("… " if first else "") + text[start:end] + (" …" if end < len(text.rstrip()) else "")


def _middle_of_best(counts: list[int]) -> int:
    """Give the middle of the first run of the greatest counts; the start where there are none."""
    best = max(counts)
    first = counts.index(best)
    if best == 0:
        return 0
    run = next((at for at in range(first, len(counts)) if counts[at] < best), len(counts)) - first
    return first + run // 2


def _plain_words(text: str) -> set[str]:
    return {word.strip(_MARKS) for word in normalize(text).split()}


def _plain(word: str) -> str:
    return (word.lower() if word.isascii() else normalize(word)).strip(_MARKS)
