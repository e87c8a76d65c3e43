"""Ours beside LlamaIndex's engines and retrievers: the critical path, Chroma, many questions at once, imports.

Wall time against the critical path: 4 sources x (4 sub-queries + the question), a model and sources with latency.

The model is the real OpenAI client against a server in another process; the sources are vector indexes whose store
takes its time, with or without a native ``aquery`` (without one, core's default runs the sync query on the loop, as
it does with Chroma). Each search finds 2 passages, each retrieval 8. SubQuestionQueryEngine asks each of the 4
sub-queries of each of the 4 sources, as one sub-question has one tool.

The floor is what nobody can be faster than: two bare calls of the model and one search, one after another, measured in
the same turns.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any, Final, Literal

import chromadb
import numpy as np
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import LLM
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult
from llama_index.vector_stores.chroma import ChromaVectorStore
from numpy.typing import NDArray

from llama_index_agentic_kb import AgenticRetriever, KnowledgeBase, KnowledgeSource, default_embed_model
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM
from tests.benchmarks.corpus import (
    QUESTION,
    SOURCES,
    SUB_QUERIES,
    ModelServer,
    fused,
    knowledge_sources,
    passages,
    reply_to,
)
from tests.benchmarks.measure import LOOP_GAP, WALL, Race, Row, arace, race

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

    def bare(self) -> None:
        """Call the model, search and call the model, with nothing around it."""
        self._llm.chat([ChatMessage(QUESTION)])
        self._retriever.retrieve(QUESTION)
        self._llm.chat([ChatMessage(QUESTION)])

    async def abare(self, *, native: bool) -> None:
        """Do the same on an event loop; sources without a native way are searched on a thread."""
        await self._llm.achat([ChatMessage(QUESTION)])
        one = self._retriever
        await (one.aretrieve(QUESTION) if native else asyncio.to_thread(one.retrieve, QUESTION))
        await self._llm.achat([ChatMessage(QUESTION)])

    @cached_property
    def _llm(self) -> LLM:
        return self.server.llm()

    @cached_property
    def _retriever(self) -> BaseRetriever:
        return self.retrievers()[0]


def critical_path(
    runs: int, llm_seconds: float = 0.3, search_seconds: float = 0.05, natives: Sequence[bool] = (True, False)
) -> list[Row]:
    """Measure the four cases: sync and async, sources with and without native async."""
    nominal = (2 * llm_seconds + search_seconds) * 1000
    rows = []
    with ModelServer(llm_seconds) as server:
        for native in natives:
            sources = "native async sources" if native else "sync-only sources"
            bench = Bench.build(server, native=native, latency=search_seconds)
            engines = {OURS: bench.ours(), **bench.engines()}
            every = engines | bench.engines(use_async=False)
            asked = {name: partial(engine.query, QUESTION) for name, engine in every.items()}
            result = race({FLOOR: bench.bare, **asked}, runs, bench.meters)
            rows += _rows(f"critical_path/sync, {sources}", result, nominal)
            awaited = {name: partial(engine.aquery, QUESTION) for name, engine in engines.items()}
            result = asyncio.run(arace({FLOOR: partial(bench.abare, native=native), **awaited}, runs, bench.meters))
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


COSINE: Final[Any] = {"hnsw": {"space": "cosine", "ef_search": 400}}
CHROMA_PER_SEARCH: Final = 5
CHROMA_PER_RETRIEVAL: Final = 10

RETRIEVER: Final = "AgenticRetriever"
FUSION: Final = "QueryFusionRetriever"
ENCODED: Final = {"embedding batches": "calls", "texts embedded": "texts"}


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
    """Measure retrieval over real Chroma with real MiniLM: 4 persistent collections x (4 sub-queries + the question).

    Both retrievers get the same sub-queries from a model in the process that takes no time: ``AgenticRetriever`` as a
    plan, ``QueryFusionRetriever`` as lines. What is left is embedding, searching and fusing.
    """
    model = default_embed_model()
    with _chroma_indexes(model, passages_each) as indexes:
        meter = EmbeddingMeter(model)
        sources = knowledge_sources(indexes, similarity_top_k=CHROMA_PER_SEARCH)
        retrievers = {
            RETRIEVER: AgenticRetriever(sources, llm=_scripted(), similarity_top_k=CHROMA_PER_RETRIEVAL),
            FUSION: _fusion(indexes),
            f"{FUSION}(use_async=False)": _fusion(indexes, use_async=False),
        }
        asked = {name: partial(retriever.retrieve, QUESTION) for name, retriever in retrievers.items()}
        rows = race(asked, runs, meter).rows("chroma/sync", RETRIEVER, {WALL: "ms", **ENCODED})
        awaited = {name: partial(retrievers[name].aretrieve, QUESTION) for name in (RETRIEVER, FUSION)}
        result = asyncio.run(arace(awaited, runs, meter))
        return rows + result.rows("chroma/async", RETRIEVER, {WALL: "ms", LOOP_GAP: "ms", **ENCODED})


@contextmanager
def _chroma_indexes(model: BaseEmbedding, passages_each: int) -> Iterator[dict[str, VectorStoreIndex]]:
    # Chroma may still be writing into it when it is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        database = chromadb.PersistentClient(folder)
        indexes = {}
        for name in SOURCES:
            collection = database.create_collection(name, embedding_function=None, configuration=COSINE)
            store = ChromaVectorStore(chroma_collection=collection)
            context = StorageContext.from_defaults(vector_store=store)
            nodes = passages(name, passages_each)
            indexes[name] = VectorStoreIndex(nodes, storage_context=context, embed_model=model)
        yield indexes


def _fusion(indexes: dict[str, VectorStoreIndex], *, use_async: bool = True) -> BaseRetriever:
    retrievers = [index.as_retriever(similarity_top_k=CHROMA_PER_SEARCH) for index in indexes.values()]
    return fused(retrievers, _scripted(), top_k=CHROMA_PER_RETRIEVAL, queries=len(SUB_QUERIES) + 1, use_async=use_async)


def _scripted() -> ScriptedLLM:
    def reply(messages: list[ChatMessage]) -> str:
        return reply_to("\n".join(message.content or "" for message in messages))

    return ScriptedLLM(reply)


LATENCY: Final = 0.005
THREADS: Final = 32
IN_MEMORY: Final = 20
PER_QUESTION: Final = 8

Mode = Literal["async", "sync"]

AT_MINIMAL: Final = "AgenticRetriever(effort='minimal')"
ONE_QUERY: Final = "QueryFusionRetriever(num_queries=1)"


def throughput(runs: int, rounds: int = 10, concurrent: int = 100) -> list[Row]:
    """Measure 32 threads, each asking ``rounds`` questions, and ``concurrent`` questions on one event loop.

    Minimal effort, no model, 4 sources in memory that take 5 ms each. Wall time is of the whole batch, divided.
    """
    asked, per_question = THREADS * rounds, {WALL: "ms per question"}
    with ThreadPoolExecutor(THREADS) as pool:

        def ask(retriever: BaseRetriever) -> None:
            list(pool.map(retriever.retrieve, [QUESTION] * asked))

        sync = {**_retrievers("sync"), f"{ONE_QUERY}, use_async=False": _one_query("sync", use_async=False)}
        result = race({name: partial(ask, retriever) for name, retriever in sync.items()}, runs)
    rows = result.rows(f"throughput/{THREADS} threads", AT_MINIMAL, per_question, each=asked)
    modes: dict[Mode, str] = {"async": "native async sources", "sync": "sync-only sources"}
    for mode, sources in modes.items():
        batches = {name: partial(_batch, retriever, concurrent) for name, retriever in _retrievers(mode).items()}
        result, case = asyncio.run(arace(batches, runs)), f"throughput/{concurrent} async questions, {sources}"
        rows += result.rows(case, AT_MINIMAL, per_question, each=concurrent)
        rows += result.rows(case, AT_MINIMAL, {LOOP_GAP: "ms"})
    return rows


async def _batch(retriever: BaseRetriever, asked: int) -> None:
    await asyncio.gather(*(retriever.aretrieve(QUESTION) for _ in range(asked)))


def _retrievers(mode: Mode) -> dict[str, BaseRetriever]:
    sources = [KnowledgeSource(name, retriever=_memory(name, mode)) for name in SOURCES]
    ours = AgenticRetriever(sources, effort="minimal", similarity_top_k=PER_QUESTION)
    return {AT_MINIMAL: ours, ONE_QUERY: _one_query(mode)}


def _memory(name: str, mode: Mode) -> MemoryRetriever:
    return MemoryRetriever(passages(name, IN_MEMORY), latency=LATENCY, mode=mode)


def _one_query(mode: Mode, *, use_async: bool = True) -> BaseRetriever:
    retrievers = [_memory(name, mode) for name in SOURCES]
    return fused(retrievers, ScriptedLLM(), top_k=PER_QUESTION, queries=1, use_async=use_async)


BUDGET_MS: Final = 50
HEAVY: Final = ("torch", "chromadb", "transformers", "openai")

OUR_IMPORTS: Final = f"""
import json, sys, time
def heavy():
    return [name for name in {HEAVY!r} if name in sys.modules]
start = time.perf_counter()
import llama_index.core
core = time.perf_counter()
before = heavy()
import llama_index_agentic_kb as package
added = time.perf_counter()
loaded = heavy()
package.KnowledgeBase, package.KnowledgeSource, package.AgenticRetriever, package.AgenticQueryEngine
names = time.perf_counter()
print(json.dumps({{
    "core": core - start, "package": added - core, "names": names - added,
    "loaded": [name for name in loaded if name not in before], "loaded_names": heavy(),
}}))
"""

PEER_IMPORTS: Final = """
import json, time
import llama_index.core
core = time.perf_counter()
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.query_engine import CitationQueryEngine, SubQuestionQueryEngine
print(json.dumps({"names": time.perf_counter() - core}))
"""
PEER_NAMES: Final = "QueryFusionRetriever, SubQuestionQueryEngine, CitationQueryEngine"


def import_time(runs: int) -> list[Row]:
    """Measure imports, each pair of runs in fresh processes.

    The added time is taken in the process that has just imported ``llama_index.core``: the two belong together.
    """
    if runs > 1:
        _probe(OUR_IMPORTS), _probe(PEER_IMPORTS)  # compiles, and warms the disk's cache
    pairs = [(_probe(OUR_IMPORTS), _probe(PEER_IMPORTS)) for _ in range(runs)]
    core, package, names = (1000 * median(ours[part] for ours, _ in pairs) for part in ("core", "package", "names"))
    peer = 1000 * median(theirs["names"] for _, theirs in pairs)
    loaded, loaded_names = (max(len(ours[part]) for ours, _ in pairs) for part in ("loaded", "loaded_names"))
    allowed = f"none of {', '.join(HEAVY)}"
    return [
        Row("import/added by the package", package, BUDGET_MS, "budget", "ms", runs),
        Row("import/added by the package", package, core, "import llama_index.core", "ms", runs),
        Row("import/added by the main names", names, peer, PEER_NAMES, "ms", runs),
        Row("import/heavy modules loaded by the package", loaded, 0, allowed, "modules", runs),
        Row("import/heavy modules loaded by the main names", loaded_names, 0, allowed, "modules", runs),
    ]


def _probe(program: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured
