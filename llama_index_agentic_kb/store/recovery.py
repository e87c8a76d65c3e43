"""Recognises vectors that a process has left half written, and sees to them before anybody else does.

Who changes vectors notes it in the store's database first, and takes the note back once they are whole. A note that
nobody who is writing has made is one of a process that died.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from llama_index_agentic_kb.errors import ConfigurationError, StoreDamagedError
from llama_index_agentic_kb.store.documents import DocumentDatabase
from llama_index_agentic_kb.store.opening import DOCUMENTS_FILE
from llama_index_agentic_kb.store.repair import (
    RepairProgress,
    RepairReport,
    rebuild,
    refuse_damaged_documents,
    remove_others,
)
from llama_index_agentic_kb.store.store_file import STORE_FILE, read_store_file, write_store_file
from llama_index_agentic_kb.store.write_lock import WRITE_LOCK, LockedError, lock_holder

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

    from llama_index_agentic_kb.store.store import KnowledgeStore

__all__ = ["Repair", "ensure_sound", "find_fault", "is_suspect", "recover", "repair_store"]

Repair: TypeAlias = Literal["never", "auto", "later"]
"""What is done where a store's vectors turn out to be damaged: an error names the remedy, they are made again, or they
are only looked at before they are written."""

CHECKED_WITHIN: Final = 120.0
"""Seconds to wait for another process that looks at a store's vectors, or makes them again."""


def ensure_sound(store: KnowledgeStore, repair: Repair) -> None:
    """See to a store's vectors if the last process that changed them did not end well; not while one changes them.

    Args:
        store: The store.
        repair: What is done where they are damaged.

    Raises:
        StoreDamagedError: They are damaged, and ``repair`` is "never".
        IngestionError: They are damaged and can't be made again.
        ConfigurationError: Another process has been looking at them, or making them again, for two minutes.
    """
    deadline = time.monotonic() + CHECKED_WITHIN
    while repair != "later" and is_suspect(store.path, store.documents):
        try:
            with store.holding():
                recover(store, repair)
        except LockedError as error:
            if _is_written_now(store):
                return
            if time.monotonic() > deadline:
                raise ConfigurationError(f"The store {str(store.path)!r} is being repaired: {error}") from error


def _is_written_now(store: KnowledgeStore) -> bool:
    """Tell the process that is changing the vectors from one that looks at them, or makes them again."""
    for _ in range(2):  # who has just got the right may not have noted that yet
        if lock_holder(store.path / WRITE_LOCK) != store.documents.state.writing:
            time.sleep(0.05)
            return False
        time.sleep(0.05)
    return True


def is_suspect(path: Path, documents: DocumentDatabase) -> bool:
    """Tell whether a store's vectors must be looked at: they are gone, or a change was begun and not ended.

    Args:
        path: The store's directory.
        documents: Its documents.
    """
    return documents.state.writing is not None or _is_gone(path, documents)


def recover(store: KnowledgeStore, repair: Repair) -> RepairReport:
    """See whether a suspect store's vectors are whole, and do what is to be done where they are not.

    Args:
        store: The store, with the right to write held.
        repair: What that is.

    Returns:
        What was found and done.

    Raises:
        StoreDamagedError: They are damaged, and ``repair`` is "never".
        IngestionError: They can't be made again: the embedding model failed, or the disk is full.
    """
    if not is_suspect(store.path, store.documents):
        return RepairReport()
    fault = find_fault(store)
    if not fault:
        remove_others(store)
        store.documents.state.end()
        return RepairReport()
    if repair != "auto":
        raise StoreDamagedError(
            f"The vectors of the store {str(store.path)!r} are damaged: {fault}. Nothing is lost: run "
            f"`agentic-kb repair --store {store.path}`, or open the store with repair='auto'."
        )
    return rebuild(store, fault)


def repair_store(
    path: str | Path,
    *,
    embed_model: BaseEmbedding | None = None,
    rebuild_all: bool = False,
    wait: float = 0.0,
    progress: RepairProgress | None = None,
) -> RepairReport:
    """Look at a store, and make again from its documents what is damaged: ``store.json``, vectors, lexical indexes.

    May be killed and run again; what was embedded by then is kept.

    Args:
        path: The store's directory.
        embed_model: The model that the store was made with, asked only for vectors that are not kept beside the
            documents. None is the default one.
        rebuild_all: Whether to make vectors and lexical indexes again without looking whether anything is wrong.
        wait: Seconds to wait for another process that is writing into the store.
        progress: Called after each batch of chunks.

    Returns:
        What was found and done.

    Raises:
        StoreDamagedError: The documents themselves are damaged.
        ConfigurationError: There is no store at ``path``.
        IngestionError: Another process is writing into the store, the embedding model failed, or the disk is full.
    """
    from llama_index_agentic_kb.store.store import KnowledgeStore  # noqa: PLC0415  (uses this module)

    began = time.monotonic()
    restored = _restore_store_file(Path(path).resolve())
    with KnowledgeStore.open(path, embed_model=embed_model, repair="later") as store, store.holding(wait):
        refuse_damaged_documents(store)
        fault = "" if rebuild_all else find_fault(store)
        if fault or rebuild_all:
            report = rebuild(store, fault, progress)
        else:
            remove_others(store)
            store.documents.state.end()
            sources = store.sources()
            report = RepairReport(
                documents=sum(source.documents for source in sources), chunks=sum(source.chunks for source in sources)
            )
    return replace(report, store_file=restored, seconds=time.monotonic() - began)


def _restore_store_file(directory: Path) -> bool:
    """Write ``store.json`` again, from what the documents' database keeps of it, where it is damaged or gone."""
    if not (directory / DOCUMENTS_FILE).is_file():
        return False
    try:
        read_store_file(directory)
    except (StoreDamagedError, FileNotFoundError) as error:
        with closing(DocumentDatabase(directory / DOCUMENTS_FILE)) as documents:
            content = documents.state.store_file
        if content is None:
            raise StoreDamagedError(
                f"{str(directory / STORE_FILE)!r} is damaged or gone, and was made by a release that kept no copy: "
                f"{error}. Make the store again with `agentic-kb ingest`."
            ) from error
        write_store_file(directory, content)
        return True
    return False


def find_fault(store: KnowledgeStore) -> str:
    """Look at a store's vectors in a process of its own, with the right to write held; empty where they are whole."""
    if _is_gone(store.path, store.documents):
        return f"the directory {store.documents.state.vectors[0]!r} is gone"
    from llama_index_agentic_kb.store.vector_check import vector_fault  # noqa: PLC0415  (it is run as a program, too)

    return vector_fault(store.path, store.documents)


def _is_gone(path: Path, documents: DocumentDatabase) -> bool:
    file = path / documents.state.vectors[0] / "chroma.sqlite3"
    return not file.is_file() and not documents.state.empty
