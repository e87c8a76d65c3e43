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
from llama_index_agentic_kb.grounding.alignment.patterns import FACT

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


_LOOSE: Final = re.compile(
    r"(?:about|around|approximately|approx\.?|roughly|nearly|almost|some|over|more than|circa|ca\.|c\.|etwa|rund|约|約)"
    r"\s*$",
    re.IGNORECASE,
)
_RANGE: Final = re.compile(r"\s*(?:to|and|or|und|bis|-|–|—)\s*", re.IGNORECASE)
_AGED: Final = re.compile(r"\b(?:aged?|ages|age of|ages of|im alter von)\s+\Z", re.IGNORECASE)
_APPOSED: Final = re.compile(r"[^\W\d_],\s\Z")
_GOES_ON: Final = re.compile(r",\s[^\W\d_]")
_OLDEST_PERSON: Final = 115
_YEAR: Final = UNITS["years"]
_HINT: Final = re.compile(r"(?<![^\W\d_])[^\W\d_]+|[$€£¥]?\s?\d+")
_FIRST_WORDS: Final = frozenset(
    [
        *MONTHS,
        *SMALL,
        *TENS,
        "hundred",
        "thousand",
        "million",
        "dozen",
        *ORDINALS,
        *OTHER_COUNTS,
        "half",
        "hälfte",
        "a",
        "die",
        "ein",
    ]
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
    told: list[Fact] = []
    for fact in _read_each(text, german=german):
        told.append(_like_neighbour(told[-1], fact, text) if told else fact)
        if len(told) > 1 and told[-2].kind == fact.kind == "number" and not told[-2].dimension:
            told[-2] = _like_neighbour(fact, told[-2], text)
    return iter(told)


def _like_neighbour(one: Fact, fact: Fact, text: str) -> Fact:
    """Give a bare number of a range ("18 to 65 years") the unit of its other end."""
    first, last = sorted((one, fact))
    if fact.kind != "number" or fact.dimension or one.dimension in ("", "#", "clock"):
        return fact
    if one.kind != "number" or not _RANGE.fullmatch(text, first.end, last.start):
        return fact
    return fact._replace(dimension=one.dimension, value=fact.value * one.factor, factor=one.factor)


def _read_each(text: str, *, german: bool) -> Iterator[Fact]:
    position = 0
    for hint in _HINT.finditer(text):
        word = hint[0]
        if hint.start() < position or (word[0].isalpha() and word.casefold() not in _FIRST_WORDS and word not in "qQ"):
            continue
        start = hint.start() + len(word) - len(word.lstrip())
        match = FACT.match(text, start)
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


def _share_or_time(match: re.Match[str], kind: str) -> Fact:
    """Read "two thirds" and "one in five" as percent, "3:15 pm" in minutes, "Q4" as a rank."""
    start, end = match.span()
    if kind == "quarter":
        return Fact("number", start, end, float(match["q"]), "#")
    if kind == "clock":
        hours = int(match["h24"]) if match["h24"] else int(match["h12"]) % 12 + 12 * (match["half"] in "pP")
        return Fact("number", start, end, 60.0 * hours + int(match["min24"] or match["min12"] or 0), "clock")
    parts, whole = 1.0, 2.0
    if kind == "inof":
        parts, whole = _small(match["some"]), _small(match["every"])
    elif match["halves"] is None:
        parts = SMALL.get((match["parts"] or "one").casefold(), 1)
        whole = FRACTIONS[(match["part"] or match["lone"]).casefold()]
    return Fact("number", start, end, 100 * parts / whole if whole else 0.0, "percent", loose=True)


def _small(text: str) -> float:
    return float(text) if text.isdecimal() else float(SMALL[text.casefold()])


def _rank(match: re.Match[str]) -> int:
    if match["r"]:
        return int(match["r"])
    if match["tr"]:
        return TENS[match["tw"].casefold()] + ORDINALS[match["tr"].casefold()]
    return ORDINALS[match["rw"].casefold()]


def _kind(match: re.Match[str]) -> str:
    return next(name for name in _KINDS if match[name] is not None)


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
    if not dimension and figures and not scale and _is_age(value, text, start, end):
        dimension, factor = _YEAR
    digits = _digits(figures) if figures else 0
    return Fact(
        "number", start, end, value * factor, dimension, loose=_is_loose(text, start), factor=factor, digits=digits
    )


def _is_age(value: float, text: str, start: int, end: int) -> bool:
    """Whether a bare number tells an age: "aged 18", or "the mayor, 54, said"."""
    if not 0 < value <= _OLDEST_PERSON:
        return False
    if _AGED.search(text, max(0, start - 16), start):
        return True
    return bool(_APPOSED.search(text, max(0, start - 3), start) and _GOES_ON.match(text, end))


def _digits(figures: str) -> int:
    """Give the significant figures of a number; zeros at the end of a whole one are none."""
    plain = re.sub(r"\D", "", figures).lstrip("0")
    return len(plain if re.search(r"[.,]\d{1,2}$", figures) else plain.rstrip("0"))


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
