"""Runs the benchmarks, writes ``build/bench.json`` and prints it as a table."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.measure import Row, print_rows, write_json

BENCHMARKS: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "import": ("engines.import_time", {"runs": 11}, {"runs": 1}),
    "critical_path": ("engines.critical_path", {"runs": 7}, {"runs": 1, "llm_seconds": 0.03, "search_seconds": 0.005}),
    "chroma": ("engines.chroma", {"runs": 15}, {"runs": 1, "passages_each": 10}),
    "throughput": ("engines.throughput", {"runs": 5}, {"runs": 1, "rounds": 1, "concurrent": 10}),
    "server": ("server.server", {}, {"requests": 40, "streams": 5, "many": 100, "llm_seconds": 0.05}),
}
"""By name: the module and its function, and the arguments in full and quick."""


def run(name: str, *, quick: bool) -> list[Row]:
    """Run a benchmark; what it needs (torch, chromadb) is loaded now."""
    place, in_full, quickly = BENCHMARKS[name]
    module, function = place.split(".")
    rows: list[Row] = getattr(import_module(f"tests.benchmarks.{module}"), function)(**(quickly if quick else in_full))
    return rows


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="once, with less of everything: shows that it runs")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="this one alone; may be given again")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"), help="where the rows go as JSON")
    arguments = parser.parse_args()
    # Threads of torch that spin while they wait take the cores from whatever else runs, and from one another: up to
    # ten times slower on a busy machine, for whichever contestant has fewer of them. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    rows = [row for name in arguments.only or BENCHMARKS for row in run(name, quick=arguments.quick)]
    write_json([asdict(row) for row in rows], arguments.out)
    print_rows(rows)


if __name__ == "__main__":
    main()
