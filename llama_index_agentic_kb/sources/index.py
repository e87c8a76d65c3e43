"""Retrievers of LlamaIndex indexes for one effective filter, their detected properties, and the kinds of stores."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from functools import lru_cache
from typing import Any, Final, NamedTuple

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQueryMode

from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.filters import lower
from llama_index_agentic_kb.sources.elastic import ElasticsearchKind, OpenSearchKind
from llama_index_agentic_kb.sources.stores import (
    ChromaKind,
    DuckKind,
    LanceKind,
    MilvusKind,
    PostgresKind,
    QdrantKind,
    SearchingKind,
    SimpleKind,
    Store,
    StoreKind,
    UnknownKind,
)

# ruff: noqa: SLF001 (core has no public names for the parts of its retrievers)

_ADAPTERS: Final[dict[str, type[StoreKind[Any]]]] = {
    "ChromaVectorStore": ChromaKind,
    "DuckDBVectorStore": DuckKind,
    "ElasticsearchStore": ElasticsearchKind,
    "LanceDBVectorStore": LanceKind,
    "MilvusVectorStore": MilvusKind,
    "OpensearchVectorStore": OpenSearchKind,
    "PGVectorStore": PostgresKind,
    "QdrantVectorStore": QdrantKind,
}


@lru_cache(maxsize=256)
def _kind_of(store: type) -> type[StoreKind[Any]]:
    kind: type[StoreKind[Any]] = SearchingKind if hasattr(store, "filtered_search") else UnknownKind
    if store is SimpleVectorStore:  # a subclass may search in another way
        kind = SimpleKind
    for base in store.__mro__:
        kind = _ADAPTERS.get(base.__name__, kind)
    return kind


def kind_of(store: Store) -> StoreKind[Store]:
    """Return a store as one of its kind, or of the adapter that it inherits from, without importing that.

    None, which an index without a store has, is of no known kind.
    """
    return _kind_of(type(store))(store)


_KINDS: Final = {
    VectorStoreQueryMode.SPARSE: "lexical",
    VectorStoreQueryMode.TEXT_SEARCH: "lexical",
    VectorStoreQueryMode.HYBRID: "hybrid",
    VectorStoreQueryMode.SEMANTIC_HYBRID: "hybrid",
}


def index_retriever(
    index: BaseIndex[Any], filters: FilterNode | None, top_k: int | None, further: JsonMapping
) -> BaseRetriever:
    """Return a new retriever of an index that searches only what one effective filter admits.

    ``as_plain_retriever`` is preferred to ``as_retriever``: an index whose ``as_retriever`` is agentic would otherwise
    call itself.

    Raises:
        DeniedError: ``doc_ids`` are set, and the index's store ignores them; or it is not known how it would filter.
    """
    given: Any = getattr(index, "vector_store", None)
    kind = kind_of(given)
    if kind.ignores_doc_ids and further.get("doc_ids") is not None:
        raise DeniedError(f"{kind.name} ignores doc_ids, and would search everything: narrow it by filters=")
    make = getattr(index, "as_plain_retriever", index.as_retriever)
    kwargs: JsonObject = dict(further)
    if top_k is not None:
        kwargs["similarity_top_k"] = top_k
    if filters is not None:
        kwargs["filters"] = lower(filters)
    retriever: BaseRetriever = make(**kwargs)
    if isinstance(retriever, VectorIndexRetriever):  # created here: replacing its store affects nobody else
        store = retriever._vector_store
        own = kind if store is given else kind_of(store)
        retriever._vector_store = own.narrowed(filters)
    elif filters is not None and kind.needs_copy:
        raise DeniedError(
            f"{type(retriever).__name__} may use an adapter of {kind.name} that can't be trusted with filters"
        )
    return retriever


class Traits(NamedTuple):
    """The detected properties of a retriever."""

    kind: str  # "dense", "lexical" or "hybrid" in a store, else "retriever"
    embed_model: BaseEmbedding | None  # embeds a query without a vector; None if no vector is needed
    scale: Hashable | None
    """A key shared by retrievers with comparable scores: embedding model and store class; None if scores can't be
    compared. Stores compute different scores from a distance, and other query modes rank by more than it."""
    documents: Collection[str] | None  # the IDs of those to which the retriever is limited; None if unlimited
    native_async: bool  # whether ``aretrieve`` really awaits; see ``has_native_async``


def traits_of(retriever: BaseRetriever, native_async: bool | None = None) -> Traits:
    """Return the properties of a retriever; ``native_async`` is detected if None."""
    if native_async is None:
        native_async = has_native_async(retriever)
    if not isinstance(retriever, VectorIndexRetriever):
        return Traits("retriever", None, None, None, native_async)
    mode, store = retriever._vector_store_query_mode, retriever._vector_store
    model = retriever._embed_model if retriever._needs_embedding() else None
    compares = model is not None and mode is VectorStoreQueryMode.DEFAULT
    scale = (id(model), store.class_name()) if compares else None
    return Traits(_KINDS.get(mode, "dense"), model, scale, retriever._doc_ids, native_async)


CHANGEABLE: Final = (VectorIndexRetriever, QueryFusionRetriever)
"""Retrievers whose async methods await if those of their parts do, which their users may replace at any time."""


def has_native_async(retriever: BaseRetriever) -> bool:
    """Return whether ``aretrieve`` really awaits, as far as can be detected.

    LlamaIndex runs the sync method on the event loop for a retriever without ``_aretrieve`` and for a vector store
    without ``aquery`` (Chroma's: 16 gathered queries blocked the loop for 164 ms, measured).
    """
    if isinstance(retriever, VectorIndexRetriever):
        store = retriever._vector_store
        return _kind_of(type(store)).has_native_async(store)
    if isinstance(retriever, QueryFusionRetriever):  # as native as what it fuses
        return all(has_native_async(inner) for inner in retriever._retrievers)
    return type(retriever)._aretrieve is not BaseRetriever._aretrieve
