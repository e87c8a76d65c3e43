"""Rows of known vectors and metadata in a store, and what a comparison with all of them finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llama_index.core.vector_stores.types import MetadataFilters, VectorStoreQuery

from llama_index_agentic_kb.schema import Condition, FilterNode, matches
from llama_index_agentic_kb.search.filters import lower
from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.store.database import Chunk, MetadataValue, StoredDocument
from llama_index_agentic_kb.testing import HashEmbedding

ROWS, DIMENSION, TOP_K, SOURCE = 600, 16, 10, "rows"
MODEL = HashEmbedding(dimensions=DIMENSION)
VECTORS, QUERIES = np.split(np.random.default_rng(3).standard_normal((ROWS + 10, DIMENSION)).astype(np.float32), [ROWS])
Metadata = dict[str, MetadataValue]
FILTERS = [
    Condition(key="tenth", value=3),
    Condition(key="even", value=True),
    Condition(key="team", operator="ne", value="red"),
    Condition(key="share", operator="gt", value=100),
    Condition(key="name", operator="in", value=["n1", "n2", "n599"]),
]


def metadata_of(at: int) -> Metadata:
    made: Metadata = {"tenth": at % 10, "share": at / 4, "name": f"n{at}", "even": at % 2 == 0}
    return made | ({"team": ["red", "blue"][at % 8 // 4], "É": ""} if at % 4 == 0 else {})


def put(store: KnowledgeStore, start: int = 0, end: int = ROWS) -> None:
    """Store vectors without any cluster, a hundred to a document."""
    if start == 0:
        store.put_source(SOURCE)
    for first in range(start, end, 100):
        document = StoredDocument(SOURCE, f"{first}", "/o", "/r", "hash", "settings")
        chunks = []
        for at in range(first, first + 100):
            metadata: Metadata = {**metadata_of(at), "title": "T", "document_id": "d"}
            chunks.append(Chunk(f"n{at}", at, f"text {at} {'pump' * (at == 7)}", metadata, f"e{at}", 0, 1))
        store.put_document(document, list(zip(chunks, VECTORS[first : first + 100], strict=True)))


def nearest(query: Any, passes: Callable[[Metadata], bool]) -> list[str]:
    """Return the ids that a comparison with all rows finds, best first."""
    ids = [at for at in range(ROWS) if passes(metadata_of(at))]
    far = -(VECTORS[ids] @ query) / np.linalg.norm(VECTORS[ids], axis=1)
    return [f"n{ids[at]}" for at in np.argsort(far, kind="stable")[:TOP_K]]


def asked(vector: Any, filters: MetadataFilters | None = None, top_k: int = TOP_K, **more: Any) -> VectorStoreQuery:
    listed = [] if vector is None else [float(x) for x in vector]
    return VectorStoreQuery(query_embedding=listed, similarity_top_k=top_k, filters=filters, **more)


def found(store: KnowledgeStore, vector: Any, filters: FilterNode | None = None, **more: Any) -> list[str]:
    result, _ = store.vectors(SOURCE).filtered_search(
        asked(vector, None if filters is None else lower(filters), **more)
    )
    return list(result.ids or [])


def recall(store: KnowledgeStore, filters: FilterNode | None = None) -> float:
    """Return the share of the nearest that is found, over all queries."""
    best = [nearest(query, lambda one: filters is None or matches(filters, one)) for query in QUERIES]
    hits = [set(ids) & set(found(store, query, filters)) for ids, query in zip(best, QUERIES, strict=True)]
    return sum(map(len, hits)) / sum(map(len, best))
