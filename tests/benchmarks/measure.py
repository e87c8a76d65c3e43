"""Measures contestants in turns: one run of each, then the next, after a warm-up of all."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from llama_index_agentic_kb.search.embedding import SHARED_CACHE
from tests.benchmarks.report import Row

__all__ = ["LOOP_GAP", "WALL", "Contestant", "Race", "arace", "longest_gap", "race"]

WALL: Final = "wall"
LOOP_GAP: Final = "longest loop gap"
TICK: Final = 0.001

Meters = Callable[[], Mapping[str, int]]
"""Gives the running totals of whatever is counted (calls, tokens): the difference over a run is that run's."""


@dataclass(frozen=True)
class Contestant:
    """Something that is measured.

    Args:
        name: Names it in rows.
        ask: Does the work once; in an async race it gives an awaitable of it.
    """

    name: str
    ask: Callable[[], Any]


@dataclass
class Race:
    """What was measured: by contestant, by quantity, one value a run."""

    runs: int
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def turns(self, contestants: Sequence[Contestant]) -> Iterator[tuple[int, Contestant]]:
        """Give whose turn it is: all once for warming up (turn 0), then ``runs`` times in the same order.

        A single run has no warm-up: it shows that things work, and its times mean nothing.

        Before each turn garbage is collected; what is there before and after the warm-up is never looked through
        again, so that the collector's pauses over a heap full of libraries are counted for nobody. Our cache of query
        vectors is emptied too: the peers have none, and the same question is asked in each turn.
        """
        try:
            for turn in range(0 if self.runs > 1 else 1, self.runs + 1):
                if turn <= 1:
                    gc.collect()
                    gc.freeze()
                for contestant in contestants:
                    if contestant.name not in self.failures:
                        gc.collect()
                        SHARED_CACHE.clear()
                        yield turn, contestant
        finally:
            gc.unfreeze()

    def note(self, name: str, quantities: Mapping[str, float]) -> None:
        """Add a run of a contestant."""
        for quantity, value in quantities.items():
            self.samples.setdefault(name, {}).setdefault(quantity, []).append(value)

    def value(self, name: str, quantity: str) -> float | None:
        """Give a contestant's median; None where it failed or the quantity was not measured."""
        values = self.samples.get(name, {}).get(quantity)
        return None if name in self.failures or not values else median(values)

    def rows(self, case: str, ours: str, peers: Sequence[str], units: Mapping[str, str]) -> list[Row]:
        """Compare one contestant with the others.

        Args:
            case: Begins each row's name.
            ours: The contestant that is ours.
            peers: The others, as rows are to name them.
            units: The quantities to compare, with their units.
        """
        rows = []
        for quantity, unit in units.items():
            for peer in peers:
                failure = self.failures.get(peer)
                told = peer if failure is None else f"{peer} failed: {failure}"
                measured = self.value(ours, quantity), self.value(peer, quantity)
                rows.append(Row(f"{case}/{quantity}", *measured, told, unit, self.runs))
        return rows


def race(contestants: Sequence[Contestant], meters: Meters, runs: int) -> Race:
    """Measure sync contestants: wall time in ms, and what the meters count."""
    result = Race(runs)
    with _loop_of_a_script():
        for turn, contestant in result.turns(contestants):
            before, start = meters(), time.perf_counter()
            try:
                contestant.ask()
            except Exception as error:  # noqa: BLE001 (a peer that can't do a case is a result too)
                result.failures[contestant.name] = _told(error)
                continue
            wall = (time.perf_counter() - start) * 1000
            if turn:  # the first is the warm-up
                result.note(contestant.name, {WALL: wall, **_counted(before, meters())})
    return result


async def arace(contestants: Sequence[Contestant], meters: Meters, runs: int) -> Race:
    """Measure async contestants: wall time and longest loop gap in ms, and what the meters count."""
    result = Race(runs)
    for turn, contestant in result.turns(contestants):
        before, start = meters(), time.perf_counter()
        try:
            gap = await longest_gap(contestant.ask)
        except Exception as error:  # noqa: BLE001 (a peer that can't do a case is a result too)
            result.failures[contestant.name] = _told(error)
            continue
        wall = (time.perf_counter() - start) * 1000
        if turn:
            result.note(contestant.name, {WALL: wall, LOOP_GAP: gap, **_counted(before, meters())})
    return result


async def longest_gap(ask: Callable[[], Awaitable[Any]]) -> float:
    """Do the work while a task ticks every ms; give the longest time between two ticks, in ms (never below 1)."""
    longest = 0.0
    last = time.perf_counter()

    def note() -> None:
        nonlocal longest, last
        now = time.perf_counter()
        longest, last = max(longest, now - last), now

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK)
            note()

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)
    try:
        await ask()
        note()  # the work may end with a block that no tick has seen the end of
    finally:
        ticker.cancel()
    return longest * 1000


@contextmanager
def _loop_of_a_script() -> Iterator[None]:
    """Set an event loop for the main thread, as a script has that never called ``asyncio.run``.

    LlamaIndex's sync calls then run their async parts on this one loop, else on a new one each time, which costs them
    far more with an async client.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _counted(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:80]}"
