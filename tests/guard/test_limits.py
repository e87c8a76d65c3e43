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
)
from llama_index_agentic_kb.guard.limits import DEFAULT_INPUT_LIMITS
from llama_index_agentic_kb.testing import MemoryRetriever

SMALL = InputLimits(question_characters=10, messages=2, conversation_characters=15, intents=2, filter_characters=12)


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
            {
                "messages": [{"content": "a"}],
                "knowledgeSourceParams": [{"knowledgeSourceName": "docs", "filterAddOn": "topic eq 'abc'"}],
            },
            r"knowledgeSourceParams\[docs\].filterAddOn: characters: 14 are too many; at most 12",
        ),
    ],
    ids=["question", "messages", "conversation", "intents", "intent", "filter"],
)
def test_what_is_too_large_is_refused_by_field(request_data: dict[str, Any], message: str) -> None:
    """Before anything is searched; the message names the limit that may be set."""
    source = MemoryRetriever(["rain"])
    kb = KnowledgeBase([KnowledgeSource("docs", retriever=source)], effort="minimal", input_limits=SMALL)
    with pytest.raises(InvalidRequestError, match=message + r".*\(InputLimits\."):
        kb.retrieve(request_data)
    assert source.queries == []


def test_what_fits_is_taken() -> None:
    """Up to each limit, exactly."""
    SMALL.check(RetrievalRequest.parse({"messages": [{"content": "y" * 5}, {"content": "x" * 10}]}))
    SMALL.check(RetrievalRequest.parse({"intents": [{"search": "x" * 10}] * 2}))


def test_a_plain_retriever_is_bounded_too() -> None:
    """What a chat engine hands on is a request as any other."""
    retriever = AgenticRetriever([KnowledgeSource("docs", retriever=MemoryRetriever(["rain"]))])
    with pytest.raises(InvalidRequestError, match="characters of the question: 32,001 are too many"):
        retriever.retrieve("x" * (DEFAULT_INPUT_LIMITS.question_characters + 1))


def test_a_limit_that_lets_nothing_through_is_refused() -> None:
    """Every number is at least 1."""
    with pytest.raises(ConfigurationError, match=r"InputLimits\.intents must be at least 1: 0"):
        InputLimits(intents=0)
