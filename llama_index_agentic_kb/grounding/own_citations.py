"""Handles citations in a model's own style: ``[1]``, ``[1, 2]``, ``[^1]``, ``[Source 1]``, ``(ref 1)`` and ``【1】``.

A model may write them although the prompt asks for ``[ref_id:N]``. They become ``[ref_id:N]`` if their numbers are
unambiguous: a 0 shows that the model counts from 0, a number beyond the last id that it counts from 1. Until that is
known, or if no passage has the number, they are removed and counted, since they could refer to the wrong passage. In
code, in links, in footnotes and at the start of a line, such numbers stay text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

_NUMBERS: Final = r"\d{1,2}(?:\s?[,;]\s?\d{1,2}){0,9}"
_KIND: Final = r"(?:sources?|refs?|references?|docs?|documents?|passages?)[ .#:]{0,2}"
_NAMED: Final = r"(?:sources?|refs?|references?|passages?)[ .#:]{1,2}"
CITATION: Final = re.compile(
    r"(?<=[\w.!?,;:)\]】\"'”’%°*_])[ \t]?"  # noqa: RUF001 (typographic quotation marks)
    rf"(?:\[\^?(?:{_KIND})?{_NUMBERS}\](?![(:])|【(?:{_KIND})?{_NUMBERS}[^】\n]{{0,20}}】"
    rf"|\({_NAMED}{_NUMBERS}\)|(?:\({_NUMBERS}\)){{1,10}}(?=[.!?\n]|$))",
    re.IGNORECASE,
)
"""A citation with the space before it, after the text that it belongs to."""
_DIGITS: Final = re.compile(r"\d{1,2}")
_REST: Final = re.compile(r"(?<=\d)[^\d,;\] ].*")
"""Further text after the number of a server's own citations: ``【1†source】``."""
_BEGUN: Final = re.compile(
    r"[ \t]?(?:\[[^\]\n]{0,60}\]?|【[^】\n]{0,60}】?|"
    r"(?:\(\d[\d,; ]{0,40}\)){0,9}\((?:[a-z]{0,10}[ .#:]{0,2})?[\d,; ]{0,40}\)?)?\Z",
    re.IGNORECASE,
)
"""The end of a text that may become a citation; always matches the empty end."""


class OwnCitations:
    """Filters a text piece by piece: converts citations in a model's own style to markers, or removes them.

    The output does not depend on how the text is split into pieces.

    Args:
        valid: The ids of the passages that may be cited; if empty, the text is not changed.
    """

    def __init__(self, valid: Collection[int]) -> None:
        self.removed = 0
        """Number of citation numbers removed so far."""
        self._valid = frozenset(valid)
        self._base: int | None = None
        self._held = ""
        self._last = ""
        self._in_code = False

    def feed(self, delta: str) -> str:
        """Process a piece and return the text that can be emitted now."""
        if not self._valid:
            return delta
        text = self._held + delta
        begun = _BEGUN.search(text)
        assert begun is not None  # the empty end always matches
        self._held = text[begun.start() :]
        return self._read(text, begun.start())

    def close(self) -> str:
        """Return the rest of the text at its end."""
        rest, self._held = self._held, ""
        return self._read(rest, len(rest))

    def _read(self, text: str, end: int) -> str:
        before, pieces, at = self._last, [], 0
        for found in CITATION.finditer(before + text):  # the pattern needs the preceding character
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
        """Return a citation as reference markers, without the numbers that name no known passage."""
        ids = []
        for number in map(int, _DIGITS.findall(_REST.sub("", citation))):
            if self._base is None and (number in self._valid) != (number - 1 in self._valid):
                self._base = 0 if number in self._valid else 1
            known = self._base is not None and number - self._base in self._valid
            ids += [number - (self._base or 0)] if known else []
            self.removed += not known
        space = citation[0] if citation[0] in " \t" else ""
        return space + "".join(f"[ref_id:{number}]" for number in dict.fromkeys(ids)) if ids else ""
