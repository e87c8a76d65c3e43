"""Runs the benchmarks, writes ``build/bench.json`` and prints it as a table."""

from __future__ import annotations

import argparse
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


BENCHMARKS: dict[str, Callable[..., list[Row]]] = {
    "import": _import,
    "critical_path": _critical_path,
    "chroma": _chroma,
    "throughput": _throughput,
    "embedding": _embedding,
}


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="once, with less of everything: shows that it runs")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="this one alone; may be given again")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"), help="where the rows go as JSON")
    arguments = parser.parse_args()
    rows = [row for name in arguments.only or BENCHMARKS for row in BENCHMARKS[name](quick=arguments.quick)]
    write_rows(rows, arguments.out)
    print_rows(rows)


if __name__ == "__main__":
    main()
