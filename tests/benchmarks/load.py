"""Load: one knowledge base over a real Chroma server, asked by many at once.

Ours is ``KnowledgeBase.retrieve`` (``minimal`` effort, extracted data), hybrid off, so that both ask the server for the
same: one vector query a question. The peer is LlamaIndex's bare retriever over the same collection and client, with the
same vector. 20,000 chunks of 384 dimensions in one ``chroma run`` on loopback.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import chromadb
import numpy as np
from llama_index.core import VectorStoreIndex
from llama_index.core.retrievers import BaseRetriever
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, Resilience, RetrieverOptions
from llama_index_agentic_kb.schema import RetrievalResponse
from llama_index_agentic_kb.testing import HashEmbedding
from tests.benchmarks.measure import Row
from tests.chroma_server import ChromaServer

DIMENSIONS: Final = 384
PEER: Final = "bare LlamaIndex retriever over the same client"
NO_PEER: Final = "(no peer)"


@dataclass(frozen=True)
class Times:
    """What a case took, in seconds."""

    each: Sequence[float]
    whole: float

    def percentile(self, percent: float) -> float:
        """Return the time, in ms, within which so many per cent of the questions were answered."""
        return float(1000 * np.percentile(self.each, percent, method="higher"))


def load(chunks: int = 20_000, questions: int = 1_000, threads: int = 64) -> list[Row]:
    """Measure callers on threads and on one event loop, ours beside the bare client."""
    logging.getLogger("llama_index_agentic_kb").setLevel(logging.ERROR)  # hundreds of timeouts are counted in rows
    with ChromaServer() as server, _index(server, chunks) as index:
        resilience = Resilience(timeout=120.0)
        source = KnowledgeSource("chroma", index=index, hybrid=False, similarity_top_k=10, resilience=resilience)
        options = RetrieverOptions(embedding_cache=None)
        kb = KnowledgeBase([source], effort="minimal", max_runtime_in_seconds=300.0, options=options)
        retriever = index.as_retriever(similarity_top_k=10)
        asked = [f"question {number}" for number in range(questions)]
        # Asked one at a time: what each answer must be under load.
        expected = {question: [one.node_id for one in kb.retrieve(question).references] for question in asked}
        rows = []
        for callers in (1, 8, threads):
            some = asked[: max(callers, questions // (4 if callers == 1 else 1))]
            ours = _threads(lambda question: _check(kb.retrieve(question), expected[question]), some, callers)
            rows += _rows(f"load/{callers} threads", ours, _threads(retriever.retrieve, some, callers))
        return rows + _async_rows(kb, retriever, expected)


def _check(response: RetrievalResponse, expected: list[str]) -> None:
    assert response.status_code == 200, response.missing
    assert [one.node_id for one in response.references] == expected


def _threads(ask: Callable[[str], object], questions: Sequence[str], callers: int) -> Times:
    def timed(question: str) -> float:
        began = time.perf_counter()
        ask(question)
        return time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(callers) as pool:
        each = list(pool.map(timed, questions))
    return Times(each, time.perf_counter() - began)


def _async_rows(kb: KnowledgeBase, retriever: BaseRetriever, expected: Mapping[str, list[str]]) -> list[Row]:
    """Ask all questions at once on one loop. The bare ``aretrieve`` would block it: the peer has threads of its own."""
    threads_before, memory_before, most = threading.active_count(), _memory(), 0

    async def ours(question: str) -> float:
        nonlocal most
        began = time.perf_counter()
        response = await kb.aretrieve(question)
        most = max(most, threading.active_count())
        _check(response, expected[question])
        return time.perf_counter() - began

    async def all_of_them() -> Times:
        began = time.perf_counter()
        each = await asyncio.gather(*map(ours, expected))
        return Times(each, time.perf_counter() - began)

    times = asyncio.run(all_of_them())
    threads, memory = most - threads_before, _memory() - memory_before
    name = f"load/{len(expected)} async questions at once"
    return [
        *_rows(name, times, _threads(retriever.retrieve, list(expected), len(expected))),
        Row(f"{name}/further threads", threads, None, NO_PEER, "threads", 1),
        Row(f"{name}/further memory, at its peak", memory, None, NO_PEER, "MB", 1),
    ]


def _rows(name: str, ours: Times, peer: Times) -> list[Row]:
    asked = len(ours.each)
    rows = [Row(f"{name}/p{p}", ours.percentile(p), peer.percentile(p), PEER, "ms", asked) for p in (50, 99)]
    each = 1000 * ours.whole / asked, 1000 * peer.whole / asked
    return [*rows, Row(f"{name}/wall", *each, PEER, "ms per question", asked)]


def _memory() -> float:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def _index(server: ChromaServer, chunks: int) -> Iterator[VectorStoreIndex]:
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
