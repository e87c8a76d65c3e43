"""Wall time against the critical path: 4 sources x (4 sub-queries + the question), a model and sources with latency.

The model is the real OpenAI client against a server in another process; the sources are vector indexes whose store
takes its time, with or without a native ``aquery`` (without one, core's default runs the sync query on the loop, as
it does with Chroma). Each search finds 2 passages, each retrieval 8. SubQuestionQueryEngine asks each of the 4
sub-queries of each of the 4 sources, as one sub-question has one tool. Async clients may not keep connections
(``LoopbackOpenAI``'s default), which spares LlamaIndex's sync calls the failures they have with servers that do.

The floor is what nobody can be faster than: two bare calls of the model and one search, one after another, measured in
the same turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
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
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult
from numpy.typing import NDArray

from llama_index_agentic_kb import KnowledgeBase
from llama_index_agentic_kb.testing import HashEmbedding
from tests.benchmarks.corpus import QUESTION, SOURCES, SUB_QUERIES, fused, knowledge_sources, passages
from tests.benchmarks.measure import LOOP_GAP, WALL, Race, Row, arace, race
from tests.benchmarks.model_server import ModelServer

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
    """What all contestants of a case share; each has a model client of its own."""

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

    def engines(self, *, use_async: bool = True) -> dict[str, BaseQueryEngine]:
        """Return the peers; without ``use_async``, those that have a sync way of their own."""
        llm, suffix = self.server.llm, "" if use_async else "(use_async=False)"
        made: dict[str, BaseQueryEngine] = {
            f"QueryFusionRetriever{suffix} + compact": RetrieverQueryEngine.from_args(
                self._fused(model := llm(), use_async=use_async), llm=model
            ),
            f"SubQuestionQueryEngine{suffix}": self._sub_question(llm(), use_async=use_async),
        }
        if use_async:
            model = llm()
            made["CitationQueryEngine"] = CitationQueryEngine(self._fused(model), llm=model)
        return made

    def ours(self) -> BaseQueryEngine:
        sources = knowledge_sources(self.indexes, similarity_top_k=PER_SEARCH)
        base = KnowledgeBase(sources, llm=self.server.llm(), similarity_top_k=PER_RETRIEVAL)
        return base.warm_up().as_query_engine("answerSynthesis")

    def _sub_question(self, llm: LLM, *, use_async: bool) -> BaseQueryEngine:
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

    def _fused(self, llm: LLM, *, use_async: bool = True) -> QueryFusionRetriever:
        queries = len(SUB_QUERIES) + 1
        return fused(self.retrievers(), llm, top_k=PER_RETRIEVAL, queries=queries, use_async=use_async)

    def bare(self, path: Sequence[str], *, stream: bool = False) -> Callable[[], None]:
        """Return a walk along a path with nothing around it: a prompt is a call of the model, "" is a search."""
        llm, retriever = self.server.llm(), self.retrievers()[0]

        def walk() -> None:
            for prompt in path:
                if not prompt:
                    retriever.retrieve(QUESTION)
                elif stream:
                    list(llm.stream_chat([ChatMessage(prompt)]))
                else:
                    llm.chat([ChatMessage(prompt)])

        return walk

    def abare(self, path: Sequence[str], *, stream: bool = False, native: bool = True) -> Callable[[], Any]:
        """Return the same on an event loop; sources without a native way are searched on a thread."""
        llm, retriever = self.server.llm(), self.retrievers()[0]

        async def walk() -> None:
            for prompt in path:
                if not prompt:
                    search = (
                        retriever.aretrieve(QUESTION) if native else asyncio.to_thread(retriever.retrieve, QUESTION)
                    )
                    await search
                elif stream:
                    _ = [piece async for piece in await llm.astream_chat([ChatMessage(prompt)])]
                else:
                    await llm.achat([ChatMessage(prompt)])

        return walk


def critical_path(
    runs: int, llm_seconds: float = 0.3, search_seconds: float = 0.05, natives: Sequence[bool] = (True, False)
) -> list[Row]:
    """Measure the four cases: sync and async, sources with and without native async."""
    nominal = (2 * llm_seconds + search_seconds) * 1000
    path = [QUESTION, "", QUESTION]
    rows = []
    with ModelServer(llm_seconds) as server:
        for native in natives:
            sources = "native async sources" if native else "sync-only sources"
            bench = Bench.build(server, native=native, latency=search_seconds)
            engines = {OURS: bench.ours(), **bench.engines(), **bench.engines(use_async=False)}
            asked = {name: partial(engine.query, QUESTION) for name, engine in engines.items()}
            result = race({FLOOR: bench.bare(path), **asked}, runs, bench.meters)
            rows += _rows(f"critical_path/sync, {sources}", result, nominal)
            engines = {OURS: bench.ours(), **bench.engines()}
            awaited = {name: partial(engine.aquery, QUESTION) for name, engine in engines.items()}
            result = asyncio.run(arace({FLOOR: bench.abare(path, native=native), **awaited}, runs, bench.meters))
            rows += _rows(f"critical_path/async, {sources}", result, nominal)
    return rows


def _rows(case: str, result: Race, nominal: float) -> list[Row]:
    wall, path = result.value(OURS, WALL), "critical path: plan + search + answer, nominal"
    timed = {WALL: "ms"} if result.value(OURS, LOOP_GAP) is None else {WALL: "ms", LOOP_GAP: "ms"}
    return [
        Row(f"{case}/{WALL}", wall, nominal, path, "ms", result.runs),
        *result.rows(case, OURS, timed),
        *result.rows(case, OURS, COUNTS, without=FLOOR),
    ]
