from __future__ import annotations

import asyncio
import copy
import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.callbacks.schema import EventPayload
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.embedding import EmbeddingEndEvent
from llama_index_instrumentation import get_dispatcher
from pydantic import Field, PrivateAttr

from llama_index_agentic_kb._aio import WorkerPool, arun, deadline_after, gather, run
from llama_index_agentic_kb.account import with_handlers
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.llm.calls import calls_of
from llama_index_agentic_kb.search import embedding as module
from llama_index_agentic_kb.search.embedding import (
    ENTRY_BYTES,
    EmbeddingCache,
    MicroBatcher,
    QueryEmbeddings,
    embed_queries,
    model_identity,
)
from llama_index_agentic_kb.testing import HashEmbedding, LoopbackOpenAI
from tests.aio.conftest import until
from tests.faulty_server import Fault
from tests.openai_embedding import OpenAIEmbedding

QUERIES = ["How tall is Saturn V?", "rockets", "Ariane 5, its height and its weight, in short words: how big?", "é"]


def embeddings(*handlers: Any, cache: EmbeddingCache | None = None, deadline: float | None = None) -> QueryEmbeddings:
    return QueryEmbeddings(CallbackManager(list(handlers)), deadline=deadline, cache=cache)


async def asked(
    shared: QueryEmbeddings, pairs: Sequence[tuple[BaseEmbedding, str]], *, begin: bool = True
) -> list[Any]:
    """Ask for the vectors of one request; return each or its error."""
    if begin:
        shared.begin(pairs)
    jobs = await gather([shared.get(model, query) for model, query in pairs])
    return [job.error or job.result() for job in jobs]


def vector(model: HashEmbedding, text: str) -> list[float]:
    return model._vectors([text])[0]


@pytest.mark.parametrize("begin", [True, False], ids=["begun together", "asked for one by one"])
def test_each_distinct_query_is_embedded_once(begin: bool) -> None:
    """Lanes that ask for the same query at once share one vector, whoever asks first."""
    model = HashEmbedding(latency=0.01)
    pairs = [(model, query) for query in ["a", "b", "a", "a", "b"]]
    assert run(asked(embeddings(), pairs, begin=begin)) == [vector(model, query) for _, query in pairs]
    assert sorted(texts[0] for _, texts in model.calls) == ["a", "b"]


async def test_what_the_cache_has_costs_no_call_and_no_event() -> None:
    """A later request finds the vectors of an earlier one, equal to the last bit; only new texts reach the model."""
    model, cache = HashEmbedding(), EmbeddingCache()
    first, later = LlamaDebugHandler(print_trace_on_end=False), LlamaDebugHandler(print_trace_on_end=False)
    one, other = embeddings(first, cache=cache), embeddings(later, cache=cache)
    expected = run(asked(one, [(model, "a"), (model, "b")]))
    expected[0].append(9.0)  # a caller's own business
    found = await arun(asked(other, [(model, "a"), (model, "a"), (model, "c")]))
    assert found == [vector(model, text) for text in ("a", "a", "c")]
    assert found[0] is not found[1]
    assert sorted(texts[0] for _, texts in model.calls) == ["a", "b", "c"]
    assert [len(h.get_event_pairs(CBEventType.EMBEDDING)) for h in (first, later)] == [2, 1]


def test_the_process_shares_a_cache_unless_told_otherwise() -> None:
    """Requests share ``SHARED_CACHE``; without a cache, or with one of 0 bytes, each embeds for itself."""
    model = HashEmbedding()
    for _ in range(2):
        run(asked(QueryEmbeddings(CallbackManager(), deadline=None), [(model, "a")]))
    assert len(model.calls) == 1
    for cache in (None, EmbeddingCache(max_bytes=0)):
        run(asked(embeddings(cache=cache), [(model, "a")]))
    assert len(model.calls) == 3


def test_a_cache_of_the_callers_own_is_used() -> None:
    """Whatever it says of its length and bytes."""

    class Elsewhere(EmbeddingCache):
        def __len__(self) -> int:
            return 0

        def get(self, *_: Any) -> list[float]:
            return [9.0]

    assert run(asked(embeddings(cache=Elsewhere(max_bytes=0)), [(HashEmbedding(), "a")])) == [[9.0]]


def test_one_text_that_fails_costs_no_other_its_vector(embed_model: BaseEmbedding) -> None:
    """In a batch of the real model a text that it can't take fails alone, for the same request and for others."""
    poison: Any = "poison"

    class Choosy(type(embed_model)):  # type: ignore[misc]  # the session's model, with a text that it chokes on
        def _embed_with_retry(self, inputs: list[str], prompt_name: str | None = None) -> list[list[float]]:
            if poison in inputs:
                raise ValueError("can't embed that")
            vectors: list[list[float]] = super()._embed_with_retry(inputs, prompt_name)
            return vectors

    model = copy.copy(embed_model)
    model.__class__ = Choosy
    sound, poisoned = run(embed_queries(model, ["rockets", poison], deadline=None))
    assert sound == pytest.approx(embed_model.get_query_embedding("rockets"), abs=1e-5)
    assert isinstance(poisoned, ValueError)


class Recorder(BaseEventHandler):
    _chunks: list[list[str]] = PrivateAttr(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, EmbeddingEndEvent):
            self._chunks.append(event.chunks)


def test_the_real_model_embeds_a_request_in_one_batch(embed_model: BaseEmbedding) -> None:
    """Four queries of one model are one EMBEDDING event, to the manager and to the dispatcher."""
    debug, recorder = LlamaDebugHandler(print_trace_on_end=False), Recorder()
    dispatcher = get_dispatcher()
    own = list(embed_model.callback_manager.handlers)
    dispatcher.add_event_handler(recorder)
    try:
        run(asked(embeddings(debug), [(embed_model, query) for query in QUERIES]))
    finally:
        dispatcher.event_handlers.remove(recorder)
    assert len(debug.get_event_pairs(CBEventType.EMBEDDING)) == 1
    assert recorder._chunks == [QUERIES]
    assert embed_model.callback_manager.handlers == own


def test_a_few_queries_take_one_thread(embed_model: BaseEmbedding) -> None:
    """A small model embeds a few queries on one thread, many on those it had, and leaves other threads theirs."""
    model, seen, before = embed_model._model, [], torch.get_num_threads()  # type: ignore[attr-defined]
    hook = model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    try:
        for count in (1, 1, 9):
            queries = [f"query {number} of {count}" for number in range(count)]
            asyncio.run(embed_queries(embed_model, queries, deadline=None))
    finally:
        hook.remove()
    assert seen[:2] == [1, 1]
    assert set(seen[2:]) == {before}
    assert torch.get_num_threads() == before


def test_the_models_own_handlers_are_told_too() -> None:
    """A model's handlers and the request's are called once each, also where one is both."""
    own, shared, ours = (LlamaDebugHandler(print_trace_on_end=False) for _ in range(3))
    model = HashEmbedding(callback_manager=CallbackManager([own, shared]))
    run(asked(embeddings(shared, ours), [(model, "a")]))
    assert [len(h.get_event_pairs(CBEventType.EMBEDDING)) for h in (own, shared, ours)] == [1, 1, 1]
    assert model.callback_manager.handlers == [own, shared]


def test_callers_wait_no_longer_than_they_may() -> None:
    """A caller's own deadline ends its wait; another one's wait goes on."""
    model = HashEmbedding(latency=0.5)

    async def both() -> list[Any]:
        shared = embeddings()
        hurried = shared.get(model, "a", deadline=time.monotonic() + 0.05)
        jobs = await gather([hurried, shared.get(model, "a", deadline=time.monotonic() + 20)])
        return [job.error or job.result() for job in jobs]

    hurried, patient = run(both())
    assert isinstance(hurried, DeadlineExceededError)
    assert patient == vector(model, "a")


def test_local_models_compute_on_threads() -> None:
    """A model whose async only wraps its computation never blocks the loop."""
    threads = []

    class Noted(MockEmbedding):
        def _get_query_embedding(self, query: str) -> list[float]:
            threads.append(threading.get_ident())
            return super()._get_query_embedding(query)

    asyncio.run(embed_queries(Noted(embed_dim=3), ["a", "b"], deadline=None))
    assert len(threads) == 2
    assert threading.get_ident() not in threads


BYTES_OF_TWO = ENTRY_BYTES + 2 * 8
"""What a vector of two numbers takes."""


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=False), max_size=20), st.text(st.characters(codec=None), max_size=20))
def test_what_is_found_equals_what_was_kept(vector: list[float], text: str) -> None:
    """Every double comes back as it was, also infinities and -0.0, for any text, lone surrogates included."""
    cache = EmbeddingCache()
    cache.put("m", text, vector)
    assert repr(cache.get("m", text)) == repr(vector)


def test_the_longest_unused_goes_first() -> None:
    """A full cache lets go of what was not looked up or kept for the longest time."""
    cache = EmbeddingCache(max_bytes=2 * BYTES_OF_TWO)
    for text in "ab":
        cache.put("m", text, [0.0, 1.0])
    cache.get("m", "a")
    cache.put("m", "c", [0.0, 1.0])
    assert [cache.get("m", text) is not None for text in "abc"] == [True, False, True]


@pytest.mark.parametrize("vector", [[0.0] * 100, [[1.0], [2.0]], [10**400], None], ids=str)
def test_what_can_not_be_kept_is_let_go(vector: Any) -> None:
    """A vector larger than the cache, a multi-vector model's rows or no vector at all leave the rest alone."""
    cache = EmbeddingCache(max_bytes=BYTES_OF_TWO)
    cache.put("m", "a", [1.0, 2.0])
    cache.put("m", "b", vector)
    assert cache.get("m", "b") is None
    assert cache.get("m", "a") == [1.0, 2.0]


@pytest.mark.parametrize("max_bytes", [-1, 1.5, True, "64 MB", None])
def test_a_bad_size_is_refused(max_bytes: Any) -> None:
    """The message names the argument and what it may be."""
    with pytest.raises(ConfigurationError, match=r"max_bytes .* 0 or more"):
        EmbeddingCache(max_bytes)


Perform = Callable[[Coroutine[Any, Any, Any]], Any]


async def embed(model: OpenAIEmbedding, seconds: float = 30) -> list[Any]:
    return await embed_queries(model, QUERIES[:2], deadline=deadline_after(seconds))


def test_vectors_come_in_one_request(perform: Perform) -> None:
    """As the model's own methods give them, and the model is left as it was."""
    with LoopbackOpenAI() as server:
        model = OpenAIEmbedding.of(server)
        assert perform(embed(model)) == model.get_text_embedding_batch(QUERIES[:2])
        assert len(server.requests) == 2
        assert model.max_retries == 10


def test_a_hanging_server_keeps_nothing(perform: Perform) -> None:
    """The caller hears of it at the deadline, and the call's place is free soon after."""
    with LoopbackOpenAI(embedding_fault=Fault.hang()) as server:
        model = OpenAIEmbedding.of(server)
        (first, _) = perform(embed(model, seconds=0.2))
        assert isinstance(first, DeadlineExceededError)
        bulkhead = calls_of(model, "", lambda error: error).bulkhead
        assert until(lambda: not bulkhead.state.abandoned and not bulkhead.state.at_work)


# -- batches of local models ------------------------------------------------------------------------------------------

SECONDS = 20.0
"""How long a test waits before it fails."""


@pytest.mark.parametrize("given", [[], [[1.0], [2.0]]], ids=["too few", "too many"])
def test_a_wrong_number_of_vectors_is_an_error(given: list[list[float]]) -> None:
    """A model that gives another number of vectors than texts fails; nobody gets another one's vector."""
    batcher = MicroBatcher(lambda _: given, max_batch=4, pool=WorkerPool("test", max_workers=1))
    with pytest.raises(AgenticKBError, match=f"returned {len(given)} vectors for 1 text"):
        batcher.submit(["a"])[0].result(SECONDS)


def test_a_call_that_hangs_holds_up_no_later_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while another thread takes over, for good; the call's own texts get what it gives at last."""
    gates, begun, calls = [threading.Event(), threading.Event()], threading.Semaphore(0), list[list[str]]()
    threads: list[int] = []

    def compute(texts: list[str]) -> list[list[float]]:
        calls.append(texts)
        threads.append(threading.get_ident())
        gate = gates[len(calls) > 1]
        begun.release()
        assert gate.wait(SECONDS)
        return [[float(len(text))] for text in texts]

    batcher = MicroBatcher(compute, max_batch=4, pool=WorkerPool("test", max_workers=2))
    [hung] = batcher.submit(["a"])
    assert begun.acquire(timeout=SECONDS)
    monkeypatch.setattr(module, "STALLED_SECONDS", 0.0)
    later = batcher.submit(["a", "bb"])
    assert begun.acquire(timeout=SECONDS)
    monkeypatch.undo()
    [last] = batcher.submit(["c"])
    gates[0].set()
    assert hung.result(SECONDS) == [1.0]
    gates[1].set()
    assert [future.result(SECONDS) for future in (*later, last)] == [[1.0], [2.0], [1.0]]
    assert calls == [["a"], ["a", "bb"], ["c"]]
    assert threads[0] != threads[1] == threads[2]


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
            assert until(self._hold, SECONDS)
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
            if len(module._BATCHERS._batchers[id(self)]._waiting) == count:
                reached.set()
            return reached.is_set()

        self._hold = hold


async def request(model: BaseEmbedding, queries: list[str], *handlers: Any, deadline: float | None = None) -> list[Any]:
    return await asked(embeddings(*handlers, deadline=deadline), [(model, query) for query in queries])


def test_64_threads_share_batches() -> None:
    """Each of 64 threads gets its own vectors; the model is called with one full batch at a time."""
    model = Local()
    model.hold_until_waiting(64)

    def ask(user: int) -> list[Any]:
        return run(request(model, [f"user {user}", "common"]))

    with ThreadPoolExecutor(64) as threads:
        first = threads.submit(run, request(model, ["common"]))
        assert until(lambda: bool(model.calls), SECONDS)
        answers = list(threads.map(ask, range(63)))
    common = vector(model, "common")
    assert first.result(SECONDS) == [common]
    assert answers == [[vector(model, f"user {user}"), common] for user in range(63)]
    assert Counter(model.texts) == Counter(["common", "common", *(f"user {user}" for user in range(63))])
    assert [len(texts) for _, texts in model.calls] == [1, 32, 32]
    assert not model._overlapped
    assert len({id(answer[1]) for answer in answers}) == 63, "each has a list of its own"


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
    assert await asyncio.to_thread(until, lambda: bool(model.calls), SECONDS)
    gone, stays = (asyncio.create_task(arun(request(model, [text]))) for text in ("gone", "stays"))
    assert await asyncio.to_thread(until, lambda: len(module._BATCHERS._batchers[id(model)]._waiting) == 2, SECONDS)
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
    assert until(lambda: key not in module._BATCHERS._batchers, SECONDS)
    del model
    assert until(lambda: gc.collect() >= 0 and kept() is None, SECONDS)


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="no safe fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_embeds() -> None:
    """A child forked while the parent's model computed has a batcher of its own."""
    model = Local(latency=0.3)
    with ThreadPoolExecutor(1) as threads:
        parents = threads.submit(run, request(model, ["a"]))
        assert until(lambda: bool(model.calls), SECONDS)
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


def test_a_query_method_of_the_callers_own_is_used(embed_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is set on a HuggingFace model embeds each query, also after others of its class were used."""
    run(request(embed_model, ["a"]))
    monkeypatch.setitem(vars(embed_model), "_get_query_embedding", lambda _: [9.0])
    assert run(request(embed_model, ["a", "b"])) == [[9.0], [9.0]]


# -- the identity of a model -------------------------------------------------------------------------------------------


class OpenAILike(MockEmbedding):
    """Shaped as LlamaIndex's of that name, which is not installed: its state, and clients made when first needed."""

    api_key: str = "key"
    api_base: str = "https://api.openai.com/v1"
    dimensions: int | None = None
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    default_headers: dict[str, str] | None = None
    timeout: float = 60.0

    _query_engine: str = PrivateAttr(default="text-embedding-3-small")
    _client: Any = PrivateAttr(default=None)
    _http_client: Any = PrivateAttr(default=None)


OpenAILike.__name__, OpenAILike.__module__ = "OpenAIEmbedding", "llama_index.embeddings.openai.base"


class Client:
    """Something that is no plain data."""


def openai(**kwargs: Any) -> OpenAILike:
    return OpenAILike(embed_dim=3, **{"model_name": "text-embedding-3-small", **kwargs})


def test_equal_models_of_llama_index_are_one() -> None:
    """Two objects with equal arguments share an identity, however they are called and whether they have been used."""
    used = openai(timeout=1.0, embed_batch_size=7, num_workers=2)
    used._client = Client()
    used.callback_manager = CallbackManager([LlamaDebugHandler(print_trace_on_end=False)])
    assert model_identity(openai()) == model_identity(used)
    assert model_identity(MockEmbedding(embed_dim=3)) == model_identity(MockEmbedding(embed_dim=3))


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "text-embedding-3-large"},
        {"dimensions": 256},
        {"api_base": "http://localhost/v1"},
        {"api_key": "another"},
        {"additional_kwargs": {"dimensions": 256}},
        {"additional_kwargs": {"user": ["1", 2]}},
        {"default_headers": {"x-deployment": "blue"}},
    ],
    ids=str,
)
def test_any_state_that_may_matter_tells_models_apart(other: dict[str, Any]) -> None:
    """Name, dimensions, address, key, extra arguments and headers: each of them, also changed later, tells."""
    model = openai()
    before = model_identity(model)
    for name, value in other.items():
        setattr(model, name, value)
    assert before != model_identity(model) == model_identity(openai(**other))
    assert len(before or "") == 32  # a digest: no key can be read in it


def test_an_identity_is_never_used_twice() -> None:
    """Objects made and dropped one after the other, often at the same address, never share an identity."""
    gc.collect()
    before = len(module._numbers)  # other tests' models
    seen = [model_identity(HashEmbedding()) for _ in range(500)]
    assert len(set(seen)) == 500
    gc.collect()
    assert len(module._numbers) < before + 400  # the dead are forgotten


@pytest.mark.parametrize(
    "value", [list(range(1000)), {str(number): 1.0 for number in range(1000)}, [object()]], ids=["list", "map", "slots"]
)
def test_what_can_not_be_described_has_no_identity(value: Any) -> None:
    """A model with large tables of its own, or objects without weak references, is not cached."""
    assert model_identity(openai(additional_kwargs={"table": value})) is None


def test_a_loaded_model_counts_by_its_weights(embed_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that share weights are one model, until an instruction, the window or normalisation changes."""
    identity = model_identity(embed_model)
    assert identity is not None
    twin = with_handlers(embed_model, CallbackManager([LlamaDebugHandler(print_trace_on_end=False)]))
    assert model_identity(twin) == identity
    unnormalised = copy.copy(embed_model)
    unnormalised.normalize = False
    changes: list[Callable[[], None]] = [
        lambda: monkeypatch.setitem(embed_model._model.prompts, "query", "query: "),
        lambda: monkeypatch.setattr(embed_model._model, "max_seq_length", 16),
    ]
    seen = {identity, model_identity(unnormalised)}
    for change in changes:
        change()
        seen.add(model_identity(embed_model))
        monkeypatch.undo()
    assert len(seen) == 4
    assert model_identity(embed_model) == identity
