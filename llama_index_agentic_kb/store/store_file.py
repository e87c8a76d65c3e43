"""``store.json``: the format of a store and the embedding model it was made with."""

from __future__ import annotations

import json
import os
from pathlib import Path

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.store.embedding_model import EmbedModelFingerprint

__all__ = ["FORMAT_VERSION", "STORE_FILE", "read_store_file", "write_store_file"]

FORMAT_VERSION = 1
STORE_FILE = "store.json"


def write_store_file(directory: Path, fingerprint: EmbedModelFingerprint) -> None:
    """Write ``store.json`` so that a crash leaves either the old file or the new one, never half of one.

    Args:
        directory: The store's directory.
        fingerprint: The embedding model that every vector in the store comes from.
    """
    content = {
        "formatVersion": FORMAT_VERSION,
        "embeddingModel": {"name": fingerprint.name, "dimension": fingerprint.dimension},
    }
    target = directory / STORE_FILE
    temporary = directory / f"{STORE_FILE}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    _sync_directory(directory)


def read_store_file(directory: Path) -> EmbedModelFingerprint:
    """Read ``store.json``.

    Args:
        directory: The store's directory; must hold the file.

    Returns:
        The embedding model that the store was made with.

    Raises:
        ConfigurationError: The file is damaged, or its format version is not ours.
    """
    path = directory / STORE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, model = content["formatVersion"], content["embeddingModel"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{str(path)!r} is damaged: {error!r}. Restore it, or make the store again with `agentic-kb ingest`."
        ) from error
    if version != FORMAT_VERSION:
        raise ConfigurationError(
            f"The store {str(directory)!r} has format version {version!r}; this release reads version "
            f"{FORMAT_VERSION}. Upgrade llama-index-agentic-kb, or make the store again with `agentic-kb ingest`."
        )
    try:
        return EmbedModelFingerprint(name=str(model["name"]), dimension=int(model["dimension"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{str(path)!r} names no embedding model: {error!r}. Restore it, or make the store again with "
            "`agentic-kb ingest`."
        ) from error


def _sync_directory(directory: Path) -> None:
    """Make the new name itself durable; Windows has no way to and no need."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
