"""A store's Chroma directory, as several processes use it: one writes, the others see what it has finished.

Chroma knows nothing of other processes. What it read when it was opened it goes on searching, and a writer would write
that over what others have written since; and whoever opens a directory applies what is logged there, which may make it
write as well. So a directory is opened anew once another process has changed it, and never while one writes.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llama_index_agentic_kb.errors import ConfigurationError, StoreDamagedError
from llama_index_agentic_kb.store.chroma_access import LiveCollection
from llama_index_agentic_kb.store.database import check_process
from llama_index_agentic_kb.store.store_file import sync_directory
from llama_index_agentic_kb.store.write_lock import file_lock

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

    from llama_index_agentic_kb.store.chroma import ChromaDatabase
    from llama_index_agentic_kb.store.documents import DocumentDatabase

__all__ = ["VECTORS_LOCK", "SharedChroma", "sync_files"]

VECTORS_LOCK: Final = "vectors.lock"
"""Held by who opens the directory (together) or writes into it (alone)."""

CLOSED_AFTER: Final = 60.0
"""Seconds after which a database that was opened anew is closed: searches that had begun have ended by then."""

RENEWED_AFTER: Final = 5.0
"""Seconds between two openings on account of failures."""

_openings: dict[Path, tuple[tuple[str, int], int]] = {}
_openings_lock = threading.Lock()
_numbers = itertools.count()


class SharedChroma:
    """The Chroma directory of a store; safe to use from many threads.

    Args:
        path: The store's directory.
        documents: Knows which directory it is, and counts its changes.
    """

    def __init__(self, path: Path, documents: DocumentDatabase) -> None:
        self._path = path
        self._documents = documents
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._database: ChromaDatabase | None = None
        self._seen: tuple[str, int] = ("", 0)
        self._retired: list[tuple[float, ChromaDatabase]] = []
        self._renewed = -RENEWED_AFTER
        self._holder: str | None = None
        self._marked = False

    @property
    def directory(self) -> Path:
        """Where the vectors are now."""
        return self._path / self._documents.state.vectors[0]

    def current(self) -> ChromaDatabase:
        """Give the database as it is now: opened at the first call, and again once another process has changed it."""
        check_process(self._pid, self._path)
        state = self._documents.state.vectors
        with self._lock:
            if self._database is None or (state != self._seen and self._holder is None):
                return self._open(state)
            self._close_retired(before=time.monotonic() - CLOSED_AFTER)
            return self._database

    def collection(self, source: str) -> LiveCollection:
        """Give a source's collection, which stays right whichever process changes it."""
        return LiveCollection(lambda: self._collection(source), self.renew, str(self._path))

    def _collection(self, source: str) -> Collection:
        database = self.current()
        if database.has(source):
            return database.collection(source)
        names = {info.name: info.chunks for info in self._documents.sources()}
        if source not in names:
            raise ConfigurationError(f"The store {str(self._path)!r} has no source {source!r} any more.")
        if names[source] == 0:
            return database.collection(source, create=True)
        raise StoreDamagedError(
            f"The store {str(self._path)!r} has lost the vectors of the source {source!r}. Run "
            f"`agentic-kb repair --store {self._path}`: nothing else is lost."
        )

    def renew(self) -> bool:
        """Open the database anew after a failure, which may be another process's ingestion at this moment.

        Returns:
            Whether it was done; not twice within a few seconds, nor while this process is writing.
        """
        with self._lock:
            if self._holder is not None or time.monotonic() - self._renewed < RENEWED_AFTER:
                return False
            _forget_opening(self._path)
            self._open(self._documents.state.vectors)
            self._renewed = time.monotonic()
            return True

    def close(self) -> None:
        """Release the files; they are opened again when they are asked for."""
        if os.getpid() != self._pid:
            return  # it would wait for threads that are the parent's
        with self._lock:
            self._retire()
            self._close_retired(before=time.monotonic() + 1.0)

    def _open(self, state: tuple[str, int]) -> ChromaDatabase:
        from llama_index_agentic_kb.store.chroma import ChromaDatabase  # noqa: PLC0415  (loads chromadb)

        self._retire()
        self._database = ChromaDatabase.persistent(
            self._path / state[0], self._documents.version, access=self, anew=_opening(self._path, state)
        )
        self._seen = state
        return self._database

    def _retire(self) -> None:
        if self._database is not None:
            self._retired.append((time.monotonic(), self._database))
            self._database = None

    def _close_retired(self, before: float) -> None:
        for one in [one for one in self._retired if one[0] < before]:
            self._retired.remove(one)
            one[1].close()

    # -- writing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def written_by(self, holder: str) -> Iterator[None]:
        """Let this process write, which has the store's right to.

        The first change is noted before it is made, and that the vectors are whole once they are: if this process dies
        in between, or fails, the note stays, and whoever opens the store next looks at them.

        Args:
            holder: Names this process's hold of the right.
        """
        with self._lock:
            if self._database is not None:
                self.current()  # as others have left it: what is written must build on that
            self._holder, self._marked = holder, False
        try:
            yield
            if self._marked:
                sync_files(self.directory)
                self._documents.state.end()
                self._seen = self._documents.state.vectors
        finally:
            self._holder = None

    def opening(self) -> AbstractContextManager[None]:
        """Hold while a collection is opened."""
        if self._holder is not None:
            return nullcontext()
        return file_lock(self._path / VECTORS_LOCK, shared=True)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold while vectors are added or deleted."""
        if self._holder is not None and not self._marked:
            self._documents.state.begin(self._holder)
            self._marked = True
        with file_lock(self._path / VECTORS_LOCK, shared=False):
            yield


def _opening(path: Path, state: tuple[str, int]) -> int:
    """Number the openings of a directory in this process: only those of one state may share what was read."""
    with _openings_lock:
        if _openings.get(path, (None, 0))[0] != state:
            _openings[path] = (state, next(_numbers))
        return _openings[path][1]


def _forget_opening(path: Path) -> None:
    with _openings_lock:
        _openings.pop(path, None)


def sync_files(directory: Path) -> None:
    """Make what Chroma has written durable: it leaves that to the system."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:  # noqa: PTH118, PTH123  (as os.walk gives them)
                os.fsync(file.fileno())
        sync_directory(Path(folder))
