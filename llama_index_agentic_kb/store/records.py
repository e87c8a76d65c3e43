"""What a store records: sources, documents and chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Chunk", "MetadataValue", "SourceInfo", "StoredDocument"]

MetadataValue = str | int | float | bool
"""What a vector store can hold and filter on."""


@dataclass(frozen=True)
class SourceInfo:
    """One source of a store.

    Args:
        name: Its name.
        description: What it holds, for the planner; may be empty.
        documents: How many documents it has.
        chunks: How many chunks they were cut into.
        version: Grows with every change of the source, for caches and indexes that must keep in step.
    """

    name: str
    description: str
    documents: int
    chunks: int
    version: int = 0


@dataclass(frozen=True)
class StoredDocument:
    """One file as it was when it was ingested.

    Args:
        source: The source it belongs to.
        path: Its path inside the source, with forward slashes.
        title: Its title.
        origin: Its absolute path on disk.
        root: The absolute path of the folder it was found under; empty for a file that was named itself.
        content_hash: SHA-256 of its bytes, in hex.
        settings: How it was read and cut; another value means that it must be ingested again.
        modified: Its modification time, in seconds since 1970.
        size: Its size in bytes.
    """

    source: str
    path: str
    title: str
    origin: str
    root: str
    content_hash: str
    settings: str
    modified: float
    size: int

    @property
    def document_id(self) -> str:
        """``<source>/<path>``, unique in the store."""
        return f"{self.source}/{self.path}"


@dataclass(frozen=True)
class Chunk:
    """One piece of a document, with everything that its node in the vector index is made from.

    Args:
        node_id: The node's id.
        index: Its 0-based place in the document.
        text: Its text, without the title.
        metadata: The node's metadata.
        content_hash: SHA-256 of text, metadata and place, in hex.
        embedding_hash: SHA-256 of the text that is embedded, in hex: equal hashes have equal vectors.
        start_char: Where it starts in the document's (or page's) text; ``None`` when not known.
        end_char: Where it ends, exclusive.
    """

    node_id: str
    index: int
    text: str
    metadata: Mapping[str, MetadataValue]
    content_hash: str
    embedding_hash: str
    start_char: int | None
    end_char: int | None
