"""Makes labelled claims from passages: supported ones that are reworded, and ones changed by kind.

A supported claim is a sentence of a passage (or two) in other words: synonyms, active for passive and back,
nominalisation, other formats of dates and numbers, clauses dropped, order changed, pronouns resolved. An unsupported one
is such a claim with one thing changed; where it can be, to something that the same passage says elsewhere, so that no
search for the changed word in the passage tells it. All by rule and by a seeded generator: the same passages give the
same claims. None of the scorer's word lists are used here.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["KINDS", "LabelledClaim", "make_claims", "read_corpus"]

KINDS: Final = ("numbers", "dates", "names", "negation", "units", "swapped entities", "merged facts")

MONTHS: Final = (
    "January February March April May June July August September October November December".split()  # noqa: SIM905
)
_MONTH: Final = "|".join(MONTHS)
_DMY: Final = re.compile(rf"\b(\d{{1,2}}) ({_MONTH}) (\d{{4}})\b")
_MDY: Final = re.compile(rf"\b({_MONTH}) (\d{{1,2}}), (\d{{4}})\b")
_YEAR: Final = re.compile(r"(?<![\d,.-])(1[0-9]\d\d|20[0-2]\d)(?![\d,.-]|\s?(?:km|people|m\b))")
_NUMBER: Final = re.compile(r"(?<![\d,.\w–-])(\d{1,3}(?:,\d{3})+|\d{1,3})(?![\d,.:]*\d|\s?(?:st|nd|rd|th)\b|–|-|\w)")
_NAME: Final = re.compile(
    r"(?<![\w-])[A-Z][a-zà-ÿ]+(?: (?:de|von|van|la|del) [A-Z][a-zà-ÿ]+|[ ][A-Z][a-zà-ÿ]+|[ ][A-Z]\.)*"
)
_NOT_NAMES: Final = frozenset(
    "The A An He She It They His Her Its Their In On At By For From After Before During This That These Those When While "
    "As And But Or If Since With Both Other Some Many Most One Two Three Four Five Also According Although However There "
    "Between Under Over Despite Among Born January February March April May June July August September October November "
    "December Monday Sunday Saturday American British French German Italian Indian Chinese Russian English".split()
)
_WORDS: Final = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten",
                 11: "eleven", 12: "twelve", 13: "thirteen", 15: "fifteen", 20: "twenty", 30: "thirty"}  # fmt: skip
_UNIT: Final = re.compile(
    r"\b(\d[\d,.]*) ?-?(km|kilometres|kilometers|miles|metres|meters|m|feet|ft|kg|pounds|tonnes|hectares|acres|percent|%|"
    r"million|billion|thousand|hours|minutes|days|weeks|months|years|inches|GB|MB|TB)(?![\w/²])"
)
_UNIT_CHANGES: Final = {
    "km": "metres", "kilometres": "metres", "kilometers": "miles", "miles": "kilometres", "metres": "kilometres",
    "meters": "feet", "m": "km", "feet": "metres", "ft": "metres", "kg": "pounds", "pounds": "tonnes", "tonnes":
    "kilograms", "hectares": "acres", "acres": "hectares", "percent": "million", "%": " people", "million": "thousand",
    "billion": "million", "thousand": "million", "hours": "minutes", "minutes": "hours", "days": "weeks", "weeks":
    "months", "months": "years", "years": "months", "inches": "centimetres", "GB": "MB", "MB": "GB", "TB": "GB",
}  # fmt: skip
_UNIT_RENAMES: Final = {
    "km": ("kilometres", 1), "kilometres": ("m", 1000), "kilometers": ("km", 1), "metres": ("m", 1), "meters": ("cm", 100),
    "m": ("metres", 1), "feet": ("ft", 1), "ft": ("feet", 1), "kg": ("kilograms", 1), "pounds": ("lb", 1), "tonnes":
    ("kg", 1000), "percent": ("%", 1), "%": (" percent", 1), "hours": ("minutes", 60), "weeks": ("days", 7),
    "miles": ("mi", 1), "inches": ("inch", 1),
}  # fmt: skip
_SYNONYMS: Final = (
    ("was released", "came out"), ("film", "motion picture"), ("movie", "film"), ("born", "delivered into the world"),
    ("died", "passed away"), ("founded", "set up"), ("established", "founded"), ("began", "commenced"),
    ("located", "situated"), ("situated", "found"), ("known", "famous"), ("wrote", "authored"), ("won", "took"),
    ("defeated", "beat"), ("played", "appeared"), ("village", "small settlement"), ("located in", "to be found in"),
    ("received", "got"),   ("politician", "statesman"),
    ("actor", "performer"), ("actress", "performer"), ("author", "writer"), ("moved to", "relocated to"),
    ("son", "male child"), ("daughter", "female child"), ("married", "wedded"), ("wife", "spouse"), ("husband", "spouse"),
    ("served as", "held the post of"), ("worked as", "had a job as"), ("studied at", "attended"), 
    ("often", "frequently"), ("large", "sizeable"), ("small", "little"), ("helps", "assists"), ("use", "employ"),
    ("used", "employed"), ("many", "numerous"),  ("buy", "purchase"), 
    ("important", "significant"), ("also", "in addition"), ("people", "persons"), ("population", "number of inhabitants"),
    ("released", "issued"), ("singer", "vocalist"), ("children", "kids"), ("killed", "slain"), ("company", "firm"),
    ("based on", "drawn from"), ("named", "called"), ("include", "comprise"), ("need", "require"), ("start", "begin"),
    ("lives in", "resides in"),  ("ended", "finished"),  
)  # fmt: skip
_VERBS: Final = {  # past tense: participle
    "directed": "directed", "wrote": "written", "produced": "produced", "founded": "founded", "composed": "composed",
    "defeated": "defeated", "married": "married", "built": "built", "published": "published", "won": "won",
    "designed": "designed", "created": "created", "invented": "invented", "killed": "killed", "succeeded": "succeeded",
    "recorded": "recorded", "painted": "painted", "edited": "edited", "discovered": "discovered", "owns": "owned",
    "established": "established", "starred": "starred",
}  # fmt: skip
_PARTICIPLES: Final = {participle: past for past, participle in _VERBS.items()}
_PASSIVE: Final = re.compile(
    rf"^(?P<what>.{{3,80}}?),? (?:is|was|were|are)?(?P<mid>(?: (?:an?|the) [^,.;()]{{3,60}})?) ?(?P<verb>{'|'.join(_PARTICIPLES)}) by "
    r"(?P<who>[A-Z][\wà-ÿ.'-]+(?: (?:[A-Z][\wà-ÿ.'-]*[\wà-ÿ]|[A-Z]\.|de|von|van|la))*)(?P<rest>(?: in .*| on .*|, .*| and .*)?)\.?$"
)
_ACTIVE: Final = re.compile(
    rf"^(?P<who>[A-Z][\wà-ÿ.'-]+(?: (?:[A-Z][\wà-ÿ.'-]+|de|von|van|la))*) (?P<verb>{'|'.join(_VERBS)}) "
    r"(?P<what>(?:the |a |an |his |her )?[A-Z\"][^,.;()]{2,60}?)(?P<rest>(?: in \d{4}.*| on .*|, .*| at .*)?)\.?$"
)


@dataclass(frozen=True, slots=True)
class LabelledClaim:
    """A claim with its label.

    Args:
        text: The claim.
        kind: "supported", or what was changed.
        passages: Ids of the passages that it was made from.
        held_out: Whether it is of the part that is only reported on.
    """

    text: str
    kind: str
    passages: tuple[str, ...]
    held_out: bool


@dataclass(frozen=True, slots=True)
class Document:
    """A passage."""

    id: str
    title: str
    text: str


def read_corpus(path: Path) -> list[Document]:
    """Read the passages of a set."""
    lines = (path / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [Document(one["_id"], one["title"], one["text"]) for one in map(json.loads, lines)]


def make_claims(documents: Sequence[Document], *, most: int = 120, seed: int = 5) -> list[LabelledClaim]:
    """Make claims: at most so many supported ones, and of each kind as many as there can be up to that.

    Args:
        documents: Passages; with a title they are of what it names.
        most: Claims of a kind.
        seed: Of the generator.
    """
    chance = random.Random(seed)
    order = sorted(documents, key=lambda document: hashlib.sha256(f"{seed}{document.id}".encode()).hexdigest())
    found: dict[str, list[LabelledClaim]] = {kind: [] for kind in ("supported", *KINDS)}
    previous: tuple[Document, list[str]] | None = None
    for document in order:
        if all(len(claims) >= most for claims in found.values()):
            break
        claims = list(_supported(document, chance))
        if not claims:
            continue
        held_out = int(hashlib.sha256(document.id.encode()).hexdigest(), 16) % 2 == 1
        text = chance.choice(claims)
        _add(found, "supported", text, (document.id,), held_out, most)
        for kind, change in _CHANGES.items():
            able = [changed for one in claims if (changed := change(one, document, chance)) is not None]
            if able:
                _add(found, kind, chance.choice(able), (document.id,), held_out, most)
        if previous is not None:
            merged = _merge_facts(document, claims, previous, chance)
            if merged is not None:
                _add(found, "merged facts", merged, (document.id, previous[0].id), held_out, most)
        if document.title:
            previous = (document, claims)
    return [claim for claims in found.values() for claim in claims]


def _add(
    found: dict[str, list[LabelledClaim]], kind: str, text: str, ids: tuple[str, ...], held_out: bool, most: int
) -> None:
    if len(found[kind]) < most:
        found[kind].append(LabelledClaim(text, kind, ids, held_out))


# -- supported claims ------------------------------------------------------------------------------------------------


def _supported(document: Document, chance: random.Random) -> Iterator[str]:
    """Give sentences of a passage in other words; two of them merged, if both are of its title."""
    sentences = [one.strip() for one in re.split(r"(?<=[a-z)\"\d]{2}[.])\s+(?=[A-Z\"])", document.text)]
    kept: list[str] = []
    for number, sentence in enumerate(sentences[:8]):
        plain = _resolved(_without_brackets(sentence), document.title, first=number == 0)
        if plain is None or not 6 <= len(plain.split()) <= 32:
            continue
        reworded = _reworded(plain, chance)
        if reworded is not None and not _is_verbatim(reworded, document.text):
            kept.append(reworded)
    yield from kept
    for one, other in zip(kept, kept[1:], strict=False):
        subject = document.title
        if subject and one.startswith(subject + " ") and other.startswith(subject + " "):
            yield f"{one.rstrip('.')} and {other[len(subject) + 1 :]}"


def _without_brackets(text: str) -> str:
    plain = re.sub(r"\s*\([^()]*\)", "", text)
    return re.sub(r"\s+([,.;])", r"\1", " ".join(plain.split()))


def _resolved(sentence: str, title: str, *, first: bool) -> str | None:
    """Put the title in place of a pronoun at the start; None where something else is spoken of."""
    subject = re.sub(r" \(.*", "", title)
    if not subject:
        return None if re.match(r"(?:He|She|It|They|This|These|His|Her|Its)\b", sentence) else sentence
    for pronoun in ("He ", "She ", "It "):
        if sentence.startswith(pronoun):
            return f"{subject} {sentence[len(pronoun) :]}"
    if re.match(r"(?:His|Her|Its) ", sentence):
        return f"{subject}'s {sentence.split(' ', 1)[1]}"
    surname = subject.split()[-1]
    if first or sentence.startswith((subject, surname)):
        return sentence
    return sentence if re.match(r"[A-Z][a-z]+ [A-Z]?[a-z]+", sentence) and chance_free(sentence) else None


def chance_free(sentence: str) -> bool:
    """Whether a sentence stands alone: no pronoun in its start."""
    return not re.match(r"(?:They|This|These|That|Those|The latter|Both|Their|There|However|Also)\b", sentence)


def _reworded(text: str, chance: random.Random) -> str | None:
    """Reword a sentence by at least two rules; None where fewer apply."""
    rules: list[Callable[[str, random.Random], str]] = [
        _dates, _voice, _shorter, _nominal, _fronted, _synonyms, _numbers, _units,
    ]  # fmt: skip
    changes = 0
    for rule in rules:
        changed = re.sub(r"[\s,.]*\.$", ".", re.sub(r"\s+([,.])", r"\1", rule(text, chance)))
        changes += changed != text
        text = changed
    text = re.sub(r", and (?=produced|starring|distributed|written)", ", ", text)
    return text if changes >= 2 else None


def _dates(text: str, chance: random.Random) -> str:
    def other(day: str, month: str, year: str) -> str:
        number = MONTHS.index(month) + 1
        forms = [f"{month} {day}, {year}", f"{day} {month} {year}", f"{year}-{number:02}-{int(day):02}",
                 f"the {day}th of {month} {year}" if day not in ("1", "2", "3", "21", "22", "23", "31") else
                 f"{day} {month[:3]}. {year}"]  # fmt: skip
        return chance.choice(forms)

    text = _MDY.sub(lambda found: other(found[2], found[1], found[3]), text)
    return _DMY.sub(lambda found: other(found[1], found[2], found[3]), text)


def _voice(text: str, _: random.Random) -> str:
    passive = _PASSIVE.match(text)
    if passive and not re.search(r"\b(?:who|which|that)$", passive["what"]):
        mid = f",{passive['mid']}," if passive["mid"].strip() else ""
        return f"{passive['who']} {_PARTICIPLES[passive['verb']]} {_lower(passive['what'])}{mid}{passive['rest']}."
    active = _ACTIVE.match(text)
    if active:
        what = active["what"][0].upper() + active["what"][1:]
        return f"{what} was {_VERBS[active['verb']]} by {active['who']}{active['rest']}."
    return text


def _lower(text: str) -> str:
    return text[0].lower() + text[1:] if re.match(r"(?:The|A|An|His|Her) ", text) else text


def _shorter(text: str, chance: random.Random) -> str:
    shorter = re.sub(r", (?:who|which|where|including|such as|known as|also)\b[^,]*(?=[,.]|$)", "", text, count=1)
    shorter = re.sub(r"\b(?:very|widely|commonly|generally|notably|originally|best) ", "", shorter)
    if shorter == text and len(text.split()) > 18 and chance.random() < 0.7:
        shorter = re.sub(r",? (?:and|while|but|as well as|with|although|because)\b[^,.]{10,}\.?$", ".", text)
    return shorter


def _nominal(text: str, _: random.Random) -> str:
    text = re.sub(r"^(.{3,40}?) was born (?:on|in) ", r"The birth of \1 took place \g<0>", text)
    text = re.sub(r"took place .{3,40}? was born (on|in) ", r"took place \1 ", text)
    text = re.sub(r"^([A-Z][\w .'-]{2,40}?) died (on|in) ", r"\1's death came \2 ", text)
    return re.sub(r"^([A-Z][\w .'-]{2,40}?) was (?:founded|established) (in|on) ", r"The founding of \1 was \2 ", text)


def _fronted(text: str, _: random.Random) -> str:
    back = re.match(r"^(In \d{4}|On [\w ,-]{6,20}?\d{4}|In [A-Z][a-z]+ \d{4}), (.+?)\.?$", text)
    if back:
        rest = back[2] if re.match(r"[A-Z]", back[2]) else back[2][0].upper() + back[2][1:]
        return f"{rest} {back[1][0].lower()}{back[1][1:]}."
    end = re.match(r"^(.+?),? (in \d{4}|on \d{1,2} [A-Z]\w+ \d{4})\.?$", text)
    return f"{end[2][0].upper()}{end[2][1:]}, {_lower(end[1])}." if end else text


def _synonyms(text: str, chance: random.Random) -> str:
    pairs = list(_SYNONYMS)
    chance.shuffle(pairs)
    done = 0
    for one, other in pairs:
        changed = re.sub(rf"\b{one}\b", other, text, count=1)
        if changed != text:
            text, done = changed, done + 1
        if done == 3:
            break
    return text


def _numbers(text: str, _: random.Random) -> str:
    def written(found: re.Match[str]) -> str:
        value = int(found[1].replace(",", ""))
        return _WORDS.get(value, f"{value:,}" if "," not in found[1] else str(value))

    return _NUMBER.sub(lambda found: found[0] if _has_month(found) else written(found), text)


def _has_month(found: re.Match[str]) -> bool:
    around = found.string[max(0, found.start() - 12) : found.end() + 12]
    return (
        re.search(_MONTH, around) is not None or re.search(r"\b[A-Z]\w+ $", found.string[: found.start()]) is not None
    )


def _units(text: str, _: random.Random) -> str:
    def other(found: re.Match[str]) -> str:
        renamed = _UNIT_RENAMES.get(found[2])
        value = float(found[1].replace(",", "")) if re.fullmatch(r"[\d,]*\.?\d+", found[1]) else None
        if renamed is None or value is None:
            return found[0]
        scaled = value * renamed[1]
        return f"{scaled:,.10g} {renamed[0]}".replace("  ", " ").replace(" %", "%")

    return _UNIT.sub(other, text)


def _is_verbatim(claim: str, text: str) -> bool:
    """Whether most of a claim stands in the passage word for word."""
    words = re.findall(r"\w+", claim.casefold())
    source = " ".join(re.findall(r"\w+", text.casefold()))
    longest = 0
    for start in range(len(words)):
        while start + longest < len(words) and " ".join(words[start : start + longest + 1]) in source:
            longest += 1
    return longest > 0.75 * len(words)


# -- changes ---------------------------------------------------------------------------------------------------------


def _change_number(claim: str, document: Document, chance: random.Random) -> str | None:
    found = [one for one in _NUMBER.finditer(claim) if not _has_month(one)]
    written = {word: value for value, word in _WORDS.items()}
    spelled = list(re.finditer(rf"\b(?:{'|'.join(written)})\b", claim))
    if not found and not spelled:
        return None
    target = chance.choice([*found, *spelled])
    value = written.get(target[0]) or int(target[0].replace(",", ""))
    others = {int(one[1].replace(",", "")) for one in _NUMBER.finditer(document.text)} - {value}
    others -= {int(one[1].replace(",", "")) for one in found}
    new = chance.choice(sorted(others)) if others else value + chance.choice([1, 2, 3, 7])
    told = _WORDS.get(new, f"{new:,}")
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
        (r"\b(won|took|directed|wrote|played|received|got|became|attended|joined|beat|married|wedded|died) ", r"never \1 "),
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
    found = [
        one
        for one in re.finditer(
            rf"\b(\d[\d,.]*) ?-?({'|'.join(map(re.escape, _UNIT_CHANGES))}|cm|mi|lb)(?![\w/²])", claim
        )
    ]
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


def _merge_facts(
    document: Document, claims: Sequence[str], previous: tuple[Document, list[str]], chance: random.Random
) -> str | None:
    """Say of one subject what one passage says of it and what another says of its own."""
    other, others = previous
    subject, other_subject = (re.sub(r" \(.*", "", one.title) for one in (document, other))
    mine = [claim for claim in claims if subject and claim.startswith(subject + " ") and len(claim.split()) < 22]
    theirs = [
        claim for claim in others if other_subject and claim.startswith(other_subject + " ") and len(claim.split()) < 22
    ]
    if not mine or not theirs or subject == other_subject:
        return None
    return f"{chance.choice(mine).rstrip('.')} and {chance.choice(theirs)[len(other_subject) + 1 :]}"


_CHANGES: Final[dict[str, Callable[[str, Document, random.Random], str | None]]] = {
    "numbers": _change_number,
    "dates": _change_date,
    "names": _change_name,
    "negation": _negate,
    "units": _change_unit,
    "swapped entities": _swap,
}
