"""Files into a store: read, cut, embedded in batches; only what changed.

A document counts as stored when its transaction in the database has ended: with its chunks and their vectors. What a
crash cuts off is ingested by the next run. Lexical indexes and graphs follow at the end of each source.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, IngestionError
from llama_index_agentic_kb.store.database import Chunk, StoredDocument
from llama_index_agentic_kb.store.file_reader import READ_SECONDS, FileReader
from llama_index_agentic_kb.store.files import FoundFile, SourceFiles, open_regular, printable, select_files
from llama_index_agentic_kb.store.readers import MAX_BYTES, check_size

if TYPE_CHECKING:
    from llama_index_agentic_kb.store.chunking import Chunker
    from llama_index_agentic_kb.store.store import KnowledgeStore

__all__ = ["DEFAULT_CHUNK_OVERLAP", "DEFAULT_CHUNK_SIZE", "IngestReport", "ProgressCallback", "ingest"]

DEFAULT_CHUNK_SIZE = 254
"""all-MiniLM-L6-v2 reads 256 tokens, two of which are its own marks. It drops the rest of a longer text silently."""

DEFAULT_CHUNK_OVERLAP = 32

ProgressCallback = Callable[[int, int, str], None]
"""Called with the number of files done, the number of all files, and the path of the last one done."""

# Chunks embedded and written together: enough to fill the model's batches, little enough to lose in a crash.
_BATCH_CHUNKS = 256


@dataclass(frozen=True)
class IngestReport:
    """What an ingestion did. Documents are listed by their ids, ``<source>/<path>``.

    Args:
        added: Documents that are new in the store.
        updated: Documents whose content, settings or place on disk changed.
        unchanged: Documents left as they were.
        deleted: Documents removed, because their files are gone or hold no text any more.
        failed: ``(path, reason)`` of files that can't be taken; an earlier version stays unless it is in ``deleted``.
        skipped: How many files in the folders are of a kind that isn't read.
        chunks_embedded: How many chunks went through the embedding model.
        seconds: How long it took.
    """

    added: tuple[str, ...]
    updated: tuple[str, ...]
    unchanged: tuple[str, ...]
    deleted: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    skipped: int
    chunks_embedded: int
    seconds: float


def ingest(
    paths: str | Path | Sequence[str | Path],
    store: KnowledgeStore,
    *,
    source: str | None = None,
    description: str | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    chunk_overlap: int = DEFAULT_CHUNK_OVERLAP,
    progress: ProgressCallback | None = None,
    recursive: bool = True,
    wait: float = 0.0,
    max_file_bytes: int = MAX_BYTES,
    read_seconds: float = READ_SECONDS,
    follow_symlinks: bool = False,
) -> IngestReport:
    """Bring a store up to date with files and folders.

    Unchanged files are not embedded again; of changed files only the chunks whose embedded text is new; what is gone
    from the folders is removed from the store. A file that can't be read never stops the others.

    Args:
        paths: Files (.txt, .md, .html, .pdf, .docx) and folders; one or several.
        store: The open store.
        source: The source of all paths. Default: each folder makes a source named after it, files go to ``documents``.
        description: What the source holds, for the planner; ``None`` keeps what is there.
        chunk_size: Tokens of a chunk with its title line.
        chunk_overlap: Tokens that neighbouring chunks share.
        progress: Called after each file.
        recursive: Whether to go into subfolders.
        wait: Seconds to wait for another process that is writing into the store.
        max_file_bytes: The largest file that is read, and the largest content of a packed one. Default 100 MB.
        read_seconds: The time that a file's parser is given. Default 60.
        follow_symlinks: Whether to read what lies outside the folders, behind symlinks in them. By default it is
            listed in the report's ``failed``.

    Returns:
        What was done.

    Raises:
        ConfigurationError: No paths, or sizes that don't fit the embedding model.
        IngestionError: Another process is writing into the store, or embedding or storing failed; what was stored
            before stays, and the next call goes on from there.
    """
    from llama_index_agentic_kb.store.chunking import Chunker  # noqa: PLC0415 (loads LlamaIndex)

    started = time.monotonic()
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    if not listed:
        raise ConfigurationError("paths is empty; name at least one file or folder to ingest.")
    chunker = Chunker(store.embed_model, chunk_size, chunk_overlap)
    with store.writing(wait), FileReader(max_file_bytes, read_seconds) as reader:
        selection = select_files(
            listed,
            source=source,
            recursive=recursive,
            follow_symlinks=follow_symlinks,
            sources_at=store.documents.sources_at,
        )
        tally = _Tally(sum(len(group.files) for group in selection.sources.values()), progress, selection.failed)
        for name, group in selection.sources.items():
            store.documents.put_source(name, description)
            _SourceIngestion(name, store, chunker, reader, max_file_bytes, tally).run(group, recursive=recursive)
            store.lexical(name).update()
            store.update_graph(name)
    lists = {name: tuple(getattr(tally, name)) for name in ("added", "updated", "unchanged", "deleted", "failed")}
    seconds = time.monotonic() - started
    return IngestReport(**lists, skipped=selection.skipped, chunks_embedded=tally.chunks_embedded, seconds=seconds)


@dataclass
class _Tally:
    """The report in the making, for all sources."""

    total: int
    progress: ProgressCallback | None
    failed: list[tuple[str, str]]
    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    chunks_embedded: int = 0
    done: int = 0

    def file_done(self, file: FoundFile, reason: str = "") -> None:
        """Count a file, which failed where there is a reason."""
        self.done += 1
        if reason:
            self.failed.append((printable(file.path), reason))
        if self.progress is not None:
            self.progress(self.done, self.total, printable(file.path))


class _SourceIngestion:
    """One source's part of an ingestion."""

    def __init__(
        self,
        source: str,
        store: KnowledgeStore,
        chunker: Chunker,
        reader: FileReader,
        max_file_bytes: int,
        tally: _Tally,
    ) -> None:
        self._source = source
        self._store = store
        self._chunker = chunker
        self._reader = reader
        self._max_file_bytes = max_file_bytes
        self._tally = tally
        self._known = store.documents.documents(source)
        self._pending: list[tuple[FoundFile, StoredDocument, Sequence[Chunk]]] = []

    def run(self, group: SourceFiles, *, recursive: bool) -> None:
        for file in group.files.values():
            self._take(file, group.roots)
            if sum(len(chunks) for _, _, chunks in self._pending) >= _BATCH_CHUNKS:
                self._flush()
        self._flush()
        # Last, so that a file that was renamed finds its vectors under the old name.
        for path, known in self._known.items():
            if path not in group.files and _is_gone(known, group, recursive=recursive):
                self._remove(path)

    def _take(self, file: FoundFile, roots: set[str]) -> None:
        """Read a file if it changed; whatever is wrong with it is that file's failure alone."""
        try:
            document = self._document(file, roots)
            if document == self._known.get(file.relative):
                self._tally.unchanged.append(document.document_id)
                self._tally.file_done(file)
                return
            chunks = self._chunker.chunks(self._source, file, self._reader.read(file.path))
        except OSError as error:
            self._tally.file_done(file, f"can't be read: {error.strerror or error}")
        except IngestionError as error:
            self._tally.file_done(file, str(error))
        except Exception as error:  # noqa: BLE001 (file parsers raise anything; the error is reported)
            self._tally.file_done(file, f"can't be read: {type(error).__name__}: {error_message(error)}")
        else:
            if chunks:
                self._pending.append((file, document, chunks))
                return
            self._tally.file_done(file, "holds no text")
            self._remove(file.relative)

    def _document(self, file: FoundFile, roots: set[str]) -> StoredDocument:
        """Return the record of a file as it is now; the hash is taken before it is read.

        If the file changes in between, the next ingestion sees another hash.
        """
        known = self._known.get(file.relative)
        if known is not None and _belongs_elsewhere(known, file, roots):
            raise IngestionError(f"has the same path in this source as {known.origin}; give its folder another source")
        with open_regular(file.path) as opened:
            check_size(os.fstat(opened.fileno()).st_size, self._max_file_bytes)
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return StoredDocument(self._source, file.relative, str(file.path), file.root, digest, self._chunker.settings)

    def _flush(self) -> None:
        """Embed and store the files that wait, each in a transaction of its own."""
        pending, self._pending = self._pending, []
        vectors = self._vectors([chunk for _, _, chunks in pending for chunk in chunks])
        for file, document, chunks in pending:
            self._store.documents.put_document(document, chunks, vectors)
            changes = self._tally.updated if document.path in self._known else self._tally.added
            changes.append(document.document_id)
            self._tally.file_done(file)

    def _vectors(self, chunks: Sequence[Chunk]) -> dict[str, Sequence[float]]:
        """Return a vector for each text; one that moved, in a file or to another one of the source, keeps its own."""
        texts = {chunk.embedding_hash: chunk for chunk in chunks}
        vectors: dict[str, Any] = {**self._store.documents.vectors_by_embedding(self._source, texts)}
        new = [chunk for key, chunk in texts.items() if key not in vectors]
        embedded = _embed(self._store, new)
        self._tally.chunks_embedded += len(new)
        return vectors | {chunk.embedding_hash: vector for chunk, vector in zip(new, embedded, strict=True)}

    def _remove(self, path: str) -> None:
        if path in self._known:
            self._store.documents.delete_document(self._source, path)
            self._tally.deleted.append(self._known[path].document_id)


def _embed(store: KnowledgeStore, chunks: Sequence[Chunk]) -> list[list[float]]:
    """Return the vectors of chunks, by the store's model.

    Raises:
        IngestionError: The model failed, or returned what no search would find, or another model's vectors.
    """
    from llama_index.core.schema import MetadataMode  # noqa: PLC0415 (takes seconds)

    from llama_index_agentic_kb.store.chunking import chunk_to_node  # noqa: PLC0415 (loads LlamaIndex)

    texts = [chunk_to_node(chunk).get_content(metadata_mode=MetadataMode.EMBED) for chunk in chunks]
    try:
        vectors = store.embed_model.get_text_embedding_batch(texts)
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
    if not all(len(vector) == dimension and all(map(math.isfinite, vector)) for vector in vectors):
        raise IngestionError(
            f"The embedding model returned a vector that is not {dimension} finite numbers, as the store's are."
        )
    return vectors


def _belongs_elsewhere(known: StoredDocument, file: FoundFile, roots: set[str]) -> bool:
    """Return whether a document of the same path is another folder's, and not this file's before its folder moved."""
    if known.origin == str(file.path) or known.root in roots:
        return False
    return os.path.lexists(known.origin)


def _is_gone(known: StoredDocument, group: SourceFiles, *, recursive: bool) -> bool:
    """Return whether a document's file is gone, or its folder was searched and doesn't show it any more."""
    if any(Path(known.origin).is_relative_to(folder) for folder in group.unlisted):
        return False
    if not os.path.lexists(known.origin):
        return True
    return known.root in group.roots and (recursive or "/" not in known.path)
