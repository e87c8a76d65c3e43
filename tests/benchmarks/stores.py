"""Recall of filtered searches in real vector stores, beside a comparison with every row: ``make bench-stores``.

Vectors of 64 dimensions in 100 clusters. A filter lets a share of the rows through, whatever their cluster. PostgreSQL
has an HNSW index (m 16, ef_construction 64, ef_search 40) and LanceDB an index too (IVF_PQ); "adapter alone" is
LlamaIndex's adapter with the same filter.
"""

from __future__ import annotations

import argparse
import time
import uuid
from statistics import mean, median
from typing import Any, Final

import numpy as np
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.schema import Condition, FilterOperator
from llama_index_agentic_kb.search.filters import lower
from tests.sources.conftest import search
from tests.stores.kinds import KINDS, Opened

DIMENSIONS: Final = 64
TOP_K: Final = 10
SHARES: Final = (1.0, 0.1, 0.01, 0.002)
QUERIES: Final = 30


class Numbered(BaseEmbedding):
    """Returns the vector whose number a query is."""

    vectors: Any

    def _get_query_embedding(self, query: str) -> list[float]:
        return list(map(float, self.vectors[int(query)]))

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_query_embedding(text)


def corpus(size: int) -> tuple[Any, Any, Any]:
    """Return the rows' vectors, their shares' numbers, and the queries' vectors."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(100, DIMENSIONS))
    rows = centres[random.integers(100, size=size)] + 0.4 * random.normal(size=(size, DIMENSIONS))
    asked = centres[random.integers(100, size=QUERIES)] + 0.4 * random.normal(size=(QUERIES, DIMENSIONS))
    normed = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (rows, asked)]
    return normed[0], random.random(size), normed[1]


def fill(opened: Opened, kind: str, rows: Any, places: Any) -> Any:
    """Return a store of a kind with all rows."""
    settings = {"hnsw_kwargs": {"hnsw_m": 16, "hnsw_ef_construction": 64, "hnsw_ef_search": 40}}
    store: Any = opened.make(kind, dimensions=DIMENSIONS, **settings if kind == "PostgreSQL" else {})
    made = [
        TextNode(id_=str(uuid.UUID(int=n)), text=f"row {n}", metadata={"place": float(place)}, embedding=row.tolist())
        for n, (row, place) in enumerate(zip(rows, places, strict=True))
    ]
    for start in range(0, len(made), 1_000):
        store.add(made[start : start + 1_000])
    if kind == "LanceDB":
        store.create_index(num_partitions=32, num_sub_vectors=16, metric="cosine")
    return store


def measure(size: int, kinds: list[str]) -> None:
    """Print a line of the table for each kind of store and share of rows."""
    rows, places, asked = corpus(size)
    opened = Opened()
    print("| store | rows that pass | recall@10 | p50 ms | adapter alone: recall@10 |\n|---|---|---|---|---|")
    for kind in kinds:
        store = fill(opened, kind, rows, places)
        index = VectorStoreIndex.from_vector_store(store, embed_model=Numbered(vectors=asked))
        source = KnowledgeSource("rows", index=index, hybrid=False)
        for share in SHARES:
            tree = Condition(key="place", operator=FilterOperator.LT, value=share)
            passing = np.flatnonzero(places < share)
            recalls, alone, seconds = [], [], []
            for number, vector in enumerate(asked):
                wanted = {str(uuid.UUID(int=int(n))) for n in passing[np.argsort(-rows[passing] @ vector)[:TOP_K]]}
                began = time.perf_counter()
                found = {node.node_id for node in search(source, str(number), tree, top_k=TOP_K).nodes}
                seconds.append(time.perf_counter() - began)
                recalls.append(len(found & wanted) / len(wanted))
                query = VectorStoreQuery(query_embedding=vector.tolist(), similarity_top_k=TOP_K, filters=lower(tree))
                alone.append(len(wanted.intersection(_ids(store, query))) / len(wanted))
            figures = f"{mean(recalls):.3f} | {1000 * median(seconds):.1f} | {mean(alone):.3f}"
            print(f"| {kind} | {len(passing):,} of {size:,} | {figures} |", flush=True)
    opened.close()


def _ids(store: Any, query: VectorStoreQuery) -> list[str]:
    try:
        return list(store.query(query).ids or [])
    except Warning:  # LanceDB's adapter, where nothing was found
        return []


def main() -> None:
    """Read the size and the stores."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.stores", description=__doc__)
    parser.add_argument("--size", type=int, default=10_000, help="the number of rows")
    parser.add_argument("--kinds", nargs="+", default=[kind for kind in KINDS if kind != "in memory"])
    given = parser.parse_args()
    measure(given.size, given.kinds)


if __name__ == "__main__":
    main()
