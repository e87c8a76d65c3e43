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

from llama_index_agentic_kb import AgenticRetriever
from tests.benchmarks.corpus import QUESTION, knowledge_sources
from tests.benchmarks.critical_path import PER_SEARCH, Bench
from tests.benchmarks.measure import WALL, Row, arace, race
from tests.benchmarks.model_server import ModelServer

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
    prompts = [PROMPTS[step] if step else "" for step in path]
    quantities = {WALL: "ms", "LLM calls": "calls"}

    def ours() -> AgenticRetriever:
        sources = knowledge_sources(bench.indexes, similarity_top_k=PER_SEARCH, hybrid=False)
        return AgenticRetriever(sources, llm=server.llm(), effort=effort)

    asked: dict[str, Callable[[], Any]] = {
        floor: bench.bare(prompts, stream=True),
        OURS: partial(ours().retrieve, QUESTION),
    }
    rows = race(asked, runs, bench.meters).rows(f"planned_path/{case}, sync", OURS, quantities)
    awaited: dict[str, Callable[[], Any]] = {
        floor: bench.abare(prompts, stream=True),
        OURS: partial(ours().aretrieve, QUESTION),
    }
    result = asyncio.run(arace(awaited, runs, bench.meters))
    return rows + result.rows(f"planned_path/{case}, async", OURS, quantities)
