"""What the sources' tests share: real Chroma collections, and stores that ignore what they are asked."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chromadb
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult
from llama_index.vector_stores.chroma import ChromaVectorStore

MakeIndex = Callable[[Sequence[BaseNode], BaseEmbedding], VectorStoreIndex]


class DeafStore(SimpleVectorStore):
    """A store that ignores every filter."""

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
