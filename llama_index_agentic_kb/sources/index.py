"""Sources over a LlamaIndex index."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryMode

from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator, all_of
from llama_index_agentic_kb.sources.filtered import with_filtered_search
from llama_index_agentic_kb.sources.filters import flat, is_chroma, lower, store_refusal
from llama_index_agentic_kb.sources.request_timeouts import with_request_timeouts

__all__ = [
    "has_native_async",
    "index_retriever",
    "narrowed_by_ids",
    "query_embedding_model",
    "refusal",
    "score_scale",
    "search_kind",
]

_KINDS: Final = {
    VectorStoreQueryMode.SPARSE: "lexical",
    VectorStoreQueryMode.TEXT_SEARCH: "lexical",
    VectorStoreQueryMode.HYBRID: "hybrid",
    VectorStoreQueryMode.SEMANTIC_HYBRID: "hybrid",
}
_SIMPLE: Final = (FilterOperator.EQ, FilterOperator.IN)


def index_retriever(
    index: BaseIndex[Any], filters: FilterNode | None, top_k: int | None, further: Mapping[str, Any] | None = None
) -> BaseRetriever:
    """Give an index's own retriever for one effective filter; one that searches better under it, where its store can.

    An index whose ``as_retriever`` is agentic would search itself through itself: such a one offers
    ``as_plain_retriever``.

    Raises:
        DeniedError: It is told to search some documents only, by their ids, and its store would search all.
    """
    if (further or {}).get("doc_ids") is not None and is_chroma(getattr(index, "vector_store", None)):
        raise DeniedError("Chroma ignores doc_ids, and would search everything: narrow it by filters=")
    make = getattr(index, "as_plain_retriever", index.as_retriever)
    kwargs: dict[str, Any] = dict(further or {})
    if top_k is not None:
        kwargs["similarity_top_k"] = top_k
    if filters is not None and isinstance(index, VectorStoreIndex) and type(index.vector_store) is SimpleVectorStore:
        kwargs.update(_for_simple_store(index.vector_store, filters))
    elif filters is not None:
        kwargs["filters"] = lower(filters)
    retriever: BaseRetriever = make(**kwargs)
    if isinstance(retriever, VectorIndexRetriever):  # made for us: a store of its own takes nothing from anybody
        retriever._vector_store = with_request_timeouts(retriever._vector_store)  # noqa: SLF001 (no public name)
    return with_filtered_search(retriever, filters)


def _for_simple_store(store: SimpleVectorStore, filters: FilterNode) -> dict[str, Any]:
    """Give the arguments of a search in LlamaIndex's in-memory store under a filter.

    The store knows no groups in groups, lets documents without the key through ``!=``, and raises where one document's
    value can't be ordered. All this is left to the check of each returned node; for enough to be left, all are asked.
    """
    tree = flat(filters)
    if _is_simple(tree) or (isinstance(tree, FilterGroup) and all(map(_is_simple, tree.filters))):
        return {"filters": lower(tree)}
    parts = tree.filters if isinstance(tree, FilterGroup) and tree.logic is FilterLogic.AND else []
    pushed = all_of(*filter(_is_simple, parts))
    everything = {"similarity_top_k": max(1, len(store.data.embedding_dict))}
    return everything if pushed is None else {**everything, "filters": lower(pushed)}


def _is_simple(tree: FilterNode) -> bool:
    return isinstance(tree, Condition) and tree.operator in _SIMPLE


def refusal(index: BaseIndex[Any], filters: FilterNode | None) -> str | None:
    """Tell why an index can't apply a filter; None where it can."""
    if filters is None:
        return None
    if not isinstance(index, VectorStoreIndex):
        return f"{type(index).__name__} ignores filters"
    return None if type(index.vector_store) is SimpleVectorStore else store_refusal(index.vector_store, filters)


def query_embedding_model(retriever: BaseRetriever) -> BaseEmbedding | None:
    """Give the model with which a retriever would embed a query that comes without a vector; None if it needs none."""
    if not isinstance(retriever, VectorIndexRetriever):
        return None
    return retriever._embed_model if retriever._needs_embedding() else None  # noqa: SLF001 (no public name)


def narrowed_by_ids(retriever: BaseRetriever) -> Callable[[BaseNode], bool] | None:
    """Give the check of what an index's retriever was told to find only, by its documents' ids: many stores ignore it.

    Returns:
        None where it was told nothing of the kind.
    """
    documents = retriever._doc_ids if isinstance(retriever, VectorIndexRetriever) else None  # noqa: SLF001 (no public name)
    return None if documents is None else lambda node: node.ref_doc_id in documents


def score_scale(retriever: BaseRetriever) -> Hashable | None:
    """Give what retrievers share whose scores can be compared: embedding model and kind of store; None for none.

    Stores make different scores of one distance, and modes other than plain similarity rank by more than the score.
    """
    model = query_embedding_model(retriever)
    if model is None or not isinstance(retriever, VectorIndexRetriever):
        return None
    mode = retriever._vector_store_query_mode  # noqa: SLF001 (no public name)
    kind = retriever._vector_store.class_name()  # noqa: SLF001
    return (id(model), kind) if mode is VectorStoreQueryMode.DEFAULT else None


def search_kind(retriever: BaseRetriever) -> str:
    """Name the way in which a retriever searches: "dense", "lexical" or "hybrid" in a store, else "retriever"."""
    if not isinstance(retriever, VectorIndexRetriever):
        return "retriever"
    return _KINDS.get(retriever._vector_store_query_mode, "dense")  # noqa: SLF001 (no public name)


def has_native_async(retriever: BaseRetriever) -> bool:
    """Tell whether ``aretrieve`` really awaits, as far as it can be told from outside.

    Core's defaults run the sync method on the event loop: a retriever without ``_aretrieve``, and a vector store
    without ``aquery`` (Chroma's is sync underneath: 16 gathered queries blocked the loop for 164 ms, measured).
    """
    if isinstance(retriever, VectorIndexRetriever):
        store = retriever._vector_store  # noqa: SLF001 (no public name)
        return type(store).aquery is not BasePydanticVectorStore.aquery
    if isinstance(retriever, QueryFusionRetriever):  # as native as what it fuses
        return all(has_native_async(inner) for inner in retriever._retrievers)  # noqa: SLF001
    return type(retriever)._aretrieve is not BaseRetriever._aretrieve  # noqa: SLF001 (asks who overrides it)
