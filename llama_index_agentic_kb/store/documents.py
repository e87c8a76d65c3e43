"""The durable record of what a store holds: every document, its chunks and their hashes, in SQLite.

It is the manifest that tells changed files from unchanged ones, and it keeps enough to build the vector index again
when that is lost: Chroma's files don't always survive a killed process, a SQLite transaction does.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.store.records import Chunk, SourceInfo, StoredDocument

__all__ = ["DocumentDatabase"]

_SCHEMA_VERSION = 1
_SCHEMA = """
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
# SQLite's own limit on parameters of one statement is 999 in old builds.
_PARAMETERS = 500


class DocumentDatabase:
    """Documents and chunks of a store; safe to use from many threads.

    Args:
        path: The SQLite file; made when missing.

    Raises:
        ConfigurationError: The file is no such database, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(path)
        except (sqlite3.DatabaseError, ConfigurationError) as error:
            self._connection.close()
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"{str(path)!r} can't be read as a document database: {error}. "
                "Restore it, or make the store again with `agentic-kb ingest`."
            ) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            self._connection.close()

    def sources(self) -> list[SourceInfo]:
        """List the sources by name, with their counts."""
        rows = self._rows(
            "SELECT name, description,"
            " (SELECT count(*) FROM documents WHERE source = name),"
            " (SELECT count(*) FROM chunks WHERE source = name), version"
            " FROM sources ORDER BY name"
        )
        return [SourceInfo(*row) for row in rows]

    def version(self, source: str) -> int | None:
        """Give a source's version, which grows with each of its changes; None where there is no such source."""
        rows = self._rows("SELECT version FROM sources WHERE name = ?", (source,))
        return rows[0][0] if rows else None

    def put_source(self, name: str, description: str | None = None) -> None:
        """Make a source, or give one a new description.

        Args:
            name: The source.
            description: What it holds; ``None`` keeps the description it has (at first: empty).
        """
        with self._transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO sources VALUES (?, '', 0)", (name,))
            if description is not None:
                connection.execute("UPDATE sources SET description = ? WHERE name = ?", (description, name))

    def delete_source(self, name: str) -> None:
        """Forget a source with all its documents."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM sources WHERE name = ?", (name,))

    def sources_at(self, origin: str) -> list[str]:
        """Name the sources that hold the file or folder with this absolute path."""
        rows = self._rows(
            "SELECT DISTINCT source FROM documents WHERE root = ? OR origin = ? ORDER BY source", (origin, origin)
        )
        return [row[0] for row in rows]

    def documents(self, source: str) -> dict[str, StoredDocument]:
        """Map the path of each document of a source to the document, in the order of the paths."""
        rows = self._rows(
            "SELECT source, path, title, origin, root, content_hash, settings, modified, size"
            " FROM documents WHERE source = ? ORDER BY path",
            (source,),
        )
        return {row[1]: StoredDocument(*row) for row in rows}

    def chunks(self, source: str, path: str | None = None) -> list[Chunk]:
        """List the chunks of a source, or of one document of it, in reading order."""
        rows = self._rows(
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
        for batch in _batched(node_ids, _PARAMETERS):
            marks = ", ".join("?" * len(batch))
            rows = self._rows(
                # "+": SQLite would else take an index that begins with the source, and read all of the source's chunks.
                "SELECT node_id, chunk_index, text, metadata, content_hash, embedding_hash, start_char, end_char"  # noqa: S608  (only question marks are put in)
                f" FROM chunks WHERE +source = ? AND node_id IN ({marks})",
                (source, *batch),
            )
            yield from (_chunk(*row) for row in rows)

    def metadata(self, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Stream the path and the metadata of each chunk of a source, a document's chunks one after the other.

        All are of one moment, and neither readers nor writers wait: it has a connection of its own, until it is read
        to its end or closed.
        """
        uri = f"{self._path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=30.0, check_same_thread=False)) as connection:
            rows = connection.execute(
                "SELECT path, metadata FROM chunks WHERE source = ? ORDER BY path, chunk_index", (source,)
            )
            for path, metadata in rows:
                yield path, json.loads(metadata)

    def node_ids(self, source: str) -> dict[str, set[str]]:
        """Map the path of each document of a source to the ids of its nodes."""
        ids: dict[str, set[str]] = {path: set() for path in self.documents(source)}
        for path, node_id in self._rows("SELECT path, node_id FROM chunks WHERE source = ?", (source,)):
            ids[path].add(node_id)
        return ids

    def nodes_by_embedding(self, source: str, embedding_hashes: Iterable[str]) -> dict[str, list[str]]:
        """Find nodes of a source that already have the vectors of some texts.

        Args:
            source: The source to look in.
            embedding_hashes: The texts' hashes.

        Returns:
            The ids of the nodes with each hash; hashes that no node has are left out.
        """
        found: dict[str, list[str]] = {}
        for batch in _batched(embedding_hashes, _PARAMETERS):
            marks = ", ".join("?" * len(batch))
            rows = self._rows(
                f"SELECT embedding_hash, node_id FROM chunks WHERE source = ? AND embedding_hash IN ({marks})",  # noqa: S608  (only question marks are put in)
                (source, *batch),
            )
            for embedding_hash, node_id in rows:
                found.setdefault(embedding_hash, []).append(node_id)
        return found

    def put_document(self, document: StoredDocument, chunks: Sequence[Chunk]) -> None:
        """Store a document in place of its earlier version, in one transaction.

        Args:
            document: The document; its source must exist.
            chunks: All its chunks.
        """
        with self._transaction() as connection:
            self._delete_document(connection, document.source, document.path)
            connection.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(document.source, document.path, document.title, document.origin, document.root),
                    *(document.content_hash, document.settings, document.modified, document.size),
                ),
            )
            connection.executemany(
                "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        *(chunk.node_id, document.source, document.path, chunk.index, chunk.text),
                        *(json.dumps(dict(chunk.metadata)), chunk.content_hash, chunk.embedding_hash),
                        *(chunk.start_char, chunk.end_char),
                    )
                    for chunk in chunks
                ],
            )

    def delete_document(self, source: str, path: str) -> None:
        """Forget a document and its chunks, in one transaction."""
        with self._transaction() as connection:
            self._delete_document(connection, source, path)

    def _delete_document(self, connection: sqlite3.Connection, source: str, path: str) -> None:
        connection.execute("DELETE FROM documents WHERE source = ? AND path = ?", (source, path))
        connection.execute("UPDATE sources SET version = version + 1 WHERE name = ?", (source,))

    def _prepare(self, path: Path) -> None:
        execute = self._connection.execute
        execute("PRAGMA journal_mode = WAL")
        # FULL: a document counts as stored once its transaction ends, even if the power fails right after.
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA foreign_keys = ON")
        # Read inside the transaction: another process may be making the same tables right now.
        with self._transaction() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        if version not in (0, _SCHEMA_VERSION):
            raise ConfigurationError(
                f"{str(path)!r} has schema version {version}; this release reads version {_SCHEMA_VERSION}. "
                "Upgrade llama-index-agentic-kb, or make the store again with `agentic-kb ingest`."
            )

    def _rows(self, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(statement, parameters).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


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


def _batched(values: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    iterator = iter(values)
    while batch := tuple(islice(iterator, size)):
        yield batch
