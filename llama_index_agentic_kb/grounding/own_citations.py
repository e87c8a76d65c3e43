"""Citations in a model's own style, such as ``[1]``, ``[1, 2]``, ``[^1]``, ``[Source 1]``, ``【1】``, or (1) at an end.

A model that is asked for ``[ref_id:N]`` may write them all the same. They become ``[ref_id:N]`` where their numbers can
mean only one passage: 0 says that it counts from 0, a number beyond the last id that it counts from 1. Until that is
known, and where no passage has the number, they are taken out and counted: beside our own numbers they would lead to
another passage. In code, in links and footnotes, and at the start of a line, such numbers are text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

_NUMBERS: Final = r"\d{1,2}(?:\s?[,;]\s?\d{1,2}){0,9}"
_KIND: Final = r"(?:sources?|refs?|references?|docs?|documents?|passages?)[ .#:]{0,2}"
CITATION: Final = re.compile(
    r"(?<=[\w.!?,;:)\]】\"'”’%°*_])[ \t]?"  # noqa: RUF001 (typographic quotation marks)
    rf"(?:\[\^?(?:{_KIND})?{_NUMBERS}\](?![(:])|【(?:{_KIND})?{_NUMBERS}[^】\n]{{0,20}}】"
    rf"|\({_NUMBERS}\)(?=[.!?\n]|$))",
    re.IGNORECASE,
)
"""A citation, with the space before it, behind the words that it belongs to."""
_DIGITS: Final = re.compile(r"\d{1,2}")
_REST: Final = re.compile(r"(?<=\d)[^\d,;\] ].*")
"""What a server's own marks hold behind the number: ``【1†source】``."""
_BEGUN: Final = re.compile(r"[ \t]?(?:\[[^\]\n]{0,60}\]?|【[^】\n]{0,60}】?|\([\d,; ]{0,40}\)?)?\Z")
"""The end of a text that may yet become a citation; at least the empty end."""


class OwnCitations:
    """Passes a text on piece by piece, citations of a model's own style as markers, or taken out.

    However the text is cut into pieces, the same comes out.

    Args:
        valid: The ids of the passages that may be cited; without any, everything is text.
    """

    def __init__(self, valid: Collection[int]) -> None:
        self.removed = 0
        """How many numbers were taken out so far."""
        self._valid = frozenset(valid)
        self._base: int | None = None
        self._held = ""
        self._last = ""
        self._in_code = False

    def feed(self, delta: str) -> str:
        """Take a piece and return the text that can be passed on now."""
        if not self._valid:
            return delta
        text = self._held + delta
        begun = _BEGUN.search(text)
        assert begun is not None  # the empty end always matches
        self._held = text[begun.start() :]
        return self._read(text, begun.start())

    def close(self) -> str:
        """Return the rest."""
        rest, self._held = self._held, ""
        return self._read(rest, len(rest))

    def _read(self, text: str, end: int) -> str:
        before, pieces, at = self._last, [], 0
        for found in CITATION.finditer(before + text):  # the character before decides
            start, stop = found.start() - len(before), found.end() - len(before)
            if stop > end or start < at:
                break
            pieces.append(self._text(text[at:start]))
            pieces.append(found[0] if self._in_code else self._marker(found[0]))
            at = stop
        pieces.append(self._text(text[at:end]))
        self._last = (before + text[:end])[-1:]
        return "".join(pieces)

    def _text(self, text: str) -> str:
        self._in_code ^= text.count("`") % 2 == 1
        return text

    def _marker(self, citation: str) -> str:
        """Return a citation as a marker; what it can't be read as is left out."""
        ids = []
        for number in map(int, _DIGITS.findall(_REST.sub("", citation))):
            if self._base is None and (number in self._valid) != (number - 1 in self._valid):
                self._base = 0 if number in self._valid else 1
            known = self._base is not None and number - self._base in self._valid
            ids += [number - (self._base or 0)] if known else []
            self.removed += not known
        space = citation[0] if citation[0] in " \t" else ""
        return space + "".join(f"[ref_id:{number}]" for number in dict.fromkeys(ids)) if ids else ""
