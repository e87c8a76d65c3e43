"""Splits an answer into claims, each of which is checked and cited separately; and the types of their scores.

A claim is a sentence, a whole list item with its marker, or a row of a table. Headings, lead-ins that end in a colon,
table headers and code are not claims. A list item has the lead-in or heading above it as context. Reference markers
belong to the sentence before them; spaces between claims belong to no claim. Google's Answer uses the same segments
("one sentence; one whole list item including its ``*   `` marker"), as observed in a real reply.

One pass over the possible end marks finds the sentences, in linear time. Each mark is judged by the adjacent words, the
open quotation marks and brackets, and a list of abbreviations. (Of the 211 labelled claims in tests/grounding it finds
210, pySBD, which ``_text`` uses, 172.)
"""

# ruff: noqa: RUF001 (typographic and full-width signs are the point)
from __future__ import annotations

import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Final, Protocol, runtime_checkable

from llama_index_agentic_kb._types import Work
from llama_index_agentic_kb.grounding.citations import CITATION, cited_ids
from llama_index_agentic_kb.grounding.features import EMOJI, MAX_CLAIM, Premise, is_negated, words
from llama_index_agentic_kb.schema.grounding import CITATION_THRESHOLD, ConflictKind, Span, Verdict
from llama_index_agentic_kb.search.tokenizing import FUNCTION_WORDS, detect_language


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of an answer: the answer's text at ``span`` (in characters), including markers."""

    text: str
    span: Span
    plain: str  # the text without list marker, reference markers, emoji and emphasis
    cited: tuple[int, ...] = ()  # the ids that its reference markers name, in order
    check_required: bool = True  # whether evidence could support it; False for a question
    context: str = ""  # the lead-in or heading above a list item, or the table header of a row

    @property
    def said(self) -> str:
        """The text checked against evidence: a list item that is short or under a negation includes its context."""
        if not self.context or self.text.lstrip().startswith("|"):
            return self.plain
        is_fragment = len(self.plain.split()) < _FRAGMENT
        return f"{self.context} {self.plain}" if is_fragment or is_negated(self.context) else self.plain


_FRAGMENT: Final = 5  # minimum number of words of a list item that counts as a full sentence
_MARKER: Final = r"\[\s{0,3}ref_id\s{0,3}:[^\[\]\n]{0,120}\]"
_ITEM: Final = re.compile(
    r"(?P<indent>[ \t]*)(?P<marker>[-*+•‣◦▪–・●]|\(?\d{1,3}[.)、]|\(?[a-z][)]|[①-⑳])"
    r"(?:[ \t]+|(?<=[・•‣◦▪●①-⑳、])(?=\S))"
)
_FENCE: Final = re.compile(r"[ \t]{0,3}(`{3,}|~{3,})")
_HEADING: Final = re.compile(r"[ \t]{0,3}#{1,6}(?:[ \t]|$)|\s*(\*\*|__)[^*_\n]{1,200}\1\s*[:：]?\s*$")
"""A heading, or a line that is entirely bold."""
_RULE: Final = re.compile(r"[ \t]{0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,}|={2,})?$")
"""A rule, or an empty line."""
_UNDERLINE: Final = re.compile(r"[ \t]{0,3}(?:=+|-+)[ \t]*$")
_ROW: Final = re.compile(r"[ \t]*\|.*\|[ \t]*$")
_ROW_RULE: Final = re.compile(r"[ \t]*+\|?[ \t]*+:?-+:?[ \t]*+(?:\|[ \t]*+:?-+:?[ \t]*+)*\|?[ \t]*+$")
_QUOTED: Final = re.compile(r"[ \t]{0,3}>[ \t]?")
_LEAD_IN: Final = re.compile(rf"[:：][*_]{{0,3}}(?:\s*{_MARKER})*$", re.IGNORECASE)
_SIGNS: Final = re.compile(
    rf"(?<!\s)\s*+(?:{_MARKER}|{EMOJI.pattern})|[*_`]{{2,3}}|(?<!\w)[*_`]|[*_`](?!\w)", re.IGNORECASE
)
_MARKER_RUN: Final = re.compile(rf"{_MARKER}(?:\s{{0,8}}{_MARKER})*", re.IGNORECASE)
_JOINT: Final = re.compile(r"(?:[,;]? (?:and|but|while|whereas|und|aber|et|mais|y|pero|e|ma)|[,;]) ")
"""A conjunction or comma after which a sentence may state another fact."""
_ATTRIBUTION: Final = re.compile(r"(?:and )?(?:according to|as \w+ (?:in|by)|based on|per|in|from|see)", re.IGNORECASE)
_LEAST_BEGINNING: Final = 4  # minimum number of words of a beginning that is checked separately
_SAMPLE: Final = 4_000
_SAYS: Final = re.compile(r"\w")


def split_claims(answer: str) -> list[Claim]:
    """Return the claims of a plain or Markdown text in order, in linear time; sentences end with full stops or 。."""

    @cache
    def language() -> str:  # of the answer; it matters only where a point may belong to a word
        return detect_language(re.findall(r"[^\W\d_]+", answer[:_SAMPLE].casefold()))

    found: list[Claim] = []
    for block in _blocks(answer):
        text, start = answer[block.start : block.end], 0
        for end, following in [(len(text), len(text))] if block.whole else sentence_ends(text, language):
            stretch = text[start:end].strip()
            plain = "" if _LEAD_IN.search(stretch[-400:]) else plain_claim(stretch)
            if _SAYS.search(plain):  # not markers alone
                first = block.start + text.index(stretch, start, end)
                is_question = plain.rstrip("\"'”’»«」』)").endswith(("?", "？"))
                span = Span(start=first, end=first + len(stretch))
                found.append(Claim(stretch, span, plain, tuple(cited_ids(stretch)), not is_question, block.context))
            start = following
    return found


def plain_claim(text: str) -> str:
    """Return a claim's text without list marker, reference markers, emoji, table bars and emphasis."""
    item = _ITEM.match(text)
    rest = text[item.end() :] if item else text
    if _ROW.match(rest):
        rest = ", ".join(map(str.strip, rest.strip().strip("|").split("|")))
    return " ".join(_SIGNS.sub("", CITATION.sub("", rest)).split())


def marked_parts(claim: Claim) -> list[Claim]:
    """Split a claim after each run of ``[ref_id:N]`` markers; return no parts where it has fewer than two runs."""
    ends = list(map(re.Match.end, _MARKER_RUN.finditer(claim.text)))
    found = []
    for start, end in pairwise([0, *ends[:-1], len(claim.text)] if ends[1:] else ()):
        stretch = claim.text[start:end]
        plain = plain_claim(stretch).strip(" ,;:")
        if _SAYS.search(plain):
            found.append(Claim(stretch, claim.span, plain, tuple(cited_ids(stretch)), context=claim.context))
    if any(map(_ATTRIBUTION.fullmatch, map(attrgetter("plain"), found))):  # its marker stands before what it is about
        return []
    return found if len(found) > 1 else []


def beginnings(claim: Claim) -> list[Claim]:
    """Return the beginnings of a claim up to each marker or conjunction, to find the fact that lacks support."""
    cuts = {match.end() for match in _MARKER_RUN.finditer(claim.text)}
    cuts |= {match.start() for match in _JOINT.finditer(claim.text)}
    found = []
    for cut in sorted(one for one in cuts if one <= MAX_CLAIM):  # the scorers read no further
        plain = plain_claim(claim.text[:cut])
        after = plain_claim(claim.text[cut : cut + MAX_CLAIM])
        if _SAYS.search(after) and len(plain.split()) >= _LEAST_BEGINNING:
            span = Span(start=claim.span.start, end=claim.span.start + cut)
            found.append(Claim(claim.text[:cut], span, f"{plain.rstrip(' .,;:')}.", context=claim.context))
    return found


# -- blocks ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    """Lines that form one unit; if ``whole`` (a list item or a row), one claim."""

    start: int
    end: int
    whole: bool = False
    context: str = ""


@dataclass(slots=True)
class _Outline:
    """The blocks that were read, and what stands above the next line."""

    blocks: list[_Block] = field(default_factory=list)
    current: _Block | None = None  # the paragraph or list item that the next line may continue
    heading: str = ""
    lead_in: str = ""
    head: str | None = None  # the header of the current table

    def row(self, text: str, start: int) -> bool:
        """Read a line with a bar if it belongs to a table; return whether it does."""
        is_rule = _ROW_RULE.match(text) is not None
        if not (_ROW.match(text) or (is_rule and self.head is not None)):
            return False
        self.current = None
        if not is_rule and self.head is None:
            self.head = plain_claim(text)
        elif not is_rule:
            first = start + len(text) - len(text.lstrip())
            self.blocks.append(_Block(first, start + len(text), whole=True, context=self.head or ""))
        return True

    def line(self, text: str, start: int) -> None:
        """Read a line outside of tables."""
        item, above = _ITEM.match(text), self.current
        if above and not above.whole and _UNDERLINE.match(text):
            self.blocks.pop()  # the text above the underline is a heading
            self.current = None
        elif _RULE.match(text):
            self.current = None
        elif _HEADING.match(text):
            self.current, self.lead_in = None, ""
            self.heading = plain_claim(text.strip().lstrip("#").strip()).rstrip(":：") + ":"
        else:
            if item:
                above = _Block(start + item.end("indent"), 0, whole=True, context=self.lead_in or self.heading)
                self.blocks.append(above)
            elif not above or (above.whole and not text[:1].isspace()):
                above, self.lead_in = _Block(start, 0), ""
                self.blocks.append(above)
            above.end = start + len(text)
            self.current = above
            if _LEAD_IN.search(text[-400:]):
                self.lead_in, self.current = plain_claim(text), None


def _blocks(answer: str) -> list[_Block]:
    """Return the blocks of a Markdown answer that contain claims: paragraphs, list items and table rows."""
    outline = _Outline()
    for text, start, begins in _lines(answer):
        if begins:
            outline.current = None
        if "|" not in text or not outline.row(text, start):
            outline.head = None
            outline.line(text, start)
    return outline.blocks


def _lines(answer: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the lines outside of code, with their positions, and whether one is quoted or the first after code."""
    position, fence, is_first = 0, "", False
    for line in answer.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
        elif mark:
            fence, is_first = mark[1][:3], True
        else:
            quote = _QUOTED.match(line)
            start = quote.end() if quote else 0
            yield line[start:].rstrip(), position + start, is_first or quote is not None
            is_first = False
        position += len(line)


# -- sentences ---------------------------------------------------------------------------------------------------------

_STOP: Final = re.compile(
    r"(?P<mark>[.!?…。！？．｡]+|(?<=[^\W\d_])\s\.(?:\s\.){2})(?P<closing>(?:[\"'”’」』）)】》〉*_]|[“«»](?!\w)){0,6})"
    rf"(?P<cited>(?:[ \t]{{0,3}}{_MARKER})*)(?P<space>\s*)(?=[\"'“„«»(\[*_]{{0,4}}(?P<word>[\w’']{{0,24}}))",
    re.IGNORECASE,
)
"""A mark that may end a sentence, what closes and cites after it, and the word that follows."""
_WIDE: Final = frozenset("。！？．｡")
_WIDE_CHAR: Final = re.compile("[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]")
"""A character or punctuation mark of a script without spaces."""
_OPENING: Final = {"“": "”", "„": "“", "「": "」", "『": "』", "（": "）", "(": ")", "»": "«", "«": "»", "【": "】"}
_BRACKET: Final = re.compile('[“”„«»「」『』（）()【】"]')
_DEEPEST: Final = 8
_LONGEST_QUOTE: Final = 400  # maximum characters of a quotation or bracket that keeps its sentences together
_WORD_BEFORE: Final = re.compile(r"[\w.’'-]{0,24}\Z")
_ORDINAL_DIGITS: Final = 2
_NUMBERED: Final = words(
    "c no nos p pp fig figs vol vols eq eqs ch sec art abs abb bd jan feb mar apr jun jul aug sep sept oct okt nov "
    "dec dez"
)
"""Words that are abbreviations before a number."""
_ACRONYM: Final = re.compile(r"(?:[^\W\d_]\.){1,6}[^\W\d_]\Z|str\Z")
"""Letters with points, or the end of a German street."""
_ABBREVIATIONS: Final = words(
    "dr mr mrs ms prof rev hon st mt ft sen rep gov gen lt col maj capt sgt cpl adm cmdr pres supt messrs mme mlle vs "
    "al cf ca approx viz resp dept univ est hr fr hrn frl nr bzw vgl s ggf evtl inkl zzgl geb gest bd hrsg jh jhd "
    "mio mrd rd bspw sog tel sr sra srta dra ud uds núm pág mgr dott sig ing av inc co corp ltd llc bros jr etc esq "
    "ph.d ff usw ft hrs kg km cm mm lb lbs oz mph am pm ag"
)
"""Abbreviations in lower case, without their last point; they end a sentence only before a function word."""


def sentence_ends(text: str, language: Callable[[], str]) -> Iterator[tuple[int, int]]:
    """Yield the end of each sentence of a paragraph and the start of the next; in German, "3." is an ordinal."""
    stretches = _closed_stretches(text) if _BRACKET.search(text) else []
    position = 0
    for stop in _STOP.finditer(text):
        around = bisect_right(stretches, stop.start(), key=operator.itemgetter(0)) - 1
        quoted = stretches[around] if around >= 0 and stop.start() < stretches[around][1] else None
        if _ends_quoted(text, stop, quoted, position) if quoted else _ends(text, stop, position, language):
            position = stop.end()
            yield stop.end("cited"), position
    if position < len(text):
        yield len(text.rstrip()), len(text)


def _ends_quoted(text: str, stop: re.Match[str], quoted: tuple[int, int], position: int) -> bool:
    """Return whether a mark inside quotation marks or brackets ends the sentence around them."""
    if stop.end("cited") < quoted[1]:
        return False
    opens = text[position : quoted[0]].strip(" *_") == ""
    following, is_apart = text[stop.end() : stop.end() + 1], stop.end("closing") < stop.end()
    if text[quoted[0]] in "(（【":
        return opens and not following.islower()
    if text[quoted[0]] in "「『":  # Hiragana after the quotation is a particle that introduces the speaker
        return not re.match("[\u3041-\u3096、，,]", following)
    if stop["mark"][0] in _WIDE or _WIDE_CHAR.match(following):  # in Chinese the speaker follows directly
        return bool(stop["space"]) or not following or following in _OPENING or not opens
    return (is_apart or not following) and not following.islower()


def _ends(text: str, stop: re.Match[str], position: int, language: Callable[[], str]) -> bool:
    """Return whether a mark outside of any quotation ends a sentence."""
    mark, word, following = stop["mark"].lstrip(), stop["word"], text[stop.end() : stop.end() + 1]
    if mark[0] in _WIDE or not following or (mark[0] in "!?…" and _WIDE_CHAR.match(following)):
        return True
    if stop.end("closing") == stop.end() or following in ",;:)" or word.islower():
        return False
    return mark != "." or bool(stop["closing"]) or _ends_at_point(text, stop.start(), position, word, language())


def _ends_at_point(text: str, point: int, position: int, following: str, language: str) -> bool:
    """Return whether a single point before a word that is not in lower case ends a sentence."""
    before: str = _WORD_BEFORE.findall(text, max(position, point - 24), point)[0]
    plain = before.casefold().lstrip("’'")
    starts = _begins(following, language)
    if before.isdigit():
        ahead = text[position : point - len(before)].strip()  # in running text, "1. ..." is the number of an item
        is_ordinal = language == "german" and len(before) <= _ORDINAL_DIGITS and not starts
        return not is_ordinal and ahead[-1:] not in ("", ":", ";")
    if len(before) == 1 and before.isalpha() and (before.isupper() or language == "german"):  # an initial, or 37 °C
        return starts or text[point - 2 : point - 1] == "°"
    is_short = plain in _ABBREVIATIONS or (plain in _NUMBERED and following[:1].isdigit())
    return starts or not (is_short or _ACRONYM.search(plain))


def _begins(word: str, language: str) -> bool:
    """Return whether a word is one with which sentences begin."""
    return word.casefold() in FUNCTION_WORDS.get(language, ()) and (len(word) > 1 or word in "AI")


def _closed_stretches(text: str) -> list[tuple[int, int]]:
    """Return the outermost quoted or bracketed parts within ``_LONGEST_QUOTE`` characters, in order."""
    found: list[tuple[int, int]] = []
    open_: list[tuple[str, int]] = []
    for match in _BRACKET.finditer(text):
        sign, at = match[0], match.start()
        while open_ and (at - open_[0][1] > _LONGEST_QUOTE or len(open_) > _DEEPEST):
            open_.pop(0)
        if any(sign in closers for closers, _ in open_):
            while sign not in open_[-1][0]:
                open_.pop()
            start = open_.pop()[1]
            while found and found[-1][0] > start:
                found.pop()
            found.append((start, at + 1))
        elif sign == '"' or sign in _OPENING:
            open_.append((_OPENING.get(sign, sign), at))
    return found


# -- scores ------------------------------------------------------------------------------------------------------------

PARTIAL_THRESHOLD: Final = 0.35  # minimum score of a partially supported claim


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of one passage for a claim."""

    premise: int  # index of the passage
    score: float  # how far the passage alone supports the claim, 0 to 1
    spans: tuple[Span, ...] = ()
    """Positions of the supporting sentences in the passage's text, best first; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A statement of a passage that differs from the claim: its ``quote``, at ``span`` in the passage's text."""

    kind: ConflictKind
    claimed: str
    quote: str
    premise: int
    span: Span
    strength: float = 1.0  # confidence that the passage contradicts the claim, 0 to 1


@dataclass(slots=True)
class ClaimScore:
    """The result of scoring one claim.

    Args:
        score: How far the passages together support the claim, 0 to 1. None if the scorer could not judge it.
        verdict: The verdict for this score.
        evidence: Evidence by passage, best first; irrelevant passages may be missing.
        rivals: Statements of passages that differ from the claim.
        left_out: Whether the scorer skipped the claim, for example a claim missing from a model's reply.
        parts: Evidence of passages that support only a part of the claim; added by ``ground``.
        lacking: Position in the answer of the part that lacks support; added by ``ground``. None if unknown.
    """

    score: float | None
    verdict: Verdict
    evidence: list[Evidence] = field(default_factory=list)
    rivals: list[Rival] = field(default_factory=list)
    left_out: bool = False
    parts: list[Evidence] = field(default_factory=list)
    lacking: Span | None = None


@runtime_checkable
class ClaimScorer(Protocol):
    """Scores claims against passages."""

    name: str

    def score(
        self, claims: Sequence[Claim], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> Work[list[ClaimScore]]:
        """Return one score for each claim, in order; ``deadline`` is a value of ``time.monotonic()``.

        Raises:
            DeadlineExceededError: The deadline has passed.
            AgenticKBError: The scorer failed.
        """
        ...


def verdict_of(score: float, *, contradicted: bool = False) -> Verdict:
    """Return the verdict for a score from 0 to 1; ``contradicted`` is True if a passage contradicts the claim."""
    if score >= CITATION_THRESHOLD:
        return Verdict.SUPPORTED
    if contradicted:
        return Verdict.CONTRADICTED
    return Verdict.PARTIALLY_SUPPORTED if score >= PARTIAL_THRESHOLD else Verdict.UNSUPPORTED
