"""Query vectors from request to request: bounded in memory, shared by all threads and event loops."""

from __future__ import annotations

import copy
import itertools
import json
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from llama_index.core.base.embeddings.base import BaseEmbedding

from llama_index_agentic_kb._aio import reset_after_fork
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema.request import Principal

__all__ = ["DEFAULT_MAX_BYTES", "SHARED_CACHE", "CacheStatistics", "EmbeddingCache", "is_a", "model_identity"]

DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024
"""About 19,000 vectors of 384 dimensions, or 5,000 of 1,536."""

ENTRY_BYTES: Final = 400
"""What an entry costs beside its numbers: its key, its place in the order, the vector's object."""

CALL_SETTINGS: Final = frozenset(
    {
        "callback_manager",
        "embed_batch_size",
        "embeddings_cache",
        "max_retries",
        "num_workers",
        "rate_limiter",
        "reuse_client",
        "show_progress_bar",
        "timeout",
    }
)
"""State that says how a model is called, not which vectors it has."""

OPENAI_CLIENTS: Final = frozenset({"_client", "_aclient"})
"""Made of the other state when they are first needed."""

MAX_ITEMS: Final = 64
"""A list or mapping with more is not looked through for each request."""


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

    Vectors are kept as doubles, so that what is found equals what the model returned, to the last bit. Each look-up
    returns a list of its own. Texts are not kept, only their digests (BLAKE2b, 256 bits).

    One process-wide cache, ``SHARED_CACHE``, serves every retriever that has no other. A vector is a function of model
    and text alone and says nothing of documents; but how long it takes shows whether somebody asked the very same
    words shortly before. Requests of a principal therefore find the vectors of its own requests only (``of``).

    Args:
        max_bytes: Memory that the vectors may take, keys and bookkeeping included. Default 64 MiB; 0 keeps nothing.

    Raises:
        ConfigurationError: ``max_bytes`` is no whole number, or below 0.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        size: object = max_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ConfigurationError(
                f"max_bytes of an EmbeddingCache must be a whole number of bytes, 0 or more (0 keeps nothing), "
                f"got {size!r}"
            )
        self.max_bytes: int = size
        self._owner = ""
        self._entries = _Entries()

    def of(self, principal: Principal | None) -> EmbeddingCache:
        """Return the part of this cache that is a principal's own; memory, counts and ``clear`` are the whole's.

        Args:
            principal: Who asks; None is everybody who asks without one.
        """
        part = copy.copy(self)
        if principal is not None:
            owner = json.dumps([principal.tenant, principal.user, sorted(principal.groups)])
            part._owner = owner  # noqa: SLF001 (of the same class)
        return part

    def get(self, identity: str, text: str) -> list[float] | None:
        """Return a vector, or None where it is not held.

        Args:
            identity: The model's, from ``model_identity``.
            text: The query.
        """
        key, entries = _key(self._owner, identity, text), self._entries
        with entries.lock:
            vector = entries.vectors.get(key)
            if vector is None:
                entries.misses += 1
                return None
            entries.hits += 1
            entries.vectors.move_to_end(key)
        return vector.tolist()

    def put(self, identity: str, text: str, vector: Sequence[float]) -> None:
        """Keep a copy of a vector, unless it is no row of numbers, or larger than the whole cache.

        Args:
            identity: The model's, from ``model_identity``.
            text: The query.
            vector: As the model returned it.
        """
        try:
            kept = array("d", vector)
        except (TypeError, OverflowError):  # a multi-vector model's rows; whole numbers beyond a double
            return
        if _size(kept) > self.max_bytes:
            return
        key, entries = _key(self._owner, identity, text), self._entries
        with entries.lock:
            before = entries.vectors.pop(key, None)
            entries.bytes += _size(kept) - (0 if before is None else _size(before))
            entries.vectors[key] = kept
            while entries.bytes > self.max_bytes:
                entries.bytes -= _size(entries.vectors.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all vectors and counts."""
        with self._entries.lock:
            self._entries.forget()

    @property
    def statistics(self) -> CacheStatistics:
        """Hits, misses, entries and bytes, at one moment."""
        entries = self._entries
        with entries.lock:
            return CacheStatistics(entries.hits, entries.misses, len(entries.vectors), entries.bytes)


class _Entries:
    """The vectors of a cache and all its parts."""

    def __init__(self) -> None:
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Start empty; also in a forked child, whose parent may have been in the midst of a change."""
        self.lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        self.vectors: OrderedDict[bytes, array[float]] = OrderedDict()
        self.bytes = self.hits = self.misses = 0


def _key(*parts: str) -> bytes:
    """Return a digest; two are equal only where all parts are: their lengths stand before them."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return blake2b(b"".join(b"%d:%b" % (len(part), part) for part in encoded), digest_size=32).digest()


def _size(vector: array[float]) -> int:
    return ENTRY_BYTES + vector.itemsize * len(vector)


SHARED_CACHE: Final = EmbeddingCache()
"""The process's cache: of every retriever that has no other."""


# -- identities of models ---------------------------------------------------------------------------------------------


class _OpaqueError(Exception):
    """A value can be identified neither by its content nor by a reference."""


_serials = itertools.count()
_named: dict[int, tuple[weakref.ref[Any], int]] = {}


def is_a(model: BaseEmbedding, *names: str) -> bool:
    """Return whether a model's class or one of its bases has one of these names, without importing the integration."""
    return any(base.__name__ in names for base in type(model).__mro__)


def model_identity(model: BaseEmbedding) -> str | None:
    """Return what two models share only if they return the same vector for the same text.

    It is made of the class and all state of the model as it is now: name, dimensions, instructions, address, key,
    headers. Plain data counts by its value, any other object (loaded weights, a client) by its identity, which is
    never used for a second object, not even after the first is gone. So two ``OpenAIEmbedding`` with equal arguments
    share one; a model loaded twice does not. A class that is not LlamaIndex's own may hide state elsewhere (a global,
    an environment variable): there the model itself counts by its identity too.

    Args:
        model: Any embedding model. It is not called.

    Returns:
        A digest that holds no secret in readable form; None for a model that can't be identified (it holds large
        collections, or objects without weak references).
    """
    is_core = type(model).__module__.startswith("llama_index.")
    try:
        parts = [_token(type(model)), "" if is_core else _token(model), *_state(model)]
    except _OpaqueError:
        return None
    return blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _state(model: BaseEmbedding) -> Iterator[str]:
    ignored = CALL_SETTINGS | OPENAI_CLIENTS if is_a(model, "OpenAIEmbedding") else CALL_SETTINGS
    state = {**vars(model), **(model.__pydantic_private__ or {})}
    for name in sorted(state.keys() - ignored):
        yield f"{name}={_described(state[name])}"
    if is_a(model, "HuggingFaceEmbedding"):  # its weights' own settings, which users change in place
        for name in ("prompts", "max_seq_length", "truncate_dim"):
            yield f"_model.{name}={_described(getattr(state.get('_model'), name, None))}"


def _described(value: Any) -> str:
    """Return plain data in writing; a token for any other object."""
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return _token(value)
    if len(value) > MAX_ITEMS:
        raise _OpaqueError
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_described(key)}: {_described(item)}' for key, item in value.items()))}}}"
    items = [_described(item) for item in value]
    return f"[{', '.join(items if isinstance(value, list | tuple) else sorted(items))}]"


def _token(value: Any) -> str:
    """Name an object for as long as it lives; no other object ever has that name.

    Needs no lock: each step on the dictionary is atomic, and an object's id is free only after its callback has run.
    """
    key = id(value)

    def forget(gone: weakref.ref[Any], named: dict[int, tuple[weakref.ref[Any], int]] = _named) -> None:
        if named.get(key, (None,))[0] is gone:
            del named[key]

    known = _named.get(key)
    if known is None:
        try:
            known = _named.setdefault(key, (weakref.ref(value, forget), next(_serials)))
        except TypeError:
            raise _OpaqueError from None
    return f"#{known[1]}"
