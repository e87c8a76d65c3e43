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
from llama_index_agentic_kb.guard.limits import DEFAULT_INPUT_LIMITS
from llama_index_agentic_kb.testing import MemoryRetriever

SMALL = InputLimits(
    question_characters=10,
    messages=2,
    conversation_characters=15,
    parts=3,
    intents=2,
    sources=2,
    name_characters=5,
    filter_characters=12,
    filter_values=3,
    filter_text=20,
    filter_levels=2,
)


def about(**params: Any) -> dict[str, Any]:
    """A request that says something about one source."""
    return {"messages": [{"content": "a"}], "knowledgeSourceParams": [{"knowledgeSourceName": "docs", **params}]}


def nots(count: int) -> dict[str, Any]:
    """So many groups inside each other."""
    tree: dict[str, Any] = {"key": "a", "value": 1}
    for _ in range(count):
        tree = {"logic": "not", "filters": [tree]}
    return tree


@pytest.mark.parametrize(
    ("request_data", "message"),
    [
        ({"messages": [{"content": "x" * 11}]}, "messages: characters of the question: 11 are too many; at most 10"),
        ({"messages": [{"content": "a"}] * 3}, "messages: messages: 3 are too many; at most 2"),
        (
            {"messages": [{"content": "x" * 10}, {"content": "y" * 6}]},
            "messages: characters: 16 are too many; at most 15",
        ),
        ({"intents": [{"search": "a"}] * 3}, "intents: intents: 3 are too many; at most 2"),
        ({"intents": [{"search": "a"}, {"search": "x" * 11}]}, r"intents\[1\].search: characters: 11 are too many"),
        (
            about(filterAddOn="topic eq 'abc'"),
            r"knowledgeSourceParams\[docs\].filterAddOn: characters: 14 are too many; at most 12",
        ),
        (
            {"messages": [{"content": [{"type": "text", "text": "a"}] * 4}]},
            "messages: pieces of content: 4 are too many; at most 3",
        ),
        (
            {"messages": [{"content": "a"}], "knowledgeSourceParams": [{"knowledgeSourceName": one} for one in "abc"]},
            "knowledgeSourceParams: entries: 3 are too many; at most 2",
        ),
        (
            {"messages": [{"content": "a"}], "knowledgeSourceParams": [{"knowledgeSourceName": "x" * 6}]},
            r"knowledgeSourceParams\[0\].knowledgeSourceName: characters: 6 are too many; at most 5",
        ),
        (
            about(filters={"key": "a", "operator": "in", "value": [1, 2, 3, 4]}),
            r"knowledgeSourceParams\[docs\].filters: values: 4 are too many; at most 3",
        ),
        (
            about(filters={"key": "a", "value": "x" * 20}),
            r"knowledgeSourceParams\[docs\].filters: characters: 21 are too many; at most 20",
        ),
        (about(filters=nots(2)), r"knowledgeSourceParams\[docs\].filters: levels: 3 are too many; at most 2"),
    ],
    ids=[
        "question",
        "messages",
        "conversation",
        "intents",
        "intent",
        "filter",
        "parts",
        "sources",
        "name",
        "values",
        "filter text",
        "levels",
    ],
)
def test_what_is_too_large_is_refused_by_field(request_data: dict[str, Any], message: str) -> None:
    """Before anything is searched; the message names the limit that may be set."""
    source = MemoryRetriever(["rain"])
    kb = KnowledgeBase(
        [KnowledgeSource("docs", retriever=source)], effort="minimal", options=RetrieverOptions(input_limits=SMALL)
    )
    with pytest.raises(InvalidRequestError, match=message + r".*\(InputLimits\."):
        kb.retrieve(request_data)
    assert source.queries == []


def test_what_fits_is_taken() -> None:
    """Up to each limit, exactly."""
    SMALL.check(RetrievalRequest.parse({"messages": [{"content": "y" * 5}, {"content": "x" * 10}]}))
    SMALL.check(RetrievalRequest.parse({"intents": [{"search": "x" * 10}] * 2}))
    SMALL.check(RetrievalRequest.parse(about(filters=nots(1))))
    SMALL.check(RetrievalRequest.parse(about(filters={"key": "a", "operator": "in", "value": ["x" * 5] * 3})))


def test_a_plain_retriever_is_bounded_too() -> None:
    """What a chat engine hands on is a request as any other."""
    retriever = AgenticRetriever([KnowledgeSource("docs", retriever=MemoryRetriever(["rain"]))])
    with pytest.raises(InvalidRequestError, match="characters of the question: 32,001 are too many"):
        retriever.retrieve("x" * (DEFAULT_INPUT_LIMITS.question_characters + 1))


def test_a_limit_that_lets_nothing_through_is_refused() -> None:
    """Every number is at least 1."""
    with pytest.raises(ConfigurationError, match=r"InputLimits\.intents must be at least 1: 0"):
        InputLimits(intents=0)


@pytest.mark.parametrize(
    "request_data",
    [
        {"messages": [{"content": "a"}], **{f"field{number}": number for number in range(5_000)}},
        {"messages": [{"content": "a"}], "x" * 1_000_000: 1},
        {"messages": [{"content": "a"}], "outputMode": "x" * 1_000_000},
        {"messages": [{"content": "a"}], "knowledgeSourceParams": [{"knowledgeSourceName": "x" * 1_000_000}] * 2},
        {
            "messages": [{"content": "a"}],
            "knowledgeSourceParams": [{"knowledgeSourceName": f"{number % 10_000}"} for number in range(20_000)],
        },
    ],
    ids=["many fields", "a long field", "a long value", "one source twice", "many sources twice"],
)
def test_what_is_wrong_is_told_in_a_few_words(request_data: dict[str, Any]) -> None:
    """However much of it there is; and found in one pass: 100,000 names took minutes once."""
    kb = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(["rain"]))], effort="minimal")
    with pytest.raises(InvalidRequestError) as caught:
        kb.retrieve(request_data)
    assert len(str(caught.value)) < 8_000
