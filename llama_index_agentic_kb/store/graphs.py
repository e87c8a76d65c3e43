"""Graphs over the vectors of large sources: derived from the database, each complete before it is used.

A graph is a Chroma directory of its own that is written once, in a new place, and then recorded in the database with
the last chunk that it holds and the sizes of its files. It never changes afterwards: readers in any number
of processes open it without a lock, and go to the next one once the database names another. What a process that was
killed left half written is not recorded, and is removed by the next writer.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import AgenticKBError, IngestionError
from llama_index_agentic_kb.store.database import DocumentDatabase, Floats, VectorState

if TYPE_CHECKING:
    from llama_index_agentic_kb.store.chroma import ChromaGraph

__all__ = ["GraphError", "Graphs"]

_BATCH: Final = 2_000
_CHANGING: Final = "chroma.sqlite3"
"""The one file that opening a graph writes into."""


class GraphError(Exception):
    """A graph can't be read; it is not used again. Never leaves the store."""


class Graphs:
    """The graphs of a store; safe to use from many threads.

    Args:
        path: Their directory; made when the first one is built.
        documents: The store's database.
        dimension: The length of the store's vectors.
    """

    def __init__(self, path: Path, documents: DocumentDatabase, dimension: int) -> None:
        self._path = path
        self._dimension = dimension
        self._documents = documents
        self._lock = threading.Lock()
        self._opened: dict[str, ChromaGraph] = {}
        self._counts: dict[str, int | None] = {}

    def count(self, state: VectorState) -> int | None:
        """Return how many chunks a source's graph holds; None without one, or where it is damaged."""
        if not state.directory:
            return None
        if state.directory not in self._counts:
            count = None if self.fault(state) else int(json.loads(state.files)["rows"])
            self._counts[state.directory] = count
        return self._counts[state.directory]

    def fault(self, state: VectorState, *, whole: bool = False) -> str:
        """Return what is wrong with a graph; empty where nothing is.

        Args:
            state: The source's; without a graph nothing is wrong.
            whole: Whether to open it and search it, too. Else only the sizes of its files are compared.
        """
        recorded = json.loads(state.files or '{"files": {}}')
        for name, size in recorded["files"].items():
            file = self._path / state.directory / name
            try:
                if file.stat().st_size != size and file.name != _CHANGING:
                    return f"{str(file)!r} has another size than it was written with"
            except OSError as error:
                return f"{str(file)!r} can't be read: {error.strerror}"
        if whole and state.directory:
            try:
                self.nearest(state, np.ones(self._dimension, np.float32), 1)
            except GraphError as error:
                return f"{str(self._path / state.directory)!r} can't be read: {error}"
        return ""

    def nearest(self, state: VectorState, vector: Floats, count: int) -> list[tuple[int, float]]:
        """Return the nearest chunks of a graph with their cosine distances; some of them may be gone.

        Raises:
            GraphError: It can't be read.
        """
        try:
            with self._lock:
                graph = self._opened.get(state.directory) or self._open(state.directory)
            return graph.nearest(vector, count)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Chroma's Rust
                raise
            if isinstance(error, AgenticKBError):  # of a forked process
                raise
            self._counts[state.directory] = None
            raise GraphError(error_message(error)) from error

    def _open(self, directory: str) -> ChromaGraph:
        from llama_index_agentic_kb.store.chroma import ChromaGraph  # noqa: PLC0415 (loads chromadb)

        self._opened[directory] = graph = ChromaGraph(self._path / directory)
        return graph

    def build(self, source: str, progress: Callable[[int], None] | None = None, *, anew: bool) -> None:
        """Build the graph of all chunks that a source has now, for the one who has the right to write.

        Args:
            source: The source.
            progress: Called with the number of chunks added so far.
            anew: Whether to add all chunks to an empty graph; else what is new is added to a copy of the last one.

        Raises:
            IngestionError: It can't be written. The one before stays.
        """
        from llama_index_agentic_kb.store.chroma import ChromaGraph  # noqa: PLC0415 (loads chromadb)

        state = self._documents.vector_state(source) or VectorState(0)
        directory = self._path / uuid.uuid4().hex
        directory.mkdir(parents=True, mode=0o700)
        try:
            if not anew and self.count(state) is not None:
                shutil.copytree(self._path / state.directory, directory, dirs_exist_ok=True)
            graph = ChromaGraph(directory, create=True)
            try:
                rows = self._fill(graph, source, progress)
            finally:
                graph.close()
            files = json.dumps({"rows": rows[0], "files": _synced(directory)})
        except AgenticKBError:
            raise
        except Exception as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise IngestionError(
                f"The graph of the source {source!r} can't be built: {type(error).__name__}: {error_message(error)}. "
                f"Its documents are stored: run `agentic-kb repair --store {self._path.parent}` to go on."
            ) from error
        self._documents.put_graph(source, directory.name, rows[1], files)
        self.remove_unused()

    def _fill(self, graph: ChromaGraph, source: str, progress: Callable[[int], None] | None) -> tuple[int, int]:
        ids = self._documents.ids(source)
        wanted, held = set(ids.tolist()), graph.ids()
        graph.delete(held - wanted)
        new = ids if not held else ids[[row not in held for row in ids.tolist()]]
        for start in range(0, len(new), _BATCH):
            rows, vectors = self._documents.vectors(new[start : start + _BATCH], self._dimension)
            graph.add(rows, vectors)
            if progress is not None:
                progress(len(held) + start + len(rows))
        return len(ids), int(ids[-1]) if len(ids) else 0

    def remove_unused(self) -> None:
        """Remove the directories that no source names."""
        named = self._documents.graph_directories()
        for entry in self._path.iterdir() if self._path.is_dir() else ():
            if entry.name not in named:
                shutil.rmtree(entry, ignore_errors=True)
        with self._lock:
            for name in self._opened.keys() - named:
                del self._opened[name]  # closed when the last search in it has ended

    def close(self) -> None:
        """Close all graphs; they are opened again when they are needed."""
        with self._lock:
            for graph in self._opened.values():
                graph.close()
            self._opened.clear()


def _synced(directory: Path) -> dict[str, int]:
    """Make the files of a directory durable, which Chroma leaves to the system; return their sizes."""
    found: dict[str, int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            found[path.relative_to(directory).as_posix()] = path.stat().st_size
    return found
