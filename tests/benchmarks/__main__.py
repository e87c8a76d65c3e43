"""Runs the benchmarks, writes ``build/bench.json`` and prints it as a table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.report import Row, print_rows, write_rows


def _import(*, quick: bool) -> list[Row]:
    from tests.benchmarks.import_time import import_time  # noqa: PLC0415 (each is imported when it runs)

    return import_time(1 if quick else 11)


def _critical_path(*, quick: bool) -> list[Row]:
    from tests.benchmarks.critical_path import critical_path  # noqa: PLC0415

    return critical_path(1, llm_seconds=0.03, search_seconds=0.005) if quick else critical_path(7)


def _chroma(*, quick: bool) -> list[Row]:
    from tests.benchmarks.chroma import chroma  # noqa: PLC0415 (loads torch and chromadb)

    return chroma(1, passages_each=10) if quick else chroma(15)


def _throughput(*, quick: bool) -> list[Row]:
    from tests.benchmarks.throughput import throughput  # noqa: PLC0415

    return throughput(1, rounds=1, concurrent=10) if quick else throughput(5)


def _embedding(*, quick: bool) -> list[Row]:
    from tests.benchmarks.embedding import embedding  # noqa: PLC0415 (loads torch)

    return embedding(1, each=2) if quick else embedding(7)


def _planned_path(*, quick: bool) -> list[Row]:
    from tests.benchmarks.planned_path import planned_path  # noqa: PLC0415

    return planned_path(1, stream_seconds=0.06, llm_seconds=0.03, search_seconds=0.005) if quick else planned_path(9)


def _load(*, quick: bool) -> list[Row]:
    from tests.benchmarks.load import Size, load  # noqa: PLC0415 (loads chromadb)

    return load(Size(chunks=200, questions=20, threads=10, stopped=2) if quick else Size())


BENCHMARKS: dict[str, Callable[..., list[Row]]] = {
    "import": _import,
    "critical_path": _critical_path,
    "planned_path": _planned_path,
    "chroma": _chroma,
    "throughput": _throughput,
    "embedding": _embedding,
    "load": _load,
}


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
    rows = [row for name in arguments.only or BENCHMARKS for row in BENCHMARKS[name](quick=arguments.quick)]
    write_rows(rows, arguments.out)
    print_rows(rows)


if __name__ == "__main__":
    main()
