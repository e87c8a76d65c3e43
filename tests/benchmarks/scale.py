"""How build, memory and search grow from 1,000 to 1,000,000 chunks: ``python -m tests.benchmarks.scale``.

Each size is built once and kept in a cache directory; it is built and measured in processes of its own, so that memory
is that size's alone. A million chunks take more than half an hour, 10 GB of disk and 4 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tests.benchmarks.scale_search import measure_filtered, measure_plain
from tests.benchmarks.scale_store import ScaleStore, disk_bytes

__all__ = ["measure", "measure_hard"]

SIZES: Final = "1000,10000,100000,1000000"
HARD: Final = 20_000
USERS: Final = (1, 16)
SELECTIVITIES: Final = {"10 %": ("tenth", 10), "1 %": ("hundredth", 100)}
MEGABYTE: Final = 1024 * 1024

Result = dict[str, Any]


def build(cache: Path, size: int, *, clustered: bool = True) -> Result:
    """Build vectors and records of a size unless they are there."""
    at = ScaleStore(cache, size, clustered=clustered)
    seconds = at.build(lambda text: print(text, file=sys.stderr, flush=True))
    parts = {f"{part} MB": disk_bytes(at.folder / "store" / part) / MEGABYTE for part in ("graphs", "documents.db")}
    return {"seconds": seconds, **parts, "peak memory MB": _peak_megabytes()}


def build_lexical(cache: Path, size: int) -> Result:
    """Build the lexical index of a size unless it is there."""
    at = ScaleStore(cache, size)
    seconds = at.build_lexical()
    disk = disk_bytes(at.folder / "store" / "lexical") / MEGABYTE
    return {"seconds": seconds, "lexical MB": disk, "peak memory MB": _peak_megabytes()}


def measure(cache: Path, size: int, searches: int) -> Result:
    """Measure a size that was built."""
    at = ScaleStore(cache, size)
    result: Result = {"chunks": size}
    with at.open() as store:
        started = time.perf_counter()
        measure_plain(store, at, 1, 1, hybrid=False)
        result["first search"] = {"ms": (time.perf_counter() - started) * 1000}
        for users in USERS:
            result[f"dense, {_users(users)}"] = measure_plain(store, at, users, searches, hybrid=False)
        result["memory, dense"] = {"MB": _megabytes()}
        started = time.perf_counter()
        measure_plain(store, at, 1, 1, hybrid=True)
        result["first hybrid search"] = {"ms": (time.perf_counter() - started) * 1000}
        for users in USERS:
            result[f"hybrid, {_users(users)}"] = measure_plain(store, at, users, searches, hybrid=True)
        result["memory, hybrid"] = {"MB": _megabytes()}
        result |= _filters(store, at, searches)
    result["memory, all"] = {"MB": _megabytes(), "peak MB": _peak_megabytes()}
    return result


def measure_hard(cache: Path, size: int, searches: int) -> Result:
    """Measure filters over vectors without clusters, on which Chroma's graph loses its way."""
    at = ScaleStore(cache, size, clustered=False)
    with at.open() as store:
        return {"chunks": size, **_filters(store, at, searches)}


def _filters(store: Any, at: ScaleStore, searches: int) -> Result:
    result: Result = {}
    for share, (key, modulus) in SELECTIVITIES.items():
        found = measure_filtered(store, at, key, modulus, searches)
        result[f"filter {share}, ours"] = found["ours"]
        result[f"filter {share}, ours, new filter"] = found["first"]
        result[f"filter {share}, Chroma's own"] = found["chroma"]
        result[f"filter {share}, note"] = found["note"]
    return result


def _users(count: int) -> str:
    return "1 user" if count == 1 else f"{count} users"


def _megabytes() -> float:
    """Give this process's memory."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return _peak_megabytes()
    line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _peak_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MEGABYTE if sys.platform == "darwin" else peak / 1024


def _in_a_process(step: str, size: int, arguments: argparse.Namespace) -> Result:
    command = [sys.executable, "-m", "tests.benchmarks.scale", "--step", step, "--sizes", str(size)]
    command += ["--cache", str(arguments.cache), "--searches", str(arguments.searches)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def _run(arguments: argparse.Namespace) -> Iterator[Result]:
    for size in arguments.sizes:
        built = {name: _in_a_process(name, size, arguments) for name in ("build", "build BM25")}
        yield {**built, **_in_a_process("measure", size, arguments)}
    if arguments.hard:
        built = _in_a_process("build-hard", arguments.hard, arguments)
        hard = _in_a_process("measure-hard", arguments.hard, arguments)
        yield {"build": built, **hard, "vectors": "without clusters"}


def _print(results: list[Result]) -> None:
    """Print a table: quantities by size."""
    table = Table("", "", title="ms, unless a unit is told; recall is recall@10 against exact search")
    for result in results:
        table.add_column(f"{result['chunks']:,}{'*' if 'vectors' in result else ''}", justify="right", no_wrap=True)
    names = dict.fromkeys(name for result in results for name, value in result.items() if isinstance(value, Mapping))
    for name in names:
        quantities = dict.fromkeys(quantity for result in results for quantity in result.get(name, {}))
        for quantity in quantities:
            shown = [_number(result.get(name, {}).get(quantity)) for result in results]
            table.add_row(name, quantity, *shown)
        table.add_section()
    Console(width=None if Console().is_terminal else 140).print(table)
    if any("vectors" in result for result in results):
        print("* vectors without clusters, the hardest there are for Chroma's graph")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.replace("_", "").split(",")]


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale", description=__doc__)
    parser.add_argument("--sizes", type=_sizes, default=_sizes(SIZES), help=f"chunks, with commas; default {SIZES}")
    parser.add_argument("--hard", type=int, default=HARD, help=f"vectors without clusters; 0 for none; default {HARD}")
    parser.add_argument("--searches", type=int, default=400, help="searches of each measurement; default 400")
    parser.add_argument("--cache", type=Path, default=Path("build/scale"), help="where what was built is kept")
    parser.add_argument("--out", type=Path, default=Path("build/bench-scale.json"), help="where the numbers go as JSON")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps: dict[str, Callable[[int], Result]] = {
        "build": lambda size: build(arguments.cache, size),
        "build BM25": lambda size: build_lexical(arguments.cache, size),
        "build-hard": lambda size: build(arguments.cache, size, clustered=False),
        "measure": lambda size: measure(arguments.cache, size, arguments.searches),
        "measure-hard": lambda size: measure_hard(arguments.cache, size, arguments.searches),
    }
    if arguments.step:
        print(json.dumps(steps[arguments.step](arguments.sizes[0])))
        return
    results: list[Result] = []
    for result in _run(arguments):
        results.append(result)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    _print(results)


if __name__ == "__main__":
    main()
