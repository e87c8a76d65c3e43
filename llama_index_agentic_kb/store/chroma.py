"""Chroma in directories, imported here alone and late: it takes a second to load. And the graphs of large sources.

Chroma's client builds the embedding function that a collection's configuration names, which in a hostile directory
means loading model code of its choice. Collections are opened without one, and one that names any is refused. A user's
own Chroma server or client is not opened here: see ``sources``.

A graph is a Chroma directory of its own that is written once, in a new place, and then recorded in the database with
the last chunk that it holds and the sizes of its files. It never changes afterwards: readers in any number
of processes open it without a lock, and go to the next one once the database names another. What a process that was
killed left half written is not recorded, and is removed by the next writer.
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
from llama_index_agentic_kb.store.database import DocumentDatabase, Floats, Ids, SourceState

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection
    from llama_index.vector_stores.chroma import ChromaVectorStore

_BATCH: Final = 2_000
_CHANGING: Final = "chroma.sqlite3"
"""The one file that opening a graph writes into."""
_opened_in: int | None = None  # the process that first opened a directory


class ChromaDirectory:
    """A Chroma database in a directory; one process at a time may write into it.

    Args:
        path: The directory; made when missing.

    Raises:
        ConfigurationError: This process was forked from one that had opened a directory.
    """

    def __init__(self, path: str | Path) -> None:
        self._client = _client(path)
        # Not closed while a search is in it, nor by a forked child, which would wait for threads of its parent.
        self._finalizer = weakref.finalize(self, _close, self._client, os.getpid())
        self._finalizer.atexit = False

    def collection(self, name: str, *, create: bool) -> Collection:
        """Return a collection, with cosine distance where it is created here.

        Raises:
            StoreMismatchError: Its configuration names an embedding function.
            ChromaError: It does not exist, or is damaged.
        """
        if not create:
            return self._client.get_collection(name, embedding_function=None)
        found = self._client.get_or_create_collection(
            name, embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
        )
        # Only the raw JSON is read: Chroma's own accessors (``configuration``, ``schema``) build what it names.
        for configuration in (found.configuration_json, found.get_model().serialized_schema):
            for embedding_function in _embedding_functions(configuration):
                raise StoreMismatchError(
                    f"The Chroma collection {name!r} names an embedding function ({embedding_function!r}), which this "
                    "library never loads. Build it again: `agentic-kb repair --rebuild`."
                )
        return found

    def vector_store(self, name: str) -> ChromaVectorStore:
        """Return the collection of any name, created when missing, as a LlamaIndex vector store."""
        from llama_index.vector_stores.chroma import ChromaVectorStore  # noqa: PLC0415 (loads LlamaIndex)

        derived = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]  # Chroma's names are few
        return ChromaVectorStore(chroma_collection=self.collection(derived, create=True))

    def close(self) -> None:
        """Release the files; a second call does nothing."""
        self._finalizer()


def _client(path: str | Path) -> ClientAPI:
    from chromadb.api.client import Client  # noqa: PLC0415 (takes a second)
    from chromadb.config import Settings  # noqa: PLC0415 (same)

    global _opened_in  # noqa: PLW0603 (of the process)
    _opened_in = _opened_in or os.getpid()
    if _opened_in != os.getpid():  # it would wait without end for threads that don't come along
        raise ConfigurationError(
            f"This process was forked from {_opened_in}, which had opened a Chroma directory, and can't open one any "
            "more. Open stores only in the children, or start them with 'spawn' (multiprocessing.set_start_method)."
        )
    settings = Settings(
        _env_file=None,  # no setting from a file in the working directory
        anonymized_telemetry=False,
        chroma_api_impl="chromadb.api.rust.RustBindingsAPI",
        is_persistent=True,
        # Resolved: Chroma shares one engine per path as spelt, and two that write into one directory damage it.
        persist_directory=str(Path(path).resolve()),
    )
    return Client(settings=settings)


def _close(client: ClientAPI, pid: int) -> None:
    if os.getpid() == pid:
        client.close()  # type: ignore[attr-defined]  # of the client's class, not of its interface


def _embedding_functions(configuration: object) -> Iterator[str]:
    """Yield the names of the embedding functions in a configuration; ``legacy`` and ``unknown`` mean none."""
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


# -- graphs -----------------------------------------------------------------------------------------------------------


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
        self._opened: dict[str, tuple[ChromaDirectory, Collection]] = {}
        self._counts: dict[str, int | None] = {}

    def count(self, state: SourceState) -> int | None:
        """Return how many chunks a source's graph holds; None without one, or where it is damaged."""
        if state.directory and state.directory not in self._counts:
            count = None if self.fault(state) else int(json.loads(state.files)["rows"])
            self._counts[state.directory] = count
        return self._counts.get(state.directory)

    def fault(self, state: SourceState, *, whole: bool = False) -> str:
        """Return what is wrong with a graph; empty where nothing is.

        Args:
            state: The source's; without a graph nothing is wrong.
            whole: Whether to open it and search it, too. Else only the sizes of its files are compared.
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
        """Return the nearest chunks of a graph with their cosine distances, best first; some of them may be gone.

        Raises:
            GraphError: It can't be read.
        """
        try:
            with self._lock:
                if state.directory not in self._opened:
                    opened = ChromaDirectory(self._path / state.directory)
                    self._opened[state.directory] = (opened, opened.collection("graph", create=False))
                _directory, collection = self._opened[state.directory]  # held: it is not closed during the search
            found = collection.query(query_embeddings=vector[None, :], n_results=count, include=["distances"])
            return list(zip(map(int, found["ids"][0]), (found["distances"] or [[]])[0], strict=True))
        except AgenticKBError:  # of a forked process
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Chroma's Rust
                raise
            self._counts[state.directory] = None
            raise GraphError(error_message(error)) from error

    def build(self, source: str, progress: Callable[[int], None] | None = None, *, anew: bool) -> None:
        """Build the graph of all chunks that a source has now, for the one who has the right to write.

        Args:
            source: The source.
            progress: Called with the number of chunks added so far.
            anew: Whether to add all chunks to an empty graph; else what is new is added to a copy of the last one.

        Raises:
            IngestionError: It can't be written. The one before stays.
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
            if not anew:  # the last one may be damaged where only its copy's use shows it
                self.build(source, progress, anew=True)
                return
            raise IngestionError(
                f"The graph of the source {source!r} can't be built: {type(error).__name__}: {error_message(error)}. "
                f"Its documents are stored: run `agentic-kb repair --store {self._path.parent}` to go on."
            ) from error
        self._documents.put_graph(source, made.name, int(ids[-1]) if len(ids) else 0, files)
        self.remove_unused()

    def _fill(self, made: Path, source: str, progress: Callable[[int], None] | None) -> Ids:
        """Add what a graph lacks, and delete what is gone; return all the source's ids."""
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
            for directory, _ in self._opened.values():
                directory.close()
            self._opened.clear()


def _synced(directory: Path) -> dict[str, int]:
    """Make the files of a directory durable, which Chroma leaves to the system; return their sizes."""
    found: dict[str, int] = {}
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            found[path.relative_to(directory).as_posix()] = path.stat().st_size
    return found
