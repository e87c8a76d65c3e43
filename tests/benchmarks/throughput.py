"""Many questions at once: minimal effort, no model, 4 sources in memory that take 5 ms each.

Ours is ``AgenticRetriever``, the peer ``QueryFusionRetriever(num_queries=1)``: both search the question at each source
and fuse. Wall time is of the whole batch, divided by its questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Literal

from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM
from tests.benchmarks.corpus import QUESTION, SOURCES, passages
from tests.benchmarks.measure import LOOP_GAP, WALL, Contestant, Race, arace, race
from tests.benchmarks.report import Row

__all__ = ["throughput"]

LATENCY: Final = 0.005
THREADS: Final = 32
PASSAGES: Final = 20
PER_RETRIEVAL: Final = 8

Mode = Literal["async", "sync"]

OURS: Final = "AgenticRetriever(effort='minimal')"
PEER: Final = "QueryFusionRetriever(num_queries=1)"


def throughput(runs: int, rounds: int = 10, concurrent: int = 100) -> list[Row]:
    """Measure 32 threads, each asking ``rounds`` questions, and ``concurrent`` questions on one event loop."""
    asked = THREADS * rounds
    rows = _rows(f"throughput/{THREADS} threads", _threads(runs, asked), asked)
    modes: dict[Mode, str] = {"async": "native async sources", "sync": "sync-only sources"}
    for mode, sources in modes.items():
        result = asyncio.run(_concurrent(runs, mode, concurrent))
        rows += _rows(f"throughput/{concurrent} async questions, {sources}", result, concurrent)
    return rows


def _threads(runs: int, asked: int) -> Race:
    retrievers: dict[str, BaseRetriever] = {
        OURS: _ours("sync"),
        PEER: _peer("sync"),
        f"{PEER}, use_async=False": _peer("sync", use_async=False),
    }
    with ThreadPoolExecutor(THREADS) as pool:

        def ask(retriever: BaseRetriever) -> None:
            list(pool.map(retriever.retrieve, [QUESTION] * asked))

        contestants = [Contestant(name, partial(ask, one)) for name, one in retrievers.items()]
        return race(contestants, _no_meters, runs)


async def _concurrent(runs: int, mode: Mode, asked: int) -> Race:
    retrievers: dict[str, BaseRetriever] = {OURS: _ours(mode), PEER: _peer(mode)}

    def batch(retriever: BaseRetriever) -> Callable[[], Any]:
        async def ask() -> None:
            await asyncio.gather(*(retriever.aretrieve(QUESTION) for _ in range(asked)))

        return ask

    return await arace([Contestant(name, batch(one)) for name, one in retrievers.items()], _no_meters, runs)


def _memory(mode: Mode) -> dict[str, MemoryRetriever]:
    return {name: MemoryRetriever(passages(name, PASSAGES), latency=LATENCY, mode=mode) for name in SOURCES}


def _ours(mode: Mode) -> BaseRetriever:
    sources = [KnowledgeSource(name, retriever=retriever) for name, retriever in _memory(mode).items()]
    return AgenticRetriever(sources, effort="minimal", similarity_top_k=PER_RETRIEVAL)


def _peer(mode: Mode, *, use_async: bool = True) -> BaseRetriever:
    return QueryFusionRetriever(
        list(_memory(mode).values()),
        llm=ScriptedLLM(),  # never asked
        mode=FUSION_MODES.RECIPROCAL_RANK,
        similarity_top_k=PER_RETRIEVAL,
        num_queries=1,
        use_async=use_async,
    )


def _rows(case: str, result: Race, asked: int) -> list[Row]:
    peers = [name for name in [*result.samples, *result.failures] if name != OURS]
    rows = []
    for peer in peers:
        failure = result.failures.get(peer)
        each = _each(result.value(OURS, WALL), asked), _each(result.value(peer, WALL), asked)
        told = peer if failure is None else f"{peer} failed: {failure}"
        rows.append(Row(f"{case}/{WALL}", *each, told, "ms per question", result.runs))
    if result.value(OURS, LOOP_GAP) is not None:
        rows += result.rows(case, OURS, peers, {LOOP_GAP: "ms"})
    return rows


def _each(wall: float | None, asked: int) -> float | None:
    return None if wall is None else wall / asked


def _no_meters() -> Mapping[str, int]:
    return {}
