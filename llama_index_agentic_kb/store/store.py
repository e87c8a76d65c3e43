"""The directory that a knowledge base lives in."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

from filelock import FileLock, Timeout

from llama_index_agentic_kb.errors import ConfigurationError, IngestionError, StoreDamagedError, StoreMismatchError
from llama_index_agentic_kb.store.access import unprotected
from llama_index_agentic_kb.store.chroma import Graphs
from llama_index_agentic_kb.store.database import BusyError, DocumentDatabase, MetadataValue, SourceInfo
from llama_index_agentic_kb.store.embedding_model import (
    DEFAULT_EMBED_MODEL,
    EmbedModelFingerprint,
    default_embed_model,
    embed_model_fingerprint,
    embed_model_name,
)

if TYPE_CHECKING:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import TextNode

    from llama_index_agentic_kb.guard.permissions import Permissions
    from llama_index_agentic_kb.store.lexical import StoredLexicalSearch
    from llama_index_agentic_kb.store.vectors import SourceVectors

Repair: TypeAlias = Literal["never", "auto"]
"""What opening a store does where the graph of a large source is missing or damaged: nothing, or build it again."""
RepairProgress: TypeAlias = Callable[[int, int, str], None]
"""Called with the number of chunks done, the number of all chunks, and the source that they are of."""

_DOCUMENTS: Final = "documents.db"
_MODEL: Final = "embedding model"


class KnowledgeStore:
    """Sources on disk: their documents, their vectors, and the one embedding model that all vectors come from.

        documents.db    every document, chunk and vector (SQLite): all the rest is derived from it
        graphs/         for each source of more than 20,000 chunks, a graph over its vectors (Chroma)
        lexical/        every word (tantivy), a directory for each source
        write.lock      held by the one process that writes; writer.pid names it

    Open one with `KnowledgeStore.open`; close it with `close` or as a context manager. Safe to use from many threads,
    and from any number of processes while one of them ingests: a document is found once it is stored. A process that
    is forked from one that has opened a store must open it anew, and can only if its parent has not used a graph: else
    start it with "spawn". A new store is readable by its owner alone.
    """

    def __init__(
        self,
        path: Path,
        documents: DocumentDatabase,
        fingerprint: EmbedModelFingerprint,
        embed_model: BaseEmbedding | None,
    ) -> None:
        """Use `open`, which checks that all belong together."""
        self.path = path
        self.fingerprint = fingerprint
        self._documents = documents
        self._graphs = Graphs(path / "graphs", documents, fingerprint.dimension)
        self._lock = threading.RLock()
        self._embed_model = embed_model
        self._vectors: dict[str, SourceVectors] = {}
        self._indexes: dict[str, VectorStoreIndex] = {}
        self._lexical: dict[str, StoredLexicalSearch] = {}
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        embed_model: BaseEmbedding | None = None,
        create: bool = False,
        repair: Repair = "never",
    ) -> KnowledgeStore:
        """Open a store.

        Args:
            path: The store's directory.
            embed_model: The model to embed with; must be the one that the store was made with. Default:
                all-MiniLM-L6-v2 (see `default_embed_model`), loaded when it is first needed.
            create: Make an empty store where none exists.
            repair: What to do where the graph of a large source is missing or damaged, as after a killed ingestion.
                "never", the default, does nothing: a program that answers questions should not stand still unasked.
                Up to 200,000 chunks are searched without a graph; beyond, a search raises an error that names
                ``agentic-kb repair``. "auto" builds it here, about 1 s for each thousand chunks.

        Returns:
            The open store.

        Raises:
            StoreMismatchError: The store was made with another embedding model.
            StoreDamagedError: Its documents are damaged or gone; the message names the remedy.
            ConfigurationError: There is no store at ``path``, something else is, or its format is of another release.
            IngestionError: A graph can't be built: the disk is full.
        """
        if repair not in ("never", "auto"):
            raise ConfigurationError(f"repair is {repair!r}; it is 'never' or 'auto'.")
        directory = Path(path).resolve()
        new: EmbedModelFingerprint | None = None
        if create and not (directory / _DOCUMENTS).exists():
            _check_empty(directory)
            embed_model = embed_model or default_embed_model()
            new = embed_model_fingerprint(embed_model)  # first: a model that fails leaves no store
            try:
                directory.mkdir(parents=True, exist_ok=True)
                directory.chmod(0o700)
            except OSError as error:
                raise ConfigurationError(f"No store can be made in {str(directory)!r}: {error.strerror}.") from error
            documents = DocumentDatabase(directory / _DOCUMENTS)
        else:
            documents = _open_documents(path)
        try:
            made_with = _fingerprint(documents)
            if made_with is None:  # new, or the process that made it died right after
                made_with = new or embed_model_fingerprint(embed_model or default_embed_model())
                documents.put_state(_MODEL, made_with.to_json())
            _check_embed_model(directory, made_with, embed_model)
            store = cls(directory, documents, made_with, embed_model)
            if repair == "auto":
                with suppress(BusyError), store.writing():  # who writes does it itself
                    for info in store.sources():
                        store.update_graph(info.name)
        except BaseException:
            documents.close()
            raise
        return store

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()

    def close(self) -> None:
        """Release all files; a second call does nothing. Indexes taken from the store can't be used afterwards."""
        try:
            self._documents.check_process()
        except ConfigurationError:
            return  # forked: the files are the parent's, and its threads may hold the locks
        with self._lock:
            self._closed = True
            self._indexes.clear()
            self._lexical.clear()
            self._graphs.close()
            self._documents.close()

    @property
    def embed_model(self) -> BaseEmbedding:
        """The embedding model; the default one is loaded here, at first use.

        Raises:
            StoreMismatchError: The default model has another dimension than the store's vectors.
            ConfigurationError: The default model can't be loaded.
        """
        with self._lock:
            if self._embed_model is None:
                model = default_embed_model()
                _check_embed_model(self.path, self.fingerprint, model)
                self._embed_model = model
            return self._embed_model

    @property
    def documents(self) -> DocumentDatabase:
        """The record of all documents, chunks and vectors."""
        self._documents.check_process()
        if self._closed:
            raise ConfigurationError(f"The store {str(self.path)!r} is closed.")
        return self._documents

    def sources(self) -> list[SourceInfo]:
        """Return the sources by name, with descriptions and counts; loads neither model nor Chroma."""
        return self.documents.sources()

    def index(self, source: str) -> VectorStoreIndex:
        """Return the vector index of a source, with the store's embedding model; the same object for all threads.

        Raises:
            ConfigurationError: There is no such source.
        """
        from llama_index.core import VectorStoreIndex  # noqa: PLC0415 (takes seconds)

        from llama_index_agentic_kb.store.vectors import StoreVectorStore  # noqa: PLC0415 (loads LlamaIndex)

        self._check_source(source)
        with self._lock:
            if source not in self._indexes:
                vectors = StoreVectorStore(self.vectors(source), self.lexical(source))
                self._indexes[source] = VectorStoreIndex.from_vector_store(vectors, embed_model=self.embed_model)
            return self._indexes[source]

    def vectors(self, source: str) -> SourceVectors:
        """Return the dense search of a source; the same object at each call."""
        from llama_index_agentic_kb.store.vectors import SourceVectors  # noqa: PLC0415 (loads LlamaIndex)

        with self._lock:
            if source not in self._vectors:
                self._vectors[source] = SourceVectors(self, source, self._graphs)
            return self._vectors[source]

    def lexical(self, source: str) -> StoredLexicalSearch:
        """Return the lexical search (BM25) of a source; its index is brought up to date when it is searched.

        Raises:
            ConfigurationError: There is no such source.
        """
        from llama_index_agentic_kb.store.lexical import StoredLexicalSearch  # noqa: PLC0415 (loads LlamaIndex)

        self._check_source(source)
        with self._lock:
            if source not in self._lexical:
                self._lexical[source] = StoredLexicalSearch(self, source, self.path / "lexical")
            return self._lexical[source]

    def nodes(self, source: str) -> list[TextNode]:
        """Return all nodes of a source by document and place, as they stand in its index, without embeddings.

        Raises:
            ConfigurationError: There is no such source.
        """
        from llama_index_agentic_kb.store.chunking import chunk_to_node  # noqa: PLC0415 (loads LlamaIndex)

        self._check_source(source)
        return [chunk_to_node(chunk) for chunk in self.documents.chunks(source)]

    def metadata(self, source: str) -> Iterator[tuple[str, dict[str, MetadataValue]]]:
        """Yield the document id and the metadata of each chunk of a source, a document's chunks one after the other.

        Raises:
            ConfigurationError: There is no such source.
        """
        self._check_source(source)
        return ((f"{source}/{path}", metadata) for path, metadata in self.documents.metadata(source))

    def check_permissions(self, source: str, permissions: Permissions) -> None:
        """Check that documents have not said themselves who may see them.

        Args:
            source: The source's name.
            permissions: The fields that say so.

        Raises:
            ConfigurationError: Files of the source may have set one of the fields; the message names the remedy.
        """
        if names := unprotected(permissions, self.documents.settings(source)):
            raise ConfigurationError(
                f"permissions: files of the source {source!r} may have set {', '.join(names)} themselves. Ingest them "
                "again with ingest(..., permissions=, stamp=), or --tenant and --group."
            )

    def remove_source(self, source: str) -> None:
        """Remove a source with its documents and vectors.

        Raises:
            ConfigurationError: There is no such source.
            IngestionError: Another process is writing into the store.
        """
        with self.writing(), self._lock:
            self.lexical(source).remove()
            self.documents.delete_source(source)
            self._graphs.remove_unused()
            kept: dict[str, Any]
            for kept in (self._indexes, self._lexical, self._vectors):
                kept.pop(source, None)

    @contextmanager
    def writing(self, wait: float = 0.0) -> Iterator[None]:
        """Hold the only right to change the store, among all processes and threads.

        The operating system returns it when its process dies, however it dies.

        Args:
            wait: Seconds to wait for another process that has it.

        Yields:
            Nothing; the right is held inside the ``with`` block.

        Raises:
            IngestionError: Another process or thread has it; the message names its pid.
        """
        path, pid = self.documents.path.with_name("write.lock"), self.path / "writer.pid"
        lock = FileLock(path, timeout=wait, mode=0o600, thread_local=False)
        try:
            lock.acquire(poll_interval=0.02)
            pid.touch(0o600)
            pid.write_text(str(os.getpid()), "ascii")
        except Timeout:
            holder = pid.read_text("ascii", "replace") if pid.exists() else "unknown"
            raise BusyError(
                f"Process {holder} is writing into the store {str(self.path)!r}. Wait for it to end (wait=SECONDS, "
                "--wait SECONDS), or end it, then run this again."
            ) from None
        except OSError as error:
            lock.release()
            raise IngestionError(f"{str(path)!r} can't be written: {error.strerror}.") from error
        try:
            yield
        finally:
            lock.release()

    def update_graph(self, source: str) -> None:
        """Build the graph of a source where too many chunks are outside of it; for the one who has the right to write.

        Raises:
            IngestionError: It can't be written.
        """
        from llama_index_agentic_kb.store import vectors  # noqa: PLC0415 (loads LlamaIndex)

        if self.vectors(source).outside_graph() > vectors.EXACT_ROWS:
            self._graphs.build(source, anew=False)

    def mend(self, *, rebuild_all: bool, progress: RepairProgress | None) -> str:
        """Bring graphs and lexical indexes in step, for the one who has the right to write.

        Args:
            rebuild_all: Whether to build everything again; else only what is damaged or missing.
            progress: Called after each batch of chunks.

        Returns:
            What was damaged; empty where nothing was.
        """
        from llama_index_agentic_kb.store import vectors  # noqa: PLC0415 (loads LlamaIndex)

        found = []
        for info in self.sources():
            tell, lexical = partial(_tell, progress, info), self.lexical(info.name)
            state = self.documents.source_state(info.name)
            graph = "" if state is None else self._graphs.fault(state, whole=True)
            if (graph or rebuild_all) and info.chunks > vectors.EXACT_ROWS:
                self._graphs.build(info.name, tell, anew=True)
            else:
                self.update_graph(info.name)
            words = lexical.fault()
            lexical.update(words or ("it is to be built again" if rebuild_all else ""))
            found += [graph, words]
            tell(info.chunks)
        return "; ".join(filter(None, found))

    def _check_source(self, source: str) -> None:
        names = [info.name for info in self.sources()]
        if source not in names:
            raise ConfigurationError(
                f"The store {str(self.path)!r} has no source {source!r}; it has: {', '.join(names) or 'none yet'}."
            )


@dataclass(frozen=True)
class RepairReport:
    """What a repair found and did.

    Args:
        fault: What was wrong; empty where nothing was.
        rebuilt: Whether graphs and lexical indexes were built again.
        documents: How many documents the store has.
        chunks: How many chunks.
        seconds: How long it took.
    """

    fault: str
    rebuilt: bool
    documents: int
    chunks: int
    seconds: float


def repair_store(
    path: str | Path, *, rebuild_all: bool = False, wait: float = 0.0, progress: RepairProgress | None = None
) -> RepairReport:
    """Read a store, and build again what is damaged or missing of graphs and lexical indexes.

    It needs no embedding model, may be killed and run again, and never changes documents or vectors.

    Args:
        path: The store's directory.
        rebuild_all: Whether to build everything again, whatever is found.
        wait: Seconds to wait for another process that is writing into the store.
        progress: Called after each batch of chunks.

    Returns:
        What was found and done.

    Raises:
        StoreDamagedError: The documents themselves are damaged.
        ConfigurationError: There is no store at ``path``.
        IngestionError: Another process is writing into the store, or the disk is full.
    """
    started = time.monotonic()
    documents = _open_documents(path)
    fingerprint = _fingerprint(documents) or EmbedModelFingerprint("", 0)
    with KnowledgeStore(documents.path.parent, documents, fingerprint, None) as store, store.writing(wait):
        documents.check()
        fault = store.mend(rebuild_all=rebuild_all, progress=progress)
        sources = store.sources()
    return RepairReport(
        fault=fault,
        rebuilt=bool(fault) or rebuild_all,
        documents=sum(info.documents for info in sources),
        chunks=sum(info.chunks for info in sources),
        seconds=time.monotonic() - started,
    )


def _tell(progress: RepairProgress | None, info: SourceInfo, done: int) -> None:
    if progress is not None:
        progress(done, info.chunks, info.name)


def _open_documents(path: str | Path) -> DocumentDatabase:
    """Open the database of a store that is there.

    Raises:
        StoreDamagedError: It is damaged, or gone from among the rest.
        ConfigurationError: There is no store.
    """
    directory = Path(path).resolve()
    documents = directory / _DOCUMENTS
    if documents.exists():
        return DocumentDatabase(documents)
    if any((directory / name).exists() for name in ("graphs", "lexical")):
        raise StoreDamagedError(
            f"{str(documents)!r} is gone, and with it the store's documents. Restore it, or make the "
            "store again with `agentic-kb ingest` in a directory of its own."
        )
    raise ConfigurationError(
        f"There is no store in {str(directory)!r}. Make one with `agentic-kb ingest FOLDER --store {path}`."
    )


def _check_empty(directory: Path) -> None:
    """Raise ``ConfigurationError`` where a store would be made among other files."""
    if directory.exists() and not directory.is_dir():
        raise ConfigurationError(f"{str(directory)!r} is a file; a store is a directory.")
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigurationError(
            f"{str(directory)!r} holds other files and no store. Choose a directory of its own for the store."
        )


def _fingerprint(documents: DocumentDatabase) -> EmbedModelFingerprint | None:
    made_with = documents.state(_MODEL)
    try:
        return None if made_with is None else EmbedModelFingerprint.from_json(made_with)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise StoreDamagedError(
            f"{str(documents.path)!r} does not say which model made its vectors: {type(error).__name__}. Restore it, "
            "or make the store again with `agentic-kb ingest`."
        ) from error


def _check_embed_model(directory: Path, made_with: EmbedModelFingerprint, embed_model: BaseEmbedding | None) -> None:
    """Check that a store's vectors come from a model; names first, for measuring the dimension loads or calls it.

    Raises:
        StoreMismatchError: It has another name, another dimension or other weights.
    """
    found: EmbedModelFingerprint | str = DEFAULT_EMBED_MODEL if embed_model is None else embed_model_name(embed_model)
    if found == made_with.name:
        if embed_model is None:
            return
        found = embed_model_fingerprint(embed_model)
        if made_with.agrees_with(found):
            return
    found = f"{found} with other weights" if found == made_with else found
    raise StoreMismatchError(
        f"The store {str(directory)!r} was made with the embedding model {made_with} and is opened with {found}: "
        "their vectors can't be compared. Pass embed_model= the model it was made with, or make a new store for the "
        "other one with `agentic-kb ingest`."
    )
