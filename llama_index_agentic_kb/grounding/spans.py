"""Converts spans of a text between characters, UTF-8 bytes and UTF-16 units.

Python counts characters (code points), Google's Answer counts UTF-8 bytes, browsers and Java count UTF-16 units; "é😀"
is 2 characters, 6 bytes and 3 units long. An offset inside a character is an error and is never rounded.

    offsets = TextOffsets("é😀!")
    assert offsets.to_bytes(Span(start=1, end=2)) == (2, 6)
    assert offsets.from_utf16(1, 3) == Span(start=1, end=2)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from llama_index_agentic_kb._text import byte_offsets
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.grounding import Span


class TextOffsets:
    """Converts spans of one text between units; the offsets in each unit are computed once, on first use.

    A lone surrogate, which Python strings may contain and UTF-8 may not, counts as three bytes (like the replacement
    character that is sent instead) and as one UTF-16 unit.

    Args:
        text: The text that the spans refer to.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def to_bytes(self, span: Span) -> tuple[int, int]:
        """Return a span of characters in UTF-8 bytes: (start, end), end exclusive.

        Raises:
            InvalidRequestError: The span ends after the end of the text.
        """
        return self._out(span, self._bytes)

    def from_bytes(self, start: int, end: int) -> Span:
        """Return a span of UTF-8 bytes in characters.

        Raises:
            InvalidRequestError: An offset is not a character boundary or is outside the text, or the span is empty.
        """
        return _in(start, end, self._bytes, "byte")

    def to_utf16(self, span: Span) -> tuple[int, int]:
        """Return a span of characters in UTF-16 units: (start, end), end exclusive; see ``to_bytes``."""
        return self._out(span, self._units)

    def from_utf16(self, start: int, end: int) -> Span:
        """Return a span of UTF-16 units in characters; see ``from_bytes``."""
        return _in(start, end, self._units, "UTF-16 unit")

    @cached_property
    def _bytes(self) -> Sequence[int]:
        return byte_offsets(self.text)

    @cached_property
    def _units(self) -> list[int]:
        return list(accumulate((1 + (char > "\uffff") for char in self.text), initial=0))

    def _out(self, span: Span, starts: Sequence[int]) -> tuple[int, int]:
        if span.end >= len(starts):
            raise InvalidRequestError(f"span: end {span.end} lies behind the text of {len(self.text)} characters")
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
