"""Ingestion of files and documents into a store: reads, chunks and embeds those that changed, in batches.

A document is stored with its chunks and vectors in one database transaction. Files that a crash left unprocessed are
ingested by the next run. The lexical index and HNSW graph of a source are updated after all its files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, IngestionError
from llama_index_agentic_kb.store.database import Chunk, Floats, Piece, StoredDocument
from llama_index_agentic_kb.store.embedding_model import check_sizes
from llama_index_agentic_kb.store.files import (
    DEFAULT_SOURCE,
    OCR_HINT,
    Access,
    FoundFile,
    Selection,
    SourceFiles,
    Stamp,
    printable,
)
from llama_index_agentic_kb.store.reading import MAX_BYTES, READ_SECONDS, FileReader, UnreadableError, readable

if TYPE_CHECKING:
    from llama_index.core.readers.base import BaseReader
    from llama_index.core.schema import Document

    from llama_index_agentic_kb.guard.permissions import Permissions
    from llama_index_agentic_kb.store.chunking import Chunker
    from llama_index_agentic_kb.store.store import KnowledgeStore

DEFAULT_CHUNK_SIZE: Final = 254
"""The default chunk size in tokens: all-MiniLM-L6-v2 reads 256 tokens, including two special ones."""
DEFAULT_CHUNK_OVERLAP: Final = 32

ProgressCallback = Callable[[int, int, str], None]
"""A function called with the number of processed files, the total number of files, and the last processed path."""

_ANOTHER: Final = "; give its folder another source"
_BATCH_CHUNKS = 256
"""The number of chunks embedded together: enough to fill the model's batches, few enough to redo after a crash."""


@dataclass(frozen=True)
class IngestReport:
    """The result of an ingestion. Documents are listed by their ids, ``<source>/<path>``.

    Args:
        added: The documents that are new in the store.
        updated: The documents whose content, settings or location on disk changed.
        unchanged: The documents that did not change.
        deleted: The documents removed because their files were deleted or no longer contain text.
        failed: The ``(path, reason)`` of each failed file; its earlier version remains unless it is in ``deleted``.
        skipped: The number of files in the folders with unsupported suffixes.
        chunks_embedded: The number of chunks that the embedding model processed.
        seconds: The duration of the ingestion in seconds.
        skipped_files: The ``(path, reason)`` of each skipped file.
    """

    added: tuple[str, ...]
    updated: tuple[str, ...]
    unchanged: tuple[str, ...]
    deleted: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    skipped: int
    chunks_embedded: int
    seconds: float
    skipped_files: tuple[tuple[str, str], ...] = ()


def ingest(
    paths: str | Path | Sequence[str | Path] = (),
    store: KnowledgeStore | None = None,
    *,
    documents: Iterable[Document] = (),
    source: str | None = None,
    description: str | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    chunk_overlap: int = DEFAULT_CHUNK_OVERLAP,
    progress: ProgressCallback | None = None,
    show_progress: bool = False,
    file_extractor: Mapping[str, BaseReader] | None = None,
    wait: float = 0.0,
    max_file_bytes: int = MAX_BYTES,
    read_seconds: float = READ_SECONDS,
    ocr: bool = False,
    permissions: Permissions | None = None,
    stamp: Stamp = None,
    trust_urls: bool = False,
) -> IngestReport:
    """Update a store from files, folders and LlamaIndex documents.

    Unchanged files are not embedded again. Of changed files, only chunks with new text are embedded. Documents of
    deleted files are removed from the store. A file that can't be read does not stop the ingestion of the others. If
    nothing changed, no model is loaded.

    Args:
        paths: One or more files or folders; ``docs/documents.md`` lists the supported formats.
        store: The open store.
        documents: LlamaIndex documents, such as the output of a reader. Each is stored under its id, or those with the
            same ``file_path`` as one; storing it again updates it. Scalar metadata are kept.
        source: The source name for all paths and documents. By default, each folder's name; files and documents go to
            the source ``documents``.
        description: A description of the source's content for the planner; None keeps the current one.
        chunk_size: The maximum number of tokens in a chunk, including its title line.
        chunk_overlap: The number of tokens that neighbouring chunks share.
        progress: A function called after each file; see ``ProgressCallback``.
        show_progress: Whether to show a progress bar on stderr.
        file_extractor: LlamaIndex readers by suffix (``{".xml": XMLReader()}``), as in ``SimpleDirectoryReader``; they
            come before the built-in ones and run in this process.
        wait: The seconds to wait while another process is writing to the store.
        max_file_bytes: The maximum size of a file, and of an archive's unpacked content. Defaults to 100 MB.
        read_seconds: The time limit for parsing a file, in seconds. Chunking has the same limit for each started
            10 MB. Defaults to 60.
        ocr: Whether to recognize text in images (png, jpg) and on scanned pages of PDF files; needs the extra
            ``[ocr]``. Each such file has ten times ``read_seconds``.
        permissions: The names of the permission metadata fields. Defaults to ``tenant``, ``owner``, ``acl_user_...``,
            ``acl_group_...`` and ``acl_public``. Values for these fields in the files themselves are ignored.
        stamp: The grants to write to the files (``{"tenant": "acme", "groups": ["hr"]}``; see ``Permissions.stamp``),
            or a function from a file's path to its grants. If None, searches with permissions hide the files.
        trust_urls: Whether the ``url:`` in a file's front matter is used as its link in answers.

    Returns:
        The report of added, updated, deleted and failed files.

    Raises:
        ConfigurationError: Neither paths nor documents are given, ``store`` is no open store, the chunk sizes don't fit
            the embedding model, a grant is invalid, or the extra for ``ocr`` is not installed.
        IngestionError: Another process is writing to the store, or embedding or storing failed. Documents stored
            before remain, and the next call continues from there.
    """
    given: object = store
    if isinstance(given, str | Path):
        raise ConfigurationError(f"store is a path: open it first, KnowledgeStore.open({str(given)!r}, create=True).")
    started = time.monotonic()
    listed, documents = [paths] if isinstance(paths, str | Path) else list(paths), list(documents)
    if store is None or not (listed or documents):
        missing = "store is missing" if store is None else "paths is empty"
        raise ConfigurationError(f"{missing}: ingest needs an open store, and at least one file, folder or document.")
    check_sizes(chunk_size, chunk_overlap, None)
    with store.writing(wait), FileReader(max_file_bytes, read_seconds, file_extractor, ocr=ocr) as reader:
        selection = Selection(listed, source=source, sources_at=store._sources_at, suffixes=reader.suffixes())
        if documents:
            selection.add_documents(source or DEFAULT_SOURCE, documents)
        access = Access(permissions, stamp, trust_urls)
        run = Ingestion(store, (chunk_size, chunk_overlap), reader, progress, selection, access, began=started)
        return run.perform(description, show_progress=show_progress)


@dataclass
class Ingestion:
    """A running ingestion, with the data for its report."""

    store: KnowledgeStore
    sizes: tuple[int, int]  # the maximum size and the overlap of chunks, in tokens
    reader: FileReader
    progress: ProgressCallback | None
    selection: Selection
    access: Access
    began: float = field(default_factory=time.monotonic)
    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    chunks_embedded: int = 0
    done: int = 0
    known: Mapping[str, StoredDocument] = field(default_factory=dict)
    """The stored documents of the current source, by path."""
    pending: list[tuple[FoundFile, StoredDocument, list[Chunk]]] = field(default_factory=list)
    """Small documents waiting to be embedded together."""

    @cached_property
    def chunker(self) -> Chunker:
        """The splitter of texts; it loads the embedding model."""
        from llama_index_agentic_kb.store.chunking import Chunker  # noqa: PLC0415 (loads LlamaIndex)

        return Chunker(self.store.embed_model, *self.sizes)

    def perform(self, description: str | None, *, show_progress: bool = False) -> IngestReport:
        """Take the selected files, source by source, and delete the documents whose files are gone."""
        for source, group in sorted(self.selection.sources.items()):
            if group.files and self.store._source_state(source) is None:
                _ = self.chunker  # first: sizes that don't fit the model leave no source
            self.store.put_source(source, description)
            self.known = self.store.stored_documents(source)
            files: Iterable[FoundFile] = group.files.values()
            if show_progress:
                from llama_index.core.utils import get_tqdm_iterable  # noqa: PLC0415 (loads LlamaIndex)

                files = get_tqdm_iterable(list(files), show_progress, f"Ingesting {source}")
            self.take(source, files, group.roots)
            # Last, so that a renamed file can reuse the vectors stored under its old name.
            for path, known in self.known.items():
                if path not in group.files and _is_gone(known, group, shared=self.store.shared):
                    self._remove(path)
            self.store.update_indexes(source)
        return self.report()

    def take(self, source: str, files: Iterable[FoundFile], roots: set[str]) -> None:
        """Read, cut, embed and store those files that differ from ``known``."""
        for file in files:
            self._take(source, file, roots)
            if sum(len(chunks) for *_, chunks in self.pending) >= _BATCH_CHUNKS:
                self._flush(source)
        self._flush(source)

    def report(self) -> IngestReport:
        """Return what was done."""
        stored = tuple(self.added), tuple(self.updated), tuple(self.unchanged), tuple(self.deleted)
        failed, skipped = tuple(self.selection.failed), tuple(self.selection.skipped)
        seconds = time.monotonic() - self.began
        return IngestReport(*stored, failed, len(skipped), self.chunks_embedded, seconds, skipped)

    def _take(self, source: str, file: FoundFile, roots: set[str]) -> None:
        """Read a file if it changed, and store or queue its chunks; record any error as this file's failure."""
        try:
            document = self._document(source, file, roots)
            if document == self.known.get(file.relative):
                self.unchanged.append(document.document_id)
                self._file_done(file)
                return
            with readable():
                parsed = file.parsed(self.reader)
                sections = (section for section in parsed.sections if section.text.strip())
                start = list(islice(sections, 1))  # texts are read here, and while they are cut (`_within`)
            chunks: Iterable[Chunk] = ()
            if start:  # otherwise no model is needed
                whole = replace(parsed, sections=chain(start, sections))
                chunks = _within(self.reader.seconds, self.chunker.chunks(source, file, whole, self.access))
            first = list(islice(chunks, _BATCH_CHUNKS))
            if len(first) == _BATCH_CHUNKS:  # stored while being read: it may exceed memory
                self._flush(source)
                self._put(file, document, self._embedded(source, chain(first, chunks)))
                return
        except UnreadableError as error:
            self._file_done(file, str(error))
        else:
            if first:
                self.pending.append((file, document, first))
                return
            scanned = file.path.suffix.lower() == ".pdf" and not self.reader.ocr
            self._file_done(file, f"holds no text{OCR_HINT if scanned else ''}")
            self._remove(file.relative)

    def _document(self, source: str, file: FoundFile, roots: set[str]) -> StoredDocument:
        """Return a new record of a file, with its current hash.

        The hash is computed before parsing: if the file changes in between, the next ingestion detects it.
        """
        known = self.known.get(file.relative)
        anothers = known is not None and known.origin != file.origin and known.root not in roots
        # Else it is this file's, before its folder moved; in a shared store it may be on another machine.
        if known is not None and anothers and (self.store.shared or os.path.lexists(known.origin)):
            raise UnreadableError(f"has the same path in this source as {known.origin}{_ANOTHER}")
        with readable():
            digest, (size, overlap) = file.digest(self.reader.max_bytes), self.sizes
        read_by = self.reader.way(file.path.suffix.lower())
        settings = f"reader={read_by} size={size} overlap={overlap} {self.access.settings(file.path)}"
        return StoredDocument(source, file.relative, file.origin, file.root, digest, settings)

    def _flush(self, source: str) -> None:
        pending, self.pending = self.pending, []
        vectors = iter(list(self._embedded(source, chain.from_iterable(chunks for *_, chunks in pending))))
        for file, document, chunks in pending:
            self._put(file, document, list(islice(vectors, len(chunks))))

    def _put(self, file: FoundFile, document: StoredDocument, pieces: Iterable[Piece]) -> None:
        known = self.known.get(document.path)
        if not self.store.put_document(document, pieces, known.origin if known else None):
            # Into a shared store, another process may ingest at the same time.
            self._file_done(file, f"has the same path in this source as a file stored meanwhile{_ANOTHER}")
            return
        (self.added if known is None else self.updated).append(document.document_id)
        self._file_done(file)

    def _embedded(self, source: str, chunks: Iterable[Chunk]) -> Iterator[Piece]:
        """Yield chunks with their vectors; texts that the source already contains reuse their stored vectors."""
        chunks = iter(chunks)
        while batch := list(islice(chunks, _BATCH_CHUNKS)):
            texts = {chunk.embedding_hash: chunk for chunk in batch}
            vectors = self.store._vectors_by_embedding(source, texts)
            new = [chunk for key, chunk in texts.items() if key not in vectors]
            vectors |= _embedded(self.store, new)
            self.chunks_embedded += len(new)
            yield from ((chunk, vectors[chunk.embedding_hash]) for chunk in batch)

    def _remove(self, path: str) -> None:
        if known := self.known.get(path):
            self.store.delete_document(known.source, path)
            self.deleted.append(known.document_id)

    def _file_done(self, file: FoundFile, reason: str = "") -> None:
        shown = printable(file.origin or file.path)
        if reason:
            self.selection.failed.append((shown, reason))
        self.advance(1, shown)

    def advance(self, files: int, last: str) -> None:
        """Report the progress after so many more files."""
        self.done += files
        if self.progress is not None:
            self.progress(self.done, sum(len(group.files) for group in self.selection.sources.values()), last)


def _within(seconds: float, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yield chunks; raise ``UnreadableError`` if parsing or chunking fails or exceeds the time limit."""
    left, cut = seconds, 0
    while left > 0:
        began = time.monotonic()
        with readable():
            chunk = next(chunks, None)
        if chunk is None:
            return
        before, cut = cut, cut + len(chunk.text)
        left += seconds * (cut // 10_000_000 - before // 10_000_000) - (time.monotonic() - began)
        yield chunk
    raise UnreadableError(f"can't be read and cut within {seconds:g} s")


def _embedded(store: KnowledgeStore, chunks: Sequence[Chunk]) -> dict[str, Floats]:
    """Return the vectors of chunks by their texts' hashes; raise ``IngestionError`` if the model returns others."""
    from llama_index.core.schema import MetadataMode  # noqa: PLC0415 (takes seconds)

    from llama_index_agentic_kb.store.chunking import chunk_to_node  # noqa: PLC0415 (loads LlamaIndex)

    # The longest last: a local model pads all texts of one pass to the longest of them.
    chunks = sorted(chunks, key=lambda chunk: len(chunk.text))
    texts = [chunk_to_node(chunk).get_content(metadata_mode=MetadataMode.EMBED) for chunk in chunks]
    try:
        vectors = [np.asarray(vector, np.float32) for vector in store.embed_model.get_text_embedding_batch(texts)]
    except AgenticKBError:
        raise
    except Exception as error:
        raise IngestionError(
            f"The embedding model failed: {type(error).__name__}: {error_message(error)}. Documents stored before this "
            "stay; run the ingestion again to go on from there."
        ) from error
    if len(vectors) != len(texts):
        raise IngestionError(f"The embedding model returned {len(vectors)} vectors for {len(texts)} texts.")
    dimension = store.fingerprint.dimension
    if not all(vector.shape == (dimension,) and np.isfinite(vector).all() for vector in vectors):
        raise IngestionError(
            f"The embedding model returned a vector that is not {dimension} finite numbers, as the store's are."
        )
    return {chunk.embedding_hash: vector for chunk, vector in zip(chunks, vectors, strict=True)}


def _is_gone(known: StoredDocument, group: SourceFiles, *, shared: bool) -> bool:
    if not known.origin or any(Path(known.origin).is_relative_to(folder) for folder in group.unlisted):
        return False  # it was passed as a document, or may still be there
    if known.root in group.roots or known.origin in group.roots:
        return True
    return not shared and not os.path.lexists(known.origin)  # a shared store has files of other machines
