"""The directory that a knowledge base lives in."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.store.database import check_process
from llama_index_agentic_kb.store.documents import DocumentDatabase
from llama_index_agentic_kb.store.embedding_model import (
    EmbedModelFingerprint,
    default_embed_model,
    embed_model_fingerprint,
)
from llama_index_agentic_kb.store.opening import (
    DOCUMENTS_FILE,
    check_directory_is_free,
    check_documents,
    check_embed_model,
)
from llama_index_agentic_kb.store.records import SourceInfo
from llama_index_agentic_kb.store.recovery import Repair, ensure_sound, recover
from llama_index_agentic_kb.store.shared_chroma import SharedChroma
from llama_index_agentic_kb.store.store_file import (
    STORE_FILE,
    read_store_file,
    store_file_content,
    write_store_file,
)
from llama_index_agentic_kb.store.write_lock import WRITE_LOCK, write_lock

if TYPE_CHECKING:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import TextNode

    from llama_index_agentic_kb.store.chroma import ChromaDatabase
    from llama_index_agentic_kb.store.lexical import StoredLexicalSearch

__all__ = ["KnowledgeStore"]

_LEXICAL_DIRECTORY = "lexical"


class KnowledgeStore:
    """Sources on disk: their documents, their vectors, and the one embedding model that all vectors come from.

        store.json      format version, embedding model
        documents.db    every document, chunk and vector (SQLite): what all the rest can be made of
        chroma/         every vector, for searching (Chroma); chroma-2/ and so on once it has been made again
        lexical/        every word (tantivy), a directory a source; made again from documents.db where it is lost
        write.lock      who is writing; vectors.lock: who is opening the vectors or writing into them

    Open one with `KnowledgeStore.open`; close it with `close` or as a context manager. Safe to use from many threads.
    Any number of processes may read a store while one of them ingests: they see the vectors as they were before it,
    and the documents as they are, and all of it once it has ended. A process that is forked from one that has opened a
    store must open it anew, and can only if its parent has not used the vectors: else start it with "spawn".
    """

    def __init__(
        self,
        path: Path,
        fingerprint: EmbedModelFingerprint,
        embed_model: BaseEmbedding | None,
        repair: Repair = "never",
    ) -> None:
        """Use `open`, which checks that all belong together."""
        self.path = path
        self.fingerprint = fingerprint
        self._repair: Repair = repair
        self._pid = os.getpid()
        self._documents = DocumentDatabase(path / DOCUMENTS_FILE)
        self._chroma = SharedChroma(path, self._documents)
        self._lock = threading.RLock()
        self._embed_model = embed_model
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

        Where the last process that wrote into it did not end well, its vectors are looked at first, in a process of
        its own (about 2 s, and 1 s for each ten thousand chunks); else opening costs nothing.

        Args:
            path: The store's directory.
            embed_model: The model to embed with; must be the one that the store was made with. Default:
                all-MiniLM-L6-v2 (see `default_embed_model`), loaded when it is first needed.
            create: Make an empty store when there is none.
            repair: What to do if the vectors are damaged. "never", the default, raises an error that names
                ``agentic-kb repair``: a program that answers questions should not stand still unasked. "auto" makes
                them again from the documents, about 1 s for each thousand chunks. "later" doesn't look at them until
                they are written; for who wants the documents alone.

        Returns:
            The open store.

        Raises:
            StoreMismatchError: The store was made with another embedding model.
            StoreDamagedError: It is damaged; the message names the remedy.
            ConfigurationError: There is no store at ``path``, something else is, or its format is of another release.
            IngestionError: It is damaged and can't be repaired: the embedding model failed, or the disk is full.
        """
        if repair not in ("never", "auto", "later"):
            raise ConfigurationError(f"repair is {repair!r}; it is 'never', 'auto' or 'later'.")
        directory = Path(path).resolve()
        if (directory / STORE_FILE).is_file():
            fingerprint = read_store_file(directory)
            check_embed_model(directory, fingerprint, embed_model)
            check_documents(directory)
            return cls._opened(directory, fingerprint, embed_model, repair)
        if not create:
            raise ConfigurationError(
                f"There is no store in {str(directory)!r}. Make one with `agentic-kb ingest FOLDER --store {path}`."
            )
        check_directory_is_free(directory)
        embed_model = embed_model or default_embed_model()
        fingerprint = embed_model_fingerprint(embed_model)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_store_file(directory, store_file_content(fingerprint))
        except OSError as error:
            raise ConfigurationError(f"No store can be made in {str(directory)!r}: {error.strerror}.") from error
        return cls._opened(directory, fingerprint, embed_model, repair)

    @classmethod
    def _opened(
        cls, path: Path, fingerprint: EmbedModelFingerprint, embed_model: BaseEmbedding | None, repair: Repair
    ) -> KnowledgeStore:
        store = cls(path, fingerprint, embed_model, repair)
        try:
            ensure_sound(store, repair)
            store.documents.state.keep_store_file(store_file_content(fingerprint))
        except BaseException:
            store.close()
            raise
        return store

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
        if os.getpid() != self._pid:
            return  # forked: the files are the parent's, and its threads may hold the lock for ever
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._indexes.clear()
            self._lexical.clear()
            self._documents.close()
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
                check_embed_model(self.path, self.fingerprint, model)
                self._embed_model = model
            return self._embed_model

    @property
    def documents(self) -> DocumentDatabase:
        """The record of all documents and chunks."""
        self._check_open()
        return self._documents

    @property
    def chroma(self) -> ChromaDatabase:
        """The vectors as they are now; Chroma is imported and opened here, at first use."""
        self._check_open()
        return self._chroma.current()

    def reopen_vectors(self) -> None:
        """Close the vectors, which were replaced; they are opened when they are next asked for."""
        self._chroma.close()

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

        from llama_index_agentic_kb.store.source_vector_store import SourceVectorStore  # noqa: PLC0415  (beside it)

        self._check_open()
        with self._lock:
            self._check_source(source)
            if source not in self._indexes:
                vectors = SourceVectorStore(self._chroma.collection(source), partial(self._documents.version, source))
                self._indexes[source] = VectorStoreIndex.from_vector_store(vectors, embed_model=self.embed_model)
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

        self._check_open()
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
    def writing(self, wait: float = 0.0) -> Iterator[None]:
        """Hold the only right to change the store, among all processes and threads.

        Args:
            wait: Seconds to wait for another process that has it.

        Yields:
            Nothing; the right is held inside the ``with`` block.

        Raises:
            IngestionError: Another process or thread has it; the message names its pid.
            StoreDamagedError: The one that had it last has left damaged vectors, and the store was opened with
                ``repair="never"``.
        """
        self._check_open()
        with write_lock(self.path / WRITE_LOCK, wait) as holder:
            recover(self, self._repair)
            with self._chroma.written_by(holder):
                yield

    @contextmanager
    def holding(self, wait: float = 0.0) -> Iterator[None]:
        """Hold the right to change what is made of documents and vectors, and not these."""
        self._check_open()
        with write_lock(self.path / WRITE_LOCK, wait):
            yield

    def _check_open(self) -> None:
        check_process(self._pid, self.path)
        if self._closed:
            raise ConfigurationError(f"The store {str(self.path)!r} is closed.")

    def _check_source(self, source: str) -> None:
        names = [info.name for info in self.sources()]
        if source not in names:
            raise ConfigurationError(
                f"The store {str(self.path)!r} has no source {source!r}; it has: {', '.join(names) or 'none yet'}."
            )
