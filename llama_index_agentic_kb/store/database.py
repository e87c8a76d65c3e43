"""The primary data of a store: sources, documents, chunks, their metadata and vectors in one SQLite file.

Each document is stored in one durable transaction. Everything else in a store's directory (HNSW graphs, lexical
indexes) is derived from this file and can be rebuilt. Chunk ids only increase, so the last id in an index shows which
chunks it is missing.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llama_index_agentic_kb.errors import (
    AgenticKBError,
    ConfigurationError,
    IngestionError,
    RetrievalError,
    StoreDamagedError,
)

MetadataValue: TypeAlias = str | int | float | bool
Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]

_SCHEMA_VERSION: Final = 3
# Texts and vectors are in a separate table, so that a filter's metadata scan reads only a fifth of the pages.
_SCHEMA: Final = """
CREATE TABLE state (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO state VALUES ('changes', 0);
CREATE TABLE sources (
    name TEXT PRIMARY KEY, description TEXT NOT NULL, version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE documents (
    source TEXT NOT NULL REFERENCES sources (name) ON DELETE CASCADE,
    path TEXT NOT NULL, origin TEXT NOT NULL, root TEXT NOT NULL,
    content_hash TEXT NOT NULL, settings TEXT NOT NULL,
    PRIMARY KEY (source, path)
) WITHOUT ROWID;
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, node_id TEXT NOT NULL UNIQUE,
    source TEXT NOT NULL, path TEXT NOT NULL, chunk_index INTEGER NOT NULL,
    metadata TEXT NOT NULL, embedding_hash TEXT NOT NULL, start_char INTEGER, end_char INTEGER,
    FOREIGN KEY (source, path) REFERENCES documents (source, path) ON DELETE CASCADE
);
CREATE INDEX chunks_of_document ON chunks (source, path, chunk_index);
CREATE INDEX chunks_by_embedding ON chunks (source, embedding_hash);
CREATE TABLE contents (
    id INTEGER PRIMARY KEY REFERENCES chunks (id) ON DELETE CASCADE, text TEXT NOT NULL, vector BLOB NOT NULL
);
CREATE TABLE graphs (
    source TEXT PRIMARY KEY REFERENCES sources (name) ON DELETE CASCADE,
    directory TEXT NOT NULL, last_id INTEGER NOT NULL, files TEXT NOT NULL
) WITHOUT ROWID;
"""
_CHUNK: Final = (
    "SELECT node_id, chunk_index, text, metadata, embedding_hash, start_char, end_char, id"
    " FROM chunks JOIN contents USING (id)"
)
_LISTED: Final = "(SELECT value FROM json_each(?))"  # a list of any length as one parameter
_ADVICE: Final = "Restore it, or delete the store's directory and make it again with `agentic-kb ingest`."


@dataclass(frozen=True)
class SourceInfo:
    """One source of a store.

    Args:
        name: The source's name.
        description: A description of the content for the query planner; may be empty.
        documents: The number of documents.
        chunks: The number of chunks of all documents.
        version: A number that increases with every change of the source, used to detect outdated caches and indexes.
    """

    name: str
    description: str
    documents: int
    chunks: int
    version: int = 0


@dataclass(frozen=True)
class StoredDocument:
    """The record of an ingested file."""

    source: str
    path: str
    """The file's path relative to its source, with forward slashes."""
    origin: str
    """The file's absolute path on disk."""
    root: str
    """The absolute path of the ingested folder that contained the file; empty for a file that was passed directly."""
    content_hash: str
    """The SHA-256 of the file's bytes, in hex."""
    settings: str
    """The reader, chunking and access settings used; if they change, the file is ingested again."""

    @property
    def document_id(self) -> str:
        """The document's id, ``<source>/<path>``; unique among sources without "/" in their names."""
        return f"{self.source}/{self.path}"


@dataclass(frozen=True)
class Chunk:
    """One piece of a document."""

    node_id: str
    index: int
    """The chunk's 0-based position in the document."""
    text: str
    """The chunk's text, without the title."""
    metadata: Mapping[str, MetadataValue]
    embedding_hash: str
    """The SHA-256 of the embedded text, in hex; chunks with equal hashes have equal vectors."""
    start_char: int | None
    """The offset of the chunk's first character in the document's (or page's) text; None if unknown."""
    end_char: int | None
    id: int = 0
    """The chunk's row id in the database; 0 before it is stored."""


@dataclass(frozen=True)
class SourceState:
    """The version of a source and its HNSW graph; a search compares it to detect outdated data in memory."""

    version: int
    directory: str = ""
    """The directory name of the source's HNSW graph; empty if it has none."""
    last_id: int = 0
    """The highest chunk id in the graph."""
    files: str = ""
    """The number of chunks in the graph and the size of each of its files in bytes, as JSON."""


class BusyError(IngestionError):
    """Another process or thread has the write lock."""


class DocumentDatabase:
    """Documents, chunks and vectors of a store; thread-safe, but not usable in a forked process.

    Failed reads raise ``RetrievalError``, failed writes ``IngestionError``; both raise ``StoreDamagedError`` if the
    file is damaged, and ``ConfigurationError`` in a process forked from the one that opened the file.

    Args:
        path: The SQLite file; created if missing, readable only by its owner.
        timeout: The seconds to wait while another program has the file locked.

    Raises:
        ConfigurationError: The file has an incompatible schema version, or can't be opened.
        StoreDamagedError: The file is not a SQLite database, or is damaged.
    """

    def __init__(self, path: Path, timeout: float = 30.0) -> None:
        self.path = path
        self.timeout = timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        with suppress(OSError):
            os.close(os.open(path, os.O_CREAT, 0o600))
        try:
            self._connection = self._connect()
            try:
                self._prepare(self._connection)
            except BaseException:
                self.close()
                raise
        except IngestionError as error:
            raise ConfigurationError(str(error)) from error
        except sqlite3.OperationalError as error:
            raise ConfigurationError(f"{str(path)!r} can't be opened: {error}. {remedy(error)}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # a damaged schema is quoted, in bytes
            raise StoreDamagedError(
                f"{str(path)!r} can't be read as a document database: {error}. {_ADVICE}"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?mode=rw"  # not created if the file was deleted
        return sqlite3.connect(uri, uri=True, timeout=self.timeout, isolation_level=None, check_same_thread=False)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        if self._schema_version(connection) == _SCHEMA_VERSION:
            return
        with self.transaction() as writing:
            # Read again inside the transaction: another process may be creating the same tables concurrently.
            version = self._schema_version(writing)
            if version not in (0, _SCHEMA_VERSION):
                raise ConfigurationError(
                    f"{str(self.path)!r} has schema version {version}; this release reads version {_SCHEMA_VERSION}. "
                    "Use the release that made it, or make the store again elsewhere with `agentic-kb ingest`."
                )
            if version == 0 and writing.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise ConfigurationError(f"{str(self.path)!r} holds other tables and no store.")
            for statement in _SCHEMA.split(";") if version == 0 else ():
                writing.execute(statement)
            writing.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    @staticmethod
    def _schema_version(connection: sqlite3.Connection) -> int:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if os.getpid() == self._pid:  # closing the file in a fork would release the parent process's locks
            with self._writing, self._lock:
                self._connection.close()
                if self._writer is not None:
                    self._writer.close()

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        self.check_process()
        with self._lock, self._errors(RetrievalError, "read"):
            return self._connection.execute(statement, parameters).fetchall()

    def stream(self, statement: str, parameters: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a long query as one snapshot, over a separate connection that blocks no other query."""
        self.check_process()
        with self._errors(RetrievalError, "read"), closing(self._connect()) as connection:
            yield from connection.execute(statement, parameters)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the ``with`` block as one durable transaction; an exception rolls it back.

        Writes use a separate connection, so readers never wait for them.
        """
        self.check_process()
        with self._writing, self._errors(IngestionError, "written"):
            if self._writer is None:
                self._writer = self._connect()
                # FULL: a document counts as stored once its transaction ends, even if the power fails right after.
                self._writer.execute("PRAGMA synchronous = FULL")
                self._writer.execute("PRAGMA foreign_keys = ON")
            self._writer.execute(f"PRAGMA busy_timeout = {int(self.timeout * 1000)}")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # SQLite itself ends it if the disk is full
                    self._writer.execute("ROLLBACK")
                raise

    def check_process(self) -> None:
        """Raise ``ConfigurationError`` if this process was forked from the one that opened the file."""
        if os.getpid() != self._pid:
            raise ConfigurationError(
                f"{str(self.path)!r} was opened in process {self._pid}, from which this process, {os.getpid()}, was "
                "forked: neither Chroma's threads nor SQLite's locks come along. Open the store in the child, and not "
                "in the parent before it; or start the child with 'spawn' (multiprocessing.set_start_method)."
            )

    @contextmanager
    def _errors(self, error_class: type[AgenticKBError], done: str) -> Iterator[None]:
        """Convert SQLite's errors to the package's error classes."""
        try:
            yield
        except sqlite3.Error as error:
            # DatabaseError's other subclasses mean misuse or a system error.
            found = "a text is not UTF-8" if "Could not decode" in str(error) else str(error)  # it quotes the text
            if type(error) is sqlite3.DatabaseError or found != str(error) or "malformed JSON" in found:
                raise StoreDamagedError(f"{str(self.path)!r} is damaged: {found}. {_ADVICE}") from error
            raise error_class(f"{str(self.path)!r} can't be {done}: {error}. {remedy(error)}".rstrip()) from error

    @contextmanager
    def _intact(self) -> Iterator[None]:
        """Convert errors of parsing stored rows: they mean damage that SQLite does not detect."""
        try:
            yield
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreDamagedError(f"{str(self.path)!r} is damaged: {type(error).__name__}. {_ADVICE}") from error

    def check(self) -> None:
        """Check the integrity of the whole file.

        Raises:
            StoreDamagedError: The file is damaged. The store has no other copy of the documents.
        """
        found = self.rows("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise StoreDamagedError(f"{str(self.path)!r} is damaged: {' '.join(found[0][0].split())}. {_ADVICE}")

    # -- state and sources -------------------------------------------------------------------------------------------

    def state(self, key: str) -> Any:
        """Return a store-wide value by its key; None if it was never set."""
        rows = self.rows("SELECT value FROM state WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    def put_state(self, key: str, value: object) -> None:
        """Set a store-wide value, such as the embedding model's fingerprint."""
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, value))

    def sources(self) -> list[SourceInfo]:
        """Return the sources in order of name, with their document and chunk counts."""
        rows = self.rows(
            "SELECT name, description,"
            " (SELECT count(*) FROM documents WHERE source = name),"
            " (SELECT count(*) FROM chunks WHERE source = name), version"
            " FROM sources ORDER BY name"
        )
        return [SourceInfo(*row) for row in rows]

    def source_state(self, source: str) -> SourceState | None:
        """Return the version of a source and the record of its HNSW graph; None if the source does not exist."""
        rows = self.rows(
            "SELECT version, coalesce(directory, ''), coalesce(last_id, 0), coalesce(files, '')"
            " FROM sources LEFT JOIN graphs ON source = name WHERE name = ?",
            (source,),
        )
        return SourceState(*rows[0]) if rows else None

    def put_source(self, name: str, description: str | None = None) -> None:
        """Create a source, or change its description; None keeps the current one (empty for a new source).

        Raises:
            ConfigurationError: The source's name is empty.
        """
        if not name.strip():
            raise ConfigurationError("A source needs a name; got an empty one.")
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO sources SELECT ?, '', value FROM state WHERE key = 'changes'", (name,)
            )
            if description is not None:
                connection.execute("UPDATE sources SET description = ? WHERE name = ?", (description, name))

    def delete_source(self, name: str) -> None:
        """Delete a source with all its documents."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM sources WHERE name = ?", (name,))
            _count_change(connection, name)

    def put_graph(self, source: str, directory: str, last_id: int, files: str) -> None:
        """Record an HNSW graph that is complete on disk, as the current one of its source."""
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO graphs VALUES (?, ?, ?, ?)", (source, directory, last_id, files))

    def graph_directories(self) -> set[str]:
        """Return the directory names of all recorded HNSW graphs."""
        return {row[0] for row in self.rows("SELECT directory FROM graphs")}

    # -- documents and chunks ----------------------------------------------------------------------------------------

    def sources_at(self, origin: str) -> list[str]:
        """Return the names of the sources with documents from the file or folder at this absolute path."""
        rows = self.rows(
            "SELECT DISTINCT source FROM documents WHERE root = ? OR origin = ? ORDER BY source", (origin, origin)
        )
        return [row[0] for row in rows]

    def documents(self, source: str) -> dict[str, StoredDocument]:
        """Return the documents of a source by path, in order of path."""
        rows = self.rows(
            "SELECT source, path, origin, root, content_hash, settings FROM documents WHERE source = ? ORDER BY path",
            (source,),
        )
        return {row[1]: StoredDocument(*row) for row in rows}

    def settings(self, source: str) -> list[str]:
        """Return the distinct ingestion settings recorded with the documents of a source."""
        return [row[0] for row in self.rows("SELECT DISTINCT settings FROM documents WHERE source = ?", (source,))]

    def chunks(self, source: str) -> list[Chunk]:
        """Return the chunks of a source, in reading order."""
        return self._chunks("source = ? ORDER BY path, chunk_index", source)

    def chunks_of(self, column: Literal["id", "node_id"], keys: Iterable[object]) -> list[Chunk]:
        """Return chunks by ``id`` or ``node_id``, in no particular order; deleted chunks are omitted."""
        return self._chunks(f"{column} IN {_LISTED}", json.dumps(list(keys)))

    def _chunks(self, where: str, parameter: str) -> list[Chunk]:
        rows = self.rows(f"{_CHUNK} WHERE {where}", (parameter,))
        with self._intact():
            return [_chunk(*row) for row in rows]

    def node_ids(self, source: str) -> Iterator[tuple[int, str]]:
        """Yield the row id and node id of each chunk of a source, in the order in which they were stored."""
        rows = self.stream("SELECT id, node_id FROM chunks WHERE source = ? ORDER BY id", (source,))
        return ((row, node_id) for row, node_id in rows)

    def metadata(self, source: str) -> Iterator[tuple[str, dict[str, MetadataValue]]]:
        """Yield the document path and metadata of each chunk of a source, grouped by document."""
        rows = self.stream("SELECT path, metadata FROM chunks WHERE source = ? ORDER BY path, chunk_index", (source,))
        for path, metadata in rows:
            with self._intact():
                parsed = dict(json.loads(metadata))
            yield path, parsed

    def put_document(self, document: StoredDocument, pieces: Iterable[tuple[Chunk, Sequence[float] | Floats]]) -> None:
        """Store a document, replacing its earlier version, in one transaction.

        Chunks with unchanged node ids, and their vectors, are left in place. ``pieces`` may be a generator; an
        exception in it rolls the transaction back.

        Args:
            document: The document; its source must exist.
            pieces: All chunks of the document, with their vectors.
        """
        of_document = (document.source, document.path)
        with self.transaction() as connection:
            old = connection.execute("SELECT node_id FROM chunks WHERE source = ? AND path = ?", of_document)
            known = {row[0] for row in old.fetchall()}
            gone = set(known)
            # Not "OR REPLACE": that would delete the row first, and its chunks by cascade.
            connection.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET origin = excluded.origin,"
                " root = excluded.root, content_hash = excluded.content_hash, settings = excluded.settings",
                astuple(document),
            )
            for chunk, vector in pieces:
                gone.discard(chunk.node_id)
                if chunk.node_id in known:  # unchanged: a node's id is a hash of its content
                    continue
                written = (json.dumps(dict(chunk.metadata)), chunk.embedding_hash, chunk.start_char, chunk.end_char)
                row = connection.execute(
                    "INSERT INTO chunks VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (chunk.node_id, *of_document, chunk.index, *written),
                )
                content = (row.lastrowid, chunk.text, np.asarray(vector, dtype="<f4").tobytes())
                connection.execute("INSERT INTO contents VALUES (?, ?, ?)", content)
            connection.executemany("DELETE FROM chunks WHERE node_id = ?", [(node_id,) for node_id in gone])
            _count_change(connection, document.source)

    def delete_document(self, source: str, path: str) -> None:
        """Delete a document and its chunks, in one transaction."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM documents WHERE source = ? AND path = ?", (source, path))
            _count_change(connection, source)

    # -- vectors -----------------------------------------------------------------------------------------------------

    def vectors_by_embedding(self, source: str, embedding_hashes: Iterable[str]) -> dict[str, Floats]:
        """Return the source's stored vectors by the hashes of their embedded texts; unknown hashes are omitted."""
        rows = self.rows(
            "SELECT embedding_hash, vector FROM chunks JOIN contents USING (id)"  # noqa: S608 (a constant)
            f" WHERE source = ? AND embedding_hash IN {_LISTED} GROUP BY embedding_hash",
            (source, json.dumps(list(embedding_hashes))),
        )
        with self._intact():
            return {embedding_hash: np.frombuffer(vector, dtype="<f4") for embedding_hash, vector in rows}

    def ids(self, source: str, where: str = "1", parameters: Sequence[object] = (), *, after: int = 0) -> Ids:
        """Return the ids of a source's chunks in ascending order.

        Args:
            source: The source's name.
            where: A SQL condition on the columns of ``chunks``.
            parameters: The parameters of the condition.
            after: The exclusive lower bound of the ids. Defaults to 0, which includes all chunks.
        """
        # "+": otherwise SQLite would scan all of the source's rows in its index, even if few have higher ids.
        of_source = "+source" if after else "source"
        statement = f"SELECT id FROM chunks WHERE id > ? AND {of_source} = ? AND {where} ORDER BY id"  # noqa: S608 (made by `sql_filter`)
        rows = self.stream(statement, (after, source, *parameters))
        return np.fromiter((row[0] for row in rows), dtype=np.int64)

    def count(self, source: str, last_id: int = 1 << 62) -> int:
        """Return the number of a source's chunks with ids up to and including ``last_id``."""
        return int(self.rows("SELECT count(*) FROM chunks WHERE source = ? AND id <= ?", (source, last_id))[0][0])

    def vectors(self, ids: Ids, dimension: int) -> tuple[Ids, Floats]:
        """Return the ids (ascending) and vectors of the given chunks; deleted chunks are omitted."""
        statement = f"SELECT id, vector FROM contents WHERE id IN {_LISTED} ORDER BY id"  # noqa: S608 (a constant)
        found = list(self.stream(statement, (json.dumps(ids.tolist()),)))
        with self._intact():
            data = np.frombuffer(b"".join(vector for _, vector in found), dtype="<f4").reshape(len(found), dimension)
        return np.array([row for row, _ in found], dtype=np.int64), data


def _count_change(connection: sqlite3.Connection, source: str) -> None:
    connection.execute("UPDATE state SET value = value + 1 WHERE key = 'changes'")
    connection.execute(
        "UPDATE sources SET version = (SELECT value FROM state WHERE key = 'changes') WHERE name = ?", (source,)
    )


def _chunk(
    node_id: str, index: int, text: str, metadata: str, digest: str, start: int | None, end: int | None, row: int
) -> Chunk:
    return Chunk(node_id, index, text, dict(json.loads(metadata)), digest, start, end, row)


def remedy(error: object) -> str:
    """Return what to do about an error of SQLite; empty if unknown."""
    if not isinstance(error, sqlite3.OperationalError):
        return ""
    text = str(error)
    if "locked" in text or "busy" in text:
        return "Another program holds it locked: wait for that to end, or end it, then run this again."
    if "full" in text or "disk I/O" in text:
        return "Make room on the disk, then run this again: what was stored before stays."
    return "Grant this user the right to write into its directory, or copy it to where it may be written."
