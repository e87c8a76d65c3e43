"""Texts that are near what a reader reads: its seeds, cut, joined and put full of its own words and of odd ones."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.targets import Target

_ODD = ("\x00", "\ud800", "\u202e", "\u200b", "é", "東", "😀", "\U000e0041", "9" * 30, "\\", "\u2028", "((((((((", "\r")


def texts(target: Target) -> st.SearchStrategy[str]:
    """Return a strategy for a reader's texts."""
    piece = st.sampled_from([*target.words, *_ODD])
    made = st.lists(piece | st.text(max_size=3), max_size=40).map("".join)
    return st.one_of(made, _changed(target, piece), st.text(st.characters(exclude_categories=()), max_size=60))


@st.composite
def _changed(draw: st.DrawFn, target: Target, piece: st.SearchStrategy[str]) -> str:
    text = draw(st.sampled_from(target.seeds))
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        put = draw(piece | st.sampled_from(target.seeds) | st.just(text[start:end] * 3))
        text = text[:start] + put + text[end:]
    return text
