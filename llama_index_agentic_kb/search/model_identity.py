"""Tells embedding models apart that may give other vectors for the same text."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final

from llama_index.core.base.embeddings.base import BaseEmbedding

__all__ = ["is_a", "model_identity"]

NEUTRAL: Final = frozenset(
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
"""State that says how a model is called, not what it gives."""

OPENAI_CLIENTS: Final = frozenset({"_client", "_aclient"})
"""Made of the other state when they are first needed."""

MOST_ITEMS: Final = 64
"""A list or mapping with more is not looked through for each request."""

_serials = itertools.count()
_known: dict[int, tuple[weakref.ref[Any], int]] = {}


class _OpaqueError(Exception):
    """A value can be told neither by its content nor by a reference."""


def is_a(model: BaseEmbedding, *names: str) -> bool:
    """Tell a model's class by name along its bases, without importing the integration."""
    return any(base.__name__ in names for base in type(model).__mro__)


def model_identity(model: BaseEmbedding) -> str | None:
    """Give what two models share only if they give the same vector for the same text.

    It is made of the class and all state of the model as it is now: name, dimensions, instructions, address, key,
    headers. Plain data counts by its value, any other object (loaded weights, a client) by its identity, which is
    never given to a second object, not even after the first is gone. So two ``OpenAIEmbedding`` with equal arguments
    share one; a model loaded twice does not. A class that is not LlamaIndex's own may hide state elsewhere (a global,
    an environment variable): there the model itself counts by its identity too.

    Args:
        model: Any embedding model. It is not called.

    Returns:
        A digest that holds no secret in readable form; None for a model that can't be told (it holds large
        collections, or objects without weak references).
    """
    own = type(model).__module__.startswith("llama_index.")
    try:
        told = [_token(type(model)), "" if own else _token(model), *_state(model)]
    except _OpaqueError:
        return None
    return blake2b(repr(told).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _state(model: BaseEmbedding) -> Iterable[str]:
    neutral = NEUTRAL | OPENAI_CLIENTS if is_a(model, "OpenAIEmbedding") else NEUTRAL
    state = {**vars(model), **(model.__pydantic_private__ or {})}
    for name in sorted(state.keys() - neutral):
        yield f"{name}={_told(state[name])}"
    if is_a(model, "HuggingFaceEmbedding"):  # its weights' own settings, which users change in place
        for name in ("prompts", "max_seq_length", "truncate_dim"):
            yield f"_model.{name}={_told(getattr(state.get('_model'), name, None))}"


def _told(value: Any) -> str:
    """Write plain data out; name other objects."""
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if len(value) > MOST_ITEMS:
            raise _OpaqueError
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{_told(key)}: {_told(item)}' for key, item in value.items()))}}}"
        items = [_told(item) for item in value]
        return f"[{', '.join(items if isinstance(value, list | tuple) else sorted(items))}]"
    return _token(value)


def _token(value: Any) -> str:
    """Name an object for as long as it lives; no other object ever has that name.

    Needs no lock: each step on the dictionary is atomic, and an object's id is free only after its callback has run.
    """
    key = id(value)

    def forget(gone: weakref.ref[Any], known: dict[int, tuple[weakref.ref[Any], int]] = _known) -> None:
        if known.get(key, (None,))[0] is gone:
            del known[key]

    try:
        entry = (weakref.ref(value, forget), next(_serials))
    except TypeError:
        raise _OpaqueError from None
    return f"#{_known.setdefault(key, entry)[1]}"
