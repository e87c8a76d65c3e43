"""Embedding models behind a network: their retries are ours, and their hangs end with the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from llama_index_agentic_kb._aio import arun, deadline_after, run
from llama_index_agentic_kb.account.budget import Budget, RetryBudget, set_budget
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.llm.calls import calls_of
from llama_index_agentic_kb.search.embedding import embed_queries
from llama_index_agentic_kb.testing import LoopbackOpenAI
from tests.faulty_server import Fault
from tests.openai_embedding import OpenAIEmbedding

QUERIES = ["Who was first?", "And who was next?"]

Perform = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["sync", "async"])
def perform(request: pytest.FixtureRequest) -> Perform:
    """Performs a flow with either driver."""
    return run if request.param == "sync" else lambda flow: asyncio.run(arun(flow))


async def embed(model: OpenAIEmbedding, seconds: float = 30, budget: RetryBudget | None = None) -> list[Any]:
    if budget is not None:
        set_budget(Budget(retries=budget))
    return await embed_queries(model, QUERIES, deadline=deadline_after(seconds))


def test_vectors_come_in_one_request(perform: Perform) -> None:
    """As the model's own methods give them, and the model is left as it was."""
    with LoopbackOpenAI() as server:
        model = OpenAIEmbedding.of(server)
        assert perform(embed(model)) == model.get_text_embedding_batch(QUERIES)
        assert len(server.requests) == 2
        assert model.max_retries == 10


def test_a_failing_server_is_asked_as_often_as_the_budget_lets(perform: Perform) -> None:
    """Not ten times ten times, as the model and its client would."""
    with LoopbackOpenAI(embedding_fault=Fault.status(429, retry_after=0)) as server:
        outcomes = perform(embed(OpenAIEmbedding.of(server), budget=RetryBudget(share=0, minimum=1)))
        assert all(isinstance(outcome, Exception) for outcome in outcomes)
        assert len(server.requests) == 2


def test_a_hanging_server_keeps_nothing(perform: Perform) -> None:
    """The caller hears of it at the deadline, and the call's place is free soon after."""
    with LoopbackOpenAI(embedding_fault=Fault.hang()) as server:
        model = OpenAIEmbedding.of(server)
        (first, _) = perform(embed(model, seconds=0.2))
        assert isinstance(first, DeadlineExceededError)
        bulkhead = calls_of(model, "", lambda error: error).bulkhead
        ends = time.monotonic() + 5
        while time.monotonic() < ends and (bulkhead.state.abandoned or bulkhead.state.at_work):
            time.sleep(0.01)
        assert (bulkhead.state.abandoned, bulkhead.state.at_work) == (0, 0)
