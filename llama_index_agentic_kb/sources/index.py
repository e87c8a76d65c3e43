"""Sources over a LlamaIndex index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.sources.filters import lower

__all__ = ["index_retriever", "query_embedding_model", "takes_filters"]


def index_retriever(
    index: BaseIndex[Any], filters: FilterNode | None, top_k: int | None, further: Mapping[str, Any] | None = None
) -> BaseRetriever:
    """Give an index's own retriever for one effective filter.

    An index whose ``as_retriever`` is agentic would search itself through itself: such a one offers
    ``as_plain_retriever``.
    """
    make = getattr(index, "as_plain_retriever", index.as_retriever)
    kwargs: dict[str, Any] = dict(further or {})
    if top_k is not None:
        kwargs["similarity_top_k"] = top_k
    if filters is not None:
        kwargs["filters"] = lower(filters)
    retriever: BaseRetriever = make(**kwargs)
    return retriever


def takes_filters(index: BaseIndex[Any]) -> bool:
    """Tell whether an index's retriever applies metadata filters; others ignore them silently."""
    return isinstance(index, VectorStoreIndex)


def query_embedding_model(retriever: BaseRetriever) -> BaseEmbedding | None:
    """Give the model with which a retriever would embed a query that comes without a vector; None if it needs none."""
    if not isinstance(retriever, VectorIndexRetriever):
        return None
    return retriever._embed_model if retriever._needs_embedding() else None  # noqa: SLF001 (no public name)


def has_native_async(retriever: BaseRetriever) -> bool:
    """Tell whether ``aretrieve`` really awaits, as far as it can be told from outside.

    Core's defaults run the sync method on the event loop: a retriever without ``_aretrieve``, and a vector store
    without ``aquery`` (Chroma's is sync underneath: 16 gathered queries blocked the loop for 164 ms, measured).
    """
    if isinstance(retriever, VectorIndexRetriever):
        store = retriever._vector_store  # noqa: SLF001 (no public name)
        return type(store).aquery is not BasePydanticVectorStore.aquery
    return type(retriever)._aretrieve is not BaseRetriever._aretrieve  # noqa: SLF001 (asks who overrides it)
