"""Load: one knowledge base over a real Chroma server, asked by many at once, and with its server stopped.

Ours is ``KnowledgeBase.retrieve`` (``minimal`` effort, extracted data), hybrid off, so that both ask the server for the
same: one vector query a question. The peer is LlamaIndex's bare retriever over the same collection and client, with the
same vector. 20,000 chunks of 384 dimensions in one ``chroma run`` on loopback.

With the server stopped (SIGSTOP) and a deadline of 0.5 s, a second source answers from memory; there is no peer: the
bare client hangs for ever.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import chromadb
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import NodeWithScore
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, Resilience, RetrieverOptions
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.benchmarks.report import Row
from tests.chroma_server import ChromaServer

__all__ = ["load"]

DIMENSIONS: Final = 384
DEADLINE: Final = 0.5
PEER: Final = "bare LlamaIndex retriever over the same client"

Ask = Callable[[str], Sequence[NodeWithScore] | Any]


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Args:
        chunks: In the collection.
        questions: Of each case; each at a caller of its own, or one after another.
        threads: Sync callers at once.
        stopped: Questions while the server is stopped.
    """

    chunks: int = 20_000
    questions: int = 1_000
    threads: int = 64
    stopped: int = 100


@dataclass(frozen=True)
class Times:
    """What a case took, in seconds."""

    each: list[float]
    whole: float

    def percentile(self, percent: float) -> float:
        """Give the time, in ms, within which so many per cent of the questions were answered."""
        ordered = sorted(self.each)
        return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def load(size: Size) -> list[Row]:
    """Measure callers on threads and on one event loop, ours beside the bare client; then with the server stopped."""
    logging.getLogger("llama_index_agentic_kb").setLevel(logging.ERROR)  # hundreds of timeouts are told by numbers
    with ChromaServer() as server, _index(server, size.chunks) as index:
        retriever = index.as_retriever(similarity_top_k=10)
        kb = KnowledgeBase(
            [
                KnowledgeSource(
                    "chroma", index=index, hybrid=False, similarity_top_k=10, resilience=Resilience(timeout=120.0)
                )
            ],
            effort="minimal",
            max_runtime_in_seconds=300.0,
            options=RetrieverOptions(embedding_cache=None),
        )
        questions = [f"question {number}" for number in range(size.questions)]
        expected = _found(kb, questions)
        rows = []
        for callers in (1, 8, size.threads):
            name = f"load/{callers} threads"
            some = questions[: max(callers, size.questions // (4 if callers == 1 else 1))]
            ours = _threads(lambda q: _same(kb.retrieve(q), expected[q]), some, callers)
            rows += _rows(name, ours, _threads(retriever.retrieve, some, callers), len(some))
        rows += _async_rows(kb, retriever, questions, expected)
        return rows + _stopped_rows(server, index, size)


# -- many at once -----------------------------------------------------------------------------------------------------


def _found(kb: KnowledgeBase, questions: Sequence[str]) -> dict[str, list[str]]:
    """Ask one at a time: what each answer must be under load."""
    return {question: [one.node_id for one in kb.retrieve(question).references] for question in questions}


def _same(response: Any, expected: list[str]) -> None:
    assert response.status_code == 200, response.missing
    assert [one.node_id for one in response.references] == expected


def _threads(ask: Ask, questions: Sequence[str], callers: int) -> Times:
    def timed(question: str) -> float:
        began = time.perf_counter()
        ask(question)
        return time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(callers) as pool:
        each = list(pool.map(timed, questions))
    return Times(each, time.perf_counter() - began)


def _async_rows(
    kb: KnowledgeBase, retriever: Any, questions: Sequence[str], expected: dict[str, list[str]]
) -> list[Row]:
    """All questions at once on one loop. The bare ``aretrieve`` would block it; threads of its own are given to it."""
    before = threading.active_count(), _memory()
    most = 0

    async def ours(question: str) -> float:
        nonlocal most
        began = time.perf_counter()
        response = await kb.aretrieve(question)
        most = max(most, threading.active_count())
        _same(response, expected[question])
        return time.perf_counter() - began

    async def all_of_them() -> Times:
        began = time.perf_counter()
        each = await asyncio.gather(*map(ours, questions))
        return Times(list(each), time.perf_counter() - began)

    times = asyncio.run(all_of_them())
    threads, memory = most - before[0], _memory() - before[1]
    name = f"load/{len(questions)} async questions at once"
    rows = _rows(name, times, _threads(retriever.retrieve, questions, len(questions)), len(questions))
    told = "(no peer)"
    rows.append(Row(f"{name}/further threads", threads, None, told, "threads", 1))
    rows.append(Row(f"{name}/further memory, at its peak", memory, None, told, "MB", 1))
    return rows


def _rows(name: str, ours: Times, peer: Times, asked: int) -> list[Row]:
    rows = [
        Row(f"{name}/p{percent}", ours.percentile(percent), peer.percentile(percent), PEER, "ms", asked)
        for percent in (50, 99)
    ]
    each = 1000 * ours.whole / asked, 1000 * peer.whole / asked
    return [*rows, Row(f"{name}/wall", *each, PEER, "ms per question", asked)]


def _memory() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- a stopped server --------------------------------------------------------------------------------------------------


def _stopped_rows(server: ChromaServer, index: VectorStoreIndex, size: Size) -> list[Row]:
    rows = []
    for breaker in ("with its breaker", "without a breaker"):
        fields: dict[str, Any] = {} if breaker == "with its breaker" else {"resilience": Resilience(breaker=None)}
        kb = KnowledgeBase(
            [
                KnowledgeSource("stopped", index=index, hybrid=False, **fields),
                KnowledgeSource("well", retriever=MemoryRetriever(["Any question has an answer."])),
            ],
            effort="minimal",
            max_runtime_in_seconds=DEADLINE,
        )
        assert kb.retrieve("question", max_runtime_in_seconds=30).status_code == 200
        server.stop()
        try:
            for callers in (1, 8):
                times = _threads(partial(_ask_partial, kb), ["question"] * size.stopped, callers)
                name = f"load/server stopped, deadline {1000 * DEADLINE:.0f} ms, {callers} callers, {breaker}"
                rows += [
                    Row(
                        f"{name}/p{percent}",
                        times.percentile(percent),
                        1000 * DEADLINE,
                        "the deadline",
                        "ms",
                        size.stopped,
                    )
                    for percent in (50, 99)
                ]
        finally:
            server.go_on()
        began = time.perf_counter()
        while kb.retrieve("question").status_code != 200:
            assert time.perf_counter() - began < 60
            time.sleep(0.05)
        back = time.perf_counter() - began
        rows.append(Row(f"load/server goes on, {breaker}/full answers after", back, None, "(no peer)", "s", 1))
    return rows


def _ask_partial(kb: KnowledgeBase, question: str) -> None:
    response = kb.retrieve(question)
    assert response.status_code == 206
    assert [one.knowledge_source_name for one in response.references] == ["well"]


# -- the collection ----------------------------------------------------------------------------------------------------


@contextmanager
def _index(server: ChromaServer, chunks: int) -> Iterator[VectorStoreIndex]:
    import numpy as np  # noqa: PLC0415 (with the collection alone)

    client = chromadb.HttpClient("127.0.0.1", server.port)
    collection = client.create_collection("load", embedding_function=None)
    vectors = np.random.default_rng(0).standard_normal((chunks, DIMENSIONS)).astype("float32")
    for start in range(0, chunks, 500):
        numbers = range(start, min(start + 500, chunks))
        collection.add(
            ids=[f"chunk-{number}" for number in numbers],
            embeddings=vectors[start : start + len(numbers)],
            documents=[f"What chunk {number} says." for number in numbers],
            metadatas=[{"number": number} for number in numbers],
        )
    store = ChromaVectorStore(chroma_collection=collection)
    try:
        yield VectorStoreIndex.from_vector_store(store, embed_model=HashEmbedding(dimensions=DIMENSIONS))
    finally:
        client._server._session.close()  # type: ignore[attr-defined]  # it has no public end
