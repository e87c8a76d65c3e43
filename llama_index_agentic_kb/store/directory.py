"""A store in a directory: a SQLite file with all data, and indexes that are derived from it.

    documents.db    all documents, chunks and vectors (SQLite); the indexes are derived from it
    graphs/         the vector index (HNSW graph, Chroma) of each source with more than 20,000 chunks
    lexical/        the lexical indexes (tantivy), one directory per source
    scope/          the scope indexes that ``agentic-kb calibrate`` made
    write.lock      the lock of the process that is writing; writer.pid contains its process id

One process at a time writes, while many search. A forked child must open the store again, which fails if its parent has
used an HNSW graph; start it with "spawn" instead. A new store is readable only by its owner.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import threading
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from filelock import FileLock, Timeout

from llama_index_agentic_kb.errors import ConfigurationError, IngestionError, RetrievalError, StoreDamagedError
from llama_index_agentic_kb.search.lexical import LexicalDocument, LexicalIndex
from llama_index_agentic_kb.search.prototypes import ScopeIndex
from llama_index_agentic_kb.store import chroma
from llama_index_agentic_kb.store.chroma import Graphs
from llama_index_agentic_kb.store.database import BusyError, DocumentDatabase, SourceInfo
from llama_index_agentic_kb.store.embedding_model import EmbedModelFingerprint
from llama_index_agentic_kb.store.sqlite import SqliteDatabase
from llama_index_agentic_kb.store.store import KnowledgeStore, RepairProgress

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import NodeWithScore

    from llama_index_agentic_kb.schema import FilterNode
    from llama_index_agentic_kb.store.vectors import SourceVectors

_DOCUMENTS: Final = "documents.db"


class DirectoryStore(KnowledgeStore):
    """A store in a directory; see the module, and `KnowledgeStore` for the methods."""

    _documents: SqliteDatabase

    def __init__(
        self, documents: DocumentDatabase, fingerprint: EmbedModelFingerprint, embed_model: BaseEmbedding | str | None
    ) -> None:
        super().__init__(documents, fingerprint, embed_model)
        self.path = self._documents.path.parent
        self._graphs = Graphs(self.path / "graphs", self._documents, fingerprint.dimension)

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

    @classmethod
    def open_documents(cls, path: str | Path, *, create: bool) -> SqliteDatabase:
        """Open the document database, or create it."""
        directory = Path(path).resolve()
        documents = directory / _DOCUMENTS
        if create and not documents.exists():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                directory.chmod(0o700)
            except OSError as error:
                raise ConfigurationError(f"No store can be made in {str(directory)!r}: {error.strerror}.") from error
        elif not documents.exists():
            if any((directory / name).exists() for name in ("graphs", "lexical")):
                raise StoreDamagedError(
                    f"{str(documents)!r} is gone, and with it the store's documents. Restore it, or make the "
                    "store again with `agentic-kb ingest` in a directory of its own."
                )
            raise ConfigurationError(
                f"There is no store in {str(directory)!r}. Make one with `agentic-kb ingest FOLDER --store {path}`."
            )
        return SqliteDatabase(documents)

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        with suppress(ConfigurationError):  # forked: the files belong to the parent, and its threads may have the locks
            self._documents.check_process()
            self._graphs.close()
            super().close()

    @property
    def location(self) -> str:
        """The directory."""
        return str(self.path)

    @property
    def documents(self) -> SqliteDatabase:
        """The database of all documents, chunks and vectors."""
        super().documents  # noqa: B018 (raises an error if the store is closed)
        return self._documents

    def vectors(self, source: str) -> SourceVectors:
        """Return the dense search of a source."""
        from llama_index_agentic_kb.store.vectors import SourceVectors  # noqa: PLC0415 (loads LlamaIndex)

        return self._once(SourceVectors, source, lambda: SourceVectors(self, source, self._graphs))

    def lexical(self, source: str) -> StoredLexicalSearch:
        """Return the lexical search of a source."""
        self._check_source(source)
        directory = self._lexical_directory(source)
        return self._once(StoredLexicalSearch, source, lambda: StoredLexicalSearch(self, source, directory))

    def _remove(self, source: str) -> None:
        shutil.rmtree(self._lexical_directory(source), ignore_errors=True)
        self._documents.delete_source(source)
        self._graphs.remove_unused()
        self._scope_file(source).unlink(missing_ok=True)

    @contextmanager
    def writing(self, wait: float = 0.0) -> Iterator[None]:
        """Hold the lock of the one writer, which the operating system releases if the process dies."""
        path, pid = self.documents.path.with_name("write.lock"), self.path / "writer.pid"
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

    def outside_graph(self, source: str) -> int:
        """Return the number of chunks missing from a source's HNSW graph plus the deleted chunks still in it."""
        return self._graphs.outside(source)

    def update_indexes(self, source: str) -> None:
        """Update the lexical index, and the HNSW graph if it is far behind."""
        self.lexical(source).update()
        self.update_graph(source)

    def update_graph(self, source: str) -> None:
        """Update a source's HNSW graph if over 20,000 chunks are missing or deleted."""
        if self.outside_graph(source) > chroma.EXACT_ROWS:
            self._graphs.build(source, anew=False)

    def mend(self, *, rebuild_all: bool, progress: RepairProgress | None) -> str:
        """Update or repair the HNSW graphs and lexical indexes."""
        found = []
        for info in self.sources():
            lexical = self.lexical(info.name)

            def tell(done: int, info: SourceInfo = info) -> None:
                if progress is not None:
                    progress(done, info.chunks, info.name)

            state = self.documents.source_state(info.name)
            graph = "" if state is None else self._graphs.fault(state, whole=True)
            if graph or (rebuild_all and info.chunks > chroma.EXACT_ROWS):
                self._graphs.build(info.name, tell, anew=True)
            else:
                self.update_graph(info.name)
            words = lexical.fault()
            lexical.update(words or ("it is to be built again" if rebuild_all else ""))
            found += [graph, words]
            tell(info.chunks)
        return "; ".join(filter(None, found))

    def size(self) -> int:
        """Return the size of all files in bytes."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def _lexical_directory(self, source: str) -> Path:
        return self.path / "lexical" / _file_name(source)

    def _scope_file(self, source: str) -> Path:
        return self.path / "scope" / f"{_file_name(source)}.npz"

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


class StoredLexicalSearch:
    """BM25 search over a source; safe to use from many threads and processes.

    Each commit of the index records the version of the source that it reflects. A search updates an index that is
    missing, damaged or outdated, by comparing node ids, which change with their chunks' content. Hits are read from the
    document database, so deleted nodes are never returned.
    """

    def __init__(self, store: DirectoryStore, source: str, directory: Path) -> None:
        self._store = store
        self._source = source
        self._directory = directory
        self._lock = threading.Lock()
        self._index: LexicalIndex | None = None
        self._in_memory = False

    def search(self, query: str, top_k: int, filters: FilterNode | None = None) -> list[NodeWithScore]:
        """Find nodes by the words of a query.

        The first search of a source without an index builds it: about a second for each ten thousand chunks. While
        another process is ingesting, the last committed index is searched.

        Raises:
            ConfigurationError: The source no longer exists.
            RetrievalError: The index is missing, and another process has the write lock needed to build it.
        """
        from llama_index.core.schema import NodeWithScore  # noqa: PLC0415 (takes seconds; a repair needs it not)

        from llama_index_agentic_kb.store.chunking import chunk_to_node  # noqa: PLC0415 (same)

        index = self._current()
        try:
            hits = index.search(query, top_k, filters)
        except RetrievalError as error:  # damaged
            with self._lock:
                damage = str(error) if self._index is index else ""  # else another thread has replaced it
                hits = self._in_step(self._version(), damage).search(query, top_k, filters)
        chunks = self._store.documents.chunks_of("node_id", [hit.node_id for hit in hits])
        nodes = {chunk.node_id: chunk_to_node(chunk) for chunk in chunks}
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
        if index is not None and index.mark == version and (self._in_memory or self._directory.is_dir()):
            return index
        if not self._lock.acquire(blocking=index is None or index.mark is None) and index is not None:
            return index
        try:
            return self._in_step(version)
        finally:
            self._lock.release()

    def _in_step(self, version: str, damage: str = "") -> LexicalIndex:
        """Return the index, updated, or rebuilt if damaged; in a read-only store, build it in memory."""
        index = None
        if not damage:
            with suppress(RetrievalError):
                index = self._opened()
        if index is not None and index.mark == version:
            return index
        try:
            with self._store.writing():
                self._mend(damage)
                return self._opened()
        except BusyError as busy:
            if index is None or index.mark is None:
                raise RetrievalError(f"The lexical index of the source {self._source!r} is missing: {busy}") from busy
            return index
        except (IngestionError, RetrievalError, OSError):  # a read-only store
            self._in_memory = True
            self._index = LexicalIndex()
            self._write(self._index)
            return self._index

    def _opened(self) -> LexicalIndex:
        """Open the index, or reload it to see other processes' commits; raise ``RetrievalError`` if it is damaged."""
        if self._index is None or not (self._in_memory or self._directory.is_dir()):
            with suppress(OSError):  # reported when the index is opened
                self._directory.parent.mkdir(mode=0o700, exist_ok=True)
            self._index = LexicalIndex(None if self._in_memory else self._directory)
        else:
            self._index.refresh()
        return self._index

    def _mend(self, damage: str) -> None:
        """Update the index on disk, or rebuild it if it is damaged."""
        if not damage:
            try:
                self._write(self._opened())
            except RetrievalError as error:
                damage = str(error)
        if damage:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._index = LexicalIndex(self._directory)
            self._write(self._index)

    def _write(self, index: LexicalIndex) -> None:
        version = self._version()
        if index.mark != version:
            held = index.node_ids()
            new, gone = array("q"), set(held)
            for row, node_id in self._store.documents.node_ids(self._source):
                if node_id in held:
                    gone.discard(node_id)
                else:
                    new.append(row)
            index.update(self._documents(new), delete=gone, mark=version)

    def _documents(self, rows: array[int]) -> Iterator[LexicalDocument]:
        for start in range(0, len(rows), 1_000):
            for chunk in self._store.documents.chunks_of("id", rows[start : start + 1_000]):
                # The title and the text, as the embedding model receives them.
                yield LexicalDocument(chunk.node_id, f"{chunk.metadata['title']}\n{chunk.text}", chunk.metadata)

    def _version(self) -> str:
        return str(self._store.documents.existing_state(self._source).version)


def _file_name(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
