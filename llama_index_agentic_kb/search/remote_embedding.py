"""Embedding models that are reached over a network: a bulkhead for each, retries here alone, a deadline."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding

from llama_index_agentic_kb.guard.resilience import NO_RETRIES, RetryPolicy, retried
from llama_index_agentic_kb.llm.calls import calls_of, once, retries_itself

__all__ = ["remotely"]

POLICY = RetryPolicy()


async def remotely(
    model: BaseEmbedding, told: BaseEmbedding, method: str, given: str | list[str], *, deadline: float | None
) -> Any:
    """Call a method of a model that is reached over a network.

    Of LlamaIndex's ``OpenAIEmbedding`` and its subclasses a copy is called that tries once; a model of another kind
    that says ``max_retries`` retries itself, and is not retried here.

    Args:
        model: The user's, never changed.
        told: The model, or a copy of it with the request's handlers.
        method: The sync method's name; the async one's has an "a" before it.
        given: Its argument.
        deadline: ``time.monotonic()`` at which it is given up; None waits.

    Raises:
        DeadlineExceededError: It did not answer in time.
        Exception: What its client raised in the last attempt.
    """
    calls = calls_of(model, f"embedding model {model.model_name}", _as_it_is)
    asked = once(told, model)

    async def attempt(until: float | None) -> Any:
        return await calls.call(asked, method, given, deadline=until)

    policy = NO_RETRIES if retries_itself(model) else POLICY
    return await retried(attempt, policy=policy, deadline=deadline)


def _as_it_is(error: Exception) -> Exception:
    return error
