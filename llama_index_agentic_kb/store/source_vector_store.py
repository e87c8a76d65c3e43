"""The LlamaIndex store of one of our sources."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb.store.filtered_search import ChromaFilteredSearch

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

    from llama_index_agentic_kb.store.chroma_access import LiveCollection

__all__ = ["SourceVectorStore"]


class SourceVectorStore(ChromaVectorStore):
    """A source's collection; a ``ChromaVectorStore`` that can tell its version, if the database can.

    Args:
        collection: The collection.
        version: Gives the source's version.
    """

    _filtered_search: ChromaFilteredSearch = PrivateAttr()

    def __init__(self, collection: Collection | LiveCollection, version: Callable[[], Hashable] | None) -> None:
        super().__init__(chroma_collection=collection)
        self._filtered_search = ChromaFilteredSearch(self, version)

    @property
    def filtered_search(self) -> ChromaFilteredSearch:
        """What sources search it with under a filter."""
        return self._filtered_search
