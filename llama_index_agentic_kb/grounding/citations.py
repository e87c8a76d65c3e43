"""Finds, checks and normalizes reference markers, ``[ref_id:N]``, in whole texts and in streams.

A language model may write ``[ref_id: 3]``, ``[ref_id:0, 2]`` or an N that was not in its prompt. Valid ids are
rewritten as ``[ref_id:0][ref_id:2]``; invalid ones are removed and counted.
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
    """How an answer's reference markers are processed."""

    KEEP = "keep"
    """Keep the markers: the N of ``[ref_id:N]`` is the index of a passage in the evidence."""
    RENUMBER = "renumber"
    """Number the markers in order of appearance, and sort the evidence in the same order."""
    STRIP = "strip"
    """Remove the markers; the grounding ledger lists the citations."""


# Every repetition is bounded, which limits the buffered text and the search time.
_MARKER: Final = re.compile(
    r"(?P<space>[ \t]{0,8})\[\s{0,3}ref_id\s{0,3}:(?P<ids>[^\[\]\n]{0,120})\]",
    re.IGNORECASE,
)
_OPEN: Final = re.compile(
    r"[ \t]{0,8}(?:\[\s{0,3}(?:r(?:e(?:f(?:_(?:i(?:d(?:\s{0,3}(?::[^\[\]\n]{0,120})?)?)?)?)?)?)?)?)?\Z",
    re.IGNORECASE,
)
"""The end of a text that may become a marker, with the spaces before it; always matches the empty end."""
_BEGUN: Final = re.compile(r"\s*\[\s*ref_id", re.IGNORECASE)
_IDS: Final = re.compile(r"\s*\d{1,9}(?:\s*[,;]\s*(?:ref_id\s*:\s*)?\d{1,9})*\s*", re.IGNORECASE)
_ID: Final = re.compile(r"\d{1,9}")
_LONGEST: Final = 160
"""Characters examined before a marker; at least the longest match of ``_OPEN``."""


class MarkerFilter:
    """Filters a text piece by piece: normalizes its markers and removes invalid ids.

    The output does not depend on how the text is split. Only the possible start of a marker is buffered.

        markers = MarkerFilter({0, 1})
        text = markers.feed("Paris [ref_") + markers.feed("id:7] [ref_id:1].") + markers.close()
        assert (text, markers.removed) == ("Paris [ref_id:1].", 1)

    Args:
        valid: The ids that a marker may name.
        style: How valid markers are processed.
    """

    def __init__(self, valid: Collection[int], style: Markers = Markers.KEEP) -> None:
        self.removed = 0
        """Number of ids removed so far; a marker without ids counts as one."""
        self.cited: list[int] = []
        """The valid ids found so far, each once, in order of appearance."""
        self._style = style
        self._valid = frozenset(valid)
        self._held = ""
        self._given = ""
        """The end of the emitted text."""

    def feed(self, delta: str) -> str:
        """Process a piece and return the text that can be emitted now."""
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
        """Return the buffered text; an incomplete marker is removed."""
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
    """Return ``[]`` if removing a marker could join the text around it into a marker: ``[ref_[ref_id:9]id:7]``."""
    begun = _OPEN.search(before[-_LONGEST:])
    return "[]" if begun is not None and "[" in begun[0] else ""


def clean_markers(text: str, valid: Collection[int]) -> tuple[str, int]:
    """Return a text with normalized markers and without invalid ids, and the number of removed ids.

    Args:
        text: The whole text.
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
    """Maps positions of a text to positions after its markers, and the spaces before them, are removed.

    Args:
        text: The text with its markers.
    """

    def __init__(self, text: str) -> None:
        self.spans = [marker.span() for marker in _MARKER.finditer(text) if _read_ids(marker["ids"])]
        """Positions of the markers: (start, end), end exclusive."""
        self._starts = [start for start, _ in self.spans]
        self._taken = [0, *accumulate(end - start for start, end in self.spans)]

    def position(self, position: int) -> int:
        """Return the position in the text without markers."""
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
    """Remove the reference markers from an answer, and adjust the spans of its grounding ledger.

    Claims keep their ``cited`` ids. The changes of a repair refer to the answer before it and are not adjusted.

    Args:
        text: The answer.
        ledger: The answer's grounding ledger.

    Returns:
        The text without markers, and its ledger.
    """
    cuts = MarkerCuts(text)
    if not cuts.spans:
        return text, ledger
    shorter = cuts.applied(text)

    def moved(span: Span) -> Span | None:
        start, end = cuts.position(span.start), cuts.position(span.end)
        while start < end - 1 and shorter[start].isspace():  # after a marker at the start of the span
            start += 1
        return Span(start=start, end=end) if start < end else None

    claims = []
    for claim in ledger.claims:
        span = moved(claim.span) or claim.span
        lacking = moved(claim.lacking) if claim.lacking else None
        claims.append(claim.model_copy(update={"span": span, "text": span.of(shorter), "lacking": lacking}))
    return shorter, ledger.model_copy(update={"claims": claims})


def _read_ids(inner: str) -> list[int]:
    """Return the ids between a marker's colon and its bracket; empty if there is any other text."""
    return list(map(int, _ID.findall(inner))) if _IDS.fullmatch(inner) else []
