"""``store.json``: the format of a store and the embedding model it was made with."""

from __future__ import annotations

import base64
import json
import os
import struct
from pathlib import Path

from llama_index_agentic_kb.errors import ConfigurationError, StoreDamagedError
from llama_index_agentic_kb.store.embedding_model import EmbedModelFingerprint

__all__ = [
    "FORMAT_VERSION",
    "STORE_FILE",
    "read_store_file",
    "store_file_content",
    "sync_directory",
    "write_store_file",
]

FORMAT_VERSION = 1
STORE_FILE = "store.json"


def store_file_content(fingerprint: EmbedModelFingerprint) -> str:
    """Give the content of ``store.json``.

    Args:
        fingerprint: The embedding model that every vector in the store comes from; its probe is kept as float16.
    """
    model: dict[str, object] = {"name": fingerprint.name, "dimension": fingerprint.dimension}
    if fingerprint.probe:
        probe = struct.pack(f"<{len(fingerprint.probe)}e", *fingerprint.probe)
        model["probe"] = base64.b64encode(probe).decode("ascii")
    return json.dumps({"formatVersion": FORMAT_VERSION, "embeddingModel": model}, indent=2) + "\n"


def write_store_file(directory: Path, content: str) -> None:
    """Write ``store.json`` so that a crash leaves either the old file or the new one, never half of one.

    Args:
        directory: The store's directory.
        content: What `store_file_content` gives.
    """
    temporary = directory / f"{STORE_FILE}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / STORE_FILE)
    sync_directory(directory)


def read_store_file(directory: Path) -> EmbedModelFingerprint:
    """Read ``store.json``.

    Args:
        directory: The store's directory; must hold the file.

    Returns:
        The embedding model that the store was made with.

    Raises:
        StoreDamagedError: The file is damaged.
        ConfigurationError: Its format version is not ours.
    """
    path = directory / STORE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, model = content["formatVersion"], content["embeddingModel"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamagedError(
            f"{str(path)!r} is damaged: {error!r}. Run `agentic-kb repair --store {directory}`."
        ) from error
    if version != FORMAT_VERSION:
        raise ConfigurationError(
            f"The store {str(directory)!r} has format version {version!r}; this release reads version "
            f"{FORMAT_VERSION}. Upgrade llama-index-agentic-kb, or make the store again with `agentic-kb ingest`."
        )
    try:
        probe = base64.b64decode(model.get("probe", ""), validate=True)
        return EmbedModelFingerprint(
            name=str(model["name"]),
            dimension=int(model["dimension"]),
            probe=struct.unpack(f"<{len(probe) // 2}e", probe),
        )
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise StoreDamagedError(
            f"{str(path)!r} names no embedding model: {error!r}. Run `agentic-kb repair --store {directory}`."
        ) from error


def sync_directory(directory: Path) -> None:
    """Make new names in a directory durable; Windows has no way to and no need."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
