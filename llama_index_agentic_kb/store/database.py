"""The primary data of a store: sources, documents, chunks, their metadata and vectors in one SQL database.

The SQL here is that of SQLite and PostgreSQL, with ``?`` for parameters; what differs is in ``store.directory``,
``store.postgres`` and ``search.dialects``. Chunk ids only increase: the last id in an index shows what it lacks.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from llama_index_agentic_kb._text import one_line, redacted
from llama_index_agentic_kb.errors import (
    AgenticKBError,
    ConfigurationError,
    DeadlineExceededError,
    DeniedError,
    IngestionError,
    RetrievalError,
    StoreDamagedError,
)
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.search.dialects import StoreDialect

if TYPE_CHECKING:  # the process that parses files imports this module, and takes as little memory as it can
    from llama_index.core.schema import BaseNode
    from sqlalchemy import Connection

    from llama_index_agentic_kb.store.embedding_model import EmbedModelFingerprint
    from llama_index_agentic_kb.store.sql import SqlDatabase

T = TypeVar("T")
Key = TypeVar("Key", int, str)
MetadataValue: TypeAlias = str | int | float | bool
Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]
Row: TypeAlias = tuple[Any, ...]
Piece: TypeAlias = "tuple[Chunk, Sequence[float] | Floats]"  # a chunk and its vector

TABLES: Final = """
CREATE TABLE state (key text PRIMARY KEY, value text);
INSERT INTO state VALUES ('changes', '0');
CREATE TABLE sources (name {name} PRIMARY KEY, description text NOT NULL, version bigint NOT NULL) {by_key};
CREATE TABLE documents (
    source {name} NOT NULL REFERENCES sources (name) ON DELETE CASCADE, path {name} NOT NULL,
    origin text NOT NULL, root text NOT NULL, content_hash text NOT NULL, settings text NOT NULL,
    PRIMARY KEY (source, path)
) {by_key};
CREATE TABLE chunks (
    id {row}, node_id text NOT NULL UNIQUE,
    source {name} NOT NULL, path {name} NOT NULL, chunk_index integer NOT NULL,
    metadata {json} NOT NULL, embedding_hash text NOT NULL, start_char bigint, end_char bigint,
    FOREIGN KEY (source, path) REFERENCES documents (source, path) ON DELETE CASCADE
);
CREATE INDEX chunks_of_document ON chunks (source, path, chunk_index);
CREATE INDEX chunks_by_embedding ON chunks (source, embedding_hash);
"""
"""The tables that are alike in both. Texts and vectors are in another, so that a filter reads a fifth of the pages."""
_BATCH: Final = 256  # the number of chunks that are inserted together
EXACT_ROWS = 20_000
"""The maximum number of rows searched without a graph: 30 MB at 384 dimensions, 2-4 ms a query (a graph: 2 ms)."""
Done: TypeAlias = Literal["opened", "read", "written"]
_ERRORS: Final[Mapping[Done, type[AgenticKBError]]] = {
    "opened": ConfigurationError,
    "read": RetrievalError,
    "written": IngestionError,
}
ADVICE: Final = "Restore it, or delete the store's directory and make it again with `agentic-kb ingest`."


@dataclass(frozen=True)
class SourceInfo:
    """One source of a store, with the numbers of its documents and chunks."""

    name: str
    description: str
    """A description of the content for the query planner; may be empty."""
    documents: int
    chunks: int
    version: int = 0
    """A number that increases with every change of the source, used to detect outdated caches and indexes."""


@dataclass(frozen=True)
class StoredDocument:
    """The record of an ingested file."""

    source: str
    path: str  # the file's path relative to its source, with forward slashes
    origin: str  # the file's absolute path on disk
    root: str
    """The absolute path of the ingested folder that contained the file; empty for a file that was passed directly."""
    content_hash: str  # the SHA-256 of the file's bytes, in hex
    settings: str  # the reader, chunking and access settings used; if they change, the file is ingested again

    @property
    def document_id(self) -> str:
        """The document's id, ``<source>/<path>``; unique among sources without "/" in their names."""
        return f"{self.source}/{self.path}"


@dataclass(frozen=True)
class Chunk:
    """One piece of a document."""

    node_id: str
    index: int  # the chunk's 0-based position in the document
    text: str  # the chunk's text, without the title
    metadata: Mapping[str, MetadataValue]
    embedding_hash: str  # the SHA-256 of the embedded text, in hex; chunks with equal hashes have equal vectors
    start_char: int | None
    """The offset of the chunk's first character in the document's (or page's) text; None if unknown."""
    end_char: int | None
    id: int = 0  # the chunk's row id in the database; 0 before it is stored


@dataclass(frozen=True)
class SourceState:
    """The version of a source and its HNSW graph; a search compares it to detect outdated data in memory."""

    version: int
    graph: str = ""  # the name of the graph's file; empty if the source has none
    last_id: int = 0  # the highest chunk id in the graph
    checksum: str = ""


class BusyError(IngestionError):
    """Another process or thread has the write lock."""


class Statements:
    """A connection inside a transaction, with ``?`` for parameters."""

    def __init__(self, connection: Connection) -> None:
        self._run = connection.exec_driver_sql
        self._mark = "?" if connection.dialect.name == "sqlite" else "%s"

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> Any:
        """Return the rows of a statement."""
        return self._run(statement.replace("?", self._mark), tuple(parameters))

    def executemany(self, statement: str, parameters: Iterable[Sequence[object]]) -> None:
        """Run a statement once for each row of parameters."""
        if rows := [tuple(row) for row in parameters]:
            self._run(statement.replace("?", self._mark), rows)


class DocumentDatabase(ABC):
    """Documents, chunks and vectors of a store; thread-safe.

    Failed reads raise ``RetrievalError``, failed writes ``IngestionError``, both ``StoreDamagedError`` if the data are
    damaged. ``timeout`` is the time limit of a transaction in seconds, including the wait for a lock, or for a server
    that restarts.
    """

    dialect: ClassVar[type[StoreDialect]]
    fingerprint: EmbedModelFingerprint
    location: str
    """The store's directory, or its URL without the password."""

    def __init__(self, database: SqlDatabase, location: str, timeout: float) -> None:
        self.location = self._at = location  # ``_at`` is what errors of the database name: a file, or the URL
        self.timeout = timeout
        self._database = database
        self._closed = False
        weakref.finalize(self, database.close)  # a knowledge base never closes its store

    def _check_usable(self) -> None:
        """Raise ``ConfigurationError`` if the store is closed, or can't be used in this process."""
        if self._closed:
            raise ConfigurationError(f"The store {self.location!r} is closed.")

    def _read(self, work: Callable[[Statements], T], deadline: float | None = None) -> T:
        """Run a function in a transaction that sees one snapshot; ``DeadlineExceededError`` if it takes too long."""
        return self._transact(work, "read", deadline, write=False)

    def _write(self, work: Callable[[Statements], T]) -> T:
        """Run a function in a durable transaction; it may run again if the connection breaks."""
        return self._transact(work, "written")

    def _transact(
        self, work: Callable[[Statements], T], done: Done, deadline: float | None = None, *, write: bool = True
    ) -> T:
        until = min(deadline or math.inf, time.monotonic() + self.timeout)
        with self._errors(done):
            return self._database.attempt(lambda connection: work(Statements(connection)), until, write=write)

    def _rows(self, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Return the rows of a query."""
        return self._read(lambda connection: [tuple(row) for row in connection.execute(statement, parameters)])

    def _stream(self, statement: str, parameters: Sequence[object] = ()) -> Iterator[Row]:
        """Yield the rows of a long query as one snapshot, which blocks no other query."""
        begin = partial(self._database.transaction, write=False, seconds=self.timeout)
        with self._errors("read"), ExitStack() as stack:  # begun again while the server restarts
            until = time.monotonic() + self.timeout
            connection = self._database.retry(lambda: stack.enter_context(begin()), until)
            streamed = connection.execution_options(stream_results=True, max_row_buffer=1_000)
            for rows in Statements(streamed).execute(statement, parameters).partitions(1_000):
                yield from map(tuple, rows)

    @contextmanager
    def _errors(self, done: Done) -> Iterator[None]:
        """Convert the database's errors, and check that it may be used."""
        self._check_usable()
        error_class = _ERRORS[done]
        try:
            with self._database.translated(f"{self._at!r} can't be {done}", error_class):
                yield
        except DeadlineExceededError as error:
            if error_class is RetrievalError:
                raise
            raise error_class(f"{error}. What was stored before stays: run this again.") from error

    @abstractmethod
    def _put_contents(self, connection: Statements, source: str, pieces: Sequence[Piece]) -> None:
        """Store the texts and vectors of chunks that are stored already."""

    @abstractmethod
    def _unpacked(self, vectors: Sequence[Any]) -> Floats:
        """Return the numbers of all the given stored vectors, one vector after the other."""

    @abstractmethod
    def _check(self) -> None:
        """Check the integrity of all data; raise ``StoreDamagedError`` if they are damaged."""

    @contextmanager
    def _intact(self) -> Iterator[None]:
        """Convert errors of parsing stored rows: they mean damage that the database does not detect."""
        try:
            yield
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreDamagedError(f"{self._at!r} is damaged: {type(error).__name__}. {ADVICE}") from error

    def _state(self, key: str) -> Any:
        """Return a store-wide value by its key; None if it was never set."""
        rows = self._rows("SELECT value FROM state WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    def _put_state(self, key: str, value: object) -> None:
        """Set a store-wide value, such as the embedding model's fingerprint, unless another process has set it."""
        self._change("INSERT INTO state VALUES (?, ?) ON CONFLICT DO NOTHING", (key, value))

    def sources(self) -> list[SourceInfo]:
        """Return the sources in order of name, with descriptions and counts; loads no model."""
        rows = self._rows(
            "SELECT name, description,"
            " (SELECT count(*) FROM documents WHERE source = name),"
            " (SELECT count(*) FROM chunks WHERE source = name), version"
            " FROM sources ORDER BY name"
        )
        return [SourceInfo(*row) for row in rows]

    def _existing_state(self, source: str) -> SourceState:
        """Return the state of a source; raise ``ConfigurationError`` if the source does not exist."""
        state = self._source_state(source)
        if state is None:
            raise self._no_source(source)
        return state

    def _no_source(self, source: str) -> ConfigurationError:
        """Return the error for a source that does not exist, which names the others."""
        names = ", ".join(info.name for info in self.sources())
        return ConfigurationError(
            f"The store {self.location!r} has no source {source!r}; it has: {names or 'none yet'}."
        )

    def _source_state(self, source: str) -> SourceState | None:
        """Return the version of a source and the record of its HNSW graph; None if the source does not exist."""
        rows = self._rows("SELECT version FROM sources WHERE name = ?", (source,))
        return SourceState(*rows[0]) if rows else None

    def put_source(self, name: str, description: str | None = None) -> None:
        """Create a source (``ConfigurationError`` for an empty name), or change a description that is not None."""
        if not name.strip():
            raise ConfigurationError("A source needs a name; got an empty one.")
        self._change(
            "INSERT INTO sources SELECT ?, '', CAST(value AS bigint) FROM state WHERE key = 'changes'"
            " ON CONFLICT DO NOTHING",
            (name,),
        )
        if description is not None:
            self._change("UPDATE sources SET description = ? WHERE name = ?", (description, name))

    def _change(self, statement: str, parameters: Sequence[object], of: str | None = None) -> None:
        """Run a statement in a transaction of its own, and count it as a change of a source."""

        def work(connection: Statements) -> None:
            connection.execute(statement, parameters)
            if of is not None:
                _count_change(connection, of)

        self._write(work)

    def _sources_at(self, origin: str) -> list[str]:
        """Return the names of the sources with documents from the file or folder at this absolute path."""
        rows = self._rows(
            "SELECT DISTINCT source FROM documents WHERE root = ? OR origin = ? ORDER BY source", (origin, origin)
        )
        return [row[0] for row in rows]

    def stored_documents(self, source: str) -> dict[str, StoredDocument]:
        """Return the documents of a source by path, in order of path."""
        rows = self._rows(
            "SELECT source, path, origin, root, content_hash, settings FROM documents WHERE source = ? ORDER BY path",
            (source,),
        )
        return {row[1]: StoredDocument(*row) for row in rows}

    def chunks(self, source: str) -> list[Chunk]:
        """Return the chunks of a source, in reading order."""
        return self._chunks("source = ? ORDER BY path, chunk_index", [source])

    def chunks_of(
        self, column: Literal["id", "node_id"], keys: Iterable[object], connection: Statements | None = None
    ) -> list[Chunk]:
        """Return chunks by ``id`` or ``node_id``, in no particular order; deleted chunks are omitted."""
        return self._chunks(*self.dialect.any_value(column, list(keys)), connection)

    def _nodes_of(
        self, column: Literal["id", "node_id"], keys: Iterable[Key], connection: Statements | None = None
    ) -> dict[Key, BaseNode]:
        """Return chunks as LlamaIndex nodes by ``id`` or ``node_id``; deleted chunks are omitted."""
        from llama_index_agentic_kb.store.chunking import chunk_to_node  # noqa: PLC0415 (loads LlamaIndex)

        return {getattr(chunk, column): chunk_to_node(chunk) for chunk in self.chunks_of(column, keys, connection)}

    def _chunks(self, where: str, parameters: Sequence[object], connection: Statements | None = None) -> list[Chunk]:
        columns = "node_id, chunk_index, text, CAST(metadata AS text), embedding_hash, start_char, end_char, id"
        statement = f"SELECT {columns} FROM chunks JOIN contents USING (id) WHERE {where}"  # noqa: S608 (made here)
        rows = connection.execute(statement, parameters) if connection else self._rows(statement, parameters)
        with self._intact():
            return [
                Chunk(node_id, index, text, dict(json.loads(metadata)), *rest)
                for node_id, index, text, metadata, *rest in rows
            ]

    def metadata(
        self, source: str, filters: FilterNode | None = None
    ) -> Iterator[tuple[str, dict[str, MetadataValue]]]:
        """Yield the document id and metadata of each chunk of a source, grouped by document.

        A filter that has no form in SQL lets all chunks through; see ``sources.metadata``, which checks each of them.
        """
        self._existing_state(source)
        condition, parameters = "TRUE", list[object]()
        with suppress(DeniedError):
            condition, parameters = (condition, parameters) if filters is None else self.dialect.filter(filters)
        statement = f"SELECT path, CAST(metadata AS text) FROM chunks WHERE source = ? AND {condition}"  # noqa: S608
        for path, metadata in self._stream(f"{statement} ORDER BY path, chunk_index", (source, *parameters)):
            with self._intact():
                parsed = dict(json.loads(metadata))
            yield f"{source}/{path}", parsed

    def put_document(self, document: StoredDocument, pieces: Iterable[Piece], replaces: str | None = None) -> bool:
        """Store a document of an existing source, replacing its earlier version, in one transaction.

        Chunks with unchanged node ids, and their vectors, are left in place; so storing a document twice changes
        nothing. ``pieces`` are all chunks; they may be a generator, whose exception rolls the transaction back.
        With a list, the transaction is tried again after a lost connection. Return False, and store nothing, if
        a document with this path is stored whose origin is neither ``document.origin`` nor ``replaces`` (None: no
        other origin; the empty one is that of documents that were passed).
        """
        begun, failure = False, None

        def work(connection: Statements) -> bool:
            nonlocal begun, failure
            if begun and not isinstance(pieces, Sequence):
                known = getattr(failure, "orig", failure) or "its connection was lost at the commit"
                reason = one_line(redacted(str(known))).rstrip(" .")
                message = f"{self._at!r} failed while a large file was stored: {reason}. Run the ingestion again."
                raise IngestionError(message) from failure
            begun = True
            try:
                return self._put_document(connection, document, pieces, replaces)
            except Exception as error:
                failure = error
                raise

        return self._write(work)

    def _put_document(
        self, connection: Statements, document: StoredDocument, pieces: Iterable[Piece], replaces: str | None
    ) -> bool:
        of_document = (document.source, document.path)
        # First: of two writers, the second waits for the row. Not "OR REPLACE", which would delete it with its chunks.
        stored = connection.execute(
            "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (source, path) DO UPDATE SET"
            " origin = excluded.origin, root = excluded.root, content_hash = excluded.content_hash,"
            " settings = excluded.settings WHERE documents.origin IN (excluded.origin, ?)",
            (*astuple(document), replaces),
        )
        if not stored.rowcount:
            return False
        old = connection.execute("SELECT node_id FROM chunks WHERE source = ? AND path = ?", of_document)
        known = {row[0] for row in old.fetchall()}
        gone, left = set(known), iter(pieces)
        while batch := list(islice(left, _BATCH)):
            gone.difference_update(chunk.node_id for chunk, _ in batch)
            # Others are unchanged: a node's id is a hash of its content.
            new = [(chunk, vector) for chunk, vector in batch if chunk.node_id not in known]
            connection.executemany(
                "INSERT INTO chunks"
                " (source, path, node_id, chunk_index, metadata, embedding_hash, start_char, end_char)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(*of_document, *_written(chunk)) for chunk, _ in new],
            )
            self._put_contents(connection, document.source, new)
        connection.executemany("DELETE FROM chunks WHERE node_id = ?", [(node_id,) for node_id in gone])
        _count_change(connection, document.source)
        return True

    def delete_document(self, source: str, path: str) -> None:
        """Delete a document and its chunks, in one transaction."""
        self._change("DELETE FROM documents WHERE source = ? AND path = ?", (source, path), of=source)

    def _vectors_by_embedding(self, source: str, embedding_hashes: Iterable[str]) -> dict[str, Floats]:
        """Return the source's stored vectors by the hashes of their embedded texts; unknown hashes are omitted."""
        listed, keys = self.dialect.any_value("embedding_hash", list(embedding_hashes))
        first = f"SELECT min(id) FROM chunks WHERE source = ? AND {listed} GROUP BY embedding_hash"  # noqa: S608 (constants)
        rows = self._rows(
            f"SELECT embedding_hash, vector FROM chunks JOIN contents USING (id) WHERE id IN ({first})",  # noqa: S608 (same)
            (source, *keys),
        )
        with self._intact():
            vectors = np.split(self._unpacked([vector for _, vector in rows]), max(1, len(rows)))
            return {embedding_hash: vector for (embedding_hash, _), vector in zip(rows, vectors, strict=False)}

    def _vectors_of(self, ids: Ids) -> tuple[Ids, Floats]:
        """Return the ids (ascending) and vectors of the given chunks; deleted chunks are omitted."""
        listed, keys = self.dialect.any_value("id", ids.tolist())
        found = list(self._stream(f"SELECT id, vector FROM contents WHERE {listed} ORDER BY id", keys))  # noqa: S608 (constants)
        with self._intact():
            data = self._unpacked([vector for _, vector in found]).reshape(len(found), self.fingerprint.dimension)
        return np.array([row for row, _ in found], dtype=np.int64), data


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Reads the vectors of a source's chunks; see ``search.prototypes.VectorReader``."""

    store: DocumentDatabase
    source: str

    def version(self) -> str:
        """Return the source's version; empty if the source is gone."""
        state = self.store._source_state(self.source)
        return "" if state is None else str(state.version)

    def chunks(self) -> dict[str, list[str]]:
        """Return the row ids of each document's chunks, by document id; a row id is never used again."""
        documents: dict[str, list[str]] = {}
        statement = "SELECT path, id FROM chunks WHERE source = ? ORDER BY path, chunk_index"
        for path, row in self.store._stream(statement, (self.source,)):
            documents.setdefault(f"{self.source}/{path}", []).append(str(row))
        return documents

    def vectors(self, chunks: Sequence[str]) -> dict[str, Floats]:
        """Return the vectors of chunks, by row id."""
        rows, vectors = self.store._vectors_of(np.array([int(chunk) for chunk in chunks], np.int64))
        return {str(row): vector for row, vector in zip(rows.tolist(), vectors, strict=True)}


def plain_name(source: str) -> str:
    """Return a name for a source's files and indexes; its own may have any characters."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _count_change(connection: Statements, source: str) -> None:
    connection.execute("UPDATE state SET value = CAST(CAST(value AS bigint) + 1 AS text) WHERE key = 'changes'")
    connection.execute(
        "UPDATE sources SET version = (SELECT CAST(value AS bigint) FROM state WHERE key = 'changes') WHERE name = ?",
        (source,),
    )


def _written(chunk: Chunk) -> Row:
    metadata = json.dumps(dict(chunk.metadata))
    return chunk.node_id, chunk.index, metadata, chunk.embedding_hash, chunk.start_char, chunk.end_char
