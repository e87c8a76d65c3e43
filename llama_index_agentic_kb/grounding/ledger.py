"""The evidence ledger: each claim of an answer with the reference, the place and the words that support it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.grounding.claims import Claim, marked_parts, split_claims
from llama_index_agentic_kb.grounding.scorers import (
    CITATION_THRESHOLD,
    PARTIAL_THRESHOLD,
    ClaimScore,
    ClaimScorer,
    Evidence,
    Premise,
    Rival,
    ScorerLike,
    as_scorer,
)
from llama_index_agentic_kb.schema.grounding import (
    ClaimFlag,
    Conflict,
    ConflictingValue,
    GroundedClaim,
    GroundingLedger,
    Span,
    Support,
    Verdict,
)

__all__ = ["GroundingSource", "ground", "grounding_score"]

_WORD: Final = re.compile(r"\d+(?:[.,]\d+)*|\w+")
_LONG: Final = 20_000
"""Characters of an answer up to which it is taken apart on the event loop: about 20 ms."""

_SURE_RIVAL: Final = 0.5
"""Strength from which what another source says is a conflict."""


@dataclass(frozen=True, slots=True)
class GroundingSource:
    """A reference that claims are held against.

    Args:
        reference_id: The N of ``[ref_id:N]``, as in ``Reference.id``.
        node_id: The node's id.
        text: The node's text; spans are of it.
        title: The document's title; part of what it says.
        attributes: Further facts of the document; part of what it says.
        date: When it was written, where known; listed with conflicts.
    """

    reference_id: str
    node_id: str
    text: str
    title: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    date: str | None = None


async def ground(
    answer: str,
    sources: Sequence[GroundingSource],
    scorer: ScorerLike = None,
    *,
    threshold: float = CITATION_THRESHOLD,
    deadline: float | None = None,
) -> GroundingLedger:
    """Hold each claim of an answer against its references.

    The answer is never lost to its check: where the scorer fails or is late, the ledger has the claims without scores,
    flagged ``notScored``, and a warning.

    Args:
        answer: The answer, with its reference markers.
        sources: The references.
        scorer: What ``as_scorer`` takes; None is "auto": offline, nothing downloaded.
        threshold: Score from which a reference supports a claim, 0 to 1; Google's ``citationThreshold``.
        deadline: ``time.monotonic()`` at which the check is given up; None waits.

    Returns:
        The ledger, its claims in the answer's order.
    """
    try:
        scorer = as_scorer(scorer)
        claims = await _split(answer, deadline)
    except (ConfigurationError, DeadlineExceededError) as error:
        return GroundingLedger(warnings=[f"the answer's claims were not checked: {error}"])
    asked = [claim for claim in claims if claim.check_required]
    warnings: list[str] = []
    scores: list[ClaimScore] = []
    if asked and sources:
        try:
            scores = await scorer.score(asked, [_premise(source) for source in sources], deadline=deadline)
            await _add_parts(asked, scores, sources, scorer, threshold, deadline)
        except Exception as error:  # noqa: BLE001 (whatever a user's scorer raises: the answer stands without it)
            what = "the parts of the answer's claims" if scores else "the answer's claims"
            warnings.append(f"{what} were not checked: {one_line(error_message(error))}")
    elif asked:
        scores = [ClaimScore(0.0, Verdict.UNSUPPORTED) for _ in asked]
    return _ledger(claims, scores, sources, scorer.name, threshold, warnings)


async def _add_parts(
    claims: Sequence[Claim],
    scores: Sequence[ClaimScore],
    sources: Sequence[GroundingSource],
    scorer: ClaimScorer,
    threshold: float,
    deadline: float | None,
) -> None:
    """Find the references that bear the stretch before their marker, of supported claims that they don't bear whole."""
    numbers = {source.reference_id: number for number, source in enumerate(sources)}
    asked: dict[int, list[tuple[Claim, ClaimScore]]] = {}
    for claim, score in zip(claims, scores, strict=False):
        if score.verdict is Verdict.SUPPORTED:
            bearing = {sources[one.premise].reference_id for one in score.evidence if one.score >= threshold}
            for part in marked_parts(claim):
                for reference in {str(cited) for cited in part.cited} & numbers.keys() - bearing:
                    asked.setdefault(numbers[reference], []).append((part, score))
    for number, parts in asked.items():
        premise = _premise(sources[number])
        found = await scorer.score([part for part, _ in parts], [premise], deadline=deadline)
        for (_, score), own in zip(parts, found, strict=False):
            if own.verdict in (Verdict.SUPPORTED, Verdict.PARTIALLY_SUPPORTED):
                score.parts += [replace(one, premise=number) for one in own.evidence]


def _premise(source: GroundingSource) -> Premise:
    return Premise(source.text, source.title, source.attributes)


async def _split(answer: str, deadline: float | None) -> list[Claim]:
    """Take an answer apart; a very long one off the event loop."""
    if len(answer) <= _LONG:
        return split_claims(answer)
    claims: list[Claim] = await Call(sync=partial(split_claims, answer), deadline=deadline, what="claims")
    return claims


def grounding_score(claims: Sequence[GroundedClaim]) -> float | None:
    """Return the mean score over the claims that need a check and got one; None without any.

    So Google's ``groundingScore`` fits its examples (0.54 where 1 of 2 claims is grounded).
    """
    scores = [claim.score for claim in claims if claim.check_required and claim.score is not None]
    return sum(scores) / len(scores) if scores else None


def _ledger(
    claims: Sequence[Claim],
    scores: Sequence[ClaimScore],
    sources: Sequence[GroundingSource],
    name: str,
    threshold: float,
    warnings: list[str],
) -> GroundingLedger:
    remaining = iter(scores)
    grounded: list[GroundedClaim] = []
    conflicts: list[Conflict] = []
    for number, claim in enumerate(claims):
        if not claim.check_required:
            grounded.append(_entry(claim, check_required=False))
            continue
        score = next(remaining, None)
        if score is None or score.score is None:
            unread = score is not None and score.verdict is Verdict.NOT_CHECKABLE and not score.left_out
            grounded.append(_entry(claim, flags=[] if unread else [ClaimFlag.NOT_SCORED]))
            continue
        entry = _judged(claim, score, sources, threshold)
        grounded.append(entry)
        if entry.verdict is Verdict.SUPPORTED and entry.supports:
            found = _conflicts(number, score, entry.supports[0], sources)
            conflicts += found
            entry.flags += [ClaimFlag.CONFLICTING_SOURCES] if found else []
    left_out = sum(score.left_out for score in scores)
    if left_out:
        warnings = [*warnings, f"{left_out} of {len(scores)} claims were not judged: the scorer left them out"]
    return GroundingLedger(
        claims=grounded,
        grounding_score=grounding_score(grounded),
        scorer=name,
        conflicts=conflicts,
        warnings=warnings,
    )


def _entry(claim: Claim, *, check_required: bool = True, flags: Sequence[ClaimFlag] = ()) -> GroundedClaim:
    return GroundedClaim(
        text=claim.text,
        span=claim.span,
        check_required=check_required,
        cited=[str(number) for number in claim.cited],
        flags=list(flags),
    )


def _judged(claim: Claim, score: ClaimScore, sources: Sequence[GroundingSource], threshold: float) -> GroundedClaim:
    least = min(threshold, PARTIAL_THRESHOLD)
    supported = score.verdict in (Verdict.SUPPORTED, Verdict.PARTIALLY_SUPPORTED)
    evidence = [one for one in score.evidence if one.score >= least] if supported else _against(score)
    shown = {one.premise for one in evidence}
    evidence += [one for one in score.parts if one.premise not in shown]
    borne = {sources[one.premise].reference_id for one in score.parts}
    supports = [support for one in evidence for support in _supports(claim, one, sources[one.premise])]
    supporting = {sources[one.premise].reference_id for one in score.evidence if supported and one.score >= threshold}
    cited = [str(number) for number in claim.cited]
    wrong = [reference for reference in cited if reference not in supporting | borne] if supporting else []
    flags = []
    if wrong:
        flags.append(ClaimFlag.MISATTRIBUTED)
    if supporting and not cited:
        flags.append(ClaimFlag.UNCITED)
    if cited and not supporting:
        flags.append(ClaimFlag.CITED_WITHOUT_SUPPORT)
    return GroundedClaim(
        text=claim.text,
        span=claim.span,
        verdict=score.verdict,
        score=score.score,
        supports=supports,
        cited=cited,
        flags=flags,
        misattributed=wrong,
    )


def _against(score: ClaimScore) -> list[Evidence]:
    """Return what contradicts a claim; of an unsupported one there is nothing to show."""
    if score.verdict is not Verdict.CONTRADICTED:
        return []
    rivals = {rival.premise for rival in score.rivals}
    return [one for one in score.evidence if one.premise in rivals or not rivals]


def _supports(claim: Claim, evidence: Evidence, source: GroundingSource) -> list[Support]:
    """Return the stretches of a source that bear a claim, those first that have most of its words."""
    said = _words(claim.plain)
    stretches = sorted(_merged(evidence.spans, source.text), key=lambda span: -len(said & _words(span.of(source.text))))
    return [_support(span, source, evidence.score) for span in stretches]


def _words(text: str) -> set[str]:
    return {word.casefold() for word in _WORD.findall(text)}


def _support(span: Span, source: GroundingSource, score: float) -> Support:
    return Support(
        reference_id=source.reference_id,
        node_id=source.node_id,
        span=span,
        quote=span.of(source.text),
        score=min(1.0, max(0.0, score)),
    )


def _merged(spans: Sequence[Span], text: str) -> list[Span]:
    """Join stretches with nothing but space between them, in the text's order."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda one: one.start):
        if merged and not text[merged[-1].end : span.start].strip():
            merged[-1] = Span(start=merged[-1].start, end=max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def _conflicts(number: int, score: ClaimScore, support: Support, sources: Sequence[GroundingSource]) -> list[Conflict]:
    """Return what other references say otherwise than the one that supports a claim."""
    by_reference = {source.reference_id: source for source in sources}
    found: dict[tuple[str, str], Conflict] = {}
    for rival in score.rivals:
        source = sources[rival.premise]
        if source.reference_id == support.reference_id or rival.strength < _SURE_RIVAL:
            continue
        own = ConflictingValue(
            value=one_line(rival.claimed), support=support, date=by_reference[support.reference_id].date
        )
        other = ConflictingValue(
            value=one_line(rival.quote),
            support=_support(_quoted(rival, score), source, rival.strength),
            date=source.date,
        )
        found.setdefault(
            (source.reference_id, rival.kind), Conflict(claim=number, kind=rival.kind, values=[own, other])
        )
    return list(found.values())


def _quoted(rival: Rival, score: ClaimScore) -> Span:
    """Return the sentence that a rival stands in, where the evidence tells it."""
    spans = [span for one in score.evidence if one.premise == rival.premise for span in one.spans]
    around = (span for span in spans if span.start <= rival.span.start and rival.span.end <= span.end)
    return next(around, rival.span)
