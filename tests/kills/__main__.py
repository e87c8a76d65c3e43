"""Kills ingestions, repairs and writers of sessions (SIGKILL); prints what was lost; writes ``build/kills.json``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from tests.kills.series import Result, kills_during_ingestion, kills_during_repair, kills_of_sessions
from tests.kills_sessions.postgres import PostgresServer, why_not


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="processes killed during ingestion")
    parser.add_argument("--repairs", type=int, default=0, help="processes killed during repair")
    parser.add_argument("--postgres", type=int, default=0, help="writers, and in turn the server, killed in PostgreSQL")
    parser.add_argument("--sessions", type=int, default=0, help="writers of sessions killed, on SQLite and PostgreSQL")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/kills.json"))
    given = parser.parse_args()
    results: dict[str, Result] = {}
    with nullcontext() if why_not() or not (given.postgres or given.sessions) else PostgresServer() as server:
        for name, series, kills, where in (
            ("ingestion", kills_during_ingestion, given.kills, None),
            ("repair", kills_during_repair, given.repairs, None),
            ("postgres", kills_during_ingestion, given.postgres, server),
            ("sessions", kills_of_sessions, given.sessions, None),
            ("sessions in postgres", kills_of_sessions, given.sessions if server else 0, server),
        ):
            if kills:
                with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
                    results[name] = series(kills, Path(folder), given.seed, lambda line: print(line, flush=True), where)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({name: asdict(one) for name, one in results.items()}, indent=2) + "\n")
    for name, result in results.items():
        counts = ((key, len(one) if isinstance(one, list) else round(one, 1)) for key, one in asdict(result).items())
        print(f"{name}:", ", ".join(f"{key} {count}" for key, count in counts))
    sys.exit(any(result.lost or result.doubled or result.not_found for result in results.values()))


if __name__ == "__main__":
    main()
