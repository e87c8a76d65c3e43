"""Micro-batching: texts that concurrent requests want embedded go to a local model in one call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, Final

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr

from llama_index_agentic_kb._aio import WorkerPool, as_exception
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError

__all__ = ["BatchedEmbedding", "MicroBatcher"]

STALLED_SECONDS: Final = 15.0
"""A call that takes longer is taken to hang: those who come later are served beside it."""

Vector = list[float]

_Wanted = OrderedDict[str, "list[Future[Vector]]"]
"""Texts in order of arrival, each with those who wait for its vector."""


class MicroBatcher:
    """Gathers texts while a model computes, and hands them to it together when it is free.

    An idle model starts at once: nobody waits for company. What arrives while it computes forms the next batch, so
    that batches grow with the load (as in "Clipper", NSDI 2017, but without a delay). One call runs at a time. A text
    that is wanted twice, waiting or being computed, is computed once.

    No thread waits for a result; one thread of the pool computes while there is work. Safe to use from any number of
    threads and event loops.

    Args:
        compute: Embeds texts, all different, in one call.
        max_batch: Texts of one call at most.
        pool: Where calls run. One that hangs keeps its thread; after 15 s later texts get another.
    """

    def __init__(self, compute: Callable[[list[str]], list[Vector]], *, max_batch: int, pool: WorkerPool) -> None:
        self._compute = compute
        self._max_batch = max_batch
        self._pool = pool
        self._lock = threading.Lock()
        self._waiting: _Wanted = OrderedDict()
        self._running: _Wanted = OrderedDict()
        self._worker: object | None = None
        self._begun = 0.0

    def submit(self, texts: Sequence[str]) -> list[Future[Vector]]:
        """Ask for vectors; never waits.

        Args:
            texts: Any texts. More than ``max_batch`` go in several calls.

        Returns:
            A future a text, in order. One that is cancelled is dropped, unless its batch has begun.
        """
        futures: list[Future[Vector]] = [Future() for _ in texts]
        with self._lock:
            self._leave_stalled()
            for text, future in zip(texts, futures, strict=True):
                wanted = self._running if text in self._running else self._waiting
                wanted.setdefault(text, []).append(future)
            worker = self._new_worker() if self._waiting and self._worker is None else None
        if worker is not None:
            self._pool.submit(partial(self._serve, worker))
        return futures

    def _leave_stalled(self) -> None:
        """Count no longer on a worker that seems to hang; what it may yet give goes to those who wait for it now."""
        if self._worker is not None and time.monotonic() - self._begun >= STALLED_SECONDS:
            self._worker = None
            self._running.clear()

    def _new_worker(self) -> object:
        self._worker, self._begun = object(), time.monotonic()
        return self._worker

    def _serve(self, worker: object) -> None:
        """Compute batch after batch until nothing waits, or another worker was appointed."""
        while batch := self._take(worker):
            for text, result in self._results(batch):
                self._deliver(batch, text, result)

    def _take(self, worker: object) -> _Wanted:
        """Give the next batch; nothing where the worker shall end."""
        with self._lock:
            if self._worker is not worker:
                return OrderedDict()
            for text in [text for text, futures in self._waiting.items() if not _live(futures)]:
                del self._waiting[text]
            batch = OrderedDict(islice(self._waiting.items(), self._max_batch))
            for text in batch:
                del self._waiting[text]
            self._running.update(batch)
            self._begun = time.monotonic()
            if not batch:
                self._worker = None
            return batch

    def _results(self, batch: _Wanted) -> Iterator[tuple[str, Vector | Exception]]:
        """Compute a batch; where that fails, each text alone, so that one can't fail its neighbours."""
        texts = list(batch)
        vectors = self._try(texts)
        if not isinstance(vectors, Exception):
            yield from zip(texts, vectors, strict=True)
            return
        for text in texts:
            if len(texts) == 1 or not self._still_wanted(batch[text]):
                yield text, vectors
                continue
            alone = self._try([text])
            yield text, alone if isinstance(alone, Exception) else alone[0]

    def _try(self, texts: list[str]) -> list[Vector] | Exception:
        try:
            vectors = self._compute(texts)
        except BaseException as error:  # noqa: BLE001 (delivered to those who wait; the pool's thread goes on)
            return as_exception(error)
        if len(vectors) != len(texts):
            return AgenticKBError(f"the embedding model gave {len(vectors)} vectors for {len(texts)} texts")
        return vectors

    def _still_wanted(self, futures: list[Future[Vector]]) -> bool:
        with self._lock:
            return _live(futures)

    def _deliver(self, batch: _Wanted, text: str, result: Vector | Exception) -> None:
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


def _live(futures: Sequence[Future[Vector]]) -> bool:
    return any(not future.cancelled() for future in futures)


class BatchedEmbedding(BaseEmbedding):
    """One request's view of a model that many requests share.

    LlamaIndex's own methods tell the request's handlers of its own texts, and of nobody else's; the vectors come from
    the shared batcher.

    Args:
        model: The model with the request's handlers. It is asked for nothing but its description.
        batcher: Computes.
        deadline: ``time.monotonic()`` until which the sync methods wait; None waits for ever.
    """

    _model: BaseEmbedding = PrivateAttr()
    _batcher: MicroBatcher = PrivateAttr()
    _deadline: float | None = PrivateAttr()
    _outcomes: dict[str, Vector | Exception] = PrivateAttr(default_factory=dict)

    def __init__(self, model: BaseEmbedding, batcher: MicroBatcher, *, deadline: float | None) -> None:
        super().__init__(
            model_name=model.model_name,
            embed_batch_size=model.embed_batch_size,
            callback_manager=model.callback_manager,
            num_workers=model.num_workers,
            embeddings_cache=model.embeddings_cache,
            rate_limiter=getattr(model, "rate_limiter", None),
        )
        self._model = model
        self._batcher = batcher
        self._deadline = deadline

    @classmethod
    def class_name(cls) -> str:
        """Name the class in serialized forms."""
        return "BatchedEmbedding"

    def to_payload(self) -> dict[str, Any]:
        """Describe the model itself in events."""
        return self._model.to_payload()

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Describe the model itself; older versions of LlamaIndex put this into events."""
        return self._model.to_dict(**kwargs)

    def outcome(self, text: str) -> Vector | Exception | None:
        """Give what became of a text, where another one failed the whole call; None where that is not known."""
        return self._outcomes.get(text)

    def _get_query_embedding(self, query: str) -> Vector:
        return self._get_text_embeddings([query])[0]

    async def _aget_query_embedding(self, query: str) -> Vector:
        return (await self._aget_text_embeddings([query]))[0]

    def _get_text_embedding(self, text: str) -> Vector:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[Vector]:
        futures = self._batcher.submit(texts)
        try:
            for future in futures:
                future.exception(None if self._deadline is None else max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            raise DeadlineExceededError(
                f"embedding model {self.model_name} was still running at its deadline"
            ) from None
        finally:
            for future in futures:
                future.cancel()
        return self._noted(texts, futures)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Vector]:
        futures = self._batcher.submit(texts)
        await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        return self._noted(texts, futures)

    def _noted(self, texts: list[str], futures: list[Future[Vector]]) -> list[Vector]:
        for text, future in zip(texts, futures, strict=True):
            error = future.exception()
            self._outcomes[text] = future.result() if error is None else as_exception(error)
        return [future.result() for future in futures]
