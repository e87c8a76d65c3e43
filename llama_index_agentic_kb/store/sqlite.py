"""The documents of a store in one SQLite file.

Everything else in a store's directory (HNSW graphs, lexical indexes) is derived from this file and can be rebuilt.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from llama_index_agentic_kb.errors import (
    AgenticKBError,
    ConfigurationError,
    IngestionError,
    RetrievalError,
    StoreDamagedError,
)
from llama_index_agentic_kb.search.dialects import SqliteSql
from llama_index_agentic_kb.store.database import ADVICE, DocumentDatabase, Floats, Ids, Piece, SourceState, Statements

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


class SqliteDatabase(DocumentDatabase):
    """Documents, chunks and vectors in a SQLite file, which is not usable in a forked process.

    Args:
        path: The SQLite file; created if missing, readable only by its owner.
        timeout: The seconds to wait while another program has the file locked.

    Raises:
        ConfigurationError: The file has an incompatible schema version, or can't be opened.
        StoreDamagedError: The file is not a SQLite database, or is damaged.
    """

    dialect = SqliteSql

    def __init__(self, path: Path, timeout: float = 30.0) -> None:
        self.path, self.location = path, str(path)
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
            raise StoreDamagedError(f"{str(path)!r} can't be read as a document database: {error}. {ADVICE}") from error

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
                raise StoreDamagedError(f"{str(self.path)!r} is damaged: {found}. {ADVICE}") from error
            raise error_class(f"{str(self.path)!r} can't be {done}: {error}. {remedy(error)}".rstrip()) from error

    def check(self) -> None:
        """Raise ``StoreDamagedError`` if the file is damaged; the store has no other copy of the documents."""
        found = self.rows("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise StoreDamagedError(f"{str(self.path)!r} is damaged: {' '.join(found[0][0].split())}. {ADVICE}")

    def put_contents(self, connection: Statements, source: str, pieces: Sequence[Piece]) -> None:  # noqa: ARG002
        """Store the texts and vectors of chunks that are stored already."""
        connection.executemany(
            "INSERT INTO contents SELECT id, ?, ? FROM chunks WHERE node_id = ?",
            [(chunk.text, np.asarray(vector, dtype="<f4").tobytes(), chunk.node_id) for chunk, vector in pieces],
        )

    def unpacked(self, vectors: Sequence[Any]) -> Floats:
        """Return the numbers of all the given stored vectors, one vector after the other."""
        return np.frombuffer(b"".join(vectors), dtype="<f4")

    def source_state(self, source: str) -> SourceState | None:
        """Return the version of a source and the record of its HNSW graph; None if the source does not exist."""
        rows = self.rows(
            "SELECT version, coalesce(directory, ''), coalesce(last_id, 0), coalesce(files, '')"
            " FROM sources LEFT JOIN graphs ON source = name WHERE name = ?",
            (source,),
        )
        return SourceState(*rows[0]) if rows else None

    def put_graph(self, source: str, directory: str, last_id: int, files: str) -> None:
        """Record an HNSW graph that is complete on disk, as the current one of its source."""
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO graphs VALUES (?, ?, ?, ?)", (source, directory, last_id, files))

    def graph_directories(self) -> set[str]:
        """Return the directory names of all recorded HNSW graphs."""
        return {row[0] for row in self.rows("SELECT directory FROM graphs")}

    def ids(self, source: str, where: str = "1", parameters: Sequence[object] = (), *, after: int = 0) -> Ids:
        """Return the ids of a source's chunks in ascending order."""
        # "+": otherwise SQLite would scan all of the source's rows in its index, even if few have higher ids.
        of_source = "+source" if after else "source"
        statement = f"SELECT id FROM chunks WHERE id > ? AND {of_source} = ? AND {where} ORDER BY id"  # noqa: S608 (made by the dialect)
        rows = self.stream(statement, (after, source, *parameters))
        return np.fromiter((row[0] for row in rows), dtype=np.int64)

    def count(self, source: str, last_id: int = 1 << 62) -> int:
        """Return the number of a source's chunks with ids up to and including ``last_id``."""
        return int(self.rows("SELECT count(*) FROM chunks WHERE source = ? AND id <= ?", (source, last_id))[0][0])


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
