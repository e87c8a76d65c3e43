"""Builds a store of synthetic chunks as ingestion does, once a size, and measures searches of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, RetrieverOptions
from llama_index_agentic_kb.schema import ActivityRecord, Condition, SourceActivity
from llama_index_agentic_kb.store.chroma import ChromaDirectory
from llama_index_agentic_kb.store.database import Chunk, MetadataValue, StoredDocument
from llama_index_agentic_kb.store.directory import DirectoryStore
from tests.benchmarks.scale_corpus import DIMENSION, Block, Floats, Ints, ScaleCorpus, ScaleEmbedding

SOURCE: Final = "scale"
PER_DOCUMENT: Final = 100
VECTORS, GROUPS = "vectors.npy", "groups.npy"
TOP_K: Final = 10
FILTERS: Final = 10
BATCH: Final = 5_000
PLAIN_SECONDS: Final = 60.0  # for Chroma's own filtered query, which takes seconds at a million rows

Numbers = dict[str, float]


class ScaleStore:
    """A store of one size in a cache directory, with its vectors beside it for exact search."""

    def __init__(self, cache: Path, size: int, *, clustered: bool = True) -> None:
        self.folder = cache / (str(size) if clustered else f"{size}-unclustered")
        self.corpus = ScaleCorpus(size, clustered=clustered)
        self.embedding = ScaleEmbedding(self.corpus)

    def build(self, progress: Callable[[str], None] = print) -> float:
        """Build it unless it is there (what was left half built is thrown away); return the seconds that it took."""
        return self._once("built.json", lambda: self._build(progress))

    def build_lexical(self) -> float:
        """Build the lexical index unless it is there; returns seconds as ``build`` does."""
        return self._once("lexical-built.json", self._build_lexical)

    def _once(self, mark: str, work: Callable[[], float]) -> float:
        built = self.folder / mark
        if not built.is_file():
            built.write_text(json.dumps({"seconds": work()}), encoding="utf-8")
        return float(json.loads(built.read_text(encoding="utf-8"))["seconds"])

    def _build(self, progress: Callable[[str], None]) -> float:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        shape = (self.corpus.size, DIMENSION)
        vectors = np.lib.format.open_memmap(self.folder / VECTORS, mode="w+", dtype=np.float32, shape=shape)
        groups = np.zeros(self.corpus.size, dtype=np.int64)
        seconds = 0.0
        with self.open(create=True) as store, store.writing():
            store.documents.put_source(SOURCE, "Synthetic chunks.")
            for block in self.corpus.blocks():
                end = block.start + len(block.texts)
                vectors[block.start : end], groups[block.start : end] = block.vectors, block.groups
                self.embedding.show(block)
                started = time.perf_counter()
                store_block(store, block)
                seconds += time.perf_counter() - started
                progress(f"{end:,} of {self.corpus.size:,} chunks after {seconds:,.0f} s")
            started = time.perf_counter()
            store.update_graph(SOURCE)
            seconds += time.perf_counter() - started
        np.save(self.folder / GROUPS, groups)
        return seconds

    def _build_lexical(self) -> float:
        with self.open() as store, store.writing():
            started = time.perf_counter()
            store.lexical(SOURCE).update()
            return time.perf_counter() - started

    def open(self, *, create: bool = False) -> DirectoryStore:
        """Open the store; the caller closes it."""
        return DirectoryStore.open(self.folder / "store", embed_model=self.embedding, create=create)

    def vectors(self) -> Floats:
        """Return all vectors, on disk, shape (size, 384)."""
        loaded: Floats = np.load(self.folder / VECTORS, mmap_mode="r")
        return loaded

    def groups(self) -> Ints:
        """Return each chunk's ``hundredth``, shape (size,)."""
        loaded: Ints = np.load(self.folder / GROUPS)
        return loaded


def store_block(store: DirectoryStore, block: Block, shard: int = 0, shards: int = 1) -> None:
    """Store each document of a shard in a transaction, as ingestion does."""
    chunks = [_chunk(block, at) for at in range(len(block.texts))]
    pieces = list(zip(chunks, block.vectors, strict=True))
    for start in range(0, len(pieces), PER_DOCUMENT):
        if (block.start + start) // PER_DOCUMENT % shards != shard:
            continue
        document = pieces[start : start + PER_DOCUMENT]
        path = str(document[0][0].metadata["file_path"])
        store.documents.put_document(StoredDocument(SOURCE, path, f"/scale/{path}", "/scale", path, "scale"), document)


def _chunk(block: Block, at: int) -> Chunk:
    number = block.start + at
    path = f"{number // PER_DOCUMENT}.txt"
    text = f"#{number} {block.texts[at]}"
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    metadata: dict[str, MetadataValue] = {
        "tenth": int(block.groups[at] % 10),
        "hundredth": int(block.groups[at]),
        "title": f"Document {number // PER_DOCUMENT}",
        "url": f"file:///scale/{path}",
        "source": SOURCE,
        "document_id": f"{SOURCE}/{path}",
        "file_path": path,
        "file_name": path,
        "chunk_index": number % PER_DOCUMENT,
    }
    return Chunk(f"chunk-{number}", number % PER_DOCUMENT, text, metadata, digest, None, None)


@dataclass
class Times:
    """Seconds of single searches, and of their ways."""

    searches: list[float] = field(default_factory=list)
    lanes: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""

    def observe(self, record: ActivityRecord) -> None:
        """Note what a closed search says of its ways."""
        if not isinstance(record, SourceActivity) or record.outcome is None:
            return
        for lane in record.lanes or []:
            if lane.elapsed_ms is not None:
                self.lanes.setdefault(lane.kind, []).append(lane.elapsed_ms / 1000)
            self.note = lane.note or self.note

    def numbers(self) -> Numbers:
        """Return the percentiles, in ms."""
        return {"p50": percentile(self.searches, 50), "p99": percentile(self.searches, 99)}


def measure_plain(store: DirectoryStore, at: ScaleStore, users: int, searches: int, *, hybrid: bool) -> Numbers:
    """Measure retrieval at minimal effort by so many users at once, each asking again as soon as it has its answer."""
    times = Times()
    lexical = store.lexical(SOURCE) if hybrid else None
    source = KnowledgeSource(SOURCE, index=store.index(SOURCE), hybrid=hybrid and lexical)
    retriever = _retriever(source, times)
    texts = at.corpus.query_texts
    retriever.retrieve(texts[0])  # whatever is loaded once
    times.lanes.clear()
    asked = (texts[number % len(texts)] for number in range(searches))

    async def user() -> None:
        for text in asked:
            await _timed(retriever, text, times)

    async def all_users() -> None:
        await asyncio.gather(*(user() for _ in range(users)))

    started = time.perf_counter()
    asyncio.run(all_users())
    numbers = {**times.numbers(), "per second": searches / (time.perf_counter() - started)}
    ways = {f"{kind} p50": percentile(taken, 50) for kind, taken in times.lanes.items()}
    return numbers | (ways if hybrid else {})


def measure_filtered(store: DirectoryStore, at: ScaleStore, key: str, modulus: int, searches: int) -> dict[str, Any]:
    """Measure search under ten filters that have nothing to do with the queries, ours beside Chroma's own.

    One in ``modulus`` rows matches. ``first`` is ours when a filter is new, ``note`` what the account said of the last.
    """
    values = [number * (modulus // FILTERS) for number in range(FILTERS)]
    queries = at.corpus.query_texts
    best = exact(at, [values[number % FILTERS] for number in range(len(queries))], modulus)
    times, first = Times(), Times()
    # Each chunk for itself, so that what is found can be compared with what Chroma finds.
    options = RetrieverOptions(join_neighbours=False, max_per_document=None)
    retrievers = []
    for value in values:
        filters = Condition(key=key, value=value)
        source = KnowledgeSource(SOURCE, index=store.index(SOURCE), filters=filters, hybrid=False)
        retrievers.append(_retriever(source, times, options=options))
    for retriever, query in zip(retrievers, queries, strict=False):
        asyncio.run(_timed(retriever, query, first))
    recalls = []
    for number in range(searches):
        which = number % len(queries)
        found = asyncio.run(_timed(retrievers[which % FILTERS], queries[which], times))
        recalls.append(len(best[which] & found) / max(1, len(best[which])))
    return {
        "ours": {**times.numbers(), "recall": mean(recalls)},
        "first": first.numbers(),
        "chroma": _chromas_own(at, key, modulus, values, best),
        "note": times.note,
    }


def _chromas_own(at: ScaleStore, key: str, modulus: int, values: Sequence[int], best: Sequence[set[str]]) -> Numbers:
    database = ChromaDirectory(at.folder / f"chroma-{key}")
    collection: Any = database.vector_store(SOURCE).client
    vectors, groups = at.vectors(), at.groups() % modulus
    for start in range(collection.count(), len(vectors), BATCH):
        rows = range(start, min(start + BATCH, len(vectors)))
        listed = [{key: int(groups[row])} for row in rows]
        collection.add(ids=[f"chunk-{row}" for row in rows], embeddings=np.array(vectors[list(rows)]), metadatas=listed)
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
    return {**Times(taken).numbers(), "recall": mean(recalls), "searches": len(taken)}


def _retriever(source: KnowledgeSource, times: Times, **options: Any) -> AgenticRetriever:
    return AgenticRetriever([source], effort="minimal", similarity_top_k=TOP_K, observer=times.observe, **options)


async def _timed(retriever: AgenticRetriever, query: str, times: Times) -> set[str]:
    started = time.perf_counter()
    found = await retriever.aretrieve(query)
    times.searches.append(time.perf_counter() - started)
    return {node.node.node_id for node in found}


def exact(at: ScaleStore, values: Sequence[int], modulus: int, block: int = 10_000) -> list[set[str]]:
    """Return each query's nearest rows among those whose group is its value, by comparing with every row."""
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
        {f"chunk-{row}" for row, score in zip(*pair, strict=True) if score > -np.inf}
        for pair in zip(rows.tolist(), scores.tolist(), strict=True)
    ]


def percentile(seconds: Sequence[float], share: float) -> float:
    """Return a percentile of seconds in ms."""
    return float(np.percentile(np.asarray(seconds) * 1000, share)) if seconds else float("nan")
