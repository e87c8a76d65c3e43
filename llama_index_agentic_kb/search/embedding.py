"""The query vectors of a request: each distinct query once per model, from the cache or in as few calls as can be.

A local model computes one batch at a time: texts that concurrent requests want meanwhile form the next batch
(``MicroBatcher``). A model that is reached over a network is called through its bulkhead, with retries. Vectors are
kept from request to request in an ``EmbeddingCache``.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import itertools
import threading
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final, TypeAlias

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb._aio import Call, Job, WorkerPool, as_exception, gather, reset_after_fork, start, wait
from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, RetryPolicy, retried
from llama_index_agentic_kb.llm.calls import calls_of, once, retries_itself
from llama_index_agentic_kb.schema.request import Principal

EMBEDDING_POOL: Final = WorkerPool("embedding", max_workers=8)
"""Where local models compute."""
STALLED_SECONDS: Final = 15.0
"""A local call that takes longer is taken to hang: later texts are computed beside it."""
REMOTE_RETRIES: Final = RetryPolicy()
DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024
"""About 19,000 vectors of 384 dimensions, or 5,000 of 1,536."""
ENTRY_BYTES: Final = 400
"""What a cached vector costs beside its numbers: its key, its place in the order, its object."""
MAX_ITEMS: Final = 64
"""A list or mapping of a model's state with more is not looked through for each request."""
CALL_SETTINGS: Final = {
    *("callback_manager", "embed_batch_size", "embeddings_cache", "max_retries", "num_workers", "rate_limiter"),
    *("reuse_client", "show_progress_bar", "timeout"),
}
"""State that says how a model is called, not which vectors it has."""
OPENAI_CLIENTS: Final = {"_client", "_aclient"}
"""Made of the other state when they are first needed."""

Vector: TypeAlias = list[float]
Compute: TypeAlias = Callable[[list[str]], list[Vector]]


# -- the cache --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Look-ups that were answered and not, and the vectors held with their memory, since the cache was made."""

    hits: int
    misses: int
    entries: int
    bytes: int


class EmbeddingCache:
    """Query vectors by embedding model and text; the longest unused go first when memory is full.

    Vectors are kept as doubles, so that what is found equals what the model returned, to the last bit. Each look-up
    returns a list of its own. Texts are not kept, only their digests (BLAKE2b, 256 bits). Threads and event loops may
    share it.

    One process-wide cache, ``SHARED_CACHE``, serves every retriever that has no other. A vector is a function of model
    and text alone and says nothing of documents; but how long it takes shows whether somebody asked the very same
    words shortly before. Requests of a principal therefore find the vectors of its own requests only (``of``).

    Args:
        max_bytes: Memory that the vectors may take, keys and bookkeeping included. Default 64 MiB; 0 keeps nothing.

    Raises:
        ConfigurationError: ``max_bytes`` is no whole number, or below 0.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        size: object = max_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ConfigurationError(
                f"max_bytes of an EmbeddingCache must be a whole number of bytes, 0 or more (0 keeps nothing), "
                f"got {size!r}"
            )
        self.max_bytes: int = size
        self._owner: object = None
        self._entries = _Entries()

    def of(self, principal: Principal | None) -> EmbeddingCache:
        """Return the part of this cache that is a principal's own; memory, counts and ``clear`` are the whole's."""
        part = copy.copy(self)
        if principal is not None:
            part._owner = (principal.tenant, principal.user, sorted(principal.groups))  # noqa: SLF001 (of the same class)
        return part

    def _key(self, identity: str, text: str) -> bytes:
        """Return a digest; two are equal only where owner, model and text are."""
        return blake2b(repr((self._owner, identity, text)).encode("utf-8", "surrogatepass"), digest_size=32).digest()

    def get(self, identity: str, text: str) -> Vector | None:
        """Return the vector of a text by the model of this identity, or None where it is not held."""
        key, entries = self._key(identity, text), self._entries
        with entries.lock:
            vector = entries.vectors.get(key)
            if vector is None:
                entries.misses += 1
                return None
            entries.hits += 1
            entries.vectors.move_to_end(key)
        return vector.tolist()

    def put(self, identity: str, text: str, vector: Sequence[float]) -> None:
        """Keep a copy of a vector, unless it is no row of numbers, or larger than the whole cache."""
        try:
            kept = array("d", vector)
        except (TypeError, OverflowError):  # a multi-vector model's rows; whole numbers beyond a double
            return
        key, size, entries = self._key(identity, text), ENTRY_BYTES + kept.itemsize * len(kept), self._entries
        if size > self.max_bytes:
            return
        with entries.lock:
            before = entries.vectors.pop(key, None)
            entries.vectors[key] = kept
            entries.bytes += size if before is None else kept.itemsize * (len(kept) - len(before))
            while entries.bytes > self.max_bytes:
                entries.bytes -= ENTRY_BYTES + kept.itemsize * len(entries.vectors.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all vectors and counts."""
        with self._entries.lock:
            self._entries.forget()

    @property
    def statistics(self) -> CacheStatistics:
        """Hits, misses, entries and bytes, at one moment."""
        entries = self._entries
        with entries.lock:
            return CacheStatistics(entries.hits, entries.misses, len(entries.vectors), entries.bytes)


class _Entries:
    """The vectors of a cache and all its parts. A forked child starts empty: its parent may have been changing them."""

    def __init__(self) -> None:
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        self.vectors: OrderedDict[bytes, array[float]] = OrderedDict()
        self.bytes = self.hits = self.misses = 0


SHARED_CACHE: Final = EmbeddingCache()
"""The process's cache: of every retriever that has no other."""

_serials = itertools.count()
_named: dict[int, tuple[weakref.ref[object], int]] = {}


def model_identity(model: BaseEmbedding) -> str | None:
    """Return what two models share only if they return the same vector for the same text.

    It is made of the class and all state of the model as it is now: name, dimensions, instructions, address, key,
    headers. Plain data counts by its value, any other object (loaded weights, a client) by its identity, which is
    never used for a second object, not even after the first is gone. So two ``OpenAIEmbedding`` with equal arguments
    share one; a model loaded twice does not. A class that is not LlamaIndex's own may hide state elsewhere (a global,
    an environment variable): there the model itself counts by its identity too.

    Returns:
        A digest that holds no secret in readable form; None for a model that can't be identified (it holds large
        collections, or objects without weak references).
    """
    state = {**vars(model), **(model.__pydantic_private__ or {})}
    ignored = CALL_SETTINGS | OPENAI_CLIENTS if _is_a(model, "OpenAIEmbedding") else CALL_SETTINGS
    own = [(name, state[name]) for name in sorted(state.keys() - ignored)]
    if _is_a(model, "HuggingFaceEmbedding"):  # its weights' own settings, which users change in place
        own += [
            (name, getattr(state.get("_model"), name, None)) for name in ("prompts", "max_seq_length", "truncate_dim")
        ]
    is_core = type(model).__module__.startswith("llama_index.")
    try:
        parts = [_described(type(model)), "" if is_core else _described(model), _described(own)]
    except TypeError:
        return None
    return blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _described(value: object, limit: int | None = None) -> str:
    """Return plain data in writing; for any other object a name that no other object ever has.

    Needs no lock: each step on the dictionary is atomic, and an object's id is free only after its callback has run.
    """
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if limit is not None and len(value) > limit:
            raise TypeError("too much to look through")
        items = value.items() if isinstance(value, Mapping) else value
        parts = [_described(item, MAX_ITEMS) for item in items]
        return f"{type(value).__name__}[{', '.join(parts if isinstance(value, list | tuple) else sorted(parts))}]"
    key = id(value)

    def forget(gone: weakref.ref[object], named: dict[int, tuple[weakref.ref[object], int]] = _named) -> None:
        if named.get(key, (None,))[0] is gone:
            del named[key]

    known = _named.get(key) or _named.setdefault(key, (weakref.ref(value, forget), next(_serials)))
    return f"#{known[1]}"


def _is_a(model: BaseEmbedding, *names: str) -> bool:
    """Whether a model's class or one of its bases has one of these names, without importing the integration."""
    return not set(names).isdisjoint(map(attrgetter("__name__"), type(model).__mro__))


# -- one request's vectors --------------------------------------------------------------------------------------------


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
        self._manager, self._deadline, self._cache = manager, deadline, cache
        self._context = contextvars.copy_context()
        """The request's: a search that is the first to want a vector has a deadline of its own in its context."""
        self._models: dict[int, tuple[BaseEmbedding, str | None]] = {}
        """Models and their identities by id; held here, so that no id is used again."""
        self._found: dict[tuple[int, str], Vector] = {}
        """Vectors that the cache had."""
        self._jobs: dict[tuple[int, str], tuple[Job[list[Vector | Exception]], int]] = {}
        """For each other query the job of its batch, and its position there."""

    def begin(self, pairs: Iterable[tuple[BaseEmbedding, str]]) -> None:
        """Start embedding queries that are new: one batch a model, models side by side. Needs a running loop."""
        batches: dict[int, list[str]] = {}
        for model, query in pairs:
            key = id(model), query
            if id(model) not in self._models:
                self._models[id(model)] = model, None if self._cache is None else model_identity(model)
            if key in self._found or key in self._jobs or query in batches.get(id(model), ()):
                continue
            identity = self._models[id(model)][1]
            vector = None if self._cache is None or identity is None else self._cache.get(identity, query)
            if vector is None:
                batches.setdefault(id(model), []).append(query)
            else:
                self._found[key] = vector
        for of_model, queries in batches.items():
            job = start(self._embed(*self._models[of_model], queries), self._context.copy())
            for position, query in enumerate(queries):
                self._jobs[of_model, query] = job, position

    async def _embed(self, model: BaseEmbedding, identity: str | None, queries: list[str]) -> list[Vector | Exception]:
        outcomes = await embed_queries(model, queries, deadline=self._deadline, manager=self._manager)
        if self._cache is not None and identity is not None:
            for query, outcome in zip(queries, outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    self._cache.put(identity, query, outcome)
        return outcomes

    async def get(self, model: BaseEmbedding, query: str, *, deadline: float | None = None) -> Vector:
        """Return a query's vector, embedding it now if that was not begun before.

        Raises:
            DeadlineExceededError: The vector is not there by this caller's deadline; others may wait longer.
            Exception: What the model raised.
        """
        key = id(model), query
        if key not in self._found and key not in self._jobs:
            self.begin([(model, query)])
        if key in self._found:
            return list(self._found[key])
        job, position = self._jobs[key]
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
    jobs = await gather([_call(model, watched, "get_query_embedding", query, deadline) for query in queries])
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
        return [view.outcomes.get(query, failure) for query in queries]


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
    calls, copied = calls_of(model, what, lambda error: error), once(watched, model)

    async def attempt(until: float | None) -> Any:
        return await calls.call(copied, method, argument, deadline=until)

    policy = NO_RETRIES if retries_itself(model) else REMOTE_RETRIES
    return await retried(attempt, policy=policy, deadline=deadline)


def _still_running(model: BaseEmbedding) -> DeadlineExceededError:
    return DeadlineExceededError(f"embedding model {model.model_name} was still running at its deadline")


# -- batches of local models ------------------------------------------------------------------------------------------

_Texts: TypeAlias = dict[str, "list[Future[Vector]]"]
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
        self._compute, self._max_batch, self._pool = compute, max_batch, pool
        self._lock = threading.Lock()
        self._waiting: _Texts = {}
        self._running: _Texts = {}
        self._worker: object | None = None
        self._started = 0.0

    def submit(self, texts: Sequence[str]) -> list[Future[Vector]]:
        """Return a future for each text, at once. One that is cancelled is dropped, unless its batch has begun."""
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
        """Compute batch after batch until nothing waits, or another worker was appointed.

        Where a batch fails, each text is tried alone, so that none can fail its neighbours.
        """
        while batch := self._take(worker):
            vectors = self._try(list(batch))
            for position, (text, futures) in enumerate(batch.items()):
                if not isinstance(vectors, Exception):
                    self._deliver(batch, text, vectors[position])
                    continue
                with self._lock:
                    again = len(batch) > 1 and _is_awaited(futures)
                alone = self._try([text]) if again else vectors
                self._deliver(batch, text, alone if isinstance(alone, Exception) else alone[0])

    def _take(self, worker: object) -> _Texts:
        """Return the next batch; an empty one where the worker shall end."""
        with self._lock:
            if self._worker is not worker:
                return {}
            self._waiting = {text: futures for text, futures in self._waiting.items() if _is_awaited(futures)}
            batch = {text: self._waiting.pop(text) for text in list(self._waiting)[: self._max_batch]}
            self._running.update(batch)
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

    def _deliver(self, batch: _Texts, text: str, result: Vector | Exception) -> None:
        with self._lock:  # nobody joins after this
            futures = batch[text]
            if self._running.get(text) is futures:
                del self._running[text]
        for future in futures:
            if future.set_running_or_notify_cancel():
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(list(result))


def _is_awaited(futures: Sequence[Future[Vector]]) -> bool:
    return any(not future.cancelled() for future in futures)


class _BatchedEmbedding(BaseEmbedding):
    """One request's view of a model that many requests share.

    LlamaIndex's own async methods send the events of the request's own texts to the request's handlers (those of
    ``model``); the vectors come from the shared batcher.
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

    @property
    def outcomes(self) -> dict[str, Vector | Exception]:
        """What became of each text, where another one failed the whole call."""
        return self._outcomes

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
        self._batchers: weakref.WeakValueDictionary[int, MicroBatcher] = weakref.WeakValueDictionary()

    def of(self, model: BaseEmbedding) -> MicroBatcher | None:
        """Return a local model's one batcher; None where it can't embed queries together.

        A model with a cache or a rate limiter of its own is called by itself, so that these see each call.
        """
        compute: Compute | None = None
        if _is_plain_huggingface(model):
            compute = partial(model._embed, prompt_name="query")  # type: ignore[attr-defined]  # noqa: SLF001
        elif _is_local(model) and _treats_queries_as_texts(model):
            compute = model._get_text_embeddings  # noqa: SLF001
        if compute is None or model.embeddings_cache or getattr(model, "rate_limiter", None):
            return None
        with self._lock:
            batcher = self._batchers.get(id(model))
            if batcher is None:  # it holds the model, and so its id
                batcher = MicroBatcher(compute, max_batch=model.embed_batch_size, pool=EMBEDDING_POOL)
                self._batchers[id(model)] = batcher
            return batcher


_BATCHERS: Final = _Batchers()


def _is_plain_huggingface(model: BaseEmbedding) -> bool:
    """Whether queries are embedded by HuggingFaceEmbedding's own methods, and no subclass's."""
    for name in ("_get_query_embedding", "_embed"):
        if getattr(getattr(model, name, None), "__qualname__", "") != f"HuggingFaceEmbedding.{name}":
            return False
    return True


def _is_local(model: BaseEmbedding) -> bool:
    """Whether async would only wrap a computation (or block the loop, as core's default does)."""
    own_async = type(model)._aget_text_embeddings is not BaseEmbedding._aget_text_embeddings  # noqa: SLF001
    return _is_a(model, "HuggingFaceEmbedding", "MockEmbedding") or not own_async


def _treats_queries_as_texts(model: BaseEmbedding) -> bool:
    """Whether a batch of texts returns the vectors that single queries have."""
    declared = getattr(model, "treats_queries_as_texts", None)
    if declared is not None:
        return bool(declared)
    if _is_plain_huggingface(model):
        prompts = getattr(getattr(model, "_model", None), "prompts", None)
        return isinstance(prompts, dict) and prompts.get("query", "") == prompts.get("text", "")
    if _is_a(model, "OpenAIEmbedding"):
        return bool(getattr(model, "_query_engine", None) == getattr(model, "_text_engine", object()))
    return False
