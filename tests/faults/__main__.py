"""Causes every fault, prints survived/injected, and writes ``build/faults.json``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from tests.faults.registry import faults


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="words of a name; may be given again")
    parser.add_argument("--out", type=Path, default=Path("build/faults.json"), help="where the table goes as JSON")
    arguments = parser.parse_args()
    logging.getLogger("llama_index_agentic_kb").setLevel(logging.CRITICAL)  # it warns of each fault, as it should
    rows = []
    for one in faults():
        if arguments.only and not any(word in one.name for word in arguments.only):
            continue
        waited, error = None, None
        try:
            waited = one.inject()
        except Exception as raised:  # noqa: BLE001 (whatever is raised, the promise was not kept)
            error = raised
        print(f"{one.name}: {one.promise}: {'survived' if error is None else f'FAILED {error!r}'}", flush=True)
        row = {"area": one.area, "injected": one.injected, "promised": one.promise, "deadline": one.deadline}
        rows.append({**row, "waited": waited and round(waited, 3), "survived": error is None})
    survived = sum(bool(row["survived"]) for row in rows)
    print(f"survived/injected: {survived}/{len(rows)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    sys.exit(survived < len(rows))


if __name__ == "__main__":
    main()
