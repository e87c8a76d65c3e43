"""The on-disk store of a knowledge base, and its repair."""

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
from llama_index_agentic_kb.store import chroma
from llama_index_agentic_kb.store.access import unprotected
from llama_index_agentic_kb.store.chroma import Graphs
from llama_index_agentic_kb.store.database import BusyError, DocumentDatabase, MetadataValue, SourceInfo
from llama_index_agentic_kb.store.embedding_model import (
    DEFAULT_EMBED_MODEL,
    KNOWN_EMBED_MODELS,
    EmbedModelFingerprint,
    embed_model_fingerprint,
    embed_model_name,
    named_embed_model,
)
from llama_index_agentic_kb.store.scope import scope_file

if TYPE_CHECKING:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import TextNode

    from llama_index_agentic_kb.guard.permissions import Permissions
    from llama_index_agentic_kb.store.lexical import StoredLexicalSearch
    from llama_index_agentic_kb.store.vectors import SourceVectors

Repair: TypeAlias = Literal["never", "auto"]
"""Whether opening a store rebuilds a missing or damaged HNSW graph of a large source ("auto") or not ("never")."""
RepairProgress: TypeAlias = Callable[[int, int, str], None]
"""A function called with the number of processed chunks, the total number of chunks, and the source's name."""

_DOCUMENTS: Final = "documents.db"
_MODEL: Final = "embedding model"


class KnowledgeStore:
    """A store of sources on disk: their documents, and vectors that all come from one embedding model.

        documents.db    all documents, chunks and vectors (SQLite); the indexes are derived from it
        graphs/         the vector index (HNSW graph, Chroma) of each source with more than 20,000 chunks
        lexical/        the lexical indexes (tantivy), one directory per source
        write.lock      the lock of the process that is writing; writer.pid contains its process id

    Open a store with `KnowledgeStore.open`; close it with `close` or as a context manager. Safe to use from many
    threads, and from many processes while one of them ingests: a document is searchable once it is stored. A forked
    child must open the store again, which fails if its parent has used an HNSW graph; start it with "spawn" instead.
    A new store is readable only by its owner.
    """

    def __init__(
        self,
        path: Path,
        documents: DocumentDatabase,
        fingerprint: EmbedModelFingerprint,
        embed_model: BaseEmbedding | str | None,
    ) -> None:
        """Create a store object from its parts; use `open` instead, which checks that they match."""
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
        embed_model: BaseEmbedding | str | None = None,
        create: bool = False,
        repair: Repair = "never",
    ) -> KnowledgeStore:
        """Open a store.

        Args:
            path: The store's directory.
            embed_model: The embedding model, which must be the one the store was created with, or its name: on the
                Hugging Face hub, of a local folder, or "multilingual". A name is loaded on first use. Defaults to the
                store's own if this library knows it, and to all-MiniLM-L6-v2 for a new store.
            create: Whether to create an empty store if none exists.
            repair: Whether to rebuild a missing or damaged vector index (HNSW graph) of a large source. Defaults to
                "never": up to 200,000 chunks are searched without a graph; beyond that, a search raises an error that
                recommends ``agentic-kb repair``. "auto" rebuilds it while opening, about 1 s for each thousand chunks.

        Returns:
            The open store.

        Raises:
            StoreMismatchError: The store was created with another embedding model than the given one.
            StoreDamagedError: The document database is damaged or missing; the message names the remedy.
            ConfigurationError: The path contains no store, other files, or a store of an incompatible release.
            IngestionError: An HNSW graph can't be built, for example because the disk is full.
        """
        if repair not in ("never", "auto"):
            raise ConfigurationError(f"repair is {repair!r}; it is 'never' or 'auto'.")
        directory = Path(path).resolve()
        new: EmbedModelFingerprint | None = None
        if create and not (directory / _DOCUMENTS).exists():
            _check_empty(directory)
            embed_model = _loaded(embed_model or DEFAULT_EMBED_MODEL)
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
            if made_with is None:  # new, or the process that created it died right after
                made_with = new or embed_model_fingerprint(_loaded(embed_model or DEFAULT_EMBED_MODEL))
                documents.put_state(_MODEL, made_with.to_json())
            if embed_model is not None:
                _check_embed_model(directory, made_with, embed_model)
            store = cls(directory, documents, made_with, embed_model)
            if repair == "auto":
                with suppress(BusyError), store.writing():  # the writing process builds the graphs itself
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
        """Close all files; a second call does nothing. Indexes obtained from the store become unusable."""
        try:
            self._documents.check_process()
        except ConfigurationError:
            return  # forked: the files belong to the parent, and its threads may have the locks
        with self._lock:
            self._closed = True
            for opened in (self._indexes, self._lexical, self._vectors):
                opened.clear()
            self._graphs.close()
            self._documents.close()

    @property
    def embed_model(self) -> BaseEmbedding:
        """The store's embedding model; a model that was given by its name, or not at all, is loaded on first use.

        Raises:
            StoreMismatchError: The store was created with another model.
            ConfigurationError: The model can't be loaded.
        """
        with self._lock:
            if self._embed_model is None or isinstance(self._embed_model, str):
                known = self.fingerprint.name in KNOWN_EMBED_MODELS
                name = self._embed_model or (self.fingerprint.name if known else DEFAULT_EMBED_MODEL)
                _check_embed_model(self.path, self.fingerprint, name)
                model = _loaded(name)
                _check_embed_model(self.path, self.fingerprint, model)
                self._embed_model = model
            return self._embed_model

    @property
    def documents(self) -> DocumentDatabase:
        """The database of all documents, chunks and vectors."""
        self._documents.check_process()
        if self._closed:
            raise ConfigurationError(f"The store {str(self.path)!r} is closed.")
        return self._documents

    def sources(self) -> list[SourceInfo]:
        """Return the sources in order of name, with descriptions and counts; loads neither the model nor Chroma."""
        return self.documents.sources()

    def index(self, source: str) -> VectorStoreIndex:
        """Return the vector index of a source with the store's embedding model; each call returns the same object.

        Raises:
            ConfigurationError: The source does not exist.
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
        """Return the dense search of a source; each call returns the same object."""
        from llama_index_agentic_kb.store.vectors import SourceVectors  # noqa: PLC0415 (loads LlamaIndex)

        with self._lock:
            if source not in self._vectors:
                self._vectors[source] = SourceVectors(self, source, self._graphs)
            return self._vectors[source]

    def lexical(self, source: str) -> StoredLexicalSearch:
        """Return the lexical search (BM25) of a source; its index is updated when it is searched.

        Raises:
            ConfigurationError: The source does not exist.
        """
        from llama_index_agentic_kb.store.lexical import StoredLexicalSearch  # noqa: PLC0415 (loads tantivy)

        self._check_source(source)
        with self._lock:
            if source not in self._lexical:
                self._lexical[source] = StoredLexicalSearch(self, source, self.path / "lexical")
            return self._lexical[source]

    def nodes(self, source: str) -> list[TextNode]:
        """Return all nodes of a source in order of document and position, without embeddings.

        Raises:
            ConfigurationError: The source does not exist.
        """
        from llama_index_agentic_kb.store.chunking import chunk_to_node  # noqa: PLC0415 (loads LlamaIndex)

        self._check_source(source)
        return [chunk_to_node(chunk) for chunk in self.documents.chunks(source)]

    def metadata(self, source: str) -> Iterator[tuple[str, dict[str, MetadataValue]]]:
        """Yield the document id and metadata of each chunk of a source, grouped by document.

        Raises:
            ConfigurationError: The source does not exist.
        """
        self._check_source(source)
        return ((f"{source}/{path}", metadata) for path, metadata in self.documents.metadata(source))

    def check_permissions(self, source: str, permissions: Permissions) -> None:
        """Check that the permission fields of a source's documents can't have been set by their files.

        Args:
            source: The source's name.
            permissions: The permission fields to check.

        Raises:
            ConfigurationError: Files of the source may have set one of the fields; the message names the remedy.
        """
        if names := unprotected(permissions, self.documents.settings(source)):
            raise ConfigurationError(
                f"permissions: files of the source {source!r} may have set {', '.join(names)} themselves. Ingest them "
                "again with ingest(..., permissions=, stamp=), or --tenant and --group."
            )

    def remove_source(self, source: str) -> None:
        """Delete a source with its documents, vectors and indexes.

        Raises:
            ConfigurationError: The source does not exist.
            IngestionError: Another process is writing to the store.
        """
        with self.writing(), self._lock:
            self.lexical(source).remove()
            self.documents.delete_source(source)
            self._graphs.remove_unused()
            scope_file(self, source).unlink(missing_ok=True)
            kept: dict[str, Any]
            for kept in (self._indexes, self._lexical, self._vectors):
                kept.pop(source, None)

    @contextmanager
    def writing(self, wait: float = 0.0) -> Iterator[None]:
        """Acquire the store's write lock, which excludes all other processes and threads, for the ``with`` block.

        The operating system releases the lock if the process dies.

        Args:
            wait: The seconds to wait while another process has the lock. Defaults to 0.

        Yields:
            None, inside the lock.

        Raises:
            IngestionError: Another process or thread has the lock; the message contains its process id.
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

    def outside_graph(self, source: str) -> int:
        """Return the number of chunks missing from a source's HNSW graph plus the deleted chunks still in it."""
        return self._graphs.outside(source)

    def update_graph(self, source: str) -> None:
        """Update a source's HNSW graph if over 20,000 chunks are missing or deleted; requires the write lock.

        Raises:
            IngestionError: The graph can't be written.
        """
        if self.outside_graph(source) > chroma.EXACT_ROWS:
            self._graphs.build(source, anew=False)

    def mend(self, *, rebuild_all: bool, progress: RepairProgress | None) -> str:
        """Update or repair the HNSW graphs and lexical indexes; the caller must have the write lock.

        Args:
            rebuild_all: Whether to rebuild all indexes; otherwise only missing or damaged ones.
            progress: A function called after each batch of chunks; see ``RepairProgress``.

        Returns:
            A description of the damage found; empty if there was none.
        """
        found = []
        for info in self.sources():
            tell, lexical = partial(_tell, progress, info), self.lexical(info.name)
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

    def _check_source(self, source: str) -> None:
        if self.documents.source_state(source) is None:
            names = [info.name for info in self.sources()]
            raise ConfigurationError(
                f"The store {str(self.path)!r} has no source {source!r}; it has: {', '.join(names) or 'none yet'}."
            )


@dataclass(frozen=True)
class RepairReport:
    """The result of a repair.

    Args:
        fault: A description of the damage found; empty if there was none.
        rebuilt: Whether HNSW graphs or lexical indexes were rebuilt.
        documents: The number of documents in the store.
        chunks: The number of chunks in the store.
        seconds: The duration of the repair in seconds.
    """

    fault: str
    rebuilt: bool
    documents: int
    chunks: int
    seconds: float


def repair_store(
    path: str | Path, *, rebuild_all: bool = False, wait: float = 0.0, progress: RepairProgress | None = None
) -> RepairReport:
    """Check a store, and rebuild its damaged or missing HNSW graphs and lexical indexes.

    A repair needs no embedding model, can be interrupted and run again, and never changes documents or vectors.

    Args:
        path: The store's directory.
        rebuild_all: Whether to rebuild all indexes, even intact ones.
        wait: The seconds to wait while another process is writing to the store.
        progress: A function called after each batch of chunks; see ``RepairProgress``.

    Returns:
        The report of damage found and indexes rebuilt.

    Raises:
        StoreDamagedError: The document database is damaged or missing.
        ConfigurationError: The path contains no store.
        IngestionError: Another process is writing to the store, or the disk is full.
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
    """Open the document database of an existing store.

    Raises:
        StoreDamagedError: The database is damaged, or missing although the store's indexes exist.
        ConfigurationError: The directory contains no store.
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
    """Raise ``ConfigurationError`` if the path of a new store is a file or a non-empty directory."""
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


def _loaded(embed_model: BaseEmbedding | str) -> BaseEmbedding:
    return named_embed_model(embed_model) if isinstance(embed_model, str) else embed_model


def _check_embed_model(directory: Path, made_with: EmbedModelFingerprint, embed_model: BaseEmbedding | str) -> None:
    """Check that a store was created with a model; of a model that is not loaded, only the name is compared.

    Raises:
        StoreMismatchError: The model has another name, dimension or weights than the one the store was created with.
    """
    found: EmbedModelFingerprint | str = embed_model_name(embed_model)
    if found == made_with.name:
        if isinstance(embed_model, str):
            return
        found = embed_model_fingerprint(embed_model)
        if made_with.agrees_with(found):
            return
    found = f"{found} with other weights" if found == made_with else found
    raise StoreMismatchError(
        f"The store {str(directory)!r} was made with the embedding model {made_with} and is opened with {found}: "
        "their vectors can't be compared. Pass the model it was made with (embed_model=, --embed-model), or make a new "
        "store for the other one with `agentic-kb ingest`."
    )
