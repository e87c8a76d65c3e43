"""Lexical search of a source: a BM25 index that is searched in addition to the retriever.

The index is passed by the caller, belongs to the store (a ``KnowledgeStore`` has one on disk for each source), or is
built in memory from the nodes of a ``VectorStoreIndex`` at the first search:

    nodes in the docstore       LlamaIndex's default store, FAISS, ...: compared by IDs and hashes in each request
    nodes in Chroma             compared by their number in each request, and by all IDs and hashes periodically
    nodes in another store      only if hybrid=True: compared by all IDs and hashes periodically

A store that was made with a full-text search of its own (PostgreSQL's tsvector, sparse vectors in Qdrant) is asked by
that instead.

This happens automatically for up to 10,000 nodes, which takes seconds; ``hybrid=True`` allows any number. A source
whose retriever has special arguments (a ``vector_store_query_mode``, ``doc_ids``, ``vector_store_kwargs``) has no
lexical search: it may use the store's own hybrid search, or a restriction that lexical search would bypass.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Final

from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import BaseNode, IndexNode, NodeWithScore
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode

from llama_index_agentic_kb._types import JsonMapping
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.filters import lower
from llama_index_agentic_kb.search.lexical import LexicalIndex, LexicalSearch, NotIndexedError, lexical_document
from llama_index_agentic_kb.sources.index import kind_of
from llama_index_agentic_kb.sources.stores import ChromaKind

MAX_NODES: Final = 10_000
"""The maximum number of nodes that are indexed in memory without ``hybrid=True``."""

_LISTED_EVERY: Final = 30.0
"""Seconds after which a store's nodes are listed again if changes can't be detected cheaply; longer for slow listings,
so that listing takes at most about a twentieth of the time."""


def lexical_for(
    name: str, index: BaseIndex[Any] | None, *, hybrid: bool | LexicalSearch | None, retriever_kwargs: JsonMapping
) -> LexicalSearch | None:
    """Return the lexical search of a source; None for none.

    ``hybrid`` is a lexical search to use, True to require one, which may raise ``ConfigurationError``, False for none,
    or None for one that is cheap to build.
    """
    if hybrid is False:
        return None
    default = ("vector_store_query_mode", VectorStoreQueryMode.DEFAULT)
    own_way = [key for key, value in retriever_kwargs.items() if value is not None and (key, value) != default]
    if own_way:
        why_not = f"{', '.join(sorted(own_way))} make the retriever search in a way of its own"
    elif hybrid is not None and hybrid is not True:
        return hybrid
    elif (kept := getattr(getattr(index, "vector_store", None), "lexical_search", None)) is not None:
        return kept  # type: ignore[no-any-return]  # a knowledge store's own index on disk
    elif not isinstance(index, VectorStoreIndex):
        why_not = "the nodes of this kind of source can't be listed; give a lexical search"
    else:
        return _of_index(index, every=hybrid is True)
    if hybrid is True:
        raise ConfigurationError(f"source {name!r}: hybrid=True is impossible: {why_not}")
    return None


def _of_index(index: VectorStoreIndex, *, every: bool) -> LexicalSearch | None:
    """Return the search of an index's own store, or one by an index in memory, which all its sources share."""
    store = index.vector_store
    kind = kind_of(store)
    if kind.text_search:
        return StoreTextSearch(index)
    if not (every or _in_docstore(index) or isinstance(kind, ChromaKind)):
        return None
    with _indexed_lock:
        if index not in _indexed:
            _indexed[index] = IndexedNodes(index)
        return IndexSearch(_indexed[index], None if every else MAX_NODES)


@dataclass(frozen=True)
class StoreTextSearch:
    """Searches by a vector store's own full-text search; its ranked list is fused with that of the vector search."""

    index: VectorStoreIndex  # whose store may be replaced

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        """Find nodes by the words of a query; see ``LexicalSearch``."""
        kind, lowered = kind_of(self.index.vector_store), None if filters is None else lower(filters)
        asked = VectorStoreQuery(query_str=query, similarity_top_k=top_k, sparse_top_k=top_k, filters=lowered)
        asked.mode = kind.text_search or VectorStoreQueryMode.SPARSE
        found = kind.narrowed(filters).query(asked)
        scored = zip(found.nodes or (), found.similarities or (), strict=True)
        return [NodeWithScore(node=node, score=score) for node, score in scored]


class IndexedNodes:
    """An in-memory BM25 index over the nodes of a LlamaIndex index, updated before searches if the nodes changed.

    It is made anew if the index's store, docstore or struct was replaced. The nodes of the hits are read from the
    store, so that they are current and deleted ones are left out. ``IndexNode`` objects, which point to other
    retrievers, are not in the BM25 index.
    """

    def __init__(self, index: VectorStoreIndex) -> None:
        self._of = weakref.ref(index)
        self._lock = threading.Lock()
        self._read(index)

    def _read(self, index: VectorStoreIndex) -> None:
        self._parts = index.vector_store, index.docstore, index.index_struct
        self._kind = kind_of(index.vector_store)
        self._docstore = index.docstore if _in_docstore(index) else None
        self._ids = index.index_struct.nodes_dict
        self._index: LexicalIndex | None = None
        self._held: dict[str, str] = {}
        self._counted: int | None = None
        self._listed_at = self._listing_took = 0.0

    def search(self, index: LexicalIndex, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        """Find nodes by the words of a query in the index that ``in_step`` has returned."""
        hits = index.search(query, top_k, filters)
        found = self._nodes([hit.node_id for hit in hits])
        passed = None if filters is None else self._kind.passing(found, filters)
        nodes = {node.node_id: node for node in found if passed is None or node.node_id in passed}
        return [NodeWithScore(node=nodes[hit.node_id], score=hit.score) for hit in hits if hit.node_id in nodes]

    def _nodes(self, node_ids: list[str]) -> list[BaseNode]:
        if self._docstore is not None:
            return list(self._docstore.get_nodes(node_ids, raise_error=False))
        return list(self._kind.with_ids(node_ids))

    def in_step(self, most: int | None) -> LexicalIndex:
        """Return the updated index; raise ``NotIndexedError`` if there are more nodes than ``most``."""
        with self._lock:
            of = self._of()
            if of is not None and not all(map(is_, self._parts, (of.vector_store, of.docstore, of.index_struct))):
                self._read(of)
            count = None  # where counting is as slow as listing
            if self._docstore is not None:
                count = len(self._ids)
            elif isinstance(self._kind, ChromaKind):
                count = int(self._kind.store.client.count())
            if most is not None and count is not None and count > most:
                raise NotIndexedError(f"no lexical search: {count} nodes are more than {most}; hybrid=True makes it")
            aged = time.monotonic() - self._listed_at > max(_LISTED_EVERY, 20 * self._listing_took)
            if self._index is None or self._docstore is not None or count != self._counted or aged:
                self._index = self._compared(self._index or LexicalIndex())
                self._counted = count
            return self._index

    def _hashes(self) -> dict[str, str]:
        """Return the content hash of each node by its ID."""
        if self._docstore is None:
            return {node.node_id: node.hash for node in self._kind.nodes(None)}
        # list() first: another thread may be inserting. Only the docstore in memory returns a hash in a microsecond.
        hash_of = self._docstore.get_document_hash if isinstance(self._docstore, SimpleDocumentStore) else None
        return {node_id: (hash_of and hash_of(node_id)) or "" for node_id in list(self._ids.values())}

    def _compared(self, index: LexicalIndex) -> LexicalIndex:
        started = time.monotonic()
        hashes = self._hashes()
        self._listed_at = time.monotonic()
        self._listing_took = self._listed_at - started
        if hashes != self._held:
            changed = [node_id for node_id, known in hashes.items() if self._held.get(node_id) != known]
            # Only the retriever's search resolves index nodes: that may call a language model.
            plain = (node for node in self._nodes(changed) if not isinstance(node, IndexNode))
            index.update(map(lexical_document, plain), delete=self._held.keys() - hashes.keys())
            self._held = hashes
        return index


def _in_docstore(index: VectorStoreIndex) -> bool:
    return not index.vector_store.stores_text or index._store_nodes_override  # noqa: SLF001 (no public name)


@dataclass(eq=False)
class IndexSearch:
    """One source's access to a shared index, with its maximum number of nodes.

    Each request has a copy, whose first search compares the index with its store.
    """

    indexed: IndexedNodes
    most: int | None
    _index: LexicalIndex | None = field(init=False, default=None)

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        """Find nodes by the words of a query; see ``LexicalSearch``."""
        if self._index is None:
            self._index = self.indexed.in_step(self.most)
        return self.indexed.search(self._index, query, top_k, filters)


_indexed: weakref.WeakKeyDictionary[VectorStoreIndex, IndexedNodes] = weakref.WeakKeyDictionary()
_indexed_lock: Final = threading.Lock()
