"""Reasons to withhold an answer that are known before one is written: the question's classes, and what was found.

Evidence is judged by a calibrated reranker's scores alone. Without them nothing says how relevant it is: counting
words misjudges a question that is worded otherwise than its answer, so that only finding nothing is a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index_agentic_kb.answering.policy import AnswerPolicy
from llama_index_agentic_kb.evidence.provenance import provenance
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import QueryPlan
from llama_index_agentic_kb.schema.activity import QueryClass
from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.schema.response import SkippedReason

__all__ = ["judge_relevance", "skip_reasons"]

UNRELATED: Final = 1.0
"""A calibrated reranker's score, 0 to 4, below which the best passage is about something else ..."""
BARELY_RELATED: Final = 2.0
"""... and below which it holds nothing relevant."""

UNJUDGED: Final = "ignoreLowRelevantContent: relevance was not judged: no calibrated reranker is set"

_IGNORED: Final = {
    QueryClass.ADVERSARIAL_QUERY: ("ignore_adversarial_query", SkippedReason.ADVERSARIAL_QUERY_IGNORED),
    QueryClass.JAIL_BREAKING_QUERY: ("ignore_jail_breaking_query", SkippedReason.JAIL_BREAKING_QUERY_IGNORED),
    QueryClass.NON_ANSWER_SEEKING_QUERY: (
        "ignore_non_answer_seeking_query",
        SkippedReason.NON_ANSWER_SEEKING_QUERY_IGNORED,
    ),
    QueryClass.NON_ANSWER_SEEKING_QUERY_V2: (
        "ignore_non_answer_seeking_query",
        SkippedReason.NON_ANSWER_SEEKING_QUERY_IGNORED_V2,
    ),
}
"""The switch that withholds the answer to a query of a class, and the reason."""


def skip_reasons(
    query: AnswerQuery, policy: AnswerPolicy, retrieval: Retrieval
) -> tuple[list[SkippedReason], list[str]]:
    """Return the reasons, empty where the question is to be answered, and warnings of what could not be judged.

    Args:
        query: Its switches say which classes are not answered, and how strict the relevance gate is.
        policy: The application's own labels, and its gate where the query does not say.
        retrieval: The plan and the evidence.
    """
    positive = {judged.type for judged in retrieval.plan.classifications or () if judged.positive}
    reasons = [reason for kind, (switch, reason) in _IGNORED.items() if kind in positive and getattr(query, switch)]
    if policy.labels and _may_have_label(retrieval.plan):
        reasons.append(SkippedReason.USER_DEFINED_CLASSIFICATION_QUERY_IGNORED)
    gate = query.ignore_low_relevant_content
    gate = policy.low_relevance if gate is None else gate
    irrelevant, judged = judge_relevance(retrieval.nodes, gate=gate)
    reasons += [] if irrelevant is None else [irrelevant]
    return reasons, [UNJUDGED] if gate and not judged else []


def judge_relevance(nodes: Sequence[NodeWithScore], *, gate: bool | None) -> tuple[SkippedReason | None, bool]:
    """Judge the evidence; return why it bears no answer, if so, and whether anything said how relevant it is.

    Args:
        nodes: The evidence.
        gate: True withholds an answer also where the evidence is barely relevant, None where it is about something
            else, False only where there is none.
    """
    if not any(node.node.get_content(MetadataMode.NONE).strip() for node in nodes):
        return SkippedReason.NO_RELEVANT_CONTENT, True
    marks = [mark for node in nodes if (mark := provenance(node)) is not None]
    scores = [mark["reranker_score"] for mark in marks if mark.get("reranker_score") is not None]
    if not scores or gate is False:
        return None, bool(scores)
    if max(scores) < UNRELATED:
        return SkippedReason.OUT_OF_DOMAIN_QUERY_IGNORED, True
    return SkippedReason.NO_RELEVANT_CONTENT if gate and max(scores) < BARELY_RELATED else None, True


def _may_have_label(plan: QueryPlan) -> bool:
    """Return whether a question has one of the application's labels, or was not judged: unchecked is not passed."""
    kind = QueryClass.USER_DEFINED_CLASSIFICATION_QUERY
    verdicts = [judged.positive for judged in plan.classifications or () if judged.type is kind]
    return bool(plan.labels) or not verdicts or any(verdicts)
