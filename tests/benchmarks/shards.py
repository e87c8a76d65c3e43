"""One collection in 8 shards beside the same in one store: ``python -m tests.benchmarks.shards --size 1000000``.

Synthetic vectors of 384 dimensions (``scale``). Recall is recall@10 against a comparison with every row. A slow
shard takes ten times as long as its search took, from some moment on, as a machine does whose disk or neighbour got
slow. Stores are built once and kept; a size that ``make bench-scale`` has built is used again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, Final

from rich.table import Table

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, Resilience, RetrieverOptions, ShardedSource
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.benchmarks.measure import show, write_json
from tests.benchmarks.scale import SOURCE, TOP_K, ScaleStore, exact, percentile, store_block

SHARDS: Final = 8
FACTOR: Final = 10
CANDIDATES: Final = (1, 2, 3, 5, TOP_K)
"""Nodes that each shard is asked for."""
GRACE: Final = 0.02
WAIT: Final = 0.03

Numbers = dict[str, float]


def build(at: ScaleStore, shards: int) -> list[Path]:
    """Build the shards of a size unless they are there; documents go to them by turns."""
    folders = [at.folder / f"shard-{shard}-of-{shards}" for shard in range(shards)]
    for shard, folder in enumerate(folders):
        if (folder / "built").exists():
            continue
        with DirectoryStore.open(folder, embed_model=at.embedding, create=True) as store, store.writing():
            store.put_source(SOURCE, "Synthetic chunks.")
            for block in at.corpus.blocks():
                at.embedding.show(block)
                store_block(store, block, shard, shards)
            store.update_graph(SOURCE)
            store.lexical(SOURCE).update()
        (folder / "built").touch()
        print(f"shard {shard + 1} of {shards} is built", file=sys.stderr, flush=True)
    return folders


@contextmanager
def slow(store: DirectoryStore, factor: int) -> Iterator[None]:
    """Make a store's dense search take a multiple of its time."""
    vectors = store.vectors(SOURCE)
    plain = vectors.filtered_search

    def search(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = plain(*args, **kwargs)
        time.sleep((time.perf_counter() - started) * (factor - 1))
        return found

    vars(vectors)["filtered_search"] = search
    yield
    del vars(vectors)["filtered_search"]


def sharded(stores: Sequence[DirectoryStore], *, candidates: int = TOP_K, grace: float | None = None) -> ShardedSource:
    """Return all stores as one source; without a grace, a slow shard is waited for until its timeout."""
    resilience = Resilience(straggler_grace=grace)
    shards = [
        KnowledgeSource(
            f"shard-{at}", index=store.index(SOURCE), hybrid=False, similarity_top_k=candidates, resilience=resilience
        )
        for at, store in enumerate(stores)
    ]
    return ShardedSource(SOURCE, shards, similarity_top_k=TOP_K)


def ask(source: KnowledgeSource, queries: Sequence[str], best: Sequence[set[str]]) -> Numbers:
    """Ask all queries one after another, and return times in ms and recall@10."""
    options = RetrieverOptions(join_neighbours=False, max_per_document=None)
    retriever = AgenticRetriever([source], effort="minimal", similarity_top_k=TOP_K, options=options)
    taken, recalls = [], []
    for query, right in zip(queries, best, strict=True):
        started = time.perf_counter()
        found = {node.node.node_id for node in retriever.retrieve(query)}
        taken.append(time.perf_counter() - started)
        recalls.append(len(found & right) / len(right))
    return {"p50": percentile(taken, 50), "p99": percentile(taken, 99), "recall": mean(recalls)}


def waiting(shards: int, factor: int, grace: float | None) -> Numbers:
    """Return times over shards that only wait, the first so many times longer, after it was as fast as the others."""
    retrievers = [MemoryRetriever([f"rain {at}"], latency=WAIT, mode="async") for at in range(shards)]
    resilience = Resilience(straggler_grace=grace)
    made = [KnowledgeSource(f"s{at}", retriever=one, resilience=resilience) for at, one in enumerate(retrievers)]
    source = ShardedSource(SOURCE, made)
    ask(source, ["rain"] * 20, [{""}] * 20)
    retrievers[0].latency = factor * WAIT
    numbers = ask(source, ["rain"] * 100, [{""}] * 100)
    return {name: numbers[name] for name in ("p50", "p99")}


def measure(at: ScaleStore, shards: int, rounds: int) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield each case with its numbers."""
    queries = at.corpus.query_texts
    best = exact(at, [0] * len(queries), 1)
    folders = build(at, shards)
    with ExitStack() as opened:
        stores = [opened.enter_context(DirectoryStore.open(one, embed_model=at.embedding)) for one in folders]
        whole = opened.enter_context(at.open())
        one = KnowledgeSource("whole", index=whole.index(SOURCE), hybrid=False)
        for source in (one, sharded(stores)):
            ask(source, queries[:20], best[:20])  # what is loaded once
        many, right = [*queries] * rounds, [*best] * rounds
        yield "one store", ask(one, many, right)
        for count in CANDIDATES:
            yield f"{shards} shards, {count} nodes each", ask(sharded(stores, candidates=count), many, right)
        for grace, rule in ((None, "waited for"), (GRACE, f"straggler_grace={GRACE}")):
            source = sharded(stores, grace=grace)
            ask(source, queries, best)  # its usual time
            with slow(stores[0], FACTOR):
                yield f"one shard {FACTOR} x slower, {rule}", ask(source, many, right)
        cases = ((1, None, "all alike"), (FACTOR, None, "one slow, waited for"), (FACTOR, GRACE, "one slow, given up"))
        for factor, grace, name in cases:
            yield f"{shards} shards that wait {1000 * WAIT:.0f} ms each: {name}", waiting(shards, factor, grace)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.shards", description=__doc__)
    parser.add_argument("--size", type=int, default=1_000_000, help="chunks of the whole collection")
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--rounds", type=int, default=3, help="how often all 200 queries are asked")
    parser.add_argument("--cache", type=Path, default=Path("build/scale"), help="where what was built is kept")
    parser.add_argument("--out", type=Path, default=Path("build/bench-shards.json"))
    arguments = parser.parse_args()
    at = ScaleStore(arguments.cache, arguments.size)
    at.build(lambda _: None)
    results = {}
    for name, numbers in measure(at, arguments.shards, arguments.rounds):
        results[name] = numbers
        print(name, numbers, file=sys.stderr, flush=True)
    write_json(results, arguments.out)
    table = Table("", "p50 ms", "p99 ms", "recall@10", title=f"{arguments.size:,} chunks, synthetic vectors")
    for name, numbers in results.items():
        table.add_row(name, *(f"{numbers[key]:.3g}" if key in numbers else "" for key in ("p50", "p99", "recall")))
    show(table)


if __name__ == "__main__":
    main()
