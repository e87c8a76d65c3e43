"""Embeds the queries of a request: each distinct one once per model, from the cache or in as few calls as can be."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb._aio import Call, Job, WorkerPool, as_exception, gather, start, wait
from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.search.batching import BatchedEmbedding, MicroBatcher
from llama_index_agentic_kb.search.embedding_cache import SHARED_CACHE, EmbeddingCache
from llama_index_agentic_kb.search.model_identity import is_a, model_identity
from llama_index_agentic_kb.search.remote_embedding import remotely

__all__ = ["QueryEmbeddings", "embed_queries"]

EMBEDDING_POOL: Final = WorkerPool("embedding", max_workers=8)
"""Where local models compute."""

WAITING_POOL: Final = WorkerPool("embedding-wait", max_workers=64)
"""Where sync requests wait for a shared batch: apart, so that those who wait never keep the work from its thread."""

Vector = list[float]
Compute = Callable[[list[str]], list[Vector]]

_batchers: WeakValueDictionary[int, MicroBatcher] = WeakValueDictionary()
_batchers_lock = threading.Lock()


@dataclass(slots=True)
class _Batch:
    """Queries that are embedded together."""

    model: BaseEmbedding
    """Kept alive: batches are found by its id."""
    identity: str | None
    queries: list[str]
    job: Job[list[Vector | Exception]] | None = None
    """None until the flow that registered the batch has started it."""


class QueryEmbeddings:
    """The query vectors of one request, by model and query.

    A vector found in the cache costs no call, and so no handler is told of an embedding. Queries of a local model
    that allows it join the batch of whatever other requests want embedded just then; handlers are told of their own
    request's texts only.

    Args:
        manager: Its handlers are told of each embedding call, beside the model's own.
        deadline: ``time.monotonic()`` at which embedding is given up; None waits.
        cache: Vectors of earlier requests; None does without.
    """

    def __init__(
        self, manager: CallbackManager, *, deadline: float | None, cache: EmbeddingCache | None = SHARED_CACHE
    ) -> None:
        self._manager = manager
        self._deadline = deadline
        self._cache = cache
        self._batches: dict[tuple[int, str], _Batch] = {}
        self._cached: dict[tuple[int, str], tuple[BaseEmbedding, Vector]] = {}
        self.texts_embedded = 0
        """Texts that models were asked for."""
        self.cache_hits = 0
        """Texts whose vector the cache had."""

    async def begin(self, wanted: Iterable[tuple[BaseEmbedding, str]]) -> None:
        """Start embedding what was not asked for yet: one batch a model, models side by side."""
        batches: dict[int, _Batch] = {}
        for model, query in wanted:
            if (id(model), query) in self._batches or (id(model), query) in self._cached:
                continue
            batch = batches.get(id(model)) or batches.setdefault(id(model), self._batch(model))
            if not self._find(batch, query):
                batch.queries.append(query)
                self._batches[id(model), query] = batch  # before any step: other flows go on at each of them
        for batch in batches.values():
            if batch.queries:
                self.texts_embedded += len(batch.queries)
                batch.job = start(self._embed(batch))

    def _batch(self, model: BaseEmbedding) -> _Batch:
        return _Batch(model, model_identity(model) if self._cache is not None else None, [])

    def _find(self, batch: _Batch, query: str) -> bool:
        """Look a vector up in the cache."""
        if self._cache is None or batch.identity is None:
            return False
        vector = self._cache.get(batch.identity, query)
        if vector is None:
            return False
        self._cached[id(batch.model), query] = batch.model, vector
        self.cache_hits += 1
        return True

    async def _embed(self, batch: _Batch) -> list[Vector | Exception]:
        outcomes = await embed_queries(batch.model, batch.queries, deadline=self._deadline, manager=self._manager)
        if self._cache is not None and batch.identity is not None:
            for query, outcome in zip(batch.queries, outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    self._cache.put(batch.identity, query, outcome)
        return outcomes

    async def get(self, model: BaseEmbedding, query: str, *, deadline: float | None = None) -> Vector:
        """Give a query's vector, embedding it now if nobody asked for it before.

        Args:
            model: The embedding model.
            query: The text.
            deadline: ``time.monotonic()`` until which this caller waits; others may wait longer.

        Raises:
            DeadlineExceededError: The vector is not there in time.
            Exception: What the model raised.
        """
        await self.begin([(model, query)])
        if (id(model), query) in self._cached:
            return list(self._cached[id(model), query][1])
        batch = self._batches[id(model), query]
        while batch.job is None:
            await wait([])  # its starter goes on
        await wait([batch.job], deadline=deadline)
        if not batch.job.done:
            raise DeadlineExceededError(f"embedding model {model.model_name} was still running at its deadline")
        outcome = batch.job.result()[batch.queries.index(query)]
        if isinstance(outcome, Exception):
            raise outcome
        return list(outcome)


async def embed_queries(
    model: BaseEmbedding, queries: Sequence[str], *, deadline: float | None, manager: CallbackManager | None = None
) -> list[Vector | Exception]:
    """Embed queries, in one call where the model lets that be the same as one by one.

    LlamaIndex has no public batch for queries, and its batch for texts may prefix them differently. A local model
    that can embed several queries alike shares its calls with concurrent requests. Other models' batch for texts is
    used where they are known to treat both alike, else there is one call a query, side by side.

    Args:
        model: The embedding model.
        queries: Distinct queries; at least one.
        deadline: ``time.monotonic()``; None waits.
        manager: Its handlers are told beside the model's own; None has none.

    Returns:
        One vector a query, in order; in its place an error where there is none.
    """
    told = model if manager is None else with_handlers(model, manager)
    batcher = _batcher(model)
    if batcher is not None:
        told = BatchedEmbedding(told, batcher, deadline=deadline)
    if len(queries) > 1 and (batcher is not None or _treats_queries_as_texts(model)):
        return await _together(model, told, list(queries), deadline)
    jobs = await gather(_call(model, told, "get_query_embedding", query, deadline) for query in queries)
    return [job.result() if job.error is None else as_exception(job.error) for job in jobs]


async def _together(
    model: BaseEmbedding, told: BaseEmbedding, queries: list[str], deadline: float | None
) -> list[Vector | Exception]:
    """Embed queries in one call; where it fails, a batched model knows which of them it could embed."""
    try:
        vectors: list[Vector | Exception] = await _call(model, told, "get_text_embedding_batch", queries, deadline)
    except Exception as error:  # noqa: BLE001 (given in place of each vector, raised where it is asked for)
        known = told.outcome if isinstance(told, BatchedEmbedding) else lambda _: None
        return [known(query) or error for query in queries]
    return vectors


async def _call(
    model: BaseEmbedding, told: BaseEmbedding, method: str, given: str | list[str], deadline: float | None
) -> Any:
    """Call a method: a local model computes on a thread, for its own async would use the loop's shared pool.

    Those who wait for a shared batch hold no thread where they need not.
    """
    if not _is_local(model):
        return await remotely(model, told, method, given, deadline=deadline)
    shared = isinstance(told, BatchedEmbedding)
    return await Call(
        sync=partial(getattr(told, method), given),
        native=partial(getattr(told, f"a{method}"), given) if shared else None,
        deadline=deadline,
        pool=WAITING_POOL if shared else EMBEDDING_POOL,
        what=f"embedding model {model.model_name}",
    )


def _batcher(model: BaseEmbedding) -> MicroBatcher | None:
    """Give a local model's one batcher, while anybody uses it; None where it can't embed queries together."""
    compute = _local_batch(model)
    if compute is None:
        return None
    with _batchers_lock:
        batcher = _batchers.get(id(model))
        if batcher is None:
            batcher = MicroBatcher(compute, max_batch=model.embed_batch_size, pool=EMBEDDING_POOL)
            _batchers[id(model)] = batcher  # it keeps the model, and so its id
        return batcher


def _local_batch(model: BaseEmbedding) -> Compute | None:
    """Give the function by which a local model embeds several queries as it embeds one."""
    if _is_plain_huggingface(model):
        return partial(model._embed, prompt_name="query")  # type: ignore[attr-defined]  # noqa: SLF001
    if _is_local(model) and _treats_queries_as_texts(model):
        return model._get_text_embeddings  # noqa: SLF001
    return None


def _is_plain_huggingface(model: BaseEmbedding) -> bool:
    """Whether queries are embedded by HuggingFaceEmbedding's own methods, and no subclass's."""
    owners = {
        next((base.__name__ for base in type(model).__mro__ if name in vars(base)), "")
        for name in ("_get_query_embedding", "_embed")
    }
    return owners == {"HuggingFaceEmbedding"}


def _is_local(model: BaseEmbedding) -> bool:
    """Whether async would only wrap a computation (or block the loop, as core's default does)."""
    own_async = type(model)._aget_text_embeddings is not BaseEmbedding._aget_text_embeddings  # noqa: SLF001
    return is_a(model, "HuggingFaceEmbedding", "MockEmbedding") or not own_async


def _treats_queries_as_texts(model: BaseEmbedding) -> bool:
    """Whether a text batch gives the vectors that single queries would give."""
    declared = getattr(model, "treats_queries_as_texts", None)
    if declared is not None:
        return bool(declared)
    if _is_plain_huggingface(model):
        prompts = getattr(getattr(model, "_model", None), "prompts", None)
        return isinstance(prompts, dict) and prompts.get("query", "") == prompts.get("text", "")
    if is_a(model, "OpenAIEmbedding"):
        engines = (getattr(model, "_query_engine", None), getattr(model, "_text_engine", object()))
        return bool(engines[0] == engines[1])
    return False


def _forget_batchers() -> None:
    """In a forked child no worker runs: begin with new batchers."""
    global _batchers, _batchers_lock
    _batchers, _batchers_lock = WeakValueDictionary(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_batchers)
