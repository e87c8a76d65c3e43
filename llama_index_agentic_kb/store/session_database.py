"""The sessions' database: SQLite or PostgreSQL, opened at its newest revision, and transactions that hold.

A transaction whose connection breaks is tried again until its deadline: what runs inside must come to the same when it
is run twice.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, inspect, make_url, select, table, text
from sqlalchemy import column as sql_column
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from llama_index_agentic_kb import _text
from llama_index_agentic_kb._aio.threads import reset_after_fork
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, SessionStoreError
from llama_index_agentic_kb.store.session_tables import REVISION, VERSION_TABLE

__all__ = ["SessionDatabase"]

T = TypeVar("T")

_UPGRADE_LOCK: Final = 7_391_204_118
"""Names the lock under which one process at a time upgrades a PostgreSQL database."""
_TOO_SLOW: Final = frozenset({"57014", "55P03"})
"""PostgreSQL's codes of a statement and of a lock that took too long."""
_PASSING: Final = frozenset({"40001", "40P01", "23505", "57P01", "57P02", "57P03", "53300"})
"""... of conflicts (two that make one session at once, too), of a server that is going down or coming up, and of one
with too many clients."""
_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 1.0
_ALEMBIC: Final = threading.Lock()  # its proxies are global
_inherited: Final[list[Engine]] = []
"""Engines of a parent process: never used, closed or collected here, for their connections are the parent's."""


class SessionDatabase:
    """An engine whose connections are set up so that a committed transaction stays.

    SQLite: write-ahead log, ``synchronous=FULL``, one connection a transaction (nothing open is inherited by a
    forked child). PostgreSQL: ``synchronous_commit=on``, a pool of connections that are checked before use.

    Args:
        url: A path (SQLite), or a URL: ``sqlite:///...``, ``postgresql://...`` (psycopg 3).
        connections: The most connections at once, of PostgreSQL.
        timeout: Seconds for opening it.

    Raises:
        ConfigurationError: The URL can't be used, its driver is not installed, or the database is of a newer release.
        SessionStoreError: The database can't be opened.
    """

    def __init__(self, url: str | Path, *, connections: int, timeout: float) -> None:
        self.url = _database_url(url)
        self._connections = connections
        self._engine = self._make_engine()
        reset_after_fork(self)
        deadline = time.monotonic() + timeout
        if self.is_sqlite:
            with suppress(OSError):  # conversations are their owner's alone
                os.close(os.open(str(self.url.database), os.O_CREAT, 0o600))
            self.transact(_use_write_ahead_log, write=None, deadline=deadline, what="opening the sessions")
        if self.transact(_revision, write=False, deadline=deadline, what="opening the sessions") != REVISION:
            self.transact(_upgrade, write=True, deadline=deadline, what="upgrading the sessions")

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file."""
        return self.url.get_backend_name() == "sqlite"

    def close(self) -> None:
        """Close idle connections."""
        self._engine.dispose()

    def reset(self) -> None:
        """Begin anew in a forked child; the parent's connections are left as they are."""
        _inherited.append(self._engine)
        self._engine = self._make_engine()

    def transact(self, work: Callable[[Connection], T], *, write: bool | None, deadline: float, what: str) -> T:
        """Run work in one transaction, and commit it; what it raises rolls it back.

        Args:
            work: Takes the connection. It may be run again after a broken connection, even if it was committed.
            write: Whether it writes; one writer at a time. False reads all from one moment; None has no transaction.
            deadline: ``time.monotonic()`` at which it is given up.
            what: Names it in errors.

        Raises:
            DeadlineExceededError: It waited too long for other writers, or for a server that is not there.
            SessionStoreError: The database failed.
        """
        pause = _FIRST_PAUSE
        while True:
            try:
                with self._transaction(write=write, deadline=deadline) as connection:
                    return work(connection)
            except DBAPIError as error:
                left = deadline - time.monotonic()
                if _is_too_slow(error) or (left <= 0 and _is_passing(error)):
                    raise DeadlineExceededError(f"{what}: not done by its deadline: {_message(error)}") from error
                if not _is_passing(error):
                    raise SessionStoreError(f"{what}: {_message(error)}") from error
            time.sleep(min(pause, max(left, 0.0)))
            pause = min(pause * 2, _LONGEST_PAUSE)

    @contextmanager
    def _transaction(self, *, write: bool | None, deadline: float) -> Iterator[Connection]:
        left = max(deadline - time.monotonic(), 0.001)
        with self._engine.connect() as plain:
            connection = plain
            if write is None:
                yield plain.execution_options(isolation_level="AUTOCOMMIT")
                return
            if self.is_sqlite:
                connection = plain.execution_options(write=write, busy_seconds=left)
            elif not write:
                connection = plain.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                if not self.is_sqlite:
                    _bound(connection, left, write=write)
                yield connection

    def _make_engine(self) -> Engine:
        if self.is_sqlite:
            engine = create_engine(self.url, poolclass=NullPool)
            event.listen(engine, "connect", _set_up_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        try:
            return create_engine(
                self.url,
                pool_size=self._connections,
                max_overflow=0,
                pool_pre_ping=True,
                connect_args={"connect_timeout": 5, "application_name": "llama-index-agentic-kb"},
            )
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"sessions: {error.name} is needed for PostgreSQL: pip install 'llama-index-agentic-kb[postgres]'"
            ) from error


def _database_url(given: str | Path) -> URL:
    if isinstance(given, Path) or "://" not in given:
        return URL.create("sqlite", database=str(Path(given).absolute()))
    try:
        url = make_url(given)
        backend = url.get_backend_name()
    except (ArgumentError, NoSuchModuleError):
        backend = ""
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ConfigurationError(
            "sessions: the URL begins with sqlite:/// or postgresql://; a plain path is SQLite too"
        )
    if not url.database or url.database == ":memory:":
        raise ConfigurationError("sessions: SQLite keeps them in a file; give its path")
    return url


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says, not where sqlite3 guesses
    # FULL: a turn counts as stored once its transaction ends, even if the power fails right after.
    for setting in ("synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if "write" not in options:
        return
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(options['busy_seconds'] * 1000) + 1}")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options["write"] else "BEGIN")


def _bound(connection: Connection, seconds: float, *, write: bool) -> None:
    """Have PostgreSQL give up when we do."""
    milliseconds = int(seconds * 1000) + 1
    connection.exec_driver_sql(f"SET LOCAL statement_timeout = {milliseconds}")
    if write:
        connection.exec_driver_sql("SET LOCAL synchronous_commit = on")


def _use_write_ahead_log(connection: Connection) -> None:
    connection.exec_driver_sql("PRAGMA busy_timeout = 1000")
    connection.exec_driver_sql("PRAGMA journal_mode = WAL")


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    versions = table(VERSION_TABLE, sql_column("version_num"))
    return connection.execute(select(versions.c.version_num)).scalar()


def _upgrade(connection: Connection) -> None:
    """Bring the tables to the newest revision; another process may be doing the same right now, and is waited for."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
    found = _revision(connection)
    if found == REVISION:
        return
    if found is not None and found > REVISION:
        raise ConfigurationError(
            f"sessions: the database has revision {found}; this release knows {REVISION}. "
            "Upgrade llama-index-agentic-kb."
        )
    from alembic import command  # noqa: PLC0415 (only for databases that are new or old)
    from alembic.config import Config  # noqa: PLC0415 (same)

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("session_migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _ALEMBIC:
        command.upgrade(config, REVISION)


def _code(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")


def _is_too_slow(error: DBAPIError) -> bool:
    return _code(error) in _TOO_SLOW


def _is_passing(error: DBAPIError) -> bool:
    """Return whether it may go well a moment later: SQLite is busy, the server is away, two were in conflict."""
    if re.search("database (table )?is locked", str(error.orig)):
        return True
    lost = error.connection_invalidated or (type(error.orig).__name__ == "OperationalError" and not _is_sqlite(error))
    return lost or _code(error) in _PASSING


def _is_sqlite(error: DBAPIError) -> bool:
    return type(error.orig).__module__.startswith("sqlite3")


def _message(error: DBAPIError) -> str:
    """Return what went wrong, without the statement and its parameters: these are people's questions."""
    return _text.one_line(_text.redacted(str(error.orig)))
