"""The vectors of one source while it is ingested: made once per text, written and deleted by node id."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llama_index.core.schema import MetadataMode

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import AgenticKBError, IngestionError
from llama_index_agentic_kb.store.chunking import chunk_to_node
from llama_index_agentic_kb.store.kept_vectors import batched

if TYPE_CHECKING:
    from llama_index_agentic_kb.store.records import Chunk
    from llama_index_agentic_kb.store.store import KnowledgeStore

__all__ = ["SourceVectors", "embed"]


class SourceVectors:
    """A source's collection, and the ids it is known to hold.

    Args:
        source: The source; its collection is made when missing.
        store: The store, with the writing right held.
    """

    def __init__(self, source: str, store: KnowledgeStore) -> None:
        self.embedded = 0
        """How many chunks went through the embedding model."""
        self._source = source
        self._store = store
        with _reported("the vectors can't be opened"):
            store.chroma.vector_store(source, create=True)
            self._ids = store.chroma.node_ids(source)
            self._keep_what_chroma_has()

    def hold(self, node_ids: set[str]) -> bool:
        """Tell whether all these nodes have vectors."""
        return node_ids <= self._ids

    def keep_only(self, node_ids: set[str]) -> None:
        """Delete all vectors but these nodes'."""
        self.delete(self._ids - node_ids)

    def delete(self, node_ids: set[str]) -> None:
        """Delete nodes' vectors."""
        with _reported("old vectors can't be deleted"):
            self._store.chroma.delete_nodes(self._source, node_ids)
        self._ids -= node_ids

    def add(self, chunks: Sequence[Chunk]) -> dict[str, list[float]]:
        """Add the vectors of chunks that have none yet.

        A text that moved, within a file or to another one of the source, keeps the vector it has.

        Args:
            chunks: The chunks.

        Returns:
            What was added, by node id, to be kept with the chunks.

        Raises:
            IngestionError: The model failed or gave unusable vectors, or they can't be stored.
        """
        new = [chunk for chunk in chunks if chunk.node_id not in self._ids]
        texts = {chunk.embedding_hash: chunk for chunk in new}
        vectors = self._store.documents.vectors.by_embedding(self._source, texts)
        vectors |= self._embed([chunk for key, chunk in texts.items() if key not in vectors])
        nodes = [chunk_to_node(chunk) for chunk in new]
        for node, chunk in zip(nodes, new, strict=True):
            node.embedding = vectors[chunk.embedding_hash]
        with _reported("vectors can't be stored"):
            self._store.chroma.add(self._source, nodes)
        self._ids.update(chunk.node_id for chunk in new)
        return {chunk.node_id: vectors[chunk.embedding_hash] for chunk in new}

    def _keep_what_chroma_has(self) -> None:
        """Keep the vectors of a store of the first release, which had them in Chroma alone."""
        kept = self._store.documents.vectors
        for batch in batched(kept.missing(self._source) & self._ids):
            kept.put(self._store.chroma.embeddings(self._source, batch))

    def _embed(self, chunks: Sequence[Chunk]) -> dict[str, list[float]]:
        vectors = embed(self._store, chunks)
        self.embedded += len(chunks)
        return {chunk.embedding_hash: vector for chunk, vector in zip(chunks, vectors, strict=True)}


def embed(store: KnowledgeStore, chunks: Sequence[Chunk]) -> list[list[float]]:
    """Embed chunks with a store's model.

    Args:
        store: The store.
        chunks: The chunks.

    Returns:
        Their vectors.

    Raises:
        IngestionError: The model failed, or gave what Chroma would store and never find again, or another model's.
    """
    texts = [chunk_to_node(chunk).get_content(metadata_mode=MetadataMode.EMBED) for chunk in chunks]
    with _reported("the embedding model failed"):
        vectors = store.embed_model.get_text_embedding_batch(texts)
    if len(vectors) != len(texts):
        raise IngestionError(f"The embedding model gave {len(vectors)} vectors for {len(texts)} texts.")
    dimension = store.fingerprint.dimension
    for vector in vectors:
        if len(vector) != dimension or not all(map(math.isfinite, vector)):
            raise IngestionError(
                f"The embedding model gave a vector that is not {dimension} finite numbers, as the store's are."
            )
    return vectors


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn whatever a model or Chroma raises into one error that tells how to go on."""
    try:
        yield
    except AgenticKBError:
        raise
    except Exception as error:
        raise IngestionError(
            f"{what[0].upper()}{what[1:]}: {type(error).__name__}: {error_message(error)}. Documents stored before "
            "this stay; run the ingestion again to go on from there."
        ) from error
