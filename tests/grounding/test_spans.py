"""Spans in characters, bytes and UTF-16 units: there and back, and only on boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.grounding.spans import TextOffsets
from llama_index_agentic_kb.schema.grounding import Span

TEXTS = st.text(alphabet=st.one_of(st.characters(), st.sampled_from("aé\u0301日😀👩‍🚀\u200d")), min_size=1, max_size=20)


@given(TEXTS.filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text)), st.data())
@settings(max_examples=100, deadline=None)
def test_round_trip(text: str, data: st.DataObject) -> None:
    """A span is the same text in every unit, and comes back as it was."""
    start = data.draw(st.integers(0, len(text) - 1))
    span = Span(start=start, end=data.draw(st.integers(start + 1, len(text))))
    offsets = TextOffsets(text)
    byte_start, byte_end = offsets.to_bytes(span)
    unit_start, unit_end = offsets.to_utf16(span)
    assert text.encode()[byte_start:byte_end].decode() == span.of(text)
    assert text.encode("utf-16-le")[2 * unit_start : 2 * unit_end].decode("utf-16-le") == span.of(text)
    assert offsets.from_bytes(byte_start, byte_end) == offsets.from_utf16(unit_start, unit_end) == span


@given(TEXTS, st.integers(0, 90), st.integers(0, 90))
@settings(max_examples=100, deadline=None)
def test_bytes_are_on_boundaries_or_refused(text: str, start: int, end: int) -> None:
    """Any pair of byte offsets is a span of whole characters, or an error; never rounded."""
    encoded = text.encode("utf-8", "surrogatepass")
    try:
        span = TextOffsets(text).from_bytes(start, end)
    except InvalidRequestError:
        boundaries = {len(text[:at].encode("utf-8", "surrogatepass")) for at in range(len(text) + 1)}
        assert start >= end or start not in boundaries or end not in boundaries
        return
    assert encoded[start:end] == span.of(text).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [(1, 2, "inside of a character"), (0, 99, "outside"), (-1, 2, "outside"), (2, 2, "below"), (3, 2, "below")],
)
def test_refuses(start: int, end: int, message: str) -> None:
    """What is no span of whole characters is named."""
    with pytest.raises(InvalidRequestError, match=message):
        TextOffsets("é!é").from_bytes(start, end)


def test_refuses_half_a_pair() -> None:
    """An offset between the two units of one character is refused."""
    with pytest.raises(InvalidRequestError, match="UTF-16 unit 1 lies inside"):
        TextOffsets("😀").from_utf16(0, 1)


def test_refuses_spans_of_another_text() -> None:
    """A span that ends behind the text is refused."""
    with pytest.raises(InvalidRequestError, match="behind the text of 2 characters"):
        TextOffsets("ab").to_bytes(Span(start=1, end=3))
