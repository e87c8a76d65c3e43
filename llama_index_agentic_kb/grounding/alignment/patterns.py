"""The pattern that numbers and dates are read by."""

# ruff: noqa: RUF001 (typographic signs are the point)
from __future__ import annotations

import re
from typing import Final

from llama_index_agentic_kb.grounding.alignment.numerals import (
    FRACTIONS,
    MONTHS,
    ORDINALS,
    OTHER_COUNTS,
    SCALES,
    SMALL,
    TENS,
    UNITS,
)

__all__ = ["FACT"]

_MONTH: Final = "|".join(sorted(map(re.escape, MONTHS), key=len, reverse=True))
_NUMERAL: Final = r"\d{1,3}(?:[,.\u00a0\u202f'’]\d{3})+(?!\d)(?:[.,]\d+)?|\d+(?:[.,]\d+)?"
_WRITTEN: Final = "|".join(sorted([*SMALL, *TENS, "hundred", "thousand", "million", "dozen"], key=len, reverse=True))
_SMALL: Final = "|".join(sorted(SMALL, key=len, reverse=True))
_UNIT: Final = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_SCALE: Final = "|".join(sorted(map(re.escape, SCALES), key=len, reverse=True))

FACT: Final = re.compile(
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
  | (?P<fraction>\b(?:(?P<parts>one|two|three|four|ein|zwei|drei)[\s-](?P<part>{"|".join(FRACTIONS)})
      |a[\s-](?P<lone>{"|".join(FRACTIONS)})(?=\s+of\b)|(?:a\s|die\s)?(?P<halves>half|hälfte))\b(?!-))
  | (?P<inof>\b(?P<some>one|two|three|four|\d{{1,2}})\s(?:in|out\sof)\s(?:every\s)?(?P<every>{_SMALL}|\d{{1,3}})\b
      (?!\s(?:{_MONTH})))
  | (?P<quarter>\bQ(?P<q>[1-4])\b)
  | (?P<rank>\b(?:(?P<tw>{"|".join(TENS)})[\s-])(?P<tr>{"|".join(ORDINALS)})\b
      |\b(?P<r>\d{{1,4}})(?:st|nd|rd|th)\b|\b(?P<rw>{"|".join(ORDINALS)})\b(?!\s+(?:of\s+all|name)))
  | (?P<amount>(?P<money>[$€£¥]\s?)?
      (?:(?<![\w.,])(?P<figures>(?:{_NUMERAL}))|\b(?P<written>(?:{_WRITTEN})(?:[\s-](?:and\s+)?(?:{_WRITTEN}))*)\b)
      (?:[\s\u00a0-]?(?P<scale>{_SCALE})\b\.?)?
      (?:[\s\u00a0-]?(?P<unit>{_UNIT})(?![^\W\d_]))?)
  | (?P<other>\b(?:{"|".join(OTHER_COUNTS)})\b)
    """,
    re.IGNORECASE | re.VERBOSE,
)
