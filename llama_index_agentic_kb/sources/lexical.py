"""Lexical search of a source: a BM25 index that is searched in addition to the retriever.

The index is passed by the caller, belongs to the store (a ``KnowledgeStore`` has one on disk for each source), or is
built in memory from the nodes of a ``VectorStoreIndex`` at the first search:

    nodes in the docstore       LlamaIndex's default store, FAISS, ...: compared by IDs and hashes at each search
    nodes in Chroma             compared by their number at each search, and by all IDs and hashes periodically
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import BaseNode, IndexNode, NodeWithScore
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.filters import lower
from llama_index_agentic_kb.search.lexical import LexicalIndex, LexicalSearch, NotIndexedError, lexical_document
from llama_index_agentic_kb.sources.index import with_request_timeouts
from llama_index_agentic_kb.sources.stores import is_chroma, kind_of

MAX_NODES: Final = 10_000
"""The maximum number of nodes that are indexed in memory without ``hybrid=True``."""

_LISTED_EVERY: Final = 30.0
"""Seconds after which a store's nodes are listed again if changes can't be detected cheaply; longer for slow listings,
so that listing takes at most about a twentieth of the time."""


def lexical_for(
    name: str,
    index: BaseIndex[Any] | None,
    *,
    hybrid: bool | LexicalSearch | None,
    retriever_kwargs: Mapping[str, Any],
) -> LexicalSearch | None:
    """Return the lexical search of a source; None for none.

    Args:
        name: The source's name.
        index: The source's index, if it has one.
        hybrid: A lexical search to use, True to require one, False for none, or None for one that is cheap to build.
        retriever_kwargs: Arguments of the index's retriever.

    Raises:
        ConfigurationError: ``hybrid`` is True, and no lexical index can be built.
    """
    if hybrid is False:
        return None
    why_not = _own_way(retriever_kwargs)
    if why_not is None and hybrid is not None and not isinstance(hybrid, bool):
        return hybrid
    kept: LexicalSearch | None = getattr(getattr(index, "vector_store", None), "lexical_search", None)
    if why_not is None and kept is not None:  # a knowledge store's own index on disk
        return kept
    if why_not is None and not isinstance(index, VectorStoreIndex):
        why_not = "the nodes of this kind of source can't be listed; give a lexical search"
    if (
        isinstance(index, VectorStoreIndex)
        and why_not is None
        and kind_of(index.vector_store).text_search(index.vector_store)
    ):
        return StoreTextSearch(index.vector_store)
    if isinstance(index, VectorStoreIndex) and why_not is None and (hybrid or _can_be_counted(index)):
        return _Bounded(_shared(index), None if hybrid else MAX_NODES)
    if hybrid is True:
        raise ConfigurationError(f"source {name!r}: hybrid=True is impossible: {why_not}")
    return None


def _own_way(retriever_kwargs: Mapping[str, Any]) -> str | None:
    given = {key: value for key, value in retriever_kwargs.items() if value is not None}
    if given.get("vector_store_query_mode") == VectorStoreQueryMode.DEFAULT:
        del given["vector_store_query_mode"]
    return f"{', '.join(sorted(given))} make the retriever search in a way of its own" if given else None


@dataclass(frozen=True)
class StoreTextSearch:
    """A vector store's own full-text search, as a ranked list beside that by vectors."""

    store: Any

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        """Find nodes by the words of a query; see ``LexicalSearch``."""
        kind, lowered = kind_of(self.store), None if filters is None else lower(filters)
        asked = VectorStoreQuery(query_str=query, similarity_top_k=top_k, sparse_top_k=top_k, filters=lowered)
        asked.mode = kind.text_search(self.store) or VectorStoreQueryMode.SPARSE
        found = kind.narrowed(self.store, filters).query(asked)
        scored = zip(found.nodes or (), found.similarities or (), strict=True)
        return [NodeWithScore(node=node, score=score) for node, score in scored]


@dataclass(frozen=True)
class _DocstoreNodes:
    """The nodes of an index whose text is in the docstore, not in the vector store. Deleted nodes are skipped."""

    index_struct: Any
    docstore: Any
    store: Any
    listed_cheaply: ClassVar[bool] = True
    """Whether ``hashes`` (content hashes by node ID) is fast enough to call at each search."""

    def count(self) -> int:
        return len(self.index_struct.nodes_dict)

    def hashes(self) -> dict[str, str]:
        # list() first: another thread may be inserting. Only the docstore in memory returns a hash in a microsecond.
        node_ids = list(self.index_struct.nodes_dict.values())
        known = isinstance(self.docstore, SimpleDocumentStore)
        return {node_id: (self.docstore.get_document_hash(node_id) or "") if known else "" for node_id in node_ids}

    def get(self, node_ids: Sequence[str]) -> list[BaseNode]:
        return list(self.docstore.get_nodes(list(node_ids), raise_error=False))

    def passing(self, nodes: Sequence[BaseNode], filters: FilterNode) -> set[str]:
        return kind_of(self.store).passing(self.store, nodes, filters)


@dataclass(frozen=True)
class _StoredNodes:
    """The nodes of a vector store that stores their text; ``count`` is None if counting is as slow as listing."""

    store: Any
    listed_cheaply: ClassVar[bool] = False

    def count(self) -> int | None:
        return int(self.store.client.count()) if is_chroma(self.store) else None

    def hashes(self) -> dict[str, str]:
        return {node.node_id: node.hash for node in kind_of(self.store).nodes(self.store, None)}

    def get(self, node_ids: Sequence[str]) -> list[BaseNode]:
        return list(kind_of(self.store).with_ids(self.store, node_ids))

    def passing(self, nodes: Sequence[BaseNode], filters: FilterNode) -> set[str]:
        return kind_of(self.store).passing(self.store, nodes, filters)


_Nodes: TypeAlias = _DocstoreNodes | _StoredNodes


def _nodes_of(index: VectorStoreIndex) -> _Nodes:
    if not index.vector_store.stores_text or index._store_nodes_override:  # noqa: SLF001 (no public name)
        return _DocstoreNodes(index.index_struct, index.docstore, index.vector_store)
    return _StoredNodes(with_request_timeouts(index.vector_store))


def _can_be_counted(index: VectorStoreIndex) -> bool:
    return isinstance(_nodes_of(index), _DocstoreNodes) or is_chroma(index.vector_store)


_indexed: weakref.WeakKeyDictionary[VectorStoreIndex, IndexedNodes] = weakref.WeakKeyDictionary()
_indexed_lock: Final = threading.Lock()


def _shared(index: VectorStoreIndex) -> IndexedNodes:
    """Return the lexical index of a LlamaIndex index, shared by all its sources and retrievers."""
    with _indexed_lock:
        if index not in _indexed:
            _indexed[index] = IndexedNodes(_nodes_of(index))
        return _indexed[index]


class IndexedNodes:
    """An in-memory BM25 index over the nodes of a LlamaIndex index, updated before searches if the nodes changed.

    The nodes of the hits are read from the store, so that they are current and deleted ones are left out.
    ``IndexNode`` objects, which point to other retrievers, are not in the BM25 index.
    """

    def __init__(self, nodes: _Nodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._index: LexicalIndex | None = None
        self._held: dict[str, str] = {}
        self._counted: int | None = None
        self._listed_at = self._listing_took = 0.0

    def search(self, query: str, top_k: int, filters: FilterNode | None, *, most: int | None) -> list[NodeWithScore]:
        """Find nodes by the words of a query; see ``LexicalSearch``.

        Raises:
            NotIndexedError: There are more nodes than ``most``.
        """
        hits = self._in_step(most).search(query, top_k, filters)
        found = self._nodes.get([hit.node_id for hit in hits])
        passed = None if filters is None else self._nodes.passing(found, filters)
        nodes = {node.node_id: node for node in found if passed is None or node.node_id in passed}
        return [NodeWithScore(node=nodes[hit.node_id], score=hit.score) for hit in hits if hit.node_id in nodes]

    def _in_step(self, most: int | None) -> LexicalIndex:
        with self._lock:
            count = self._nodes.count()
            if most is not None and count is not None and count > most:
                raise NotIndexedError(f"no lexical search: {count} nodes are more than {most}; hybrid=True makes it")
            aged = time.monotonic() - self._listed_at > max(_LISTED_EVERY, 20 * self._listing_took)
            if self._index is None or self._nodes.listed_cheaply or count != self._counted or aged:
                self._index = self._compared(self._index or LexicalIndex())
                self._counted = count
            return self._index

    def _compared(self, index: LexicalIndex) -> LexicalIndex:
        started = time.monotonic()
        hashes = self._nodes.hashes()
        self._listed_at = time.monotonic()
        self._listing_took = self._listed_at - started
        if hashes != self._held:
            changed = [node_id for node_id, known in hashes.items() if self._held.get(node_id) != known]
            # Only the retriever's search resolves index nodes: that may call a language model.
            plain = (node for node in self._nodes.get(changed) if not isinstance(node, IndexNode))
            index.update(map(lexical_document, plain), delete=self._held.keys() - hashes.keys())
            self._held = hashes
        return index


@dataclass(frozen=True)
class _Bounded:
    """One source's access to a shared index, with its maximum number of nodes."""

    indexed: IndexedNodes
    most: int | None

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        return self.indexed.search(query, top_k, filters, most=self.most)
