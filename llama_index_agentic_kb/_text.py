"""Helpers for plain text: normalization, redaction of secrets, sentence segmentation, cutting and excerpts."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any, Final
from urllib.parse import quote

WINDOW: Final = 2_000  # number of characters before a cut that are searched for a sentence end: the segmenter is slow
MAX_ERROR: Final = 10_000  # maximum number of characters of an error message, as a server may return a whole page
READ_ON: Final = 1_000  # number of characters after a cut that are searched for the rest of a secret
_WORD: Final = re.compile(r"\S{1,16}")  # scripts without spaces are cut too
_MARKS: Final = ".,;:!?\"'()[]"


def normalize(text: str) -> str:
    """Return a normalized form for comparison: NFKC, casefolded, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def one_line(text: str, limit: int = 200) -> str:
    """Return a text as one line, truncated to ``limit`` characters with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: max(0, limit - 1)].rstrip() + "…"


def printable(text: str, keep: str = "\n\t") -> str:
    """Remove characters that control a terminal or are invisible, but keep line breaks and tabs."""
    if text.isprintable():  # most are, and errors are many where a server is down
        return text
    shown = set(text).difference(keep)
    hidden = {ord(char): None for char in shown if unicodedata.category(char) in ("Cc", "Cf", "Cs")}
    return text.translate(hidden) if hidden else text


def without_surrogates(text: str) -> str:
    """Return a text that can be encoded as UTF-8: lone surrogates become U+FFFD, surrogate pairs one character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def byte_offsets(text: str) -> Sequence[int]:
    """Return the UTF-8 byte offset of each character, and the text's length; a lone surrogate counts as U+FFFD."""
    if text.isascii():
        return range(len(text) + 1)
    return list(accumulate((len(character.encode("utf-8", "surrogatepass")) for character in text), initial=0))


_VALUE = r"(?:[^\s&;'\"<>\\]|\\(?!['\"]))"  # a character of a value without quotes
_LIKELY = r"(?!https?://)(?:(?=\S{0,80}\d)(?=\S{0,80}[a-z])\S{6}|\d{6}|\S{0,40}(?-i:[a-z][A-Z])|\S{24})"
"""The start of a key, unlike that of a word: letters with digits, capitals inside, or very long."""

# Names that precede a secret: _FIELD doesn't occur in prose, _WORD_FOR_IT does.
_FIELD = (
    r"(?:(?:api|access|private|secret|signing|encryption|subscription|account|shared)[-_]?key(?:[-_]?id)?"
    r"|shared[-_]?access[-_]?signature|x-(?:amz|goog)-signature"
    r"|api key provided|client[-_]?secret|(?<=[-_])(?:token|secret|passw(?:or)?d|pwd|auth)"
    r"|(?-i:(?<=[a-z])(?:Token|Secret|Password)))"
)
_WORD_FOR_IT = r"(?<![a-z])(?:token|secret|passw(?:or)?d|pwd|passphrase|credentials?|api key|(?:proxy-)?authorization)"
_NAMED = rf"(?:{_FIELD}|{_WORD_FOR_IT})"
_CALL = r"(?:(?<=\()['\"][^'\"]{1,500})?"  # SecretStr("...")
_OPEN = r"(?:\\{0,3}['\"])?"  # of a value whose end was cut off
_QUOTED = r"(b?(?P<q>\\{0,3}['\"]))(?:(?!(?P=q)).){1,500}(?P=q)"

_NAMES: Final = "key token secret pass pwd auth credential signature"
_SECRETS: Final = (
    # pattern, replacement, and hints: every text that matches the pattern contains at least one of the hints
    (r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----).*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", r"\1***", "key-----"),
    # user and password of a URL, but no port; a password may hold "/" and "@"
    (r"(://)[^\s/?#@:'\"<>]{0,128}+(?::(?!\d{1,5}[/?#])[^\s'\"<>]{1,256})?@", r"\1***@", "@"),
    (
        r"([?&](?:key|sig|signature|code|auth|token|secret|(?:ssl)?pass(?:w(?:or)?d)?|pwd)=)[^\s&#'\"<>]+",
        r"\1***",
        "? &",
    ),
    # 'api_key': 'abc', "x-chroma-token": "abc", token="abc", (b'authorization', b'abc')
    (rf"({_NAMED}\\{{0,3}}['\"]?\s{{0,3}}(?:=>|[:=])\s{{0,3}}){_QUOTED}", r"\1\2***\g<q>", _NAMES),
    (rf"(\(b?['\"][\w-]{{0,40}}?{_NAMED}['\"],\s{{0,3}}){_QUOTED}", r"\1\2***\g<q>", _NAMES),
    (
        r"(authorization\\{0,3}['\"]?\s{0,3}[:=]\s{0,3}(?:b?\\{0,3}['\"])?"
        r"(?:bearer|basic|token|api-?key|digest|negotiate|key)\s{1,3})" + _VALUE + "+",
        r"\1***",
        "authorization",
    ),
    (rf"(?<![a-z])(bearer|basic|api-?key)\s{{1,3}}{_LIKELY}{_VALUE}*", r"\1 ***", "bearer basic apikey api-key"),
    (r"(cookie\\{0,3}['\"]?\s{0,3}:\s{0,3}(?:\\{0,3}['\"])?)[^\s=;'\"]{1,100}=[^\n'\"\\]{1,2000}", r"\1***", "cookie"),
    # api_key=abc, x-chroma-token: abc, password=abc; but no "password: required"
    (rf"({_FIELD}\\{{0,3}}['\"]?\s{{0,3}}(?:=>|[:=]|%3d)\s{{0,3}}{_OPEN}){_VALUE}+{_CALL}", r"\1***", _NAMES),
    (rf"((?:(?:token|secret|passw(?:or)?d|pwd)=|{_WORD_FOR_IT}(?:=|:(?=\S{{4}}))){_OPEN}){_VALUE}+", r"\1***", _NAMES),
    (rf"({_WORD_FOR_IT}\s{{0,3}}[:=]\s{{1,3}}){_LIKELY}{_VALUE}*", r"\1***", _NAMES),
    # keys with a known format
    (
        r"(?<![a-z0-9])(sk|pk|rk)[-_](?:[\w*-]{16}|(?=[\w*-]{0,40}(?:\d|(?-i:[A-Z])))[\w*-]{8})[\w*-]*",
        r"\1-***",
        "sk- sk_ pk- pk_ rk- rk_",
    ),
    (
        r"(?<![a-z0-9])(gh[pousr]_|github_pat_|glpat-|hf_|gsk_|pcsk_|npm_|xox[abeoprs]-)[\w-]{10,}",
        r"\1***",
        "gh glpat- hf_ gsk_ pcsk_ npm_ xox",
    ),
    (
        r"(?<![a-z0-9])(?-i:(AIza|ya29\.|SG\.)[\w.-]{10,}|(AKIA|ASIA)[A-Z0-9]{12,})",
        r"\1\2***",
        "aiza ya29. sg. akia asia",
    ),
    (r"(?<![a-z0-9])(?-i:eyJ)[\w-]{6,}(?:\.[\w-]*){0,4}", "eyJ***", "eyj"),
)

_HINT: Final = re.compile("|".join(re.escape(hint) for *_, hints in _SECRETS for hint in hints.split()))


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE | re.DOTALL)


_KNOWN: dict[str, None] = {}
"""Secrets of clients in lower case, in the order of registration, in several encodings; see ``know_secrets``."""

# Characters as JSON's writers escape them; a client's error that shows a reply's ``repr`` doubles the backslashes.
_ESCAPE: Final = re.compile(r"\\{1,4}(?:u([0-9a-f]{4})|(/))")
_SECRET: Final = re.compile(r".{8}|(?=.*\d).{6}", re.DOTALL)  # of a length that is no word's

MIN_HALVED: Final = 20  # characters of a registered secret whose first half counts as one, too
MAX_SECRETS: Final = 1_000  # maximum number of registered secrets; the oldest are removed first


def know_secrets(values: Iterable[str]) -> None:
    """Register secrets, which ``redacted`` then removes from all texts, in any letter case and several encodings."""
    for value in values:
        parts = [value, *value.split()]  # a header value has a scheme before the key
        for part in filter(_SECRET.match, parts):
            quoted = quote(part, safe="", errors="surrogatepass")
            encoded = b64encode(part.encode("utf-8", "surrogatepass")).decode()
            head = part[: len(part) // 2] if len(part) >= MIN_HALVED else part  # servers cut keys in messages
            for form in (part, head, quoted, json.dumps(part)[1:-1], encoded):
                _KNOWN[form.rstrip("=").lower()] = None
    while len(_KNOWN) > 5 * MAX_SECRETS:
        _KNOWN.pop(next(iter(_KNOWN)), None)


def _escaped(sign: str) -> str:
    """Return the pattern of one character of a secret, as it is or as JSON escapes it."""
    if sign == "\\":  # with optional backslashes before each, a run of them would take exponential time
        return re.escape(sign)
    return rf"(?:\\{{1,4}}u(?:{ord(sign):04x}|{ord(sign.upper()[0]):04x})|\\{{0,4}}{re.escape(sign)})"


def _without_known(text: str) -> str:
    """Replace registered secrets, also as JSON escapes them."""
    hay = text.lower()
    plain = _ESCAPE.sub(lambda one: chr(int(one[1], 16)).lower() if one[1] else "/", hay) if "\\" in hay else hay
    for secret in sorted([known for known in list(_KNOWN) if known in hay or known in plain], key=len, reverse=True):
        escaped = "".join(map(_escaped, secret))
        text = re.sub(escaped, "***", text, flags=re.IGNORECASE)
    return text


def redacted(text: str) -> str:
    """Remove passwords and keys from a text, for activity logs, errors and log files.

    Registered secrets (``know_secrets``) are replaced by ``***``, then values that look like secrets: user and password
    of URLs; values of headers, fields and query parameters with names such as "token"; Bearer and Basic credentials;
    cookies; private keys in PEM form; JSON web tokens; keys with the format of a known service. Other secrets are not
    recognised. The run time is linear in the text's length.
    """
    text = _without_known(text)
    hay = text.lower()  # most texts contain no hint, and a hint is found 100 times faster than a pattern
    if _HINT.search(hay) is None:
        return text
    for pattern, replacement, hints in _SECRETS:
        if any(hint in hay for hint in hints.split()):
            text = _pattern(pattern).sub(replacement, text)
    return text


def error_message(error: BaseException, limit: int = MAX_ERROR) -> str:
    """Return an error's message without secrets and control characters; if it is empty, the name of its class."""
    try:
        words = printable(redacted_excerpt(str(error), limit))
    except Exception:  # noqa: BLE001 (anybody's class)
        words = ""
    return words or type(error).__name__


def redacted_excerpt(text: str, limit: int = MAX_ERROR) -> str:
    """Redact a text, then truncate it to ``limit``; truncated keys would not be recognised."""
    read = text[: limit + READ_ON]
    words = redacted(read)
    if len(read) < len(text):
        words = words[: max(0, len(words) - READ_ON)]
    return words if len(words) <= limit else words[: max(0, limit - 1)] + "…"


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Return the (start, end) character spans of the sentences of a text, without gaps.

    The segmenter is pySBD (Sadvilkar and Neumann 2020), based on the Golden Rule Set. Text that it drops, such as a
    lone ``??`` at the start of a line, belongs to the next sentence.
    """
    ends = [0]
    for sentence in _segmenter().segment(text):
        start = text.find(sentence, ends[-1])
        if start < 0:  # it changed the text: treat the rest as one sentence
            break
        ends.append(start + len(sentence))
    if len(ends) == 1 or text[ends[-1] :].strip():
        ends.append(len(text))
    return list(pairwise(ends))


@functools.cache
def _segmenter() -> Any:
    import pysbd  # noqa: PLC0415 (takes 50 ms, and minimal requests may never cut)

    return pysbd.Segmenter(language="en", clean=False)


def _fits(text: str, limit: int, count: Callable[[str], int]) -> bool:
    # Counting is expensive: a text far too long is not counted whole (no token is longer than 32 characters).
    longest = limit * 32 + 32
    return count(text[:longest]) <= limit and (len(text) <= longest or count(text) <= limit)


def cut_to_fit(text: str, limit: int, count: Callable[[str], int]) -> str:
    """Truncate a text to ``limit`` units of ``count``: whole sentences or, if none fits, whole words and an ellipsis.

    ``count`` returns a text's size, such as its tokens; it must not decrease as the text grows.
    """
    if limit < 1:
        return ""
    if _fits(text, limit, count):
        return text
    sizes = range(1, min(len(text), limit * 32) + 1)
    hard = bisect_right(sizes, limit, key=lambda size: count(text[:size]))  # the most characters that fit
    start = max(0, hard - WINDOW)
    whole = [start + end for _, end in sentence_spans(text[start : hard + 200]) if start + end <= hard]
    if whole and text[: whole[-1]].strip():
        return text[: whole[-1]].rstrip()
    words = text[:hard].rsplit(None, 1)[0] if " " in text[:hard].strip() else text[:hard]
    while words and not _fits(words + "…", limit, count):
        words = words[:-1]
    return words + "…" if words else ""


def _bare(word: str) -> str:
    return (word.lower() if word.isascii() else normalize(word)).strip(_MARKS)


def excerpt(text: str, around: str, words: int) -> str:
    """Return the earliest excerpt of so many words with the most words (of three letters or more) of a query."""
    spans = [match.span() for match in _WORD.finditer(text)]
    if len(spans) <= words:
        return text
    wanted = {word for part in normalize(around).split() if len(word := part.strip(_MARKS)) > 2}  # noqa: PLR2004 (of)
    found = [_bare(text[start:end]) for start, end in spans]
    starts = [*range(0, len(spans) - words, max(1, words // 8)), len(spans) - words]
    counts = [len(wanted.intersection(found[at : at + words])) for at in starts]
    best = counts.index(max(counts))
    if counts[best]:  # the middle of the first run of the greatest counts; else the start
        best += len(list(takewhile(counts[best].__eq__, counts[best:]))) // 2
    first = starts[best]
    start, end = spans[first][0], spans[first + words - 1][1]
    return ("… " if first else "") + text[start:end] + (" …" if end < len(text.rstrip()) else "")
