"""The directory that a knowledge base lives in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from llama_index_agentic_kb.errors import ConfigurationError, StoreMismatchError
from llama_index_agentic_kb.store.documents import DocumentDatabase
from llama_index_agentic_kb.store.embedding_model import (
    DEFAULT_EMBED_MODEL,
    EmbedModelFingerprint,
    default_embed_model,
    embed_model_fingerprint,
    embed_model_name,
)
from llama_index_agentic_kb.store.records import SourceInfo
from llama_index_agentic_kb.store.store_file import STORE_FILE, read_store_file, write_store_file
from llama_index_agentic_kb.store.write_lock import write_lock

if TYPE_CHECKING:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import TextNode

    from llama_index_agentic_kb.store.chroma import ChromaDatabase
    from llama_index_agentic_kb.store.lexical import StoredLexicalSearch

__all__ = ["KnowledgeStore"]

_CHROMA_DIRECTORY = "chroma"
_DOCUMENTS_FILE = "documents.db"
_LEXICAL_DIRECTORY = "lexical"
_LOCK_FILE = "write.lock"


class KnowledgeStore:
    """Sources on disk: their documents, their vectors, and the one embedding model that all vectors come from.

        store.json      format version, embedding model
        documents.db    every document and chunk (SQLite)
        chroma/         every vector (Chroma)
        lexical/        every word (tantivy), a directory a source; made again from documents.db where it is lost

    Open one with `KnowledgeStore.open`; close it with `close` or as a context manager. Safe to use from many threads.
    Any number of processes may read a store while one of them ingests.
    """

    def __init__(self, path: Path, fingerprint: EmbedModelFingerprint, embed_model: BaseEmbedding | None) -> None:
        """Use `open`, which checks that all three belong together."""
        self.path = path
        self.fingerprint = fingerprint
        self._documents = DocumentDatabase(path / _DOCUMENTS_FILE)
        self._lock = threading.RLock()
        self._embed_model = embed_model
        self._chroma: ChromaDatabase | None = None
        self._indexes: dict[str, VectorStoreIndex] = {}
        self._lexical: dict[str, StoredLexicalSearch] = {}
        self._closed = False

    @classmethod
    def open(
        cls, path: str | Path, *, embed_model: BaseEmbedding | None = None, create: bool = False
    ) -> KnowledgeStore:
        """Open a store.

        Args:
            path: The store's directory.
            embed_model: The model to embed with; must be the one that the store was made with. Default:
                all-MiniLM-L6-v2 (see `default_embed_model`), loaded when it is first needed.
            create: Make an empty store when there is none.

        Returns:
            The open store.

        Raises:
            StoreMismatchError: The store was made with another embedding model.
            ConfigurationError: There is no store at ``path``, something else is, it is damaged, or its format is of
                another release.
        """
        directory = Path(path).resolve()
        if (directory / STORE_FILE).is_file():
            fingerprint = read_store_file(directory)
            _check_embed_model(directory, fingerprint, embed_model)
            return cls(directory, fingerprint, embed_model)
        if not create:
            raise ConfigurationError(
                f"There is no store in {str(directory)!r}. Make one with `agentic-kb ingest FOLDER --store {path}`."
            )
        _check_directory_is_free(directory)
        embed_model = embed_model or default_embed_model()
        fingerprint = embed_model_fingerprint(embed_model)
        directory.mkdir(parents=True, exist_ok=True)
        write_store_file(directory, fingerprint)
        return cls(directory, fingerprint, embed_model)

    def __enter__(self) -> Self:
        """Give the store itself."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the store."""
        self.close()

    def close(self) -> None:
        """Release all files; a second call does nothing. Indexes taken from the store can't be used afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._indexes.clear()
            self._lexical.clear()
            self._documents.close()
            if self._chroma is not None:
                self._chroma.close()

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
        """The record of all documents and chunks."""
        self._check_open()
        return self._documents

    @property
    def chroma(self) -> ChromaDatabase:
        """The vectors; Chroma is imported and opened here, at first use."""
        with self._lock:
            self._check_open()
            if self._chroma is None:
                from llama_index_agentic_kb.store.chroma import ChromaDatabase  # noqa: PLC0415  (loads chromadb)

                self._chroma = ChromaDatabase.persistent(
                    self.path / _CHROMA_DIRECTORY, version_of=self._documents.version
                )
            return self._chroma

    def sources(self) -> list[SourceInfo]:
        """List the sources by name, with descriptions and counts; loads neither model nor Chroma."""
        return self.documents.sources()

    def index(self, source: str) -> VectorStoreIndex:
        """Give the vector index of a source, with the store's embedding model.

        Args:
            source: The source's name.

        Returns:
            The index; the same object at each call, for all threads.

        Raises:
            ConfigurationError: There is no such source.
        """
        from llama_index.core import VectorStoreIndex  # noqa: PLC0415  (takes seconds)

        with self._lock:
            self._check_source(source)
            if source not in self._indexes:
                self._indexes[source] = VectorStoreIndex.from_vector_store(
                    self.chroma.vector_store(source, create=True), embed_model=self.embed_model
                )
            return self._indexes[source]

    def nodes(self, source: str) -> list[TextNode]:
        """Read all nodes of a source from the document record, as they stand in its index, without embeddings.

        Args:
            source: The source's name.

        Returns:
            The nodes by document and place; what a lexical index or a rebuilt vector index is made from.

        Raises:
            ConfigurationError: There is no such source.
        """
        from llama_index_agentic_kb.store.chunking import chunk_to_node  # noqa: PLC0415  (loads LlamaIndex)

        self._check_source(source)
        return [chunk_to_node(chunk) for chunk in self.documents.chunks(source)]

    def metadata(self, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Stream the document id and the metadata of each chunk of a source, a document's chunks one after the other.

        Args:
            source: The source's name.

        Raises:
            ConfigurationError: There is no such source.
        """
        self._check_source(source)
        return ((f"{source}/{path}", metadata) for path, metadata in self.documents.metadata(source))

    def lexical(self, source: str) -> StoredLexicalSearch:
        """Give the lexical search (BM25) of a source; its index is made, or brought up to date, when it is searched.

        Args:
            source: The source's name.

        Returns:
            The search; the same object at each call, for all threads.

        Raises:
            ConfigurationError: There is no such source.
        """
        from llama_index_agentic_kb.store.lexical import StoredLexicalSearch  # noqa: PLC0415  (loads LlamaIndex)

        with self._lock:
            self._check_source(source)
            if source not in self._lexical:
                self._lexical[source] = StoredLexicalSearch(self, source, self.path / _LEXICAL_DIRECTORY)
            return self._lexical[source]

    def remove_source(self, source: str) -> None:
        """Remove a source with its documents and vectors.

        Args:
            source: The source's name.

        Raises:
            ConfigurationError: There is no such source.
            IngestionError: Another process is writing into the store.
        """
        with self.writing(), self._lock:
            self._check_source(source)
            self._indexes.pop(source, None)
            self.lexical(source).remove()
            del self._lexical[source]
            self.chroma.delete_source(source)
            self.documents.delete_source(source)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the only right to change the store, among all processes and threads.

        Yields:
            Nothing; the right is held inside the ``with`` block.

        Raises:
            IngestionError: Another process or thread has it; the message names its pid.
        """
        self._check_open()
        with write_lock(self.path / _LOCK_FILE):
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError(f"The store {str(self.path)!r} is closed.")

    def _check_source(self, source: str) -> None:
        names = [info.name for info in self.sources()]
        if source not in names:
            raise ConfigurationError(
                f"The store {str(self.path)!r} has no source {source!r}; it has: {', '.join(names) or 'none yet'}."
            )


def _check_embed_model(directory: Path, made_with: EmbedModelFingerprint, embed_model: BaseEmbedding | None) -> None:
    """Compare names first: measuring the dimension loads or calls the model."""
    name = DEFAULT_EMBED_MODEL if embed_model is None else embed_model_name(embed_model)
    given: EmbedModelFingerprint | str = name
    if name == made_with.name and embed_model is not None:
        given = embed_model_fingerprint(embed_model)
    if given in (made_with, made_with.name):
        return
    raise StoreMismatchError(
        f"The store {str(directory)!r} was made with the embedding model {made_with} and is opened with {given}: "
        "their vectors can't be compared. Pass embed_model= the model it was made with, or make a new store for the "
        "other one with `agentic-kb ingest`."
    )


def _check_directory_is_free(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigurationError(f"{str(directory)!r} is a file; a store is a directory.")
    # A creation that was killed may have left the temporary file.
    if any(entry.name != f"{STORE_FILE}.tmp" for entry in directory.iterdir()):
        raise ConfigurationError(
            f"{str(directory)!r} holds other files and no store. Give the store a directory of its own."
        )
