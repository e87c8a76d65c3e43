from __future__ import annotations

from typing import Any

import pytest

from llama_index_agentic_kb import (
    AgenticRetriever,
    ConfigurationError,
    InputLimits,
    InvalidRequestError,
    KnowledgeBase,
    KnowledgeSource,
    RetrievalRequest,
    RetrieverOptions,
)
from llama_index_agentic_kb.schema.request import DEFAULT_INPUT_LIMITS
from llama_index_agentic_kb.testing import MemoryRetriever

SMALL = InputLimits(question_characters=10, conversation_characters=15, entries=2, filter_values=3)


def about(**params: Any) -> dict[str, Any]:
    """A request that says something about one source."""
    return {"messages": [{"content": "a"}], "knowledgeSourceParams": [{"knowledgeSourceName": "docs", **params}]}


def of_sources(*names: str) -> dict[str, Any]:
    return {"messages": [{"content": "a"}], "knowledgeSourceParams": [{"knowledgeSourceName": one} for one in names]}


def nots(count: int) -> dict[str, Any]:
    tree: dict[str, Any] = {"key": "a", "value": 1}
    for _ in range(count):
        tree = {"logic": "not", "filters": [tree]}
    return tree


@pytest.mark.parametrize(
    ("request_data", "message"),
    [
        ({"messages": [{"content": "x" * 11}]}, "messages: characters of the question: 11 are too many; at most 10"),
        ({"messages": [{"content": "a"}] * 3}, "messages: messages: 3 are too many; at most 2"),
        ({"messages": [{"content": "x" * 10}, {"content": "y" * 6}]}, "messages: characters: 16 are too many"),
        ({"intents": [{"search": "a"}] * 3}, "intents: intents: 3 are too many; at most 2"),
        ({"intents": [{"search": "a"}, {"search": "x" * 11}]}, r"intents\[1\].search: characters: 11 are too many"),
        (about(filterAddOn="topic eq 'abc'"), r"Params\[docs\].filterAddOn: characters: 14 are too many"),
        ({"messages": [{"content": [{"type": "text", "text": "a"}] * 3}]}, "pieces of content: 3 are too many"),
        (of_sources(*"abc"), "knowledgeSourceParams: entries: 3 are too many; at most 2"),
        (of_sources("x" * 1001), "Name: characters: 1,001 are too"),
        (about(filters={"key": "a", "operator": "in", "value": [1, 2, 3, 4]}), r"filters: values: 4 are too many"),
        (about(filters={"key": "a", "value": "x" * 300}), r"filters: characters: 301 are too many; at most 300"),
        (about(filters=nots(64)), r"\[docs\].filters: levels: 65 are too many; at most 64"),
    ],
)
def test_what_is_too_large_is_refused_by_field(request_data: dict[str, Any], message: str) -> None:
    """Before anything is searched; the message names the limit that may be set."""
    source = MemoryRetriever(["rain"])
    kb = KnowledgeBase(
        [KnowledgeSource("docs", retriever=source)], effort="minimal", options=RetrieverOptions(input_limits=SMALL)
    )
    with pytest.raises(InvalidRequestError, match=message):
        kb.retrieve(request_data)
    assert source.queries == []


def test_what_fits_is_taken() -> None:
    """Up to each limit, exactly."""
    SMALL.check(RetrievalRequest.parse({"messages": [{"content": "y" * 5}, {"content": "x" * 10}]}))
    SMALL.check(RetrievalRequest.parse({"intents": [{"search": "x" * 10}] * 2}))
    SMALL.check(RetrievalRequest.parse(about(filters=nots(63))))
    SMALL.check(RetrievalRequest.parse(about(filters={"key": "a", "operator": "in", "value": ["x" * 99] * 3})))


def test_a_plain_retriever_is_bounded_too() -> None:
    """What a chat engine hands on is a request as any other."""
    retriever = AgenticRetriever([KnowledgeSource("docs", retriever=MemoryRetriever(["rain"]))])
    with pytest.raises(InvalidRequestError, match="characters of the question: 32,001 are too many"):
        retriever.retrieve("x" * (DEFAULT_INPUT_LIMITS.question_characters + 1))


def test_a_limit_that_lets_nothing_through_is_refused() -> None:
    """Every number is at least 1."""
    with pytest.raises(ConfigurationError, match=r"InputLimits.entries must be at least 1: 0"):
        InputLimits(entries=0)


@pytest.mark.parametrize(
    "request_data",
    [
        {"messages": [{"content": "a"}], **{f"field{number}": number for number in range(5_000)}},
        {"messages": [{"content": "a"}], "x" * 1_000_000: 1},
        {"messages": [{"content": "a"}], "outputMode": "x" * 1_000_000},
        of_sources(*["x" * 1_000_000] * 2),
        of_sources(*(f"{number % 10_000}" for number in range(20_000))),
    ],
    ids=["many fields", "a long field", "a long value", "one source twice", "many sources twice"],
)
def test_what_is_wrong_is_told_in_a_few_words(request_data: dict[str, Any]) -> None:
    """However much of it there is; and found in one pass: 100,000 names took minutes once."""
    kb = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(["rain"]))], effort="minimal")
    with pytest.raises(InvalidRequestError) as caught:
        kb.retrieve(request_data)
    assert len(str(caught.value)) < 8_000
