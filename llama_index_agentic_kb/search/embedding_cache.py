"""Keeps query vectors from request to request: bounded in memory, shared by all threads and event loops."""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from llama_index_agentic_kb.errors import ConfigurationError

__all__ = ["DEFAULT_MAX_BYTES", "SHARED_CACHE", "CacheStatistics", "EmbeddingCache"]

DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024
"""About 19,000 vectors of 384 dimensions, or 5,000 of 1,536."""

ENTRY_BYTES: Final = 400
"""What an entry costs beside its numbers: its key, its place in the order, the vector's object."""

_caches: weakref.WeakSet[EmbeddingCache] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache holds and has done since it was made (or cleared).

    Args:
        hits: Look-ups that were answered.
        misses: Look-ups that were not.
        entries: Vectors held.
        bytes: Memory they take.
    """

    hits: int
    misses: int
    entries: int
    bytes: int


class EmbeddingCache:
    """Query vectors by embedding model and text; the longest unused go first when memory is full.

    Vectors are kept as doubles, so that what is found equals what the model gave, to the last bit. Each look-up gives
    a list of its own. Texts are not kept, only their digests (BLAKE2b, 256 bits).

    One process-wide cache, ``SHARED_CACHE``, serves every retriever that is not given another. A vector is a function
    of model and text alone and tells nothing of documents, so sharing it between users of different permissions lets
    nobody see more; what a user could measure is time, that is, whether somebody asked the very same words shortly
    before. Where that is too much, give each tenant's retriever a cache of its own, or None.

    Args:
        max_bytes: Memory that the vectors may take, keys and bookkeeping included. Default 64 MiB; 0 keeps nothing.

    Raises:
        ConfigurationError: ``max_bytes`` is no whole number, or below 0.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        given: Any = max_bytes
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ConfigurationError(
                f"max_bytes of an EmbeddingCache must be a whole number of bytes, 0 or more (0 keeps nothing), "
                f"got {given!r}"
            )
        self.max_bytes: int = given
        self._reset()
        _caches.add(self)

    def _reset(self) -> None:
        """Start empty; also in a forked child, whose parent may have been in the midst of a change."""
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._vectors: OrderedDict[bytes, array[float]] = OrderedDict()
        self._bytes = self._hits = self._misses = 0

    def get(self, identity: str, text: str) -> list[float] | None:
        """Give a vector, or None where it is not held.

        Args:
            identity: The model's, from ``model_identity``.
            text: The query.
        """
        key = _key(identity, text)
        with self._lock:
            vector = self._vectors.get(key)
            if vector is None:
                self._misses += 1
                return None
            self._hits += 1
            self._vectors.move_to_end(key)
        return vector.tolist()

    def put(self, identity: str, text: str, vector: Sequence[float]) -> None:
        """Keep a copy of a vector. One that is no row of numbers, or larger than the whole cache, is let go.

        Args:
            identity: The model's, from ``model_identity``.
            text: The query.
            vector: As the model gave it.
        """
        try:
            kept = array("d", vector)
        except (TypeError, OverflowError):  # a multi-vector model's rows; whole numbers beyond a double
            return
        size = _size(kept)
        if size > self.max_bytes:
            return
        key = _key(identity, text)
        with self._lock:
            before = self._vectors.pop(key, None)
            self._bytes += size - (0 if before is None else _size(before))
            self._vectors[key] = kept
            while self._bytes > self.max_bytes:
                self._bytes -= _size(self._vectors.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all vectors and counts."""
        with self._lock:
            self._forget()

    @property
    def statistics(self) -> CacheStatistics:
        """Hits, misses, entries and bytes, at one moment."""
        with self._lock:
            return CacheStatistics(self._hits, self._misses, len(self._vectors), self._bytes)


def _key(identity: str, text: str) -> bytes:
    return blake2b(f"{identity}\0{text}".encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _size(vector: array[float]) -> int:
    return ENTRY_BYTES + vector.itemsize * len(vector)


def _reset_all() -> None:
    for cache in list(_caches):
        cache._reset()  # noqa: SLF001 (this module's own class)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)

SHARED_CACHE: Final = EmbeddingCache()
"""The process's cache: of every retriever that is not given another."""
