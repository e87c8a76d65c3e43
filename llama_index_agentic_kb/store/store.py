"""The store of a knowledge base, in a directory or in PostgreSQL, and its repair."""

from __future__ import annotations

import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypeAlias, TypeVar

from llama_index_agentic_kb._types import Closing
from llama_index_agentic_kb.errors import (
    ConfigurationError,
    IngestionError,
    RetrievalError,
    StoreDamagedError,
    StoreMismatchError,
)
from llama_index_agentic_kb.store.database import BusyError, DocumentDatabase, SourceReader
from llama_index_agentic_kb.store.embedding_model import (
    DEFAULT_EMBED_MODEL,
    KNOWN_EMBED_MODELS,
    EmbedModelFingerprint,
    embed_model_fingerprint,
    embed_model_name,
    named_embed_model,
)
from llama_index_agentic_kb.store.files import unprotected

if TYPE_CHECKING:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import TextNode

    from llama_index_agentic_kb.guard.permissions import Permissions
    from llama_index_agentic_kb.search.lexical import LexicalSearch
    from llama_index_agentic_kb.search.prototypes import ScopeIndex
    from llama_index_agentic_kb.store.directory import DirectoryStore
    from llama_index_agentic_kb.store.postgres import PostgresStore
    from llama_index_agentic_kb.store.sql import SqlDatabase
    from llama_index_agentic_kb.store.vectors import StoreVectorStore

T = TypeVar("T")

Repair: TypeAlias = Literal["never", "auto"]
"""Whether opening a store rebuilds a missing or damaged HNSW graph of a large source ("auto") or not ("never")."""
RepairProgress: TypeAlias = Callable[[int, int, str], None]
"""A function called with the number of processed chunks, the total number of chunks, and the source's name."""

_MODEL: Final = "embedding model"


class KnowledgeStore(DocumentDatabase, Closing):
    """A store of sources: their documents, and vectors that all come from one embedding model.

    A store is a directory (``store.directory``) or a PostgreSQL database (``store.postgres``). Open it with
    `KnowledgeStore.open`; close it with `close` or as a context manager. Safe to use from many threads and processes:
    a document is searchable once it is stored.
    """

    shared: ClassVar[bool] = False  # whether several machines may write to the store

    def __init__(self, database: SqlDatabase, location: str, timeout: float) -> None:
        """Create a store object over its database; use `open` instead, which checks its embedding model."""
        super().__init__(database, location, timeout)
        self.fingerprint = EmbedModelFingerprint("", 0)
        self._lock = threading.RLock()
        self._embed_model: BaseEmbedding | str | None = None
        self._opened: dict[str, dict[Callable[..., object], Any]] = {}

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        embed_model: BaseEmbedding | str | None = None,
        create: bool = False,
        repair: Repair = "never",
    ) -> Self:
        """Open a store.

        Args:
            path: The store's directory, or the URL of a PostgreSQL database: ``postgresql://user@host/database``.
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
        new: EmbedModelFingerprint | None = None
        store_class = _class_of(path)
        if create and store_class.is_new(path):
            embed_model = _loaded(embed_model or DEFAULT_EMBED_MODEL)
            new = embed_model_fingerprint(embed_model)  # first: a model that fails leaves no store
        store: KnowledgeStore = store_class(path, create=create)
        try:
            assert isinstance(store, cls)
            made_with = _fingerprint(store)
            if made_with is None:  # new, or the process that created it died right after
                found = new or embed_model_fingerprint(_loaded(embed_model or DEFAULT_EMBED_MODEL))
                store._put_state(_MODEL, found.to_json())
                made_with = _fingerprint(store) or found
            if embed_model is not None:
                _check_embed_model(store.location, made_with, embed_model)
            store.fingerprint, store._embed_model = made_with, embed_model
            if repair == "auto":
                with suppress(BusyError), store.writing():  # the writing process builds the graphs itself
                    for info in store.sources():
                        store.update_graph(info.name)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close the store; a second call does nothing. Indexes obtained from it become unusable."""
        with self._lock:
            self._closed = True
            self._opened.clear()
            self._database.close()

    @property
    def embed_model(self) -> BaseEmbedding:
        """The store's embedding model, loaded on first use; raises errors as `open`."""
        with self._lock:
            if self._embed_model is None or isinstance(self._embed_model, str):
                known = self.fingerprint.name in KNOWN_EMBED_MODELS
                name = self._embed_model or (self.fingerprint.name if known else DEFAULT_EMBED_MODEL)
                _check_embed_model(self.location, self.fingerprint, name)
                model = _loaded(name)
                _check_embed_model(self.location, self.fingerprint, model)
                self._embed_model = model
            return self._embed_model

    @property
    def documents(self) -> Self:
        """The store itself, which is its own database."""
        return self

    def index(self, source: str) -> VectorStoreIndex:
        """Return the vector index of a source; raise ``ConfigurationError`` if the source does not exist."""
        self._existing_state(source)
        return self._once(_index, source)

    def _once(self, make: Callable[[Self, str], T], source: str) -> T:
        """Return what a function makes of a source, made at the first call."""
        with self._lock:
            opened = self._opened.setdefault(source, {})
            if make not in opened:
                opened[make] = make(self, source)
            found: T = opened[make]
            return found

    def reader(self, source: str) -> SourceReader:
        """Return the reader of a source's vectors, from which its scope index is made."""
        return SourceReader(self, source)

    def scopes(self) -> dict[str, ScopeIndex]:
        """Return the scope indexes by source, up to date; sources without a readable one are left out."""
        made: dict[str, ScopeIndex] = {}
        for info in self.sources():
            with suppress(RetrievalError):
                index = self.load_scope(info.name)
                if index is None:
                    continue
                reader = self.reader(info.name)
                if index.version != reader.version():
                    index = index.updated(reader)
                    with suppress(IngestionError):  # a store that can't be written to
                        self.save_scope(info.name, index)
                made[info.name] = index
        return made

    def nodes(self, source: str) -> list[TextNode]:
        """Return all nodes of a source in order of document and position; see `index` for the errors."""
        from llama_index_agentic_kb.store.chunking import chunk_to_node  # noqa: PLC0415 (loads LlamaIndex)

        self._existing_state(source)
        return [chunk_to_node(chunk) for chunk in self.chunks(source)]

    def check_permissions(self, source: str, permissions: Permissions) -> None:
        """Raise ``ConfigurationError`` if the permission fields of a source's documents may come from their files."""
        rows = self._rows("SELECT DISTINCT settings FROM documents WHERE source = ?", (source,))
        if names := unprotected(permissions, (settings for (settings,) in rows)):
            raise ConfigurationError(
                f"permissions: files of the source {source!r} may have set {', '.join(names)} themselves. Ingest them "
                "again with ingest(..., permissions=, stamp=), or --tenant and --group."
            )

    def remove_source(self, source: str) -> None:
        """Delete a source; raise ``ConfigurationError`` if there is none, ``IngestionError`` while others write."""
        with self.writing(), self._lock:
            self._existing_state(source)
            self._change("DELETE FROM sources WHERE name = ?", (source,), of=source)
            self._clean(source)
            self._opened.pop(source, None)

    # -- of each kind of store --------------------------------------------------------------------------------------

    @classmethod
    def is_new(cls, path: str | Path) -> bool:  # noqa: ARG003 (of a directory)
        """Return whether there is surely no store yet; raise ``ConfigurationError`` if there can be none."""
        return False

    @abstractmethod
    def vectors(self, source: str) -> StoreVectorStore:
        """Return the dense search of a source; each call returns the same object."""

    @abstractmethod
    def lexical(self, source: str) -> LexicalSearch:
        """Return the lexical search of a source; each call returns the same object."""

    def _clean(self, source: str) -> None:
        """Delete what is derived from a deleted source."""

    @abstractmethod
    def writing(self, wait: float = 0.0) -> AbstractContextManager[None]:
        """Return a ``with`` block for writing: of one process at a time in a directory, of many in PostgreSQL.

        If another process was writing for ``wait`` seconds, ``IngestionError`` contains its process id.
        """

    @abstractmethod
    def update_indexes(self, source: str) -> None:
        """Update what is derived from a source's documents, after some have changed; inside `writing`."""

    @abstractmethod
    def update_graph(self, source: str) -> None:
        """Update a source's HNSW graph if it has many chunks outside of it; inside `writing`."""

    @abstractmethod
    def mend(self, *, rebuild_all: bool, progress: RepairProgress) -> str:
        """Rebuild all indexes, or the missing and damaged ones; return a description of the damage, empty if none."""

    @abstractmethod
    def size(self) -> int:
        """Return the size in bytes."""

    @abstractmethod
    def load_scope(self, source: str) -> ScopeIndex | None:
        """Return the scope index of a source, if it has one; raise ``RetrievalError`` if it is damaged."""

    @abstractmethod
    def save_scope(self, source: str, index: ScopeIndex) -> None:
        """Keep the scope index of a source; raise ``IngestionError`` if it can't be written."""


@dataclass(frozen=True)
class RepairReport:
    """The result of a repair, with the numbers of documents and chunks in the store."""

    fault: str
    """A description of the damage found; empty if there was none."""
    rebuilt: bool
    """Whether HNSW graphs or lexical indexes were rebuilt."""
    documents: int
    chunks: int
    seconds: float


def repair_store(
    path: str | Path, *, rebuild_all: bool = False, wait: float = 0.0, progress: RepairProgress | None = None
) -> RepairReport:
    """Check a store, and rebuild its damaged or missing HNSW graphs and lexical indexes.

    A repair needs no embedding model, can be interrupted and run again, and never changes documents or vectors.

    Args:
        path: The store's directory or URL.
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
    with _class_of(path)(path, create=False) as store, store.writing(wait):
        store.fingerprint = _fingerprint(store) or store.fingerprint
        store._check()
        fault = store.mend(rebuild_all=rebuild_all, progress=progress or (lambda *_: None))
        sources = store.sources()
    return RepairReport(
        fault=fault,
        rebuilt=bool(fault) or rebuild_all,
        documents=sum(info.documents for info in sources),
        chunks=sum(info.chunks for info in sources),
        seconds=time.monotonic() - started,
    )


def _index(store: KnowledgeStore, source: str) -> VectorStoreIndex:
    from llama_index.core import VectorStoreIndex  # noqa: PLC0415 (takes seconds)

    return VectorStoreIndex.from_vector_store(store.vectors(source), embed_model=store.embed_model)


def _class_of(path: str | Path) -> type[DirectoryStore | PostgresStore]:
    if "://" in str(path):
        from llama_index_agentic_kb.store.postgres import PostgresStore  # noqa: PLC0415 (loads SQLAlchemy)

        return PostgresStore
    from llama_index_agentic_kb.store.directory import DirectoryStore  # noqa: PLC0415 (imports this module)

    return DirectoryStore


def _fingerprint(store: KnowledgeStore) -> EmbedModelFingerprint | None:
    made_with = store._state(_MODEL)
    try:
        return None if made_with is None else EmbedModelFingerprint.from_json(made_with)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise StoreDamagedError(
            f"{store.location!r} does not say which model made its vectors: {type(error).__name__}. Restore it, "
            "or make the store again with `agentic-kb ingest`."
        ) from error


def _loaded(embed_model: BaseEmbedding | str) -> BaseEmbedding:
    return named_embed_model(embed_model) if isinstance(embed_model, str) else embed_model


def _check_embed_model(location: str, made_with: EmbedModelFingerprint, embed_model: BaseEmbedding | str) -> None:
    """Raise ``StoreMismatchError`` for another model; of one that is not loaded, only the name is compared."""
    found: EmbedModelFingerprint | str = embed_model_name(embed_model)
    if found == made_with.name:
        if isinstance(embed_model, str):
            return
        found = embed_model_fingerprint(embed_model)
        if made_with.agrees_with(found):
            return
    found = f"{found} with other weights" if found == made_with else found
    raise StoreMismatchError(
        f"The store {location!r} was made with the embedding model {made_with} and is opened with {found}: "
        "their vectors can't be compared. Pass the model it was made with (embed_model=, --embed-model), or make a new "
        "store for the other one with `agentic-kb ingest`."
    )
