"""What of a source's answer can be used: retrievers are other people's code, and return anything.

A node that can't be used is left out, and counted with the reason; one with a flaw that can be mended is replaced by a
mended copy. The source's own nodes are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from llama_index_agentic_kb._text import error_message, without_surrogates
from llama_index_agentic_kb.errors import RetrievalError

__all__ = ["MAX_CHARACTERS", "MAX_NODES", "CleanNodes", "clean_nodes"]

MAX_CHARACTERS: Final = 1_000_000
"""Characters of a node that are read; more would hold up everything that looks at text."""


MAX_NODES: Final = 10_000
"""Nodes of one answer that are looked at; hardly any request wants more than some dozens."""

MAX_FIELDS: Final = 1_000
"""Fields of a node's metadata."""

MAX_ID: Final = 10_000
"""Characters of a node's id."""

MAX_ITEMS: Final = 100_000
"""Values within one field of the metadata, lists and mappings in it counted."""

MAX_LEVELS: Final = 20
"""Levels of lists and mappings within one field of the metadata."""

MAX_BITS: Final = 10_000
"""Of a whole number: Python refuses to write those of more than 4,300 digits."""

_KINDS: Final[dict[str, type]] = {
    "relationships": dict,
    "excluded_embed_metadata_keys": list,
    "excluded_llm_metadata_keys": list,
    "text_template": str,
    "metadata_template": str,
    "metadata_separator": str,
}
"""What LlamaIndex's own methods take a node's fields for; code that goes around pydantic sets anything."""


class CleanNodes(list[NodeWithScore]):
    """The nodes of an answer that can be used: our own wrappers; scores that are no finite numbers are None."""

    unusable = 0
    """How many were left out because they can't be used."""
    returned = 0
    """How many the source returned."""
    why: str | None = None
    """The reason for the first that was left out, or that a node was cut; None where all was well."""


def clean_nodes(found: Any, source: str) -> CleanNodes:
    """Look through what a source returned.

    Args:
        found: Whatever it was; what was looked through before is given as it is.
        source: The source's name, for errors.

    Raises:
        RetrievalError: It is no list, or nothing in it can be used.
    """
    if isinstance(found, CleanNodes):
        return found
    if isinstance(found, (str, bytes)) or not isinstance(found, Sequence):
        raise RetrievalError(f"source {source!r} returned no list of NodeWithScore: {type(found).__name__}")
    made = CleanNodes()
    made.returned = len(found)
    try:
        for one in islice(found, MAX_NODES):
            _take(made, one)
    except Exception as error:
        made.why = f"its list ended with {error_message(error, 300)}"
        if not made:
            raise RetrievalError(f"source {source!r} returned no list of NodeWithScore: {made.why}") from error
    if made.unusable and not made:
        raise RetrievalError(f"source {source!r} returned no list of NodeWithScore: {made.why}")
    if made.returned > MAX_NODES:
        made.why = made.why or f"only the first {MAX_NODES:,} of {made.returned:,} nodes were looked at"
    return made


def _take(made: CleanNodes, one: Any) -> None:
    """Add a node as it can be used, or count it."""
    try:
        node, flaw = _mended(one)
        made.append(NodeWithScore.model_construct(node=node, score=_score(one.score)))
        made.why = made.why or flaw
    except Exception as error:  # noqa: BLE001 (nodes are anybody's classes)
        made.unusable += 1
        made.why = made.why or f"a node can't be used: {error_message(error, 300)}"


def _mended(one: Any) -> tuple[BaseNode, str | None]:
    """Return a node in which ids, text and metadata are what everything after this takes them for."""
    node: Any = getattr(one, "node", None)
    if not isinstance(one, NodeWithScore) or not isinstance(node, BaseNode):
        raise TypeError(f"expected a NodeWithScore, got {type(one).__name__}")
    given: Any = node
    node_id, text = given.node_id, given.get_content(metadata_mode=MetadataMode.NONE)
    if not isinstance(node_id, str) or not node_id:
        raise TypeError(f"its id is no text: {node_id!r}")
    if len(node_id) > MAX_ID:
        raise TypeError(f"its id has {len(node_id):,} characters; at most {MAX_ID:,}")
    if not isinstance(text, str):
        raise TypeError(f"its content is no text but {type(text).__name__}")
    return _with(node, *_cut(text))


def _cut(text: str) -> tuple[str, str | None, bool]:
    """Return a text that is short enough and valid UTF-8, what was wrong with it, and whether it changed."""
    whole = without_surrogates(text[:MAX_CHARACTERS])
    if len(text) > MAX_CHARACTERS:
        flaw = f"a node of {len(text):,} characters was cut to {MAX_CHARACTERS:,}"
        return whole, flaw, True
    return whole, None, whole is not text


def _with(node: BaseNode, text: str, flaw: str | None, changed: bool) -> tuple[BaseNode, str | None]:
    metadata = _metadata(node.metadata)
    node_id = without_surrogates(node.node_id)
    update: dict[str, Any] = dict(_defaults(node))
    if metadata is not node.metadata:
        update["metadata"] = metadata
    if node_id is not node.node_id:
        update["id_"] = node_id
    if update or changed:
        node = node.model_copy(update=update)
    if changed:
        node.set_content(text)
    return node, flaw


def _defaults(node: BaseNode) -> Iterator[tuple[str, Any]]:
    """Return the defaults of the fields that are not of their kind."""
    for name, kind in _KINDS.items():
        if not isinstance(getattr(node, name, kind()), kind) and name in type(node).model_fields:
            yield name, type(node).model_fields[name].get_default(call_default_factory=True)


def _metadata(metadata: Any) -> dict[str, Any]:
    """Return metadata with text for keys; the same object where there is nothing to mend."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"its metadata are no mapping but {type(metadata).__name__}")
    if len(metadata) > MAX_FIELDS:
        raise TypeError(f"its metadata have {len(metadata):,} fields; at most {MAX_FIELDS:,}")
    if isinstance(metadata, dict) and all(map(_is_clean, metadata.items())):
        return metadata
    return {without_surrogates(str(key)): _clean(value) for key, value in metadata.items()}


def _is_clean(item: tuple[Any, Any]) -> bool:
    key, value = item
    return isinstance(key, str) and without_surrogates(key) is key and _clean(value) is value


def _clean(value: Any) -> Any:
    """Return a value that can be written; None, which passes no filter, where it can't."""
    if isinstance(value, str):
        return without_surrogates(value[:MAX_CHARACTERS])
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= MAX_BITS else None
    if not _can_be_told(value):
        return None
    if isinstance(value, list) and any(_clean(item) is not item for item in value if isinstance(item, str)):
        return [_clean(item) if isinstance(item, str) else item for item in value]
    return value


def _can_be_told(value: Any) -> bool:
    """Whether a value is small and flat enough, and each thing in it can be given as text."""
    left, level = MAX_ITEMS, [value]
    for _ in range(MAX_LEVELS):
        left -= len(level)
        if left < 0:
            return False
        inner: list[Any] = []
        for one in level:
            if isinstance(one, (Mapping, list, tuple, set, frozenset)):
                if len(one) + len(inner) > left:
                    return False
                inner += [*one.keys(), *one.values()] if isinstance(one, Mapping) else one
            elif not _has_words(one):
                return False
        if not inner:
            return True
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


def _score(score: Any) -> float | None:
    """Return a score as a finite number; None where it is not one."""
    if score is None or isinstance(score, bool):
        return None
    try:
        number = float(score)
    except Exception:  # noqa: BLE001 (scores are anybody's objects)
        return None
    return number if math.isfinite(number) else None
