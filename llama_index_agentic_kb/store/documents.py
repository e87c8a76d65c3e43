"""The durable record of what a store holds: every document, its chunks, their hashes and vectors, in SQLite.

It is the manifest that tells changed files from unchanged ones, and it keeps all that the vector index is made of, for
when that is lost: Chroma's files don't always survive a killed process, a SQLite transaction does.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_index_agentic_kb.store.database import Database
from llama_index_agentic_kb.store.kept_vectors import KeptVectors, batched, marks, put_vectors
from llama_index_agentic_kb.store.records import Chunk, SourceInfo, StoredDocument
from llama_index_agentic_kb.store.state import StoreState

__all__ = ["DocumentDatabase"]

_FIRST = """
CREATE TABLE sources (
    name TEXT PRIMARY KEY, description TEXT NOT NULL, version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE documents (
    source TEXT NOT NULL REFERENCES sources (name) ON DELETE CASCADE,
    path TEXT NOT NULL, title TEXT NOT NULL, origin TEXT NOT NULL, root TEXT NOT NULL,
    content_hash TEXT NOT NULL, settings TEXT NOT NULL, modified REAL NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (source, path)
) WITHOUT ROWID;
CREATE TABLE chunks (
    node_id TEXT PRIMARY KEY,
    source TEXT NOT NULL, path TEXT NOT NULL, chunk_index INTEGER NOT NULL,
    text TEXT NOT NULL, metadata TEXT NOT NULL, content_hash TEXT NOT NULL, embedding_hash TEXT NOT NULL,
    start_char INTEGER, end_char INTEGER,
    FOREIGN KEY (source, path) REFERENCES documents (source, path) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX chunks_of_document ON chunks (source, path, chunk_index);
CREATE INDEX chunks_by_embedding ON chunks (source, embedding_hash);
"""
# Vectors are float32, little-endian. A store of the first release has no mark of what its last writer left behind:
# it is looked at once, as if that had died.
_VECTORS_AND_STATE = """
CREATE TABLE vectors (
    node_id TEXT PRIMARY KEY REFERENCES chunks (node_id) ON DELETE CASCADE, vector BLOB NOT NULL
);
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO state SELECT 'writing', 'an earlier release' WHERE EXISTS (SELECT 1 FROM chunks);
"""


class DocumentDatabase:
    """Documents, chunks and vectors of a store; safe to use from many threads.

    Each method raises ``StoreDamagedError`` where the file is damaged, and what can't be read or written for another
    reason as ``RetrievalError`` or ``IngestionError``.

    Args:
        path: The SQLite file; made when missing, brought up to date when an earlier release made it.
        timeout: Seconds to wait for another program that holds it locked.

    Raises:
        ConfigurationError: The file is of another release, or can't be opened.
        StoreDamagedError: The file is no such database, or damaged.
    """

    def __init__(self, path: Path, timeout: float = 30.0) -> None:
        self._database = Database(path, (_FIRST, _VECTORS_AND_STATE), timeout)
        self.vectors = KeptVectors(self._database)
        """The chunks' vectors, for when Chroma's are lost."""
        self.state = StoreState(self._database)
        """What is known of the store's other files."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._database.close()

    def fault(self) -> str:
        """Look through the whole file; say what is wrong with it, or nothing."""
        return self._database.fault()

    def sources(self) -> list[SourceInfo]:
        """List the sources by name, with their counts."""
        rows = self._database.rows(
            "SELECT name, description,"
            " (SELECT count(*) FROM documents WHERE source = name),"
            " (SELECT count(*) FROM chunks WHERE source = name), version"
            " FROM sources ORDER BY name"
        )
        return [SourceInfo(*row) for row in rows]

    def version(self, source: str) -> int | None:
        """Give a source's version, which grows with each of its changes; None where there is no such source."""
        rows = self._database.rows("SELECT version FROM sources WHERE name = ?", (source,))
        return rows[0][0] if rows else None

    def put_source(self, name: str, description: str | None = None) -> None:
        """Make a source, or give one a new description.

        Args:
            name: The source.
            description: What it holds; ``None`` keeps the description it has (at first: empty).
        """
        with self._database.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO sources VALUES (?, '', 0)", (name,))
            if description is not None:
                connection.execute("UPDATE sources SET description = ? WHERE name = ?", (description, name))

    def delete_source(self, name: str) -> None:
        """Forget a source with all its documents."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM sources WHERE name = ?", (name,))

    def sources_at(self, origin: str) -> list[str]:
        """Name the sources that hold the file or folder with this absolute path."""
        rows = self._database.rows(
            "SELECT DISTINCT source FROM documents WHERE root = ? OR origin = ? ORDER BY source", (origin, origin)
        )
        return [row[0] for row in rows]

    def documents(self, source: str) -> dict[str, StoredDocument]:
        """Map the path of each document of a source to the document, in the order of the paths."""
        rows = self._database.rows(
            "SELECT source, path, title, origin, root, content_hash, settings, modified, size"
            " FROM documents WHERE source = ? ORDER BY path",
            (source,),
        )
        return {row[1]: StoredDocument(*row) for row in rows}

    def chunks(self, source: str, path: str | None = None) -> list[Chunk]:
        """List the chunks of a source, or of one document of it, in reading order."""
        rows = self._database.rows(
            "SELECT node_id, chunk_index, text, metadata, content_hash, embedding_hash, start_char, end_char"
            " FROM chunks WHERE source = ? AND (? IS NULL OR path = ?) ORDER BY path, chunk_index",
            (source, path, path),
        )
        return [_chunk(*row) for row in rows]

    def chunks_by_id(self, source: str, node_ids: Iterable[str]) -> Iterator[Chunk]:
        """Read chunks of a source by the ids of their nodes, a few hundred at a time and in no order.

        Args:
            source: The source.
            node_ids: The ids; those that the source does not have are left out.
        """
        for batch in batched(node_ids):
            rows = self._database.rows(
                # "+": SQLite would else take an index that begins with the source, and read all of the source's chunks.
                "SELECT node_id, chunk_index, text, metadata, content_hash, embedding_hash, start_char, end_char"  # noqa: S608  (only question marks are put in)
                f" FROM chunks WHERE +source = ? AND node_id IN ({marks(batch)})",
                (source, *batch),
            )
            yield from (_chunk(*row) for row in rows)

    def metadata(self, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Stream the path and the metadata of each chunk of a source, a document's chunks one after the other.

        All are of one moment, and neither readers nor writers wait.
        """
        rows = self._database.stream(
            "SELECT path, metadata FROM chunks WHERE source = ? ORDER BY path, chunk_index", (source,)
        )
        return ((path, json.loads(metadata)) for path, metadata in rows)

    def node_ids(self, source: str) -> dict[str, set[str]]:
        """Map the path of each document of a source to the ids of its nodes."""
        ids: dict[str, set[str]] = {path: set() for path in self.documents(source)}
        for path, node_id in self._database.rows("SELECT path, node_id FROM chunks WHERE source = ?", (source,)):
            ids[path].add(node_id)
        return ids

    # -- changes -----------------------------------------------------------------------------------------------------

    def put_document(
        self, document: StoredDocument, chunks: Sequence[Chunk], vectors: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Store a document in place of its earlier version, in one transaction.

        Chunks that the earlier version has as well are left as they are, with their vectors.

        Args:
            document: The document; its source must exist.
            chunks: All its chunks.
            vectors: The vectors of its new chunks, by node id; others are left out.
        """
        new = {chunk.node_id for chunk in chunks}
        with self._database.transaction() as connection:
            old = connection.execute(
                "SELECT node_id FROM chunks WHERE source = ? AND path = ?", (document.source, document.path)
            )
            gone = [row for row in old.fetchall() if row[0] not in new]
            connection.executemany("DELETE FROM chunks WHERE node_id = ?", gone)
            # Not "OR REPLACE": that deletes the row first, and its chunks with it.
            connection.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " title = excluded.title, origin = excluded.origin, root = excluded.root,"
                " content_hash = excluded.content_hash, settings = excluded.settings,"
                " modified = excluded.modified, size = excluded.size",
                (
                    *(document.source, document.path, document.title, document.origin, document.root),
                    *(document.content_hash, document.settings, document.modified, document.size),
                ),
            )
            # A node's id is a hash of all the rest: one that is there already says the same.
            connection.executemany(
                "INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        *(chunk.node_id, document.source, document.path, chunk.index, chunk.text),
                        *(json.dumps(dict(chunk.metadata)), chunk.content_hash, chunk.embedding_hash),
                        *(chunk.start_char, chunk.end_char),
                    )
                    for chunk in chunks
                ],
            )
            put_vectors(connection, {key: vector for key, vector in (vectors or {}).items() if key in new})
            _grow_version(connection, document.source)

    def delete_document(self, source: str, path: str) -> None:
        """Forget a document and its chunks, in one transaction."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM documents WHERE source = ? AND path = ?", (source, path))
            _grow_version(connection, source)


def _grow_version(connection: sqlite3.Connection, source: str) -> None:
    connection.execute("UPDATE sources SET version = version + 1 WHERE name = ?", (source,))


def _chunk(
    node_id: str,
    index: int,
    text: str,
    metadata: str,
    content_hash: str,
    embedding_hash: str,
    start_char: int | None,
    end_char: int | None,
) -> Chunk:
    return Chunk(node_id, index, text, json.loads(metadata), content_hash, embedding_hash, start_char, end_char)
