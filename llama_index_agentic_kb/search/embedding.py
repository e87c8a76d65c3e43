"""Embeds the queries of a request: each distinct one once per model, those ready together in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb._flow import Call, Flow, Job, Start, Wait, WorkerPool, gather
from llama_index_agentic_kb.account.callbacks import with_handlers

__all__ = ["QueryEmbeddings", "embed_queries"]

EMBEDDING_POOL: Final = WorkerPool("embedding", max_workers=8)

Vector = list[float]


class QueryEmbeddings:
    """The query vectors of one request, by model and query.

    Args:
        manager: Its handlers are told of each embedding call, beside the model's own.
        deadline: ``time.monotonic()`` at which embedding is given up; None waits.
    """

    def __init__(self, manager: CallbackManager, *, deadline: float | None) -> None:
        self._manager = manager
        self._deadline = deadline
        self._jobs: dict[tuple[int, str], tuple[Job[list[Vector]], int]] = {}
        self._models: list[BaseEmbedding] = []  # keeps them alive: jobs are found by their ids

    def begin(self, wanted: Iterable[tuple[BaseEmbedding, str]]) -> Flow[None]:
        """Start embedding what was not asked for yet: one batch a model, models side by side."""
        batches: dict[int, list[str]] = {}
        models: dict[int, BaseEmbedding] = {}
        for model, query in wanted:
            batch = batches.setdefault(id(model), [])
            if (id(model), query) not in self._jobs and query not in batch:
                models[id(model)] = model
                batch.append(query)
        for key, model in models.items():
            self._models.append(model)
            told = with_handlers(model, self._manager)
            job = yield Start(embed_queries(told, batches[key], deadline=self._deadline))
            self._jobs.update({(key, query): (job, place) for place, query in enumerate(batches[key])})

    def get(self, model: BaseEmbedding, query: str) -> Flow[Vector]:
        """Give a query's vector, embedding it now if nobody asked for it before.

        Raises:
            Exception: What the model raised.
        """
        yield from self.begin([(model, query)])
        job, place = self._jobs[id(model), query]
        yield Wait([job])
        return list(job.result()[place])


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
