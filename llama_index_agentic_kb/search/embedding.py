"""The query vectors of a request: each distinct query once per model, from the cache or in as few calls as possible.

A local model computes one batch at a time: texts of concurrent requests that arrive meanwhile form the next batch
(``MicroBatcher``). A remote model is called through its bulkhead (concurrency limit), with retries. Vectors are cached
across requests in an ``EmbeddingCache``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from hashlib import blake2b
from typing import Any, Final, TypeAlias

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager, CBEventType
from llama_index.core.callbacks.schema import EventPayload
from llama_index.core.instrumentation.events.embedding import EmbeddingEndEvent, EmbeddingStartEvent
from llama_index_instrumentation import get_dispatcher

from llama_index_agentic_kb._aio import Call, Job, WorkerPool, as_exception, gather, reset_after_fork, start, wait
from llama_index_agentic_kb.account import with_handlers
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.guard.permissions import current_principal
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, RetryPolicy
from llama_index_agentic_kb.llm.calls import calls_of, is_a, once, retries_itself
from llama_index_agentic_kb.schema.request import Principal

EMBEDDING_POOL: Final = WorkerPool("embedding", max_workers=8)  # the threads on which local models compute
_BATCH: Final = 32  # minimum number of waiting queries that a local model is given at once
_FEW: Final = 8  # maximum number of queries that a small model embeds on one thread
_SMALL: Final = 50_000_000  # parameters of a small model, whose threads save no time for a few queries on busy cores
STALLED_SECONDS: Final = 15.0  # after which a local call counts as hung: later texts are computed on another thread
DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024  # about 19,000 vectors of 384 dimensions, or 5,000 of 1,536
ENTRY_BYTES: Final = 400  # estimated bytes of a cache entry in addition to its numbers
MAX_ITEMS: Final = 64  # maximum size of nested collections in a model's state; one with larger ones has no identity
CALL_SETTINGS: Final = {
    *("callback_manager", "embed_batch_size", "embeddings_cache", "max_retries", "num_workers", "rate_limiter"),
    *("reuse_client", "show_progress_bar", "timeout"),
}
"""Attributes that affect how a model is called, but not its vectors."""
OPENAI_CLIENTS: Final = {"_client", "_aclient"}
"""Attributes for clients, which are created from the other attributes at first use."""

Vector: TypeAlias = list[float]

_DISPATCHER: Final = get_dispatcher(__name__)


# -- the cache --------------------------------------------------------------------------------------------------------


class EmbeddingCache:
    """An LRU cache of query vectors by embedding model and text, safe to share between threads and event loops.

    Vectors are stored as doubles, so that cached and computed vectors are identical, and texts only as digests.

    The process-wide ``SHARED_CACHE`` is the default of all retrievers. A vector depends on model and text alone and
    reveals nothing about documents, but a fast response reveals that the same text was queried before. Requests of a
    principal therefore use only vectors of the same principal's requests.

    Args:
        max_bytes: The maximum memory of all entries, including keys and overhead. Default 64 MiB; 0 disables caching.

    Raises:
        ConfigurationError: ``max_bytes`` is no integer, or below 0.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        size: object = max_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ConfigurationError(f"max_bytes of an EmbeddingCache must be 0 or more whole bytes, got {max_bytes!r}")
        self.max_bytes = max_bytes
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Clear the cache and replace its lock: in a forked child, since the fork may have interrupted a change."""
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Remove all vectors."""
        with self._lock:
            self._vectors: OrderedDict[bytes, array[float]] = OrderedDict()
            self._bytes = 0

    def get(self, identity: str, text: str, owner: Principal | None = None) -> Vector | None:
        """Return the cached vector of a text for a model (``model_identity``) and a principal, or None."""
        key = _cache_key(identity, text, owner)
        with self._lock:
            vector = self._vectors.get(key)
            if vector is None:
                return None
            self._vectors.move_to_end(key)
        return vector.tolist()

    def put(self, identity: str, text: str, vector: Sequence[float], owner: Principal | None = None) -> None:
        """Store a copy of a vector, unless it is no flat list of numbers or exceeds the size of the cache."""
        try:
            kept = array("d", vector)
        except (TypeError, OverflowError):  # a multi-vector model's rows; whole numbers beyond a double
            return
        if _size(kept) > self.max_bytes:
            return
        key = _cache_key(identity, text, owner)
        with self._lock:
            if key in self._vectors:
                self._bytes -= _size(self._vectors.pop(key))
            self._vectors[key] = kept
            self._bytes += _size(kept)
            while self._bytes > self.max_bytes:
                self._bytes -= _size(self._vectors.popitem(last=False)[1])


def _size(vector: array[float]) -> int:
    return ENTRY_BYTES + vector.itemsize * len(vector)


def _cache_key(identity: str, text: str, owner: Principal | None) -> bytes:
    who = None if owner is None else (owner.tenant, owner.user, sorted(owner.groups))
    return blake2b(repr((who, identity, text)).encode("utf-8", "surrogatepass"), digest_size=32).digest()


SHARED_CACHE: Final = EmbeddingCache()  # the process-wide cache; the default of all retrievers
_NO_CACHE: Final = EmbeddingCache(max_bytes=0)

_serials = itertools.count()
_numbers: Final[dict[int, int]] = {}  # numbers of objects by ``id``, removed before an id is used again


def model_identity(model: BaseEmbedding) -> str | None:
    """Return an identifier that is equal for two models only if they return the same vectors, without secrets.

    It depends on the class and the current state of the model: name, dimensions, instructions, address, key, headers.
    Plain data is compared by value, any other object (loaded weights, a client) by a unique number that is never
    reused. Two ``OpenAIEmbedding`` with equal arguments thus have the same identifier; a model loaded twice has two.
    A class outside LlamaIndex may depend on other state (a global, an environment variable), so the model object
    itself counts too. None if the state contains large collections or objects without weak references.
    """
    state = {**vars(model), **(model.__pydantic_private__ or {})}
    ignored = CALL_SETTINGS | OPENAI_CLIENTS if is_a(type(model), "OpenAIEmbedding") else CALL_SETTINGS
    for name in ignored:
        state.pop(name, None)
    if is_a(type(model), "HuggingFaceEmbedding"):  # settings of the inner model, which users change in place
        for name in ("prompts", "max_seq_length", "truncate_dim"):
            state[f"_model.{name}"] = getattr(state.get("_model"), name, None)
    is_core = type(model).__module__.startswith("llama_index.")
    try:
        parts = [_described(type(model)), "" if is_core else _described(model), _described(state)]
    except TypeError:
        return None
    return blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _described(value: object, limit: int | None = None) -> str:
    """Return a text for plain data, or a unique name for any other object."""
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if limit is not None and len(value) > limit:
            raise TypeError("too much to look through")
        items = value.items() if isinstance(value, Mapping) else value
        parts = list(map(_described, items, itertools.repeat(MAX_ITEMS)))
        return f"{type(value).__name__}[{', '.join(parts if isinstance(value, list | tuple) else sorted(parts))}]"
    if id(value) not in _numbers:
        weakref.finalize(value, _numbers.pop, id(value), None)  # raises TypeError for objects without weak references
        _numbers.setdefault(id(value), next(_serials))
    return f"#{_numbers[id(value)]}"


# -- one request's vectors --------------------------------------------------------------------------------------------


class QueryEmbeddings:
    """The query vectors of one request, by model and query; made in the context of its principal.

    The manager's handlers get an event for each embedding call, besides the model's own; a vector that is in the cache
    needs no call. Embedding is abandoned at the deadline.
    """

    def __init__(
        self, manager: CallbackManager, *, deadline: float | None, cache: EmbeddingCache | None = SHARED_CACHE
    ) -> None:
        self._manager, self._deadline, self._cache = manager, deadline, _NO_CACHE if cache is None else cache
        self._owner = current_principal()
        self._context = contextvars.copy_context()  # the request's; that of a search may have a shorter deadline
        self._models: dict[int, tuple[BaseEmbedding, str | None]] = {}
        """Models and their identities by ``id``; the reference prevents reuse of the id."""
        self._vectors: dict[tuple[int, str], Vector | tuple[Job[list[Vector | Exception]], int]] = {}
        """For each query its vector from the cache, or the job of its batch and its position in the batch."""

    def begin(self, pairs: Iterable[tuple[BaseEmbedding, str]]) -> None:
        """Start embedding new queries, one batch per model, concurrently. Needs a running event loop."""
        batches: dict[int, list[str]] = {}
        for model, query in pairs:
            of_model = id(model)
            if of_model not in self._models:
                self._models[of_model] = model, None if self._cache is _NO_CACHE else model_identity(model)
            if (of_model, query) in self._vectors or query in batches.get(of_model, ()):
                continue
            identity = self._models[of_model][1]
            vector = None if identity is None else self._cache.get(identity, query, self._owner)
            if vector is None:
                batches.setdefault(of_model, []).append(query)
            else:
                self._vectors[of_model, query] = vector
        for of_model, queries in batches.items():
            job = start(self._embed(*self._models[of_model], queries), self._context.copy())
            for position, query in enumerate(queries):
                self._vectors[of_model, query] = job, position

    async def _embed(self, model: BaseEmbedding, identity: str | None, queries: list[str]) -> list[Vector | Exception]:
        outcomes = await embed_queries(model, queries, deadline=self._deadline, manager=self._manager)
        if identity is not None:
            for query, outcome in zip(queries, outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    self._cache.put(identity, query, outcome, self._owner)
        return outcomes

    async def get(self, model: BaseEmbedding, query: str, *, deadline: float | None = None) -> Vector:
        """Return a query's vector, or raise the model's error; start embedding it if ``begin`` did not.

        At the caller's deadline ``DeadlineExceededError`` is raised, and embedding continues for other callers.
        """
        if (id(model), query) not in self._vectors:
            self.begin([(model, query)])
        found = self._vectors[id(model), query]
        if isinstance(found, list):
            return list(found)
        job, position = found
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
    """Return one vector per query, or its exception; in one call if the result is the same as with single calls.

    LlamaIndex has no public batch method for queries, and its batch method for texts may add another prefix: it is used
    for models that are known to treat queries and texts alike. Otherwise there is one call per query, concurrently.
    """
    watched = model if manager is None else with_handlers(model, manager)
    batcher = _BATCHERS.of(model)
    if batcher is not None:
        return await _embed_in_batches(model, watched, batcher, list(queries), deadline)
    if len(queries) > 1 and not _treats_queries_as_texts(model):
        jobs = await gather([_call(model, watched, "get_query_embedding", query, deadline) for query in queries])
        return [job.result() if job.error is None else as_exception(job.error) for job in jobs]
    try:
        if len(queries) == 1:
            return [await _call(model, watched, "get_query_embedding", queries[0], deadline)]
        return list(await _call(model, watched, "get_text_embedding_batch", list(queries), deadline))
    except Exception as error:  # noqa: BLE001 (stands for each vector, raised where it is asked for)
        return [error] * len(queries)


async def _embed_in_batches(
    model: BaseEmbedding, watched: BaseEmbedding, batcher: MicroBatcher, queries: list[str], deadline: float | None
) -> list[Vector | Exception]:
    """Embed queries in the shared batches of a local model; handlers get one event with this request's queries."""
    about = getattr(watched, "to_payload", watched.to_dict)()
    _DISPATCHER.event(EmbeddingStartEvent(model_dict=about))
    with watched.callback_manager.event(CBEventType.EMBEDDING, payload={EventPayload.SERIALIZED: about}) as event:
        waiting = [asyncio.wrap_future(future) for future in batcher.submit(queries)]
        with contextlib.suppress(TimeoutError):  # the futures that are late are cancelled
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await asyncio.gather(*waiting, return_exceptions=True)
        outcomes: list[Vector | Exception] = []
        for future in waiting:
            error = _still_running(model) if future.cancelled() else future.exception()
            outcomes.append(future.result() if error is None else as_exception(error))
        made = {query: one for query, one in zip(queries, outcomes, strict=True) if not isinstance(one, Exception)}
        chunks, vectors = list(made), list(made.values())
        _DISPATCHER.event(EmbeddingEndEvent(chunks=chunks, embeddings=vectors))
        event.on_end(payload={EventPayload.CHUNKS: chunks, EventPayload.EMBEDDINGS: vectors})
    return outcomes


async def _call(
    model: BaseEmbedding, watched: BaseEmbedding, method: str, argument: str | list[str], deadline: float | None
) -> Any:
    """Call a method of a model; a local model is called on a thread of ``EMBEDDING_POOL``.

    Remote models are retried at one level only: ``OpenAIEmbedding`` and its subclasses are called on a copy without
    own retries; any other model with ``max_retries`` retries by itself, and is not retried here.
    """
    what = f"embedding model {model.model_name}"
    if _is_local(type(model)):
        return await Call(partial(getattr(watched, method), argument), None, deadline, EMBEDDING_POOL, what)
    policy = NO_RETRIES if retries_itself(model) else RetryPolicy()
    calls = calls_of(model, what, lambda error: error)
    return await calls.call(once(watched, model), method, argument, policy=policy, deadline=deadline)


def _still_running(model: BaseEmbedding) -> DeadlineExceededError:
    return DeadlineExceededError(f"embedding model {model.model_name} was still running at its deadline")


# -- batches of local models ------------------------------------------------------------------------------------------


class MicroBatcher:
    """Collects texts while a model computes, and embeds them in one batch as soon as the model is free.

    An idle model starts without delay. Texts that arrive while it computes form the next batch, so that batches grow
    with the load (as in "Clipper", NSDI 2017, but without a delay). One call runs at a time, on one thread of the pool.
    A text requested several times while it waits is computed once. A hung call keeps its thread; after 15 s later texts
    use another thread. Safe to use from several threads and event loops.
    """

    def __init__(self, compute: Callable[[list[str]], list[Vector]], *, max_batch: int, pool: WorkerPool) -> None:
        self._compute, self._max_batch, self._pool = compute, max_batch, pool
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Future[Vector]]] = {}
        """Texts in order of arrival, each with the futures that wait for its vector."""
        self._worker: object | None = None
        self._started = 0.0

    def submit(self, texts: Sequence[str]) -> list[Future[Vector]]:
        """Return a future for each text without blocking. A cancelled text is dropped unless its batch has started."""
        futures: list[Future[Vector]] = [Future() for _ in texts]
        with self._lock:
            if self._worker is not None and time.monotonic() - self._started >= STALLED_SECONDS:
                self._worker = None  # it seems to hang; a late result still resolves the futures of its batch
            for text, future in zip(texts, futures, strict=True):
                self._waiting.setdefault(text, []).append(future)
            if not self._waiting or self._worker is not None:
                return futures
            worker = self._worker = object()
            self._started = time.monotonic()
        self._pool.submit(partial(self._serve, worker))
        return futures

    def _serve(self, worker: object) -> None:
        """Compute batches; of one that fails each text is retried alone, so that a bad one does not fail the others."""
        while batch := self._next_batch(worker):
            vectors = self._try(list(batch))
            for position, (text, futures) in enumerate(batch.items()):
                if not isinstance(vectors, Exception):
                    _deliver(futures, vectors[position])
                    continue
                alone = self._try([text]) if len(batch) > 1 and _is_awaited(futures) else vectors
                _deliver(futures, alone if isinstance(alone, Exception) else alone[0])

    def _next_batch(self, worker: object) -> dict[str, list[Future[Vector]]]:
        """Take the next texts; none if no text waits, which frees the model, or if the worker has been replaced."""
        with self._lock:
            if self._worker is not worker:
                return {}
            self._waiting = {text: futures for text, futures in self._waiting.items() if _is_awaited(futures)}
            batch = {text: self._waiting.pop(text) for text in list(self._waiting)[: self._max_batch]}
            self._started = time.monotonic()
            if not batch:
                self._worker = None
            return batch

    def _try(self, texts: list[str]) -> list[Vector] | Exception:
        try:
            vectors = self._compute(texts)
        except BaseException as error:  # noqa: BLE001 (delivered to those who wait; the pool's thread goes on)
            return as_exception(error)
        if len(vectors) != len(texts):
            return AgenticKBError(f"the embedding model returned {len(vectors)} vectors for {len(texts)} texts")
        return vectors


def _deliver(futures: Sequence[Future[Vector]], result: Vector | Exception) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(list(result))


def _is_awaited(futures: Sequence[Future[Vector]]) -> bool:
    return any(not future.cancelled() for future in futures)


class _Batchers:
    """The batchers of local models, by weak reference. A forked child starts without any."""

    def __init__(self) -> None:
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._batchers: weakref.WeakValueDictionary[int, MicroBatcher] = weakref.WeakValueDictionary()

    def of(self, model: BaseEmbedding) -> MicroBatcher | None:
        """Return the batcher of a local model; None if it can't embed queries in batches.

        Batching would bypass a model's own cache or rate limiter.
        """
        if not _is_local(type(model)) or model.embeddings_cache or getattr(model, "rate_limiter", None):
            return None
        compute: Callable[[list[str]], list[Vector]]
        if is_a(type(model), "HuggingFaceEmbedding") and _is_plain_huggingface(model):
            compute = partial(_embedded, model)
        elif _treats_queries_as_texts(model):
            compute = model._get_text_embeddings  # noqa: SLF001
        else:
            return None
        with self._lock:
            batcher = self._batchers.get(id(model))
            if batcher is None:  # it references the model, so that the id is not reused
                size = max(_BATCH, model.embed_batch_size)  # the model itself cuts it into passes
                batcher = MicroBatcher(compute, max_batch=size, pool=EMBEDDING_POOL)
                self._batchers[id(model)] = batcher
            return batcher


_BATCHERS: Final = _Batchers()


def _embedded(model: Any, queries: list[str]) -> list[Vector]:
    """Embed queries by a ``HuggingFaceEmbedding``: a few of a small model on one thread of OpenMP, as torch uses."""
    import torch  # noqa: PLC0415 (the model has loaded it)

    torch.get_num_threads()  # sets a new thread's number, which would else happen within the limit, and outlast it
    is_light = len(queries) <= _FEW and sum(one.numel() for one in model._model.parameters()) <= _SMALL  # noqa: SLF001
    # The limit concerns the calling thread alone.
    with _openmp().limit(limits=1) if is_light else contextlib.nullcontext():
        vectors: list[Vector] = model._embed(queries, prompt_name="query")  # noqa: SLF001
    return vectors


@cache
def _openmp() -> Any:
    # Imported here, it finds the libraries that are loaded by now.
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # noqa: PLC0415

    return ThreadpoolController().select(user_api="openmp")


def _is_plain_huggingface(model: BaseEmbedding) -> bool:
    """Whether a model uses HuggingFaceEmbedding's own query methods, not those of a subclass or of the instance."""
    names = [getattr(getattr(model, name, None), "__qualname__", "") for name in ("_get_query_embedding", "_embed")]
    return names == ["HuggingFaceEmbedding._get_query_embedding", "HuggingFaceEmbedding._embed"]


def _is_local(kind: type[BaseEmbedding]) -> bool:
    """Whether models of a class compute in this process, or have no async method of their own."""
    own_async = kind._aget_text_embeddings is not BaseEmbedding._aget_text_embeddings  # noqa: SLF001
    return not own_async or is_a(kind, "HuggingFaceEmbedding", "MockEmbedding")


def _treats_queries_as_texts(model: BaseEmbedding) -> bool:
    """Whether a batch of texts returns the same vectors as single queries."""
    is_one_engine = is_a(type(model), "OpenAIEmbedding") and (
        getattr(model, "_query_engine", None) == getattr(model, "_text_engine", object())
    )
    return bool(getattr(model, "treats_queries_as_texts", is_one_engine))
