"""Dense search in a source of a store: exact over the vectors in SQLite, with an HNSW graph for large sources.

A query searches the chunks in the vector index (HNSW graph), up to its last id, and all later chunks. The later chunks
are cached in memory and compared exactly, so that a document is searchable as soon as it is stored. Up to `EXACT_ROWS`
rows need no graph. With a filter, up to `EXACT_ROWS` matching rows are compared exactly; if more rows match, the
nearest rows of the whole source are filtered instead.

Each query reads the source's version to detect changes. Deleted chunks that are still in a graph are dropped when the
hits are read from the database.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, RetrievalError, StoreDamagedError
from llama_index_agentic_kb.search.dialects import SqlCondition, SqliteSql, StoreDialect, all_hold
from llama_index_agentic_kb.search.filters import to_tree
from llama_index_agentic_kb.search.prototypes import unit_rows
from llama_index_agentic_kb.store import database
from llama_index_agentic_kb.store.database import Floats, Ids, MetadataValue, SourceReader, SourceState

if TYPE_CHECKING:
    from usearch.index import Index

    from llama_index_agentic_kb.schema import FilterNode
    from llama_index_agentic_kb.search.lexical import LexicalSearch
    from llama_index_agentic_kb.store.directory import DirectoryStore
    from llama_index_agentic_kb.store.store import KnowledgeStore

MAX_ROWS = 200_000
"""The maximum number of rows outside the HNSW graph (300 MB); with more, a search fails until the graph is built."""
CANDIDATES: Final = 400
MAX_CANDIDATES: Final = 10_000
MARGIN: Final = 5
"""The minimum and maximum number of nearest rows to filter, and the factor by which they exceed the expected need."""
MEMORY_BYTES: Final = 256 << 20  # the maximum memory, in bytes, for the cached rows of all filters on a source
_MAX_PORTION: Final = 2_000

Key = TypeVar("Key", int, str)
Ranked: TypeAlias = tuple[int, float]  # a chunk's id and its cosine distance to the query
Taken: TypeAlias = Callable[[Iterable[Ranked], Callable[[list[int]], Mapping[int, BaseNode]]], VectorStoreQueryResult]
"""`take` with the arguments of one search."""


class _Rows(NamedTuple):
    """Chunk ids with their vectors, normalized to unit length."""

    ids: Ids
    vectors: Floats

    def nearest(self, vector: Floats, count: int) -> list[Ranked]:
        """Return the nearest rows with their cosine distances, best first; ties are in order of id."""
        # Not `@`: BLAS wakes a thread for each core, and they spin for 2 ms after each product.
        far = 1.0 - np.vecdot(self.vectors, vector)
        best = np.argpartition(far, count)[:count] if count < len(far) else np.arange(len(far))
        best = best[np.lexsort((self.ids[best], far[best]))]
        return list(zip(self.ids[best].tolist(), far[best].tolist(), strict=True))


class _Matches(NamedTuple):
    """The rows that match a filter, with their vectors if there are at most `EXACT_ROWS`."""

    ids: Ids
    rows: _Rows | None


@dataclass(eq=False)
class _Loaded:
    """The cached data of one version of a source: its HNSW graph, the rows missing from it, and the rows of filters."""

    state: SourceState
    graph: Index | None
    later: _Rows
    total: int
    matches: OrderedDict[bytes, _Matches] = field(default_factory=OrderedDict)


class StoreVectorStore(BasePydanticVectorStore):
    """A read-only LlamaIndex vector store over a source; documents are changed only by ingestion. Thread-safe."""

    stores_text: bool = True
    filter_dialect: ClassVar[type[StoreDialect]]  # the language of its filters, which says what they can't be
    _store: KnowledgeStore = PrivateAttr()
    _source: str = PrivateAttr()

    @classmethod
    def over(cls, store: KnowledgeStore, source: str) -> Self:
        """Return the vector store of a source."""
        made = cls(stores_text=True)
        made._store = store
        made._source = source
        return made

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the store class; similarities from stores of the same class are comparable."""
        return "KnowledgeStore"

    @property
    def client(self) -> None:
        """Always None: the store has no underlying client."""
        return

    @property
    def lexical_search(self) -> LexicalSearch:
        """The lexical search (BM25) that sources use in addition to dense search."""
        return self._store.lexical(self._source)

    def metadata_rows(self, filters: FilterNode | None = None) -> Iterator[tuple[str, dict[str, MetadataValue]]]:
        """Yield the document id and metadata of each chunk; see ``DocumentDatabase.metadata``."""
        return self._store.metadata(self._source, filters)

    def vector_reader(self) -> SourceReader:
        """Return the reader of the vectors, from which a scope index is made."""
        return self._store.reader(self._source)

    def filtered_search(
        self, query: VectorStoreQuery, *, deadline: float | None = None
    ) -> tuple[VectorStoreQueryResult, str]:
        """Find the nearest chunks, with the similarities exp(-cosine distance), and a note on how they were found.

        Without a vector, chunks are listed. No step is started after the deadline, a ``time.monotonic()`` value.

        Raises:
            DeniedError: The filter is empty or not supported by the store.
            DeadlineExceededError: The deadline passed between two steps.
            RetrievalError: The query's vector dimension or mode is wrong.
            StoreDamagedError: The HNSW graph of a large source is missing or damaged; the message names the remedy.
            ConfigurationError: The source no longer exists.
        """
        if query.mode is not VectorStoreQueryMode.DEFAULT:
            raise RetrievalError(f"A knowledge store searches in the mode 'default'; found {query.mode.value!r}.")
        vector = unit_rows(np.asarray(query.query_embedding, dtype=np.float32)) if query.query_embedding else None
        dimension = self._store.fingerprint.dimension
        if vector is not None and len(vector) != dimension:
            raise RetrievalError(
                f"The query's vector has {len(vector)} dimensions, those of the store have {dimension}: embed "
                "queries with the model that the store was made with."
            )
        check_deadline(deadline)
        taken = partial(take, top_k=query.similarity_top_k, deadline=deadline)
        return self._found(vector, self._where(query), query.similarity_top_k, taken, deadline)

    @abstractmethod
    def _found(
        self, vector: Floats | None, where: SqlCondition | None, top_k: int, taken: Taken, deadline: float | None
    ) -> tuple[VectorStoreQueryResult, str]:
        """Return the nearest chunks under a condition, or all without a vector, and a note; see `filtered_search`."""

    def _where(self, query: VectorStoreQuery) -> SqlCondition | None:
        """Return a query's filters, node ids and document ids as one condition on ``chunks``; None if it has none."""
        tree, dialect = to_tree(query.filters), self.filter_dialect
        parts = [] if tree is None else [dialect.filter(tree)]
        if query.node_ids:  # an index over a vector store passes an empty list always
            parts.append(dialect.any_value("node_id", query.node_ids))
        if query.doc_ids is not None:
            parts.append(dialect.any_value(dialect.document_id, query.doc_ids))
        return all_hold(*parts) if parts else None

    def query(self, query: VectorStoreQuery, **_: object) -> VectorStoreQueryResult:
        """Find the nearest nodes."""
        return self.filtered_search(query)[0]

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return nodes by their ids, by a filter, or by both; all nodes if neither is given."""
        if node_ids is not None and not node_ids:
            return []
        query = VectorStoreQuery(node_ids=node_ids, filters=filters, similarity_top_k=sys.maxsize)
        return list(self.query(query).nodes or [])

    def add(self, nodes: Sequence[BaseNode], **_: object) -> list[str]:
        """Raise ``ConfigurationError``: nodes can only be added by ingesting their document."""
        raise ConfigurationError(f"{len(nodes)} nodes: documents come into a knowledge store by ingest() alone.")

    def delete(self, ref_doc_id: str, **_: object) -> None:
        """Raise ``ConfigurationError``: documents can only be deleted by ingestion."""
        raise ConfigurationError(f"{ref_doc_id!r}: documents leave a knowledge store by ingest() alone.")


class SourceVectors(StoreVectorStore):
    """Dense search in one source of a store in a directory."""

    filter_dialect = SqliteSql
    _store: DirectoryStore = PrivateAttr()
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)
    _loaded: _Loaded | None = PrivateAttr(default=None)

    def _found(
        self, vector: Floats | None, where: SqlCondition | None, top_k: int, taken: Taken, deadline: float | None
    ) -> tuple[VectorStoreQueryResult, str]:
        if vector is None:
            self._store._existing_state(self._source)
            ids = self._store._ids(self._source, *(where or ()))
            return taken(((row, 0.0) for row in ids.tolist()), self._nodes), "listed"
        # One thread loads what is cached, others wait.
        if not self._lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise DeadlineExceededError("another search was still reading the source's vectors at the deadline")
        try:
            loaded = self._current()
            matches = None if where is None else self._matches(loaded, *where)
        finally:
            self._lock.release()
        if matches is None:
            nearest = partial(self._nearest, loaded, vector)
            limit = len(loaded.later.ids) + (0 if loaded.graph is None else len(loaded.graph))  # deleted ones too
            return taken(growing(nearest, top_k, limit), self._nodes), "searched"
        found, how = self._filtered(loaded, matches, vector, top_k, taken, deadline)
        return found, f"filter matches {len(matches.ids):,} of {loaded.total:,}: {how}"

    def _filtered(
        self, loaded: _Loaded, matches: _Matches, vector: Floats, top_k: int, taken: Taken, deadline: float | None
    ) -> tuple[VectorStoreQueryResult, str]:
        if matches.rows is not None:
            nearest = growing(partial(matches.rows.nearest, vector), top_k, len(matches.ids))
            return taken(nearest, self._nodes), "searched exactly"
        limit = min(loaded.total, MAX_CANDIDATES)
        count = max(CANDIDATES, math.ceil(MARGIN * top_k * loaded.total / len(matches.ids)))
        ranked = growing(partial(self._nearest, loaded, vector), min(limit, count), limit)
        found = taken((item for item in ranked if _holds(matches.ids, item[0])), self._nodes)
        if len(found.ids or []) >= top_k:
            return found, "taken from the nearest of all"
        best: list[Ranked] = []
        for start in range(0, len(matches.ids), database.EXACT_ROWS):  # more than memory may hold
            check_deadline(deadline)
            best += self._rows(matches.ids[start : start + database.EXACT_ROWS]).nearest(vector, MAX_CANDIDATES)
        found = taken(sorted(best, key=_by_distance), self._nodes)
        return found, f"too few among the {limit:,} nearest of all: searched exactly"

    # -- cached data -------------------------------------------------------------------------------------------------

    def _current(self) -> _Loaded:
        old, state = self._loaded, self._store._existing_state(self._source)
        if old is not None and old.state == state:
            return old
        graph = self._store.graphs.opened(state)
        if state.graph and graph is None:  # it may have been replaced and deleted
            state = self._store._existing_state(self._source)
            graph = self._store.graphs.opened(state)
        ids = self._store._ids(self._source, after=0 if graph is None else state.last_id)
        if len(ids) > MAX_ROWS:
            raise StoreDamagedError(
                f"The vectors of the source {self._source!r} have no usable graph, and {len(ids):,} are too many to "
                f"compare one by one. Nothing is lost: run `agentic-kb repair --store {self._store.location}`."
            )
        if old is None:
            later = self._rows(ids)
        else:  # most vectors are in memory already
            kept = np.isin(old.later.ids, ids)
            new = self._rows(ids[~np.isin(ids, old.later.ids)])
            found = np.concatenate([old.later.ids[kept], new.ids])
            order = np.argsort(found, kind="stable")
            later = _Rows(found[order], np.concatenate([old.later.vectors[kept], new.vectors])[order])
        self._loaded = _Loaded(state, graph, later, self._store._count(self._source))
        return self._loaded

    def _matches(self, loaded: _Loaded, sql: str, parameters: list[object]) -> _Matches:
        """Return the rows that match a filter, cached until the source changes or the memory limit is reached."""
        key = hashlib.sha256(json.dumps([sql, parameters]).encode()).digest()
        known = loaded.matches.pop(key, None)
        if known is None:
            ids = self._store._ids(self._source, sql, parameters)
            known = _Matches(ids, self._rows(ids) if len(ids) <= database.EXACT_ROWS else None)
        loaded.matches[key] = known
        held, row_bytes = loaded.matches, 4 * self._store.fingerprint.dimension
        while len(held) > 1 and sum(len(m.ids) * (8 + row_bytes * bool(m.rows)) for m in held.values()) > MEMORY_BYTES:
            held.popitem(last=False)
        return known

    def _rows(self, ids: Ids) -> _Rows:
        found, vectors = self._store._vectors_of(ids)
        return _Rows(found, unit_rows(vectors))

    # -- ranking -----------------------------------------------------------------------------------------------------

    def _nearest(self, loaded: _Loaded, vector: Floats, count: int) -> list[Ranked]:
        """Return the nearest rows of the whole source: of its HNSW graph and of the later rows."""
        ranked = loaded.later.nearest(vector, count)
        if loaded.graph is not None:
            places = min(count, len(loaded.graph) or 1)  # it allocates as many
            found = loaded.graph.search(vector, places, threads=1)
            near = dict(zip(found.keys.tolist(), found.distances.tolist(), strict=True))  # of rounded vectors
            near |= self._rows(found.keys.astype(np.int64)).nearest(vector, count)  # of those that are not deleted
            ranked = sorted([*ranked, *near.items()], key=_by_distance)
        return ranked[:count]

    def _nodes(self, ids: list[int]) -> Mapping[int, BaseNode]:
        return self._store._nodes_of("id", ids)


def growing(
    nearest: Callable[[int], Sequence[tuple[Key, float]]], count: int, limit: int
) -> Iterator[tuple[Key, float]]:
    """Yield the nearest rows, best first, requesting four times as many whenever they are used up, up to a limit."""
    seen: set[Key] = set()
    while True:
        ranked = nearest(count)
        yield from (item for item in ranked if item[0] not in seen)
        if count >= limit or len(ranked) <= len(seen):
            return
        seen.update(key for key, _ in ranked)
        count = min(limit, count * 4)


def take(
    ranked: Iterable[tuple[Key, float]],
    fetch: Callable[[list[Key]], Mapping[Key, BaseNode]],
    top_k: int,
    deadline: float | None,
) -> VectorStoreQueryResult:
    """Fetch the nodes of ranked rows, best first, until there are ``top_k`` of them.

    ``fetch`` omits rows that are deleted or don't match. Similarities are exp(-distance), as in LlamaIndex's Chroma
    store.
    """
    left = iter(ranked)
    taken: list[tuple[BaseNode, float]] = []
    portion = min(top_k, _MAX_PORTION)
    while len(taken) < top_k and (rows := list(islice(left, portion))):
        check_deadline(deadline)
        nodes = fetch([key for key, _ in rows])
        taken += [(nodes[key], far) for key, far in rows if key in nodes]
        portion = min(portion * 2, _MAX_PORTION)
    del taken[top_k:]
    return VectorStoreQueryResult(
        nodes=[node for node, _ in taken],
        similarities=[math.exp(-far) for _, far in taken],
        ids=[node.node_id for node, _ in taken],
    )


def check_deadline(deadline: float | None) -> None:
    """Raise ``DeadlineExceededError`` if the deadline has passed; called between steps, as threads can't be killed."""
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceededError("the filtered search was still under way at its deadline")


def _holds(ids: Ids, row: int) -> bool:
    at = int(np.searchsorted(ids, row))
    return at < len(ids) and int(ids[at]) == row


def _by_distance(ranked: Ranked) -> tuple[float, int]:
    return ranked[1], ranked[0]
