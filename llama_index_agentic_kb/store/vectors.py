"""The vectors of one source while it is ingested: made once per text, written and deleted by node id."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llama_index.core.schema import MetadataMode

from llama_index_agentic_kb.errors import AgenticKBError, IngestionError
from llama_index_agentic_kb.store.chunking import chunk_to_node

if TYPE_CHECKING:
    from llama_index_agentic_kb.store.records import Chunk
    from llama_index_agentic_kb.store.store import KnowledgeStore

__all__ = ["SourceVectors"]


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

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Add the vectors of chunks that have none yet.

        A text that moved, within a file or to another one of the source, keeps the vector it has.

        Args:
            chunks: The chunks.

        Raises:
            IngestionError: The model failed or gave unusable vectors, or they can't be stored.
        """
        new = [chunk for chunk in chunks if chunk.node_id not in self._ids]
        texts = {chunk.embedding_hash: chunk for chunk in new}
        vectors = self._stored(texts)
        vectors |= self._embed([chunk for key, chunk in texts.items() if key not in vectors])
        nodes = [chunk_to_node(chunk) for chunk in new]
        for node, chunk in zip(nodes, new, strict=True):
            node.embedding = vectors[chunk.embedding_hash]
        with _reported("vectors can't be stored"):
            self._store.chroma.add(self._source, nodes)
        self._ids.update(chunk.node_id for chunk in new)

    def _stored(self, texts: dict[str, Chunk]) -> dict[str, list[float]]:
        candidates = self._store.documents.nodes_by_embedding(self._source, texts)
        holders = {
            key: next(node_id for node_id in node_ids if node_id in self._ids)
            for key, node_ids in candidates.items()
            if not self._ids.isdisjoint(node_ids)
        }
        with _reported("vectors can't be read"):
            vectors = self._store.chroma.embeddings(self._source, holders.values())
        return {key: vectors[node_id] for key, node_id in holders.items() if node_id in vectors}

    def _embed(self, chunks: Sequence[Chunk]) -> dict[str, list[float]]:
        texts = [chunk_to_node(chunk).get_content(metadata_mode=MetadataMode.EMBED) for chunk in chunks]
        with _reported("the embedding model failed"):
            vectors = self._store.embed_model.get_text_embedding_batch(texts)
        self._check(vectors, len(texts))
        self.embedded += len(texts)
        return {chunk.embedding_hash: vector for chunk, vector in zip(chunks, vectors, strict=True)}

    def _check(self, vectors: Sequence[Sequence[float]], expected: int) -> None:
        """Refuse what Chroma would store and never find again, or mix with another model's vectors."""
        dimension = self._store.fingerprint.dimension
        if len(vectors) != expected:
            raise IngestionError(f"The embedding model gave {len(vectors)} vectors for {expected} texts.")
        for vector in vectors:
            if len(vector) != dimension or not all(map(math.isfinite, vector)):
                raise IngestionError(
                    f"The embedding model gave a vector that is not {dimension} finite numbers, as the store's are."
                )


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn whatever a model or Chroma raises into one error that tells how to go on."""
    try:
        yield
    except AgenticKBError:
        raise
    except Exception as error:
        raise IngestionError(
            f"{what[0].upper()}{what[1:]}: {type(error).__name__}: {error}. Documents stored before this stay; "
            "run the ingestion again to go on from there."
        ) from error
