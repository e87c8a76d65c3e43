"""Spans of a text in characters (Python), UTF-8 bytes (Google's Answer) and UTF-16 units (browsers, Java)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from llama_index_agentic_kb._text import byte_offsets
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.grounding import Span


class TextOffsets:
    """Converts spans of one text from characters to (start, end) in bytes or UTF-16 units.

        assert TextOffsets("é😀!").to_bytes(Span(start=1, end=2)) == (2, 6)

    A lone surrogate counts as three bytes (like the replacement character that is sent instead) and as one unit.
    ``InvalidRequestError`` is raised for a span that ends behind the text.
    """

    def __init__(self, text: str) -> None:
        self._bytes: Sequence[int] = byte_offsets(text)
        self._units = list(accumulate((1 + (char > "\uffff") for char in text), initial=0))

    def to_bytes(self, span: Span) -> tuple[int, int]:
        """Return a span of characters in UTF-8 bytes."""
        return self._out(span, self._bytes)

    def to_utf16(self, span: Span) -> tuple[int, int]:
        """Return a span of characters in UTF-16 units."""
        return self._out(span, self._units)

    def _out(self, span: Span, starts: Sequence[int]) -> tuple[int, int]:
        if span.end >= len(starts):
            raise InvalidRequestError(f"span: end {span.end} lies behind the text of {len(starts) - 1} characters")
        return starts[span.start], starts[span.end]
