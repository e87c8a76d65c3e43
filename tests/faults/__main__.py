"""Causes every fault, prints survived/injected as a table, and writes ``build/faults.json``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.registry import Survival, faults, survive


def main() -> None:
    """Read the arguments and cause them."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="words of a name; may be given again")
    parser.add_argument("--out", type=Path, default=Path("build/faults.json"), help="where the table goes as JSON")
    arguments = parser.parse_args()
    chosen = [one for one in faults() if not arguments.only or any(word in one.name for word in arguments.only)]
    console = Console(width=200 if not sys.stdout.isatty() else None)
    done = []
    for one in chosen:
        survival = survive(one)
        done.append(survival)
        mark = "[green]survived[/]" if survival.error is None else f"[red]FAILED[/] {survival.error!r}"
        console.print(f"{len(done):3}/{len(chosen)} {one.name}: {mark} ({survival.took:.1f} s)", highlight=False)
    console.print(_table(done))
    survived = sum(survival.error is None for survival in done)
    console.print(f"survived/injected: {survived}/{len(done)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([_row(survival) for survival in done], indent=2) + "\n", encoding="utf-8")
    sys.exit(survived < len(done))


def _table(done: list[Survival]) -> Table:
    table = Table("where", "injected", "promised", "waited", "deadline", "survived")
    for survival in done:
        one = survival.fault
        waited = "" if survival.waited is None else f"{survival.waited:.2f} s"
        deadline = "" if one.deadline is None else f"{one.deadline:.2f} s"
        table.add_row(one.area, one.injected, one.promise, waited, deadline, "yes" if survival.error is None else "NO")
    return table


def _row(survival: Survival) -> dict[str, object]:
    one = survival.fault
    return {
        "area": one.area,
        "injected": one.injected,
        "promised": one.promise,
        "deadline": one.deadline,
        "waited": None if survival.waited is None else round(survival.waited, 3),
        "survived": survival.error is None,
    }


if __name__ == "__main__":
    main()
