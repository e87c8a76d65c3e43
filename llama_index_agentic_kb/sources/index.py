"""Retrievers of LlamaIndex indexes for one effective filter, and their detected properties.

If a vector store offers a better filtered search than its query (``filtered_search``), that is used. Requests to a
Chroma server get a timeout: Chroma's HTTP client has none (httpx with ``timeout=None``), so that a stopped server would
block each calling thread. The user's client is unchanged; searches use a copy of its store that sends the same requests
over the same connections, each with the time remaining for its call.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from llama_index_agentic_kb._aio import call_deadline
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import FilterNode, matcher
from llama_index_agentic_kb.search.filters import lower
from llama_index_agentic_kb.sources.stores import kind_of

# ruff: noqa: SLF001 (core has no public names for the parts of its retrievers)

_KINDS: Final = {
    VectorStoreQueryMode.SPARSE: "lexical",
    VectorStoreQueryMode.TEXT_SEARCH: "lexical",
    VectorStoreQueryMode.HYBRID: "hybrid",
    VectorStoreQueryMode.SEMANTIC_HYBRID: "hybrid",
}


def index_retriever(
    index: BaseIndex[Any], filters: FilterNode | None, top_k: int | None, further: JsonMapping
) -> BaseRetriever:
    """Return an index's retriever for one effective filter, with a better filtered search if its store offers one.

    ``as_plain_retriever`` is preferred to ``as_retriever``: an index whose ``as_retriever`` is agentic would otherwise
    call itself.

    Raises:
        DeniedError: ``doc_ids`` are set, and the index's store ignores them; or it is not known how it would filter.
    """
    kind = kind_of(getattr(index, "vector_store", None))
    if further.get("doc_ids") is not None and kind.ignores_doc_ids:
        raise DeniedError(f"{kind.name} ignores doc_ids, and would search everything: narrow it by filters=")
    make = getattr(index, "as_plain_retriever", index.as_retriever)
    kwargs: JsonObject = dict(further)
    if top_k is not None:
        kwargs["similarity_top_k"] = top_k
    if filters is not None:
        kwargs["filters"] = lower(filters)
    retriever: BaseRetriever = make(**kwargs)
    if isinstance(retriever, VectorIndexRetriever):  # created here: replacing its store affects nobody else
        retriever._vector_store = kind.narrowed(with_request_timeouts(retriever._vector_store), filters)
        is_dense = retriever._vector_store_query_mode is VectorStoreQueryMode.DEFAULT and not retriever._kwargs
        if filters is not None and type(retriever) is VectorIndexRetriever and is_dense:
            search = _search_of(retriever._vector_store)
            return retriever if search is None else FilteredIndexRetriever(retriever, filters, search)
    elif filters is not None and kind.needs_copy:
        raise DeniedError(
            f"{type(retriever).__name__} may use an adapter of {kind.name} that can't be trusted with filters"
        )
    return retriever


def refusal(index: BaseIndex[Any], filters: FilterNode | None) -> str | None:
    """Return why an index can't apply a filter; None if it can."""
    if filters is None:
        return None
    if not isinstance(index, VectorStoreIndex):
        return f"{type(index).__name__} ignores filters"
    return kind_of(index.vector_store).refusal(index.vector_store, filters)


class Traits(NamedTuple):
    """The detected properties of a retriever."""

    kind: str  # "dense", "lexical" or "hybrid" in a store, else "retriever"
    embed_model: BaseEmbedding | None  # embeds a query without a vector; None if no vector is needed
    scale: Hashable | None
    """A key shared by retrievers with comparable scores: embedding model and store class; None if scores can't be
    compared. Stores compute different scores from a distance, and other query modes rank by more than it."""
    documents: Collection[str] | None  # the IDs of those to which the retriever is limited; None if unlimited
    native_async: bool  # whether ``aretrieve`` really awaits; see ``has_native_async``


def traits_of(retriever: BaseRetriever, native_async: bool | None) -> Traits:
    """Return the properties of a retriever; ``native_async`` is detected if None."""
    native_async = has_native_async(retriever) if native_async is None else native_async
    if not isinstance(retriever, VectorIndexRetriever):
        return Traits("retriever", None, None, None, native_async)
    mode, store = retriever._vector_store_query_mode, retriever._vector_store
    model = retriever._embed_model if retriever._needs_embedding() else None
    compares = model is not None and mode is VectorStoreQueryMode.DEFAULT
    scale = (id(model), store.class_name()) if compares else None
    return Traits(_KINDS.get(mode, "dense"), model, scale, retriever._doc_ids, native_async)


def has_native_async(retriever: BaseRetriever) -> bool:
    """Return whether ``aretrieve`` really awaits, as far as can be detected.

    LlamaIndex runs the sync method on the event loop for a retriever without ``_aretrieve`` and for a vector store
    without ``aquery`` (Chroma's: 16 gathered queries blocked the loop for 164 ms, measured).
    """
    if isinstance(retriever, FilteredIndexRetriever):
        return False  # its search is sync
    if isinstance(retriever, VectorIndexRetriever):
        store = retriever._vector_store
        return type(store).aquery is not BasePydanticVectorStore.aquery and kind_of(store).has_async_client(store)
    if isinstance(retriever, QueryFusionRetriever):  # as native as what it fuses
        return all(has_native_async(inner) for inner in retriever._retrievers)
    return type(retriever)._aretrieve is not BaseRetriever._aretrieve


# -- filtered search of a store ---------------------------------------------------------------------------------------


class FilteredSearch(Protocol):
    """The type of a vector store's attribute ``filtered_search``; None if the store has no such search."""

    def __call__(
        self, query: VectorStoreQuery, passes: Callable[[BaseNode], bool], *, deadline: float | None = None
    ) -> tuple[VectorStoreQueryResult, str]:
        """Find the nearest rows that match ``query.filters`` and pass the check.

        Args:
            query: The query with a vector, filters and the number of rows.
            passes: Checks a node against the filter.
            deadline: The ``time.monotonic()`` value at which the search should stop.

        Returns:
            The nodes with similarities as in the store's own query, and a sentence on how they were found.
        """
        ...


class NotedNodes(list[NodeWithScore]):
    """Nodes with a note on how they were found: a sentence for the activity log."""

    def __init__(self, nodes: Iterable[NodeWithScore], note: str) -> None:
        super().__init__(nodes)
        self.note = note


class FilteredIndexRetriever(VectorIndexRetriever):
    """A ``VectorIndexRetriever`` whose store is searched by its ``FilteredSearch``, and each node checked."""

    def __init__(self, plain: VectorIndexRetriever, filters: FilterNode, search: FilteredSearch) -> None:
        super().__init__(
            plain._index,
            similarity_top_k=plain.similarity_top_k,
            filters=plain._filters,
            callback_manager=plain.callback_manager,
            object_map=plain.object_map,
            embed_model=plain._embed_model,
            verbose=plain._verbose,
        )
        self._matches = matcher(filters)
        self._search = search

    def _get_nodes_with_embeddings(self, query_bundle_with_embeddings: QueryBundle) -> list[NodeWithScore]:
        if not query_bundle_with_embeddings.embedding:
            return super()._get_nodes_with_embeddings(query_bundle_with_embeddings)
        # LlamaIndex's own conversion of the store's answer to nodes, with another search.
        searched = _StoreTwin(self._vector_store, self._search, lambda node: self._matches(node.metadata))
        twin = copy.copy(self)
        twin._vector_store = searched  # type: ignore[assignment]  # answers the one call made
        nodes = VectorIndexRetriever._get_nodes_with_embeddings(twin, query_bundle_with_embeddings)
        return NotedNodes(nodes, searched.note)

    async def _aget_nodes_with_embeddings(self, query_bundle_with_embeddings: QueryBundle) -> list[NodeWithScore]:
        """Search on a thread: Chroma's client is sync."""
        return await asyncio.to_thread(self._get_nodes_with_embeddings, query_bundle_with_embeddings)


class _StoreTwin:
    """A stand-in for a vector store during one filtered search, to which it passes the call's deadline."""

    def __init__(
        self, store: BasePydanticVectorStore, search: FilteredSearch, passes: Callable[[BaseNode], bool]
    ) -> None:
        self.is_embedding_query = store.is_embedding_query
        self.note = ""
        self._search = search
        self._passes = passes

    def query(self, query: VectorStoreQuery) -> VectorStoreQueryResult:
        result, self.note = self._search(query, self._passes, deadline=call_deadline())
        return result


def _search_of(store: Any) -> FilteredSearch | None:
    if hasattr(type(store), "filtered_search"):
        offered: FilteredSearch | None = store.filtered_search
        return offered
    if type(store).__name__ != "ChromaVectorStore":  # a subclass may override the search
        return None
    from llama_index_agentic_kb.sources.chroma_search import ChromaFilteredSearch  # noqa: PLC0415 (loads the store)

    search = ChromaFilteredSearch(store)
    return search if search.usable else None


# -- timeouts of requests to a Chroma server --------------------------------------------------------------------------

WITHOUT_DEADLINE: Final = 60.0
"""The timeout, in seconds, of a request whose call has no deadline."""

MARGIN: Final = 0.25
"""Seconds between a call's deadline and its request's timeout, so that the caller sees the deadline error first."""

Store = TypeVar("Store")


def with_request_timeouts(store: Store) -> Store:
    """Return a copy, with timeouts, of a store that uses Chroma's HTTP client without one; other stores unchanged."""
    collection: Any = getattr(store, "_collection", None)
    server = getattr(collection, "_client", None)
    timeout = getattr(getattr(server, "_session", None), "timeout", None)
    if timeout is None or getattr(timeout, "read", 0) is not None or not hasattr(store, "model_copy"):
        return store
    timed_server: Any = copy.copy(server)
    timed_server._session = _TimedSession(timed_server._session)
    timed_collection = copy.copy(collection)
    timed_collection._client = timed_server
    twin: Any = store.model_copy()
    twin._collection = timed_collection
    return twin  # type: ignore[no-any-return]


class _TimedSession:
    """An ``httpx.Client`` whose requests have a timeout."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def request(self, *args: Any, **kwargs: Any) -> Any:
        """Send a request with the remaining time of its call as timeout; see ``httpx.Client.request``."""
        deadline = call_deadline()
        left = WITHOUT_DEADLINE if deadline is None else max(0.0, deadline - time.monotonic()) + MARGIN
        return self._session.request(*args, **{"timeout": left, **kwargs})
