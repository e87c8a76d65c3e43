"""Queries embedded by the real MiniLM for 1 and 16 users at once, each asking its next one when it has its vector.

Ours are the query vectors of a request (``QueryEmbeddings``), without the cache: concurrent requests share batches.
The peer is LlamaIndex's own call for one query, on as many threads or tasks. The last rows are of a query that the
cache has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from math import ceil
from typing import Any, Final

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb import default_embed_model
from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.search.embedding import EmbeddingCache, QueryEmbeddings
from tests.benchmarks.corpus import QUESTION
from tests.benchmarks.measure import Contestant, Race
from tests.benchmarks.report import Row

__all__ = ["embedding"]

USERS: Final = (1, 16)

OURS: Final = "QueryEmbeddings"
PEER: Final = "HuggingFaceEmbedding"
UNITS: Final = {"p50": "ms", "p99": "ms", "wall per query": "ms"}

Times = list[float]


def embedding(runs: int, each: int = 10) -> list[Row]:
    """Measure ``each`` queries a user, sync and async, and one that the cache has."""
    model = default_embed_model()
    rows = []
    for users in USERS:
        sync = [
            Contestant(OURS, partial(_threads, partial(_ours, model), users, each)),
            Contestant(PEER, partial(_threads, model.get_query_embedding, users, each)),
        ]
        rows += _rows(f"embedding/sync, users at once: {users}", sync, runs)
        native = [
            Contestant(OURS, partial(_tasks, partial(_aours, model), users, each)),
            Contestant(PEER, partial(_tasks, model.aget_query_embedding, users, each)),
        ]
        rows += _rows(f"embedding/async, users at once: {users}", native, runs)
    return rows + _cached(model, runs, each)


def _cached(model: BaseEmbedding, runs: int, each: int) -> list[Row]:
    """Measure one query again and again, with our cache and without."""
    name = "QueryEmbeddings(cache=None)"
    contestants = [
        Contestant(OURS, partial(_threads, partial(_ours, model, cache=EmbeddingCache()), 1, each, again=True)),
        Contestant(name, partial(_threads, partial(_ours, model), 1, each, again=True)),
    ]
    return _rows("embedding/the same query again", contestants, runs)


def _rows(case: str, contestants: list[Contestant], runs: int) -> list[Row]:
    result = Race(runs)
    for turn, contestant in result.turns(contestants):
        started = time.perf_counter()
        times = sorted(contestant.ask())
        wall = time.perf_counter() - started
        if turn:  # the first is the warm-up
            measured = {"p50": _rank(times, 0.5), "p99": _rank(times, 0.99), "wall per query": wall / len(times)}
            result.note(contestant.name, {quantity: seconds * 1000 for quantity, seconds in measured.items()})
    return result.rows(case, OURS, [one.name for one in contestants[1:]], UNITS)


def _rank(times: Times, share: float) -> float:
    return times[ceil(share * len(times)) - 1]


def _threads(ask: Callable[[str], Any], users: int, each: int, *, again: bool = False) -> Times:
    """Time each query of users on threads."""
    queries = _Queries(again=again)

    def user(_: int) -> Times:
        times = []
        for _ in range(each):
            query, started = queries.next(), time.perf_counter()
            ask(query)
            times.append(time.perf_counter() - started)
        return times

    with ThreadPoolExecutor(users) as pool:
        return [seconds for times in pool.map(user, range(users)) for seconds in times]


def _tasks(ask: Callable[[str], Awaitable[Any]], users: int, each: int) -> Times:
    """Time each query of users on one event loop."""
    queries = _Queries(again=False)
    times: Times = []

    async def user() -> None:
        for _ in range(each):
            query, started = queries.next(), time.perf_counter()
            await ask(query)
            times.append(time.perf_counter() - started)

    async def all_users() -> None:
        await asyncio.gather(*(user() for _ in range(users)))

    asyncio.run(all_users())
    return times


class _Queries:
    """Queries of about the same length, each another one, or the same again and again."""

    def __init__(self, *, again: bool) -> None:
        self._again = again
        self._number = count()

    def next(self) -> str:
        return QUESTION if self._again else f"{QUESTION} (number {next(self._number)})"


def _ours(model: BaseEmbedding, query: str, *, cache: EmbeddingCache | None = None) -> list[float]:
    return run(QueryEmbeddings(CallbackManager(), deadline=None, cache=cache).get(model, query))


async def _aours(model: BaseEmbedding, query: str) -> list[float]:
    return await arun(QueryEmbeddings(CallbackManager(), deadline=None, cache=None).get(model, query))
