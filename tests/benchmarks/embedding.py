"""Embedding the questions of 50 users at once: one by one, in batches of what waits, and by a process of its own.

``python -m tests.benchmarks.embedding QUERIES.jsonl`` with lines that have a ``text``. Processor time is compared,
which other work on the machine disturbs least; the model has one thread. The batches are those of ``MicroBatcher``, as
every request's; the process gets the same batches through a pipe, which is the least that a shared one would cost.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from llama_index_agentic_kb import default_embed_model
from llama_index_agentic_kb.search.embedding import EMBEDDING_POOL, MicroBatcher

Embed = Callable[[list[str]], Any]
USERS, QUESTIONS = 50, 10


def load() -> Embed:
    """Return the default model's call for a batch of queries, on one thread."""
    import torch  # noqa: PLC0415 (after the process was forked)

    torch.set_num_threads(1)
    return partial(default_embed_model()._embed, prompt_name="query")


def serve(pipe: Connection) -> None:
    """Embed what comes through a pipe; an empty list asks for the processor time."""
    embed = load()
    while (texts := pipe.recv()) is not None:
        pipe.send(embed(texts) if texts else time.process_time())


class Remote:
    """A model in a process of its own."""

    def __init__(self) -> None:
        self._pipe, other = get_context("spawn").Pipe()
        get_context("spawn").Process(target=serve, args=[other], daemon=True).start()

    def embed(self, texts: list[str]) -> Any:
        """Return the vectors of a batch; its processor time for an empty one."""
        self._pipe.send(texts)
        return self._pipe.recv()


def asked(embed: Embed, questions: list[str]) -> list[float]:
    """Have all users ask their questions, each one after another; return how long each waited, in seconds."""

    def user(number: int) -> list[float]:
        waited = []
        for text in questions[number::USERS]:
            began = time.monotonic()
            embed([text])
            waited.append(time.monotonic() - began)
        return waited

    with ThreadPoolExecutor(USERS) as pool:
        return [seconds for own in pool.map(user, range(USERS)) for seconds in own]


def in_batches(embed: Embed, sizes: list[int]) -> Embed:
    """Return a call whose texts are embedded together with those of others that wait; note the sizes of batches."""

    def noted(texts: list[str]) -> Any:
        sizes.append(len(texts))
        return embed(texts)

    batcher = MicroBatcher(noted, max_batch=32, pool=EMBEDDING_POOL)
    return lambda texts: [future.result() for future in batcher.submit(texts)]


def main() -> None:
    """Measure the ways in turns, and print each."""
    rows = map(json.loads, Path(sys.argv[1]).read_text().splitlines())
    questions = list(dict.fromkeys(row["text"] for row in rows))[: USERS * QUESTIONS]
    local, remote, lock = load(), Remote(), threading.Lock()

    def alone(texts: list[str]) -> Any:
        with lock:
            return local(texts)

    sizes: dict[str, list[int]] = {"batches": [], "batches in a process": []}
    ways = {"one by one": alone, "batches": in_batches(local, sizes["batches"])}
    ways["batches in a process"] = in_batches(remote.embed, sizes["batches in a process"])
    spent: dict[str, list[float]] = {name: [] for name in ways}
    waited: dict[str, list[float]] = {name: [] for name in ways}
    for name in [*ways, *ways]:
        ways[name](questions[:1])
        before = time.process_time() + remote.embed([])
        waited[name] += asked(ways[name], questions)
        spent[name].append((time.process_time() + remote.embed([]) - before) / len(questions))
    for name, seconds in spent.items():
        p50, p99 = np.percentile(waited[name], [50, 99])
        waits = f"p50 {p50:.2f} s, p99 {p99:.2f} s"
        print(f"{name}: {1000 * np.median(seconds):.1f} core ms, {waits}, {np.mean(sizes.get(name, [1])):.0f} a batch")
    for size in (1, 2, 4, 8, 16, 32, 64):
        began = time.process_time()
        for start in range(0, 128, size):
            local(questions[start : start + size])
        print(f"batches of {size}: {1000 * (time.process_time() - began) / 128:.1f} core ms a question")


if __name__ == "__main__":
    main()
