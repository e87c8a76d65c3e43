from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.callbacks.schema import EventPayload
from pydantic import PrivateAttr

from llama_index_agentic_kb._aio import WorkerPool, arun, gather, run
from llama_index_agentic_kb.errors import AgenticKBError
from llama_index_agentic_kb.search import embedding
from llama_index_agentic_kb.search.embedding import MicroBatcher, QueryEmbeddings
from llama_index_agentic_kb.testing import HashEmbedding

SECONDS = 20.0
"""How long a test waits before it fails."""


class Model:
    """Embeds a text as its length; a call waits while the gate is shut."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.gate.set()

    def __call__(self, texts: list[str]) -> list[list[float]]:
        self.calls.append(list(texts))
        self.begun.release()
        assert self.gate.wait(SECONDS)
        if "poison" in texts:
            raise ValueError("poison")
        return [[float(len(text))] for text in texts]


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.gate.set()


@pytest.fixture
def batcher(model: Model) -> MicroBatcher:
    return MicroBatcher(model, max_batch=4, pool=WorkerPool("test", max_workers=2))


def busy(batcher: MicroBatcher, model: Model, text: str = "first") -> Future[list[float]]:
    """Have the model compute a text, and go on computing until its gate is opened."""
    model.gate.clear()
    [first] = batcher.submit([text])
    assert model.begun.acquire(timeout=SECONDS)
    return first


def test_a_text_that_waits_is_computed_once(batcher: MicroBatcher, model: Model) -> None:
    """Those who want it share its vector, each as a list of its own."""
    first = busy(batcher, model)
    twice = batcher.submit(["a", "a"])
    model.gate.set()
    one, other = (future.result(SECONDS) for future in twice)
    assert one == other == [1.0]
    assert one is not other
    assert first.result(SECONDS) == [5.0]
    assert model.calls == [["first"], ["a"]]


@pytest.mark.parametrize("given", [[], [[1.0], [2.0]]], ids=["too few", "too many"])
def test_a_wrong_number_of_vectors_is_an_error(given: list[list[float]]) -> None:
    """A model that gives another number of vectors than texts fails; nobody gets another one's vector."""
    batcher = MicroBatcher(lambda _: given, max_batch=4, pool=WorkerPool("test", max_workers=1))
    with pytest.raises(AgenticKBError, match=f"returned {len(given)} vectors for 1 text"):
        batcher.submit(["a"])[0].result(SECONDS)


def test_a_call_that_hangs_holds_up_no_later_text(
    batcher: MicroBatcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while others are served beside it, the same text too; its own callers get what it gives at last."""
    hung = busy(batcher, model, "a")
    monkeypatch.setattr(embedding, "STALLED_SECONDS", 0.0)
    later = batcher.submit(["a", "bb"])
    assert model.begun.acquire(timeout=SECONDS)
    assert model.calls == [["a"], ["a", "bb"]]
    monkeypatch.undo()
    model.gate.set()
    assert [future.result(SECONDS) for future in (hung, *later)] == [[1.0], [1.0], [2.0]]
    assert batcher.submit(["a"])[0].result(SECONDS) == [1.0]


class Local(HashEmbedding):
    """A model that computes in the process and embeds queries as texts; it notes whether its calls overlap.

    ``hold`` keeps each call going until it is true.
    """

    treats_queries_as_texts: bool = True

    _one_at_a_time: threading.Lock = PrivateAttr(default_factory=threading.Lock)
    _overlapped: bool = PrivateAttr(default=False)
    _hold: Callable[[], bool] = PrivateAttr(default_factory=lambda: lambda: True)

    _aget_text_embeddings = BaseEmbedding._aget_text_embeddings

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        if not self._one_at_a_time.acquire(blocking=False):
            self._overlapped = True
            return []
        try:
            vectors = super()._get_text_embeddings(texts)
            _until(self._hold)
            if "poison" in texts:
                raise ValueError("poison")
            return vectors
        finally:
            self._one_at_a_time.release()

    @property
    def texts(self) -> list[str]:
        return [text for _, texts in self.calls for text in texts]

    def hold_until_waiting(self, count: int) -> None:
        """Have the first call go on until so many texts wait for the next."""
        reached = threading.Event()

        def hold() -> bool:
            if len(embedding._BATCHERS._batchers[id(self)]._waiting) == count:
                reached.set()
            return reached.is_set()

        self._hold = hold


async def request(model: BaseEmbedding, queries: list[str], *handlers: Any, deadline: float | None = None) -> list[Any]:
    """Ask for the vectors of one request; give each or its error."""
    embeddings = QueryEmbeddings(CallbackManager(list(handlers)), deadline=deadline, cache=None)
    embeddings.begin([(model, query) for query in queries])
    jobs = await gather([embeddings.get(model, query) for query in queries])
    return [job.error or job.result() for job in jobs]


def vector(model: HashEmbedding, text: str) -> list[float]:
    return model._vectors([text])[0]


def test_64_threads_share_batches() -> None:
    """Each of 64 threads gets its own vectors; the model is called with one full batch at a time."""
    model = Local()
    model.hold_until_waiting(64)

    def ask(user: int) -> list[Any]:
        return run(request(model, [f"user {user}", "common"]))

    with ThreadPoolExecutor(64) as threads:
        first = threads.submit(run, request(model, ["common"]))
        _until(lambda: bool(model.calls))
        answers = list(threads.map(ask, range(63)))
    common = vector(model, "common")
    assert first.result(SECONDS) == [common]
    assert answers == [[vector(model, f"user {user}"), common] for user in range(63)]
    assert Counter(model.texts) == Counter(["common", "common", *(f"user {user}" for user in range(63))])
    assert [len(texts) for _, texts in model.calls] == [1, 32, 32]
    assert not model._overlapped


async def test_each_request_hears_of_its_own_texts_only() -> None:
    """Handlers see one EMBEDDING event with their request's texts and vectors, whatever shared the call."""
    model = Local(latency=0.05)
    handlers = [LlamaDebugHandler(print_trace_on_end=False) for _ in range(6)]
    asked = [[f"a{number}", f"b{number}"] for number in range(6)]
    flows = [request(model, texts, handler) for texts, handler in zip(asked, handlers, strict=True)]
    await asyncio.gather(*map(arun, flows[:3]), *(asyncio.to_thread(run, flow) for flow in flows[3:]))
    assert len(model.calls) < 6
    for texts, handler in zip(asked, handlers, strict=True):
        [(start, end)] = handler.get_event_pairs(CBEventType.EMBEDDING)
        assert start.payload == {EventPayload.SERIALIZED: model.to_payload()}
        vectors = [vector(model, text) for text in texts]
        assert end.payload == {EventPayload.CHUNKS: texts, EventPayload.EMBEDDINGS: vectors}


async def test_a_cancelled_request_leaves_nothing_to_compute() -> None:
    """What a cancelled request wanted and was not begun is never computed."""
    model, gate = Local(), threading.Event()
    model._hold = gate.is_set
    first = asyncio.create_task(arun(request(model, ["first"])))
    await asyncio.to_thread(_until, lambda: bool(model.calls))
    gone, stays = (asyncio.create_task(arun(request(model, [text]))) for text in ("gone", "stays"))
    await asyncio.to_thread(_until, lambda: len(embedding._BATCHERS._batchers[id(model)]._waiting) == 2)
    gone.cancel()
    await asyncio.wait([gone])
    gate.set()
    assert [await first, await stays] == [[vector(model, text)] for text in ("first", "stays")]
    assert model.texts == ["first", "stays"]


def test_nothing_is_left_behind() -> None:
    """An idle model's batcher is gone, and keeps the model alive no longer."""
    model = Local()
    run(request(model, ["a"]))
    key, kept = id(model), weakref.ref(model)
    _until(lambda: key not in embedding._BATCHERS._batchers)
    del model
    _until(lambda: gc.collect() >= 0 and kept() is None)


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="no safe fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_embeds() -> None:
    """A child forked while the parent's model computed has a batcher of its own."""
    model = Local(latency=0.3)
    with ThreadPoolExecutor(1) as threads:
        parents = threads.submit(run, request(model, ["a"]))
        _until(lambda: bool(model.calls))
        child = os.fork()
        if child == 0:
            model._one_at_a_time = threading.Lock()  # the parent's call holds this one
            answer = run(request(model, ["a"], deadline=time.monotonic() + SECONDS))
            os._exit(0 if answer == [vector(model, "a")] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert parents.result(SECONDS) == [vector(model, "a")]


@pytest.mark.parametrize("instruction", ["Represent this: ", None])
def test_a_query_instruction_is_kept_in_batches(embed_model: Any, instruction: str | None) -> None:
    """A HuggingFace model that instructs queries does so in a batch as it does alone."""
    before = dict(embed_model._model.prompts)
    embed_model._model.prompts.update({"query": instruction or "", "text": "passage: "})
    try:
        single = [embed_model.get_query_embedding(text) for text in ("one rocket", "two")]
        together = run(request(embed_model, ["one rocket", "two"]))
    finally:
        embed_model._model.prompts.clear()
        embed_model._model.prompts.update(before)
    for answer, expected in zip(together, single, strict=True):
        assert answer == pytest.approx(expected, abs=1e-5)


def _until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
