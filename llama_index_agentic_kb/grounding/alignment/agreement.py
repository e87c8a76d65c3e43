"""Whether two numbers or dates agree."""

from __future__ import annotations

import math
from typing import Final

from llama_index_agentic_kb.grounding.alignment.numerals import UNITS
from llama_index_agentic_kb.grounding.alignment.quantities import Fact

__all__ = ["agree"]

_ROUNDED: Final = 0.03
_AGE: Final = 0.8
"""How far "54 years" and a bare "54" are one."""
_YEAR: Final = UNITS["years"][1]


def agree(claimed: Fact, told: Fact) -> float:
    """Tell how far a claimed fact is borne out by one that is told, 0 to 1.

    A claimed year is borne out by a date in it; a claimed day only in part by its year alone.
    """
    if claimed.kind == "date" or told.kind == "date":
        return _dates_agree(claimed, told) if claimed.kind == told.kind else _year_as_number(claimed, told)
    if claimed.dimension != told.dimension:
        return _AGE if _is_bare_age(claimed, told) or _is_bare_age(told, claimed) else 0.0
    if claimed.value == told.value or math.isclose(claimed.value, told.value, rel_tol=1e-9):
        return 1.0
    apart = abs(claimed.value - told.value) / max(abs(claimed.value), abs(told.value))
    # What was turned from one unit into another was rounded on the way.
    is_rounded = claimed.loose or told.loose or claimed.factor != told.factor
    if apart > _ROUNDED:
        return 0.0
    return 0.9 if is_rounded or _is_rounded(claimed, told) else 0.0


def _is_rounded(claimed: Fact, told: Fact) -> bool:
    """Whether a number is one told more exactly, to fewer figures: 3.2 billion for 3.24 billion."""
    if not 1 < claimed.digits < told.digits:
        return False
    return math.isclose(claimed.value, float(f"{told.value:.{claimed.digits - 1}e}"), rel_tol=1e-9)


def _is_bare_age(one: Fact, other: Fact) -> bool:
    """Whether one is told in years and the other, the same, without a unit."""
    in_years = one.dimension == "time" and one.factor == _YEAR
    return in_years and not other.dimension and math.isclose(one.value, other.value * _YEAR)


def _year_as_number(claimed: Fact, told: Fact) -> float:
    date, number = (claimed, told) if claimed.kind == "date" else (told, claimed)
    is_year = date.date[1:] == (None, None)
    return 1.0 if is_year and not number.dimension and date.date[0] == number.value else 0.0


def _dates_agree(claimed: Fact, told: Fact) -> float:
    (year, month, day), (told_year, told_month, told_day) = claimed.date, told.date
    if claimed.span_years > 1 or told.span_years > 1:
        if year is None or told_year is None:
            return 0.0
        if claimed.span_years < told.span_years:
            return 0.5 if told_year <= year < told_year + told.span_years else 0.0
        return 1.0 if year <= told_year < year + claimed.span_years else 0.0
    pairs = ((year, told_year), (month, told_month), (day, told_day))
    if any(one is not None and other is not None and one != other for one, other in pairs):
        return 0.0
    if all(one is None or other is None for one, other in pairs):
        return 0.0
    missing = sum(one is not None and other is None for one, other in pairs)
    return 1.0 - 0.25 * missing
