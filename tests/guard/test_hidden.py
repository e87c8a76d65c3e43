from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.guard.text import HiddenFilter, strip_invisible, without_hidden

ORDINARY = [
    "plain words\n\twith a tab",
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian, a non-joiner between letters
    "\u0915\u094d\u200d\u0937",  # Hindi, a joiner after a virama
    "\u0d28\u0d4d\u200d",  # Malayalam, a joiner at a word's end
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # a family
    "\u2764\ufe0f\u200d\U0001f525",  # a heart on fire: selector and joiner
    "1\ufe0f\u20e3",  # a keycap
    "\U0001f44d\U0001f3fd",  # a skin tone
    "\u845b\U000e0100\u98fe\u533a",  # a Japanese name in its own variant
    "\u6771\u4eac \ud55c\uad6d\uc5b4 \u05e9\u05dc\u05d5\u05dd",
    "caf\u00e9 \u00b5 \u2014 \u2026",
    "if a < b:\n    <system> && |x| {y}",
]
HIDDEN = [
    ("a\u200bb", "ab", 1),
    ("a\u200db", "ab", 1),
    ("1\u200d2", "12", 1),
    ("\u00adig\u00adnore", "ignore", 2),
    ("x\ufe0f", "x", 1),
    ("\u202eevil\u202c \u2066x\u2069", "evil x", 4),
    ("nul\x00 esc\x1b[31m \x9b bell\x07", "nul esc[31m  bell", 4),
    ("tag" + "".join(chr(0xE0000 + ord(char)) for char in "obey"), "tag", 4),
    ("\U0001f3f4\U000e0067\U000e0062\U000e007f", "\U0001f3f4", 3),
    ("\U0001f600" + "\ufe01\U000e0120" * 5, "\U0001f600", 10),
    ("\u845b\U000e0100\U000e0101", "\u845b", 2),
    ("lone \ud800 half", "lone \ufffd half", 1),
    ("a pair \ud83d\ude00", "a pair \U0001f600", 0),
    ("a hidden pair \udb40\udc41", "a hidden pair ", 1),
    ("a\r\nb\rc\u2028d\x85e\x0bf", "a\nb\nc\nd\ne\nf", 0),
    ("\ufeffbom \u2060\u3164\u115f", "bom ", 4),
    ("\u200c\u0645", "\u0645", 1),
    ("", "", 0),
]


@pytest.mark.parametrize("text", ORDINARY)
def test_what_writing_needs_stays(text: str) -> None:
    """Joiners and selectors where scripts and emoji need them, and all that can be seen."""
    assert without_hidden(text) == (text, 0)


@pytest.mark.parametrize(("text", "kept", "removed"), HIDDEN)
def test_what_can_not_be_seen_goes(text: str, kept: str, removed: int) -> None:
    """Controls, bidi controls, tags, zero-width characters, smuggled bytes and halves of pairs; they are counted."""
    assert without_hidden(text) == (kept, removed)


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from([*"ab \n\r", *(text for text, _, _ in HIDDEN), *ORDINARY, "\u200d", "\u200c", "\ufe0f"]),
        max_size=8,
    ),
    st.integers(1, 7),
)
def test_a_stream_says_the_same(pieces: list[str], size: int) -> None:
    """However a text is cut, the same comes out; cleaned text is clean, can be encoded and holds no control."""
    text = "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    stream = HiddenFilter()
    told = "".join(stream.feed(text[at : at + size]) for at in range(0, len(text), size)) + stream.close()
    assert (told, stream.removed) == without_hidden(text)
    assert strip_invisible(told) == told
    told.encode("utf-8")
    assert not any(unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t" for char in told)


@pytest.mark.parametrize(
    "text", ["\u200d" * 500_000, "a\u200b" * 250_000, "\U0001f600\ufe0f" * 250_000, "\ud800" * 500_000]
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    """Half a million characters are cleaned at once."""
    began = time.monotonic()
    strip_invisible(text)
    assert time.monotonic() - began < 10


def test_a_flood_is_not_held_back() -> None:
    """A stream of nothing but hidden characters is not collected."""
    stream = HiddenFilter()
    assert "".join(stream.feed("\u200b" * 400) for _ in range(100)) + stream.close() == ""
    assert stream.removed == 40_000
