"""What ``agentic-kb plan-capacity`` predicts beside what real runs take here: ``python -m tests.benchmarks.capacity``.

One process with embedded stores. Service times are measured on stores of 4,000 and 20,000 chunks, one and four
together; predicted are other sizes and numbers of shards. Processor time is compared, which other work on the machine
disturbs least and which decides how many machines are needed. The service times that it prints can be passed to
``evaluation.capacity.plan``; with ``--model`` they are measured with the default embedding model, else a stand-in.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.vector_stores.types import VectorStoreQuery
from rich.table import Table

from llama_index_agentic_kb.evaluation.capacity import RECORDED, ServiceTimes
from llama_index_agentic_kb.grounding import check_grounding
from llama_index_agentic_kb.retriever import AgenticRetriever, RetrieverOptions
from llama_index_agentic_kb.sources import KnowledgeSource, ShardedSource
from llama_index_agentic_kb.store import KnowledgeStore, default_embed_model
from llama_index_agentic_kb.store.database import Chunk, StoredDocument
from llama_index_agentic_kb.testing import HashEmbedding
from tests.benchmarks.measure import show

CASES: Final = ((5_000, 1), (14_000, 1), (10_000, 2), (24_000, 3), (30_000, 6))
"""Chunks and shards."""


SOURCE: Final = "measured"
SIZES: Final = (4_000, 20_000)
SHARDS: Final = 4
QUESTIONS: Final = 100
ANSWER: Final = "The first word is word1. The second of them was word7. Both were found in 12 places."


def measure(model: BaseEmbedding) -> ServiceTimes:
    """Measure this machine with stores of synthetic chunks: processor time, so that other work disturbs little."""
    texts = [_text(number) for number in range(64)]
    embedding = mean_seconds(lambda: model.get_query_embedding(f"question {random.random()}"), 40)
    batch = mean_seconds(lambda: model.get_text_embedding_batch(texts), 2) / len(texts)
    check = mean_seconds(lambda: check_grounding(ANSWER, texts[:10]), 2)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        stores = [
            opened.enter_context(KnowledgeStore.open(f"{folder}/{number}", embed_model=model, create=True))
            for number in range(SHARDS + 1)
        ]
        stored = 0.0
        for number, store in enumerate(stores):
            size = SIZES[number == SHARDS]
            began = time.process_time()
            fill(store, size, first=number * size)
            stored = (time.process_time() - began) / size
        searches = [_searches(stores[at], 200) for at in (0, SHARDS)]
        search = [statistics.fmean(seconds) for seconds in searches]
        one, some = (question_seconds(stores[:shards]) - embedding for shards in (1, SHARDS))
        disk = stores[SHARDS].size() / SIZES[1]
    shard = max(0.0, min(one, (some - one) / (SHARDS - 1)) - search[0])
    largest = RECORDED.search[-1]
    grown = largest[1] / RECORDED.search_seconds(SIZES[1])
    return ServiceTimes(
        machine=f"{os.cpu_count()} cores, {platform.machine()}, measured now",
        question=max(0.0, one - shard - search[0]),
        shard=shard,
        embedding=embedding,
        check=check,
        search=(*zip(SIZES, search, strict=True), (largest[0], search[1] * grown)),
        spread=statistics.pstdev(searches[1]) / search[1],
        chunk=batch + stored,
        memory=RECORDED.memory,
        disk=max(disk, RECORDED.disk),  # with the graph, which small stores do not have
    )


def fill(store: KnowledgeStore, size: int, *, first: int = 0) -> None:
    """Put synthetic chunks into a store: words at random, vectors at random around 200 topics."""
    rng, dimension = np.random.default_rng(first), store.fingerprint.dimension
    topics = np.random.default_rng(0).standard_normal((200, dimension))
    with store.writing():
        store.put_source(SOURCE, "Synthetic chunks.")
        for start in range(first, first + size, 100):
            numbers = range(start, min(start + 100, first + size))
            vectors = topics[rng.integers(0, 200, len(numbers))] + rng.standard_normal((len(numbers), dimension))
            path = f"{start}.txt"
            named = {"title": path, "source": SOURCE, "document_id": f"{SOURCE}/{path}", "file_path": path}
            chunks = [
                Chunk(f"chunk-{number}", at, _text(number), {**named, "chunk_index": at}, f"{number}", None, None)
                for at, number in enumerate(numbers)
            ]
            document = StoredDocument(SOURCE, path, f"/{path}", "/", path, "measured")
            store.put_document(document, zip(chunks, vectors.astype(np.float32), strict=True))
        store.update_indexes(SOURCE)


def question_of(number: int) -> str:
    """Return a question of six words of a chunk."""
    return " ".join(_text(number).split()[:6])


def _text(number: int) -> str:
    chance = random.Random(number)
    return " ".join(f"word{int(chance.paretovariate(0.6)) % 30_000}" for _ in range(100))


def _searches(store: KnowledgeStore, number_of: int) -> list[float]:
    """Return the processor seconds of searches by vector and by words, lists of 50."""
    vectors, lexical, taken = store.vectors(SOURCE), store.lexical(SOURCE), []
    for number in range(number_of + 10):
        vector = [random.gauss(0, 1) for _ in range(store.fingerprint.dimension)]
        began = time.process_time()
        vectors.filtered_search(VectorStoreQuery(query_embedding=vector, similarity_top_k=50))
        lexical.search(question_of(number), 50, None)
        taken.append(time.process_time() - began)
    return taken[10:]  # the first ones load


def source_of(stores: Sequence[KnowledgeStore]) -> KnowledgeSource:
    """Return measured stores as one source, searched by vector and by words."""
    made = [
        KnowledgeSource(f"shard-{at}", index=store.index(SOURCE), hybrid=store.lexical(SOURCE))
        for at, store in enumerate(stores)
    ]
    return made[0] if len(made) == 1 else ShardedSource("shards", made)


def question_seconds(stores: Sequence[KnowledgeStore]) -> float:
    """Return the mean processor time of questions over stores, asked one after another in one event loop."""
    options = RetrieverOptions(embedding_cache=None)
    retriever = AgenticRetriever([source_of(stores)], effort="minimal", options=options)

    async def ask() -> float:
        began = 0.0
        for number in range(-10, QUESTIONS):  # the first ones load
            began = began if number else time.process_time()
            await retriever.aretrieve(question_of(number + 10))
        return (time.process_time() - began) / QUESTIONS

    return asyncio.run(ask())


def mean_seconds(work: Callable[[], object], times: int) -> float:
    """Return the mean processor time of a call, after first ones that may load something."""
    for _ in range(3):
        work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def main() -> None:
    """Measure, predict, run, and print both."""
    table = Table("chunks", "shards", "core ms of a question, predicted", "real", "error")
    model = default_embed_model() if "--model" in sys.argv else HashEmbedding(dimensions=384)
    times = measure(model)
    print(times)
    for size, shards in CASES:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
            stores = []
            for at in range(shards):
                store = KnowledgeStore.open(Path(folder) / str(at), embed_model=model, create=True)
                stores.append(opened.enter_context(store))
                fill(store, size // shards, first=at * size)
            said = times.embedding + times.question + shards * (times.shard + times.search_seconds(size / shards))
            real = question_seconds(stores)
        table.add_row(f"{size:,}", str(shards), f"{1e3 * said:.1f}", f"{1e3 * real:.1f}", f"{said / real - 1:+.0%}")
        print(table.row_count, "of", len(CASES))
    show(table)


if __name__ == "__main__":
    main()
