"""Causes every fault, prints survived/injected as a table, and writes ``build/faults.json``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.faults.registry import Survival, faults, survive


def main() -> None:
    """Read the arguments and cause them."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="words of a name; may be given again")
    parser.add_argument("--out", type=Path, default=Path("build/faults.json"), help="where the table goes as JSON")
    parser.add_argument("--markdown", type=Path, help="where it goes as Markdown too, one row a promise")
    arguments = parser.parse_args()
    logging.getLogger("llama_index_agentic_kb").setLevel(logging.CRITICAL)  # it tells of each fault, as it should
    chosen = [one for one in faults() if not arguments.only or any(word in one.name for word in arguments.only)]
    console = Console(width=200 if not sys.stdout.isatty() else None)
    done = []
    for one in chosen:
        survival = survive(one)
        done.append(survival)
        mark = "[green]survived[/]" if survival.error is None else f"[red]FAILED[/] {escape(repr(survival.error))}"
        number = f"{len(done):3}/{len(chosen)}"
        console.print(f"{number} {escape(one.name)}: {mark} ({survival.took:.1f} s)", highlight=False)
    console.print(_table(done))
    survived = sum(survival.error is None for survival in done)
    console.print(f"survived/injected: {survived}/{len(done)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([_row(survival) for survival in done], indent=2) + "\n", encoding="utf-8")
    if arguments.markdown is not None:
        arguments.markdown.write_text(_markdown(done), encoding="utf-8")
    sys.exit(survived < len(done))


def _table(done: Sequence[Survival]) -> Table:
    table = Table("where", "injected", "promised", "waited", "deadline", "survived")
    for survival in done:
        one = survival.fault
        waited = "" if survival.waited is None else f"{survival.waited:.2f} s"
        deadline = "" if one.deadline is None else f"{one.deadline:.2f} s"
        cells = [one.area, one.injected, one.promise, waited, deadline, "yes" if survival.error is None else "NO"]
        table.add_row(*map(escape, cells))
    return table


def _markdown(done: Sequence[Survival]) -> str:
    """Give one row for each promise of an area, with all that is injected under it."""
    rows: dict[tuple[str, str], list[Survival]] = {}
    for survival in done:
        rows.setdefault((survival.fault.area, survival.fault.promise), []).append(survival)
    lines = ["| where | injected | promised | survived | waited / deadline |", "|---|---|---|---|---|"]
    for (area, promise), group in rows.items():
        injected = "; ".join(survival.fault.injected for survival in group)
        survived = f"{sum(survival.error is None for survival in group)}/{len(group)}"
        cells = [area, injected, promise, survived, _slowest(group)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _slowest(group: Sequence[Survival]) -> str:
    """Give the times of the one that came nearest to its deadline, or went beyond it most."""
    timed = [
        (survival.waited - survival.fault.deadline, survival)
        for survival in group
        if survival.waited is not None and survival.fault.deadline is not None
    ]
    if not timed:
        return ""
    slowest = max(timed, key=lambda pair: pair[0])[1]
    return f"{slowest.waited:.2f} / {slowest.fault.deadline:.2f} s"


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
