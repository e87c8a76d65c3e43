"""The documents of a store in one SQLite file.

Everything else in a store's directory (HNSW graphs, lexical indexes) is derived from this file and can be rebuilt.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from sqlalchemy.exc import DBAPIError

from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, RetrievalError, StoreDamagedError
from llama_index_agentic_kb.search.dialects import SqliteSql
from llama_index_agentic_kb.store.database import (
    ADVICE,
    TABLES,
    DocumentDatabase,
    Floats,
    Ids,
    Piece,
    Row,
    SourceState,
    Statements,
)
from llama_index_agentic_kb.store.sql import SqlDatabase

_SCHEMA_VERSION: Final = 3
_TABLES: Final = """
CREATE TABLE contents (
    id INTEGER PRIMARY KEY REFERENCES chunks (id) ON DELETE CASCADE, text TEXT NOT NULL, vector BLOB NOT NULL
);
CREATE TABLE graphs (
    source TEXT PRIMARY KEY REFERENCES sources (name) ON DELETE CASCADE,
    directory TEXT NOT NULL, last_id INTEGER NOT NULL, files TEXT NOT NULL
) WITHOUT ROWID
"""


class SqliteDatabase(DocumentDatabase):
    """Documents, chunks and vectors in a SQLite file, which is not usable in a forked process.

    A missing file is created. One that can't be opened, or is of another release, is a ``ConfigurationError``.
    """

    dialect = SqliteSql

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        super().__init__(SqlDatabase(path), str(path), 30.0)
        try:
            if self._transact(_version, ConfigurationError, "opened", write=False) != _SCHEMA_VERSION:
                self._transact(self._make_tables, ConfigurationError, "opened")
        except BaseException:
            self.close()
            raise

    def _make_tables(self, connection: Statements) -> None:
        version = _version(connection)  # again: another process may have made the tables
        if version not in (0, _SCHEMA_VERSION):
            raise ConfigurationError(
                f"{self.location!r} has schema version {version}; this release reads version {_SCHEMA_VERSION}. "
                "Use the release that made it, or make the store again elsewhere with `agentic-kb ingest`."
            )
        if version == 0 and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise ConfigurationError(f"{self.location!r} holds other tables and no store.")
        if version == 0:
            tables = TABLES.format(
                name="TEXT", row="INTEGER PRIMARY KEY AUTOINCREMENT", json="TEXT", by_key="WITHOUT ROWID"
            )
            for statement in (tables + _TABLES).split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    def check_process(self) -> None:
        """Raise ``ConfigurationError`` if this process was forked from the one that opened the file."""
        if os.getpid() != self._pid:
            raise ConfigurationError(
                f"{self.location!r} was opened in process {self._pid}, from which this process, {os.getpid()}, was "
                "forked: neither Chroma's threads nor SQLite's locks come along. Open the store in the child, and not "
                "in the parent before it; or start the child with 'spawn' (multiprocessing.set_start_method)."
            )

    @contextmanager
    def _errors(self, error_class: type[AgenticKBError], done: str) -> Iterator[None]:
        with super()._errors(error_class, done):
            try:
                yield
            except (DBAPIError, sqlite3.Error, UnicodeDecodeError) as error:  # a damaged schema is quoted, in bytes
                cause = getattr(error, "orig", error)
                # DatabaseError's other subclasses mean misuse or a system error.
                found = "a text is not UTF-8" if "Could not decode" in str(cause) else str(cause)  # it quotes the text
                is_damage = type(cause) in (sqlite3.DatabaseError, UnicodeDecodeError) or "malformed JSON" in found
                if is_damage or found != str(cause):
                    raise StoreDamagedError(f"{self.location!r} is damaged: {found}. {ADVICE}") from error
                if isinstance(error, DBAPIError):
                    raise
                raise DBAPIError(None, None, error) from error

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Return the rows of a query."""
        return list(self.stream(statement, parameters))

    def stream(self, statement: str, parameters: Sequence[object] = ()) -> Iterator[Row]:
        """Yield the rows of a query as one snapshot, past SQLAlchemy: it takes ten times as long as SQLite does."""
        with self._errors(RetrievalError, "read"), closing(self._database.driver()) as connection:
            connection.execute(f"PRAGMA busy_timeout = {int(self.timeout * 1000)}")
            yield from connection.execute(statement, parameters)

    def check(self) -> None:
        """Raise ``StoreDamagedError`` if the file is damaged; the store has no other copy of the documents."""
        found = self.rows("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise StoreDamagedError(f"{self.location!r} is damaged: {' '.join(found[0][0].split())}. {ADVICE}")

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


def _version(connection: Statements) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
