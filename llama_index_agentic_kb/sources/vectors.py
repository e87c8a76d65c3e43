"""Readers of the vectors of a source's chunks, from which a scope index is made (``search.prototypes``).

Vectors can be read from a knowledge store, from Chroma, from LlamaIndex's in-memory store, and from shards that are
all of these. Of any other source there is no scope index, and its results are never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.vector_stores import SimpleVectorStore

from llama_index_agentic_kb.search.prototypes import Floats, ScopeIndex, VectorReader
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.index import kind_of
from llama_index_agentic_kb.sources.stores import CHROMA_PAGE, ChromaKind, chroma_rows


def vector_reader(source: KnowledgeSource) -> VectorReader | None:
    """Return the reader of a source's vectors; None if they can't be read."""
    shards = source.shards
    if shards:
        readers = [reader for shard in shards if (reader := vector_reader(shard)) is not None]
        return _JoinedReader(readers) if len(readers) == len(shards) else None
    index = source.index
    if not isinstance(index, VectorStoreIndex):
        return None
    store: Any = index.vector_store
    make: Callable[[], VectorReader] | None = getattr(store, "vector_reader", None)
    if make is not None:  # a knowledge store
        return make()
    if type(store) is SimpleVectorStore:
        return _SimpleReader(store)
    return _ChromaReader(store.client) if isinstance(kind_of(store), ChromaKind) else None


def embed_model_of(source: KnowledgeSource) -> BaseEmbedding | None:
    """Return the embedding model of a source's index; None if it has none, or if its shards have different ones."""
    models = [getattr(part.index, "_embed_model", None) for part in source.shards or (source,)]
    known = [model for model in models if isinstance(model, BaseEmbedding)]
    if len(known) < len(models) or (len(known) > 1 and len({model_name_of(model) for model in known}) > 1):
        return None
    return known[0]


def model_name_of(model: BaseEmbedding) -> str:
    """Return the canonical name of an embedding model."""
    from llama_index_agentic_kb.store.embedding_model import embed_model_name  # noqa: PLC0415 (loads the store)

    return embed_model_name(model)


def scope_indexes(
    sources: Iterable[KnowledgeSource], known: Mapping[str, ScopeIndex] = MappingProxyType({})
) -> dict[str, ScopeIndex]:
    """Return the scope indexes of sources, by name, for ``RetrieverOptions(scope=...)``.

    Sources whose vectors can't be read are left out. Of ``known`` indexes only vectors of changed documents are read.
    """
    made = {}
    for source in sources:
        reader, model = vector_reader(source), embed_model_of(source)
        if reader is not None and model is not None:
            name, old = model_name_of(model), known.get(source.name)
            is_same = old is not None and old.model == name
            made[source.name] = old.updated(reader) if old is not None and is_same else ScopeIndex.build(reader, name)
    return made


def _by_document(chunks: Iterable[tuple[str, object]]) -> dict[str, list[str]]:
    """Return chunks by their documents; one without a document is a document itself."""
    documents: dict[str, list[str]] = {}
    for chunk, document in chunks:
        documents.setdefault(chunk if document in (None, "None") else str(document), []).append(chunk)
    return documents


@dataclass(frozen=True)
class _JoinedReader:
    """Reads the shards of a collection; a document is whole in one of them."""

    readers: Sequence[VectorReader]

    def version(self) -> str:
        return " ".join(reader.version() for reader in self.readers)

    def chunks(self) -> dict[str, Sequence[str]]:
        return {document: chunks for reader in self.readers for document, chunks in reader.chunks().items()}

    def vectors(self, chunks: Sequence[str]) -> dict[str, Sequence[float] | Floats]:
        return {chunk: vector for reader in self.readers for chunk, vector in reader.vectors(chunks).items()}


@dataclass(frozen=True)
class _SimpleReader:
    """Reads LlamaIndex's in-memory store."""

    store: SimpleVectorStore

    def version(self) -> str:
        vectors = self.store.data.embedding_dict
        return f"{len(vectors)}:{next(reversed(vectors), '')}"

    def chunks(self) -> dict[str, list[str]]:
        named = self.store.data.text_id_to_ref_doc_id
        return _by_document((chunk, named.get(chunk)) for chunk in list(self.store.data.embedding_dict))

    def vectors(self, chunks: Sequence[str]) -> dict[str, Sequence[float]]:
        held = self.store.data.embedding_dict
        return {chunk: held[chunk] for chunk in chunks if chunk in held}


@dataclass(frozen=True)
class _ChromaReader:
    """Reads a Chroma collection in pages."""

    collection: Any

    def version(self) -> str:
        return f"{self.collection.id}:{self.collection.count()}"

    def chunks(self) -> dict[str, list[str]]:
        return _by_document((chunk, metadata.get("ref_doc_id")) for chunk, metadata in chroma_rows(self.collection))

    def vectors(self, chunks: Sequence[str]) -> dict[str, Floats]:
        made: dict[str, Floats] = {}
        for start in range(0, len(chunks), CHROMA_PAGE):
            rows = self.collection.get(ids=list(chunks[start : start + CHROMA_PAGE]), include=["embeddings"])
            made |= dict(zip(rows["ids"], rows["embeddings"], strict=True))
        return made
