"""Numbers, dates and quantities of a text, in one form each: "3 March 1969" is 1969-03-03, "5 km" is 5,000 metres.

Read by pattern, in one pass. Numbers may be written out in English and German; units are those of SI, the imperial
ones, money, time and percent, each turned into its dimension's base unit.
"""

# ruff: noqa: RUF001 (typographic signs are the point)
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from llama_index_agentic_kb.grounding.alignment.numerals import (
    FRACTIONS,
    MONEY,
    MONTHS,
    ONLY_AFTER_FIGURES,
    ONLY_MONEY,
    ORDINALS,
    OTHER_COUNTS,
    SCALES,
    SMALL,
    TENS,
    UNITS,
)

__all__ = ["Fact", "read_facts"]


class Fact(NamedTuple):
    """A number or a date.

    Args:
        kind: "date" or "number".
        start: Where it stands, in characters.
        end: Exclusive.
        value: In the base unit of its dimension; 0 for dates.
        dimension: What it measures; "" for a mere count, "#" for a rank ("third").
        date: Year, month, day; None where not told. The year of a decade or century is its first.
        span_years: How many years the date spans: 1, 10 or 100.
        loose: Whether it is told as approximate.
        factor: What its unit is of the base unit.
        digits: Significant figures, where told in figures; 0 where not.
    """

    kind: str
    start: int
    end: int
    value: float = 0.0
    dimension: str = ""
    date: tuple[int | None, int | None, int | None] = (None, None, None)
    span_years: int = 1
    loose: bool = False
    factor: float = 1.0
    digits: int = 0


_MONTH: Final = "|".join(sorted(map(re.escape, MONTHS), key=len, reverse=True))
_NUMERAL: Final = r"\d{1,3}(?:[,.\u00a0\u202f'’]\d{3})+(?!\d)(?:[.,]\d+)?|\d+(?:[.,]\d+)?"
_WRITTEN: Final = "|".join(sorted([*SMALL, *TENS, "hundred", "thousand", "million", "dozen"], key=len, reverse=True))
_SMALL: Final = "|".join(sorted(SMALL, key=len, reverse=True))
_UNIT: Final = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_SCALE: Final = "|".join(sorted(map(re.escape, SCALES), key=len, reverse=True))

_FACT: Final = re.compile(
    rf"""
    (?P<iso>(?<![\d-])\d{{4}}-\d{{2}}-\d{{2}}(?!\d))
  | (?P<cjk>\d{{4}}\s?年(?:\s?\d{{1,2}}\s?月(?:\s?\d{{1,2}}\s?日)?)?)
  | (?P<dmy>\b(?P<d1>\d{{1,2}})(?:st|nd|rd|th|\.)?\s*(?:of\s+)?(?P<m1>{_MONTH})\b\.?,?(?:\s+(?P<y1>\d{{3,4}})\b)?)
  | (?P<mdy>\b(?P<m2>{_MONTH})\.?\s+(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?\b(?!\s*(?:{_MONTH})\b)
      (?:\s*,?\s*(?P<y2>\d{{4}})\b)?)
  | (?P<my>\b(?P<m3>{_MONTH})\.?,?\s+(?:of\s+)?(?P<y3>\d{{3,4}})\b)
  | (?P<dots>\b(?P<d4>\d{{1,2}})[./](?P<m4>\d{{1,2}})[./](?P<y4>\d{{4}})\b)
  | (?P<century>\b(?P<c>\d{{1,2}})(?:st|nd|rd|th|\.)[\s-]+(?:century|jahrhundert)\b)
  | (?P<decade>\b(?P<dec>\d{{3}}0)(?:'?s|er)\b)
  | (?P<clock>(?<![\d.,:])(?:(?P<h12>\d{{1,2}})(?:[:.](?P<min12>[0-5]\d))?\s?(?P<half>[ap])\.?m\b\.?
      |(?P<h24>[01]?\d|2[0-3]):(?P<min24>[0-5]\d)(?![:\d])))
  | (?P<fraction>\b(?:(?P<parts>a|one|two|three|four|ein|eine|die|zwei|drei)[\s-])?
      (?P<part>{"|".join(FRACTIONS)})\b(?!-|\s+(?:{_MONTH})\b))
  | (?P<inof>\b(?P<some>one|two|three|four|\d{{1,2}})\s(?:in|out\sof)\s(?:every\s)?(?P<every>{_SMALL}|\d{{1,3}})\b
      (?!\s(?:{_MONTH})))
  | (?P<quarter>\bQ(?P<q>[1-4])\b)
  | (?P<rank>\b(?:(?P<tw>{"|".join(TENS)})[\s-])(?P<tr>{"|".join(ORDINALS)})\b|\b(?P<r>\d{{1,4}})(?:st|nd|rd|th)\b|\b(?P<rw>{"|".join(ORDINALS)})\b(?!\s+(?:of\s+all|name)))
  | (?P<amount>(?P<money>[$€£¥]\s?)?
      (?:(?<![\w.,])(?P<figures>(?:{_NUMERAL}))|\b(?P<written>(?:{_WRITTEN})(?:[\s-](?:and\s+)?(?:{_WRITTEN}))*)\b)
      (?:[\s\u00a0-]?(?P<scale>{_SCALE})\b\.?)?
      (?:[\s\u00a0-]?(?P<unit>{_UNIT})(?![^\W\d_]))?)
  | (?P<other>\b(?:{"|".join(OTHER_COUNTS)})\b)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_LOOSE: Final = re.compile(
    r"(?:about|around|approximately|approx\.?|roughly|nearly|almost|some|over|more than|circa|ca\.|c\.|etwa|rund|约|約)"
    r"\s*$",
    re.IGNORECASE,
)
_HINT: Final = re.compile(r"(?<![^\W\d_])[^\W\d_]+|[$€£¥]?\s?\d+")
_FIRST_WORDS: Final = frozenset(
    [*MONTHS, *SMALL, *TENS, "hundred", "thousand", "million", "dozen", *ORDINALS, *OTHER_COUNTS, *FRACTIONS, "q", "a"]
)
"""Words that a number or date may begin with."""
_OLDEST: Final = 1000
_NEWEST: Final = 2100
_LARGEST_MONTH: Final = 12


_KINDS: Final = (
    "amount", "dmy", "mdy", "my", "iso", "rank", "other", "cjk", "dots", "century", "decade", "clock", "fraction",
    "inof", "quarter",
)  # fmt: skip


def read_facts(text: str, *, german: bool = False) -> Iterator[Fact]:
    """Give the numbers and dates of a text, in order.

    Args:
        text: Any text.
        german: Whether a comma marks decimals and a point thousands.
    """
    position = 0
    for hint in _HINT.finditer(text):
        word = hint[0]
        if hint.start() < position or (word[0].isalpha() and word.casefold() not in _FIRST_WORDS):
            continue
        start = hint.start() + len(word) - len(word.lstrip())
        match = _FACT.match(text, start)
        fact = None if match is None else _read(match, text, german=german)
        if match is not None and fact is not None:
            position = fact.end
            yield fact


def _read(match: re.Match[str], text: str, *, german: bool) -> Fact | None:
    start, end = match.span()
    kind = _kind(match)
    if kind == "other":
        return Fact("number", start, end, float(OTHER_COUNTS[match[0].casefold()]))
    if kind == "amount":
        return _amount(match, text, german=german)
    if kind in ("clock", "fraction", "inof", "quarter"):
        return _share_or_time(match, kind)
    if kind == "rank":
        value = _rank(match)
        is_adverb = match["rw"] and value == 1  # "first" more often than not; its opposite is "last"
        return None if is_adverb else Fact("number", start, end, float(value), "#")
    if kind in ("century", "decade"):
        year = 100 * (int(match["c"]) - 1) if kind == "century" else int(match["dec"])
        return Fact("date", start, end, date=(year, None, None), span_years=10 if year % 100 else 100)
    return Fact("date", start, end, date=_date(match, kind))


def _kind(match: re.Match[str]) -> str:
    return next(
        name
        for name in _KINDS
        if match[name] is not None
    )


def _date(match: re.Match[str], kind: str) -> tuple[int | None, int | None, int | None]:
    if kind in ("iso", "cjk"):
        parts: list[int | None] = [int(part) for part in re.findall(r"\d+", match[0])]
        return parts[0], *[*parts[1:], None, None][:2]  # type: ignore[return-value]  # three in all
    if kind == "dots":
        day, month = int(match["d4"]), int(match["m4"])
        if month > _LARGEST_MONTH:
            day, month = month, day
        return int(match["y4"]), month, day
    number = {"dmy": "1", "mdy": "2", "my": "3"}[kind]
    year_text = match["y" + number]
    day_text = None if number == "3" else match["d" + number]
    month = MONTHS[match["m" + number].casefold()]
    return int(year_text) if year_text else None, month, int(day_text) if day_text else None


def _amount(match: re.Match[str], text: str, *, german: bool) -> Fact | None:
    start, end = match.span()
    figures, scale, unit = match["figures"], match["scale"], match["unit"]
    value = _figures(figures, german=german) if figures else _written(match["written"])
    if not figures and value == 1 and not (scale or unit):  # "one of them" counts nothing
        return None
    folded = scale.casefold() if scale else ""
    if folded in ONLY_MONEY and not match["money"]:
        if folded == "m" and not unit and figures:  # 5 m: metres
            return Fact("number", start, end, value, "length", loose=_is_loose(text, start))
        return Fact("number", start, match.end("figures") if figures else end, value, loose=_is_loose(text, start))
    value *= SCALES.get(folded, 1.0)
    dimension, factor = MONEY.get((match["money"] or "").strip(), ""), 1.0
    if unit and not (not figures and unit.casefold() in ONLY_AFTER_FIGURES):
        dimension, factor = UNITS[unit.casefold()]
    elif unit:
        end = match.start("unit")
    is_year = figures and figures.isdigit() and not scale and not dimension and _OLDEST <= value < _NEWEST
    if is_year:
        return Fact("date", start, end, date=(int(value), None, None))
    if dimension == "fahrenheit":
        return Fact("number", start, end, (value - 32) / 1.8, "celsius", loose=_is_loose(text, start), factor=1 / 1.8)
    return Fact("number", start, end, value * factor, dimension, loose=_is_loose(text, start), factor=factor)


def _is_loose(text: str, start: int) -> bool:
    return _LOOSE.search(text, max(0, start - 16), start) is not None


def _figures(text: str, *, german: bool) -> float:
    plain = re.sub("[\u00a0\u202f'’]", "", text)
    if german:
        plain = plain.replace(".", "").replace(",", ".") if re.search(r",|\.\d{3}\b", plain) else plain
    elif re.search(r",\d{3}(?!\d)", plain):
        plain = plain.replace(",", "")
    elif re.search(r"\.\d{3}(?:\.\d{3})+$", plain):
        plain = plain.replace(".", "")
    try:
        return float(plain.replace(",", "."))
    except ValueError:
        return float(re.sub(r"\D", "", plain))


def _written(text: str) -> float:
    """Read a number in words: "two hundred and thirty-five"."""
    total, part = 0.0, 0.0
    for word in re.split(r"[\s-]+", text.casefold()):
        if word in SMALL:
            part += SMALL[word]
        elif word in TENS:
            part += TENS[word]
        elif word == "hundred":
            part = (part or 1) * 100
        elif word in ("thousand", "million", "dozen"):
            total, part = total + (part or 1) * SCALES[word], 0.0
    return total + part
