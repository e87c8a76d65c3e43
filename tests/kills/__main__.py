"""Kills ingestions and repairs with SIGKILL; prints kills, lost, opened, repaired; writes ``build/kills.json``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.kills.series import Result, kills_during_ingestion, kills_during_repair
from tests.kills_sessions.postgres import PostgresServer

Series = Callable[[int, Path, int, Callable[[str], None]], Result]


def main() -> None:
    """Read the arguments and kill."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="processes killed during ingestion")
    parser.add_argument("--repairs", type=int, default=0, help="processes killed during repair")
    parser.add_argument("--postgres", type=int, default=0, help="writers, and in turn the server, killed in PostgreSQL")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/kills.json"))
    arguments = parser.parse_args()
    results = {
        "ingestion": _series(kills_during_ingestion, arguments.kills, arguments.seed),
        "repair": _series(kills_during_repair, arguments.repairs, arguments.seed),
        "postgres": _series(_in_postgres, arguments.postgres, arguments.seed),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    table = {name: asdict(result) for name, result in results.items() if result.kills}
    arguments.out.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    for name, result in results.items():
        if result.kills:
            print(_line(name, result))
    sys.exit(any(result.lost or result.doubled or result.not_found for result in results.values()))


def _series(series: Series, kills: int, seed: int) -> Result:
    if not kills:
        return Result()
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
        return series(kills, Path(folder), seed, lambda line: print(line, flush=True))


def _in_postgres(kills: int, folder: Path, seed: int, tell: Callable[[str], None]) -> Result:
    with PostgresServer() as server:
        return kills_during_ingestion(kills, folder, seed, tell, server)


def _line(name: str, result: Result) -> str:
    return (
        f"{name}: kills {result.kills} ({result.between} between acknowledgments), "
        f"acknowledged {result.acknowledged}, lost {len(result.lost)}, doubled {result.doubled}, "
        f"not found {result.not_found}/{result.tried}, opened with a graph {result.graphs}, "
        f"chunks outside of it {result.outside}, slowest opening {result.slowest:.1f} s, {result.chunks} chunks, "
        f"{result.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
