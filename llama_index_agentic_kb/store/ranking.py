"""From a ranking to nodes: what both searches under a filter share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias, TypeVar

import numpy as np
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import VectorStoreQueryResult

from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.store.database import Floats

__all__ = ["Passes", "check_deadline", "growing", "take", "unit"]

Key = TypeVar("Key", int, str)
Passes: TypeAlias = Callable[[BaseNode], bool]
"""Checks a node against a filter."""

_MAX_PORTION = 2_000


def growing(
    nearest: Callable[[int], Sequence[tuple[Key, float]]], count: int, limit: int
) -> Iterator[tuple[Key, float]]:
    """Yield the nearest rows, best first, asking for four times as many as long as they are taken.

    Args:
        nearest: Returns so many rows, each with its distance.
        count: How many are asked for at first.
        limit: How many are asked for at most.
    """
    seen: set[Key] = set()
    while True:
        ranked = nearest(count)
        yield from (one for one in ranked if one[0] not in seen)
        if count >= limit or len(ranked) <= len(seen):
            return
        seen.update(key for key, _ in ranked)
        count = min(limit, count * 4)


def take(
    ranked: Iterable[tuple[Key, float]],
    fetch: Callable[[list[Key]], Mapping[Key, BaseNode]],
    top_k: int,
    passes: Passes | None,
    deadline: float | None,
) -> VectorStoreQueryResult:
    """Fetch nodes, best first, until enough of them are there and pass the check.

    Args:
        ranked: Rows with their distances.
        fetch: Returns the nodes of some rows; rows that are gone are left out.
        top_k: How many nodes at most.
        passes: The check; None lets all through.
        deadline: ``time.monotonic()`` after which nothing more is fetched; None goes on.

    Returns:
        The nodes with the similarities that LlamaIndex's Chroma store gives, exp(-distance).
    """
    left = iter(ranked)
    taken: list[tuple[BaseNode, float]] = []
    portion = top_k
    while len(taken) < top_k:
        rows = list(islice(left, portion))
        if not rows:
            break
        check_deadline(deadline)
        nodes = fetch([key for key, _ in rows])
        found = ((nodes[key], far) for key, far in rows if key in nodes)
        taken += [(node, far) for node, far in found if passes is None or passes(node)]
        portion = min(portion * 2, _MAX_PORTION)
    del taken[top_k:]
    return VectorStoreQueryResult(
        nodes=[node for node, _ in taken],
        similarities=[math.exp(-far) for _, far in taken],
        ids=[node.node_id for node, _ in taken],
    )


def unit(vectors: Floats) -> Floats:
    """Return vectors at length 1; zeros stay zeros."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Floats = (vectors / np.where(length == 0, 1, length)).astype(np.float32)
    return scaled


def check_deadline(deadline: float | None) -> None:
    """Raise where the time is over: a thread can't be stopped, but it can stop itself between two steps.

    Raises:
        DeadlineExceededError: It is.
    """
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceededError("the filtered search was still under way at its deadline")
