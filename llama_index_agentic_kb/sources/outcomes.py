"""How searches ended, and what failed ones mean for their request: an error, or a response that tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.errors import DeadlineExceededError, DeniedError, FailedSearch, RetrievalError
from llama_index_agentic_kb.schema import MissingPart, Outcome, SearchLane
from llama_index_agentic_kb.sources.results import NodeList

if TYPE_CHECKING:
    from llama_index_agentic_kb.sources.fan_out import SourceSearch

__all__ = ["missing_parts", "outcome_of", "raise_if_lost", "told", "told_list"]


def outcome_of(error: Exception) -> Outcome:
    """Give how a search ended that failed."""
    if isinstance(error, DeniedError):
        return Outcome.DENIED
    return Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR


def told(error: Exception | None) -> str:
    """Give an error in words; some have none of their own."""
    return type(error).__name__ if error is None else error_message(error)


def told_list(ranked: NodeList, source: str) -> SearchLane:
    """Give a ranked list as the account has it."""
    return SearchLane(
        kind=ranked.kind,
        count=len(ranked.nodes),
        candidates=ranked.candidates,
        elapsed_ms=ranked.elapsed_ms,
        error=None if ranked.error is None else describe_error(ranked.error, source, "search"),
        note=ranked.note,
    )


def raise_if_lost(lanes: Sequence[SourceSearch]) -> None:
    """Raise where no search could answer, or one that must did not; anything less is reported in the response.

    Raises:
        DeniedError: Every cause is a filter that could not be applied.
        RetrievalError: Every search failed, or one whose source has ``failOnError``. It holds every cause.
    """
    lost = [lane for lane in lanes if lane.error is not None]
    strict = [lane for lane in lost if lane.must_answer]
    if not strict and len(lost) < len(lanes):
        return
    guilty = strict or lost
    causes = {f"{lane.source.name}: {lane.sub_query.query}": lane.error for lane in guilty if lane.error is not None}
    reasons = {lane.source.name: told(lane.error) for lane in reversed(guilty)}
    kind = DeniedError if all(isinstance(error, DeniedError) for error in causes.values()) else RetrievalError
    what = "a source with failOnError failed" if strict else "every selected source failed"
    message = f"{what}: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise kind(message, causes, [_failed(lane, lane.error) for lane in guilty if lane.error is not None])


def _failed(lane: SourceSearch, error: Exception) -> FailedSearch:
    described = describe_error(error)
    return FailedSearch(lane.source.name, lane.stage, described.code, described.message, lane.sub_query.query)


def missing_parts(lanes: Sequence[SourceSearch]) -> list[MissingPart]:
    """Give what the failed lanes leave missing."""
    return [
        MissingPart(
            what=lane.source.name,
            outcome=lane.record.outcome or Outcome.ERROR,
            reason=told(lane.error),
            sub_query_id=lane.sub_query.id,
        )
        for lane in lanes
        if lane.error is not None
    ]
