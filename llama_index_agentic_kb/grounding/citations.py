"""Reference markers, ``[ref_id:N]``: found, checked, and put into one form, in whole texts and in streams.

A language model may write ``[ref_id: 3]``, ``[ref_id:0, 2]`` or an N that was never shown to it. What is read here
comes out as ``[ref_id:0][ref_id:2]``, every N one of the valid ids; what is not is removed and counted.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection
from enum import StrEnum
from itertools import accumulate
from typing import Final

from llama_index_agentic_kb.schema.grounding import GroundingLedger, Span


class Markers(StrEnum):
    """What becomes of an answer's reference markers."""

    KEEP = "keep"
    """They stay: the N of ``[ref_id:N]`` is the place of a passage in the evidence."""
    RENUMBER = "renumber"
    """They are numbered in order of appearance, and the evidence is put into the same order."""
    STRIP = "strip"
    """They are taken out; the ledger tells what was cited."""


# Every repetition is bounded: a marker is never held back for long, nor searched for at length.
_MARKER: Final = re.compile(
    r"(?P<space>[ \t]{0,8})\[\s{0,3}ref_id\s{0,3}:(?P<ids>[^\[\]\n]{0,120})\]",
    re.IGNORECASE,
)
_OPEN: Final = re.compile(
    r"[ \t]{0,8}(?:\[\s{0,3}(?:r(?:e(?:f(?:_(?:i(?:d(?:\s{0,3}(?::[^\[\]\n]{0,120})?)?)?)?)?)?)?)?)?\Z",
    re.IGNORECASE,
)
"""The end of a text that may yet become a marker, with the spaces before it; at least the empty end."""
_BEGUN: Final = re.compile(r"\s*\[\s*ref_id", re.IGNORECASE)
_IDS: Final = re.compile(r"\s*\d{1,9}(?:\s*[,;]\s*(?:ref_id\s*:\s*)?\d{1,9})*\s*", re.IGNORECASE)
_ID: Final = re.compile(r"\d{1,9}")
_LONGEST: Final = 160
"""Characters before a marker that are looked at; at least what ``_OPEN`` matches."""


class MarkerFilter:
    """Passes a text on piece by piece, markers in one form, those out of range removed.

    However the text is cut into pieces, the same comes out. Held back is only what may be the start of a marker.

        markers = MarkerFilter({0, 1})
        text = markers.feed("Paris [ref_") + markers.feed("id:7] [ref_id:1].") + markers.close()
        assert (text, markers.removed) == ("Paris [ref_id:1].", 1)

    Args:
        valid: The ids that a marker may name.
        style: What becomes of those that may stay.
    """

    def __init__(self, valid: Collection[int], style: Markers = Markers.KEEP) -> None:
        self.removed = 0
        """How many ids were removed so far; a marker that names none counts as one."""
        self.cited: list[int] = []
        """The valid ids that were named so far, each once, in order of appearance."""
        self._style = style
        self._valid = frozenset(valid)
        self._held = ""
        self._given = ""
        """The end of what was given."""

    def feed(self, delta: str) -> str:
        """Take a piece and return the text that can be emitted now."""
        text, at, pieces = self._held + delta, 0, [self._given]
        end = _OPEN.search(text)
        assert end is not None  # the empty end always matches
        self._held = text[end.start() :]
        for marker in _MARKER.finditer(text, 0, end.start()):
            pieces.append(text[at : marker.start()])
            pieces.append(self._checked(marker) or _gap("".join(pieces[-3:])))
            at = marker.end()
        pieces.append(text[at : end.start()])
        given = "".join(pieces[1:])
        self._given = (self._given + given)[-_LONGEST:]
        return given

    def close(self) -> str:
        """Return what was held back; a marker that never ended is removed."""
        rest, self._held = self._held, ""
        if not _BEGUN.match(rest):
            return rest
        self.removed += 1
        return _gap(self._given)

    def _checked(self, marker: re.Match[str]) -> str:
        ids = _read_ids(marker["ids"])
        named = [number for number in dict.fromkeys(ids) if number in self._valid]
        self.removed += max(len(ids), 1) - sum(map(ids.count, named))
        self.cited += [number for number in named if number not in self.cited]
        if not named or self._style is Markers.STRIP:
            return ""
        if self._style is Markers.RENUMBER:
            named = list(map(self.cited.index, named))
        return marker["space"] + "".join(map("[ref_id:{}]".format, named))


def _gap(before: str) -> str:
    """Return what keeps the text around a removed marker from becoming one: ``[ref_[ref_id:9]id:7]``."""
    begun = _OPEN.search(before[-_LONGEST:])
    return "[]" if begun is not None and "[" in begun[0] else ""


def clean_markers(text: str, valid: Collection[int]) -> tuple[str, int]:
    """Return a text with its markers in one form and those out of range removed, and how many were removed.

    Args:
        text: A whole text.
        valid: The ids that a marker may name.
    """
    markers = MarkerFilter(valid)
    return markers.feed(text) + markers.close(), markers.removed


def cited_ids(text: str) -> list[int]:
    """Return the ids that a text's markers name, each once, in order of first mention."""
    found: dict[int, None] = {}
    for marker in _MARKER.finditer(text):
        found |= dict.fromkeys(_read_ids(marker["ids"]))
    return list(found)


class MarkerCuts:
    """Where positions of a text are once its markers are taken out, each with the spaces before it.

    Args:
        text: With markers.
    """

    def __init__(self, text: str) -> None:
        self.spans = [marker.span() for marker in _MARKER.finditer(text) if _read_ids(marker["ids"])]
        """Where they stand: (start, end), end exclusive."""
        self._starts = [start for start, _ in self.spans]
        self._taken = [0, *accumulate(end - start for start, end in self.spans)]

    def position(self, position: int) -> int:
        """Return where a position of the text is in the shorter one."""
        count = bisect_left(self._starts, position)
        if count == 0:
            return position
        start, end = self.spans[count - 1]
        return position - self._taken[count - 1] - (min(end, position) - start)

    def applied(self, text: str) -> str:
        """Return the text without its markers."""
        bounds = [0, *(bound for span in self.spans for bound in span), len(text)]
        return "".join(text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True))


def strip_markers(text: str, ledger: GroundingLedger) -> tuple[str, GroundingLedger]:
    """Take the reference markers out of an answer; its ledger's spans become those of the shorter text.

    What a claim cited stays in ``cited``. The changes of a repair speak of the answer before it, and stay.

    Args:
        text: The answer.
        ledger: Its ledger.

    Returns:
        The text without markers, and a ledger of it.
    """
    cuts = MarkerCuts(text)
    if not cuts.spans:
        return text, ledger
    shorter = cuts.applied(text)

    def moved(span: Span) -> Span | None:
        start, end = cuts.position(span.start), cuts.position(span.end)
        while start < end - 1 and shorter[start].isspace():  # behind a marker that the span began with
            start += 1
        return Span(start=start, end=end) if start < end else None

    claims = []
    for claim in ledger.claims:
        span = moved(claim.span) or claim.span
        lacking = moved(claim.lacking) if claim.lacking else None
        claims.append(claim.model_copy(update={"span": span, "text": span.of(shorter), "lacking": lacking}))
    return shorter, ledger.model_copy(update={"claims": claims})


def _read_ids(inner: str) -> list[int]:
    """Return the ids between a marker's colon and its bracket; none where there is anything but ids."""
    return list(map(int, _ID.findall(inner))) if _IDS.fullmatch(inner) else []
