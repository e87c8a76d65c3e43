"""Converts spans of a text between characters, UTF-8 bytes and UTF-16 units.

Python counts characters (code points), Google's Answer counts UTF-8 bytes, browsers and Java count UTF-16 units: "é😀"
is 2 characters, 6 bytes and 3 units long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from llama_index_agentic_kb._text import byte_offsets
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.grounding import Span


class TextOffsets:
    """Converts spans of one text: characters to (start, end) in bytes or UTF-16 units, and back.

        assert TextOffsets("é😀!").to_bytes(Span(start=1, end=2)) == (2, 6)

    A lone surrogate counts as three bytes (like the replacement character that is sent instead) and as one unit. Each
    method raises ``InvalidRequestError`` for an offset outside the text or inside a character; nothing is rounded.
    """

    def __init__(self, text: str) -> None:
        self._bytes: Sequence[int] = byte_offsets(text)
        self._units = list(accumulate((1 + (char > "\uffff") for char in text), initial=0))

    def to_bytes(self, span: Span) -> tuple[int, int]:
        """Return a span of characters in UTF-8 bytes."""
        return _out(span, self._bytes)

    def from_bytes(self, start: int, end: int) -> Span:
        """Return a span of UTF-8 bytes in characters."""
        return _in(start, end, self._bytes, "byte")

    def to_utf16(self, span: Span) -> tuple[int, int]:
        """Return a span of characters in UTF-16 units."""
        return _out(span, self._units)

    def from_utf16(self, start: int, end: int) -> Span:
        """Return a span of UTF-16 units in characters."""
        return _in(start, end, self._units, "UTF-16 unit")


def _out(span: Span, starts: Sequence[int]) -> tuple[int, int]:
    if span.end >= len(starts):
        raise InvalidRequestError(f"span: end {span.end} lies behind the text of {len(starts) - 1} characters")
    return starts[span.start], starts[span.end]


def _in(start: int, end: int, starts: Sequence[int], unit: str) -> Span:
    if start >= end:
        raise InvalidRequestError(f"span: start {start} must be below end {end}")
    for offset in (start, end):
        if not 0 <= offset <= starts[-1]:
            raise InvalidRequestError(f"span: {unit} {offset} lies outside of the text, which has {starts[-1]}")
        if starts[bisect_left(starts, offset)] != offset:
            raise InvalidRequestError(f"span: {unit} {offset} lies inside of a character, give one of its boundaries")
    return Span(start=bisect_left(starts, start), end=bisect_left(starts, end))
