"""Search under a filter where a vector store offers a better one than its query: same nodes, same scores, a note."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode, VectorStoreQueryResult

from llama_index_agentic_kb.schema import FilterNode, matcher

__all__ = ["FilteredIndexRetriever", "FilteredSearch", "NotedNodes", "note_of", "until", "with_filtered_search"]

_CHROMA: Final = "ChromaVectorStore"


class FilteredSearch(Protocol):
    """What a vector store offers as its attribute ``filtered_search``; None there means that it can't."""

    def __call__(
        self, query: VectorStoreQuery, passes: Callable[[BaseNode], bool], *, deadline: float | None = None
    ) -> tuple[VectorStoreQueryResult, str]:
        """Find the nearest rows that match ``query.filters`` and pass the check.

        Args:
            query: With a vector, filters and how many rows are wanted.
            passes: Checks a node against the filter.
            deadline: ``time.monotonic()`` after which it should end.

        Returns:
            Nodes with the similarities that the store's own query gives, and a sentence on how they were found.
        """
        ...


class NotedNodes(list[NodeWithScore]):
    """Nodes, and what should be known of how they were found.

    Args:
        nodes: The nodes.
        note: A sentence.
    """

    def __init__(self, nodes: Iterable[NodeWithScore], note: str) -> None:
        super().__init__(nodes)
        self.note = note


def note_of(found: Any) -> str | None:
    """Give the note of what a retriever returned, if it has one."""
    return found.note if isinstance(found, NotedNodes) else None


class FilteredIndexRetriever(VectorIndexRetriever):
    """A ``VectorIndexRetriever`` whose store is searched by its ``FilteredSearch``.

    Args:
        plain: The retriever that it stands in for; its filters are set.
        filters: The same filters as a tree: each node is checked against it.
        search: The store's.
    """

    def __init__(self, plain: VectorIndexRetriever, filters: FilterNode, search: FilteredSearch) -> None:
        super().__init__(
            plain._index,  # noqa: SLF001 (core has no public names for a retriever's parts)
            similarity_top_k=plain.similarity_top_k,
            filters=plain._filters,  # noqa: SLF001
            callback_manager=plain.callback_manager,
            object_map=plain.object_map,
            embed_model=plain._embed_model,  # noqa: SLF001
            verbose=plain._verbose,  # noqa: SLF001
        )
        self._matches = matcher(filters)
        self._search = search
        self._deadline: float | None = None

    def until(self, deadline: float | None) -> Self:
        """Give a twin that begins nothing new after a deadline."""
        twin = copy.copy(self)
        twin._deadline = deadline  # noqa: SLF001 (a twin of ours)
        return twin

    def _get_nodes_with_embeddings(self, query_bundle_with_embeddings: QueryBundle) -> list[NodeWithScore]:
        if not query_bundle_with_embeddings.embedding:
            return super()._get_nodes_with_embeddings(query_bundle_with_embeddings)
        # Core's own way from the store's answer to nodes, with another way to the answer.
        searched = _Searched(self._vector_store, self._search, self._passes, self._deadline)
        twin = copy.copy(self)
        twin._vector_store = searched  # type: ignore[assignment]  # noqa: SLF001 (answers the one call made)
        nodes = VectorIndexRetriever._get_nodes_with_embeddings(twin, query_bundle_with_embeddings)  # noqa: SLF001
        return NotedNodes(nodes, searched.note)

    async def _aget_nodes_with_embeddings(self, query_bundle_with_embeddings: QueryBundle) -> list[NodeWithScore]:
        """Search on a thread: Chroma's client is sync."""
        return await asyncio.to_thread(self._get_nodes_with_embeddings, query_bundle_with_embeddings)

    def _passes(self, node: BaseNode) -> bool:
        return self._matches(node.metadata)


class _Searched:
    """A vector store during one search."""

    def __init__(
        self, store: Any, search: FilteredSearch, passes: Callable[[BaseNode], bool], deadline: float | None
    ) -> None:
        self.is_embedding_query = store.is_embedding_query
        self.note = ""
        self._search = search
        self._passes = passes
        self._deadline = deadline

    def query(self, query: VectorStoreQuery) -> VectorStoreQueryResult:
        result, self.note = self._search(query, self._passes, deadline=self._deadline)
        return result


def with_filtered_search(retriever: BaseRetriever, filters: FilterNode | None) -> BaseRetriever:
    """Give a retriever that uses its store's filtered search, where there is one and the search is a plain dense one.

    Args:
        retriever: An index's own.
        filters: The filter that was lowered for it; None where it has none.
    """
    if filters is None or type(retriever) is not VectorIndexRetriever:
        return retriever
    further = retriever._kwargs  # noqa: SLF001 (core has no public names for a retriever's parts)
    if further or retriever._vector_store_query_mode is not VectorStoreQueryMode.DEFAULT:  # noqa: SLF001
        return retriever
    search = _search_of(retriever._vector_store)  # noqa: SLF001
    return retriever if search is None else FilteredIndexRetriever(retriever, filters, search)


def _search_of(store: Any) -> FilteredSearch | None:
    if hasattr(type(store), "filtered_search"):
        offered: FilteredSearch | None = store.filtered_search
        return offered
    if type(store).__name__ != _CHROMA:
        return None
    from llama_index_agentic_kb.store.filtered_search import ChromaFilteredSearch  # noqa: PLC0415 (loads the store)

    search = ChromaFilteredSearch(store)
    return search if search.usable else None


def until(retriever: BaseRetriever, deadline: float | None) -> BaseRetriever:
    """Tell a retriever that can look at it when it has to be done; others are given as they are."""
    return retriever.until(deadline) if isinstance(retriever, FilteredIndexRetriever) else retriever
