"""The lexical (BM25) index of a source, derived from the store's documents, in a separate directory.

Each commit of the index records the version of the source that it reflects. A search updates an index that is missing,
damaged or outdated, by comparing node ids, which change with their chunks' content.
Hits are read from the document database, so deleted nodes are never returned.
"""

from __future__ import annotations

import json
import mmap
import shutil
import threading
import zlib
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llama_index_agentic_kb.errors import ConfigurationError, IngestionError, RetrievalError
from llama_index_agentic_kb.search.lexical import LexicalDocument, LexicalIndex
from llama_index_agentic_kb.store.database import BusyError

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore

    from llama_index_agentic_kb.schema import FilterNode
    from llama_index_agentic_kb.store.directory import DirectoryStore


class StoredLexicalSearch:
    """BM25 search over a source of a store; safe to use from many threads and processes."""

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
        state = self._store.documents.source_state(self._source)
        if state is None:
            raise ConfigurationError(f"The store {self._store.location!r} has no source {self._source!r} any more.")
        return str(state.version)
