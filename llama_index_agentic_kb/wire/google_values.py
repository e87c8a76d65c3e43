"""Values as protobuf's JSON writes them: messages without defaults, int64 as text, RFC 3339 times, Structs, float32.

What a document holds never keeps an answer from going out: characters that UTF-8 can't write become U+FFFD, numbers
that JSON can't write become null, and what JSON has no type for becomes text.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from datetime import UTC, date, datetime
from itertools import accumulate
from typing import Any, Final

__all__ = ["LONE_SURROGATE", "Utf8Offsets", "clean", "float32", "message", "on_boundary", "struct_value", "timestamp"]

MAX_DEPTH: Final = 32
"""Of data inside data; what lies deeper is written as text. Protobuf's parsers stop at 100 messages."""
LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_EXACT: Final = 2**53
_CONTINUES: Final = 0b1100_0000, 0b1000_0000  # of a byte: a mask, and what a character's later bytes show under it


class Utf8Offsets:
    """Where the characters of a text begin in UTF-8.

    Args:
        text: Any text; lone surrogates count as the U+FFFD that is written for them.
    """

    def __init__(self, text: str) -> None:
        self._ascii = text.isascii()
        self._starts = [] if self._ascii else list(accumulate(map(_width, text), initial=0))

    def byte(self, character: int) -> int:
        """Give the byte at which a character begins; of the text's length, that at which the text ends."""
        return character if self._ascii else self._starts[character]


def _width(character: str) -> int:
    return len(clean(character).encode())


def on_boundary(data: bytes, offset: int) -> bool:
    """Tell whether an offset into UTF-8 lies between two characters, or at an end."""
    if not 0 <= offset <= len(data):
        return False
    mask, later = _CONTINUES
    return offset == len(data) or data[offset] & mask != later


def clean(text: str) -> str:
    """Give a text that UTF-8 can write, with as many characters: lone surrogates become U+FFFD."""
    return LONE_SURROGATE.sub("\ufffd", text)


def message(fields: Mapping[str, Any], present: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Give a message's JSON: fields at their default left out, as protobuf does.

    Args:
        fields: Without presence: left out where empty, false or 0.
        present: With presence (``optional``, messages): left out where None.
    """
    whole = {name: value for name, value in fields.items() if value}
    whole.update({name: value for name, value in (present or {}).items() if value is not None})
    return whole


def timestamp(moment: datetime | None) -> str | None:
    """Give a time as RFC 3339 in UTC, with 0, 3 or 6 digits after the second; None for None."""
    if moment is None:
        return None
    utc = moment.astimezone(UTC).replace(tzinfo=None)
    digits = "seconds" if utc.microsecond == 0 else "milliseconds" if utc.microsecond % 1000 == 0 else "microseconds"
    return utc.isoformat(timespec=digits) + "Z"


def float32(value: float | None) -> float | None:
    """Give the shortest decimal number that is the same 32-bit float; None for None."""
    if value is None:
        return None
    (nearest,) = struct.unpack("<f", struct.pack("<f", value))
    for digits in range(6, 9):
        short = float(f"{nearest:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == nearest:
            return short
    return float(f"{nearest:.9g}")  # nine digits always tell a 32-bit float from its neighbours


def struct_value(value: Any, depth: int = 0) -> Any:
    """Give data as a Struct holds it. Its numbers are doubles: a whole number beyond 2^53 is written as text."""
    if isinstance(value, Mapping) and depth < MAX_DEPTH:
        return {clean(str(key)): struct_value(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and depth < MAX_DEPTH:
        return [struct_value(one, depth + 1) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) <= _EXACT):
        return value
    return value.isoformat() if isinstance(value, date) else clean(str(value))
