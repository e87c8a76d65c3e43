from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from llama_index_agentic_kb._aio import set_deadline
from llama_index_agentic_kb.schema import Condition, FilterOperator, Outcome, SourceActivity
from llama_index_agentic_kb.sources.index import FilteredIndexRetriever, NotedNodes, traits_of
from llama_index_agentic_kb.sources.index import index_retriever as made_by
from llama_index_agentic_kb.sources.search import own_recursion
from llama_index_agentic_kb.testing import HashEmbedding

MakeIndex = Callable[[Sequence[BaseNode], BaseEmbedding], VectorStoreIndex]

EVEN = Condition(key="parity", value="even")


def _nodes(count: int = 20) -> list[TextNode]:
    words = ["pump", "valve", "filter", "motor", "seal"]
    return [
        TextNode(
            id_=f"n{at}",
            text=f"the {words[at % 5]} number {at} of the {words[at % 3]}",
            metadata={"parity": "even" if at % 2 == 0 else "odd", "title": f"Title {at}"},
        )
        for at in range(count)
    ]


def index_retriever(
    index: VectorStoreIndex, filters: Condition | None, top_k: int, further: dict[str, Any] | None = None
) -> BaseRetriever:
    return made_by(index, filters, top_k, further or {})


def _until(retriever: BaseRetriever, deadline: float) -> list[NodeWithScore]:

    async def search() -> list[NodeWithScore]:
        set_deadline(deadline)
        return retriever.retrieve("valve")

    return asyncio.run(search())


def _retriever(index: VectorStoreIndex, filters: Condition, top_k: int) -> BaseRetriever:
    """Give an index's retriever as a source takes it: core's recursion, which copies lists, is switched off."""
    return own_recursion(index_retriever(index, filters, top_k), "docs")


def _note(found: Any) -> str:
    assert isinstance(found, NotedNodes)
    return found.note


def test_it_stands_in_for_the_plain_retriever(chroma_index: MakeIndex) -> None:
    """Same nodes and scores, the same model, scale and kind; and a note."""
    index = chroma_index(_nodes(), HashEmbedding())
    plain, filtered = index.as_retriever(similarity_top_k=4), _retriever(index, EVEN, 4)
    assert isinstance(filtered, FilteredIndexRetriever)
    assert type(index_retriever(index, None, 4)) is VectorIndexRetriever
    assert traits_of(filtered, None) == traits_of(plain, None)
    assert (traits_of(plain, None).kind, traits_of(plain, None).native_async) == ("dense", False)
    every = [n for n in index.as_retriever(similarity_top_k=20).retrieve("pump number 4") if _is_even(n.node)]
    found = filtered.retrieve("pump number 4")
    assert [n.score for n in found] == pytest.approx([n.score for n in every[:4]], rel=1e-4)
    assert all(n.node in [one.node for one in every] for n in found)
    assert _note(found) == "filter matches 10: searched exactly"


def _is_even(node: BaseNode) -> bool:
    return bool(node.metadata["parity"] == "even")


def test_a_source_is_searched_by_it_and_says_so(chroma_index: MakeIndex) -> None:
    """The note stands in the search's list and in the activity; rows without the key take no places."""
    nodes = [*_nodes(), *(TextNode(id_=f"x{at}", text="pump number") for at in range(20))]  # nearer, and no parity
    index = chroma_index(nodes, HashEmbedding())
    not_odd = Condition(key="parity", operator=FilterOperator.NE, value="odd")
    source = KnowledgeSource("docs", index=index, filters=not_odd)
    records: list[Any] = []
    retriever = AgenticRetriever([source], effort="minimal", similarity_top_k=5, observer=records.append)
    found = retriever.retrieve("pump number")
    assert len(found) == 5
    assert all(_is_even(node.node) for node in found)
    record = next(r for r in reversed(records) if isinstance(r, SourceActivity))
    assert record.outcome is Outcome.OK
    assert record.dropped_by_filter == 0
    dense = next(lane for lane in record.lanes or [] if lane.kind == "dense")
    assert dense.note is not None
    assert dense.note.startswith("filter matches 30: searched exactly")


def test_other_searches_are_left_alone(chroma_index: MakeIndex) -> None:
    """Modes and arguments that mean something else to the store, and stores that offer nothing."""
    index = chroma_index(_nodes(), HashEmbedding())
    for further in (
        {"vector_store_query_mode": "mmr"},
        {"vector_store_kwargs": {"where_document": {"$contains": "x"}}},
    ):
        assert type(index_retriever(index, EVEN, 3, further)) is VectorIndexRetriever
    simple = VectorStoreIndex(_nodes(), embed_model=HashEmbedding())
    assert type(index_retriever(simple, EVEN, 3)) is VectorIndexRetriever

    class OwnChroma(ChromaVectorStore):
        """A store whose query is its user's."""

    own = VectorStoreIndex.from_vector_store(
        OwnChroma.from_collection(index.vector_store.client), embed_model=HashEmbedding()
    )
    assert type(index_retriever(own, EVEN, 3)) is VectorIndexRetriever


def test_a_store_may_offer_a_search_of_its_own() -> None:
    """Any vector store with ``filtered_search`` is asked in place of its query; None there means that it can't."""

    class Offering(SimpleVectorStore):
        offers: bool = True

        @property
        def filtered_search(self) -> Any:
            return self._search if self.offers else None

        async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            return self.query(query, **kwargs)

        def _search(
            self, query: VectorStoreQuery, passes: Callable[[BaseNode], bool], *, deadline: float | None = None
        ) -> tuple[VectorStoreQueryResult, str]:
            kept = [node for node in _nodes() if passes(node)][: query.similarity_top_k]
            return VectorStoreQueryResult(nodes=kept, similarities=[0.5] * len(kept)), f"until {deadline}"

    store = Offering()
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex(_nodes(), storage_context=context, embed_model=HashEmbedding())
    found = _until(_retriever(index, EVEN, 3), 7.0)
    assert [node.node.node_id for node in found] == ["n0", "n2", "n4"]
    assert _note(found) == "until 7.0"
    assert not traits_of(index_retriever(index, EVEN, 3), None).native_async  # whatever the store's own query is
    store.offers = False
    assert type(index_retriever(index, EVEN, 3)) is VectorIndexRetriever
