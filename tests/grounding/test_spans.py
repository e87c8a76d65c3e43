"""Spans in characters, bytes and UTF-16 units: there and back, and only on boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.grounding.spans import TextOffsets
from llama_index_agentic_kb.schema.grounding import Span

TEXTS = st.text(alphabet=st.one_of(st.characters(), st.sampled_from("aé\u0301日😀👩‍🚀\u200d")), min_size=1, max_size=20)


@given(TEXTS, st.data())
@settings(max_examples=100, deadline=None)
def test_round_trip(text: str, data: st.DataObject) -> None:
    """A span is the same text in every unit, and comes back as it was."""
    start = data.draw(st.integers(0, len(text) - 1))
    span = Span(start=start, end=data.draw(st.integers(start + 1, len(text))))
    offsets = TextOffsets(text)
    (first, last), (low, high) = offsets.to_bytes(span), offsets.to_utf16(span)
    assert text.encode("utf-8", "surrogatepass")[first:last] == span.of(text).encode("utf-8", "surrogatepass")
    assert text.encode("utf-16-le", "surrogatepass")[2 * low : 2 * high] == span.of(text).encode(
        "utf-16-le", "surrogatepass"
    )
    assert offsets.from_bytes(first, last) == offsets.from_utf16(low, high) == span


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [(1, 2, "inside of a character"), (0, 99, "outside"), (-1, 2, "outside"), (2, 2, "below"), (3, 2, "below")],
)
def test_refuses(start: int, end: int, message: str) -> None:
    """What is no span of whole characters is named, never rounded."""
    with pytest.raises(InvalidRequestError, match=message):
        TextOffsets("é!é").from_bytes(start, end)
    with pytest.raises(InvalidRequestError, match="UTF-16 unit 1 lies inside"):
        TextOffsets("😀").from_utf16(0, 1)
    with pytest.raises(InvalidRequestError, match="behind the text of 2 characters"):
        TextOffsets("ab").to_bytes(Span(start=1, end=3))
