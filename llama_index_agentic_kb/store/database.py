"""One SQLite file of a store: durable transactions, one connection for all threads, and errors of ours."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from llama_index_agentic_kb.errors import (
    AgenticKBError,
    ConfigurationError,
    IngestionError,
    RetrievalError,
    StoreDamagedError,
)

__all__ = ["Database", "check_process"]

_AGAIN = "Restore it, or make the store again with `agentic-kb ingest`."


class Database:
    """A SQLite file in WAL mode; safe to use from many threads, not in a forked process.

    Args:
        path: The file; made when missing.
        migrations: The statements that lead from each schema version to the next one, from version 0 on.
        timeout: Seconds to wait for another process's transaction to end.

    Raises:
        StoreDamagedError: The file is no such database, or is damaged.
        ConfigurationError: It is of another release, or can't be opened or written.
    """

    def __init__(self, path: Path, migrations: Sequence[str], timeout: float = 30.0) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._timeout = timeout
        with _opening(path):
            self._connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(migrations)
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if os.getpid() != self._pid:
            return  # closed here, the file would lose the locks that the parent process has
        with self._lock:
            self._connection.close()

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a query.

        Raises:
            StoreDamagedError: The file is damaged.
            RetrievalError: It can't be read for another reason.
            ConfigurationError: This process was forked from the one that opened it.
        """
        check_process(self._pid, self._path)
        with self._lock, self._told(RetrievalError, "read"):
            return self._connection.execute(statement, parameters).fetchall()

    def stream(self, statement: str, parameters: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Give the rows of a query one by one, all of one moment.

        Neither readers nor writers wait: it has a connection of its own, until it is read to its end or closed. Raises
        as ``rows`` does.
        """
        check_process(self._pid, self._path)
        uri = f"{self._path.absolute().as_uri()}?mode=ro"
        with (
            self._told(RetrievalError, "read"),
            closing(sqlite3.connect(uri, uri=True, timeout=self._timeout, check_same_thread=False)) as connection,
        ):
            yield from connection.execute(statement, parameters)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Change the file: all that is done inside the ``with`` block, durably, or nothing.

        Raises:
            StoreDamagedError: The file is damaged.
            IngestionError: It can't be written: the disk is full, or another program holds the file locked.
            ConfigurationError: This process was forked from the one that opened it.
        """
        check_process(self._pid, self._path)
        with self._lock, self._told(IngestionError, "written"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite itself ends it where the disk is full
                    self._connection.execute("ROLLBACK")
                raise

    def fault(self) -> str:
        """Look through the whole file; say what is wrong with it, or nothing."""
        found = self.rows("PRAGMA quick_check(1)")
        return "" if found == [("ok",)] else str(found[0][0])

    def _prepare(self, migrations: Sequence[str]) -> None:
        execute = self._connection.execute
        execute("PRAGMA journal_mode = WAL")
        # FULL: a document counts as stored once its transaction ends, even if the power fails right after.
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA foreign_keys = ON")
        if self._version() == len(migrations):
            return
        with self.transaction() as connection:
            # Read again inside the transaction: another process may be making the same tables right now.
            version = self._version()
            if version > len(migrations):
                raise ConfigurationError(
                    f"{str(self._path)!r} has schema version {version}; this release reads version {len(migrations)}. "
                    "Upgrade llama-index-agentic-kb, or make the store again with `agentic-kb ingest`."
                )
            for migration in migrations[version:]:
                for statement in migration.split(";"):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(migrations)}")

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _told(self, error_class: type[AgenticKBError], done: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise error_class(f"{str(self._path)!r} can't be {done}: {error}. {_remedy(error)}") from error
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:  # its subclasses tell of misuse
                raise StoreDamagedError(f"{str(self._path)!r} is damaged: {error}. {_AGAIN}") from error
            raise error_class(f"{str(self._path)!r} can't be {done}: {error}.") from error


def check_process(pid: int, path: Path) -> None:
    """Refuse to go on in a process that was forked from the one that opened a store.

    Args:
        pid: The process that opened it.
        path: What was opened.

    Raises:
        ConfigurationError: This is another process.
    """
    if os.getpid() != pid:
        raise ConfigurationError(
            f"{str(path)!r} was opened in process {pid}, from which this process, {os.getpid()}, was forked: neither "
            "Chroma's threads nor SQLite's locks come along. Open the store in the child, and not in the parent before "
            "it; or start the child with 'spawn' (multiprocessing.set_start_method)."
        )


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Tell what is wrong with a file that can't be opened."""
    try:
        yield
    except IngestionError as error:
        raise ConfigurationError(str(error)) from error
    except sqlite3.OperationalError as error:
        raise ConfigurationError(f"{str(path)!r} can't be opened: {error}. {_remedy(error)}") from error
    except sqlite3.DatabaseError as error:
        raise StoreDamagedError(f"{str(path)!r} can't be read as a document database: {error}. {_AGAIN}") from error


def _remedy(error: Exception) -> str:
    text = str(error)
    if "locked" in text or "busy" in text:
        return "Another program holds it locked: wait for that to end, or end it, then run this again."
    if "full" in text or "disk I/O" in text:
        return "Make room on the disk, then run this again: what was stored before stays."
    return "Give this user the right to write into its directory."
