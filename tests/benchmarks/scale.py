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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tests.benchmarks.scale_store import ScaleStore, measure_filtered, measure_plain

SIZES: Final = "1000,10000,100000,1000000"
HARD: Final = 20_000
USERS: Final = {1: "1 user", 16: "16 users"}
SELECTIVITIES: Final = {"10 %": ("tenth", 10), "1 %": ("hundredth", 100)}
MEGABYTE: Final = 1024 * 1024

Result = dict[str, Any]


def build(cache: Path, size: int, *, clustered: bool = True) -> Result:
    """Build vectors and records of a size unless they are there."""
    at = ScaleStore(cache, size, clustered=clustered)
    seconds = at.build(lambda text: print(text, file=sys.stderr, flush=True))
    return {"seconds": seconds, **_disk(at, "graphs", "documents.db"), "peak memory MB": _peak_megabytes()}


def build_lexical(cache: Path, size: int) -> Result:
    """Build the lexical index of a size unless it is there."""
    at = ScaleStore(cache, size)
    return {"seconds": at.build_lexical(), **_disk(at, "lexical"), "peak memory MB": _peak_megabytes()}


def measure(cache: Path, size: int, searches: int, *, clustered: bool = True) -> Result:
    """Measure a size that was built; without clusters, where Chroma's graph loses its way, filters alone."""
    at = ScaleStore(cache, size, clustered=clustered)
    result: Result = {"chunks": size} if clustered else {"chunks": size, "vectors": "without clusters"}
    with at.open() as store:
        for kind in ("dense", "hybrid") if clustered else ():
            started, hybrid = time.perf_counter(), kind == "hybrid"
            measure_plain(store, at, 1, 1, hybrid=hybrid)
            first = "first hybrid search" if hybrid else "first search"
            result[first] = {"ms": (time.perf_counter() - started) * 1000}
            for users, name in USERS.items():
                result[f"{kind}, {name}"] = measure_plain(store, at, users, searches, hybrid=hybrid)
            result[f"memory, {kind}"] = {"MB": _megabytes()}
        for share, (key, modulus) in SELECTIVITIES.items():
            found = measure_filtered(store, at, key, modulus, searches)
            result[f"filter {share}, ours"] = found["ours"]
            result[f"filter {share}, ours, new filter"] = found["first"]
            result[f"filter {share}, Chroma's own"] = found["chroma"]
            result[f"filter {share}, note"] = found["note"]
    if clustered:
        result["memory, all"] = {"MB": _megabytes(), "peak MB": _peak_megabytes()}
    return result


def _disk(at: ScaleStore, *parts: str) -> dict[str, float]:
    sizes = {}
    for part in parts:
        path = at.folder / "store" / part
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        sizes[f"{part} MB"] = sum(file.stat().st_size for file in files) / MEGABYTE
    return sizes


def _megabytes() -> float:
    """Return this process's memory."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return _peak_megabytes()
    line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _peak_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MEGABYTE if sys.platform == "darwin" else peak / 1024


def _in_a_process(step: str, size: int, clustered: bool, arguments: argparse.Namespace) -> Result:
    command = [sys.executable, "-m", "tests.benchmarks.scale", "--step", step, "--sizes", str(size)]
    command += ["--cache", str(arguments.cache), "--searches", str(arguments.searches)]
    command += [] if clustered else ["--unclustered"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def _print(results: list[Result]) -> None:
    """Print a table: quantities by size."""
    table = Table("", "", title="ms, unless a unit is named; recall is recall@10 against exact search")
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
    parser.add_argument("--unclustered", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        size, clustered = arguments.sizes[0], not arguments.unclustered
        steps: dict[str, Callable[[], Result]] = {
            "build": lambda: build(arguments.cache, size, clustered=clustered),
            "build BM25": lambda: build_lexical(arguments.cache, size),
            "measure": lambda: measure(arguments.cache, size, arguments.searches, clustered=clustered),
        }
        print(json.dumps(steps[arguments.step]()))
        return
    results: list[Result] = []
    cases = [*((size, True) for size in arguments.sizes), *([(arguments.hard, False)] if arguments.hard else [])]
    for size, clustered in cases:
        names = ("build", "build BM25") if clustered else ("build",)
        built = {name: _in_a_process(name, size, clustered, arguments) for name in names}
        results.append({**built, **_in_a_process("measure", size, clustered, arguments)})
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    _print(results)


if __name__ == "__main__":
    main()
