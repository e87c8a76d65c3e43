"""An evaluation set as knowledge sources: one Chroma collection and one BM25 index a source, kept in a cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.evaluation.dataset import Dataset, EvaluationDocument
from llama_index_agentic_kb.evaluation.metering import Meter
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.lexical import LexicalIndex, lexical_document
from llama_index_agentic_kb.sources import KnowledgeSource

if TYPE_CHECKING:
    from llama_index_agentic_kb.store.chroma import ChromaDatabase

__all__ = ["CorpusIndex", "LexicalRetriever"]

BATCH = 256
Progress = Callable[[int, int], None]


class LexicalRetriever(BaseRetriever):
    """BM25 alone, as a LlamaIndex retriever and as the lexical side of a source.

    Args:
        nodes: The corpus.
        top_k: Nodes of one retrieval.
        callback_manager: Is told of retrievals; None is ``Settings.callback_manager``.
    """

    def __init__(
        self, nodes: Sequence[TextNode], top_k: int = 100, *, callback_manager: CallbackManager | None = None
    ) -> None:
        super().__init__(callback_manager=callback_manager)
        self.top_k = top_k
        self._nodes = {node.node_id: node for node in nodes}
        self._index = LexicalIndex()
        self._index.update(put=[lexical_document(node) for node in nodes])

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        """Search under a filter."""
        hits = self._index.search(query, top_k, filters)
        return [NodeWithScore(node=self._nodes[hit.node_id], score=hit.score) for hit in hits]

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.search(query_bundle.query_str, self.top_k, None)


class CorpusIndex:
    """All documents of a set, each as one node whose id is the document's, searchable in every way.

    Args:
        dataset: The set.
        embed_model: Embeds documents and queries.
        cache: Where vectors are kept from one run to the next, by model and content.
        source_field: Metadata key by which the corpus falls into several sources; None makes one.
        progress: Called with (embedded, all) while documents are embedded.
    """

    def __init__(
        self,
        dataset: Dataset,
        embed_model: BaseEmbedding,
        cache: str | Path,
        *,
        source_field: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        from llama_index_agentic_kb.store.chroma import ChromaDatabase  # noqa: PLC0415 (loads chromadb)

        self.meter = Meter()
        self.manager = CallbackManager([self.meter])
        self.embed_model = with_handlers(embed_model, self.manager)  # a copy: an index sets its model's manager
        by_source: dict[str, list[EvaluationDocument]] = {}
        for document in dataset.documents:
            name = str(document.metadata.get(source_field, "documents")) if source_field else "documents"
            by_source.setdefault(name, []).append(document)
        nodes = {name: [_node(document) for document in documents] for name, documents in by_source.items()}
        directory = Path(cache) / self._key(dataset, nodes)
        directory.mkdir(parents=True, exist_ok=True)
        self._database = ChromaDatabase.persistent(directory / f"chroma-{_metadata_digest(nodes)}")
        vectors = self._vectors(
            directory / "vectors.npy", [node for group in nodes.values() for node in group], progress
        )
        self.indexes: dict[str, VectorStoreIndex] = {}
        self.lexical: dict[str, LexicalRetriever] = {}
        start = 0
        for name, group in nodes.items():
            self.indexes[name] = self._index(self._database, name, group, vectors[start : start + len(group)])
            self.lexical[name] = LexicalRetriever(group, callback_manager=self.manager)
            start += len(group)

    def _key(self, dataset: Dataset, nodes: dict[str, list[TextNode]]) -> str:
        from llama_index_agentic_kb.store.embedding_model import embed_model_fingerprint  # noqa: PLC0415

        digest = hashlib.sha256(str(embed_model_fingerprint(self.embed_model)).encode())
        for name, group in nodes.items():
            digest.update(f"\0{name}\0".encode())
            for node in group:
                digest.update(f"{node.node_id}\0{node.get_content(MetadataMode.EMBED)}\0".encode())
        return f"{dataset.name}-{digest.hexdigest()[:16]}"

    def _vectors(self, file: Path, nodes: list[TextNode], progress: Progress | None) -> Any:
        """Give one vector a node; read from the cache, or made and kept there."""
        if (kept := _kept_vectors(file, len(nodes))) is not None:
            return kept
        vectors: list[list[float]] = []
        for start in range(0, len(nodes), BATCH):
            texts = [node.get_content(MetadataMode.EMBED) for node in nodes[start : start + BATCH]]
            vectors += self.embed_model.get_text_embedding_batch(texts)
            if progress is not None:
                progress(len(vectors), len(nodes))
        made = np.asarray(vectors, dtype=np.float32)
        with file.with_suffix(".tmp").open("wb") as out:
            np.save(out, made)
        file.with_suffix(".tmp").replace(file)
        return made

    def _index(self, database: ChromaDatabase, name: str, nodes: list[TextNode], vectors: Any) -> VectorStoreIndex:
        store = database.vector_store(name, create=True)
        if database.count(name) != len(nodes):  # a run that was stopped midway left some
            for node, vector in zip(nodes, vectors, strict=True):
                node.embedding = vector.tolist()
            database.add(name, nodes)
            for node in nodes:
                node.embedding = None
        return VectorStoreIndex.from_vector_store(store, embed_model=self.embed_model, callback_manager=self.manager)

    def sources(self) -> list[KnowledgeSource]:
        """Give the corpus as knowledge sources of the default kind: dense and BM25 side by side."""
        return [
            KnowledgeSource(name, f"documents of {name}", index=index, lexical=self.lexical[name])
            for name, index in self.indexes.items()
        ]

    def close(self) -> None:
        """Let the store go."""
        self._database.close()


def _kept_vectors(file: Path, count: int) -> Any:
    """Give the vectors of an earlier run; None where there are none, or the file is broken."""
    try:
        vectors = np.load(file)
    except (OSError, ValueError, EOFError):
        return None
    return vectors if vectors.ndim == 2 and len(vectors) == count else None  # noqa: PLR2004 (a row a document)


def _metadata_digest(nodes: dict[str, list[TextNode]]) -> str:
    """Tell stores apart whose vectors are the same and whose metadata is not."""
    digest = hashlib.sha256()
    for group in nodes.values():
        for node in group:
            digest.update(json.dumps(node.metadata, sort_keys=True).encode())
    return digest.hexdigest()[:8]


def _node(document: EvaluationDocument) -> TextNode:
    """Give a document as a node; only its title is embedded beside its text."""
    metadata = {key: value for key, value in document.metadata.items() if isinstance(value, (str, int, float, bool))}
    hidden = list(metadata)
    if document.title:
        metadata["title"] = document.title
        hidden = [key for key in hidden if key != "title"]
    return TextNode(
        id_=document.id,
        text=document.text,
        metadata=metadata,
        excluded_embed_metadata_keys=hidden,
        excluded_llm_metadata_keys=hidden,
    )
