"""Sources over a LlamaIndex index: its retriever for one effective filter, and what can be known of it.

Where a vector store offers a better search under a filter than its query (``filtered_search``), that is used. Requests
to a Chroma server get an end: Chroma's HTTP client has no timeout (httpx with ``timeout=None``), so that a stopped
server would keep each thread that asks it. The user's client is left as it is; searches go through a twin of its store
that sends the same requests on the same connections, each with the time that its call has left.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from llama_index_agentic_kb._aio import call_deadline
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    FilterOperator,
    all_of,
    matcher,
)
from llama_index_agentic_kb.sources.filters import flat, is_chroma, lower, store_refusal

# ruff: noqa: SLF001 (core has no public names for the parts of its retrievers)

_KINDS: Final = {
    VectorStoreQueryMode.SPARSE: "lexical",
    VectorStoreQueryMode.TEXT_SEARCH: "lexical",
    VectorStoreQueryMode.HYBRID: "hybrid",
    VectorStoreQueryMode.SEMANTIC_HYBRID: "hybrid",
}


def index_retriever(
    index: BaseIndex[Any], filters: FilterNode | None, top_k: int | None, further: Mapping[str, Any]
) -> BaseRetriever:
    """Return an index's own retriever for one effective filter; one that searches better under it, where its store can.

    An index whose ``as_retriever`` is agentic would search itself through itself: such a one offers
    ``as_plain_retriever``.

    Raises:
        DeniedError: It should search some documents only, by their ids, and its store would search all.
    """
    if further.get("doc_ids") is not None and is_chroma(getattr(index, "vector_store", None)):
        raise DeniedError("Chroma ignores doc_ids, and would search everything: narrow it by filters=")
    make = getattr(index, "as_plain_retriever", index.as_retriever)
    kwargs: dict[str, Any] = dict(further)
    if top_k is not None:
        kwargs["similarity_top_k"] = top_k
    if filters is not None and isinstance(index, VectorStoreIndex) and type(index.vector_store) is SimpleVectorStore:
        kwargs.update(_for_simple_store(index.vector_store, filters))
    elif filters is not None:
        kwargs["filters"] = lower(filters)
    retriever: BaseRetriever = make(**kwargs)
    if isinstance(retriever, VectorIndexRetriever):  # made for us: a store of its own takes nothing from anybody
        retriever._vector_store = with_request_timeouts(retriever._vector_store)
        if filters is not None and type(retriever) is VectorIndexRetriever and _is_plainly_dense(retriever):
            search = _search_of(retriever._vector_store)
            return retriever if search is None else FilteredIndexRetriever(retriever, filters, search)
    return retriever


def _for_simple_store(store: SimpleVectorStore, filters: FilterNode) -> dict[str, Any]:
    """Return the arguments of a search in LlamaIndex's in-memory store under a filter.

    The store knows no groups in groups, lets documents without the key through ``!=``, and raises where one document's
    value can't be ordered. All this is left to the check of each returned node; for enough to be left, all are asked.
    """
    tree = flat(filters)
    parts = tree.filters if isinstance(tree, FilterGroup) else [tree]
    equals = (FilterOperator.EQ, FilterOperator.IN)
    simple = [part for part in parts if isinstance(part, Condition) and part.operator in equals]
    if len(simple) == len(parts):
        return {"filters": lower(tree)}
    pushed = all_of(*simple) if isinstance(tree, FilterGroup) and tree.logic is FilterLogic.AND else None
    everything = {"similarity_top_k": max(1, len(store.data.embedding_dict))}
    return everything if pushed is None else {**everything, "filters": lower(pushed)}


def refusal(index: BaseIndex[Any], filters: FilterNode | None) -> str | None:
    """Return why an index can't apply a filter; None where it can."""
    if filters is None:
        return None
    if not isinstance(index, VectorStoreIndex):
        return f"{type(index).__name__} ignores filters"
    return None if type(index.vector_store) is SimpleVectorStore else store_refusal(index.vector_store, filters)


class Traits(NamedTuple):
    """What can be known of a retriever.

    Args:
        kind: How it searches: "dense", "lexical" or "hybrid" in a store, else "retriever".
        embed_model: Embeds a query that has no vector; None if it needs no vector.
        scale: What retrievers share whose scores can be compared: embedding model and kind of store; None for none.
            Stores make different scores of one distance, and modes other than plain similarity rank by more than it.
        documents: The documents' ids that it is limited to; None where it is not limited.
        native_async: Whether ``aretrieve`` really awaits; see ``has_native_async``.
    """

    kind: str
    embed_model: BaseEmbedding | None
    scale: Hashable | None
    documents: Collection[str] | None
    native_async: bool


def traits_of(retriever: BaseRetriever, native_async: bool | None) -> Traits:
    """Return what can be known of a retriever, as far as can be seen from outside."""
    native_async = has_native_async(retriever) if native_async is None else native_async
    if not isinstance(retriever, VectorIndexRetriever):
        return Traits("retriever", None, None, None, native_async)
    mode, store = retriever._vector_store_query_mode, retriever._vector_store
    model = retriever._embed_model if retriever._needs_embedding() else None
    compares = model is not None and mode is VectorStoreQueryMode.DEFAULT
    scale = (id(model), store.class_name()) if compares else None
    return Traits(_KINDS.get(mode, "dense"), model, scale, retriever._doc_ids, native_async)


def has_native_async(retriever: BaseRetriever) -> bool:
    """Return whether ``aretrieve`` really awaits, as far as can be seen from outside.

    Core's defaults run the sync method on the event loop: a retriever without ``_aretrieve``, and a vector store
    without ``aquery`` (Chroma's is sync underneath: 16 gathered queries blocked the loop for 164 ms, measured).
    """
    if isinstance(retriever, VectorIndexRetriever):
        return type(retriever._vector_store).aquery is not BasePydanticVectorStore.aquery
    if isinstance(retriever, QueryFusionRetriever):  # as native as what it fuses
        return all(has_native_async(inner) for inner in retriever._retrievers)
    return type(retriever)._aretrieve is not BaseRetriever._aretrieve


# -- filtered search of a store ---------------------------------------------------------------------------------------


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
            Nodes with the similarities of the store's own query, and a sentence on how they were found.
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


class FilteredIndexRetriever(VectorIndexRetriever):
    """A ``VectorIndexRetriever`` whose store is searched by its ``FilteredSearch``.

    Args:
        plain: The retriever that it stands in for; its filters are set.
        filters: The same filters as a tree: each node is checked against it.
        search: The store's.
    """

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
        # Core's own way from the store's answer to nodes, with another way to the answer.
        searched = _StoreTwin(self._vector_store, self._search, lambda node: self._matches(node.metadata))
        twin = copy.copy(self)
        twin._vector_store = searched  # type: ignore[assignment]  # answers the one call made
        nodes = VectorIndexRetriever._get_nodes_with_embeddings(twin, query_bundle_with_embeddings)
        return NotedNodes(nodes, searched.note)

    async def _aget_nodes_with_embeddings(self, query_bundle_with_embeddings: QueryBundle) -> list[NodeWithScore]:
        """Search on a thread: Chroma's client is sync."""
        return await asyncio.to_thread(self._get_nodes_with_embeddings, query_bundle_with_embeddings)


class _StoreTwin:
    """A vector store during one search, which begins nothing new after its call's deadline."""

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


def _is_plainly_dense(retriever: VectorIndexRetriever) -> bool:
    return not retriever._kwargs and retriever._vector_store_query_mode is VectorStoreQueryMode.DEFAULT


def _search_of(store: Any) -> FilteredSearch | None:
    if hasattr(type(store), "filtered_search"):
        offered: FilteredSearch | None = store.filtered_search
        return offered
    if type(store).__name__ != "ChromaVectorStore":  # a subclass may search in a way of its own
        return None
    from llama_index_agentic_kb.store.chroma_search import ChromaFilteredSearch  # noqa: PLC0415 (loads the store)

    search = ChromaFilteredSearch(store)
    return search if search.usable else None


# -- timeouts of requests to a Chroma server --------------------------------------------------------------------------

WITHOUT_DEADLINE: Final = 60.0
"""Seconds of a request in a call that has no deadline."""

MARGIN: Final = 0.25
"""Seconds after its call's deadline at which a request ends: whoever waits sees the deadline first."""

Store = TypeVar("Store")


def with_request_timeouts(store: Store) -> Store:
    """Return a twin of a vector store over Chroma's HTTP client; any other store, and one with a timeout, as it is."""
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
    """An ``httpx.Client`` whose requests have a timeout.

    Args:
        session: Sends them.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def request(self, *args: Any, **kwargs: Any) -> Any:
        """Send a request with the time that its call has left; see ``httpx.Client.request``."""
        deadline = call_deadline()
        left = WITHOUT_DEADLINE if deadline is None else max(0.0, deadline - time.monotonic()) + MARGIN
        return self._session.request(*args, **{"timeout": left, **kwargs})
