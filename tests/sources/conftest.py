"""What the sources' tests share: real Chroma collections, and stores that ignore what they are asked."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import chromadb
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb._aio import run, set_deadline
from llama_index_agentic_kb.guard.resilience import CallProgress
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.sources.search import NodeList, distinct_nodes, search_source

MakeIndex = Callable[[Sequence[BaseNode], BaseEmbedding], VectorStoreIndex]


class Found(NamedTuple):
    lists: tuple[NodeList, ...]

    @property
    def nodes(self) -> list[NodeWithScore]:
        return [*distinct_nodes(self.lists).values()]

    def total(self, count: str) -> int:
        return sum(getattr(ranked, count) for ranked in self.lists)


async def searching(
    source: KnowledgeSource, query: str, filters: FilterNode | None = None, *, top_k: int = 10, seconds: float = 20
) -> Found:
    set_deadline(time.monotonic() + seconds)
    prepared = await source.prepare(source.effective_filter(filters), top_k)

    async def bundle() -> QueryBundle:
        return QueryBundle(query)

    limit = source.similarity_top_k or top_k
    return Found(await search_source(prepared, query, bundle, limit=limit, progress=CallProgress()))


def search(
    source: KnowledgeSource, query: str = "rain report", filters: FilterNode | None = None, **kwargs: Any
) -> Found:
    """Search a source under its own filter and a caller's."""
    return run(searching(source, query, filters, **kwargs))


class DeafStore(SimpleVectorStore):
    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        query.filters = None
        return super().query(query, **kwargs)


@pytest.fixture
def chroma_index() -> Iterator[MakeIndex]:
    """A function that puts nodes into an index over a new collection of an embedded Chroma."""
    client = chromadb.EphemeralClient()
    names = []

    def make(nodes: Sequence[BaseNode], embed_model: BaseEmbedding) -> VectorStoreIndex:
        names.append(f"test-{uuid.uuid4().hex}")
        store = ChromaVectorStore(chroma_collection=client.create_collection(names[-1]))
        context = StorageContext.from_defaults(vector_store=store)
        return VectorStoreIndex(list(nodes), storage_context=context, embed_model=embed_model)

    yield make
    for name in names:
        client.delete_collection(name)


@pytest.fixture
def deaf_index() -> MakeIndex:
    """A function that puts nodes into an index over a store that ignores filters."""

    def make(nodes: Sequence[BaseNode], embed_model: BaseEmbedding) -> VectorStoreIndex:
        context = StorageContext.from_defaults(vector_store=DeafStore())
        return VectorStoreIndex(list(nodes), storage_context=context, embed_model=embed_model)

    return make
