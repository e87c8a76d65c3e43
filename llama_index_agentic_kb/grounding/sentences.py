"""Where sentences end, in running text of any language that marks it with points, or with 。.

One pass over the marks that may end a sentence; each is judged by the words beside it, by the quotation marks and
brackets that are open there, and by lists of abbreviations. Linear in the text's length. (pySBD, which ``_text`` cuts
with, neither keeps list items whole nor German ordinals and knows no reference markers; tests/grounding measures both.)
"""

# ruff: noqa: RUF001 (typographic and full-width signs are the point)
from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from llama_index_agentic_kb.search.tokenizing import FUNCTION_WORDS

__all__ = ["MARKER", "sentence_ends"]

MARKER: Final = r"\[\s{0,3}ref_id\s{0,3}:[^\[\]\n]{0,120}\]"
"""A reference marker, as models write it."""

_MARK: Final = re.compile(r"[.!?…。！？．｡]+|(?<=[^\W\d_])\s\.(?:\s\.){2}")
_MARKERS: Final = re.compile(rf"(?:[ \t]{{0,3}}{MARKER})*", re.IGNORECASE)
_SPACE: Final = re.compile(r"\s*")
_CLOSING: Final = frozenset("\"'”’」』）)】》〉*_")
_WIDE: Final = frozenset("。！？．｡")
_OPENING: Final = {"“": "”", "„": "“”", "「": "」", "『": "』", "（": "）", "(": ")", "»": "«", "«": "»", "【": "】"}
_BRACKET: Final = re.compile('[“”„«»「」『』（）()【】"]')
_DEEPEST: Final = 8
_LONGEST_QUOTE: Final = 400
"""Characters within which a quotation mark or bracket must be closed to keep its sentences together."""
_WORD_BEFORE: Final = re.compile(r"[\w.’'-]{1,24}\Z")
_NEXT_WORD: Final = re.compile(r"[\"'“„«»(\[*_]{0,4}([\w’']{1,24})")
_PARTICLE: Final = re.compile(r"\s*(?:と|って|という|とか|の|を|に|が|は|も|、|，|,)")
_ORDINAL_DIGITS: Final = 2
_MOST_CLOSING: Final = 6
_ACRONYM: Final = re.compile(r"(?:[^\W\d_]\.){1,6}[^\W\d_]\Z")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER: Final = _words(
    "dr mr mrs ms prof rev hon st mt ft sen rep gov gen lt col maj capt sgt cpl adm cmdr pres supt messrs mme mlle vs "
    "no nos fig figs eq eqs vol vols p pp ed eds al cf ca approx e.g i.e viz resp dept univ est sec chap ch art "
    "hr fr hrn frl nr str bzw vgl s z.b d.h u.a o.ä i.d.r ggf evtl inkl zzgl geb gest st.-nr abs abb bd hrsg jh jhd "
    "mio mrd rd bspw sog tel "
    "sr sra srta dra ud uds núm pág mgr dott sig ing av bd vs"
)
"""Abbreviations that words of the same sentence follow, in lower case and without their last point."""
_CALENDAR: Final = _words("jan feb mar apr jun jul aug sept sep oct okt nov dec dez mon tue wed thu fri sat sun")
"""Those that are words or names as well, and abbreviations only with a capital letter."""
_NUMBERED: Final = _words("c no nos p pp s fig figs vol vols eq ch sec art abs abb bd nr vgl sig ed")
"""Those that are words as well, and abbreviations only in front of a number."""
_EITHER: Final = _words(
    "inc co corp ltd llc bros jr sr etc esq ph.d m.d b.a m.a ff usw ft hrs min mins sec secs kg km cm mm lb lbs oz "
    "mph a.m p.m am pm u.s u.k u.n e.u d.c ag"
)
"""Abbreviations that may end a sentence; it ends where a word follows that begins sentences."""
_MONTHS: Final = _words("januar jänner februar märz april mai juni juli august september oktober november dezember")
_STARTERS: Final = frozenset(
    word
    for language in ("english", "german", "french", "spanish", "italian")
    for word in FUNCTION_WORDS[language]
    if len(word) > 1 or word in "ai"
) | _words(
    "however meanwhile moreover although nobody everyone another later today many several thus therefore still "
    "danach dann dort später heute damals jedoch außerdem trotzdem deshalb daher zudem niemand viele ebenso"
)


class _Stop(NamedTuple):
    """A mark that may end a sentence, and what stands around it."""

    start: int
    mark: str
    closing: bool
    """Whether quotation marks or brackets close with it."""
    markers: bool
    end: int
    """Behind all of these."""
    next: int
    """Where the text goes on, after space."""
    following: str
    """The character there; empty at the end."""

    @property
    def is_wide(self) -> bool:
        return self.mark[0] in _WIDE

    @property
    def is_spaced(self) -> bool:
        return self.next > self.end


def sentence_ends(text: str, *, german: bool = False) -> Iterator[tuple[int, int]]:
    """Return where each sentence of a paragraph ends and where the next one starts; the last ends with the text.

    Args:
        text: One paragraph: breaks of lines inside of it are spaces.
        german: Whether a number with a point is an ordinal ("3. Oktober").
    """
    stretches = _closed_stretches(text)
    starts = [start for start, _ in stretches]
    position = 0
    for mark in _MARK.finditer(text):
        around = bisect_right(starts, mark.start()) - 1
        inside = stretches[around] if around >= 0 and mark.start() < stretches[around][1] else None
        stop = _stop(text, mark, inside)
        if _ends_quoted(text, stop, inside, position) if inside else _ends(text, stop, position, german=german):
            position = stop.next
            yield stop.end, position
    if position < len(text):
        yield len(text.rstrip()), len(text)


def _stop(text: str, mark: re.Match[str], inside: tuple[int, int] | None) -> _Stop:
    end = mark.end()
    while end < len(text) and end - mark.end() < _MOST_CLOSING:
        if not (text[end] in _CLOSING or (inside and end == inside[1] - 1)):
            break
        end += 1
    markers = _MARKERS.match(text, end)
    space = _SPACE.match(text, markers.end() if markers else end)
    assert markers is not None
    assert space is not None  # both match the empty text
    return _Stop(
        start=mark.start(),
        mark=mark[0].lstrip(),
        closing=end > mark.end(),
        markers=bool(markers[0]),
        end=markers.end(),
        next=space.end(),
        following=text[space.end() : space.end() + 1],
    )


def _ends_quoted(text: str, stop: _Stop, quoted: tuple[int, int], position: int) -> bool:
    """Return whether a mark inside quotation marks or brackets ends the sentence around them."""
    if stop.end < quoted[1]:
        return False
    opens = text[position : quoted[0]].strip(" *_") == ""
    following = stop.following
    if text[quoted[0]] in "(（【":
        return opens and not following.islower()
    if text[quoted[0]] in "「『":  # whose words they are is said with a particle
        return not _PARTICLE.match(text, stop.end)
    if stop.is_wide or _is_wide(following):  # or, in Chinese, right behind them
        return stop.is_spaced or not following or following in _OPENING or not opens
    return (stop.is_spaced or stop.markers or not following) and not following.islower()


def _ends(text: str, stop: _Stop, position: int, *, german: bool) -> bool:
    """Return whether a mark outside of any quotation ends a sentence."""
    following = stop.following
    if stop.is_wide or not following or (stop.mark[0] in "!?…" and _is_wide(following)):
        return True
    if not (stop.is_spaced or stop.markers) or following in ",;:)":
        return False
    found = _NEXT_WORD.match(text, stop.next)
    word = found[1] if found else ""
    if word.islower():
        return False
    starts = word[:1].isupper() and word.casefold() in _STARTERS
    if stop.mark[0] == "…" or stop.mark.replace(" ", "").startswith(".."):
        apart = text[stop.start : stop.start + 1].isspace() or text[max(0, stop.start - 1) : stop.start].isspace()
        return starts or not apart
    if stop.mark != "." or stop.closing:
        return True
    return _ends_at_point(text, stop.start, position, word, starts=starts, german=german)


def _ends_at_point(text: str, point: int, position: int, following: str, *, starts: bool, german: bool) -> bool:
    """Return whether a single point, with a word behind it that is not in lower case, ends a sentence."""
    found = _WORD_BEFORE.search(text, max(position, point - 24), point)
    before = found[0] if found else ""
    plain = before.casefold().lstrip("’'")
    if before.isdigit():
        ordinal = german and len(before) <= _ORDINAL_DIGITS and (not starts or following.casefold() in _MONTHS)
        ahead = text[position : point - len(before)].strip()
        return not (ordinal or not ahead or ahead.endswith((":", ";")))  # the latter: "1. ..." in running text
    if len(before) == 1 and before.isalpha() and (before.isupper() or german):  # an initial, or a unit: 37 °C
        return starts or text[point - 2 : point - 1] == "°"
    if plain in _NUMBERED:
        return not following[:1].isdigit()
    if plain in _CALENDAR:
        return not before[:1].isupper()
    if plain in _EITHER or _ACRONYM.search(before):
        return starts
    return not (plain in _NEVER or (german and plain.endswith("str")))  # Hauptstr. 5


def _closed_stretches(text: str) -> list[tuple[int, int]]:
    """Return the outermost stretches between quotation marks or brackets that are closed soon enough, in order."""
    found: list[tuple[int, int]] = []
    open_: list[tuple[str, int]] = []
    for match in _BRACKET.finditer(text):
        sign, at = match[0], match.start()
        while open_ and (at - open_[0][1] > _LONGEST_QUOTE or len(open_) > _DEEPEST):
            open_.pop(0)
        if any(sign in closers for closers, _ in open_):
            while sign not in open_[-1][0]:
                open_.pop()
            start = open_.pop()[1]
            while found and found[-1][0] > start:
                found.pop()
            found.append((start, at + 1))
        elif sign == '"' or sign in _OPENING:
            open_.append((_OPENING.get(sign, sign), at))
    return found


def _is_wide(char: str) -> bool:
    """Whether a character is of a script that sets no spaces, or a mark of it."""
    return "\u2e80" <= char <= "\u9fff" or "\uf900" <= char <= "\ufaff" or "\uff00" <= char <= "\uffef"
