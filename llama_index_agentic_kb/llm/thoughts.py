"""Thoughts of reasoning models: blocks such as ``<think>...</think>`` that a server leaves in the text of a reply.

They are no part of an answer, nor of a plan: they are left out where a reply is read, whole or in a stream.
"""

from __future__ import annotations

import re
from typing import Final

_NAMES: Final = ("think", "thinking", "thought", "reasoning")
_OPEN: Final = re.compile(rf"(?<!`)<({'|'.join(_NAMES)})>", re.IGNORECASE)
_CLOSE: Final = re.compile(rf"(?<!`)</(?:{'|'.join(_NAMES)})>", re.IGNORECASE)
_BEGUN: Final = re.compile(r"</?[a-z]{0,9}\Z", re.IGNORECASE)


class ThoughtFilter:
    """Passes a reply on piece by piece, without its thoughts. However the text is cut into pieces, the same comes out.

    A tag in backquotes is text. An end without a beginning ends thoughts that began in the prompt: of a whole reply all
    that stands before it is left out, of a stream what was not passed on yet.
    """

    def __init__(self) -> None:
        self.left_out = 0
        """Characters of thoughts so far."""
        self._held = ""
        self._inside: str | None = None
        self._started = False
        """Whether anything was passed on."""
        self._last = ""

    def feed(self, delta: str) -> str:
        """Take a piece and return the text that can be passed on now."""
        text, passed = self._held + delta, ""
        self._held = ""
        while text:
            if self._inside is not None:
                text = self._think(text, self._inside)
                continue
            # The character before decides whether a tag is one.
            found = _OPEN.search(self._last + text) or None
            ended = _CLOSE.search(self._last + text)
            if ended is not None and (found is None or ended.start() < found.start()):
                self.left_out += len(passed) + ended.end() - len(self._last)
                text, passed, self._last = text[ended.end() - len(self._last) :], "", ""
            elif found is not None:
                start = found.start() - len(self._last)
                passed += text[:start]
                text = text[found.end() - len(self._last) :]
                self._inside, self._last = found[1].lower(), ""
            else:
                begun = _BEGUN.search(text)
                at = len(text) if begun is None else begun.start()
                passed += text[:at]
                self._last, self._held, text = (text[:at] or self._last)[-1:], text[at:], ""
        return self._given(passed)

    def _think(self, text: str, name: str) -> str:
        """Leave thoughts out, and return what stands behind their end."""
        end, tag = text.lower().find(f"</{name}>"), len(name) + 3
        if end < 0:
            cut = max(0, len(text) - tag + 1)
            self.left_out += cut
            self._held = text[cut:]
            return ""
        self.left_out += end
        self._inside = None
        return text[end + tag :]

    def close(self) -> str:
        """Return what was held back; thoughts that never ended are left out."""
        rest, self._held = self._held, ""
        if self._inside is not None:
            self.left_out += len(rest)
            return ""
        return self._given(rest)

    def _given(self, text: str) -> str:
        """Return a text, without the line breaks between thoughts and the reply's first word."""
        shown = text if self._started or not self.left_out else text.lstrip()
        self._started = self._started or bool(shown.strip())
        return shown


def without_thoughts(text: str) -> tuple[str, int]:
    """Return a whole reply without its thoughts, and how many characters these had."""
    thoughts = ThoughtFilter()
    return thoughts.feed(text) + thoughts.close(), thoughts.left_out
