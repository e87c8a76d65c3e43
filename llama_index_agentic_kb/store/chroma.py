"""Chroma databases in local directories, and the vector indexes (HNSW graphs) of large sources.

Chroma is imported only in this module, on first use, because it takes a second to load. Chroma's client instantiates
the embedding function named in a collection's configuration, which could load code from an untrusted directory.
Collections are therefore opened without one, and a collection that names one is rejected. See ``sources`` for a
user's own Chroma server or client.

Each HNSW graph is written once, to a new Chroma directory, and then recorded in the database with its last chunk id
and its file sizes. It is immutable afterwards: any number of processes read it without a lock, and switch to the next
graph once that is recorded. Incomplete directories of killed processes are deleted by the next writer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, IngestionError, StoreMismatchError
from llama_index_agentic_kb.store.database import Floats, Ids, SourceState
from llama_index_agentic_kb.store.sqlite import SqliteDatabase

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection
    from llama_index.vector_stores.chroma import ChromaVectorStore

EXACT_ROWS = 20_000
"""The maximum number of rows searched without a graph: 30 MB at 384 dimensions, 2-4 ms a query (a graph: 2 ms)."""
EF_SEARCH: Final = 400
"""Candidates that a graph keeps during a search. With Chroma's 100, equal searches found different passages in
different processes (recall of the top 50: 0.987 of 5,021 passages); with 400 all were exact, at no measurable cost."""
_BATCH: Final = 2_000
_CHANGING: Final = "chroma.sqlite3"
"""The only file that Chroma modifies when it opens an HNSW graph."""
_opened_in: int | None = None  # id of the process that first opened a directory


class ChromaDirectory:
    """A Chroma database in a directory; only one process at a time may write to it.

    Raises:
        ConfigurationError: This process was forked from one that had already opened a Chroma directory.
    """

    def __init__(self, path: str | Path) -> None:
        self._client = _client(path)
        # Not closed during a search, nor by a forked child, which would wait for threads of its parent.
        self._finalizer = weakref.finalize(self, _close, self._client, os.getpid())
        self._finalizer.atexit = False

    def collection(self, name: str, *, create: bool) -> Collection:
        """Return a collection, set to ``EF_SEARCH``; a new one is created with cosine distance.

        Raises:
            StoreMismatchError: The collection's configuration names an embedding function.
            ChromaError: The collection does not exist, or is damaged.
        """
        if create:
            found = self._client.get_or_create_collection(
                name, embedding_function=None, configuration={"hnsw": {"space": "cosine", "ef_search": EF_SEARCH}}
            )
        else:
            found = self._client.get_collection(name, embedding_function=None)
        # Only the raw JSON is read: Chroma's accessors (``configuration``, ``schema``) instantiate the function.
        raw = found.configuration_json
        named = [*_embedding_functions(raw), *_embedding_functions(found.get_model().serialized_schema)]
        if named and create:
            raise StoreMismatchError(
                f"The Chroma collection {name!r} names an embedding function ({named[0]!r}), which this "
                "library never loads. Build it again: `agentic-kb repair --rebuild`."
            )
        return found

    def vector_store(self, name: str) -> ChromaVectorStore:
        """Return a collection as a LlamaIndex vector store; it is created if missing, and any name is allowed."""
        from llama_index.vector_stores.chroma import ChromaVectorStore  # noqa: PLC0415 (loads LlamaIndex)

        derived = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]  # Chroma restricts names
        return ChromaVectorStore(chroma_collection=self.collection(derived, create=True))

    def close(self) -> None:
        """Release the files; a second call does nothing."""
        self._finalizer()


def _client(path: str | Path) -> ClientAPI:
    from chromadb.api.client import Client  # noqa: PLC0415 (takes a second)
    from chromadb.config import Settings  # noqa: PLC0415 (same)

    global _opened_in  # noqa: PLW0603 (of the process)
    _opened_in = _opened_in or os.getpid()
    if _opened_in != os.getpid():  # it would wait forever for threads that a fork doesn't copy
        raise ConfigurationError(
            f"This process was forked from {_opened_in}, which had opened a Chroma directory, and can't open one any "
            "more. Open stores only in the children, or start them with 'spawn' (multiprocessing.set_start_method)."
        )
    settings = Settings(
        _env_file=None,  # no setting from a file in the working directory
        anonymized_telemetry=False,
        chroma_api_impl="chromadb.api.rust.RustBindingsAPI",
        is_persistent=True,
        # Resolved: Chroma has one engine per path string, and two engines writing to one directory damage it.
        persist_directory=str(Path(path).resolve()),
    )
    return Client(settings=settings)


def _close(client: ClientAPI, pid: int) -> None:
    if os.getpid() == pid:
        client.close()  # type: ignore[attr-defined]  # of the client's class, not of its interface


def _embedding_functions(configuration: object) -> Iterator[str]:
    """Yield the names of embedding functions in a configuration; the types ``legacy`` and ``unknown`` are skipped."""
    if isinstance(configuration, list):
        for item in configuration:
            yield from _embedding_functions(item)
    if not isinstance(configuration, dict):
        return
    for key, value in configuration.items():
        if key != "embedding_function":
            yield from _embedding_functions(value)
        elif isinstance(value, dict) and value.get("type") in ("legacy", "unknown") and "name" not in value:
            continue
        elif value is not None:
            yield str(value.get("name", value)) if isinstance(value, dict) else str(value)


# -- HNSW graphs ------------------------------------------------------------------------------------------------------


class GraphError(Exception):
    """An HNSW graph can't be read, and is not used again. Raised and handled only inside the store."""


class Graphs:
    """The vector indexes (HNSW graphs) of a store; thread-safe."""

    def __init__(self, path: Path, documents: SqliteDatabase, dimension: int) -> None:
        self._path = path
        self._dimension = dimension
        self._documents = documents
        self._lock = threading.Lock()
        self._opened: dict[str, tuple[ChromaDirectory, Collection]] = {}
        self._counts: dict[str, int | None] = {}

    def count(self, state: SourceState) -> int | None:
        """Return the number of chunks in a source's HNSW graph; None if it is missing or damaged."""
        if state.directory and state.directory not in self._counts:
            count = None if self.fault(state) else int(json.loads(state.files)["rows"])
            self._counts[state.directory] = count
        return self._counts.get(state.directory)

    def outside(self, source: str) -> int:
        """Return the number of chunks missing from a source's HNSW graph plus the deleted chunks still in it."""
        state = self._documents.source_state(source) or SourceState(0)
        held, total = self.count(state), self._documents.count(source)
        there = self._documents.count(source, state.last_id)
        return total if held is None else total - there + held - there

    def fault(self, state: SourceState, *, whole: bool = False) -> str:
        """Return a description of the damage to an HNSW graph; empty if it is intact, or if the source has none.

        With ``whole`` the graph is also opened and searched; otherwise only its file sizes are compared.
        """
        try:
            sizes = dict(json.loads(state.files)["files"]) if state.files else {}
        except (ValueError, KeyError, TypeError, RecursionError):
            return f"the record of the graph {state.directory!r} can't be read"
        for name, size in sizes.items():
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

    def nearest(self, state: SourceState, vector: Floats, count: int) -> list[tuple[int, float]]:
        """Return the nearest chunk ids, some deleted, with cosine distances; raise ``GraphError`` if damaged."""
        try:
            with self._lock:
                if state.directory not in self._opened:
                    opened = ChromaDirectory(self._path / state.directory)
                    self._opened[state.directory] = (opened, opened.collection("graph", create=False))
                _directory, collection = self._opened[state.directory]  # referenced: not closed during the search
            found = collection.query(query_embeddings=vector[None, :], n_results=count, include=["distances"])
            return list(zip(map(int, found["ids"][0]), (found["distances"] or [[]])[0], strict=True))
        except AgenticKBError:  # raised in a forked process
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Chroma's Rust
                raise
            self._counts[state.directory] = None
            raise GraphError(error_message(error)) from error

    def build(self, source: str, progress: Callable[[int], None] | None = None, *, anew: bool) -> None:
        """Build the HNSW graph of a source's current chunks, anew or from a copy of the current graph.

        The caller must have the store's write lock. ``progress`` is called with the number of chunks added so far.
        Raises ``IngestionError`` if the new graph can't be written; the current one remains in use.
        """
        state = self._documents.source_state(source) or SourceState(0)
        made = self._path / uuid.uuid4().hex
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            made.mkdir(mode=0o700)
            if not anew and self.count(state) is not None:
                shutil.copytree(self._path / state.directory, made, dirs_exist_ok=True)
            ids = self._fill(made, source, progress)
            files = json.dumps({"rows": len(ids), "files": _synced(made)})
        except AgenticKBError:
            raise
        except Exception as error:
            shutil.rmtree(made, ignore_errors=True)
            if not anew:  # the current graph may have damage that only its copy's use shows
                self.build(source, progress, anew=True)
                return
            raise IngestionError(
                f"The graph of the source {source!r} can't be built: {type(error).__name__}: {error_message(error)}. "
                f"Its documents are stored: run `agentic-kb repair --store {self._path.parent}` to go on."
            ) from error
        self._documents.put_graph(source, made.name, int(ids[-1]) if len(ids) else 0, files)
        self.remove_unused()

    def _fill(self, made: Path, source: str, progress: Callable[[int], None] | None) -> Ids:
        """Add missing chunks to the graph in ``made``, delete removed ones, and return all chunk ids of the source."""
        directory = ChromaDirectory(made)
        try:
            graph = directory.collection("graph", create=True)
            ids = self._documents.ids(source)
            held = np.array(graph.get(include=[])["ids"], dtype=np.int64)
            gone, new = np.setdiff1d(held, ids).astype(str).tolist(), np.setdiff1d(ids, held)
            for start in range(0, len(gone), _BATCH):
                graph.delete(ids=gone[start : start + _BATCH])
            for start in range(0, len(new), _BATCH):
                rows, vectors = self._documents.vectors(new[start : start + _BATCH], self._dimension)
                graph.add(ids=list(map(str, rows.tolist())), embeddings=np.array(vectors))
                if progress is not None:
                    progress(len(held) + start + len(rows))
        finally:
            directory.close()
        return ids

    def remove_unused(self) -> None:
        """Delete the graph directories that no source uses."""
        named = self._documents.graph_directories()
        for entry in self._path.iterdir() if self._path.is_dir() else ():
            if entry.name not in named:
                shutil.rmtree(entry, ignore_errors=True)
        with self._lock:
            for name in self._opened.keys() - named:
                del self._opened[name]  # closed when its last search has ended

    def close(self) -> None:
        """Close all graphs; they are reopened when needed."""
        with self._lock:
            for directory, _ in self._opened.values():
                directory.close()
            self._opened.clear()


def _synced(directory: Path) -> dict[str, int]:
    """Flush the files of a directory to disk (Chroma does not), and return their sizes in bytes by relative path."""
    found: dict[str, int] = {}
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            found[path.relative_to(directory).as_posix()] = path.stat().st_size
    return found
