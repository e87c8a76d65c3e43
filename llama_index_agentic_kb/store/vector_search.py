"""Dense search in a source of a store: exact over the vectors in SQLite, with a graph where there are many.

The rows that a query may find are those that the graph holds (chunks up to its last id) and those that came later.
The latter are kept in memory and compared exactly, so that a document is found as soon as it is stored, whatever
becomes of the process that stored it. Up to `EXACT_ROWS` rows need no graph at all. Under a filter, the rows that SQL
lets through are compared exactly up to the same number; more are sieved from the nearest rows of all.

Each query asks the database once for the source's version. What a graph still holds of chunks that are gone is left
out when the hits are read from the database.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

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

from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    RetrievalError,
    StoreDamagedError,
)
from llama_index_agentic_kb.store.chunking import chunk_to_node
from llama_index_agentic_kb.store.database import Floats, Ids, VectorState
from llama_index_agentic_kb.store.graphs import GraphError, Graphs
from llama_index_agentic_kb.store.ranking import Passes, check_deadline, growing, take, unit
from llama_index_agentic_kb.store.sql_filters import sql_filter

if TYPE_CHECKING:
    from llama_index_agentic_kb.search.lexical import LexicalSearch
    from llama_index_agentic_kb.store.store import KnowledgeStore

__all__ = ["EXACT_ROWS", "MAX_ROWS", "SourceVectors", "StoreVectorStore"]

EXACT_ROWS = 20_000
"""Rows that are compared exactly: 30 MB at 384 dimensions, 2-4 ms a query, where a graph takes 2 ms."""
MAX_ROWS = 200_000
"""Rows outside of a graph that are still compared exactly (300 MB); beyond, the graph must be built first."""
CANDIDATES: Final = 400
MAX_CANDIDATES: Final = 10_000
MARGIN: Final = 5
"""A sieve takes at least, and at most, so many of the nearest rows; so many times what is needed on average."""
MEMORY_BYTES: Final = 256 << 20
"""What the rows of all remembered filters of a source may take together."""

_ATTEMPTS: Final = 5

Ranked: TypeAlias = tuple[int, float]
"""A chunk's id and its distance."""


@dataclass(eq=False)
class _Rows:
    """Chunks with their vectors, at unit length."""

    ids: Ids
    vectors: Floats

    def nearest(self, vector: Floats, count: int) -> list[Ranked]:
        """Return the nearest rows with their cosine distances, best first; equal ones in the order of the ids."""
        far = 1.0 - self.vectors @ vector
        best = np.argpartition(far, count)[:count] if count < len(far) else np.arange(len(far))
        best = best[np.lexsort((self.ids[best], far[best]))]
        return list(zip(self.ids[best].tolist(), far[best].tolist(), strict=True))


@dataclass(eq=False)
class _Matches:
    """The rows that a filter lets through, with their vectors where they are few."""

    ids: Ids
    rows: _Rows | None

    @property
    def nbytes(self) -> int:
        return int(self.ids.nbytes + (self.rows.vectors.nbytes if self.rows else 0))


@dataclass(eq=False)
class _Loaded:
    """What is in memory of one state of a source: the rows that its graph lacks, and those of filters."""

    state: VectorState
    last_id: int
    later: _Rows
    total: int
    matches: OrderedDict[bytes, _Matches] = field(default_factory=OrderedDict)


class SourceVectors:
    """Searches one source; safe to use from many threads.

    Args:
        store: The store.
        source: The source's name.
        graphs: Opens the store's graphs.
    """

    def __init__(self, store: KnowledgeStore, source: str, graphs: Graphs) -> None:
        self._store = store
        self._source = source
        self._graphs = graphs
        self._dimension = store.fingerprint.dimension
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    def search(
        self, query: VectorStoreQuery, passes: Passes | None = None, *, deadline: float | None = None
    ) -> tuple[VectorStoreQueryResult, str]:
        """Find the nearest chunks.

        Args:
            query: With a vector; its filters, document ids and node ids all narrow the search.
            passes: Checks each node; others take the places of those that fail. None lets all through.
            deadline: ``time.monotonic()`` after which nothing further is begun; None goes on.

        Returns:
            The nodes, best first, with the similarities exp(-cosine distance); and how they were found.

        Raises:
            DeniedError: The filter is empty, or one that the store can't apply.
            DeadlineExceededError: The time was over between two steps.
            RetrievalError: The query's vector is not as long as the store's, or the mode is another than "default".
            StoreDamagedError: The graph of a large source can't be used; the message names the remedy.
            ConfigurationError: The source is gone.
        """
        vector = self._vector(query)
        where = _where(query)
        for _ in range(_ATTEMPTS):
            # A graph that fails is not used again: it was replaced since, or it is damaged.
            with suppress(GraphError):
                return self._search(query.similarity_top_k, vector, where, passes, deadline)
        raise RetrievalError(f"The vectors of the source {self._source!r} were replaced again and again; ask again.")

    def _search(
        self,
        top_k: int,
        vector: Floats | None,
        where: tuple[str, list[object]] | None,
        passes: Passes | None,
        deadline: float | None,
    ) -> tuple[VectorStoreQueryResult, str]:
        with self._turn(deadline):
            loaded = self._current()
            matches = None if where is None else self._matches(loaded, *where)
        taken = partial(take, fetch=self._nodes, top_k=top_k, passes=passes, deadline=deadline)
        if vector is None:
            ids = self._store.documents.ids(self._source) if matches is None else matches.ids
            return taken((row, 0.0) for row in ids.tolist()), "listed"
        nearest = partial(self._nearest, loaded, vector)
        if matches is None:
            return taken(growing(nearest, top_k, loaded.total)), "searched"
        note = f"filter matches {len(matches.ids):,} of {loaded.total:,}: "
        if not len(matches.ids):
            return taken(iter(())), note + "nothing to search"
        if matches.rows is not None:
            exact = partial(matches.rows.nearest, vector)
            return taken(growing(exact, top_k, len(matches.ids))), note + "searched exactly"
        count = max(CANDIDATES, math.ceil(MARGIN * top_k * loaded.total / len(matches.ids)))
        limit = min(loaded.total, MAX_CANDIDATES)
        ranked = growing(nearest, min(limit, count), limit)
        found = taken(one for one in ranked if _holds(matches.ids, one[0]))
        if len(found.ids or []) >= top_k:
            return found, note + "taken from the nearest of all"
        found = taken(iter(self._in_blocks(vector, matches.ids, deadline)))
        return found, note + f"too few among the {limit:,} nearest of all: searched exactly"

    def lexical(self) -> LexicalSearch:
        """Return the source's search by words."""
        return self._store.lexical(self._source)

    def outside_graph(self) -> int:
        """Return how many chunks the source's graph lacks, and how many of its chunks are gone."""
        state, documents = self._state(), self._store.documents
        held = self._graphs.count(state)
        if held is None:
            return documents.count(self._source)
        there = documents.count(self._source, state.last_id)
        return documents.count(self._source) - there + held - there

    # -- what is in memory -------------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self, deadline: float | None) -> Iterator[None]:
        """One thread loads; others that need the same wait for it."""
        check_deadline(deadline)
        if not self._lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise DeadlineExceededError("another search was still reading the source's vectors at the deadline")
        try:
            yield
        finally:
            self._lock.release()

    def _state(self) -> VectorState:
        state = self._store.documents.vector_state(self._source)
        if state is None:
            raise ConfigurationError(f"The store {str(self._store.path)!r} has no source {self._source!r} any more.")
        return state

    def _current(self) -> _Loaded:
        """Return what is in memory, brought in step with the database."""
        old, state = self._loaded, self._state()
        if state.directory and self._graphs.count(state) is None:
            state = self._state()  # it may have been replaced, and removed, since
        last_id = 0 if self._graphs.count(state) is None else state.last_id
        if old is not None and (old.state, old.last_id) == (state, last_id):
            return old
        ids = self._store.documents.ids_after(self._source, last_id)
        if len(ids) > MAX_ROWS:
            raise StoreDamagedError(
                f"The vectors of the source {self._source!r} have no usable graph, and {len(ids):,} are too many to "
                f"compare one by one. Nothing is lost: run `agentic-kb repair --store {self._store.path}`."
            )
        later = self._rows(ids) if old is None else self._grown(old.later, ids)
        self._loaded = _Loaded(state, last_id, later, self._store.documents.count(self._source))
        return self._loaded

    def _grown(self, old: _Rows, ids: Ids) -> _Rows:
        """Return rows of which most are in memory already."""
        kept = np.isin(old.ids, ids)
        new = self._rows(ids[~np.isin(ids, old.ids)])
        found = np.concatenate([old.ids[kept], new.ids])
        order = np.argsort(found, kind="stable")
        return _Rows(found[order], np.concatenate([old.vectors[kept], new.vectors])[order])

    def _matches(self, loaded: _Loaded, sql: str, parameters: list[object]) -> _Matches:
        """Return the rows of a filter, remembered for as long as the source does not change."""
        key = hashlib.sha256(json.dumps([sql, parameters]).encode()).digest()
        known = loaded.matches.pop(key, None)
        if known is None:
            ids = self._store.documents.ids(self._source, sql, parameters)
            known = _Matches(ids, self._rows(ids) if len(ids) <= EXACT_ROWS else None)
        loaded.matches[key] = known
        while sum(matches.nbytes for matches in loaded.matches.values()) > MEMORY_BYTES and len(loaded.matches) > 1:
            loaded.matches.popitem(last=False)
        return known

    def _rows(self, ids: Ids) -> _Rows:
        found, vectors = self._store.documents.vectors(ids, self._dimension)
        return _Rows(found, unit(vectors))

    # -- ranking -----------------------------------------------------------------------------------------------------

    def _vector(self, query: VectorStoreQuery) -> Floats | None:
        if query.mode is not VectorStoreQueryMode.DEFAULT:
            raise RetrievalError(f"A knowledge store searches in the mode 'default'; found {query.mode.value!r}.")
        if not query.query_embedding:
            return None
        vector = unit(np.asarray(query.query_embedding, dtype=np.float32))
        if len(vector) != self._dimension:
            raise RetrievalError(
                f"The query's vector has {len(vector)} dimensions, those of the store have {self._dimension}: embed "
                "queries with the model that the store was made with."
            )
        return vector

    def _nearest(self, loaded: _Loaded, vector: Floats, count: int) -> list[Ranked]:
        """Return the nearest rows of all: of the graph, and of those that came later."""
        ranked = loaded.later.nearest(vector, count)
        if loaded.last_id:
            ranked += self._graphs.nearest(loaded.state, vector, count)
            ranked.sort(key=lambda one: (one[1], one[0]))
        return ranked[:count]

    def _in_blocks(self, vector: Floats, ids: Ids, deadline: float | None) -> list[Ranked]:
        """Rank more rows than are kept in memory, reading their vectors block by block."""
        best: list[Ranked] = []
        for start in range(0, len(ids), EXACT_ROWS):
            check_deadline(deadline)
            best += self._rows(ids[start : start + EXACT_ROWS]).nearest(vector, MAX_CANDIDATES)
        return sorted(best, key=lambda one: (one[1], one[0]))

    def _nodes(self, rows: list[int]) -> dict[int, BaseNode]:
        return {chunk.id: chunk_to_node(chunk) for chunk in self._store.documents.chunks_of("id", rows)}


class StoreVectorStore(BasePydanticVectorStore):
    """A source of a store as a LlamaIndex vector store; documents come into it by ``ingest`` alone.

    Args:
        vectors: The source's search.
        documents: The store's record.
    """

    stores_text: bool = True
    is_embedding_query: bool = True
    _vectors: SourceVectors = PrivateAttr()

    def __init__(self, vectors: SourceVectors) -> None:
        super().__init__(stores_text=True)
        self._vectors = vectors

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the kind of store: similarities of one name can be compared."""
        return "KnowledgeStore"

    @property
    def client(self) -> None:
        """None: there is no client to go around the store with."""
        return

    @property
    def filtered_search(self) -> Callable[..., tuple[VectorStoreQueryResult, str]]:
        """The search that sources use under a filter."""
        return self._vectors.search

    @property
    def lexical_search(self) -> LexicalSearch:
        """The word search that sources use beside it."""
        return self._vectors.lexical()

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        """Find the nearest nodes; see ``SourceVectors.search``."""
        return self._vectors.search(query)[0]

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return nodes by their ids, by a filter, or by both; all where neither is given."""
        if node_ids is not None and not node_ids:
            return []
        query = VectorStoreQuery(node_ids=node_ids, filters=filters, similarity_top_k=MAX_ROWS)
        return list(self.query(query).nodes or [])

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        """Raise: an index entry without its document would be lost with the next ingestion."""
        raise ConfigurationError(f"{len(nodes)} nodes: documents come into a knowledge store by ingest() alone.")

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        """Raise, for the same reason."""
        raise ConfigurationError(f"{ref_doc_id!r}: documents leave a knowledge store by ingest() alone.")


def _holds(ids: Ids, row: int) -> bool:
    at = int(np.searchsorted(ids, row))
    return at < len(ids) and int(ids[at]) == row


def _where(query: VectorStoreQuery) -> tuple[str, list[object]] | None:
    """Return all that narrows a query as one condition in SQL; None where nothing does."""
    parts = [] if query.filters is None else [sql_filter(query.filters)]
    if query.node_ids:  # an index over a vector store passes an empty list always
        parts.append(("node_id IN (SELECT value FROM json_each(?))", [json.dumps(list(query.node_ids))]))
    if query.doc_ids is not None:
        listed = json.dumps(list(query.doc_ids))
        parts.append(("json_extract(metadata, '$.document_id') IN (SELECT value FROM json_each(?))", [listed]))
    if not parts:
        return None
    return " AND ".join(sql for sql, _ in parts), [one for _, parameters in parts for one in parameters]
