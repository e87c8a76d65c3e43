"""Names of Chroma's collections, and which of them are ours."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llama_index_agentic_kb.errors import ConfigurationError, StoreMismatchError

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

__all__ = ["SOURCE_KEY", "check_collection", "collection_name"]

SOURCE_KEY = "agentic_kb_source"
"""Key of a collection's metadata: the source's own name."""

_PLAIN_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{1,98}[a-zA-Z0-9]")
_DERIVED_NAME = re.compile(r"-[0-9a-f]{16}")


def collection_name(source: str) -> str:
    """Derive a name that Chroma accepts from any source name.

    Args:
        source: Any text that is not empty.

    Returns:
        The name itself when it is 3 to 100 letters, digits, ``_`` and ``-``; else its legal part and 16 hex digits of
        its hash. The collection's metadata keeps the source's own name.

    Raises:
        ConfigurationError: The name is empty.
    """
    if not source.strip():
        raise ConfigurationError("A source needs a name; got an empty one.")
    if _PLAIN_NAME.fullmatch(source) and not _DERIVED_NAME.fullmatch(source[-17:]):
        return source
    legal = re.sub(r"[^a-zA-Z0-9]+", "-", source).strip("-")[:48].rstrip("-") or "source"
    digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{legal}-{digest}"


def check_collection(collection: Collection, source: str) -> None:
    """Refuse a collection that is not ours, before anything is added to it.

    Only the raw JSON is read: Chroma's own accessors (``configuration``, ``schema``) build what it names.

    Raises:
        StoreMismatchError: It names an embedding function, or was not made by this library for this source.
    """
    model = collection.get_model()
    for configuration in (collection.configuration_json, model.serialized_schema):
        for embedding_function in _embedding_functions(configuration):
            raise StoreMismatchError(
                f"The Chroma collection {collection.name!r} names an embedding function of its own "
                f"({embedding_function!r}), which this library never loads. Delete the collection, then run "
                "`agentic-kb ingest` again."
            )
    space = ((collection.configuration_json or {}).get("hnsw") or {}).get("space")
    if (collection.metadata or {}).get(SOURCE_KEY) != source or space != "cosine":
        raise StoreMismatchError(
            f"The Chroma collection {collection.name!r} was not made by this library for the source {source!r}. "
            "Give the source another name, or wrap that collection as an index of your own."
        )


def _embedding_functions(configuration: object) -> Iterator[str]:
    """Name the embedding functions in a configuration; ``legacy`` and ``unknown`` stand for none."""
    if isinstance(configuration, list):
        for item in configuration:
            yield from _embedding_functions(item)
    if not isinstance(configuration, dict):
        return
    for key, value in configuration.items():
        if key != "embedding_function":
            yield from _embedding_functions(value)
        elif isinstance(value, dict) and value.get("type") in ("legacy", "unknown") and "name" not in value:
            continue
        elif value is not None:
            yield str(value.get("name", value)) if isinstance(value, dict) else str(value)
