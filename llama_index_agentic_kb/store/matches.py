"""The rows of a collection that a filter matches: ids, vectors, and a bounded memory of both."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llama_index_agentic_kb.errors import DeadlineExceededError

__all__ = ["MATCHES", "Floats", "MatchMemory", "Matches", "distances"]

Floats = NDArray[np.float32]

ID_BYTES: Final = 150
"""About what an id takes in a dict, with its string."""

MEMORY_BYTES: Final = 256 * 1024 * 1024
"""What all remembered rows of a process may take together."""


@dataclass(eq=False)
class Matches:
    """The rows that a filter matches, as they were at one version of their collection.

    Args:
        ids: The rows' ids, in order.
        total: Rows of the collection; None where it was not counted.
    """

    ids: dict[str, None]
    total: int | None = None
    rejected: set[str] = field(default_factory=set)
    """Rows that the store takes for matches and that fail the check (Chroma's ``$ne`` lets rows without the key in)."""
    vectors: Floats | None = None
    """Shape (rows, dimension), once they were fetched; of unit length where the collection's distance is cosine."""
    vector_ids: list[str] = field(default_factory=list)
    """The ids of the rows of ``vectors``."""
    searches: int = 0
    """How many searches used it."""

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return ID_BYTES * len(self.ids) + (0 if self.vectors is None else self.vectors.nbytes)


def distances(vectors: Floats, query: Floats, space: str) -> Floats:
    """Give the distances that Chroma gives.

    Args:
        vectors: Shape (rows, dimension); unit length for "cosine".
        query: Shape (dimension,).
        space: "cosine" (1 - cosine), "l2" (squared Euclidean distance) or "ip" (1 - inner product).

    Returns:
        Shape (rows,).
    """
    if space == "l2":
        found: Floats = ((vectors - query) ** 2).sum(axis=1)
        return found
    if space == "cosine":
        query = unit(query)
    inner: Floats = 1.0 - vectors @ query
    return inner


def unit(vectors: Floats) -> Floats:
    """Give vectors of length 1; zeros stay zeros."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Floats = (vectors / np.where(length == 0, 1, length)).astype(np.float32)
    return scaled


class MatchMemory:
    """Keeps matches by collection and filter, the least recently used ones going first; safe for many threads.

    Args:
        max_bytes: What they may take together. One that is larger alone is not kept.
    """

    def __init__(self, max_bytes: int = MEMORY_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Hashable, Matches]] = OrderedDict()
        self._loading: dict[Hashable, threading.Lock] = {}

    def __len__(self) -> int:
        """Count what is kept."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """About how much memory all takes."""
        with self._lock:
            return sum(matches.nbytes for _, matches in self._kept.values())

    def get(self, key: Hashable, version: Hashable, load: Callable[[], Matches], *, seconds: float | None) -> Matches:
        """Give the matches of a key, loading them where they are missing or of another version.

        One thread loads; others that want the same wait for it.

        Args:
            key: The collection and the filter.
            version: The collection's, read before this call: what is loaded is at least as new.
            load: Loads them.
            seconds: How long to wait for another thread that loads them; None waits.

        Raises:
            DeadlineExceededError: The other thread took longer.
        """
        known = self._known(key, version)
        if known is not None:
            return known
        with self._turn(key, seconds):
            known = self._known(key, version)
            if known is None:
                known = load()
                self.keep(key, version, known)
            return known

    def keep(self, key: Hashable, version: Hashable, matches: Matches) -> None:
        """Keep matches, or count them anew after they grew; others go where it gets too much."""
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = (version, matches)
            taken = sum(kept.nbytes for _, kept in self._kept.values())
            while taken > self.max_bytes:
                _, (_, dropped) = self._kept.popitem(last=False)
                taken -= dropped.nbytes

    def _known(self, key: Hashable, version: Hashable) -> Matches | None:
        with self._lock:
            at, matches = self._kept.get(key, (None, None))
            if matches is None or at != version:
                return None
            self._kept.move_to_end(key)
            return matches

    @contextmanager
    def _turn(self, key: Hashable, seconds: float | None) -> Iterator[None]:
        with self._lock:
            turn = self._loading.setdefault(key, threading.Lock())
        if not turn.acquire(timeout=-1 if seconds is None else max(0.0, seconds)):
            raise DeadlineExceededError("another search was still reading the same filter's rows at the deadline")
        try:
            yield
        finally:
            turn.release()
            with self._lock:
                if not turn.locked():
                    self._loading.pop(key, None)


MATCHES: Final = MatchMemory()
"""Of this process."""
