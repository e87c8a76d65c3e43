"""Measures contestants in turns (one run of each, then the next, after a warm-up of all), and compares the medians."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.table import Table

from llama_index_agentic_kb.search.embedding import SHARED_CACHE

WALL: Final = "wall"
LOOP_GAP: Final = "longest loop gap"
TICK: Final = 0.001

Contestants: TypeAlias = Mapping[str, Callable[[], Any]]
"""What is measured, by its name in rows: does the work once; in an async race it returns an awaitable of it."""

Meters: TypeAlias = Callable[[], Mapping[str, int]]
"""Returns the running totals of whatever is counted (calls, tokens): the difference over a run is that run's."""


@dataclass(frozen=True)
class Row:
    """One comparison: the medians of so many runs, ours and the peer's (None where it failed or there is none)."""

    name: str
    ours: float | None
    peer: float | None
    peer_name: str
    unit: str
    runs: int
    ratio: float | None = field(init=False)
    """Ours over the peer's: below 1 is better. None where either is missing or the peer's is 0."""

    def __post_init__(self) -> None:
        """Work the ratio out, from the numbers as measured, and round what is shown."""
        ratio = self.ours / self.peer if self.ours is not None and self.peer else None
        object.__setattr__(self, "ratio", None if ratio is None else round(ratio, 3))
        for name in ("ours", "peer"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else round(value, 2))


@dataclass
class Race:
    """What was measured: by contestant, by quantity, one value a run; and how a contestant failed."""

    runs: int
    meters: Meters
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    warm: bool = False

    def turns(self, contestants: Contestants) -> Iterator[str]:
        """Yield whose turn it is: all once to warm up (a single run only shows that things work), then ``runs`` times.

        Before each turn garbage is collected, and never what was there before: the collector's pauses over a heap full
        of libraries are counted for nobody. Our cache of query vectors is emptied: the peers have none.
        """
        try:
            for turn in range(0 if self.runs > 1 else 1, self.runs + 1):
                self.warm = turn > 0
                if turn <= 1:
                    gc.collect()
                    gc.freeze()
                for name in contestants:
                    if name not in self.failures:
                        gc.collect()
                        SHARED_CACHE.clear()
                        yield name
        finally:
            gc.unfreeze()

    @contextmanager
    def measured(self, name: str) -> Iterator[dict[str, float]]:
        """Note the wall time of a run in ms, what the meters count, and what is put into the mapping.

        A contestant that can't do a case is a result too.
        """
        quantities: dict[str, float] = {}
        before, start = self.meters(), time.perf_counter()
        try:
            yield quantities
        except Exception as error:  # noqa: BLE001 (whatever a peer raises)
            self.failures[name] = f"{type(error).__name__}: {str(error)[:80]}"
            return
        quantities[WALL] = (time.perf_counter() - start) * 1000
        quantities.update({counted: total - before[counted] for counted, total in self.meters().items()})
        for quantity, value in quantities.items() if self.warm else ():
            self.samples.setdefault(name, {}).setdefault(quantity, []).append(value)

    def value(self, name: str, quantity: str, each: int = 1) -> float | None:
        """Return a contestant's median, divided; None where it failed or the quantity was not measured."""
        values = self.samples.get(name, {}).get(quantity)
        return None if name in self.failures or not values else median(values) / each

    def rows(self, case: str, ours: str, units: Mapping[str, str], *, without: str = "", each: int = 1) -> list[Row]:
        """Compare ours with each other contestant but ``without``, by quantity; numbers are divided by ``each``."""
        rows = []
        for quantity, unit in units.items():
            for peer in dict.fromkeys([*self.samples, *self.failures]):
                if peer not in {ours, without}:
                    mine, theirs = self.value(ours, quantity, each), self.value(peer, quantity, each)
                    name = f"{peer} failed: {self.failures[peer]}" if peer in self.failures else peer
                    rows.append(Row(f"{case}/{quantity}", mine, theirs, name, unit, self.runs))
        return rows


def race(contestants: Contestants, runs: int, meters: Meters = dict) -> Race:
    """Measure sync contestants: wall time, and what the meters count.

    The main thread has an event loop, as in a script: LlamaIndex's sync calls are far slower where they make their own.
    """
    result, loop = Race(runs, meters), asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        for name in result.turns(contestants):
            with result.measured(name):
                contestants[name]()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return result


async def arace(contestants: Contestants, runs: int, meters: Meters = dict) -> Race:
    """Measure async contestants: wall time and longest loop gap in ms, and what the meters count."""
    result = Race(runs, meters)
    for name in result.turns(contestants):
        with result.measured(name) as quantities:
            quantities[LOOP_GAP] = await _longest_gap(contestants[name])
    return result


async def _longest_gap(ask: Callable[[], Awaitable[Any]]) -> float:
    """Do the work while a task ticks every ms; return the longest time between two ticks, in ms (never below 1)."""
    longest, last = 0.0, time.perf_counter()

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


def write_json(data: Any, path: Path) -> None:
    """Write data as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def show(table: Table) -> None:
    """Print a table; a pipe has no width of its own, and 80 columns would fold every cell."""
    Console(width=None if Console().is_terminal else 160).print(table)


def print_rows(rows: Sequence[Row]) -> None:
    """Print rows as a table."""
    table = Table("name", "peer", title="ratio = ours / peer; below 1 is better")
    for heading in ("ours", "peer", "ratio", "unit", "runs"):
        table.add_column(heading, justify="left" if heading == "unit" else "right", no_wrap=True)
    before = ""
    for row in rows:
        if row.name != before:
            table.add_section()
        shown = [shown_number(value) for value in (row.ours, row.peer, row.ratio)]
        table.add_row(row.name if row.name != before else "", row.peer_name, *shown, row.unit, str(row.runs))
        before = row.name
    show(table)


def shown_number(value: float | None) -> str:
    """Return a number for a table."""
    return "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep processes busy beside this one."""
    code = "while True: pass"
    beside = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in beside:
            one.kill()
            one.wait()
