"""Measures searches of one store of synthetic chunks: by one user and by many, dense and hybrid, under filters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Final

import numpy as np

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, RetrieverOptions
from llama_index_agentic_kb.schema import ActivityRecord, Condition, SourceActivity
from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.store.chroma import ChromaDirectory
from tests.benchmarks.scale_store import SOURCE, ScaleStore, node_id

__all__ = ["Times", "measure_filtered", "measure_plain"]

TOP_K: Final = 10
FILTERS: Final = 10
BATCH: Final = 5_000
PLAIN_SECONDS: Final = 60.0
"""Chroma's own filtered query is asked as often as fits this time: it takes seconds at a million rows."""

Numbers = dict[str, float]


@dataclass
class Times:
    """Seconds of single searches, and of their ways."""

    searches: list[float] = field(default_factory=list)
    lanes: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def observe(self, record: ActivityRecord) -> None:
        """Note what a closed search tells of its ways."""
        if not isinstance(record, SourceActivity) or record.outcome is None:
            return
        for lane in record.lanes or []:
            if lane.elapsed_ms is not None:
                self.lanes.setdefault(lane.kind, []).append(lane.elapsed_ms / 1000)
            if lane.note is not None:
                self.notes.append(lane.note)

    def numbers(self) -> Numbers:
        """Give the percentiles, in ms."""
        return {"p50": _percentile(self.searches, 50), "p99": _percentile(self.searches, 99)}


def measure_plain(store: KnowledgeStore, at: ScaleStore, users: int, searches: int, *, hybrid: bool) -> Numbers:
    """Measure retrieval at minimal effort by so many users at once, each asking again as soon as it has its answer.

    Returns:
        p50 and p99 in ms, searches a second; with ``hybrid``, what each way took, p50 in ms: both run side by side.
    """
    times = Times()
    lexical = store.lexical(SOURCE) if hybrid else None
    source = KnowledgeSource(SOURCE, index=store.index(SOURCE), hybrid=hybrid and lexical)
    retriever = _retriever(source, times)
    texts = at.corpus.query_texts
    retriever.retrieve(texts[0])  # whatever is loaded once
    times.lanes.clear()
    started = time.perf_counter()
    asked = (texts[number % len(texts)] for number in range(searches))
    asyncio.run(_ask(retriever, asked, users, times))
    numbers = {**times.numbers(), "per second": searches / (time.perf_counter() - started)}
    if hybrid:
        numbers |= {f"{kind} p50": _percentile(taken, 50) for kind, taken in times.lanes.items()}
    return numbers


async def _ask(retriever: AgenticRetriever, texts: Iterator[str], users: int, times: Times) -> None:
    async def user() -> None:
        for text in texts:
            started = time.perf_counter()
            await retriever.aretrieve(text)
            times.searches.append(time.perf_counter() - started)

    await asyncio.gather(*(user() for _ in range(users)))


def measure_filtered(store: KnowledgeStore, at: ScaleStore, key: str, modulus: int, searches: int) -> dict[str, Any]:
    """Measure search under ten filters that have nothing to do with the queries, ours beside Chroma's own.

    Args:
        store: The open store.
        at: Where its vectors are.
        key: The metadata key.
        modulus: How many values it has: one in so many rows matches.
        searches: How many of ours.

    Returns:
        ``ours`` and ``chroma``, each with p50, p99 (ms) and recall@10 against exact search; ``first``: ours when a
        filter is new; and what the activity said of the last search.
    """
    values = [number * (modulus // FILTERS) for number in range(FILTERS)]
    queries = at.corpus.query_texts
    best = _exact(at, [values[number % FILTERS] for number in range(len(queries))], modulus)
    times, first = Times(), Times()
    retrievers = [_filtered(store, key, value, times) for value in values]
    for number, retriever in enumerate(retrievers):
        _timed(retriever, queries[number], first)
    recalls = []
    for number in range(searches):
        which = number % len(queries)
        found = _timed(retrievers[which % FILTERS], queries[which], times)
        recalls.append(len(best[which] & found) / max(1, len(best[which])))
    return {
        "ours": {**times.numbers(), "recall": mean(recalls)},
        "first": first.numbers(),
        "chroma": _chromas_own(at, key, modulus, values, best),
        "note": times.notes[-1] if times.notes else "",
    }


def _chromas_own(at: ScaleStore, key: str, modulus: int, values: Sequence[int], best: Sequence[set[str]]) -> Numbers:
    database = ChromaDirectory(at.folder / f"chroma-{key}")
    collection: Any = database.vector_store(SOURCE).client
    vectors, groups = at.vectors(), at.groups() % modulus
    for start in range(collection.count(), len(vectors), BATCH):
        rows = range(start, min(start + BATCH, len(vectors)))
        listed = [{key: int(groups[row])} for row in rows]
        collection.add(ids=[node_id(row) for row in rows], embeddings=np.array(vectors[list(rows)]), metadatas=listed)
    taken, recalls = [], []
    deadline = time.monotonic() + PLAIN_SECONDS
    for number, vector in enumerate(at.corpus.query_vectors.tolist()):
        started = time.perf_counter()
        found = collection.query(query_embeddings=[vector], n_results=TOP_K, where={key: values[number % FILTERS]})
        taken.append(time.perf_counter() - started)
        recalls.append(len(best[number] & set(found["ids"][0])) / max(1, len(best[number])))
        if time.monotonic() > deadline:
            break
    database.close()
    times = Times(taken)
    return {**times.numbers(), "recall": mean(recalls), "searches": len(taken)}


def _filtered(store: KnowledgeStore, key: str, value: int, times: Times) -> AgenticRetriever:
    filters = Condition(key=key, value=value)
    source = KnowledgeSource(SOURCE, index=store.index(SOURCE), filters=filters, hybrid=False)
    # Each chunk for itself, so that what is found can be compared with what Chroma gives.
    return _retriever(source, times, options=RetrieverOptions(join_neighbours=False, max_per_document=None))


def _retriever(source: KnowledgeSource, times: Times, **options: Any) -> AgenticRetriever:
    return AgenticRetriever([source], effort="minimal", similarity_top_k=TOP_K, observer=times.observe, **options)


def _timed(retriever: AgenticRetriever, query: str, times: Times) -> set[str]:
    started = time.perf_counter()
    found = asyncio.run(retriever.aretrieve(query))
    times.searches.append(time.perf_counter() - started)
    return {node.node.node_id for node in found}


def _exact(at: ScaleStore, values: Sequence[int], modulus: int, block: int = 10_000) -> list[set[str]]:
    """Give each query's nearest rows among those whose group is its value, by comparing with every row."""
    vectors, groups, queries = at.vectors(), at.groups() % modulus, at.corpus.query_vectors
    wanted = np.asarray(values)
    scores = np.full((len(queries), 0), 0.0, dtype=np.float32)
    rows = np.full((len(queries), 0), 0, dtype=np.int64)
    for start in range(0, len(vectors), block):
        part = np.asarray(vectors[start : start + block])
        part = part / np.linalg.norm(part, axis=1, keepdims=True)
        near = queries @ part.T
        near[groups[None, start : start + block] != wanted[:, None]] = -np.inf
        numbers = np.broadcast_to(np.arange(start, start + len(part)), near.shape)
        scores, rows = np.concatenate([scores, near], axis=1), np.concatenate([rows, numbers], axis=1)
        top = np.argsort(-scores, axis=1)[:, :TOP_K]
        scores, rows = np.take_along_axis(scores, top, axis=1), np.take_along_axis(rows, top, axis=1)
    return [
        {node_id(row) for row, score in zip(*pair, strict=True) if score > -np.inf}
        for pair in zip(rows.tolist(), scores.tolist(), strict=True)
    ]


def _percentile(seconds: Sequence[float], share: float) -> float:
    return float(np.percentile(np.asarray(seconds) * 1000, share)) if seconds else float("nan")
