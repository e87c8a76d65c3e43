"""Retrieval over real Chroma with real MiniLM: 4 persistent collections x (4 sub-queries + the question).

Both retrievers get the same sub-queries from a model in the process that takes no time: ``AgenticRetriever`` as a plan,
``QueryFusionRetriever`` as lines. What is left is embedding, searching and fusing.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Final

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.retrievers import BaseRetriever

from llama_index_agentic_kb import AgenticRetriever, default_embed_model
from llama_index_agentic_kb.store.chroma import ChromaDirectory
from llama_index_agentic_kb.testing import ScriptedLLM
from tests.benchmarks.corpus import QUESTION, SOURCES, SUB_QUERIES, fused, knowledge_sources, passages
from tests.benchmarks.measure import LOOP_GAP, WALL, Row, arace, race
from tests.benchmarks.model_server import reply_to

PER_SEARCH: Final = 5
PER_RETRIEVAL: Final = 10

OURS: Final = "AgenticRetriever"
PEER: Final = "QueryFusionRetriever"
COUNTS: Final = {"embedding batches": "calls", "texts embedded": "texts"}


class EmbeddingMeter:
    """Counts what a HuggingFace model really encodes, whoever asks and from whichever thread."""

    def __init__(self, model: BaseEmbedding) -> None:
        self._lock = threading.Lock()
        self._batches = self._texts = 0
        transformer: Any = model._model  # type: ignore[attr-defined]  # HuggingFaceEmbedding shows it nowhere
        self._encode = transformer.encode
        transformer.encode = self._counted

    def _counted(self, inputs: list[str], **kwargs: Any) -> Any:
        with self._lock:
            self._batches += 1
            self._texts += len(inputs)
        return self._encode(inputs, **kwargs)

    def __call__(self) -> dict[str, int]:
        """Return what was encoded so far."""
        with self._lock:
            return {"embedding batches": self._batches, "texts embedded": self._texts}


def chroma(runs: int, passages_each: int = 250) -> list[Row]:
    """Measure retrieval, sync and async."""
    model = default_embed_model()
    with _indexes(model, passages_each) as indexes:
        meter = EmbeddingMeter(model)
        sources = knowledge_sources(indexes, similarity_top_k=PER_SEARCH)
        retrievers = {
            OURS: AgenticRetriever(sources, llm=_llm(), similarity_top_k=PER_RETRIEVAL),
            PEER: _peer(indexes),
            f"{PEER}(use_async=False)": _peer(indexes, use_async=False),
        }
        asked = {name: partial(retriever.retrieve, QUESTION) for name, retriever in retrievers.items()}
        rows = race(asked, runs, meter).rows("chroma/sync", OURS, {WALL: "ms", **COUNTS})
        awaited = {name: partial(retrievers[name].aretrieve, QUESTION) for name in (OURS, PEER)}
        result = asyncio.run(arace(awaited, runs, meter))
        return rows + result.rows("chroma/async", OURS, {WALL: "ms", LOOP_GAP: "ms", **COUNTS})


@contextmanager
def _indexes(model: BaseEmbedding, passages_each: int) -> Iterator[dict[str, VectorStoreIndex]]:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # Chroma may still be writing into it
        closing(ChromaDirectory(folder)) as database,
    ):
        indexes = {}
        for name in SOURCES:
            context = StorageContext.from_defaults(vector_store=database.vector_store(name))
            nodes = passages(name, passages_each)
            indexes[name] = VectorStoreIndex(nodes, storage_context=context, embed_model=model)
        yield indexes


def _peer(indexes: dict[str, VectorStoreIndex], *, use_async: bool = True) -> BaseRetriever:
    retrievers = [index.as_retriever(similarity_top_k=PER_SEARCH) for index in indexes.values()]
    return fused(retrievers, _llm(), top_k=PER_RETRIEVAL, queries=len(SUB_QUERIES) + 1, use_async=use_async)


def _llm() -> ScriptedLLM:
    def reply(messages: list[ChatMessage]) -> str:
        return reply_to("\n".join(message.content or "" for message in messages))

    return ScriptedLLM(reply)
