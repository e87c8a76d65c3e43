"""Writes the table of what each vector store can do into docs/stores.md: ``python -m tests.stores``."""

from __future__ import annotations

from tests.stores.kinds import KINDS, PAGE, Opened
from tests.stores.test_vector_stores import ATOMS, Filled


def main() -> None:
    """Open each kind of store, and write the table in place of the one that is there."""
    opened = Opened()
    stores = [Filled(opened, kind) for kind in KINDS]
    table = [f"| filter | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    table += [f"| {operator} | {' | '.join(store.can(operator) for store in stores)} |" for operator in ATOMS]
    opened.close()
    before, start, rest = PAGE.read_text().partition("| filter |")
    _, end, after = (start + rest).partition("\n\n")
    PAGE.write_text(before + "\n".join(table) + end + after)


if __name__ == "__main__":
    main()
