"""Makes a store's vectors and words again from its documents, which outlive what damages those."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import AgenticKBError, IngestionError, StoreDamagedError
from llama_index_agentic_kb.store.kept_vectors import batched
from llama_index_agentic_kb.store.opening import DOCUMENTS_FILE

if TYPE_CHECKING:
    from llama_index_agentic_kb.store.chroma import ChromaDatabase
    from llama_index_agentic_kb.store.documents import DocumentDatabase
    from llama_index_agentic_kb.store.records import Chunk
    from llama_index_agentic_kb.store.store import KnowledgeStore

__all__ = ["RepairProgress", "RepairReport", "rebuild", "refuse_damaged_documents", "remove_others"]

RepairProgress: TypeAlias = Callable[[int, int, str], None]
"""Called with the number of chunks done, the number of all chunks, and the source that they are of."""

_BATCH: Final = 256
_DIRECTORY: Final = re.compile(r"chroma(?:-([0-9]+))?")


@dataclass
class RepairReport:
    """What a repair found and did.

    Args:
        fault: What was wrong; empty where nothing was.
        rebuilt: Whether the vectors and the lexical indexes were made again.
        store_file: Whether ``store.json`` was written again.
        documents: How many documents the store has.
        chunks: How many chunks.
        vectors_kept: How many vectors were taken from those kept beside the documents.
        vectors_embedded: How many chunks went through the embedding model.
        seconds: How long it took.
    """

    fault: str = ""
    rebuilt: bool = False
    store_file: bool = False
    documents: int = 0
    chunks: int = 0
    vectors_kept: int = 0
    vectors_embedded: int = 0
    seconds: float = field(default=0.0, compare=False)


def rebuild(store: KnowledgeStore, fault: str, progress: RepairProgress | None = None) -> RepairReport:
    """Make the vectors again in a new directory, which then takes the old one's place in one transaction.

    Until then the store is what it was: after a crash it is done again, with the vectors that were embedded so far.

    Args:
        store: The store, with the right to write held.
        fault: What is wrong with it.
        progress: Called after each batch.

    Returns:
        What was done.

    Raises:
        StoreDamagedError: The documents are damaged themselves.
        IngestionError: The embedding model failed, or the disk is full.
    """
    began = time.monotonic()
    refuse_damaged_documents(store)
    sources = store.documents.sources()
    report = RepairReport(
        fault=fault,
        rebuilt=True,
        documents=sum(source.documents for source in sources),
        chunks=sum(source.chunks for source in sources),
    )
    store.documents.state.begin("repair")
    remove_others(store)
    directory = _next_directory(store)
    try:
        _fill(store, directory, report, progress)
    except AgenticKBError:
        raise
    except Exception as error:
        raise IngestionError(
            f"The vectors can't be made again: {type(error).__name__}: {error_message(error)}. The store is as it was; "
            f"run `agentic-kb repair --store {store.path}` again."
        ) from error
    store.documents.state.end(directory.name)
    store.reopen_vectors()
    remove_others(store)
    for source in sources:
        lexical = store.lexical(source.name)
        lexical.remove()
        lexical.bring_in_step()
    report.seconds = time.monotonic() - began
    return report


def refuse_damaged_documents(store: KnowledgeStore) -> None:
    """Look through the documents, of which nothing else holds a copy.

    Raises:
        StoreDamagedError: They are damaged.
    """
    if broken := store.documents.fault():
        raise StoreDamagedError(
            f"{str(store.path / DOCUMENTS_FILE)!r} is damaged: {broken}. Restore it, or make the store again with "
            "`agentic-kb ingest`."
        )


def _fill(store: KnowledgeStore, directory: Path, report: RepairReport, progress: RepairProgress | None) -> None:
    from llama_index_agentic_kb.store.chroma import ChromaDatabase  # noqa: PLC0415  (loads chromadb)
    from llama_index_agentic_kb.store.shared_chroma import sync_files  # noqa: PLC0415  (beside it)

    database = ChromaDatabase.persistent(directory)
    try:
        for source in store.documents.sources():
            database.vector_store(source.name, create=True)
            for chunks in _batches(store.documents, source.name):
                _add(store, database, source.name, chunks, report)
                if progress is not None:
                    progress(report.vectors_kept + report.vectors_embedded, report.chunks, source.name)
    finally:
        database.close()
    sync_files(directory)


def _batches(documents: DocumentDatabase, source: str) -> Iterator[Sequence[Chunk]]:
    node_ids = sorted(set[str]().union(*documents.node_ids(source).values()))
    for batch in batched(node_ids, _BATCH):
        yield list(documents.chunks_by_id(source, batch))


def _add(
    store: KnowledgeStore, database: ChromaDatabase, source: str, chunks: Sequence[Chunk], report: RepairReport
) -> None:
    from llama_index_agentic_kb.store.chunking import chunk_to_node  # noqa: PLC0415  (loads LlamaIndex)
    from llama_index_agentic_kb.store.vectors import embed  # noqa: PLC0415  (loads LlamaIndex)

    vectors = store.documents.vectors.of(source, [chunk.node_id for chunk in chunks])
    without = [chunk for chunk in chunks if chunk.node_id not in vectors]
    if without:
        made = {chunk.node_id: vector for chunk, vector in zip(without, embed(store, without), strict=True)}
        store.documents.vectors.put(made)
        vectors |= made
    nodes = [chunk_to_node(chunk) for chunk in chunks]
    for node in nodes:
        node.embedding = vectors[node.node_id]
    database.add(source, nodes)
    report.vectors_embedded += len(without)
    report.vectors_kept += len(chunks) - len(without)


def _directories(store: KnowledgeStore) -> dict[int, Path]:
    found = ((_DIRECTORY.fullmatch(entry.name), entry) for entry in store.path.iterdir())
    return {int(match.group(1) or 1): entry for match, entry in found if match is not None}


def _next_directory(store: KnowledgeStore) -> Path:
    return store.path / f"chroma-{max(_directories(store), default=1) + 1}"


def remove_others(store: KnowledgeStore) -> None:
    """Remove what was replaced, and what a repair that died has left."""
    current = store.documents.state.vectors[0]
    for entry in _directories(store).values():
        if entry.name != current:
            shutil.rmtree(entry, ignore_errors=True)
