from __future__ import annotations

import asyncio
import gc
import json
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import AgenticRetriever, KnowledgeBase, KnowledgeSource, Resilience, RetrievalRequest
from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import Condition, Outcome, SourceActivity
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM, ScriptedReply

TEXTS = ["rain in Paris", "rain in Oslo"]
ACME = Condition(key="tenant", value="acme")
WAYS = ["sync", "async"]


class DownEmbedding(HashEmbedding):
    def _get_query_embedding(self, query: str) -> list[float]:
        raise ConnectionError("embedding server down")

    async def _aget_query_embedding(self, query: str) -> list[float]:
        raise ConnectionError("embedding server down")


def source(name: str, **fields: Any) -> KnowledgeSource:
    known = {key: fields.pop(key) for key in ("fault", "latency", "mode") if key in fields}
    return KnowledgeSource(name, retriever=MemoryRetriever(TEXTS, **known), **fields)


async def retrieved(way: str, sources: Sequence[KnowledgeSource], params: Any = (), **fields: Any) -> Retrieval:
    retriever = AgenticRetriever(sources, **fields)
    request = RetrievalRequest.parse({"messages": [{"content": "rain"}], "knowledgeSourceParams": list(params)})
    return run(retriever.retrieval(request)) if way == "sync" else await arun(retriever.retrieval(request))


def outcomes(made: Retrieval) -> dict[str, str | None]:
    return {r.knowledge_source_name: r.outcome for r in made.log.records if isinstance(r, SourceActivity)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [DownEmbedding(), HashEmbedding(latency=8.0)], ids=["down", "slow"])
async def test_without_its_embedding_model_a_source_is_searched_by_words(way: str, model: HashEmbedding) -> None:
    """The lexical search does not wait for the query's vector, and stands when there is none; ``missing`` says why."""
    index = VectorStoreIndex([TextNode(text="rain in Oslo")], embed_model=HashEmbedding())
    index._embed_model = model
    started = time.monotonic()
    made = await retrieved(way, [KnowledgeSource("words", index=index, resilience=Resilience(timeout=2.0))])
    assert time.monotonic() - started < 7.9
    assert [node.text for node in made.nodes] == ["rain in Oslo"]
    (record,) = [record for record in made.log.records if isinstance(record, SourceActivity)]
    assert record.lanes is not None
    dense, lexical = record.lanes
    assert (dense.kind, dense.count, lexical.kind, lexical.count, lexical.error) == ("dense", 0, "lexical", 1, None)
    assert dense.error is not None
    (part,) = made.missing
    assert (part.what, part.outcome.failed, part.sub_query_id) == ("words", True, "q0")
    assert part.reason.startswith("its dense search failed: ")


async def test_a_source_that_can_not_keep_its_filter_is_denied() -> None:
    """Beside others it is left out and told; alone it is a ``DeniedError``."""
    plain = MemoryRetriever(TEXTS)
    denied = KnowledgeSource("plain", retriever=plain, filters=ACME)
    made = await retrieved("sync", [denied, source("well")])
    assert outcomes(made) == {"plain": Outcome.DENIED, "well": Outcome.OK}
    assert made.missing[0].outcome is Outcome.DENIED
    with pytest.raises(DeniedError, match=r"every selected source failed: plain: .* its filter can't be applied"):
        await retrieved("async", [denied])
    with pytest.raises(DeniedError):
        await retrieved("sync", [source("a"), source("b")], filters=ACME)
    assert plain.queries == []


async def awaited(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 (of any kind, also of threads)
        await asyncio.sleep(0.01)
    return condition()


class LeavingError(Exception):
    """What ends a sync caller from outside, as Ctrl-C does."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
def test_an_interrupted_sync_call_leaves_nothing_behind() -> None:
    """As after Ctrl-C: its searches are counted as abandoned until they return, and nothing waits in a queue."""

    def leave(*_: object) -> None:
        raise LeavingError

    before = signal.signal(signal.SIGALRM, leave)
    with MemoryRetriever(TEXTS, fault="hang") as hung:
        hanging = KnowledgeSource("hung", retriever=hung, resilience=Resilience(max_concurrency=1))
        plan = json.dumps({"sub_queries": [{"query": "rain today", "sources": ["hung"]}]})
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(LeavingError):
                AgenticRetriever([hanging], llm=ScriptedLLM(plan)).retrieve("rain")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        health = hanging.health
        assert (health.at_work, health.waiting, health.abandoned) == (0, 0, 1)
    assert asyncio.run(awaited(lambda: hanging.health.abandoned == 0))


def test_a_failed_search_is_freed_at_once() -> None:
    """It does not wait for the garbage collector, whose passes would hold up all requests."""

    def down(filters: object) -> MemoryRetriever:
        raise ConnectionError(f"down under {filters}")

    kb = KnowledgeBase([source("well"), KnowledgeSource("ill", retriever_factory=down)], effort="minimal")
    gc.collect()
    gc.disable()
    try:
        assert kb.retrieve("rain").missing
        searches = [one for one in gc.get_objects() if type(one) is SourceSearch]
        assert "ill" not in [search.source.name for search in searches]
    finally:
        gc.enable()


async def test_a_reader_that_leaves_a_stream_ends_it() -> None:
    """After one token of an answer the reader goes: no task of ours is left."""
    llm = ScriptedLLM(ScriptedReply("Rain falls in Paris, and in Oslo.", chunk_delay=0.05, chunk_size=4))
    engine = KnowledgeBase([source("well")], llm=llm, effort="minimal").as_query_engine(streaming=True)
    response = await engine.aquery("rain")
    assert isinstance(response, AsyncStreamingResponse)
    tokens = response.async_response_gen()
    assert await anext(tokens)
    await tokens.aclose()
    assert await awaited(lambda: asyncio.all_tasks() == {asyncio.current_task()})
