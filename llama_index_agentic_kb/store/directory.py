"""A store in a directory: a SQLite file with all data, and indexes that are derived from it.

    documents.db    all documents, chunks and vectors (SQLite); the indexes are derived from it
    graphs/         the vector index (HNSW graph, usearch) of each source with more than 20,000 chunks
    lexical/        the lexical indexes (tantivy), one directory per source
    scope/          the scope indexes that ``agentic-kb calibrate`` made
    write.lock      the lock of the process that is writing; writer.pid contains its process id

One process at a time writes, while many search. A forked child must open the store again. A new store is readable only
by its owner.

A graph is one file with vectors of 16-bit floats: 0.9 KB a chunk of 384 dimensions. It is written once, then recorded
in the database with its last chunk id, size and checksum, and never changes. Processes map it into memory, without a
lock, and switch to the next one once that is recorded. The next repair, or writer of a graph, deletes incomplete files
of killed processes.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import sqlite3
import threading
import uuid
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from filelock import FileLock, Timeout
from sqlalchemy.exc import DBAPIError

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import (
    AgenticKBError,
    ConfigurationError,
    IngestionError,
    RetrievalError,
    StoreDamagedError,
)
from llama_index_agentic_kb.search.dialects import SqliteSql
from llama_index_agentic_kb.search.lexical import LexicalDocument, LexicalIndex
from llama_index_agentic_kb.search.prototypes import ScopeIndex, unit_rows
from llama_index_agentic_kb.store import database
from llama_index_agentic_kb.store.database import (
    ADVICE,
    TABLES,
    BusyError,
    Done,
    Floats,
    Ids,
    Piece,
    Row,
    SourceInfo,
    SourceState,
    Statements,
    plain_name,
)
from llama_index_agentic_kb.store.sql import SqlDatabase
from llama_index_agentic_kb.store.store import KnowledgeStore, RepairProgress

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore
    from usearch.index import Index

    from llama_index_agentic_kb.schema import FilterNode
    from llama_index_agentic_kb.store.vectors import SourceVectors

logger = logging.getLogger("llama_index_agentic_kb")
_DOCUMENTS: Final = "documents.db"
_GRAPH_CANDIDATES: Final = 400
"""Candidates that a graph keeps during a search: with 100 it missed 1 % of the 50 nearest of 5,021 passages."""
_GRAPH_BATCH: Final = 2_000
_BLOCK: Final = 1 << 24
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


def _version(connection: Statements) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


class DirectoryStore(KnowledgeStore):
    """A store in a directory, which is not usable in a forked process; see `KnowledgeStore` for the methods.

    With ``create`` a missing store is made. One that can't be opened, or is of another release, is a
    ``ConfigurationError``.
    """

    dialect = SqliteSql

    def __init__(self, path: str | Path, *, create: bool) -> None:
        self.path = Path(path).resolve()
        file = self.path / _DOCUMENTS
        if create and not file.exists():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.path.chmod(0o700)
            except OSError as error:
                raise ConfigurationError(f"No store can be made in {str(self.path)!r}: {error.strerror}.") from error
        elif not file.exists():
            if any((self.path / name).exists() for name in ("graphs", "lexical")):
                raise StoreDamagedError(
                    f"{str(file)!r} is gone, and with it the store's documents. Restore it, or make the "
                    "store again with `agentic-kb ingest` in a directory of its own."
                )
            raise ConfigurationError(
                f"There is no store in {str(self.path)!r}. Make one with `agentic-kb ingest FOLDER --store {path}`."
            )
        super().__init__(SqlDatabase(file), str(self.path), 30.0)
        self._at, self._pid = str(file), os.getpid()
        self.graphs = Graphs(self)
        try:
            if self._transact(_version, "opened", write=False) != _SCHEMA_VERSION:
                self._transact(self._make_tables, "opened")
        except BaseException:
            self.close()
            raise

    @classmethod
    def is_new(cls, path: str | Path) -> bool:
        """Return whether there is no store in a directory yet; raise ``ConfigurationError`` if there can be none."""
        directory = Path(path).resolve()
        if (directory / _DOCUMENTS).exists():
            return False
        if directory.exists() and not directory.is_dir():
            raise ConfigurationError(f"{str(directory)!r} is a file; a store is a directory.")
        if directory.is_dir() and any(directory.iterdir()):
            raise ConfigurationError(
                f"{str(directory)!r} holds other files and no store. Choose a directory of its own for the store."
            )
        return True

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        with suppress(ConfigurationError):  # forked: the files belong to the parent, and its threads may have the locks
            self._check_usable()
            self.graphs.close()
            super().close()

    def _make_tables(self, connection: Statements) -> None:
        version = _version(connection)  # again: another process may have made the tables
        if version not in (0, _SCHEMA_VERSION):
            raise ConfigurationError(
                f"{self._at!r} has schema version {version}; this release reads version {_SCHEMA_VERSION}. "
                "Use the release that made it, or make the store again elsewhere with `agentic-kb ingest`."
            )
        if version == 0 and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise ConfigurationError(f"{self._at!r} holds other tables and no store.")
        if version == 0:
            tables = TABLES.format(
                name="TEXT", row="INTEGER PRIMARY KEY AUTOINCREMENT", json="TEXT", by_key="WITHOUT ROWID"
            )
            for statement in (tables + _TABLES).split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    def _check_usable(self) -> None:
        """Raise ``ConfigurationError`` if the store is closed, or was opened by a process that forked this one."""
        super()._check_usable()
        if os.getpid() != self._pid:
            raise ConfigurationError(
                f"{self._at!r} was opened in process {self._pid}, from which this process, {os.getpid()}, was "
                "forked: SQLite's locks do not come along. Open the store again in the child."
            )

    @contextmanager
    def _errors(self, done: Done) -> Iterator[None]:
        with super()._errors(done):
            try:
                yield
            except (DBAPIError, sqlite3.Error, UnicodeDecodeError) as error:  # a damaged schema is quoted, in bytes
                cause = getattr(error, "orig", error)
                # DatabaseError's other subclasses mean misuse or a system error.
                found = "a text is not UTF-8" if "Could not decode" in str(cause) else str(cause)  # it quotes the text
                is_damage = type(cause) in (sqlite3.DatabaseError, UnicodeDecodeError) or "malformed JSON" in found
                if is_damage or found != str(cause):
                    raise StoreDamagedError(f"{self._at!r} is damaged: {found}. {ADVICE}") from error
                if isinstance(error, DBAPIError):
                    raise
                raise DBAPIError(None, None, error) from error

    def _rows(self, statement: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Return the rows of a query."""
        return list(self._stream(statement, parameters))

    def _stream(self, statement: str, parameters: Sequence[object] = ()) -> Iterator[Row]:
        """Yield the rows of a query as one snapshot, past SQLAlchemy: it takes ten times as long as SQLite does."""
        with self._errors("read"), closing(self._database.driver()) as connection:
            connection.execute(f"PRAGMA busy_timeout = {int(self.timeout * 1000)}")
            yield from connection.execute(statement, parameters)

    def _check(self) -> None:
        """Raise ``StoreDamagedError`` if the file is damaged; the store has no other copy of the documents."""
        found = self._rows("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise StoreDamagedError(f"{self._at!r} is damaged: {' '.join(found[0][0].split())}. {ADVICE}")

    def _put_contents(self, connection: Statements, source: str, pieces: Sequence[Piece]) -> None:  # noqa: ARG002
        """Store the texts and vectors of chunks that are stored already."""
        connection.executemany(
            "INSERT INTO contents SELECT id, ?, ? FROM chunks WHERE node_id = ?",
            [(chunk.text, np.asarray(vector, dtype="<f4").tobytes(), chunk.node_id) for chunk, vector in pieces],
        )

    def _unpacked(self, vectors: Sequence[bytes]) -> Floats:
        """Return the numbers of all the given stored vectors, one vector after the other."""
        return np.frombuffer(b"".join(vectors), dtype="<f4")

    def _source_state(self, source: str) -> SourceState | None:
        """Return the version of a source and the record of its HNSW graph; None if the source does not exist."""
        rows = self._rows(
            "SELECT version, coalesce(directory, ''), coalesce(last_id, 0), coalesce(files, '')"
            " FROM sources LEFT JOIN graphs ON source = name WHERE name = ?",
            (source,),
        )
        return SourceState(*rows[0]) if rows else None

    def _put_graph(self, source: str, name: str, last_id: int, checksum: str) -> None:
        """Record an HNSW graph that is complete on disk, as the current one of its source."""
        self._change("INSERT OR REPLACE INTO graphs VALUES (?, ?, ?, ?)", (source, name, last_id, checksum))

    def _ids(self, source: str, where: str = "1", parameters: Sequence[object] = (), *, after: int = 0) -> Ids:
        """Return the ids of a source's chunks in ascending order."""
        # "+": otherwise SQLite would scan all of the source's rows in its index, even if few have higher ids.
        of_source = "+source" if after else "source"
        statement = f"SELECT id FROM chunks WHERE id > ? AND {of_source} = ? AND {where} ORDER BY id"  # noqa: S608 (made by the dialect)
        rows = self._stream(statement, (after, source, *parameters))
        return np.fromiter((row[0] for row in rows), dtype=np.int64)

    def _count(self, source: str, last_id: int = 1 << 62) -> int:
        """Return the number of a source's chunks with ids up to and including ``last_id``."""
        return int(self._rows("SELECT count(*) FROM chunks WHERE source = ? AND id <= ?", (source, last_id))[0][0])

    # -- what is derived from the documents

    def vectors(self, source: str) -> SourceVectors:
        """Return the dense search of a source."""
        from llama_index_agentic_kb.store.vectors import SourceVectors  # noqa: PLC0415 (loads LlamaIndex)

        return self._once(SourceVectors.over, source)

    def lexical(self, source: str) -> StoredLexicalSearch:
        """Return the lexical search of a source."""
        self._existing_state(source)
        return self._once(StoredLexicalSearch, source)

    def _clean(self, source: str) -> None:
        shutil.rmtree(self._lexical_directory(source), ignore_errors=True)
        self.graphs.remove_unused()
        self._scope_file(source).unlink(missing_ok=True)

    @contextmanager
    def writing(self, wait: float = 0.0) -> Iterator[None]:
        """Hold the lock of the one writer, which the operating system releases if the process dies."""
        self._check_usable()
        path, pid = self.path / "write.lock", self.path / "writer.pid"
        lock = FileLock(path, timeout=wait, mode=0o600, thread_local=False)
        try:
            lock.acquire(poll_interval=0.02)
            pid.touch(0o600)
            pid.write_text(str(os.getpid()), "ascii")
        except Timeout:
            holder = pid.read_text("ascii", "replace") if pid.exists() else "unknown"
            raise BusyError(
                f"Process {holder} is writing into the store {self.location!r}. Wait for it to end (wait=SECONDS, "
                "--wait SECONDS), or end it, then run this again."
            ) from None
        except OSError as error:
            lock.release()
            raise IngestionError(f"{str(path)!r} can't be written: {error.strerror}.") from error
        try:
            yield
        finally:
            lock.release()

    def update_indexes(self, source: str) -> None:
        """Update the lexical index, and the HNSW graph if it is far behind."""
        self.lexical(source).update()
        self.update_graph(source)

    def update_graph(self, source: str) -> None:
        """Update a source's HNSW graph if over 20,000 chunks are missing or deleted."""
        if self.graphs.outside(source) > database.EXACT_ROWS:
            self.graphs.build(source, anew=False)

    def mend(self, *, rebuild_all: bool, progress: RepairProgress) -> str:
        """Update or repair the HNSW graphs and lexical indexes."""
        found = []
        for info in self.sources():
            lexical = self.lexical(info.name)

            def tell(done: int, info: SourceInfo = info) -> None:
                progress(done, info.chunks, info.name)

            _, graph = self.graphs.read(self._existing_state(info.name))
            if graph or (rebuild_all and info.chunks > database.EXACT_ROWS):
                self.graphs.build(info.name, tell, anew=True)
            else:
                self.update_graph(info.name)
            words = lexical.fault()
            lexical.update(words or ("it is to be built again" if rebuild_all else ""))
            found += [graph, words]
            tell(info.chunks)
        self.graphs.remove_unused()
        return "; ".join(filter(None, found))

    def size(self) -> int:
        """Return the size of all files in bytes."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def _lexical_directory(self, source: str) -> Path:
        """Return the directory of a source's lexical index."""
        return self.path / "lexical" / plain_name(source)

    def _scope_file(self, source: str) -> Path:
        return self.path / "scope" / f"{plain_name(source)}.npz"

    def load_scope(self, source: str) -> ScopeIndex | None:
        """Return a source's scope index; None if it has none."""
        path = self._scope_file(source)
        return ScopeIndex.load(path) if path.exists() else None

    def save_scope(self, source: str, index: ScopeIndex) -> None:
        """Write a source's scope index."""
        try:
            index.save(self._scope_file(source))
        except OSError as error:
            raise IngestionError(f"the scope index can't be written: {error}") from error


class Graphs:
    """The vector indexes (HNSW graphs) of a store; thread-safe."""

    def __init__(self, store: DirectoryStore) -> None:
        self._path = store.path / "graphs"
        self._store: DirectoryStore = weakref.proxy(store)  # else a store that nobody closes is kept by its graphs
        self._opened: dict[str, Index | None] = {}
        self.close = self._opened.clear

    def opened(self, state: SourceState) -> Index | None:
        """Return a source's HNSW graph; None if it has none, or if it is missing or damaged."""
        if state.graph and state.graph not in self._opened:
            self._opened[state.graph], _ = self.read(state)
        return self._opened.get(state.graph)

    def outside(self, source: str) -> int:
        """Return the number of chunks missing from a source's HNSW graph plus the deleted chunks still in it."""
        state = self._store._source_state(source) or SourceState(0)
        graph, total = self.opened(state), self._store._count(source)
        there = self._store._count(source, state.last_id)
        return total if graph is None else total - there + len(graph) - there

    def read(self, state: SourceState) -> tuple[Index | None, str]:
        """Return a source's HNSW graph, read anew, or a description of its damage; neither if the source has none."""
        file = self._path / state.graph
        if not state.graph:
            return None, ""
        try:
            if _checksum(file) != state.checksum:
                return None, f"{str(file)!r} is not as it was written"
            graph = self._empty(lookups=False)
            graph.view(file)
        except OSError as error:
            return None, f"{str(file)!r} can't be read: {error.strerror}"
        except (RuntimeError, ValueError):
            return None, f"{str(file)!r} is of another release of usearch"
        return graph, ""

    def build(self, source: str, progress: Callable[[int], None] = lambda _: None, *, anew: bool) -> None:
        """Build the HNSW graph of a source's current chunks, anew or from the current graph.

        The caller must have the store's write lock. ``progress`` is called with the number of chunks added so far.
        Raises ``IngestionError`` if the new graph can't be written; the current one remains in use.
        """
        state = self._store._source_state(source) or SourceState(0)
        made = self._path / uuid.uuid4().hex
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            graph = self._empty(lookups=True)
            if not anew and self.read(state)[0] is not None:  # it may have changed since it was opened
                graph.load(self._path / state.graph)
            ids, held = self._store._ids(source), graph.keys[:].astype(np.int64)
            graph.remove(np.setdiff1d(held, ids), threads=1)
            new = np.setdiff1d(ids, held)
            for start in range(0, len(new), _GRAPH_BATCH):
                rows, vectors = self._store._vectors_of(new[start : start + _GRAPH_BATCH])
                graph.add(rows, unit_rows(vectors), threads=1)  # with more, equal builds would find different passages
                progress(len(ids) - len(new) + start + len(rows))
            graph.save(made)
            checksum = _checksum(made)
        except AgenticKBError:
            raise
        except Exception as error:
            made.unlink(missing_ok=True)
            raise IngestionError(
                f"The graph of the source {source!r} can't be built: {type(error).__name__}: {error_message(error)}. "
                f"Its documents are stored: run `agentic-kb repair --store {self._path.parent}` to go on."
            ) from error
        self._store._put_graph(source, made.name, int(ids[-1]) if len(ids) else 0, checksum)
        self.remove_unused()

    def remove_unused(self) -> None:
        """Delete the graphs that no source uses; those of earlier releases are directories."""
        named = {name for (name,) in self._store._rows("SELECT directory FROM graphs")}
        for entry in self._path.iterdir() if self._path.is_dir() else ():
            if entry.name not in named:
                shutil.rmtree(entry, ignore_errors=True)
                with suppress(OSError):  # it was a directory, or is in use (Windows)
                    entry.unlink()
        for name in self._opened.keys() - named:
            self._opened.pop(name, None)  # closed when its last search has ended

    def _empty(self, *, lookups: bool) -> Index:
        from usearch.index import Index  # noqa: PLC0415 (only for large sources)

        return Index(
            ndim=self._store.fingerprint.dimension,
            metric="ip",
            dtype="f16",
            expansion_search=_GRAPH_CANDIDATES,
            enable_key_lookups=lookups,  # a table of all keys, for deletions
        )


def _checksum(path: Path) -> str:
    """Return the size and checksum of a file, whose content is then on the disk."""
    crc = 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
        return json.dumps({"bytes": file.tell(), "crc": crc})


class StoredLexicalSearch:
    """BM25 search over a source; safe to use from many threads and processes.

    Each commit of the index records the version of the source that it reflects. A search updates an index that is
    missing, damaged or outdated, by comparing node ids, which change with their chunks' content. Hits are read from the
    document database, so deleted nodes are never returned.
    """

    def __init__(self, store: DirectoryStore, source: str) -> None:
        self._store = store
        self._source = source
        self._directory = store._lexical_directory(source)
        self._lock = threading.Lock()
        self._index: LexicalIndex | None = None
        self._warned = ""  # the last version whose index could not be written

    def search(self, query: str, top_k: int, filters: FilterNode | None = None) -> list[NodeWithScore]:
        """Find nodes by the words of a query.

        The first search of a source without an index builds it: about a second for each ten thousand chunks. While
        another process is ingesting, the last committed index is searched.

        Raises:
            ConfigurationError: The source no longer exists.
            RetrievalError: The index is missing and can't be built, since another process has the write lock, or since
                the directory can't be written to.
        """
        from llama_index.core.schema import NodeWithScore  # noqa: PLC0415 (takes seconds; a repair needs it not)

        index = self._current()
        try:
            hits = index.search(query, top_k, filters)
        except RetrievalError as error:  # damaged
            with self._lock:
                damage = str(error) if self._index is index else ""  # else another thread has replaced it
                hits = self._in_step(self._version(), damage).search(query, top_k, filters)
        nodes = self._store._nodes_of("node_id", [hit.node_id for hit in hits])
        return [NodeWithScore(node=nodes[hit.node_id], score=hit.score) for hit in hits if hit.node_id in nodes]

    def update(self, damage: str = "") -> None:
        """Update the index inside the store's write lock; raise ``IngestionError`` if it can't be written."""
        with self._lock:
            try:
                self._mend(damage)
            except (RetrievalError, OSError) as error:
                raise IngestionError(
                    f"The lexical index of the source {self._source!r} can't be written: {error}. The documents are "
                    "stored; make room or grant the right to write, and the next search builds the index."
                ) from error

    def fault(self) -> str:
        """Check the index's files against their checksums, and return a description of any damage; empty if intact."""
        if not (self._directory / "meta.json").exists():
            return f"{str(self._directory)!r} is missing"
        for path in self._directory.iterdir():
            # Each tantivy file ends with its checksum as JSON, the length of the JSON, and a magic number.
            try:
                if path.suffix == ".json":
                    json.loads(path.read_bytes())
                elif path.suffix != ".lock":
                    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                        end = len(data) - 8
                        start = end - int.from_bytes(data[end : end + 4], "little")
                        if json.loads(data[start:end])["crc"] != zlib.crc32(memoryview(data)[:start]):
                            return f"{str(path)!r} is damaged"
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                return f"{str(path)!r} can't be read: {error}"
        return ""

    def _current(self) -> LexicalIndex:
        """Return the index, updated if possible; while another thread updates it, return the previous version."""
        version, index = self._version(), self._index
        if index is not None and index.mark == version and self._directory.is_dir():
            return index
        if not self._lock.acquire(blocking=index is None or index.mark is None) and index is not None:
            return index
        try:
            return self._in_step(version)
        finally:
            self._lock.release()

    def _in_step(self, version: str, damage: str = "") -> LexicalIndex:
        """Return the index, updated, or rebuilt if damaged; an outdated one if it can't be written now."""
        index = None
        if not damage:
            with suppress(RetrievalError):
                index = self._opened()
        if index is not None and index.mark == version:
            return index
        try:
            with self._store.writing():
                return self._mend(damage)
        except (IngestionError, RetrievalError, OSError) as error:
            if index is None or index.mark is None:
                raise RetrievalError(f"The lexical index of the source {self._source!r} is missing: {error}") from error
            if not isinstance(error, BusyError) and self._warned != version:  # a busy store's writer updates the index
                self._warned = version
                logger.warning("the lexical index of the source %r is searched as it was: %s", self._source, error)
            return index

    def _opened(self) -> LexicalIndex:
        """Open the index, or reload it to see other processes' commits; raise ``RetrievalError`` if it is damaged."""
        if self._index is None or not self._directory.is_dir():
            with suppress(OSError):  # reported when the index is opened
                self._directory.parent.mkdir(mode=0o700, exist_ok=True)
            self._index = LexicalIndex(self._directory)
        else:
            self._index.refresh()
        return self._index

    def _mend(self, damage: str) -> LexicalIndex:
        """Update the index, or rebuild it if damaged; one that can't be written keeps its last commit."""
        version = self._version()
        found: tuple[LexicalIndex, set[str]] | None = None
        if not damage:
            with suppress(RetrievalError):  # what can't be read is damaged
                index = self._opened()
                if index.mark == version:
                    return index
                found = index, index.node_ids()
        if found is None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._index = LexicalIndex(self._directory)
            found = self._index, set()
        self._write(*found, version)
        return found[0]

    def _write(self, index: LexicalIndex, held: set[str], version: str) -> None:
        new, gone = array("q"), set(held)
        statement = "SELECT id, node_id FROM chunks WHERE source = ? ORDER BY id"
        for row, node_id in self._store._stream(statement, (self._source,)):
            if node_id in held:
                gone.discard(node_id)
            else:
                new.append(row)
        chunks = (
            chunk
            for start in range(0, len(new), 1_000)
            for chunk in self._store.chunks_of("id", new[start : start + 1_000])
        )
        # The title and the text, as the embedding model receives them.
        texts = (LexicalDocument(one.node_id, f"{one.metadata['title']}\n{one.text}", one.metadata) for one in chunks)
        index.update(texts, delete=gone, mark=version)

    def _version(self) -> str:
        return str(self._store._existing_state(self._source).version)
