"""Embeds the queries of a request: each distinct one once per model, those ready together in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb._flow import Call, Flow, Job, Start, Wait, WorkerPool, gather
from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.errors import DeadlineExceededError

__all__ = ["QueryEmbeddings", "embed_queries"]

EMBEDDING_POOL: Final = WorkerPool("embedding", max_workers=8)

Vector = list[float]


@dataclass(slots=True)
class _Batch:
    """Queries that are embedded together."""

    model: BaseEmbedding
    """Kept alive: batches are found by its id."""
    queries: list[str]
    job: Job[list[Vector]] | None = None
    """None until the flow that registered the batch has started it."""


class QueryEmbeddings:
    """The query vectors of one request, by model and query.

    Args:
        manager: Its handlers are told of each embedding call, beside the model's own.
        deadline: ``time.monotonic()`` at which embedding is given up; None waits.
    """

    def __init__(self, manager: CallbackManager, *, deadline: float | None) -> None:
        self._manager = manager
        self._deadline = deadline
        self._batches: dict[tuple[int, str], _Batch] = {}

    def begin(self, wanted: Iterable[tuple[BaseEmbedding, str]]) -> Flow[None]:
        """Start embedding what was not asked for yet: one batch a model, models side by side."""
        batches: dict[int, _Batch] = {}
        for model, query in wanted:
            if (id(model), query) not in self._batches:
                batch = batches.setdefault(id(model), _Batch(model, []))
                batch.queries.append(query)
                self._batches[id(model), query] = batch  # before any step: other flows go on at each of them
        for batch in batches.values():
            batch.job = yield Start(self._embed(batch))

    def _embed(self, batch: _Batch) -> Flow[list[Vector]]:
        told = with_handlers(batch.model, self._manager)
        return (yield from embed_queries(told, batch.queries, deadline=self._deadline))

    def get(self, model: BaseEmbedding, query: str, *, deadline: float | None = None) -> Flow[Vector]:
        """Give a query's vector, embedding it now if nobody asked for it before.

        Args:
            model: The embedding model.
            query: The text.
            deadline: ``time.monotonic()`` until which this caller waits; others may wait longer.

        Raises:
            DeadlineExceededError: The vector is not there in time.
            Exception: What the model raised.
        """
        yield from self.begin([(model, query)])
        batch = self._batches[id(model), query]
        while batch.job is None:
            yield Wait([])  # its starter goes on
        yield Wait([batch.job], deadline=deadline)
        if not batch.job.done:
            raise DeadlineExceededError(f"embedding model {model.model_name} was still running at its deadline")
        return list(batch.job.result()[batch.queries.index(query)])


def embed_queries(model: BaseEmbedding, queries: Sequence[str], *, deadline: float | None) -> Flow[list[Vector]]:
    """Embed queries, in one batch where the model lets it be the same as one by one.

    LlamaIndex has no public batch for queries, and its batch for texts may prefix them differently. The batch is used
    for models that are known to treat both alike; other models get one call a query, side by side.

    Args:
        model: The embedding model.
        queries: Distinct queries.
        deadline: ``time.monotonic()``; None waits.

    Returns:
        One vector a query, in order.
    """
    if len(queries) > 1 and _treats_queries_as_texts(model):
        batch = list(queries)
        vectors: list[Vector] = yield _call(
            model,
            partial(model.get_text_embedding_batch, batch),
            partial(model.aget_text_embedding_batch, batch),
            deadline,
        )
        return vectors
    calls = [
        _call(model, partial(model.get_query_embedding, query), partial(model.aget_query_embedding, query), deadline)
        for query in queries
    ]
    if len(calls) == 1:
        return [(yield calls[0])]
    jobs = yield from gather(calls)
    return [job.result() for job in jobs]


def _call(model: BaseEmbedding, sync: Callable[[], Any], native: Callable[[], Any], deadline: float | None) -> Call:
    """A local model computes: threads serve it as well as its own async, which uses the loop's shared pool."""
    return Call(
        sync=sync,
        native=None if _is_local(model) else native,
        deadline=deadline,
        pool=EMBEDDING_POOL,
        what=f"embedding model {model.model_name}",
    )


def _is(model: BaseEmbedding, *names: str) -> bool:
    """Tell a model's class by name along its bases, without importing the integration."""
    return any(base.__name__ in names for base in type(model).__mro__)


def _is_local(model: BaseEmbedding) -> bool:
    """Whether async would only wrap a computation (or block the loop, as core's default does)."""
    own_async = type(model)._aget_text_embeddings is not BaseEmbedding._aget_text_embeddings  # noqa: SLF001
    return _is(model, "HuggingFaceEmbedding", "MockEmbedding") or not own_async


def _treats_queries_as_texts(model: BaseEmbedding) -> bool:
    """Whether a text batch gives the vectors that single queries would give."""
    declared = getattr(model, "treats_queries_as_texts", None)
    if declared is not None:
        return bool(declared)
    if _is(model, "HuggingFaceEmbedding"):
        prompts = getattr(getattr(model, "_model", None), "prompts", None)
        return isinstance(prompts, dict) and prompts.get("query", "") == prompts.get("text", "")
    if _is(model, "OpenAIEmbedding"):
        engines = (getattr(model, "_query_engine", None), getattr(model, "_text_engine", object()))
        return bool(engines[0] == engines[1])
    return False
