"""The long form: a hundred kills of each kind; prints a table and writes build/kills-sessions.json."""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.kills_sessions.harness import Tally, kill_servers, kill_writers
from tests.kills_sessions.postgres import PostgresServer, why_not


def main() -> int:
    """Kill, count, and give 1 where something was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of each kind (default: 100)")
    kills = parser.parse_args().kills
    results: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sessions.db"
        _run(results, "SQLite, writer killed", lambda: kill_writers(str(path), kills))
        with sqlite3.connect(path) as connection:
            print("SQLite integrity_check:", connection.execute("PRAGMA integrity_check").fetchone()[0])
    if reason := why_not():
        print(f"PostgreSQL: not run, {reason}")
    else:
        with PostgresServer() as server:
            _run(results, "PostgreSQL, writer killed", lambda: kill_writers(server.url, kills))
            _run(results, "PostgreSQL, server killed", lambda: kill_servers(server, kills))
    out = Path("build/kills-sessions.json")
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({name: asdict(tally) for name, tally in results.items()}, indent=1))
    return int(any(tally.lost or tally.broken for tally in results.values()))


def _run(results: dict[str, Tally], name: str, kill: Callable[[], Tally]) -> None:
    begun = time.monotonic()
    tally = kill()
    results[name] = tally
    print(
        f"{name}: {tally.kills} kills, {tally.told} turns told, {tally.lost} lost, {tally.broken} broken, "
        f"{tally.under_way} stored untold, longest gap {tally.longest_gap:.2f} s, {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    for problem in tally.problems[:10]:
        print("  ", problem)


if __name__ == "__main__":
    sys.exit(main())
