"""Changes one thing in a claim: a number, date, name, unit, its polarity, who does what, or whose facts they are."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Final

from tests.benchmarks.grounding_passages import NUMBER, WORDS, Document, has_month

__all__ = ["CHANGES", "merge_facts"]

_YEAR: Final = re.compile(r"(?<![\d,.])(?<!\d-)(1[0-9]\d\d|20[0-2]\d)(?!\d|[,.]\d|-|\s?(?:km|people|m\b))")
_NAME: Final = re.compile(
    r"(?<![\w-])[A-Z][a-zà-ÿ]+(?: (?:de|von|van|la|del) [A-Z][a-zà-ÿ]+|[ ][A-Z][a-zà-ÿ]+|[ ][A-Z]\.)*"
)
_OPENERS: Final = """
A According After Also Although American Among An And April As At August Before Between Born Both British But By
Chinese December Despite During English February Five For Four French From German He Her His However If In
Indian It Italian Its January July June Many March May Monday Most November October On One Or Other Over Russian
Saturday September She Since Some Sunday That The Their There These They This Those Three Two Under When While
With
"""
_NOT_NAMES: Final = frozenset(_OPENERS.split())
_OTHER: Final = re.compile(
    r"(?P<who>[A-Z][\w'-]+(?: [A-Z][\w'-]+){0,3}) "
    r"(?P<what>(?:was|is|has|had|won|took|wrote|became|made|went|led|[a-z]{3,}ed) .{8,140})$"
)
_LONGEST: Final = 22
_UNIT_CHANGES: Final = {
    "km": "metres", "kilometres": "metres", "kilometers": "miles", "miles": "kilometres", "metres": "kilometres",
    "meters": "feet", "m": "km", "feet": "metres", "ft": "metres", "kg": "pounds", "pounds": "tonnes", "tonnes":
    "kilograms", "hectares": "acres", "acres": "hectares", "percent": "million", "%": " people", "million": "thousand",
    "billion": "million", "thousand": "million", "hours": "minutes", "minutes": "hours", "days": "weeks", "weeks":
    "months", "months": "years", "years": "months", "inches": "centimetres", "GB": "MB", "MB": "GB", "TB": "GB",
}  # fmt: skip


def _change_number(claim: str, document: Document, chance: random.Random) -> str | None:
    found = [one for one in NUMBER.finditer(claim) if not has_month(one)]
    written = {word: value for value, word in WORDS.items()}
    spelled = list(re.finditer(rf"\b(?:{'|'.join(written)})\b", claim))
    if not found and not spelled:
        return None
    target = chance.choice([*found, *spelled])
    value = written.get(target[0]) or int(target[0].replace(",", ""))
    others = {int(one[1].replace(",", "")) for one in NUMBER.finditer(document.text)} - {value}
    others -= {int(one[1].replace(",", "")) for one in found}
    new = chance.choice(sorted(others)) if others else value + chance.choice([1, 2, 3, 7])
    told = WORDS.get(new, f"{new:,}")
    return claim[: target.start()] + told + claim[target.end() :]


def _change_date(claim: str, document: Document, chance: random.Random) -> str | None:
    years = list(_YEAR.finditer(claim))
    if not years:
        return None
    target = chance.choice(years)
    mine = {one[0] for one in years}
    others = sorted({one[0] for one in _YEAR.finditer(document.text)} - mine)
    new = chance.choice(others) if others else str(int(target[0]) + chance.choice([-3, -1, 1, 2, 10]))
    return claim[: target.start()] + new + claim[target.end() :]


def _names(text: str, title: str) -> list[str]:
    found = [one[0] for one in _NAME.finditer(text)]
    own = set(title.split())
    return [
        name
        for name in dict.fromkeys(found)
        if name.split()[0] not in _NOT_NAMES and not own & set(name.split()) and len(name) > 3
    ]


def _change_name(claim: str, document: Document, chance: random.Random) -> str | None:
    names = [name for name in _names(claim, document.title) if claim.count(name) == 1]
    if not names:
        return None
    target = chance.choice(names)
    known = set(re.findall(r"\w+", claim))
    others = [
        name
        for name in _names(document.text, document.title)
        if not set(name.split()) & known and abs(len(name.split()) - len(target.split())) <= 1
    ]
    if not others:
        return None
    return claim.replace(target, chance.choice(others))


def _negate(claim: str, _: Document, chance: random.Random) -> str | None:
    rules = [
        (r"\b(is|was|are|were|has been|can|will|should|could|would|must) (?!not|born|by)", r"\1 not "),
        (r"\b(won|took|directed|wrote|played|received|got|became|attended|joined|beat|married|wedded|died) ",
         r"never \1 "),
        (r"\bfirst\b", "last"), (r"\bbefore\b", "after"), (r"\bafter\b", "before"), (r"\bmore\b", "less"),
        (r"\bnorth", "south"), (r"\bsouth", "north"), (r"\beast", "west"), (r"\bold(er|est)\b", r"young\1"),
        (r"\byoung(er|est)\b", r"old\1"), (r"\bhigher\b", "lower"), (r"\blarg(er|est)\b", r"small\1"),
        (r"\bwith\b", "without"), (r"\bincreas", "decreas"), (r"\bmany\b|\bnumerous\b", "no"),
    ]  # fmt: skip
    chance.shuffle(rules)
    for pattern, replacement in rules:
        changed = re.sub(pattern, replacement, claim, count=1)
        if changed != claim:
            return changed
    return None


def _change_unit(claim: str, _: Document, chance: random.Random) -> str | None:
    found = list(
        re.finditer(rf"\b(\d[\d,.]*) ?-?({'|'.join(map(re.escape, _UNIT_CHANGES))}|cm|mi|lb)(?![\w/²])", claim)
    )
    if not found:
        return None
    target = chance.choice(found)
    new = {"cm": "metres", "mi": "km", "lb": "kg"}.get(target[2]) or _UNIT_CHANGES[target[2]]
    return claim[: target.start(2)].rstrip() + " " + new.strip() + claim[target.end(2) :]


def _swap(claim: str, document: Document, chance: random.Random) -> str | None:
    """Exchange two names that play different parts: not two of one list."""
    subject = re.sub(r" \(.*", "", document.title)
    names = [*([subject] if subject and subject in claim else []), *_names(claim, document.title)]
    names = sorted((name for name in names if claim.count(name) == 1), key=claim.index)
    pairs = [
        (one, other)
        for number, one in enumerate(names)
        for other in names[number + 1 :]
        if _between(claim, one, other) and not _same_part(claim, one, other)
    ]
    if not pairs:
        return None
    one, other = chance.choice(pairs)
    return claim.replace(one, "\0").replace(other, one).replace("\0", other)


def _between(claim: str, one: str, other: str) -> bool:
    between = claim[claim.index(one) + len(one) : claim.index(other)]
    return re.search(r"\b[a-z]{3,}(?:ed|s|te|n|t|k)\b", between) is not None and len(between.split()) >= 2


def _same_part(claim: str, one: str, other: str) -> bool:
    between = claim[claim.index(one) + len(one) : claim.index(other)]
    return re.fullmatch(r"(?:,| and| or| &|,? as well as|\s|with)*", between) is not None or bool(
        re.search(r"\b(?:married|wedded|and|or|with|met)\s*$", between)
    )


def merge_facts(
    document: Document, claims: Sequence[str], previous: tuple[Document, list[str]], chance: random.Random
) -> tuple[str, bool] | None:
    """Say of a passage's subject what is said of another one: there, or else in another passage of its own subject.

    Returns:
        The claim, and whether the other passage was needed; None where nothing can be merged.
    """
    other, others = previous
    subject, other_subject = (re.sub(r" \(.*", "", one.title) for one in (document, other))
    mine = _said_of(subject, claims)
    if not mine:
        return None
    inside = [
        told["what"]
        for told in map(_OTHER.match, claims)
        if told is not None and not set(told["who"].split()) & set(subject.split())
    ]
    theirs = [] if subject == other_subject else _said_of(other_subject, others)
    if not inside and not theirs:
        return None
    own = chance.choice(mine).rstrip(".")
    return f"{subject} {own} and {chance.choice(inside or theirs)}", not inside


def _said_of(subject: str, claims: Sequence[str]) -> list[str]:
    """Give what short claims say of a subject."""
    return [
        claim[len(subject) + 1 :]
        for claim in claims
        if subject and claim.startswith(subject + " ") and len(claim.split()) < _LONGEST
    ]


CHANGES: Final[dict[str, Callable[[str, Document, random.Random], str | None]]] = {
    "numbers": _change_number,
    "dates": _change_date,
    "names": _change_name,
    "negation": _negate,
    "units": _change_unit,
    "swapped entities": _swap,
}
