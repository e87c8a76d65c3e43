"""How build, memory and search grow from 1,000 to 1,000,000 chunks: ``python -m tests.benchmarks.scale``.

Each size is built once and kept in a cache directory; it is built and measured in processes of its own, so that memory
is that size's alone. A million chunks take more than half an hour, 10 GB of disk and 4 GB of memory.

Vectors are points of a 48-dimensional space around topics, laid into 384 dimensions with a little noise: about the
intrinsic dimension of sentence embeddings, so that neighbours exist and the graph that Chroma searches is about as hard
as a real one. Texts have Zipf words that follow the topics. Metadata has a ``tenth`` and a ``hundredth`` that are drawn
apart from the vectors, as tenants are.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, Final

import chromadb
import numpy as np
import psutil  # type: ignore[import-untyped]  # has no types
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from numpy.typing import NDArray
from rich.table import Table

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, RetrieverOptions
from llama_index_agentic_kb.schema import ActivityRecord, Condition, SourceActivity
from llama_index_agentic_kb.store.database import Chunk, MetadataValue, StoredDocument
from llama_index_agentic_kb.store.directory import DirectoryStore
from tests.benchmarks.measure import show, shown_number, write_json

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

DIMENSION: Final = 384
LATENT: Final = 48
PER_TOPIC: Final = 200
SPREAD: Final = 0.6
NOISE: Final = 0.01
VOCABULARY: Final = 30_000
ZIPF: Final = 1.05
WORDS: Final = 48
TOPIC_WORDS: Final = 12
BLOCK: Final = 5_000
QUERIES: Final = 200
SEED: Final = 7


@dataclass(frozen=True)
class Block:
    """Some chunks in a row."""

    start: int
    vectors: Floats
    texts: list[str]
    groups: Ints
    """From 0 to 99: a chunk's ``hundredth``; its last digit is the ``tenth``."""


class ScaleCorpus:
    """The same chunks and queries (each near the chunks of some topic) at each run, made block by block.

    Without clusters, all vectors are drawn apart from each other, in all dimensions: the hardest there are for a graph.
    """

    def __init__(self, size: int, *, clustered: bool = True) -> None:
        rng = np.random.default_rng(SEED)
        self.size, self._clustered = size, clustered
        self._topics = rng.standard_normal((max(4, size // PER_TOPIC), LATENT)).astype(np.float32)
        basis = np.linalg.qr(rng.standard_normal((DIMENSION, LATENT)))[0]
        self._basis: Floats = np.ascontiguousarray(basis.T, dtype=np.float32)
        self._words = _vocabulary()
        weights = 1.0 / np.arange(1, VOCABULARY + 1) ** ZIPF
        self._zipf = np.cumsum(weights / weights.sum())
        topics = rng.integers(0, len(self._topics), QUERIES)
        self.query_vectors = self._vectors(topics, rng)
        self.query_texts = self._texts(topics, rng, words=3, topic_words=3)

    def blocks(self) -> Iterator[Block]:
        """Yield all chunks."""
        for start in range(0, self.size, BLOCK):
            rng = np.random.default_rng([SEED, start])
            count = min(BLOCK, self.size - start)
            topics = rng.integers(0, len(self._topics), count)
            vectors, groups = self._vectors(topics, rng), rng.integers(0, 100, count)
            yield Block(start, vectors, self._texts(topics, rng, words=WORDS, topic_words=TOPIC_WORDS), groups)

    def _vectors(self, topics: Ints, rng: np.random.Generator) -> Floats:
        if not self._clustered:
            return rng.standard_normal((len(topics), DIMENSION)).astype(np.float32)
        latent = self._topics[topics] + SPREAD * rng.standard_normal((len(topics), LATENT)).astype(np.float32)
        vectors = latent @ self._basis + NOISE * rng.standard_normal((len(topics), DIMENSION)).astype(np.float32)
        unit: Floats = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        return unit

    def _texts(self, topics: Ints, rng: np.random.Generator, *, words: int, topic_words: int) -> list[str]:
        """Words by Zipf's law, and among them words of the topic's own (rare ones, shared with few topics)."""
        drawn = np.searchsorted(self._zipf, rng.random((len(topics), words))).clip(max=VOCABULARY - 1)
        own = (topics[:, None] * 7919 + rng.integers(0, 24, (len(topics), topic_words)) * 104_729) % VOCABULARY
        return [" ".join(self._words[at] for at in row) for row in np.concatenate([drawn, own], axis=1)]


class ScaleEmbedding(BaseEmbedding):
    """Looks vectors up that were made beforehand: a text names its row as ``#12``, queries are known by their words."""

    _queries: dict[str, list[float]] = PrivateAttr()
    _block: Block | None = PrivateAttr(default=None)

    def __init__(self, corpus: ScaleCorpus) -> None:
        super().__init__(model_name="synthetic", embed_batch_size=1_000)
        self._queries = dict(zip(corpus.query_texts, corpus.query_vectors.tolist(), strict=True))

    def show(self, block: Block) -> None:
        """Make a block's vectors known; those of the block before are forgotten."""
        self._block = block

    def _get_query_embedding(self, query: str) -> list[float]:
        return list(self._queries[query])

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return list(self._queries[query])

    def _get_text_embedding(self, text: str) -> list[float]:
        row = re.search(r"#(\d+)", text)
        if self._block is None or row is None:  # the store asks for the dimension with a text of its own
            return [1.0] * DIMENSION
        vector: list[float] = self._block.vectors[int(row[1]) - self._block.start].tolist()
        return vector


def _vocabulary() -> list[str]:
    syllables = [onset + vowel for onset in "bdfgklmnprstvz" for vowel in "aeiou"]
    return [
        syllables[at % 70] + syllables[at // 70 % 70] + syllables[at // 4900 % 70] + syllables[at * 31 % 70]
        for at in range(VOCABULARY)
    ]


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

    def build(self, progress: Callable[[str], None] = print) -> Numbers:
        """Build it unless it is there (what was left half built is thrown away); return the seconds of its parts."""
        built = self.folder / "built.json"
        if not built.is_file():
            built.write_text(json.dumps(self._build(progress)), encoding="utf-8")
        seconds: Numbers = json.loads(built.read_text(encoding="utf-8"))
        return seconds

    def _build(self, progress: Callable[[str], None]) -> Numbers:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        shape = (self.corpus.size, DIMENSION)
        vectors = np.lib.format.open_memmap(self.folder / VECTORS, mode="w+", dtype=np.float32, shape=shape)
        groups = np.zeros(self.corpus.size, dtype=np.int64)
        seconds = 0.0
        with self.open(create=True) as store, store.writing():
            store.put_source(SOURCE, "Synthetic chunks.")
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
            started = time.perf_counter()
            store.lexical(SOURCE).update()
        np.save(self.folder / GROUPS, groups)
        return {"seconds": seconds, "seconds of BM25": time.perf_counter() - started}

    def open(self, *, create: bool = False) -> DirectoryStore:
        """Open the store; the caller closes it."""
        return DirectoryStore.open(self.folder / "store", embed_model=self.embedding, create=create)

    def rows(self) -> tuple[Floats, Ints]:
        """Return all vectors, on disk, shape (size, 384), and each chunk's ``hundredth``."""
        return np.load(self.folder / VECTORS, mmap_mode="r"), np.load(self.folder / GROUPS)


def store_block(store: DirectoryStore, block: Block, shard: int = 0, shards: int = 1) -> None:
    """Store each document of a shard in a transaction, as ingestion does."""
    chunks = [_chunk(block, at) for at in range(len(block.texts))]
    pieces = list(zip(chunks, block.vectors, strict=True))
    for start in range(0, len(pieces), PER_DOCUMENT):
        if (block.start + start) // PER_DOCUMENT % shards != shard:
            continue
        document = pieces[start : start + PER_DOCUMENT]
        path = str(document[0][0].metadata["file_path"])
        store.put_document(StoredDocument(SOURCE, path, f"/scale/{path}", "/scale", path, "scale"), document)


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
        for lane in (record.lanes or []) if isinstance(record, SourceActivity) and record.outcome else []:
            self.note = lane.note or self.note
            if lane.elapsed_ms is not None:
                self.lanes.setdefault(lane.kind, []).append(lane.elapsed_ms / 1000)

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
    wholes = [
        KnowledgeSource(SOURCE, index=store.index(SOURCE), filters=Condition(key=key, value=value), hybrid=False)
        for value in values
    ]
    retrievers = [_retriever(source, times, options=options) for source in wholes]
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
    database = chromadb.PersistentClient(str(at.folder / f"chroma-{key}"))
    hnsw: Any = {"hnsw": {"space": "cosine", "ef_search": 400}}
    collection: Any = database.get_or_create_collection(SOURCE, embedding_function=None, configuration=hnsw)
    vectors, groups = at.rows()
    groups %= modulus
    for start in range(collection.count(), len(vectors), BATCH):
        rows = range(start, min(start + BATCH, len(vectors)))
        listed = [{key: int(groups[row])} for row in rows]
        collection.add(ids=[f"chunk-{row}" for row in rows], embeddings=np.array(vectors[list(rows)]), metadatas=listed)
    taken, recalls, deadline = [], [], time.monotonic() + PLAIN_SECONDS
    for number, vector in enumerate(at.corpus.query_vectors.tolist()):
        started = time.perf_counter()
        found = collection.query(query_embeddings=[vector], n_results=TOP_K, where={key: values[number % FILTERS]})
        taken.append(time.perf_counter() - started)
        recalls.append(len(best[number] & set(found["ids"][0])) / max(1, len(best[number])))
        if time.monotonic() > deadline:
            break
    database.close()  # type: ignore[attr-defined]  # of the client's class
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
    (vectors, groups), queries, wanted = at.rows(), at.corpus.query_vectors, np.asarray(values)
    groups %= modulus
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


SIZES: Final = "1000,10000,100000,1000000"
HARD: Final = 20_000
USERS: Final = {1: "1 user", 16: "16 users"}
SELECTIVITIES: Final = {"10 %": ("tenth", 10), "1 %": ("hundredth", 100)}
MEGABYTE: Final = 1024 * 1024

Result = dict[str, Any]


def build(cache: Path, size: int, *, clustered: bool = True) -> Result:
    """Build a size unless it is there."""
    at = ScaleStore(cache, size, clustered=clustered)
    seconds = at.build(lambda text: print(text, file=sys.stderr, flush=True))
    sizes = {}
    for part in ("graphs", "lexical", "documents.db"):
        path = at.folder / "store" / part
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        sizes[f"{part} MB"] = sum(file.stat().st_size for file in files) / MEGABYTE
    return {**seconds, **sizes, "peak memory MB": _peak_megabytes()}


def measure(cache: Path, size: int, searches: int, *, clustered: bool = True) -> Result:
    """Measure a size that was built; without clusters, where Chroma's graph loses its way, filters alone."""
    at = ScaleStore(cache, size, clustered=clustered)
    result: Result = {"chunks": size} if clustered else {"chunks": size, "vectors": "without clusters"}
    with at.open() as store:
        for kind in ("dense", "hybrid") if clustered else ():
            started, hybrid = time.perf_counter(), kind == "hybrid"
            measure_plain(store, at, 1, 1, hybrid=hybrid)
            first = "first hybrid search" if hybrid else "first search"
            result[first] = {"ms": (time.perf_counter() - started) * 1000}
            for users, name in USERS.items():
                result[f"{kind}, {name}"] = measure_plain(store, at, users, searches, hybrid=hybrid)
            result[f"memory, {kind}"] = {"MB": _megabytes()}
        for share, (key, modulus) in SELECTIVITIES.items():
            found = measure_filtered(store, at, key, modulus, searches)
            result[f"filter {share}, ours"] = found["ours"]
            result[f"filter {share}, ours, new filter"] = found["first"]
            result[f"filter {share}, Chroma's own"] = found["chroma"]
            result[f"filter {share}, note"] = found["note"]
    if clustered:
        result["memory, all"] = {"MB": _megabytes(), "peak MB": _peak_megabytes()}
    return result


def _megabytes() -> float:
    return float(psutil.Process().memory_info().rss) / MEGABYTE


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _print(results: list[Result]) -> None:
    """Print a table: quantities by size."""
    table = Table("", "", title="ms, unless a unit is named; recall is recall@10 against exact search")
    for result in results:
        table.add_column(f"{result['chunks']:,}{'*' if 'vectors' in result else ''}", justify="right", no_wrap=True)
    names = dict.fromkeys(name for result in results for name, value in result.items() if isinstance(value, Mapping))
    for name in names:
        quantities = dict.fromkeys(quantity for result in results for quantity in result.get(name, {}))
        for quantity in quantities:
            shown = [shown_number(result.get(name, {}).get(quantity)) for result in results]
            table.add_row(name, quantity, *shown)
        table.add_section()
    show(table)
    if any("vectors" in result for result in results):
        print("* vectors without clusters, the hardest there are for Chroma's graph")


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.replace("_", "").split(",")]


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale", description=__doc__)
    parser.add_argument("--sizes", type=_sizes, default=_sizes(SIZES), help=f"chunks, with commas; default {SIZES}")
    parser.add_argument("--hard", type=int, default=HARD, help=f"vectors without clusters; 0 for none; default {HARD}")
    parser.add_argument("--searches", type=int, default=400, help="searches of each measurement; default 400")
    parser.add_argument("--cache", type=Path, default=Path("build/scale"), help="where what was built is kept")
    parser.add_argument("--out", type=Path, default=Path("build/bench-scale.json"), help="where the numbers go as JSON")
    arguments = parser.parse_args()
    results: list[Result] = []
    cases = [*((size, True) for size in arguments.sizes), *([(arguments.hard, False)] if arguments.hard else [])]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for size, clustered in cases:
            built = pool.submit(build, arguments.cache, size, clustered=clustered).result()
            measured = pool.submit(measure, arguments.cache, size, arguments.searches, clustered=clustered).result()
            results.append({"build": built, **measured})
            write_json(results, arguments.out)
    _print(results)


if __name__ == "__main__":
    main()
