"""The grounding ledger: each claim of an answer with the references, positions and quotes that support it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, filterfalse
from operator import attrgetter
from typing import Final

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.grounding.claims import (
    PARTIAL_THRESHOLD,
    Claim,
    ClaimScore,
    ClaimScorer,
    Evidence,
    beginnings,
    marked_parts,
    split_claims,
    verdict_of,
)
from llama_index_agentic_kb.grounding.features import Premise
from llama_index_agentic_kb.grounding.scorers import LLMJudge, ScorerLike, SmallScorer, as_scorer
from llama_index_agentic_kb.schema.grounding import (
    CITATION_THRESHOLD,
    ClaimFlag,
    Conflict,
    ConflictingValue,
    GroundedClaim,
    GroundingLedger,
    Span,
    Support,
    Verdict,
)
from llama_index_agentic_kb.search.tokenizing import FUNCTION_WORDS, split_words

_Scored = Sequence[tuple[Claim, ClaimScore]]

_LONG: Final = 20_000  # maximum characters of an answer that is split and entered on the event loop (about 20 ms)
_SURE_RIVAL: Final = 0.5  # minimum strength at which a differing statement of another source is a conflict
_WHOLE: Final = 0.3  # weight of the whole of a claim with several markers, beside its weakest part (docs/proof.md)
_SHORT_PARTS: Final = 0.1  # added to these, because the model's scores of short statements are lower
_MOST_BY_PARTS: Final = 0.95  # maximum of the sum: the score of a statement that stands in a passage to the letter
_SETTLED: Final = frozenset({Verdict.SUPPORTED, Verdict.NOT_CHECKABLE})
_BORNE: Final = (Verdict.SUPPORTED, Verdict.PARTIALLY_SUPPORTED)
_MISSED: Final = ClaimScore(None, Verdict.NOT_CHECKABLE, left_out=True)
_NOT_ASKED: Final = ClaimScore(None, Verdict.NOT_CHECKABLE)
_LONGEST_VALUE: Final = 4  # maximum number of words of a bare value
_UNBOUND: Final = 0.5  # the highest score of a bare value that no cited sentence repeats
_MOST_BEGINNINGS: Final = 48  # maximum number of beginnings of claims scored in one check


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundingSource(Premise):
    """A reference that claims are checked against: a passage with its place."""

    reference_id: str  # the N of ``[ref_id:N]``, as in ``Reference.id``
    node_id: str
    date: str | None = None  # the document's date, shown with conflicts


async def ground(
    answer: str,
    sources: Sequence[GroundingSource],
    scorer: ScorerLike = None,
    *,
    threshold: float = CITATION_THRESHOLD,
    deadline: float | None = None,
) -> GroundingLedger:
    """Check each claim of an answer against its references; a reference supports it from a score of ``threshold`` on.

    A failing scorer raises no error: if it fails or exceeds the deadline, the ledger has the claims without scores,
    flagged ``notScored``, and a warning; after the deadline, that of a very long answer has the warning only. For
    ``scorer`` see ``as_scorer``.
    """
    name, scores, warnings = "", list[ClaimScore](), list[str]()
    try:
        # The claims of a short answer are split and entered at once, after the deadline too.
        split, is_long = partial(split_claims, answer), len(answer) > _LONG
        claims = await Call(sync=split, deadline=deadline, what="claims") if is_long else split()
        asked = list(filter(attrgetter("check_required"), claims))
        if asked and sources:
            name, scores, warnings = await _scores_of(asked, sources, scorer, threshold, deadline)
        elif asked:
            scores = [ClaimScore(0.0, Verdict.UNSUPPORTED) for _ in asked]
        enter = partial(_ledger, claims, scores, sources, threshold)
        ledger = await Call(sync=enter, deadline=deadline, what="claims") if is_long else enter()
    except DeadlineExceededError as error:
        return GroundingLedger(warnings=[*warnings, f"the answer's claims were not checked: {error}"])
    ledger.scorer, ledger.warnings = name, [*warnings, *ledger.warnings]
    return ledger


async def _scores_of(
    asked: Sequence[Claim],
    sources: Sequence[GroundingSource],
    scorer: ScorerLike,
    threshold: float,
    deadline: float | None,
) -> tuple[str, list[ClaimScore], list[str]]:
    """Return the scorer's name, the scores of claims, and a warning if it failed: then scores or parts are missing."""
    name, scores = "", list[ClaimScore]()
    try:
        if not isinstance(scorer, ClaimScorer):  # loading a named model may take seconds
            scorer = await Call(sync=partial(as_scorer, scorer), deadline=deadline, what="loading the scorer")
        name = scorer.name
        scores += await scorer.score(asked, sources, deadline=deadline)
        scored = list(zip(asked, scores, strict=False))
        if parts := _parts_to_score(scored, sources, threshold, is_small=isinstance(scorer, SmallScorer)):
            await _add_parts(scored, parts, sources, scorer, deadline)
        if len(scored) > 1:
            _bind_lead(scored)
        is_faulty = not _SETTLED.issuperset(map(attrgetter("verdict"), scores))
        if is_faulty and not isinstance(scorer, LLMJudge):  # its calls cost money
            await _mark_lacking(scored, sources, scorer, deadline)
    except Exception as error:  # noqa: BLE001 (any error of a user's scorer leaves the claims unscored)
        what = "the parts of the answer's claims" if scores else "the answer's claims"
        return name, scores, [f"{what} were not checked: {one_line(error_message(error))}"]
    return name, scores + [_MISSED] * (len(asked) - len(scores)), []


def _parts_to_score(
    scored: _Scored, sources: Sequence[GroundingSource], threshold: float, *, is_small: bool
) -> dict[tuple[int, ...], list[tuple[Claim, int]]]:
    """Return the parts before the markers of claims, each with its claim's place, by the references that they cite."""
    places = dict(zip(map(attrgetter("reference_id"), sources), range(len(sources)), strict=True))
    asked: dict[tuple[int, ...], list[tuple[Claim, int]]] = {}
    for place, (claim, score) in enumerate(scored):
        if score.verdict is Verdict.SUPPORTED or (is_small and score.score is not None):
            known = () if is_small else {one.premise for one in score.evidence if one.score >= threshold}
            for part in marked_parts(claim):
                named = filter(places.__contains__, dict.fromkeys(map(str, part.cited)))
                cited = tuple(map(places.__getitem__, named)) or tuple(places.values())  # a marker may name nothing
                if not set(cited).issubset(known):
                    asked.setdefault(cited, []).append((part, place))
    return asked


async def _add_parts(
    scored: _Scored,
    asked: Mapping[tuple[int, ...], Sequence[tuple[Claim, int]]],
    sources: Sequence[GroundingSource],
    scorer: ClaimScorer,
    deadline: float | None,
) -> None:
    """Score the parts of claims against what their markers cite.

    References that support such a part are added to the claim's score. The shipped model reads one fact better than
    several: with it, a claim counts mostly as much as its weakest part.
    """
    found: dict[int, list[ClaimScore]] = {}
    for cited, waiting in asked.items():
        premises = [sources[number] for number in cited]
        own = await scorer.score([part for part, _ in waiting], premises, deadline=deadline)
        for (_, place), part_score in zip(waiting, own, strict=False):
            evidence = [replace(one, premise=cited[one.premise]) for one in part_score.evidence]
            found.setdefault(place, []).append(replace(part_score, evidence=evidence))
    for place, parts in found.items():
        _weigh(scored[place][1], parts, by_parts=isinstance(scorer, SmallScorer))


def _weigh(score: ClaimScore, parts: Sequence[ClaimScore], *, by_parts: bool) -> None:
    """Add the scores of a claim's parts to the score of the whole."""
    judged = [part.score for part in parts if part.score is not None]
    borne = [part for part in parts if part.verdict in _BORNE]
    if by_parts and judged and score.score is not None:
        value = min(_MOST_BY_PARTS, _WHOLE * score.score + (1 - _WHOLE) * min(judged) + _SHORT_PARTS)
        is_denied = score.verdict is Verdict.CONTRADICTED and len(borne) < len(parts)
        _lower(score, value, value, contradicted=is_denied)
    if score.verdict in _BORNE:
        found = chain.from_iterable(map(attrgetter("evidence"), borne))
        score.parts = [one for one in found if one.score >= PARTIAL_THRESHOLD]


def _lower(score: ClaimScore, value: float, most: float, *, contradicted: bool = False) -> None:
    """Set the score of a claim and its verdict; evidence has at most the score ``most``."""
    score.score, score.verdict = value, verdict_of(value, contradicted=contradicted)
    score.evidence = [replace(one, score=min(one.score, most)) for one in score.evidence]


def _bind_lead(scored: _Scored) -> None:
    """Score a bare value that begins an answer as the cited sentence that repeats it, which says what the value is of.

    "Graz. He was born in Graz [ref_id:1].": "Graz" by itself would be supported by any passage that names the town. If
    no cited sentence repeats the value, it is at most partially supported.
    """
    lead, score = scored[0]
    cited = [(claim, own) for claim, own in scored[1:] if claim.cited]
    is_bare = not (lead.cited or lead.context) and len(lead.plain.split()) <= _LONGEST_VALUE
    if not is_bare or not cited or score.score is None:
        return
    value = set(split_words(lead.plain))
    about = next((own for claim, own in cited if value.issubset(split_words(claim.plain))), None)
    if about is not None and about.score is not None:
        score.score, score.verdict = about.score, about.verdict
        score.evidence, score.parts = list(about.evidence), list(about.parts)
        score.rivals = list(about.rivals) if about.verdict is Verdict.CONTRADICTED else []
    elif score.verdict is Verdict.SUPPORTED and not _states(lead.plain):
        _lower(score, min(score.score, _UNBOUND), _UNBOUND)


def _states(text: str) -> bool:
    """Return whether a text has a content word in lower case: "It rained" states something, "20 July 1969" does not."""
    words = (word.strip(".,;") for word in text.split())
    return any(word.islower() and word not in FUNCTION_WORDS["english"] for word in words)


async def _mark_lacking(
    scored: _Scored, sources: Sequence[GroundingSource], scorer: ClaimScorer, deadline: float | None
) -> None:
    """Set ``lacking`` in the scores of claims of which only a beginning is supported."""
    waiting: list[tuple[Claim, ClaimScore, Claim]] = []
    for claim, score in scored:
        if score.score is not None and score.verdict is not Verdict.SUPPORTED:
            waiting += [(claim, score, part) for part in beginnings(claim)]
    waiting = waiting[:_MOST_BEGINNINGS]
    found = await scorer.score([part for *_, part in waiting], sources, deadline=deadline) if waiting else []
    for (claim, score, part), own in zip(waiting, found, strict=False):
        if own.verdict is Verdict.SUPPORTED:  # the longest beginning comes last
            rest = claim.text[len(part.text) :]
            start = part.span.end + len(rest) - len(rest.lstrip(" ,;"))
            score.lacking = Span(start=start, end=claim.span.end)


def _ledger(
    claims: Sequence[Claim], scores: Sequence[ClaimScore], sources: Sequence[GroundingSource], threshold: float
) -> GroundingLedger:
    remaining = iter(scores)
    grounded: list[GroundedClaim] = []
    conflicts: list[Conflict] = []
    judged: list[float] = []
    for number, claim in enumerate(claims):
        score = next(remaining, _MISSED) if claim.check_required else _NOT_ASKED
        entry = _entry(claim, score, sources, threshold)
        grounded.append(entry)
        judged += [] if entry.score is None else [entry.score]
        if score.rivals and entry.verdict is Verdict.SUPPORTED and entry.supports:
            found = _conflicts(number, score, entry.supports[0], sources)
            conflicts += found
            entry.flags += [ClaimFlag.CONFLICTING_SOURCES] if found else []
    left_out = sum(map(attrgetter("left_out"), scores))
    return GroundingLedger(
        claims=grounded,
        grounding_score=sum(judged) / len(judged) if judged else None,  # as Google's ``groundingScore``
        conflicts=conflicts,
        warnings=[f"{left_out} of {len(scores)} claims were not judged: the scorer left them out"] if left_out else [],
    )


def _entry(claim: Claim, score: ClaimScore, sources: Sequence[GroundingSource], threshold: float) -> GroundedClaim:
    """Return the ledger entry of a claim; its verdict is ``NOT_CHECKABLE`` if the claim has no score."""
    made = partial(GroundedClaim, text=claim.text, span=claim.span, check_required=claim.check_required)
    cited = list(map(str, claim.cited))
    if score.score is None:
        return made(cited=cited, flags=[ClaimFlag.NOT_SCORED] if score.left_out else [])
    bearing, borne = _bearing(score, sources, threshold)
    wrong = list(filterfalse(borne.__contains__, cited)) if bearing else []
    shown = _shown(score, threshold)
    known = set(map(attrgetter("premise"), shown))
    shown += [one for one in score.parts if one.premise not in known]
    flags = [] if bool(bearing) == bool(cited) else [ClaimFlag.UNCITED if bearing else ClaimFlag.CITED_WITHOUT_SUPPORT]
    return made(
        verdict=score.verdict,
        score=score.score,
        supports=[_support(span, sources[one.premise], one.score) for one in shown for span in one.spans],
        cited=cited,
        flags=[ClaimFlag.MISATTRIBUTED] if wrong else flags,
        misattributed=wrong,
        lacking=score.lacking,
    )


def _bearing(score: ClaimScore, sources: Sequence[GroundingSource], threshold: float) -> tuple[set[str], set[str]]:
    """Return the ids of the references that support a claim, and of those that support it or a part of it."""
    parts = {sources[one.premise].reference_id for one in score.parts}
    if score.verdict not in _BORNE:
        return set(), parts
    bearing = {sources[one.premise].reference_id for one in score.evidence if one.score >= threshold}
    if score.verdict is Verdict.SUPPORTED and (score.score or 0.0) >= threshold:
        bearing |= parts
    return bearing, bearing | parts


def _shown(score: ClaimScore, threshold: float) -> list[Evidence]:
    """Return the evidence that supports or contradicts a claim; empty for an unsupported claim."""
    if score.verdict in _BORNE:
        return [one for one in score.evidence if one.score >= min(threshold, PARTIAL_THRESHOLD)]
    rivals = {rival.premise for rival in score.rivals}
    contradicts = score.verdict is Verdict.CONTRADICTED
    return [one for one in score.evidence if contradicts and (one.premise in rivals or not rivals)]


def _support(span: Span, source: GroundingSource, score: float) -> Support:
    return Support(
        reference_id=source.reference_id,
        node_id=source.node_id,
        span=span,
        quote=span.of(source.text),
        score=min(1.0, max(0.0, score)),
    )


def _conflicts(number: int, score: ClaimScore, support: Support, sources: Sequence[GroundingSource]) -> list[Conflict]:
    """Return the conflicts between the reference that supports a claim and other references."""
    dates = {source.reference_id: source.date for source in sources}
    found: dict[tuple[str, str], Conflict] = {}
    for rival in score.rivals:
        source = sources[rival.premise]
        key = source.reference_id, rival.kind
        if source.reference_id == support.reference_id or rival.strength < _SURE_RIVAL or key in found:
            continue
        place = _support(rival.span, source, rival.strength)
        own = ConflictingValue(value=one_line(rival.claimed), support=support, date=dates[support.reference_id])
        other = ConflictingValue(value=one_line(rival.quote), support=place, date=source.date)
        found[key] = Conflict(claim=number, kind=rival.kind, values=[own, other])
    return list(found.values())
