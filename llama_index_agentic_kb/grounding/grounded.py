"""Checks an answer against the nodes that it was generated from: grounding ledger, repair, markers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.grounding.citations import Markers, strip_markers
from llama_index_agentic_kb.grounding.claims import split_claims
from llama_index_agentic_kb.grounding.settings import Grounding
from llama_index_agentic_kb.guard.spotlighting import Spotlighting
from llama_index_agentic_kb.llm import LanguageModel
from llama_index_agentic_kb.schema import Reference
from llama_index_agentic_kb.schema.activity import Purpose
from llama_index_agentic_kb.schema.grounding import ClaimFlag, GroundedClaim, GroundingLedger
from llama_index_agentic_kb.schema.response import SkippedReason

# Metadata keys of a document's date; the first one present is used.
_DATES: Final = ("date", "published", "published_at", "publication_date", "last_modified_date", "creation_date")
_LONGEST_DATE: Final = 40


@dataclass(frozen=True, slots=True)
class GroundedText:
    """An answer with its grounding ledger.

    Args:
        text: The answer after repair, with its markers processed as configured.
        ledger: The grounding ledger of this text.
        skipped: Reasons to withhold the answer; empty if it may be returned.
    """

    text: str
    ledger: GroundingLedger
    skipped: list[SkippedReason] = field(default_factory=list)


async def ground_text(
    text: str,
    nodes: Sequence[NodeWithScore],
    references: Sequence[Reference],
    settings: Grounding,
    *,
    model: LanguageModel | None = None,
    spotlighting: Spotlighting | None = "delimit",
    deadline: float | None = None,
    recorded: Callable[[Purpose], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> GroundedText:
    """Check an answer against its evidence, and repair it if configured.

    Args:
        text: The answer; ``[ref_id:N]`` is the N-th node.
        nodes: The nodes that the answer was generated from, in the order of the markers.
        references: The references that the response shows; other nodes count as evidence but are not quoted.
        settings: The settings of check and repair.
        model: Language model that rewrites claims if ``settings.repair`` is "rewrite".
        spotlighting: How prompts mark retrieved text.
        deadline: ``time.monotonic()`` value by which the check must end.
        recorded: Context manager in which the model calls of a purpose are made.
    """
    from llama_index_agentic_kb.grounding.ledger import GroundingSource, ground  # noqa: PLC0415 (loads the scorers)
    from llama_index_agentic_kb.grounding.repair import is_low_grounded, repair  # noqa: PLC0415 (same)

    titles = {reference.id: reference.title for reference in references}
    sources = []
    for position, one in enumerate(nodes):
        date = next(filter(None, map(one.node.metadata.get, _DATES)), None)
        sources.append(
            GroundingSource(
                str(position),
                one.node.node_id,
                getattr(one.node, "text", None) or "",
                title=titles.get(str(position), ""),
                date=None if date is None else one_line(str(date), _LONGEST_DATE),
            )
        )
    scorer, threshold = settings.scorer, settings.threshold
    with recorded("check"):
        ledger = await ground(text, sources, scorer, threshold=threshold, deadline=deadline)
    if settings.repair is not None:
        with recorded("repair"):
            repaired = await repair(
                text,
                ledger,
                sources,
                model=model if settings.repair == "rewrite" else None,
                scorer=scorer,
                spotlighting=spotlighting,
                threshold=threshold,
                deadline=deadline,
            )
        text, ledger = repaired.answer, repaired.ledger
    emptied = settings.repair is not None and bool(ledger.changes) and not ledger.claims
    low = emptied or (settings.filtering is not None and is_low_grounded(ledger, settings.filtering))
    if len(titles) < len(sources):
        ledger = _only_shown(ledger, titles.keys())
    if settings.markers == Markers.STRIP:
        text, ledger = strip_markers(text, ledger)
    return GroundedText(text, ledger, [SkippedReason.LOW_GROUNDED_ANSWER] if low else [])


def own_citations(text: str) -> GroundingLedger:
    """Return a ledger of unchecked claims: an answer's own citations, neither scored nor judged."""
    claims = [
        GroundedClaim(
            text=claim.text, span=claim.span, check_required=claim.check_required, cited=[*map(str, claim.cited)]
        )
        for claim in split_claims(text)
    ]
    return GroundingLedger(claims=claims)


def _only_shown(ledger: GroundingLedger, shown: Collection[str]) -> GroundingLedger:
    """Return a ledger without quotes and ids of references that the response does not show."""
    conflicts = [one for one in ledger.conflicts if all(side.support.reference_id in shown for side in one.values)]
    disputed = {conflict.claim for conflict in conflicts}
    claims = []
    for number, claim in enumerate(ledger.claims):
        changed = {
            "supports": [one for one in claim.supports if one.reference_id in shown],
            "cited": [one for one in claim.cited if one in shown],
            "misattributed": [one for one in claim.misattributed if one in shown],
            "flags": [one for one in claim.flags if one is not ClaimFlag.CONFLICTING_SOURCES or number in disputed],
        }
        claims.append(claim.model_copy(update=changed))
    return ledger.model_copy(update={"claims": claims, "conflicts": conflicts})
