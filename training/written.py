"""Restore the hand-written items: their claims are kept here, the passages that they are about are not.

python written.py BENCH DATA

``BENCH`` holds the evaluation sets (``<set>/corpus.jsonl``). ``DATA`` gets ``pairs_written.jsonl``, which ``pairs.py`` and
``calibrate.py`` read: each item with its evidence, cut out of the passage again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(bench: Path, data: Path) -> None:
    """Write the items with their evidence."""
    items = [json.loads(line) for line in (Path(__file__).parent / "written.jsonl").open(encoding="utf-8")]
    passages: dict[tuple[str, str], dict[str, Any]] = {}
    for name in {item["set"] for item in items}:
        for line in (bench / name / "corpus.jsonl").open(encoding="utf-8"):
            document = json.loads(line)
            passages[name, document["_id"]] = document
    with (data / "pairs_written.jsonl").open("w", encoding="utf-8") as out:
        for item in items:
            document = passages[item["set"], item["doc"]]
            sentences = " ".join(document["text"][start:end] for start, end in item["evidence"])
            title = document.get("title") or ""
            item["evidence"] = f"{title}. {sentences}" if title else sentences
            out.write(json.dumps(item, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
