"""Spans of a text in characters, in UTF-8 bytes and in UTF-16 units, from each to each.

Python counts characters (code points), Google's Answer counts UTF-8 bytes, browsers and Java count UTF-16 units; "é😀"
is 2 characters, 6 bytes and 3 units long. An offset inside of a character is refused, never rounded.

    offsets = TextOffsets("é😀!")
    assert offsets.to_bytes(Span(start=1, end=2)) == (2, 6)
    assert offsets.from_utf16(1, 3) == Span(start=1, end=2)
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import accumulate
from typing import Final

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.grounding import Span

__all__ = ["TextOffsets"]

_TWO_BYTES: Final = 0x80
_THREE_BYTES: Final = 0x800
_FOUR_BYTES: Final = 0x10000


class TextOffsets:
    """Turns spans of one text from one unit into another; each unit is counted once, when it is first asked for.

    A lone surrogate, which Python's texts may hold and UTF-8 may not, counts as the three bytes of the replacement
    character that stands for it on the wire, and as the one UTF-16 unit that it is.

    Args:
        text: The text that the spans are of.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def to_bytes(self, span: Span) -> tuple[int, int]:
        """Return a span of characters in UTF-8 bytes: (start, end), end exclusive.

        Raises:
            InvalidRequestError: The span ends behind the text.
        """
        return self._out(span, self._bytes)

    def from_bytes(self, start: int, end: int) -> Span:
        """Return a span of UTF-8 bytes in characters.

        Raises:
            InvalidRequestError: An offset is no character's boundary, lies outside of the text, or the span is empty.
        """
        return self._in(start, end, self._bytes, "byte")

    def to_utf16(self, span: Span) -> tuple[int, int]:
        """Return a span of characters in UTF-16 units: (start, end), end exclusive; see ``to_bytes``."""
        return self._out(span, self._units)

    def from_utf16(self, start: int, end: int) -> Span:
        """Return a span of UTF-16 units in characters; see ``from_bytes``."""
        return self._in(start, end, self._units, "UTF-16 unit")

    @cached_property
    def _bytes(self) -> list[int] | range:
        if self.text.isascii():
            return range(len(self.text) + 1)
        return list(accumulate(map(_byte_length, self.text), initial=0))

    @cached_property
    def _units(self) -> list[int] | range:
        if self.text.isascii():
            return range(len(self.text) + 1)
        return list(accumulate((2 if ord(char) >= _FOUR_BYTES else 1 for char in self.text), initial=0))

    def _out(self, span: Span, starts: list[int] | range) -> tuple[int, int]:
        if span.end >= len(starts):
            raise InvalidRequestError(f"span: end {span.end} lies behind the text of {len(self.text)} characters")
        return starts[span.start], starts[span.end]

    def _in(self, start: int, end: int, starts: list[int] | range, unit: str) -> Span:
        if start >= end:
            raise InvalidRequestError(f"span: start {start} must be below end {end}")
        return Span(start=_character(start, starts, unit), end=_character(end, starts, unit))


def _character(offset: int, starts: list[int] | range, unit: str) -> int:
    if not 0 <= offset <= starts[-1]:
        raise InvalidRequestError(f"span: {unit} {offset} lies outside of the text, which has {starts[-1]}")
    found = bisect_left(starts, offset)
    if starts[found] != offset:
        raise InvalidRequestError(f"span: {unit} {offset} lies inside of a character, give one of its boundaries")
    return found


def _byte_length(char: str) -> int:
    point = ord(char)
    return 1 if point < _TWO_BYTES else 2 if point < _THREE_BYTES else 3 if point < _FOUR_BYTES else 4
