from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.embedding import EmbeddingEndEvent
from llama_index_instrumentation import get_dispatcher
from pydantic import PrivateAttr

from llama_index_agentic_kb._aio import arun, deadline_after, gather, run
from llama_index_agentic_kb.account.budget import Budget, RetryBudget, set_budget
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.llm.calls import calls_of
from llama_index_agentic_kb.search.embedding import (
    ENTRY_BYTES,
    SHARED_CACHE,
    EmbeddingCache,
    QueryEmbeddings,
    embed_queries,
)
from llama_index_agentic_kb.testing import HashEmbedding, LoopbackOpenAI
from tests.faulty_server import Fault
from tests.openai_embedding import OpenAIEmbedding

QUERIES = ["How tall is Saturn V?", "rockets", "Ariane 5, its height and its weight, in short words: how big?", "é"]


class Broken(HashEmbedding):
    def _get_query_embedding(self, query: str) -> list[float]:
        raise ConnectionError(f"no vector for {query!r}")

    async def _aget_query_embedding(self, query: str) -> list[float]:
        raise ConnectionError(f"no vector for {query!r}")


async def wanted(
    embeddings: QueryEmbeddings, pairs: Sequence[tuple[BaseEmbedding, str]], *, begin: bool = True
) -> list[list[float]]:
    if begin:
        embeddings.begin(pairs)
    jobs = await gather([embeddings.get(model, query) for model, query in pairs])
    return [job.result() for job in jobs]


def embeddings(*handlers: Any, cache: EmbeddingCache | None = None) -> QueryEmbeddings:
    return QueryEmbeddings(CallbackManager(list(handlers)), deadline=time.monotonic() + 30, cache=cache)


async def both_ways(pairs: Sequence[tuple[BaseEmbedding, str]], *, begin: bool = True) -> list[list[list[float]]]:
    return [
        await asyncio.to_thread(run, wanted(embeddings(), pairs, begin=begin)),
        await arun(wanted(embeddings(), pairs, begin=begin)),
    ]


@pytest.mark.parametrize("begin", [True, False], ids=["begun together", "asked for one by one"])
async def test_each_distinct_query_is_embedded_once(begin: bool) -> None:
    """Lanes that ask for the same query at once share one vector, whoever asks first."""
    model = HashEmbedding(latency=0.01)
    pairs = [(model, query) for query in ["a", "b", "a", "a", "b"]]
    for vectors in await both_ways(pairs, begin=begin):
        assert vectors == [model._vectors([query])[0] for _, query in pairs]
    assert sorted(texts[0] for _, texts in model.calls) == ["a", "a", "b", "b"]  # once sync, once async


async def test_what_the_cache_has_costs_no_call_and_no_event() -> None:
    """A later request finds the vectors of an earlier one, equal to the last bit; only new texts reach the model."""
    model, cache = HashEmbedding(), EmbeddingCache()
    first, later = LlamaDebugHandler(print_trace_on_end=False), LlamaDebugHandler(print_trace_on_end=False)
    one, other = embeddings(first, cache=cache), embeddings(later, cache=cache)
    expected = run(wanted(one, [(model, "a"), (model, "b")]))
    expected[0].append(9.0)  # a caller's own business
    found = await arun(wanted(other, [(model, "a"), (model, "a"), (model, "c")]))
    assert found == [model._vectors([text])[0] for text in ("a", "a", "c")]
    assert found[0] is not found[1]
    assert sorted(texts[0] for _, texts in model.calls) == ["a", "b", "c"]
    assert [len(h.get_event_pairs(CBEventType.EMBEDDING)) for h in (first, later)] == [2, 1]
    assert (cache.statistics.hits, cache.statistics.misses) == (1, 3)


def test_the_process_shares_a_cache_unless_told_otherwise() -> None:
    """Requests share ``SHARED_CACHE``; without a cache, or with one of 0 bytes, each embeds for itself."""
    model = HashEmbedding()
    for _ in range(2):
        run(wanted(QueryEmbeddings(CallbackManager(), deadline=None), [(model, "a")]))
    assert (len(model.calls), SHARED_CACHE.statistics.hits) == (1, 1)
    for cache in (None, EmbeddingCache(max_bytes=0)):
        run(wanted(embeddings(cache=cache), [(model, "a")]))
    assert len(model.calls) == 3


async def test_one_text_that_fails_costs_no_other_its_vector(embed_model: BaseEmbedding) -> None:
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
    expected = embed_model.get_query_embedding("rockets")
    for outcomes in (
        await asyncio.to_thread(run, embed_queries(model, ["rockets", poison], deadline=None)),
        await arun(embed_queries(model, ["rockets", poison], deadline=None)),
    ):
        assert outcomes[0] == pytest.approx(expected, abs=1e-5)
        assert isinstance(outcomes[1], ValueError)


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
        run(wanted(embeddings(debug), [(embed_model, query) for query in QUERIES]))
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
    run(wanted(embeddings(shared, ours), [(model, "a")]))
    assert [len(h.get_event_pairs(CBEventType.EMBEDDING)) for h in (own, shared, ours)] == [1, 1, 1]
    assert model.callback_manager.handlers == [own, shared]


async def test_a_failure_is_that_models_alone() -> None:
    """Who asked for a broken model's vector gets its error; other models' vectors are there."""
    broken, sound = Broken(), HashEmbedding()

    async def both() -> list[Any]:
        shared = embeddings()
        pairs: list[tuple[BaseEmbedding, str]] = [(broken, "a"), (sound, "a"), (broken, "a")]
        shared.begin(pairs)
        jobs = await gather([shared.get(model, query) for model, query in pairs])
        return [job.error or job.result() for job in jobs]

    for one, two, three in (await asyncio.to_thread(run, both()), await arun(both())):
        assert isinstance(one, ConnectionError)
        assert two == sound._vectors(["a"])[0]
        assert three is one


async def test_callers_wait_no_longer_than_they_may() -> None:
    """A caller's own deadline ends its wait; another one's wait goes on."""
    model = HashEmbedding(latency=0.5)

    async def both() -> list[Any]:
        shared = embeddings()
        hurried = shared.get(model, "a", deadline=time.monotonic() + 0.05)
        jobs = await gather([hurried, shared.get(model, "a", deadline=time.monotonic() + 20)])
        return [job.error or job.result() for job in jobs]

    for hurried, patient in (await asyncio.to_thread(run, both()), await arun(both())):
        assert isinstance(hurried, DeadlineExceededError)
        assert patient == model._vectors(["a"])[0]


async def test_local_models_compute_on_threads() -> None:
    """A model whose async only wraps its computation never blocks the loop."""

    class Slow(MockEmbedding):
        def _get_query_embedding(self, query: str) -> list[float]:
            time.sleep(1.0)
            return super()._get_query_embedding(query)

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticker = asyncio.create_task(tick())
    await arun(embed_queries(Slow(embed_dim=3), ["a", "b"], deadline=None))
    ticker.cancel()
    assert ticks >= 10


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
    assert cache.statistics.bytes == 2 * BYTES_OF_TWO


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


ASKED = ["Who was first?", "And who was next?"]

Perform = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["sync", "async"])
def perform(request: pytest.FixtureRequest) -> Perform:
    return run if request.param == "sync" else lambda flow: asyncio.run(arun(flow))


async def embed(model: OpenAIEmbedding, seconds: float = 30, budget: RetryBudget | None = None) -> list[Any]:
    if budget is not None:
        set_budget(Budget(retries=budget))
    return await embed_queries(model, ASKED, deadline=deadline_after(seconds))


def test_vectors_come_in_one_request(perform: Perform) -> None:
    """As the model's own methods give them, and the model is left as it was."""
    with LoopbackOpenAI() as server:
        model = OpenAIEmbedding.of(server)
        assert perform(embed(model)) == model.get_text_embedding_batch(ASKED)
        assert len(server.requests) == 2
        assert model.max_retries == 10


def test_a_failing_server_is_asked_as_often_as_the_budget_lets(perform: Perform) -> None:
    """Not ten times ten times, as the model and its client would."""
    with LoopbackOpenAI(embedding_fault=Fault.status(429, retry_after=0)) as server:
        outcomes = perform(embed(OpenAIEmbedding.of(server), budget=RetryBudget(share=0, minimum=1)))
        assert all(isinstance(outcome, Exception) for outcome in outcomes)
        assert len(server.requests) == 2


def test_a_hanging_server_keeps_nothing(perform: Perform) -> None:
    """The caller hears of it at the deadline, and the call's place is free soon after."""
    with LoopbackOpenAI(embedding_fault=Fault.hang()) as server:
        model = OpenAIEmbedding.of(server)
        (first, _) = perform(embed(model, seconds=0.2))
        assert isinstance(first, DeadlineExceededError)
        bulkhead = calls_of(model, "", lambda error: error).bulkhead
        ends = time.monotonic() + 5
        while time.monotonic() < ends and (bulkhead.state.abandoned or bulkhead.state.at_work):
            time.sleep(0.01)
        assert (bulkhead.state.abandoned, bulkhead.state.at_work) == (0, 0)


def test_vectors_are_found_by_model_and_text() -> None:
    """Only the same model and the same text find a vector, and the counts tell."""
    cache = EmbeddingCache()
    cache.put("m", "a", [0.1, 0.2])
    assert cache.get("m", "a") == [0.1, 0.2]
    assert [cache.get("m", "A"), cache.get("n", "a"), cache.get("m", "")] == [None, None, None]
    counted = cache.statistics
    assert (counted.hits, counted.misses, counted.entries, counted.bytes) == (1, 3, 1, BYTES_OF_TWO)
