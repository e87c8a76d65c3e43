"""A claim of several facts taken apart: each part is a sentence of its own, with what it leaves unsaid put in.

"Bennu has a diameter of 490 m, Ryugu of 900 m" says two things, and seldom does one passage say both. What a part
shares with the one before it is not repeated in it: the subject ("and orbits"), what a relative pronoun stands for
("which is"), or all but names and numbers (linguists' gapping: "Ryugu of 900 m"). It is put in, so that each part can
be held against the passages alone.
"""

# ruff: noqa: RUF001 (dashes between clauses)

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis, Item, analyze

__all__ = ["Clause", "clauses_of"]

_JOINT: Final = re.compile(
    r"\s{0,3}[;–—]\s{1,3}|:\s{1,3}|,?\s{1,3}(?:and|but|while|whereas|against|compared (?:with|to)|although|though"
    r"|wohingegen|während|und|aber)\s{1,3}(?:and\s{1,3})?(?:(?:while|whereas|against)\s{1,3})?|,\s{1,3}"
)
_COMPARED: Final = re.compile(
    r"\b(?:the\s+)?(?:more|less|fewer|\w{2,}(?<!moth)(?<!fath)(?<!broth)er)(?:\s+(?:one|of the two))?(?=\s*:)",
    re.IGNORECASE,
)
"""What a lead-in says of the figures behind it: it follows from them, and stands in no passage."""
_RELATIVE: Final = re.compile(r"(?:(?:in |on )?which|who|where|whose|that(?! of))\b\s*", re.IGNORECASE)
_PRONOUN: Final = re.compile(r"(?:it|he|she|they|its|his|her|their)\b\s*", re.IGNORECASE)
_POSSESSIVE: Final = frozenset(["its", "his", "her", "their", "whose"])
_THAT_OF: Final = re.compile(r"^(?:that|those) of\s+", re.IGNORECASE)
_ORDINAL: Final = re.compile(r"the (first|former|second|latter)\b\s*(?!\w+ (?:is|was|are|were)\b)", re.IGNORECASE)
_GLUED: Final = re.compile(r"\w*")
"""What belongs to a name without a space: the 2 of "X2"."""
_ABOUT: Final = re.compile(r"(?:about|some|around|nearly|almost|roughly|at|in|with)\s+", re.IGNORECASE)
_CONCLUSION: Final = re.compile(r",\s*(?:so|hence|thus|therefore|that is|i\.e\.),?\s+(\w+)$", re.IGNORECASE)
_PLACES: Final = ("first", "second", "third", "fourth", "fifth")
_DIGIT: Final = re.compile(rf"\b({'|'.join(_PLACES)}) (?:digit|number|figure)\b", re.IGNORECASE)
_FIGURE: Final = re.compile(r"(?<![\d.,])\d{2,5}(?![\d.,]*\d)")
_FIGURES: Final = re.compile(r"^[\d.,\s]+")
_LEAST: Final = 2
"""Things that a part must tell: words, names or figures."""


@dataclass(frozen=True, slots=True)
class Clause:
    """A part of a claim, as a sentence of its own.

    Args:
        text: What it says, with what the claim leaves unsaid.
        weight: How much of the claim it is: its words, names and figures.
        sound: Whether what it concludes follows ("the second digit of 411, so one").
    """

    text: str
    weight: int
    sound: bool = True


def clauses_of(claim: str, language: str) -> list[Clause]:
    """Take a claim apart; a claim of one fact has one part, itself.

    Args:
        claim: A sentence.
        language: Its language, by its Snowball name.
    """
    text = _COMPARED.sub(" ", claim)
    pieces = _merged(_pieces(text), _Text.of(text, language))
    if len(pieces) < _LEAST:
        return [Clause(claim, 1)]
    found: list[Clause] = []
    told: list[_Text] = []
    for start, end in pieces:
        said, sound = without_conclusion(text[start:end].strip(" ,;."), text[:start])
        piece = _Text.of(said, language)
        told.append(_Text.of(_completed(piece, told), language) if told else piece)
        found.append(Clause(told[-1].text, piece.telling(), sound))
    return found


def without_conclusion(piece: str, before: str) -> tuple[str, bool]:
    """Take off a digit that a part reads out of a figure before it; tell whether it is that digit.

    No passage says what follows from its own rule and from another passage's figure.
    """
    conclusion, digit, figures = _CONCLUSION.search(piece), _DIGIT.search(piece), _FIGURE.findall(before)
    if conclusion is None or digit is None or not figures:
        return piece, True
    place, read = _PLACES.index(digit[1].casefold()), next(iter(analyze(conclusion[1]).items), None)
    if read is None or read.fact is None:
        return piece, True
    return piece[: conclusion.start()], figures[-1][place : place + 1] == f"{read.fact.value:g}"


class _Text(NamedTuple):
    """A text with its names and figures, and its other words of content."""

    text: str
    items: list[_Told]
    words: list[tuple[int, str]]

    @classmethod
    def of(cls, text: str, language: str) -> _Text:
        """Take a text apart."""
        analysis = analyze(text, "", language)
        tokens = analysis.tokens
        inside: set[int] = set()
        items: list[_Told] = []
        for item in _with_first(analysis):
            inside.update(range(item.first, item.last + 1))
            start = item.fact.start if item.fact is not None else tokens[item.first].start
            end = item.fact.end if item.fact is not None else tokens[item.last].end
            end += len(_GLUED.match(text, end)[0])  # type: ignore[index]  # it matches nothing as well
            items.append(_Told(item.kind, start, end, item.fact.dimension if item.fact is not None else ""))
        words = [(token.start, token.stem) for at, token in enumerate(tokens) if token.content and at not in inside]
        return cls(text, items, words)

    def telling(self, start: int = 0, end: int | None = None) -> int:
        """Count what a stretch tells: names, figures and words."""
        end = len(self.text) if end is None else end
        return sum(start <= item.start < end for item in self.items) + sum(start <= at < end for at, _ in self.words)

    def behind(self, start: int, subject: str) -> _Text:
        """Give what stands behind a place, said of a subject."""
        shift = len(subject) + 1 - start
        items = [
            item._replace(start=item.start + shift, end=item.end + shift) for item in self.items if item.start >= start
        ]
        words = [(at + shift, word) for at, word in self.words if at >= start]
        return _Text(f"{subject} {self.text[start:]}", [_Told("name", 0, len(subject), ""), *items], words)

    def names(self) -> list[str]:
        """Give the names, in order."""
        return [self.text[item.start : item.end] for item in self.items if item.kind == "name"]


class _Told(NamedTuple):
    """A name or a figure: its kind, where it stands, and a figure's dimension."""

    kind: str
    start: int
    end: int
    dimension: str


def _with_first(analysis: Analysis) -> list[Item]:
    """Give the items of a text; its first word, which has a capital anyway, is taken for a name."""
    first = analysis.tokens[0] if analysis.tokens else None
    is_free = not analysis.items or analysis.items[0].first > 0
    if first is None or not is_free or not first.content or not analysis.text[first.start].isupper():
        return analysis.items
    return [Item("name", 0, 0, (first.word,)), *analysis.items]


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for joint in _JOINT.finditer(text):
        if joint.start() > start:
            yield start, joint.start()
        start = joint.end()
    if start < len(text):
        yield start, len(text)


def _merged(pieces: Iterator[tuple[int, int]], whole: _Text) -> list[tuple[int, int]]:
    """Join pieces that say nothing of their own with the one before, the first ones and lead-ins with the next."""
    merged: list[tuple[int, int]] = []
    opening: int | None = None
    for start, end in pieces:
        says = _says(whole, start if opening is None else opening, end, is_first=not merged)
        if not says and merged:
            merged[-1] = (merged[-1][0], end)
        elif not says or whole.text[end : end + 1] == ":":
            opening = start if opening is None else opening
        else:
            merged.append((start if opening is None else opening, end))
            opening = None
    if opening is not None:
        begin = merged.pop()[0] if merged else opening
        merged.append((begin, len(whole.text)))
    return merged


def _says(whole: _Text, start: int, end: int, *, is_first: bool) -> bool:
    """Whether a piece tells two things, one of them a name or a figure; the first, more than names."""
    kinds = [item.kind for item in whole.items if start <= item.start < end]
    words = sum(start <= at < end for at, _ in whole.words)
    only_names = is_first and not words and all(kind == "name" for kind in kinds)
    return bool(kinds) and len(kinds) + words >= _LEAST and not only_names


def _completed(piece: _Text, told: Sequence[_Text]) -> str:
    """Give a part with what it leaves unsaid, by the parts before it."""
    frame = told[-1]
    ordinal = _ORDINAL.match(piece.text)
    if ordinal and len(told) >= _LEAST:
        subjects = (told[0].names() or [""])[0], (told[1].names() or [""])[0]
        subject = subjects[ordinal[1] not in ("first", "former")]
        piece = piece.behind(ordinal.end(), subject)
        return _filled(piece, frame) if _is_gapped(piece, frame) else piece.text
    names = next((text.names() for text in reversed(told) if text.names()), [])
    relative, pronoun, that = (form.match(piece.text) for form in (_RELATIVE, _PRONOUN, _THAT_OF))
    if relative and names:
        return _with_subject(piece.text, relative, names[-1])
    if _is_gapped(piece, frame):
        return _filled(piece, frame)
    if that:
        first = next((item.start for item in frame.items if item.kind == "name"), 0)
        return f"{frame.text[:first]}{piece.text[that.end() :]}"
    if pronoun and names:
        return _with_subject(piece.text, pronoun, names[0])
    return piece.text if _has_subject(piece) or not names else f"{names[0]} {piece.text}"


def _is_gapped(piece: _Text, frame: _Text) -> bool:
    """Whether a part has names and figures, and takes what is said of them from the part before."""
    names = [item for item in piece.items if item.kind == "name"]
    if len(piece.items) < _LEAST or not names:
        return False
    own = {word for at, word in piece.words if at > names[0].start}
    shared = {word for _, word in frame.words}
    return own <= shared and not shared <= own


def _has_subject(piece: _Text) -> bool:
    """Whether a part begins with what it speaks of: a name, "the", or a figure that is said of a name."""
    if piece.text[:4].casefold() == "the " or not piece.items:
        return bool(piece.items)
    first, name = piece.items[0], next((item.start for item in piece.items if item.kind == "name"), None)
    word = next((at for at, _ in piece.words), len(piece.text))
    opens = first.start == 0 or _ABOUT.fullmatch(piece.text[: first.start]) is not None
    return opens and name is not None and name < word


def _with_subject(piece: str, word: re.Match[str], subject: str) -> str:
    ending = "'s" if word[0].strip().casefold() in _POSSESSIVE else ""
    return f"{subject}{ending} {piece[word.end() :]}"


def _filled(piece: _Text, frame: _Text) -> str:
    """Give the part before with the names and figures of a gapped one in the places of its own."""
    free = list(frame.items)
    exchanged: list[tuple[_Told, str]] = []
    rest: list[str] = []
    position = 0
    for item in piece.items:
        chunk, position = _THAT_OF.sub("", piece.text[position : item.end].strip(" ,")), item.end
        counterpart = next((other for other in free if _is_alike(item, other)), None)
        if counterpart is None:
            rest.append(chunk)
        else:
            free.remove(counterpart)
            if counterpart.dimension and not item.dimension:
                chunk += " " + _FIGURES.sub("", frame.text[counterpart.start : counterpart.end])
            exchanged.append((counterpart, chunk))
    text = frame.text
    for item, chunk in sorted(exchanged, key=lambda one: -one[0].start):
        text = f"{text[: item.start]}{chunk}{text[item.end :]}"
    return " ".join([text.rstrip(" ."), *rest, piece.text[position:].strip()]).strip()


def _is_alike(item: _Told, other: _Told) -> bool:
    return item.kind == other.kind and (not item.dimension or item.dimension == other.dimension)
