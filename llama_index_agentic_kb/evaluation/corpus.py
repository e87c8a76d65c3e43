"""An evaluation set as knowledge sources: one Chroma collection and one BM25 index a source, kept in a cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.evaluation.dataset import Dataset, EvaluationDocument
from llama_index_agentic_kb.evaluation.meter import Meter
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.lexical import LexicalIndex, lexical_document
from llama_index_agentic_kb.sources import KnowledgeSource

__all__ = ["CorpusIndex", "LexicalRetriever"]

BATCH: Final = 256
COMPLETE: Final = "complete"
"""The file that marks a cache whose every document is stored."""

Progress = Callable[[int, int], None]


class LexicalRetriever(BaseRetriever):
    """BM25 alone, as a LlamaIndex retriever and as the lexical side of a source.

    Args:
        nodes: The corpus.
        top_k: Nodes of one retrieval.
        callback_manager: Hears of retrievals; None is ``Settings.callback_manager``.
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
        from llama_index_agentic_kb.store.chroma import ChromaDirectory  # noqa: PLC0415 (loads chromadb)

        self.meter = Meter()
        self.manager = CallbackManager([self.meter])
        self.embed_model = with_handlers(embed_model, self.manager)  # a copy: an index sets its model's manager
        groups: dict[str, list[TextNode]] = {}
        for document in dataset.documents:
            name = str(document.metadata.get(source_field, "documents")) if source_field else "documents"
            groups.setdefault(name, []).append(_node(document))
        folder = Path(cache) / f"{dataset.name}-{self._digest(groups)}"
        if not (folder / COMPLETE).exists():  # a run that was stopped midway left some
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._database = ChromaDirectory(folder / "chroma")
        self.indexes: dict[str, VectorStoreIndex] = {}
        self.lexical: dict[str, LexicalRetriever] = {}
        for name, nodes in groups.items():
            store = self._database.vector_store(name)
            if not (folder / COMPLETE).exists():
                self._fill(store, nodes, progress)
            self.indexes[name] = VectorStoreIndex.from_vector_store(
                store, embed_model=self.embed_model, callback_manager=self.manager
            )
            self.lexical[name] = LexicalRetriever(nodes, callback_manager=self.manager)
        (folder / COMPLETE).touch()

    def _digest(self, groups: dict[str, list[TextNode]]) -> str:
        from llama_index_agentic_kb.store.embedding_model import embed_model_fingerprint  # noqa: PLC0415 (loads torch)

        digest = hashlib.sha256(str(embed_model_fingerprint(self.embed_model)).encode())
        for name, nodes in groups.items():
            for node in nodes:
                held = [name, node.node_id, node.get_content(MetadataMode.EMBED), node.metadata]
                digest.update(json.dumps(held, sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def _fill(self, store: BasePydanticVectorStore, nodes: list[TextNode], progress: Progress | None) -> None:
        for start in range(0, len(nodes), BATCH):
            batch = nodes[start : start + BATCH]
            vectors = self.embed_model.get_text_embedding_batch(
                [node.get_content(MetadataMode.EMBED) for node in batch]
            )
            embedded = [node.model_copy(update={"embedding": v}) for node, v in zip(batch, vectors, strict=True)]
            store.add(embedded)
            if progress is not None:
                progress(start + len(batch), len(nodes))

    def sources(self) -> list[KnowledgeSource]:
        """Return the corpus as knowledge sources of the default kind: dense and BM25 side by side."""
        return [
            KnowledgeSource(name, f"documents of {name}", index=index, hybrid=self.lexical[name])
            for name, index in self.indexes.items()
        ]

    def close(self) -> None:
        """Close the store."""
        self._database.close()


def _node(document: EvaluationDocument) -> TextNode:
    """Return a document as a node; only its title is embedded beside its text."""
    metadata = {key: value for key, value in document.metadata.items() if isinstance(value, (str, int, float, bool))}
    hidden = [key for key in metadata if key != "title" or not document.title]
    if document.title:
        metadata["title"] = document.title
    return TextNode(
        id_=document.id,
        text=document.text,
        metadata=metadata,
        excluded_embed_metadata_keys=hidden,
        excluded_llm_metadata_keys=hidden,
    )
