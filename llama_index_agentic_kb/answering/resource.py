"""Puts an answer together: what was asked for of it, and nothing else.

references = answer_references(retrieval.nodes, retrieval.selected)
steps = answer_steps(retrieval.plan, retrieval.log.records, retrieval.nodes, retrieval.missing, selected=...)
answer = make_answer(query, text, references=references, steps=steps, ledger=ledger)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Final

from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    Finding,
    MissingPart,
    ModelQueryPlanningActivity,
    Outcome,
    QueryPlan,
    SourceActivity,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.schema.answer import (
    Answer,
    AnswerReference,
    AnswerState,
    AnswerStep,
    QueryClassification,
    SafetyRating,
    SkippedReason,
    ledger_citations,
    ledger_supports,
)
from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.schema.grounding import GroundingLedger

__all__ = ["SUB_QUESTION", "make_answer", "unanswered_parts"]

SUB_QUESTION: Final = "sub-question"
"""``MissingPart.what`` of a part of the question that nothing was found for."""


def make_answer(
    query: AnswerQuery,
    text: str,
    *,
    references: Mapping[str, AnswerReference] | None = None,
    steps: Sequence[AnswerStep] = (),
    ledger: GroundingLedger | None = None,
    related_questions: Sequence[str] = (),
    classifications: Sequence[QueryClassification] | None = None,
    skipped_reasons: Sequence[SkippedReason] = (),
    safety_ratings: Sequence[SafetyRating] = (),
    created_at: datetime | None = None,
    completed_at: datetime | None = None,
    state: AnswerState = AnswerState.SUCCEEDED,
) -> Answer:
    """Give the answer of a query.

    What the query didn't ask for is left out: citations, grounding supports, related questions, classes, safety
    ratings. The grounding score is told where supports are asked for, or answers are filtered by it. A withheld answer
    has no citations and no supports (its text is no longer what was checked); steps and references stay.

    Args:
        query: What was asked, and how. Its language is the answer's.
        text: The answer, or what is said in its place.
        references: All that the model was given, by the N of ``[ref_id:N]``; see ``answer_references``.
        steps: See ``answer_steps``.
        ledger: The claims of this text, checked (``grounding.stripping`` makes one of a text without markers); of a
            withheld answer, those of what was written. None where nothing was checked.
        related_questions: Questions that the evidence can answer.
        classifications: Whether the query is of a class, for each that was looked at (``QueryPlan.classifications``);
            None where none was.
        skipped_reasons: Why the answer was withheld; none where it was not.
        safety_ratings: Of the user's own hook.
        created_at: When it was begun, with its time zone.
        completed_at: When it was done, with its time zone.
        state: Of an answer that was withheld on purpose it is SUCCEEDED, too.

    Raises:
        InvalidRequestError: The ledger is of another text.
    """
    references = references or {}
    checked = GroundingLedger() if ledger is None or skipped_reasons else ledger
    checked.check_spans(text)
    ids = list(references)
    scored = query.grounding_supports or query.filtering_level is not None
    return Answer(
        state=state,
        text=text,
        language=query.language,
        grounding_score=ledger.grounding_score if ledger is not None and scored else None,
        citations=ledger_citations(checked, ids) if query.include_citations else [],
        grounding_supports=ledger_supports(checked, ids) if query.grounding_supports else [],
        references=list(references.values()),
        related_questions=list(dict.fromkeys(related_questions)) if query.related_questions else [],
        steps=list(steps),
        query_classifications=_classes(query, classifications),
        skipped_reasons=list(dict.fromkeys(skipped_reasons)),
        created_at=created_at,
        completed_at=completed_at,
        safety_ratings=list(safety_ratings) if query.safety else [],
    )


def _classes(
    query: AnswerQuery, classifications: Sequence[QueryClassification] | None
) -> list[QueryClassification] | None:
    """Give the classes that were asked for and looked at; None where there is none, which is no verdict."""
    looked_at = {one.type: one for one in classifications or ()}
    return [looked_at[kind] for kind in query.classify if kind in looked_at] or None


def unanswered_parts(
    plan: QueryPlan, findings: Sequence[Finding], records: Sequence[ActivityRecord]
) -> list[MissingPart]:
    """Give the parts of a question that lack evidence: planned sub-queries that come to nothing.

    One comes to nothing where all its searches, and those of its branches, found nothing or failed; or where further
    searches waited for its answer, and no passage gave one. The question itself is no part: that nothing at all was
    found is told as missing evidence.

    Args:
        plan: What was searched.
        findings: What sub-queries found on the way.
        records: The request's account.

    Returns:
        One for each such sub-query, its outcome that of its searches: empty, or how they failed.
    """
    outcomes: dict[str, list[Outcome]] = {}
    for record in records:
        if isinstance(record, SourceActivity):
            outcomes.setdefault(record.sub_query_id, []).append(_outcome(record))
    parts: dict[str, list[SubQuery]] = {}
    for sub_query in plan.sub_queries:
        if sub_query.origin is not SubQueryOrigin.QUESTION:
            parts.setdefault(sub_query.part_of or sub_query.id, []).append(sub_query)
    answered = {finding.sub_query_id for finding in findings}
    waited_for = {parent for sub_query in plan.sub_queries for parent in sub_query.depends_on}
    read = any(_was_read(record) for record in records)
    missing = []
    for name, branches in parts.items():
        ended = [one for branch in branches for one in outcomes.get(branch.id, [])]
        ids = {name, *(branch.id for branch in branches)}
        if Outcome.OK not in ended:
            missing.append(_part(branches[0], _worst(ended), "nothing was found for it"))
        elif read and name in waited_for and not ids & answered:
            missing.append(_part(branches[0], Outcome.EMPTY, "no passage that was found answers it"))
    return missing


def _outcome(record: SourceActivity) -> Outcome:
    """Give how a search ended: one whose every document a threshold dropped has found nothing."""
    if record.outcome is Outcome.OK and record.count == 0:
        return Outcome.EMPTY
    return record.outcome or Outcome.SKIPPED


def _was_read(record: ActivityRecord) -> bool:
    reads = isinstance(record, ModelQueryPlanningActivity) and record.purpose == "findings"
    return reads and record.outcome is Outcome.OK


def _worst(ended: Collection[Outcome]) -> Outcome:
    """Give the outcome of searches that found nothing: "empty" only where none failed."""
    failed = [one for one in ended if one.failed]
    if failed:
        return failed[0]
    return Outcome.EMPTY if Outcome.EMPTY in ended else Outcome.SKIPPED


def _part(sub_query: SubQuery, outcome: Outcome, why: str) -> MissingPart:
    reasons = {
        Outcome.TIMEOUT: "its searches gave no answer in time",
        Outcome.ERROR: "its searches failed",
        Outcome.DENIED: "it could not be searched",
        Outcome.SKIPPED: "it was not searched",
    }
    told = f"{one_line(sub_query.query)}: {reasons.get(outcome, why)}"
    return MissingPart(what=SUB_QUESTION, outcome=outcome, reason=told, sub_query_id=sub_query.id)
