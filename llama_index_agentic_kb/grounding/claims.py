"""The claims of an answer: what is checked one by one, and cited one by one.

A claim is a sentence, a whole list item with its marker, or a row of a table; headings, lead-ins that end in a colon,
a table's head and code are none. A list item knows the lead-in or heading that it stands under. Reference markers
belong to the sentence before them; the space between claims belongs to none. This is how Google's Answer segments ("one
sentence; one whole list item including its ``*   `` marker"), read off a real reply.
"""

# ruff: noqa: RUF001 (typographic and full-width signs are the point)
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from llama_index_agentic_kb.grounding.citations import cited_ids
from llama_index_agentic_kb.grounding.features import is_negated
from llama_index_agentic_kb.grounding.sentences import MARKER, sentence_ends
from llama_index_agentic_kb.schema.grounding import Span
from llama_index_agentic_kb.search.tokenizing import detect_language

__all__ = ["Claim", "marked_parts", "plain_claim", "split_claims"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of an answer.

    Args:
        text: What stands at ``span``, markers included.
        span: In the answer, in characters.
        plain: What it says: without list marker, reference markers and signs of emphasis.
        cited: The ids that its reference markers name, in order.
        check_required: Whether it says something that evidence could bear out; a question does not.
        context: What it is said under, for a list item or a row: the lead-in or heading, or the table's head.
    """

    text: str
    span: Span
    plain: str
    cited: tuple[int, ...] = ()
    check_required: bool = True
    context: str = ""

    @property
    def said(self) -> str:
        """What is held against evidence: a fragment of a list, and one under a negation, with what stands above it."""
        if not self.context or self.text.lstrip().startswith("|"):
            return self.plain
        is_fragment = len(self.plain.split()) < _FRAGMENT
        return f"{self.context} {self.plain}" if is_fragment or is_negated(self.context) else self.plain


_FRAGMENT: Final = 5
"""Words from which a list item is taken for a sentence of its own."""
_ITEM: Final = re.compile(
    r"(?P<indent>[ \t]*)(?P<marker>[-*+•‣◦▪–・●]|\(?\d{1,3}[.)、]|\(?[a-z][)]|[①-⑳])"
    r"(?:[ \t]+|(?<=[・•‣◦▪●①-⑳、])(?=\S))"
)
_FENCE: Final = re.compile(r"[ \t]{0,3}(`{3,}|~{3,})")
_HEADING: Final = re.compile(r"[ \t]{0,3}#{1,6}(?:[ \t]|$)")
_BOLD_LINE: Final = re.compile(r"\s*(\*\*|__)[^*_\n]{1,200}\1\s*[:：]?\s*$")
_RULE: Final = re.compile(r"[ \t]{0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,}|={2,})$")
_UNDERLINE: Final = re.compile(r"[ \t]{0,3}(?:=+|-+)[ \t]*$")
_ROW: Final = re.compile(r"[ \t]*\|.*\|[ \t]*$")
_ROW_RULE: Final = re.compile(r"[ \t]*+\|?[ \t]*+:?-+:?[ \t]*+(?:\|[ \t]*+:?-+:?[ \t]*+)*\|?[ \t]*+$")
_QUOTED: Final = re.compile(r"[ \t]{0,3}>[ \t]?")
_LEAD_IN: Final = re.compile(rf"[:：][*_]{{0,3}}(?:\s*{MARKER})*$", re.IGNORECASE)
_MARKER_OR_SIGN: Final = re.compile(rf"(?<!\s)\s*+{MARKER}|[*_`]{{2,3}}|(?<!\w)[*_`]|[*_`](?!\w)", re.IGNORECASE)
_MARKER_RUN: Final = re.compile(rf"{MARKER}(?:\s{{0,8}}{MARKER})*", re.IGNORECASE)
_WORDS: Final = re.compile(r"[^\W\d_]+")
_SAMPLE: Final = 4_000

_WORD_SIGN: Final = re.compile(r"\w")


def split_claims(answer: str) -> list[Claim]:
    """Return the claims of an answer, in order. Takes time linear in its length.

    Args:
        answer: Plain text or Markdown, in any language that ends its sentences with points or with 。.
    """
    german = detect_language([word.casefold() for word in _WORDS.findall(answer[:_SAMPLE])]) == "german"
    return [claim for block in _blocks(answer) for claim in _claims_of(answer, block, german=german)]


def plain_claim(text: str) -> str:
    """Return what a claim says, without list marker, reference markers, bars of a table and signs of emphasis."""
    item = _ITEM.match(text)
    rest = text[item.end() :] if item else text
    if _ROW.match(rest):
        rest = ", ".join(cell.strip() for cell in rest.strip().strip("|").split("|"))
    return " ".join(_MARKER_OR_SIGN.sub("", rest).split())


def marked_parts(claim: Claim) -> list[Claim]:
    """Return the stretches of a claim that end in reference markers, where these stand in several places."""
    ends = [match.end() for match in _MARKER_RUN.finditer(claim.text)]
    stretches = [claim.text[start:end] for start, end in pairwise([0, *ends])]
    found = [
        Claim(stretch, claim.span, plain.strip(" ,;:"), tuple(cited_ids(stretch)), context=claim.context)
        for stretch in stretches
        if _WORD_SIGN.search(plain := plain_claim(stretch))
    ]
    return found if len(found) > 1 else []


@dataclass(slots=True)
class _Block:
    """Lines that belong together; an item or a row is one claim."""

    start: int
    end: int
    whole: bool = False
    context: str = ""


def _claims_of(answer: str, block: _Block, *, german: bool) -> Iterator[Claim]:
    text = answer[block.start : block.end]
    if block.whole:
        yield from _claim(answer, block.start, block.end, block.context)
        return
    start = 0
    for end, following in sentence_ends(text, german=german):
        yield from _claim(answer, block.start + start, block.start + end, block.context)
        start = following


def _claim(answer: str, start: int, end: int, context: str) -> Iterator[Claim]:
    text = answer[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    if not text or _LEAD_IN.search(text[-400:]) or not _WORD_SIGN.search(text):
        return
    plain = plain_claim(text)
    if not _WORD_SIGN.search(plain):  # markers alone
        return
    span = Span(start=start, end=start + len(text))
    yield Claim(text, span, plain, tuple(cited_ids(text)), _needs_check(plain), context)


def _needs_check(plain: str) -> bool:
    return not plain.rstrip("\"'”’»«」』)").endswith(("?", "？"))


@dataclass(slots=True)
class _Line:
    start: int
    end: int
    text: str


def _lines(answer: str) -> Iterator[_Line]:
    position = 0
    for line in answer.splitlines(keepends=True):
        bare = line.rstrip()
        yield _Line(position, position + len(bare), bare)
        position += len(line)


def _blocks(answer: str) -> Iterator[_Block]:
    """Return the blocks of an answer that hold claims."""
    yield from _Reader().read(answer)


class _Reader:
    """Reads an answer line by line; holds the block that may go on."""

    def __init__(self) -> None:
        self._open: _Block | None = None
        self._heading = ""
        self._lead_in = ""
        self._head: _Line | None = None
        self._in_table = False

    def read(self, answer: str) -> Iterator[_Block]:
        fence = ""
        for line in _lines(answer):
            mark = _FENCE.match(line.text)
            if fence:
                fence = "" if mark and mark[1].startswith(fence) else fence
                continue
            if mark:
                fence = mark[1][:3]
                yield from self._close()
                continue
            yield from self._take(line)
        yield from self._close()

    def _take(self, line: _Line) -> Iterator[_Block]:
        quote = _QUOTED.match(line.text)
        if quote:
            yield from self._close()
            line = _Line(line.start + quote.end(), line.end, line.text[quote.end() :])
        if _ROW.match(line.text) or (self._in_table and _ROW_RULE.match(line.text) and "|" in line.text):
            yield from self._row(line)
            return
        yield from self._leave_table()
        if self._open and not self._open.whole and _UNDERLINE.match(line.text) and line.text:
            self._open = None  # what stood above the line is a heading
            return
        if _HEADING.match(line.text) or _BOLD_LINE.match(line.text):
            yield from self._close()
            self._heading, self._lead_in = plain_claim(line.text.strip().lstrip("#").strip()).rstrip(":：") + ":", ""
            return
        if not line.text or _RULE.match(line.text):
            yield from self._close()
            return
        item = _ITEM.match(line.text)
        if item:
            yield from self._close()
            context = self._lead_in or self._heading
            self._open = _Block(line.start + item.end("indent"), line.end, whole=True, context=context)
        elif self._open and (not self._open.whole or line.text[:1].isspace()):
            self._open.end = line.end
        else:
            yield from self._close()
            self._open, self._lead_in = _Block(line.start, line.end), ""
        if _LEAD_IN.search(line.text[-400:]):
            self._lead_in = plain_claim(line.text)
            yield from self._close()

    def _row(self, line: _Line) -> Iterator[_Block]:
        yield from self._close()
        if _ROW_RULE.match(line.text):
            return
        if not self._in_table:
            self._in_table, self._head = True, line
            return
        head = plain_claim(self._head.text) if self._head else ""
        indent = len(line.text) - len(line.text.lstrip())
        yield _Block(line.start + indent, line.end, whole=True, context=head)

    def _leave_table(self) -> Iterator[_Block]:
        self._in_table, self._head = False, None
        yield from ()

    def _close(self) -> Iterator[_Block]:
        block, self._open = self._open, None
        if block is not None:
            yield block
