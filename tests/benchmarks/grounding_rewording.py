"""Says what a passage says in other words, by rule; none of the scorer's word lists are used."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

from tests.benchmarks.grounding_passages import MONTH, MONTHS, NUMBER, WORDS, Document, has_month

__all__ = ["reworded_sentences"]

_DMY: Final = re.compile(rf"\b(\d{{1,2}}) ({MONTH}) (\d{{4}})\b")
_MDY: Final = re.compile(rf"\b({MONTH}) (\d{{1,2}}), (\d{{4}})\b")
_UNIT: Final = re.compile(
    r"\b(\d[\d,.]*) ?-?(km|kilometres|kilometers|miles|metres|meters|m|feet|ft|kg|pounds|tonnes|hectares|acres|percent"
    r"|%|million|billion|thousand|hours|minutes|days|weeks|months|years|inches|GB|MB|TB)(?![\w/²])"
)
_UNIT_RENAMES: Final = {
    "km": ("kilometres", 1), "kilometres": ("m", 1000), "kilometers": ("km", 1), "metres": ("m", 1),
    "meters": ("cm", 100), "m": ("metres", 1), "feet": ("ft", 1),
    "ft": ("feet", 1), "kg": ("kilograms", 1), "pounds": ("lb", 1), "tonnes":
    ("kg", 1000), "percent": ("%", 1), "%": (" percent", 1), "hours": ("minutes", 60), "weeks": ("days", 7),
    "miles": ("mi", 1), "inches": ("inch", 1),
}  # fmt: skip
_REWORDINGS: Final = """
was released = came out; film = motion picture; movie = film; born = delivered into the world; died = passed
away; founded = set up; established = founded; began = commenced; located = situated; situated = found; known =
famous; wrote = authored; won = took; defeated = beat; played = appeared; village = small settlement; located in
= to be found in; received = got; politician = statesman; actor = performer; actress = performer; author =
writer; moved to = relocated to; son = male child; daughter = female child; married = wedded; wife = spouse;
husband = spouse; served as = held the post of; worked as = had a job as; studied at = attended; often =
frequently; large = sizeable; small = little; helps = assists; use = employ; used = employed; many = numerous;
buy = purchase; important = significant; also = in addition; people = persons; population = number of
inhabitants; released = issued; singer = vocalist; children = kids; killed = slain; company = firm; based on =
drawn from; named = called; include = comprise; need = require; start = begin; lives in = resides in; ended =
finished
"""
_SYNONYMS: Final = tuple(
    (one.strip(), other.strip())
    for one, _, other in (pair.partition(" = ") for pair in " ".join(_REWORDINGS.split()).split(";"))
)
_VERBS: Final = {  # past tense: participle
    "directed": "directed", "wrote": "written", "produced": "produced", "founded": "founded", "composed": "composed",
    "defeated": "defeated", "married": "married", "built": "built", "published": "published", "won": "won",
    "designed": "designed", "created": "created", "invented": "invented", "killed": "killed", "succeeded": "succeeded",
    "recorded": "recorded", "painted": "painted", "edited": "edited", "discovered": "discovered", "owns": "owned",
    "established": "established", "starred": "starred",
}  # fmt: skip
_PARTICIPLES: Final = {participle: past for past, participle in _VERBS.items()}
_PASSIVE: Final = re.compile(
    rf"^(?P<what>.{{3,80}}?),? (?:is|was|were|are)?(?P<mid>(?: (?:an?|the) [^,.;()]{{3,60}})?) ?"
    rf"(?P<verb>{'|'.join(_PARTICIPLES)}) by "
    r"(?P<who>[A-Z][\wà-ÿ.'-]+(?: (?:[A-Z][\wà-ÿ.'-]*[\wà-ÿ]|[A-Z]\.|de|von|van|la))*)"
    r"(?P<rest>(?: in .*| on .*|, .*| and .*)?)\.?$"
)
_ACTIVE: Final = re.compile(
    rf"^(?P<who>[A-Z][\wà-ÿ.'-]+(?: (?:[A-Z][\wà-ÿ.'-]+|de|von|van|la))*) (?P<verb>{'|'.join(_VERBS)}) "
    r"(?P<what>(?:the |a |an |his |her )?[A-Z\"][^,.;()]{2,60}?)(?P<rest>(?: in \d{4}.*| on .*|, .*| at .*)?)\.?$"
)


def reworded_sentences(document: Document, chance: random.Random) -> Iterator[str]:
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
    for one, other in pairwise(kept):
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
    return sentence if re.match(r"[A-Z][a-z]+ [A-Z]?[a-z]+", sentence) and _stands_alone(sentence) else None


def _stands_alone(sentence: str) -> bool:
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
        return WORDS.get(value, f"{value:,}" if "," not in found[1] else str(value))

    return NUMBER.sub(lambda found: found[0] if has_month(found) else written(found), text)


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
