"""What ``agentic-kb plan-capacity`` predicts beside what real runs take here: ``python -m tests.benchmarks.capacity``.

One process with embedded stores. Service times are measured on stores of 2,000 and 20,000 chunks, one and four
together; predicted are other sizes and numbers of shards. Processor time is compared, which other work on the machine
disturbs least and which decides how many machines are needed.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from llama_index_agentic_kb.evaluation import capacity
from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.testing import HashEmbedding

CASES: Final = ((5_000, 1), (14_000, 1), (10_000, 2), (24_000, 3), (30_000, 6))
"""Chunks and shards."""


def main() -> None:
    """Measure, predict, run, and print both."""
    table = Table("chunks", "shards", "core ms of a question, predicted", "real", "error")
    model = HashEmbedding(dimensions=384)
    times = capacity.measure(print, model)
    print(times)
    for size, shards in CASES:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
            stores = []
            for at in range(shards):
                store = KnowledgeStore.open(Path(folder) / str(at), embed_model=model, create=True)
                stores.append(opened.enter_context(store))
                capacity.fill(store, size // shards, first=at * size)
            said = times.embedding + times.question + shards * (times.shard + times.search_seconds(size / shards))
            real = capacity.question_seconds(stores)
        table.add_row(f"{size:,}", str(shards), f"{1e3 * said:.1f}", f"{1e3 * real:.1f}", f"{said / real - 1:+.0%}")
        print(table.row_count, "of", len(CASES))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
