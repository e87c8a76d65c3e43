"""What an answer may show of its citations and links, checked in a whole text or in a stream.

A language model may write ``[ref_id: 3]``, ``[ref_id:0, 2]``, an N that was not in its prompt, or citations in a style
of its own. Valid ids become ``[ref_id:0][ref_id:2]``; the others are removed and counted.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from operator import attrgetter
from typing import Final

from llama_index_agentic_kb.guard.text import HiddenFilter, TextFilter
from llama_index_agentic_kb.schema.grounding import GroundingLedger, Span


class Markers(StrEnum):
    """How an answer's reference markers are processed."""

    KEEP = "keep"  # keep the markers: the N of ``[ref_id:N]`` is the index of a passage in the evidence
    RENUMBER = "renumber"  # number the markers in order of appearance, and sort the evidence in the same order
    STRIP = "strip"  # remove the markers; the grounding ledger lists the citations


# Every repetition is bounded, which limits the buffered text and the search time.
_MARKER: Final = re.compile(r"(?P<space>[ \t]{0,8})\[\s{0,3}ref_id\s{0,3}:(?P<ids>[^\[\]\n]{0,120})\]", re.IGNORECASE)
_OPEN: Final = re.compile(
    r"[ \t]{0,8}(?:\[\s{0,3}(?:r(?:e(?:f(?:_(?:i(?:d(?:\s{0,3}(?::[^\[\]\n]{0,120})?)?)?)?)?)?)?)?)?\Z", re.IGNORECASE
)
"""The end of a text that may become a marker, with the spaces before it; always matches the empty end."""
_BEGUN: Final = re.compile(r"\s*\[\s*ref_id", re.IGNORECASE)
_IDS: Final = re.compile(r"\s*\d{1,9}(?:\s*[,;]\s*(?:ref_id\s*:\s*)?\d{1,9})*\s*", re.IGNORECASE)
_ID: Final = re.compile(r"\d{1,9}")
_LONGEST: Final = 160  # characters examined before a marker; at least the longest match of ``_OPEN``


@dataclass(eq=False)
class MarkerFilter(TextFilter):
    """Normalizes the markers of a text and removes invalid ids, piece by piece.

        markers = MarkerFilter({0, 1})
        text = markers.feed("Paris [ref_") + markers.feed("id:7] [ref_id:1].") + markers.close()
        assert (text, markers.removed) == ("Paris [ref_id:1].", 1)

    A marker without ids counts as one removed id; an incomplete one at the end is removed.

    Args:
        valid: The ids that a marker may name.
        style: How valid markers are processed.
    """

    valid: Collection[int]
    style: Markers = Markers.KEEP
    cited: list[int] = field(default_factory=list, init=False)  # the valid ids found so far, in order of appearance
    removed = 0  # number of ids removed so far
    _given = ""  # the end of the emitted text

    def feed(self, piece: str, *, final: bool = False) -> str:
        """Filter a piece of the text, the last one if ``final``; see ``TextFilter``."""
        text = self._held + piece
        begun = _OPEN.search(text)
        end = len(text) if begun is None else begun.start()
        at, pieces = 0, [self._given]
        for marker in _MARKER.finditer(text, 0, end):
            ids = _read_ids(marker["ids"])
            named = list(filter(self.valid.__contains__, dict.fromkeys(ids)))
            self.removed += max(len(ids), 1) - sum(map(ids.count, named))
            self.cited = list(dict.fromkeys([*self.cited, *named]))
            if self.style is Markers.RENUMBER:
                named = list(map(self.cited.index, named))
            kept = "" if self.style is Markers.STRIP else "".join(map("[ref_id:{}]".format, named))
            pieces.append(text[at : marker.start()])
            pieces.append(marker["space"] + kept if kept else _gap("".join(pieces[-3:])))
            at = marker.end()
        self._held, given = text[end:], "".join(pieces[1:]) + text[at:end]
        if final:
            is_begun = _BEGUN.match(self._held) is not None
            self.removed += is_begun
            given += _gap((self._given + given)[-_LONGEST:]) if is_begun else self._held
            self._held = ""
        self._given = (self._given + given)[-_LONGEST:]
        return given


def _gap(before: str) -> str:
    """Return ``[]`` if removing a marker could join the text around it into a marker: ``[ref_[ref_id:9]id:7]``."""
    begun = _OPEN.search(before[-_LONGEST:])
    return "[]" if begun is not None and "[" in begun[0] else ""


def clean_markers(text: str, valid: Collection[int]) -> tuple[str, int]:
    """Return a text with normalized markers and only the ``valid`` ids, and the number of removed ids."""
    markers = MarkerFilter(valid)
    return markers.feed(text, final=True), markers.removed


def cited_ids(text: str) -> list[int]:
    """Return the ids that a text's markers name, each once, in order of first mention."""
    found: dict[int, None] = {}
    for marker in _MARKER.finditer(text):
        found |= dict.fromkeys(_read_ids(marker["ids"]))
    return list(found)


class MarkerCuts:
    """Maps positions of a text to positions after its markers, and the spaces before them, are removed."""

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

    def moved(self, start: int, end: int, shorter: str) -> tuple[int, int]:
        """Return a span's bounds in the text without markers, ``shorter``, without the space after a leading marker."""
        start, end = self.position(start), self.position(end)
        while start < end - 1 and shorter[start : start + 1].isspace():
            start += 1
        return start, end


def strip_markers(text: str, ledger: GroundingLedger) -> tuple[str, GroundingLedger]:
    """Return an answer without its reference markers, and its ledger with the spans adjusted.

    Claims keep their ``cited`` ids. The changes of a repair refer to the answer before it and are not adjusted.
    """
    cuts = MarkerCuts(text)
    if not cuts.spans:
        return text, ledger
    bounds = [0, *(bound for span in cuts.spans for bound in span), len(text)]
    shorter = "".join(text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True))

    def moved(span: Span) -> Span | None:
        start, end = cuts.moved(span.start, span.end, shorter)
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


# -- citations in a model's own style ---------------------------------------------------------------------------------

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
_REST: Final = re.compile(r"(?<=\d)[^\d,;\] ].*")  # text after the number of a server's own citation: ``【1†source】``
_OWN_OPEN: Final = re.compile(
    r"[ \t]?(?:\[[^\]\n]{0,60}\]?|【[^】\n]{0,60}】?|"
    r"(?:\(\d[\d,; ]{0,40}\)){0,9}\((?:[a-z]{0,10}[ .#:]{0,2})?[\d,; ]{0,40}\)?)?\Z",
    re.IGNORECASE,
)
"""The end of a text that may become a citation; always matches the empty end."""


_FENCE: Final = "```"
_WRAPPING: Final = re.compile(r"\A\s*```(?:markdown|md)\n", re.IGNORECASE)
_WRAPPING_OPEN: Final = re.compile(
    r"\s*(?:`{0,2}|```(?:m(?:d|a(?:r(?:k(?:d(?:o(?:w(?:n)?)?)?)?)?)?)?)?)", re.IGNORECASE
)
"""The start of a text that may become the fence."""


@dataclass(eq=False)
class OwnCitations(TextFilter):
    """Converts citations such as ``[1]``, ``[^1]``, ``[Source 1]``, ``(ref 1)``, ``【1】``, piece by piece.

    They become ``[ref_id:N]`` if their numbers are unambiguous: a 0 shows that the model counts from 0, a number beyond
    the last id that it counts from 1. Until that is known, or if no passage has the number, they are removed and
    counted. In code, in links, in footnotes and at the start of a line, such numbers stay text.

    Args:
        valid: The ids of the passages that may be cited; if empty, the text is not changed.
    """

    valid: Collection[int]
    removed = 0  # number of citations removed so far
    _base: int | None = field(default=None, init=False)  # the number of the first passage, once it is known
    _last = ""  # the last character that was read
    _in_code = False

    def feed(self, piece: str, *, final: bool = False) -> str:
        """Filter a piece of the text, the last one if ``final``; see ``TextFilter``."""
        text = self._held + piece
        begun = None if final else _OWN_OPEN.search(text)
        end = len(text) if begun is None else begun.start()
        before, pieces, at = self._last, list[str](), 0
        for found in CITATION.finditer(before + text) if self.valid else ():  # it needs the preceding character
            start, stop = found.start() - len(before), found.end() - len(before)
            if stop > end or start < at:
                break
            self._in_code ^= text.count("`", at, start) % 2 == 1
            pieces += [text[at:start], found[0] if self._in_code else self._marker(found[0])]
            at = stop
        self._in_code ^= text.count("`", at, end) % 2 == 1
        self._last, self._held = (before + text[:end])[-1:], text[end:]
        return "".join(pieces) + text[at:end]

    def _marker(self, citation: str) -> str:
        """Return a citation as reference markers, without the numbers that name no known passage."""
        ids = []
        for number in map(int, _DIGITS.findall(_REST.sub("", citation))):
            if self._base is None and (number in self.valid) != (number - 1 in self.valid):
                self._base = 0 if number in self.valid else 1
            passage = -1 if self._base is None else number - self._base
            if passage in self.valid:
                ids.append(passage)
            else:
                self.removed += 1
        space = citation[0] if citation[0] in " \t" else ""
        return space + "".join(f"[ref_id:{number}]" for number in dict.fromkeys(ids)) if ids else ""


# -- whole answers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """The reference ids that markers may name, and the addresses that links may lead to."""

    ref_ids: Collection[int] = ()
    addresses: Collection[str] = ()


class WrappingFilter(TextFilter):
    """Removes a Markdown fence around the whole answer, in which nothing would be a citation."""

    _wrapped: bool | None = None  # None: not known yet; False: there is no fence, or it has ended
    _nested = False  # whether a fence inside of the answer is open

    def feed(self, piece: str, *, final: bool = False) -> str:
        """Filter a piece of the text, the last one if ``final``; see ``TextFilter``."""
        if self._wrapped is False:
            return piece
        self._held += piece
        if self._wrapped is None:
            if not final and _WRAPPING_OPEN.fullmatch(self._held):
                return ""
            body = _WRAPPING.sub("", self._held)
            self._wrapped, self._held = body != self._held, body
        shown = self._lines() if self._wrapped else ""
        if self._wrapped and not final:
            return shown
        rest, self._held = self._held, ""
        return shown if self._wrapped and not self._nested and rest.strip() == _FENCE else shown + rest

    def _lines(self) -> str:
        """Return the whole lines that are held, up to the end of the fence."""
        shown = ""
        while self._wrapped and "\n" in self._held:
            line, _, self._held = self._held.partition("\n")
            if line.strip() == _FENCE and not self._nested:
                self._wrapped = False
                break
            if line.lstrip().startswith(_FENCE):
                self._nested = line.strip() != _FENCE
            shown += line + "\n"
        return shown


@dataclass(frozen=True, slots=True)
class CheckedText:
    """A filtered text with the numbers of what was removed."""

    text: str
    markers: int = 0  # reference ids that name no passage
    links: int = 0  # links that lead to no reference
    hidden: int = 0  # hidden characters


class AnswerFilter(TextFilter):
    """Filters an answer piece by piece: hidden characters, a fence around it, own citations, markers, then links."""

    def __init__(self, rules: AnswerRules) -> None:
        from llama_index_agentic_kb.guard.links import LinkFilter  # noqa: PLC0415 (its patterns take 7 ms)

        valid = frozenset(rules.ref_ids)
        self._hidden, self._own = HiddenFilter(), OwnCitations(valid)
        self._markers, self._links = MarkerFilter(valid), LinkFilter(rules.addresses)
        self._stages = (self._hidden, WrappingFilter(), self._own, self._markers, self._links)

    def feed(self, piece: str, *, final: bool = False) -> str:
        """Filter a piece of the text, the last one if ``final``; see ``TextFilter``."""
        for stage in self._stages:
            piece = stage.feed(piece, final=final)
        return piece

    def checked(self, text: str) -> CheckedText:
        """Filter a text to its end, such as a whole answer."""
        for stage in self._stages:
            text = stage.feed(text, final=True)
        return CheckedText(text, self._markers.removed + self._own.removed, self._links.removed, self._hidden.removed)


def clean_values(value: object, rules: AnswerRules) -> tuple[object, CheckedText]:
    """Return JSON data with every text filtered, and the total counts of what was removed (with an empty ``text``)."""
    taken: list[CheckedText] = []

    def walk(part: object) -> object:
        if isinstance(part, str):
            taken.append(AnswerFilter(rules).checked(part))
            return taken[-1].text
        if isinstance(part, list):
            return [walk(item) for item in part]
        return {key: walk(item) for key, item in part.items()} if isinstance(part, dict) else part

    cleaned = walk(value)
    return cleaned, CheckedText("", *(sum(map(attrgetter(name), taken)) for name in ("markers", "links", "hidden")))
