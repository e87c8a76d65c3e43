"""Characters that a reader can't see: removed from what a model reads, and from what it answers. One rule for both.

Gone are control characters (C0 and C1; line breaks become line feeds, tabs stay), bidi controls, the tag characters
(U+E0000 ...), zero-width and other invisible characters, and halves of surrogate pairs (shown as U+FFFD). They carry
orders that nobody sees ("ASCII smuggling"), split words so that no filter finds them, or turn text round.

Two kinds are needed for writing, and stay where they do their work, one at a time:

- The joiners U+200C and U+200D between letters of scripts that join (Persian, Hindi, Sinhala, ...), and U+200D between
  emoji.
- Variation selectors behind what they vary: U+FE0E and U+FE0F behind emoji, U+180B ... behind Mongolian letters,
  U+E0100 ... behind Han characters. Runs of them, which carry bytes, are removed.

A user's nodes are never changed: text is cleaned on its way.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Final

__all__ = ["HiddenFilter", "strip_invisible", "without_hidden"]

_BREAKS: Final = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_JOINERS: Final = "\u200c\u200d"
# Ranges of the Basic Multilingual Plane alone are a bitmap to the engine, and five times as fast as with others.
_BASIC: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"  # soft hyphen, fillers, invisible vowels
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # bidi controls, zero-width, joiners, invisible operators
    "\u180b-\u180f\ufe00-\ufe0f\ufeff\ufff0-\ufffb"  # variation selectors, BOM, annotations
)
_HIDDEN: Final = re.compile(f"[{_BASIC}]+")
_SUSPECT: Final = re.compile(f"[{_BASIC}\ud800-\udfff\U00010000-\U0010ffff]")
_ASTRAL: Final = re.compile(
    "[\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"  # shorthand, music, tags, selectors
)
_HALVES: Final = re.compile("[\ud800-\udfff]+")

# Scripts whose letters join, or form clusters: Arabic and its kin, Mongolian, and the scripts of India to Indonesia.
_JOINING: Final = re.compile(
    "[\u0600-\u08ff\u0900-\u0dff\u0f00-\u109f\u1700-\u18af\u1a20-\u1aad\u1b00-\u1c4f\ua840-\ua8ff\ua980-\ua9df"
    "\uaa60-\uaa7f\uabc0-\uabff\ufb50-\ufdff\ufe70-\ufefe\U00010a00-\U00011fff]"
)
_HAN: Final = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_MONGOLIAN: Final = re.compile("[\u1820-\u18aa]")
_EMOJI: Final = re.compile(
    "[#*0-9\u00a9\u00ae\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u27bf\u2934\u2935\u2b00-\u2bff\u3030\u303d\u3297"
    "\u3299\U0001f000-\U0001faff]"
)


def strip_invisible(text: str) -> str:
    """Give a text without what can't be seen; see the module. Text without any is given back as it is."""
    return without_hidden(text)[0]


def without_hidden(text: str) -> tuple[str, int]:
    """Give a text without what can't be seen, and how many characters were taken out.

    Takes linear time: half a millisecond for 50,000 characters, ten where every tenth is an emoji or a joiner.

    Args:
        text: Any text, halves of surrogate pairs included.
    """
    if (_CONTROLS if text.isascii() else _SUSPECT).search(text) is None:
        return text, 0
    if _HALVES.search(text) is not None:
        return _whole(text)
    clean = _BREAKS.sub("\n", text) if _BREAKS.search(text) is not None else text
    length = len(clean)
    if _HIDDEN.search(clean) is not None:
        clean = _HIDDEN.sub(_needed, clean)
    clean = _ASTRAL.sub(_needed, clean)
    return clean, length - len(clean)


def _whole(text: str) -> tuple[str, int]:
    """Join the halves of surrogate pairs, show lone ones as U+FFFD, and go on: joined, they may hide as well."""
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    lone = joined.count("\ufffd") - text.count("\ufffd")
    kept, removed = without_hidden(joined)
    return kept, removed + lone


def _needed(found: re.Match[str]) -> str:
    """Give what of a run of hidden characters the text around it needs: a selector, then a joiner, or nothing."""
    run, text = found.group(), found.string
    if not found.start() or len(run) > 2:  # noqa: PLR2004 (a selector and a joiner)
        return ""
    return _kept(run, text[found.start() - 1], text[found.end() : found.end() + 1])


@functools.lru_cache(maxsize=4_096)
def _kept(run: str, before: str, after: str) -> str:
    selector = run[0] if _selects(run[0], before) else ""
    joiner = run[len(selector) :]
    if not joiner or (len(joiner) == 1 and joiner in _JOINERS and _joins(joiner, before, after)):
        return selector + joiner
    return selector if joiner in _JOINERS else ""  # several selectors carry bytes


def _selects(selector: str, base: str) -> bool:
    if selector in "\ufe0e\ufe0f":
        return _EMOJI.match(base) is not None
    if "\u180b" <= selector <= "\u180f":
        return selector != "\u180e" and _MONGOLIAN.match(base) is not None
    return "\U000e0100" <= selector <= "\U000e01ef" and _HAN.match(base) is not None


def _joins(joiner: str, before: str, after: str) -> bool:
    """Whether a joiner stands between what joins; U+200D may end a word (Malayalam, Sinhala)."""
    if _JOINING.match(before) is not None:
        ends = joiner == "\u200d" and unicodedata.category(before).startswith("M")
        return ends or _JOINING.match(after) is not None
    pictures = not before.isascii() and _EMOJI.match(before) is not None and _EMOJI.match(after) is not None
    return joiner == "\u200d" and pictures and not after.isascii()


MOST_HELD: Final = 1_000
"""Hidden characters that a stream holds back; no text needs more than two."""


class HiddenFilter:
    """Passes a text on piece by piece without what can't be seen; however it is cut, the same comes out.

    Held back is only what is hidden, or half a line break, until it is known what follows.
    """

    def __init__(self) -> None:
        self.removed = 0
        """How many characters were removed so far."""
        self._held = ""
        self._before = ""

    def feed(self, delta: str) -> str:
        """Take a piece and give what can be told now."""
        text = self._held + delta
        end = len(text)
        while end and end > len(text) - MOST_HELD and _is_open(text[end - 1]):
            end -= 1
        self._held = text[end:]
        return self._clean(text[:end])

    def close(self) -> str:
        """Give what was held back."""
        rest, self._held = self._held, ""
        return self._clean(rest)

    def _clean(self, text: str) -> str:
        """Clean a part of the text, with the character before it in view."""
        if not text:
            return ""
        before = self._before
        kept, removed = without_hidden(before + text)
        self.removed += removed
        self._before = kept[-1:]
        return kept[len(before) :]


def _is_open(char: str) -> bool:
    """Whether what becomes of a character depends on the next one."""
    return _HIDDEN.match(char) is not None or _ASTRAL.match(char) is not None or _HALVES.match(char) is not None
