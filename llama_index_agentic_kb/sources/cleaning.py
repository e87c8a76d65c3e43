"""Checks what a source returned: user retrievers may return anything. Flaws are repaired, or counted and reported."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from types import NoneType
from typing import Any, Final

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from llama_index_agentic_kb._text import error_message, without_surrogates
from llama_index_agentic_kb.errors import RetrievalError

MAX_NODES: Final = 10_000  # read from one answer
MAX_CHARACTERS: Final = 1_000_000  # of a node's text; longer text is cut
MAX_ID: Final = 10_000  # characters
MAX_FIELDS: Final = 1_000  # of metadata
MAX_ITEMS: Final = 100_000  # values within one metadata field, nested lists and mappings included
MAX_LEVELS: Final = 20  # of lists and mappings within one metadata field
MAX_BITS: Final = 10_000  # of an integer: Python refuses to convert more than 4,300 digits to text

_KINDS: Final[dict[str, type]] = {
    "relationships": dict,
    "excluded_embed_metadata_keys": list,
    "excluded_llm_metadata_keys": list,
    "text_template": str,
    "metadata_template": str,
    "metadata_separator": str,
}
"""The types that LlamaIndex's methods expect of a node's fields; code that bypasses pydantic may set any type."""

_ATOMS: Final = frozenset({bool, float, NoneType})


class CleanNodes(list[NodeWithScore]):
    """The valid nodes of an answer in new ``NodeWithScore`` objects; scores that are not finite become None."""

    unusable = 0
    """The number of invalid nodes that were left out."""
    returned = 0
    """The number of nodes that the source returned."""
    why: str | None = None
    """Why the first node was left out or cut; None if all nodes are valid."""


def clean_nodes(found: object, source: str) -> CleanNodes:
    """Check the result of a source; its own nodes are never changed, and ``CleanNodes`` are returned unchanged.

    Invalid nodes are left out and counted, with the reason; nodes that can be repaired are replaced by copies.

    Raises:
        RetrievalError: The result is not a list, or none of its items is a valid node.
    """
    if isinstance(found, CleanNodes):
        return found
    if isinstance(found, (str, bytes)) or not isinstance(found, Sequence):
        raise RetrievalError(f"source {source!r} returned no list of NodeWithScore: {type(found).__name__}")
    made = CleanNodes()
    made.returned = len(found)
    try:
        for item in islice(found, MAX_NODES):
            try:
                node, flaw = _usable(item)
                made.append(node)
                made.why = made.why or flaw
            except Exception as error:  # noqa: BLE001 (nodes are anybody's classes)
                made.unusable += 1
                made.why = made.why or f"a node can't be used: {error_message(error, 300)}"
    except Exception as error:  # noqa: BLE001 (so are lists)
        made.why = f"its list ended with {error_message(error, 300)}"
    if made.why is not None and not made:
        raise RetrievalError(f"source {source!r} returned no list of NodeWithScore: {made.why}")
    if made.returned > MAX_NODES:
        made.why = made.why or f"only the first {MAX_NODES:,} of {made.returned:,} nodes were looked at"
    return made


def _usable(item: Any) -> tuple[NodeWithScore, str | None]:
    """Return a node whose ID, text, metadata and score have the expected types, and a note if its text was cut."""
    node: Any = getattr(item, "node", None)
    if not isinstance(item, NodeWithScore) or not isinstance(node, BaseNode):
        raise TypeError(f"expected a NodeWithScore, got {type(item).__name__}")
    node_id: Any = node.node_id
    text: Any = node.get_content(metadata_mode=MetadataMode.NONE)
    if not isinstance(node_id, str) or not node_id:
        raise TypeError(f"its id is no text: {node_id!r}")
    if len(node_id) > MAX_ID:
        raise TypeError(f"its id has {len(node_id):,} characters; at most {MAX_ID:,}")
    if not isinstance(text, str):
        raise TypeError(f"its content is no text but {type(text).__name__}")
    flaw = f"a node of {len(text):,} characters was cut to {MAX_CHARACTERS:,}" if len(text) > MAX_CHARACTERS else None
    whole, whole_id, metadata = without_surrogates(text[:MAX_CHARACTERS]), without_surrogates(node_id), node.metadata
    fields = type(node).model_fields
    update: dict[str, Any] = {
        name: fields[name].get_default(call_default_factory=True)
        for name, kind in _KINDS.items()
        if not isinstance(node.__dict__.get(name), kind) and name in fields
    }
    clean = _clean_metadata(metadata)
    if clean is not metadata:
        update["metadata"] = clean
    if whole_id is not node_id:
        update["id_"] = whole_id
    if update or whole is not text:
        node = node.model_copy(update=update)
    if whole is not text:
        node.set_content(whole)
    return NodeWithScore.model_construct(node=node, score=_finite(item.score)), flaw


def _clean_metadata(metadata: Any) -> dict[str, Any]:
    """Return metadata with text keys and clean values; the same object if nothing needs repair."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"its metadata are no mapping but {type(metadata).__name__}")
    if len(metadata) > MAX_FIELDS:
        raise TypeError(f"its metadata have {len(metadata):,} fields; at most {MAX_FIELDS:,}")
    if type(metadata) is dict and _is_plain(metadata):
        return metadata
    made = {without_surrogates(str(key)): _clean_value(value) for key, value in metadata.items()}
    if isinstance(metadata, dict) and all(made.get(key, made) is value for key, value in metadata.items()):
        return metadata
    return made


def _is_plain(metadata: dict[Any, Any]) -> bool:
    """Return whether metadata contain only short ASCII text, small numbers, booleans and None."""
    for key, value in metadata.items():
        kind = type(value)
        if type(key) is not str or not key.isascii():
            return False
        if kind is str:
            if not value.isascii() or len(value) > MAX_CHARACTERS:
                return False
        elif kind not in _ATOMS and not (kind is int and abs(value) < sys.maxsize):
            return False
    return True


def _clean_value(value: Any) -> Any:
    """Return a metadata value without lone surrogates; None, which passes no filter, if it can't be serialized."""
    if isinstance(value, str):
        return without_surrogates(value[:MAX_CHARACTERS])
    if value is None or isinstance(value, (bool, float)):
        return value
    if not _can_be_written(value):
        return None
    if isinstance(value, list) and any(isinstance(item, str) and _clean_value(item) is not item for item in value):
        return [_clean_value(item) if isinstance(item, str) else item for item in value]
    return value


def _can_be_written(value: Any) -> bool:
    """Return whether a value is within ``MAX_ITEMS`` and ``MAX_LEVELS``, and all its items convert to text."""
    left, level = MAX_ITEMS, [value]
    for _ in range(MAX_LEVELS):
        left -= len(level)
        inner: list[Any] = []
        for item in level:
            if isinstance(item, (Mapping, list, tuple, set, frozenset)):
                if len(item) + len(inner) > left:
                    return False
                inner += [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
            elif not _has_words(item):
                return False
        if not inner:
            return left >= 0
        level = inner
    return False


def _has_words(value: Any) -> bool:
    if value is None or isinstance(value, (str, bytes, bool, float)):
        return True
    if isinstance(value, int):
        return value.bit_length() <= MAX_BITS
    try:
        return isinstance(str(value), str)
    except Exception:  # noqa: BLE001 (metadata hold anybody's objects)
        return False


def _finite(score: Any) -> float | None:
    """Return a score as a finite number; None if it is not finite or not a number."""
    if score is None or isinstance(score, bool):
        return None
    try:
        number = float(score)
    except Exception:  # noqa: BLE001 (scores are anybody's objects)
        return None
    return number if math.isfinite(number) else None
