"""Files into a store: read, cut, embedded in batches; only what changed.

The order of writes decides what a crash can leave. For each file: new vectors go to Chroma, then its record is
committed to SQLite, then the vectors of its old version are deleted. A file counts as stored when its record is
committed, so what is recorded has its vectors; vectors without a record are swept out by the next ingestion, and
records without vectors are ingested again. The lexical index follows at the end of each source, from the records; what
a crash keeps from it is made good by the next search.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import ConfigurationError, IngestionError
from llama_index_agentic_kb.store.file_reader import READ_SECONDS, FileReader
from llama_index_agentic_kb.store.files import FoundFile, SourceFiles, open_regular, printable, select_files
from llama_index_agentic_kb.store.readers import MAX_BYTES, check_size
from llama_index_agentic_kb.store.records import Chunk, StoredDocument

if TYPE_CHECKING:
    from llama_index_agentic_kb.store.chunking import Chunker
    from llama_index_agentic_kb.store.documents import DocumentDatabase
    from llama_index_agentic_kb.store.store import KnowledgeStore
    from llama_index_agentic_kb.store.vectors import SourceVectors

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
    """What an ingestion did. Documents are told by their ids, ``<source>/<path>``.

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
            told in the report's ``failed``.

    Returns:
        What was done.

    Raises:
        ConfigurationError: No paths, or sizes that don't fit the embedding model.
        IngestionError: Another process is writing into the store, or embedding or storing failed; what was stored
            before stays, and the next call goes on from there.
    """
    from llama_index_agentic_kb.store.chunking import Chunker  # noqa: PLC0415  (loads LlamaIndex)
    from llama_index_agentic_kb.store.vectors import SourceVectors  # noqa: PLC0415  (loads LlamaIndex)

    started = time.monotonic()
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise ConfigurationError("paths is empty; name at least one file or folder to ingest.")
    chunker = Chunker(store.embed_model, chunk_size, chunk_overlap)
    with store.writing(wait), FileReader(max_file_bytes, read_seconds) as reader:
        selection = select_files(
            given,
            source=source,
            recursive=recursive,
            follow_symlinks=follow_symlinks,
            sources_at=store.documents.sources_at,
        )
        total = sum(len(group.files) for group in selection.sources.values())
        tally = _Tally(total=total, progress=progress, failed=selection.failed)
        for name, group in selection.sources.items():
            vectors = SourceVectors(name, store)
            _SourceIngestion(name, store.documents, vectors, chunker, reader, max_file_bytes, tally).run(
                group, description, recursive=recursive
            )
            tally.chunks_embedded += vectors.embedded
            store.lexical(name).bring_in_step()
    return IngestReport(
        added=tuple(tally.added),
        updated=tuple(tally.updated),
        unchanged=tuple(tally.unchanged),
        deleted=tuple(tally.deleted),
        failed=tuple(tally.failed),
        skipped=selection.skipped,
        chunks_embedded=tally.chunks_embedded,
        seconds=time.monotonic() - started,
    )


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

    def file_done(self, path: Path) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, printable(path))


@dataclass(frozen=True)
class _Pending:
    """A file that is read and cut, and waits for its batch."""

    file: FoundFile
    document: StoredDocument
    chunks: Sequence[Chunk]


class _SourceIngestion:
    """One source's part of an ingestion."""

    def __init__(
        self,
        source: str,
        documents: DocumentDatabase,
        vectors: SourceVectors,
        chunker: Chunker,
        reader: FileReader,
        max_file_bytes: int,
        tally: _Tally,
    ) -> None:
        self._source = source
        self._documents = documents
        self._vectors = vectors
        self._chunker = chunker
        self._reader = reader
        self._max_file_bytes = max_file_bytes
        self._tally = tally
        self._known = documents.documents(source)
        self._node_ids = documents.node_ids(source)
        self._pending: list[_Pending] = []

    def run(self, group: SourceFiles, description: str | None, *, recursive: bool) -> None:
        self._documents.put_source(self._source, description)
        # A crash may have left vectors without a record.
        self._vectors.keep_only(set[str]().union(*self._node_ids.values()))
        for file in group.files.values():
            self._take(file, group.roots)
            if sum(len(item.chunks) for item in self._pending) >= _BATCH_CHUNKS:
                self._flush()
        self._flush()
        # Last, so that a file that was renamed finds its vectors under the old name.
        self._remove_gone(group, recursive=recursive)

    def _take(self, file: FoundFile, roots: set[str]) -> None:
        """Read a file if it changed; whatever is wrong with it is that file's failure alone."""
        try:
            item = self._examine(file, roots)
        except OSError as error:
            self._fail(file, f"can't be read: {error.strerror or error}")
        except IngestionError as error:
            self._fail(file, str(error))
        except Exception as error:  # noqa: BLE001  (file parsers raise anything; the error is reported)
            self._fail(file, f"can't be read: {type(error).__name__}: {error_message(error)}")
        else:
            self._accept(file, item)

    def _examine(self, file: FoundFile, roots: set[str]) -> _Pending | None:
        """Read and cut a file; ``None`` when it is stored as it is now."""
        known = self._known.get(file.relative)
        if known is not None and _belongs_elsewhere(known, file, roots):
            raise IngestionError(f"has the same path in this source as {known.origin}; give its folder another source")
        # The hash first: if the file changes before it is read, the next ingestion sees another hash.
        with open_regular(file.path) as opened:
            status = os.fstat(opened.fileno())
            check_size(status.st_size, self._max_file_bytes)
            content_hash = hashlib.file_digest(opened, "sha256").hexdigest()
        if known is not None and self._is_unchanged(known, file, content_hash):
            return None
        parsed = self._reader.read(file.path)
        document = StoredDocument(
            source=self._source,
            path=file.relative,
            title=parsed.title,
            origin=str(file.path),
            root=file.root,
            content_hash=content_hash,
            settings=self._chunker.settings,
            modified=status.st_mtime,
            size=status.st_size,
        )
        return _Pending(file, document, self._chunker.chunks(self._source, file, parsed))

    def _is_unchanged(self, known: StoredDocument, file: FoundFile, content_hash: str) -> bool:
        return (
            known.content_hash == content_hash
            and known.settings == self._chunker.settings
            and (known.origin, known.root) == (str(file.path), file.root)
            and self._vectors.hold(self._node_ids[file.relative])
        )

    def _accept(self, file: FoundFile, item: _Pending | None) -> None:
        if item is None:
            self._tally.unchanged.append(f"{self._source}/{file.relative}")
            self._tally.file_done(file.path)
        elif item.chunks:
            self._pending.append(item)
        else:
            self._fail(file, "holds no text")
            self._remove(file.relative)

    def _fail(self, file: FoundFile, reason: str) -> None:
        self._tally.failed.append((printable(file.path), reason))
        self._tally.file_done(file.path)

    def _flush(self) -> None:
        """Store the files that wait, in the order that the module's docstring tells."""
        pending, self._pending = self._pending, []
        vectors = self._vectors.add([chunk for item in pending for chunk in item.chunks])
        for item in pending:
            path = item.document.path
            current = {chunk.node_id for chunk in item.chunks}
            self._documents.put_document(item.document, item.chunks, vectors)
            self._vectors.delete(self._node_ids.get(path, set()) - current)
            changes = self._tally.updated if path in self._known else self._tally.added
            changes.append(item.document.document_id)
            self._tally.file_done(item.file.path)

    def _remove_gone(self, group: SourceFiles, *, recursive: bool) -> None:
        for path, known in self._known.items():
            if path not in group.files and _is_gone(known, group, recursive=recursive):
                self._remove(path)

    def _remove(self, path: str) -> None:
        if path not in self._known:
            return
        # Vectors first: what is deleted must not be found, even if we crash in between.
        self._vectors.delete(self._node_ids[path])
        self._documents.delete_document(self._source, path)
        self._tally.deleted.append(self._known[path].document_id)


def _belongs_elsewhere(known: StoredDocument, file: FoundFile, roots: set[str]) -> bool:
    """Tell another folder's document of the same path from this file after its folder moved."""
    if known.origin == str(file.path) or known.root in roots:
        return False
    return os.path.lexists(known.origin)


def _is_gone(known: StoredDocument, group: SourceFiles, *, recursive: bool) -> bool:
    """A document goes when its file is gone, or when its folder was searched and doesn't show it any more."""
    if any(Path(known.origin).is_relative_to(folder) for folder in group.unlisted):
        return False
    if not os.path.lexists(known.origin):
        return True
    return known.root in group.roots and (recursive or "/" not in known.path)
