"""The query vectors of a request: each distinct query once per model, from the cache or in as few calls as can be.

A local model computes one batch at a time: texts that concurrent requests want meanwhile form the next batch
(``MicroBatcher``). A model that is reached over a network is called through its bulkhead, with retries.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb._aio import Call, Job, WorkerPool, as_exception, gather, reset_after_fork, start, wait
from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, RetryPolicy, retried
from llama_index_agentic_kb.llm.calls import calls_of, once, retries_itself
from llama_index_agentic_kb.search.embedding_cache import SHARED_CACHE, EmbeddingCache, is_a, model_identity

__all__ = ["MicroBatcher", "QueryEmbeddings", "embed_queries"]

EMBEDDING_POOL: Final = WorkerPool("embedding", max_workers=8)
"""Where local models compute."""

STALLED_SECONDS: Final = 15.0
"""A local call that takes longer is taken to hang: later texts are computed beside it."""

REMOTE_RETRIES: Final = RetryPolicy()

Vector: TypeAlias = list[float]
Compute: TypeAlias = Callable[[list[str]], list[Vector]]


class QueryEmbeddings:
    """The query vectors of one request, by model and query.

    A vector found in the cache costs no call, and so handlers see no embedding event. Queries of a local model that
    allows it join the batch of whatever other requests want embedded just then; handlers see their own request's texts
    only.

    Args:
        manager: Its handlers see each embedding call, beside the model's own.
        deadline: ``time.monotonic()`` at which embedding is given up; None waits.
        cache: Vectors of earlier requests; None keeps none.
    """

    def __init__(
        self, manager: CallbackManager, *, deadline: float | None, cache: EmbeddingCache | None = SHARED_CACHE
    ) -> None:
        self._manager = manager
        self._deadline = deadline
        self._cache = cache
        self._models: dict[int, tuple[BaseEmbedding, str | None]] = {}
        """Models and their identities by id; held here, so that no id is used again."""
        self._jobs: dict[tuple[int, str], tuple[Job[list[Vector | Exception]], int]] = {}
        """For each query the job of its batch, and its position there."""
        self.texts_embedded = 0
        """Texts that models were called for."""
        self.cache_hits = 0
        """Texts whose vector the cache had."""

    def begin(self, pairs: Iterable[tuple[BaseEmbedding, str]]) -> None:
        """Start embedding queries that are new: one batch a model, models side by side. Needs a running loop."""
        batches: dict[int, dict[str, None]] = {}
        for model, query in pairs:
            of_model = id(model)
            if of_model not in self._models:
                self._models[of_model] = model, model_identity(model) if self._cache is not None else None
            new = batches.setdefault(of_model, {})
            if query not in new and (of_model, query) not in self._jobs and not self._find(of_model, query):
                new[query] = None
        for of_model, queries in batches.items():
            if queries:
                self.texts_embedded += len(queries)
                job = start(self._embed(*self._models[of_model], list(queries)))
                self._jobs.update({(of_model, query): (job, position) for position, query in enumerate(queries)})

    def _find(self, of_model: int, query: str) -> bool:
        """Look a vector up in the cache."""
        identity = self._models[of_model][1]
        vector = None if self._cache is None or identity is None else self._cache.get(identity, query)
        if vector is None:
            return False
        found: asyncio.Future[list[Vector | Exception]] = asyncio.get_running_loop().create_future()
        found.set_result([vector])
        self._jobs[of_model, query] = Job(found), 0
        self.cache_hits += 1
        return True

    async def _embed(self, model: BaseEmbedding, identity: str | None, queries: list[str]) -> list[Vector | Exception]:
        outcomes = await embed_queries(model, queries, deadline=self._deadline, manager=self._manager)
        if self._cache is not None and identity is not None:
            for query, outcome in zip(queries, outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    self._cache.put(identity, query, outcome)
        return outcomes

    async def get(self, model: BaseEmbedding, query: str, *, deadline: float | None = None) -> Vector:
        """Return a query's vector, embedding it now if that was not begun before.

        Args:
            model: The embedding model.
            query: The text.
            deadline: ``time.monotonic()`` until which this caller waits; others may wait longer.

        Raises:
            DeadlineExceededError: The vector is not there in time.
            Exception: What the model raised.
        """
        if (id(model), query) not in self._jobs:
            self.begin([(model, query)])
        job, position = self._jobs[id(model), query]
        if not job.done:
            await wait([job], deadline=deadline)
        if not job.done:
            raise _still_running(model)
        outcome = job.result()[position]
        if isinstance(outcome, Exception):
            raise outcome
        return list(outcome)


async def embed_queries(
    model: BaseEmbedding, queries: Sequence[str], *, deadline: float | None, manager: CallbackManager | None = None
) -> list[Vector | Exception]:
    """Embed queries, in one call where that is the same as one by one.

    LlamaIndex has no public batch for queries, and its batch for texts may prefix them differently. A local model
    that can embed several queries alike shares its calls with concurrent requests. Other models' batch for texts is
    used where they are known to treat both alike, else there is one call a query, side by side.

    Args:
        model: The embedding model.
        queries: Distinct queries; at least one.
        deadline: ``time.monotonic()``; None waits.
        manager: Its handlers see the calls beside the model's own; None has none.

    Returns:
        One vector a query, in order; an error in the place of one that failed.
    """
    watched = model if manager is None else with_handlers(model, manager)
    batcher = _BATCHERS.of(model)
    if batcher is not None:
        return await _embed_in_batches(model, watched, batcher, list(queries), deadline)
    if len(queries) > 1 and _treats_queries_as_texts(model):
        try:
            return list(await _call(model, watched, "get_text_embedding_batch", list(queries), deadline))
        except Exception as error:  # noqa: BLE001 (stands for each vector, raised where it is asked for)
            return [error] * len(queries)
    jobs = await gather(_call(model, watched, "get_query_embedding", query, deadline) for query in queries)
    return [job.result() if job.error is None else as_exception(job.error) for job in jobs]


async def _embed_in_batches(
    model: BaseEmbedding, watched: BaseEmbedding, batcher: MicroBatcher, queries: list[str], deadline: float | None
) -> list[Vector | Exception]:
    """Embed queries in the batches of a local model. Nothing but futures is awaited, so no thread is held."""
    view = _BatchedEmbedding(watched, batcher)
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()) as limit:
            if len(queries) == 1:
                return [await view.aget_query_embedding(queries[0])]
            return list(await view.aget_text_embedding_batch(queries))
    except Exception as error:  # noqa: BLE001 (stands for each vector, raised where it is asked for)
        failure = _still_running(model) if limit.expired() else error
        return [view.outcome(query) or failure for query in queries]


async def _call(
    model: BaseEmbedding, watched: BaseEmbedding, method: str, argument: str | list[str], deadline: float | None
) -> Any:
    """Call a method of a model: a local one's on a thread, for its own async would use the loop's shared pool.

    One that is reached over a network is retried here alone: of LlamaIndex's ``OpenAIEmbedding`` and its subclasses a
    copy is called that tries once; another kind that says ``max_retries`` retries itself, and is not retried here.
    """
    what = f"embedding model {model.model_name}"
    if _is_local(model):
        return await Call(partial(getattr(watched, method), argument), None, deadline, EMBEDDING_POOL, what)
    calls, copy = calls_of(model, what, lambda error: error), once(watched, model)

    async def attempt(until: float | None) -> Any:
        return await calls.call(copy, method, argument, deadline=until)

    policy = NO_RETRIES if retries_itself(model) else REMOTE_RETRIES
    return await retried(attempt, policy=policy, deadline=deadline)


def _still_running(model: BaseEmbedding) -> DeadlineExceededError:
    return DeadlineExceededError(f"embedding model {model.model_name} was still running at its deadline")


# -- batches of local models ------------------------------------------------------------------------------------------

_Texts: TypeAlias = OrderedDict[str, "list[Future[Vector]]"]
"""Texts in order of arrival, each with the futures of those who wait for its vector."""


class MicroBatcher:
    """Gathers texts while a model computes, and hands them to it together when it is free.

    An idle model starts at once: nobody waits for company. What arrives while it computes forms the next batch, so
    that batches grow with the load (as in "Clipper", NSDI 2017, but without a delay). One call runs at a time. A text
    that several requests want, waiting or being computed, is computed once.

    No thread waits for a result; one thread of the pool computes while there is work. Safe to use from any number of
    threads and event loops.

    Args:
        compute: Embeds texts, all different, in one call.
        max_batch: Texts of one call at most.
        pool: Where calls run. One that hangs keeps its thread; after 15 s later texts get another.
    """

    def __init__(self, compute: Compute, *, max_batch: int, pool: WorkerPool) -> None:
        self._compute = compute
        self._max_batch = max_batch
        self._pool = pool
        self._lock = threading.Lock()
        self._waiting: _Texts = OrderedDict()
        self._running: _Texts = OrderedDict()
        self._worker: object | None = None
        self._started = 0.0

    def submit(self, texts: Sequence[str]) -> list[Future[Vector]]:
        """Ask for vectors; never waits.

        Args:
            texts: Any texts. More than ``max_batch`` go in several calls.

        Returns:
            A future a text, in order. One that is cancelled is dropped, unless its batch has begun.
        """
        futures: list[Future[Vector]] = [Future() for _ in texts]
        with self._lock:
            if self._worker is not None and time.monotonic() - self._started >= STALLED_SECONDS:
                self._worker = None  # it seems to hang; what it may yet return goes to those who wait for it now
                self._running.clear()
            for text, future in zip(texts, futures, strict=True):
                (self._running if text in self._running else self._waiting).setdefault(text, []).append(future)
            if not self._waiting or self._worker is not None:
                return futures
            worker = self._worker = object()
            self._started = time.monotonic()
        self._pool.submit(partial(self._serve, worker))
        return futures

    def _serve(self, worker: object) -> None:
        """Compute batch after batch until nothing waits, or another worker was appointed."""
        while batch := self._take(worker):
            for text, result in self._results(batch):
                self._deliver(batch, text, result)

    def _take(self, worker: object) -> _Texts:
        """Return the next batch; an empty one where the worker shall end."""
        with self._lock:
            if self._worker is not worker:
                return OrderedDict()
            self._waiting = OrderedDict(item for item in self._waiting.items() if _is_awaited(item[1]))
            batch = OrderedDict(islice(self._waiting.items(), self._max_batch))
            for text in batch:
                del self._waiting[text]
            self._running.update(batch)
            self._started = time.monotonic()
            if not batch:
                self._worker = None
            return batch

    def _results(self, batch: _Texts) -> Iterator[tuple[str, Vector | Exception]]:
        """Compute a batch; where that fails, each text alone, so that none can fail its neighbours."""
        vectors = self._try(list(batch))
        if not isinstance(vectors, Exception):
            yield from zip(batch, vectors, strict=True)
            return
        for text, futures in batch.items():
            with self._lock:
                again = len(batch) > 1 and _is_awaited(futures)
            alone = self._try([text]) if again else vectors
            yield text, alone if isinstance(alone, Exception) else alone[0]

    def _try(self, texts: list[str]) -> list[Vector] | Exception:
        try:
            vectors = self._compute(texts)
        except BaseException as error:  # noqa: BLE001 (delivered to those who wait; the pool's thread goes on)
            return as_exception(error)
        if len(vectors) != len(texts):
            return AgenticKBError(f"the embedding model returned {len(vectors)} vectors for {len(texts)} texts")
        return vectors

    def _deliver(self, batch: _Texts, text: str, result: Vector | Exception) -> None:
        with self._lock:  # nobody joins after this
            futures = batch[text]
            if self._running.get(text) is futures:
                del self._running[text]
        for future in futures:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(list(result))


def _is_awaited(futures: Sequence[Future[Vector]]) -> bool:
    return any(not future.cancelled() for future in futures)


class _BatchedEmbedding(BaseEmbedding):
    """One request's view of a model that many requests share.

    LlamaIndex's own async methods send the events of the request's own texts to the request's handlers; the vectors
    come from the shared batcher.

    Args:
        model: The model with the request's handlers. Only its description is used.
        batcher: Computes.
    """

    _model: BaseEmbedding = PrivateAttr()
    _batcher: MicroBatcher = PrivateAttr()
    _outcomes: dict[str, Vector | Exception] = PrivateAttr(default_factory=dict)

    def __init__(self, model: BaseEmbedding, batcher: MicroBatcher) -> None:
        super().__init__(
            model_name=model.model_name,
            embed_batch_size=model.embed_batch_size,
            callback_manager=model.callback_manager,
        )
        self._model = model
        self._batcher = batcher

    def outcome(self, text: str) -> Vector | Exception | None:
        """Return what became of a text, where another one failed the whole call; None where that is not known."""
        return self._outcomes.get(text)

    def to_payload(self) -> dict[str, Any]:
        """Return the description of the model itself, for events."""
        return self._model.to_payload()

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the description of the model itself; older versions of LlamaIndex put this into events."""
        return self._model.to_dict(**kwargs)

    async def _aget_query_embedding(self, query: str) -> Vector:
        return (await self._aget_text_embeddings([query]))[0]

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Vector]:
        futures = self._batcher.submit(texts)
        await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        for text, future in zip(texts, futures, strict=True):
            error = future.exception()
            self._outcomes[text] = future.result() if error is None else as_exception(error)
        return [future.result() for future in futures]

    def _get_query_embedding(self, query: str) -> Vector:
        raise NotImplementedError

    def _get_text_embedding(self, text: str) -> Vector:
        raise NotImplementedError


class _Batchers:
    """The batchers of local models, each kept while anybody uses it. A forked child begins with new ones."""

    def __init__(self) -> None:
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._batchers: WeakValueDictionary[int, MicroBatcher] = WeakValueDictionary()

    def of(self, model: BaseEmbedding) -> MicroBatcher | None:
        """Return a local model's one batcher; None where it can't embed queries together.

        A model with a cache or a rate limiter of its own is called by itself, so that these see each call.
        """
        compute = _local_batch(model)
        if compute is None or model.embeddings_cache or getattr(model, "rate_limiter", None):
            return None
        with self._lock:
            batcher = self._batchers.get(id(model))
            if batcher is None:  # it holds the model, and so its id
                batcher = MicroBatcher(compute, max_batch=model.embed_batch_size, pool=EMBEDDING_POOL)
                self._batchers[id(model)] = batcher
            return batcher


_BATCHERS: Final = _Batchers()


def _local_batch(model: BaseEmbedding) -> Compute | None:
    """Return the function by which a local model embeds several queries as it embeds one."""
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
    """Whether a batch of texts returns the vectors that single queries have."""
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
