"""Retrieval over real Chroma with real MiniLM: 4 persistent collections x (4 sub-queries + the question).

Both retrievers are given the same sub-queries by a model in the process that takes no time: ``AgenticRetriever`` as a
plan, ``QueryFusionRetriever`` as lines. What is left is embedding, searching and fusing.
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
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, default_embed_model
from llama_index_agentic_kb.store.chroma import ChromaDirectory
from llama_index_agentic_kb.testing import ScriptedLLM
from tests.benchmarks.corpus import QUESTION, SOURCES, SUB_QUERIES, passages
from tests.benchmarks.measure import LOOP_GAP, WALL, Contestant, Race, arace, race
from tests.benchmarks.model_server import reply_to
from tests.benchmarks.report import Row

__all__ = ["chroma"]

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
        """Give what was encoded so far."""
        with self._lock:
            return {"embedding batches": self._batches, "texts embedded": self._texts}


def chroma(runs: int, passages_each: int = 250) -> list[Row]:
    """Measure retrieval, sync and async."""
    model = default_embed_model()
    with _indexes(model, passages_each) as indexes:
        meter = EmbeddingMeter(model)
        ours, peer = _ours(indexes), _peer(indexes)
        sync = {OURS: ours, PEER: peer, f"{PEER}(use_async=False)": _peer(indexes, use_async=False)}
        asked = [Contestant(name, partial(one.retrieve, QUESTION)) for name, one in sync.items()]
        rows = _rows("chroma/sync", race(asked, meter, runs), {WALL: "ms"})
        awaited = [Contestant(name, partial(sync[name].aretrieve, QUESTION)) for name in (OURS, PEER)]
        timed = {WALL: "ms", LOOP_GAP: "ms"}
        return rows + _rows("chroma/async", asyncio.run(arace(awaited, meter, runs)), timed)


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


def _ours(indexes: dict[str, VectorStoreIndex]) -> BaseRetriever:
    sources = [
        KnowledgeSource(name, SOURCES[name], index=index, similarity_top_k=PER_SEARCH)
        for name, index in indexes.items()
    ]
    return AgenticRetriever(sources, llm=_llm(), similarity_top_k=PER_RETRIEVAL)


def _peer(indexes: dict[str, VectorStoreIndex], *, use_async: bool = True) -> BaseRetriever:
    return QueryFusionRetriever(
        [index.as_retriever(similarity_top_k=PER_SEARCH) for index in indexes.values()],
        llm=_llm(),
        mode=FUSION_MODES.RECIPROCAL_RANK,
        similarity_top_k=PER_RETRIEVAL,
        num_queries=len(SUB_QUERIES) + 1,
        use_async=use_async,
    )


def _llm() -> ScriptedLLM:
    def reply(messages: list[ChatMessage]) -> str:
        return reply_to("\n".join(message.content or "" for message in messages))

    return ScriptedLLM(reply)


def _rows(case: str, result: Race, timed: dict[str, str]) -> list[Row]:
    peers = [name for name in [*result.samples, *result.failures] if name != OURS]
    return result.rows(case, OURS, peers, {**timed, **COUNTS})
