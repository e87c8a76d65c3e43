"""What an ``AnswerQuery`` asks of each stage: the request, the classes, the instructions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from llama_index_agentic_kb.answering.policy import AnswerPolicy
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.planning import ClassificationSpec
from llama_index_agentic_kb.retriever import AgenticRetriever
from llama_index_agentic_kb.schema import Message, ReasoningEffort, RetrievalRequest, all_of
from llama_index_agentic_kb.schema.answer import QueryClass
from llama_index_agentic_kb.schema.answer_query import AnswerQuery, DataStoreQuery
from llama_index_agentic_kb.schema.request import SourceParams

__all__ = ["check_sizes", "classification_of", "instructions_of", "request_of"]

MOST_GIVEN: Final = 32_000
"""Characters of all that the end user gave along; Google takes 8,000 of each piece."""

_TAG: Final = re.compile(r"[A-Za-z]{2,8}(?:-[A-Za-z0-9]{1,8}){0,5}")
"""A language tag as BCP 47 has them; enough to keep anything else out of a prompt."""


def request_of(
    query: AnswerQuery, history: Sequence[Message], retriever: AgenticRetriever
) -> tuple[RetrievalRequest, list[str]]:
    """Give the retrieval request of a query, and what of the query it can't say.

    Its filters narrow every source; of data stores, which are sources here, only those that are named are searched. A
    query that is not to be rephrased is searched as it is (minimal effort), one of several rephrasing steps at medium
    effort; an effort that the request names goes before both.

    Args:
        query: What is asked.
        history: The turns of its session, oldest first.
        retriever: Whose sources are searched.

    Raises:
        InvalidRequestError: A data store is no source.
    """
    request = query.request
    changes: dict[str, object] = {}
    if history and request.messages:
        changes["messages"] = [*history, *request.messages]
    if request.retrieval_reasoning_effort is None:
        effort = _effort(query)
        changes |= {"retrieval_reasoning_effort": effort} if effort is not None else {}
    params = _source_params(query, retriever)
    if params:
        changes["knowledge_source_params"] = params
    return request.model_copy(update=changes), _left_out(query)


def _effort(query: AnswerQuery) -> ReasoningEffort | None:
    """Give the effort that a query's rephrasing stands for; None is the retriever's own."""
    if query.rephrasing.disabled:
        return ReasoningEffort.MINIMAL
    return ReasoningEffort.MEDIUM if query.rephrasing.max_steps > 1 else None


def _source_params(query: AnswerQuery, retriever: AgenticRetriever) -> list[SourceParams]:
    """Give what is said of every source; nothing where the query says nothing of any."""
    if query.filters is None and not query.data_stores:
        return []
    stores = _by_source(query.data_stores, retriever)
    made = []
    for name in retriever.sources:
        given = query.request.params_for(name)
        store = stores.get(name)
        if query.data_stores and store is None:
            made.append(given.model_copy(update={"never_query_source": True, "always_query_source": False}))
            continue
        own = None if store is None else store.filters
        changes: dict[str, object] = {"filters": all_of(given.filters, query.filters, own)}
        if store is not None and store.max_results is not None:
            changes["max_output_documents"] = store.max_results
        made.append(given.model_copy(update=changes))
    return made


def _by_source(stores: Sequence[DataStoreQuery], retriever: AgenticRetriever) -> Mapping[str, DataStoreQuery]:
    named = {one.data_store.rstrip("/").rpartition("/")[2]: one for one in stores}
    unknown = sorted(set(named) - set(retriever.sources))
    if unknown:
        known = ", ".join(retriever.sources)
        raise InvalidRequestError(f"dataStoreSpecs: {', '.join(unknown)}: there is no such source; there are {known}")
    return named


def check_sizes(query: AnswerQuery) -> None:
    """Refuse what would leave a model no room for evidence.

    Raises:
        InvalidRequestError: What the end user gave along is too long.
    """
    given = sum(len(chunk.content) for chunk in query.end_user_chunks)
    if given > MOST_GIVEN:
        raise InvalidRequestError(f"endUserSpec: {given:,} characters are too many; at most {MOST_GIVEN:,} together")


def _left_out(query: AnswerQuery) -> list[str]:
    """Tell what a query asks for that is not done; nothing is left out silently."""
    told = {
        "boostSpec": bool(query.boosts) or any(one.boosts for one in query.data_stores),
        "orderBy": bool(query.order_by),
        "customSearchOperators": any(one.custom_search_operators for one in query.data_stores),
        "modelVersion": bool(query.model_version),
    }
    return [f"{name}: not supported; it was left out" for name, asked in told.items() if asked]


def classification_of(query: AnswerQuery, policy: AnswerPolicy) -> ClassificationSpec | None:
    """Give what a question is classified as: what is to be reported, and what the answer depends on."""
    types = list(query.classify)
    types += [QueryClass.ADVERSARIAL_QUERY] if query.ignore_adversarial_query else []
    types += [QueryClass.JAIL_BREAKING_QUERY] if query.ignore_jail_breaking_query else []
    if query.ignore_non_answer_seeking_query:
        types += [QueryClass.NON_ANSWER_SEEKING_QUERY, QueryClass.NON_ANSWER_SEEKING_QUERY_V2]
    if not types and not policy.labels:
        return None
    return ClassificationSpec(tuple(types), policy.labels)


def instructions_of(query: AnswerQuery) -> str:
    """Give the application's instructions to the model that writes: its preamble, and the answer's language.

    Raises:
        InvalidRequestError: The language is no language tag.
    """
    told = [query.preamble.strip()] if query.preamble.strip() else []
    if query.language:
        if not _TAG.fullmatch(query.language):
            raise InvalidRequestError(f"answerLanguageCode: {query.language!r} is no language tag, such as de or zh-CN")
        told.append(
            f'Write the answer in the language with the BCP 47 tag "{query.language}", whatever the question\'s.'
        )
    return "\n".join(told)
