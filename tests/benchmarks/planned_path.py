"""Retrieval alone against its critical path: a plan read while it streams, and a plan of two waves.

*Streamed plan*: the model writes a plan of four sub-queries, token by token, over 600 ms; each search takes 50 ms. The
floor is the bare stream and one search after it: what is above it is what retrieval takes beyond "one search after the
plan's last token".

*Two waves*: effort medium; each call of the model takes 300 ms, each search 50 ms. The floor is the bare calls (plan,
findings, look for gaps) and the two searches, one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from llama_index.core.base.llms.types import ChatMessage

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from tests.benchmarks.corpus import QUESTION, SOURCES
from tests.benchmarks.critical_path import PER_SEARCH, Bench
from tests.benchmarks.measure import WALL, Contestant, arace, race
from tests.benchmarks.model_server import ModelServer
from tests.benchmarks.report import Row

__all__ = ["planned_path"]

OURS: Final = "AgenticRetriever"
PROMPTS: Final = {
    "plan": "You plan searches",
    "waves": "You plan searches one after another",
    "findings": "Findings:",
    "verdict": "Verdict:",
}


def planned_path(
    runs: int, *, stream_seconds: float = 0.6, llm_seconds: float = 0.3, search_seconds: float = 0.05
) -> list[Row]:
    """Measure both cases, sync and async."""
    rows = []
    with ModelServer(0.0, stream_seconds) as server:
        rows += _case("streamed_plan", server, "low", ["plan", ""], runs, search_seconds)
    with ModelServer(llm_seconds) as server:
        rows += _case("two_waves", server, "medium", ["waves", "", "findings", "", "verdict"], runs, search_seconds)
    return rows


def _case(case: str, server: ModelServer, effort: str, path: list[str], runs: int, search_seconds: float) -> list[Row]:
    bench = Bench.build(server, native=True, latency=search_seconds)
    floor = "floor: " + " + ".join(step or "search" for step in path) + ", bare"
    rows = []
    for mode in ("sync", "async"):
        ours = _retriever(bench, effort)
        if mode == "sync":
            contestants = [Contestant(floor, _bare(bench, path)), Contestant(OURS, partial(ours.retrieve, QUESTION))]
            result = race(contestants, bench.meters, runs)
        else:
            contestants = [Contestant(floor, _abare(bench, path)), Contestant(OURS, partial(ours.aretrieve, QUESTION))]
            result = asyncio.run(arace(contestants, bench.meters, runs))
        rows += result.rows(f"planned_path/{case}, {mode}", OURS, [floor], {WALL: "ms", "LLM calls": "calls"})
    return rows


def _retriever(bench: Bench, effort: str) -> AgenticRetriever:
    sources = [
        KnowledgeSource(name, SOURCES[name], index=index, similarity_top_k=PER_SEARCH, hybrid=False)
        for name, index in bench.indexes.items()
    ]
    return AgenticRetriever(sources, llm=bench.server.llm(), effort=effort)


def _bare(bench: Bench, path: list[str]) -> Callable[[], None]:
    llm, retriever = bench.server.llm(), bench.retrievers()[0]

    def walk() -> None:
        for step in path:
            if step:
                for _ in llm.stream_chat([ChatMessage(PROMPTS[step])]):
                    pass
            else:
                retriever.retrieve(QUESTION)

    return walk


def _abare(bench: Bench, path: list[str]) -> Callable[[], Any]:
    llm, retriever = bench.server.llm(), bench.retrievers()[0]

    async def walk() -> None:
        for step in path:
            if step:
                async for _ in await llm.astream_chat([ChatMessage(PROMPTS[step])]):
                    pass
            else:
                await retriever.aretrieve(QUESTION)

    return walk
