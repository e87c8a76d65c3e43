"""Why a question is not to be answered, told from what it was classified as and from what was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from llama_index_agentic_kb.answering.policy import AnswerPolicy
from llama_index_agentic_kb.answering.relevance import judge_relevance
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import QueryPlan, SubQueryOrigin
from llama_index_agentic_kb.schema.answer import QueryClass, SkippedReason
from llama_index_agentic_kb.schema.answer_query import AnswerQuery

__all__ = ["objections"]

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
"""The switch that withholds the answer to a query of a class, and the reason that is told."""


def objections(query: AnswerQuery, policy: AnswerPolicy, retrieval: Retrieval) -> Iterator[SkippedReason]:
    """Give the reasons; none where the question is to be answered.

    Args:
        query: What was asked; its switches say which classes are not answered, and how strict the relevance gate is.
        policy: The application's own labels, and its gate where the query says nothing.
        retrieval: What was planned and found.
    """
    positive = {one.type for one in retrieval.plan.classifications or () if one.positive}
    for kind, (switch, reason) in _IGNORED.items():
        if kind in positive and getattr(query, switch):
            yield reason
    if policy.labels and _may_be_of_a_label(retrieval.plan):
        yield SkippedReason.USER_DEFINED_CLASSIFICATION_QUERY_IGNORED
    gate = query.ignore_low_relevant_content
    gate = policy.low_relevance if gate is None else gate
    planned = [one.query for one in retrieval.plan.sub_queries if one.origin is not SubQueryOrigin.QUESTION]
    # A question that follows others says little by itself.
    asked = planned if retrieval.scope.history else [retrieval.scope.question, *planned]
    relevance = judge_relevance(asked, retrieval.nodes, strict=gate is True)
    if relevance.reason is not None and (gate is not False or relevance.signal == "none"):
        yield relevance.reason


def _may_be_of_a_label(plan: QueryPlan) -> bool:
    """Whether a question is of one of the application's labels, or was not judged: what is not checked is not told."""
    kind = QueryClass.USER_DEFINED_CLASSIFICATION_QUERY
    verdicts = [one.positive for one in plan.classifications or () if one.type is kind]
    return bool(plan.labels) or not verdicts or any(verdicts)
