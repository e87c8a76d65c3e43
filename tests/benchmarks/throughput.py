"""Many questions at once: minimal effort, no model, 4 sources in memory that take 5 ms each.

Ours is ``AgenticRetriever``, the peer ``QueryFusionRetriever(num_queries=1)``: both search the question at each source
and fuse. Wall time is of the whole batch, divided by its questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Literal

from llama_index.core.retrievers import BaseRetriever

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM
from tests.benchmarks.corpus import QUESTION, SOURCES, fused, passages
from tests.benchmarks.measure import LOOP_GAP, WALL, Race, Row, arace, race

LATENCY: Final = 0.005
THREADS: Final = 32
PASSAGES: Final = 20
PER_RETRIEVAL: Final = 8

Mode = Literal["async", "sync"]

OURS: Final = "AgenticRetriever(effort='minimal')"
PEER: Final = "QueryFusionRetriever(num_queries=1)"


def throughput(runs: int, rounds: int = 10, concurrent: int = 100) -> list[Row]:
    """Measure 32 threads, each asking ``rounds`` questions, and ``concurrent`` questions on one event loop."""
    asked, per_question = THREADS * rounds, {WALL: "ms per question"}
    rows = _threads(runs, asked).rows(f"throughput/{THREADS} threads", OURS, per_question, each=asked)
    modes: dict[Mode, str] = {"async": "native async sources", "sync": "sync-only sources"}
    for mode, sources in modes.items():
        result, case = asyncio.run(_concurrent(runs, mode, concurrent)), f"{concurrent} async questions, {sources}"
        rows += result.rows(f"throughput/{case}", OURS, per_question, each=concurrent)
        rows += result.rows(f"throughput/{case}", OURS, {LOOP_GAP: "ms"})
    return rows


def _threads(runs: int, asked: int) -> Race:
    retrievers = {OURS: _ours("sync"), PEER: _peer("sync"), f"{PEER}, use_async=False": _peer("sync", use_async=False)}
    with ThreadPoolExecutor(THREADS) as pool:

        def ask(retriever: BaseRetriever) -> None:
            list(pool.map(retriever.retrieve, [QUESTION] * asked))

        return race({name: partial(ask, retriever) for name, retriever in retrievers.items()}, runs)


async def _concurrent(runs: int, mode: Mode, asked: int) -> Race:
    def batch(retriever: BaseRetriever) -> Callable[[], Any]:
        async def ask() -> None:
            await asyncio.gather(*(retriever.aretrieve(QUESTION) for _ in range(asked)))

        return ask

    return await arace({OURS: batch(_ours(mode)), PEER: batch(_peer(mode))}, runs)


def _memory(name: str, mode: Mode) -> MemoryRetriever:
    return MemoryRetriever(passages(name, PASSAGES), latency=LATENCY, mode=mode)


def _ours(mode: Mode) -> BaseRetriever:
    sources = [KnowledgeSource(name, retriever=_memory(name, mode)) for name in SOURCES]
    return AgenticRetriever(sources, effort="minimal", similarity_top_k=PER_RETRIEVAL)


def _peer(mode: Mode, *, use_async: bool = True) -> BaseRetriever:
    never_asked = ScriptedLLM()
    retrievers = [_memory(name, mode) for name in SOURCES]
    return fused(retrievers, never_asked, top_k=PER_RETRIEVAL, queries=1, use_async=use_async)
