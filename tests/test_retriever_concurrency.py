from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import chromadb
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, Resilience
from llama_index_agentic_kb._aio import gather, run
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM

TEXTS = ["rain in Paris", "snow in Oslo", "rain and snow in Bergen", "fog in London"]
NAMES = ["a", "b", "c", "d"]
PLAN = json.dumps(
    {
        "sub_queries": [
            {"id": f"q{n}", "query": f"{word} today", "sources": NAMES}
            for n, word in enumerate(("rain", "snow", "fog"))
        ]
    }
)


class Meeting:
    """Where so many searches meet: each waits there for all the others."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self._come: list[None] = []
        self._all_there = threading.Event()

    def join(self) -> None:
        self._come.append(None)
        if len(self._come) >= self.expected:
            self._all_there.set()

    def wait(self) -> None:
        self.join()
        assert self._all_there.wait(60), "the searches came one after the other"

    async def await_all(self) -> None:
        self.join()
        async with asyncio.timeout(60):
            while not self._all_there.is_set():  # noqa: ASYNC110 (searches on threads come too)
                await asyncio.sleep(0.005)


class Meets(MemoryRetriever):
    meeting: Meeting

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.meeting.wait()
        return super()._retrieve(query_bundle)


class AsyncMeets(Meets):
    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        await self.meeting.await_all()
        self.queries.append(query_bundle.query_str)
        return self._answer(query_bundle, None)


class AsyncOnlyMeets(AsyncMeets):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Meets, AsyncMeets, AsyncOnlyMeets])
@pytest.mark.parametrize("way", ["sync", "async", "sync in a loop"])
async def test_all_searches_run_side_by_side(kind: type[Meets], way: str) -> None:
    """Four sub-queries at four sources are sixteen searches that are all under way at one moment."""
    retrievers, meeting = [kind(TEXTS) for _ in NAMES], Meeting(16)
    for retriever in retrievers:
        retriever.meeting = meeting
    sources = [KnowledgeSource(name, retriever=retriever) for name, retriever in zip(NAMES, retrievers, strict=True)]
    agentic = AgenticRetriever(sources, llm=ScriptedLLM(PLAN))
    if way == "async":
        found = await agentic.aretrieve("weather")
    elif way == "sync":
        found = await asyncio.to_thread(agentic.retrieve, "weather")
    else:
        found = agentic.retrieve("weather")
    assert found
    assert [len(retriever.queries) for retriever in retrievers] == [4] * 4


async def busiest_turn(work: Callable[[], Any]) -> float:
    """Give the most CPU time that the loop's thread spent between two ticks of 1 ms, in seconds.

    Not the time by the clock: other threads and other programs stop this one, and a test can't tell them from us.
    """
    longest, done = 0.0, False

    async def watch() -> None:
        nonlocal longest
        last = time.thread_time()
        while not done:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, last = max(longest, now - last), now

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    await work()
    done = True
    await watcher
    return longest


class Whereabouts(ChromaVectorStore):
    """A real Chroma that notes the threads on which it is queried."""

    threads: ClassVar[list[int]] = []

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        self.threads.append(threading.get_ident())
        return super().query(query, **kwargs)


async def test_the_loop_is_never_blocked_after_warm_up(embed_model: BaseEmbedding) -> None:
    """Real Chroma and MiniLM, four sources and four sub-queries: no call on the loop, and no turn of 20 ms of work."""
    client = chromadb.EphemeralClient()
    sources = []
    for name in NAMES:
        make: Any = Whereabouts  # its constructor is read from the collection, which mypy can't see
        store = make(chroma_collection=client.create_collection(f"gap-{name}"))
        context = StorageContext.from_defaults(vector_store=store)
        nodes = [TextNode(text=f"{text}, report {n}") for n in range(50) for text in TEXTS]
        index = VectorStoreIndex(nodes, storage_context=context, embed_model=embed_model)
        sources.append(KnowledgeSource(name, index=index))
    retriever = AgenticRetriever(sources, llm=ScriptedLLM(PLAN))
    await asyncio.to_thread(run, gather([source.warm_up() for source in sources]))
    Whereabouts.threads.clear()
    try:
        turns = [await busiest_turn(lambda: retriever.aretrieve("weather")) for _ in range(5)]
    finally:
        for name in NAMES:
            client.delete_collection(f"gap-{name}")
    assert len(Whereabouts.threads) == 5 * 4 * 4
    assert threading.get_ident() not in Whereabouts.threads
    assert min(turns) < 0.02


def crowd() -> tuple[AgenticRetriever, list[KnowledgeSource]]:
    """Sources of each mode, four places each, and a model that plans."""
    modes: list[Any] = ["sync", "async", "async_only", "sync"]
    sources = [
        KnowledgeSource(
            name, retriever=MemoryRetriever(TEXTS, mode=mode, latency=0.002), resilience=Resilience(max_concurrency=4)
        )
        for name, mode in zip(NAMES, modes, strict=True)
    ]
    return AgenticRetriever(sources, effort="minimal"), sources


def found_by(nodes: list[NodeWithScore]) -> list[tuple[str, float | None]]:
    return [(node.node_id, node.score) for node in nodes]


async def test_many_requests_at_once_answer_as_one_alone() -> None:
    """200 on one loop beside 32 threads: the same nodes as one at a time, and no more threads than there are places."""
    retriever, sources = crowd()
    questions = [f"{word} number {n}" for n in range(100) for word in ("rain", "snow")]
    alone = {question: found_by(await retriever.aretrieve(question)) for question in questions[:20]}
    before, most = threading.active_count(), 0

    def ask(number: int) -> dict[str, Any]:
        return {one: found_by(retriever.retrieve(one)) for one in questions[number % 20 : number % 20 + 2]}

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, threading.active_count())
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    with ThreadPoolExecutor(32) as pool:
        loop = asyncio.get_running_loop()
        threads = [loop.run_in_executor(pool, ask, number) for number in range(32)]
        together = await asyncio.gather(*(retriever.aretrieve(question) for question in questions))
        asked = await asyncio.gather(*threads)
    watching.cancel()
    found = dict(zip(questions, map(found_by, together), strict=True))
    for answers in (found, *asked):
        both = alone.keys() & answers.keys()
        assert {question: answers[question] for question in both} == {question: alone[question] for question in both}
    assert all(nodes for nodes in found.values())
    assert most <= before + 32 + 4 * 4 + 4  # the callers, each source's places, and a few of the loop's own
    for one in sources:
        assert (one.health.at_work, one.health.waiting, one.health.abandoned) == (0, 0, 0)
