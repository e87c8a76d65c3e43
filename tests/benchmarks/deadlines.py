"""Deadlines under load: 50 requests at once with 1 s each; one source hangs, and 4 other processes are busy.

Every request must be answered from the source that does not hang, soon after its deadline. What a machine's other
processes take is in the figures: run it on an idle one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import Document

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, KnowledgeStore, Resilience, ingest
from llama_index_agentic_kb.errors import RetrievalError
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.benchmarks.measure import busy

DEADLINE: Final = 1.0
REQUESTS: Final = 50
ROUNDS: Final = 4


@contextmanager
def _pauses() -> Iterator[list[float]]:
    """Collect the seconds of each pass of the garbage collector."""
    took, began = list[float](), 0.0

    def watch(phase: str, _: object) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            took.append(time.perf_counter() - began)

    gc.callbacks.append(watch)
    try:
        yield took
    finally:
        gc.callbacks.remove(watch)


def _knowledge_base(folder: Path, hanging: BaseRetriever) -> KnowledgeBase:
    documents = [Document(text=f"Pump {number} makes {number} rpm. " * 5, id_=f"{number}") for number in range(300)]
    store = KnowledgeStore.open(folder / "store", embed_model=HashEmbedding(), create=True)
    ingest(store=store, documents=documents, source="docs")
    well = KnowledgeSource("docs", index=store.index("docs"), hybrid=store.lexical("docs"))
    hangs = KnowledgeSource("hangs", retriever=hanging, resilience=Resilience(breaker=None))
    return KnowledgeBase([well, hangs], effort="minimal", max_runtime_in_seconds=DEADLINE).warm_up()


def _figures(name: str, asked: Sequence[tuple[float, bool]], pauses: Sequence[float]) -> str:
    over = [1000 * (seconds - DEADLINE) for seconds, _ in asked]
    p50, p99 = (float(np.percentile(over, p, method="higher")) for p in (50, 99))
    lost, longest = sum(not answered for _, answered in asked), 1000 * max(pauses, default=0.0)
    return (
        f"{name}: over the deadline by p50 {p50:.0f}, p99 {p99:.0f}, max {max(over):.0f} ms; "
        f"{lost} of {len(asked)} unanswered; longest garbage collection {longest:.0f} ms"
    )


def _sync(kb: KnowledgeBase) -> list[tuple[float, bool]]:
    def ask(number: int) -> tuple[float, bool]:
        began, answered = time.perf_counter(), False
        with suppress(RetrievalError):
            answered = bool(kb.retrieve(f"How fast is pump {number}?").references)
        return time.perf_counter() - began, answered

    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(ask, range(REQUESTS)))


async def _async(kb: KnowledgeBase) -> list[tuple[float, bool]]:
    async def ask(number: int) -> tuple[float, bool]:
        began, answered = time.perf_counter(), False
        with suppress(RetrievalError):
            answered = bool((await kb.aretrieve(f"How fast is pump {number}?")).references)
        return time.perf_counter() - began, answered

    return await asyncio.gather(*map(ask, range(REQUESTS)))


def main(processes: int = 4) -> None:
    """Print the figures of both doors."""
    logging.getLogger("llama_index_agentic_kb").setLevel(logging.CRITICAL)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{os.cpu_count()} cores, {processes} busy processes, load before: {load}", flush=True)
    with ExitStack() as stack:
        folder, hanging = stack.enter_context(TemporaryDirectory()), MemoryRetriever([], fault="hang")
        kb = _knowledge_base(Path(folder), stack.enter_context(hanging))
        stack.enter_context(busy(processes))
        for name in ("sync", "async"):
            with _pauses() as pauses:
                rounds = [_sync(kb) if name == "sync" else asyncio.run(_async(kb)) for _ in range(ROUNDS)]
            print(_figures(name, [one for asked in rounds for one in asked], pauses), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
