"""What benchmarks give: rows, written as JSON and shown as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "print_rows", "write_rows"]


@dataclass(frozen=True)
class Row:
    """One comparison.

    Args:
        name: The benchmark, the case and what was measured, joined by slashes.
        ours: The median of our runs; None where nothing can be compared.
        peer: The median of the peer's runs; None where the peer failed or does not exist.
        peer_name: What it is compared with; where the peer failed, how.
        unit: Of both.
        runs: How many runs each median is of; 1 where it is no measurement (a nominal value, a count of modules).
    """

    name: str
    ours: float | None
    peer: float | None
    peer_name: str
    unit: str
    runs: int
    ratio: float | None = field(init=False)
    """Ours over the peer's: below 1 is better. None where either is missing or the peer's is 0."""

    def __post_init__(self) -> None:
        """Work the ratio out, from the numbers as measured, and round what is shown."""
        ratio = self.ours / self.peer if self.ours is not None and self.peer else None
        object.__setattr__(self, "ratio", None if ratio is None else round(ratio, 3))
        for name in ("ours", "peer"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else round(value, 2))


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Write rows as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def print_rows(rows: Sequence[Row]) -> None:
    """Print rows as a table."""
    table = Table("name", "peer", title="ratio = ours / peer; below 1 is better")
    for heading in ("ours", "peer", "ratio", "unit", "runs"):
        table.add_column(heading, justify="left" if heading == "unit" else "right", no_wrap=True)
    before = ""
    for row in rows:
        if row.name != before:
            table.add_section()
        shown = [_number(value) for value in (row.ours, row.peer, row.ratio)]
        table.add_row(row.name if row.name != before else "", row.peer_name, *shown, row.unit, str(row.runs))
        before = row.name
    # A pipe has no width of its own, and 80 columns would fold every cell.
    Console(width=None if Console().is_terminal else 160).print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
