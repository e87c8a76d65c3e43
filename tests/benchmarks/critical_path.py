"""Wall time against the critical path: 4 sources x (4 sub-queries + the question), a model and sources with latency.

The model is the real OpenAI client against a server in another process; the sources are vector indexes whose store
takes its time, with or without a native ``aquery`` (without one, core's default runs the sync query on the loop, as
it does with Chroma). Each search gives 2 passages, each retrieval 8. SubQuestionQueryEngine asks each of the 4
sub-queries of each of the 4 sources, as one sub-question has one tool. Async clients may not keep connections
(``LoopbackOpenAI``'s default), which spares LlamaIndex's sync calls the failures they have with servers that do.

The floor is what nobody can be faster than: two bare calls of the model and one search, one after another, measured in
the same turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import LLM
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult
from numpy.typing import NDArray

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.testing import HashEmbedding
from tests.benchmarks.corpus import QUESTION, SOURCES, SUB_QUERIES, passages
from tests.benchmarks.measure import LOOP_GAP, WALL, Contestant, Race, arace, race
from tests.benchmarks.model_server import ModelServer
from tests.benchmarks.report import Row

__all__ = ["critical_path"]

PASSAGES: Final = 40
PER_SEARCH: Final = 2
PER_RETRIEVAL: Final = 8

FLOOR: Final = "floor: two bare model calls + one search"
OURS: Final = "AgenticQueryEngine"
COUNTS: Final = {"LLM calls": "calls", "tokens": "tokens", "embedding calls": "calls"}


class SlowStore(SimpleVectorStore):
    """A vector store that takes its time without computing, as one on another machine does."""

    _latency: float = PrivateAttr(default=0.0)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        time.sleep(self._latency)
        return self.nearest(query)

    def nearest(self, query: VectorStoreQuery) -> VectorStoreQueryResult:
        """Search; core's own loop over all vectors would be measured as everybody's overhead."""
        ids, vectors = self._matrix
        scores = vectors @ np.asarray(query.query_embedding)
        best = np.argsort(-scores)[: query.similarity_top_k]
        return VectorStoreQueryResult(similarities=scores[best].tolist(), ids=[ids[at] for at in best])

    @cached_property
    def _matrix(self) -> tuple[list[str], NDArray[np.float64]]:
        return list(self.data.embedding_dict), np.asarray(list(self.data.embedding_dict.values()))


class SlowAsyncStore(SlowStore):
    """The same with a native async query."""

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        await asyncio.sleep(self._latency)
        return self.nearest(query)


@dataclass
class Bench:
    """What all contestants of a case share."""

    server: ModelServer
    indexes: Mapping[str, VectorStoreIndex]
    embedding: HashEmbedding

    @classmethod
    def build(cls, server: ModelServer, *, native: bool, latency: float) -> Bench:
        embedding = HashEmbedding()
        indexes = {}
        for name in SOURCES:
            store = SlowAsyncStore() if native else SlowStore()
            store._latency = latency
            context = StorageContext.from_defaults(vector_store=store)
            nodes = passages(name, PASSAGES)
            indexes[name] = VectorStoreIndex(nodes, storage_context=context, embed_model=embedding)
        return cls(server, indexes, embedding)

    def meters(self) -> dict[str, int]:
        calls, tokens = self.server.billed()
        return {"LLM calls": calls, "tokens": tokens, "embedding calls": len(self.embedding.calls)}

    def retrievers(self) -> list[BaseRetriever]:
        return [index.as_retriever(similarity_top_k=PER_SEARCH) for index in self.indexes.values()]

    # -- contestants, each with a model client of its own --------------------------------------------------------

    def agentic(self) -> BaseQueryEngine:
        sources = [
            KnowledgeSource(name, SOURCES[name], index=index, similarity_top_k=PER_SEARCH)
            for name, index in self.indexes.items()
        ]
        base = KnowledgeBase(sources, llm=self.server.llm(), similarity_top_k=PER_RETRIEVAL)
        return base.warm_up().as_query_engine("answerSynthesis")

    def fusion(self, *, use_async: bool = True) -> BaseQueryEngine:
        llm = self.server.llm()
        return RetrieverQueryEngine.from_args(self._fused(llm, use_async=use_async), llm=llm)

    def citation(self) -> BaseQueryEngine:
        llm = self.server.llm()
        return CitationQueryEngine(self._fused(llm, use_async=True), llm=llm)

    def sub_question(self, *, use_async: bool = True) -> BaseQueryEngine:
        llm = self.server.llm()
        tools = [
            QueryEngineTool.from_defaults(
                RetrieverQueryEngine.from_args(index.as_retriever(similarity_top_k=PER_SEARCH), llm=llm),
                name=name,
                description=SOURCES[name],
            )
            for name, index in self.indexes.items()
        ]
        generator = LLMQuestionGenerator.from_defaults(llm=llm)
        return SubQuestionQueryEngine.from_defaults(
            tools, llm=llm, question_gen=generator, verbose=False, use_async=use_async
        )

    def _fused(self, llm: LLM, *, use_async: bool) -> QueryFusionRetriever:
        return QueryFusionRetriever(
            self.retrievers(),
            llm=llm,
            mode=FUSION_MODES.RECIPROCAL_RANK,
            similarity_top_k=PER_RETRIEVAL,
            num_queries=len(SUB_QUERIES) + 1,
            use_async=use_async,
        )

    def floor(self) -> Callable[[], None]:
        llm, retriever = self.server.llm(), self.retrievers()[0]
        messages = [ChatMessage(QUESTION)]

        def ask() -> None:
            llm.chat(messages)
            retriever.retrieve(QUESTION)
            llm.chat(messages)

        return ask

    def afloor(self, *, native: bool) -> Callable[[], Any]:
        llm, retriever = self.server.llm(), self.retrievers()[0]
        messages = [ChatMessage(QUESTION)]

        async def ask() -> None:
            await llm.achat(messages)
            if native:
                await retriever.aretrieve(QUESTION)
            else:
                await asyncio.to_thread(retriever.retrieve, QUESTION)
            await llm.achat(messages)

        return ask


def critical_path(runs: int, llm_seconds: float = 0.3, search_seconds: float = 0.05) -> list[Row]:
    """Measure the four cases: sync and async, sources with and without native async."""
    nominal = (2 * llm_seconds + search_seconds) * 1000
    rows = []
    with ModelServer(llm_seconds) as server:
        for native in (True, False):
            sources = "native async sources" if native else "sync-only sources"
            bench = Bench.build(server, native=native, latency=search_seconds)
            rows += _rows(f"critical_path/sync, {sources}", _sync(bench, runs), nominal)
            rows += _rows(f"critical_path/async, {sources}", _async(bench, runs, native=native), nominal)
    return rows


def _sync(bench: Bench, runs: int) -> Race:
    engines = {
        OURS: bench.agentic(),
        "QueryFusionRetriever + compact": bench.fusion(),
        "QueryFusionRetriever(use_async=False) + compact": bench.fusion(use_async=False),
        "SubQuestionQueryEngine": bench.sub_question(),
        "SubQuestionQueryEngine(use_async=False)": bench.sub_question(use_async=False),
        "CitationQueryEngine": bench.citation(),
    }
    asked = [Contestant(name, partial(engine.query, QUESTION)) for name, engine in engines.items()]
    return race([Contestant(FLOOR, bench.floor()), *asked], bench.meters, runs)


def _async(bench: Bench, runs: int, *, native: bool) -> Race:
    engines = {
        OURS: bench.agentic(),
        "QueryFusionRetriever + compact": bench.fusion(),
        "SubQuestionQueryEngine": bench.sub_question(),
        "CitationQueryEngine": bench.citation(),
    }
    asked = [Contestant(name, partial(engine.aquery, QUESTION)) for name, engine in engines.items()]
    return asyncio.run(arace([Contestant(FLOOR, bench.afloor(native=native)), *asked], bench.meters, runs))


def _rows(case: str, result: Race, nominal: float) -> list[Row]:
    peers = [name for name in [*result.samples, *result.failures] if name not in (OURS, FLOOR)]
    wall = result.value(OURS, WALL)
    timed = {WALL: "ms"}
    if result.value(OURS, LOOP_GAP) is not None:
        timed[LOOP_GAP] = "ms"
    path = Row(f"{case}/{WALL}", wall, nominal, "critical path: plan + search + answer, nominal", "ms", result.runs)
    return [
        path,
        *[
            row
            for quantity, unit in timed.items()
            for row in result.rows(case, OURS, [FLOOR, *peers], {quantity: unit})
        ],
        *result.rows(case, OURS, peers, COUNTS),
    ]
