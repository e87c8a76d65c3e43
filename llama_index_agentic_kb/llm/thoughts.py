"""Removes the reasoning text of models: blocks such as ``<think>...</think>`` in the text of a reply.

The blocks are no part of an answer or a plan. They are removed from complete and from streamed replies.
"""

from __future__ import annotations

import re
from typing import Final

_NAMES: Final = ("think", "thinking", "thought", "reasoning")
_OPEN: Final = re.compile(rf"(?<!`)<({'|'.join(_NAMES)})>", re.IGNORECASE)
_CLOSE: Final = re.compile(rf"(?<!`)</(?:{'|'.join(_NAMES)})>", re.IGNORECASE)
_BEGUN: Final = re.compile(r"</?[a-z]{0,9}\Z", re.IGNORECASE)


class ThoughtFilter:
    """Removes reasoning blocks from a reply that arrives in pieces.

    A tag after a backquote is normal text. A closing tag without an opening one ends reasoning that began in the
    prompt: all text before it is removed, in a stream only the text that was not returned yet.
    """

    def __init__(self) -> None:
        self.left_out = 0
        """Number of reasoning characters removed so far."""
        self._held = ""
        self._inside: str | None = None
        self._started = False
        """Whether any visible text was returned."""
        self._last = ""

    def feed(self, delta: str) -> str:
        """Process a piece of the reply and return the text that can be shown now."""
        text, passed = self._held + delta, ""
        self._held = ""
        while text:
            if self._inside is not None:
                text = self._think(text, self._inside)
                continue
            # The previous character decides whether this is a tag: a backquote makes it text.
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
        """Remove reasoning text, and return the text after its closing tag."""
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
        """Return the remaining text at the end of the reply; an unclosed reasoning block is removed."""
        rest, self._held = self._held, ""
        if self._inside is not None:
            self.left_out += len(rest)
            return ""
        return self._given(rest)

    def _given(self, text: str) -> str:
        """Return a text, without whitespace between the reasoning and the reply's first word."""
        shown = text if self._started or not self.left_out else text.lstrip()
        self._started = self._started or bool(shown.strip())
        return shown


def without_thoughts(text: str) -> tuple[str, int]:
    """Return a complete reply without its reasoning text, and the number of removed characters."""
    thoughts = ThoughtFilter()
    return thoughts.feed(text) + thoughts.close(), thoughts.left_out
