"""Keeps query vectors from request to request: bounded in memory, shared by all threads and event loops."""

from __future__ import annotations

import copy
import json
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
from llama_index_agentic_kb.schema.principal import Principal

__all__ = ["DEFAULT_MAX_BYTES", "SHARED_CACHE", "CacheStatistics", "EmbeddingCache"]

DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024
"""About 19,000 vectors of 384 dimensions, or 5,000 of 1,536."""

ENTRY_BYTES: Final = 400
"""What an entry costs beside its numbers: its key, its place in the order, the vector's object."""

_caches: weakref.WeakSet[_Held] = weakref.WeakSet()


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
    of model and text alone and tells nothing of documents; but how long it takes tells whether somebody asked the very
    same words shortly before. Requests of a principal therefore find the vectors of its own requests only (``of``).

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
        self._owner = ""
        self._held = _Held()
        _caches.add(self._held)

    def of(self, principal: Principal | None) -> EmbeddingCache:
        """Give the part of this cache that is a principal's own; memory, counts and ``clear`` are the whole's.

        Args:
            principal: Who asks; None is everybody who asks without one.
        """
        part = copy.copy(self)
        part._owner = "" if principal is None else _named(principal)  # noqa: SLF001 (a twin of ours)
        return part

    def get(self, identity: str, text: str) -> list[float] | None:
        """Give a vector, or None where it is not held.

        Args:
            identity: The model's, from ``model_identity``.
            text: The query.
        """
        key, held = _key(self._owner, identity, text), self._held
        with held.lock:
            vector = held.vectors.get(key)
            if vector is None:
                held.misses += 1
                return None
            held.hits += 1
            held.vectors.move_to_end(key)
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
        key, held = _key(self._owner, identity, text), self._held
        with held.lock:
            before = held.vectors.pop(key, None)
            held.bytes += size - (0 if before is None else _size(before))
            held.vectors[key] = kept
            while held.bytes > self.max_bytes:
                held.bytes -= _size(held.vectors.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all vectors and counts."""
        with self._held.lock:
            self._held.forget()

    @property
    def statistics(self) -> CacheStatistics:
        """Hits, misses, entries and bytes, at one moment."""
        held = self._held
        with held.lock:
            return CacheStatistics(held.hits, held.misses, len(held.vectors), held.bytes)


class _Held:
    """The vectors of a cache and all its parts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start empty; also in a forked child, whose parent may have been in the midst of a change."""
        self.lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        self.vectors: OrderedDict[bytes, array[float]] = OrderedDict()
        self.bytes = self.hits = self.misses = 0


def _key(owner: str, identity: str, text: str) -> bytes:
    """Two keys are equal only where all three parts are: their lengths stand before them."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (owner, identity, text)]
    return blake2b(b"".join(b"%d:%b" % (len(part), part) for part in parts), digest_size=32).digest()


def _named(principal: Principal) -> str:
    return json.dumps([principal.tenant, principal.user, sorted(principal.groups)])


def _size(vector: array[float]) -> int:
    return ENTRY_BYTES + vector.itemsize * len(vector)


def _reset_all() -> None:
    for held in list(_caches):
        held.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)

SHARED_CACHE: Final = EmbeddingCache()
"""The process's cache: of every retriever that is not given another."""
