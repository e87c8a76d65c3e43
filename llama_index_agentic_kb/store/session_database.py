"""The sessions' database, SQLite or PostgreSQL: its tables at their newest revision, and transactions that hold.

Times are microseconds since 1970 in UTC, the same and comparable in every database. What a turn says is JSON in ASCII,
so that any text can be stored, NUL and lone surrogates included. A transaction whose connection breaks is tried again
until its deadline: what runs inside must come to the same when it is run twice.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from sqlite3 import Connection as SQLiteConnection
from typing import Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    NullPool,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from llama_index_agentic_kb import _text
from llama_index_agentic_kb._aio.threads import reset_after_fork
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, SessionStoreError

T = TypeVar("T")

REVISION: Final = "0001"
"""The newest revision of the tables, and of the JSON in them: a change of either needs a new one."""
VERSION_TABLE: Final = "agentic_kb_sessions_version"
MAX_NAME: Final = 512
"""Characters of an owner's key."""
MAX_ID: Final = 128
"""Characters of a session's or an answer's id."""
_UPGRADE_LOCK: Final = 7_391_204_118
"""Names the lock under which one process at a time upgrades a PostgreSQL database."""
_TOO_SLOW: Final = frozenset({"57014", "55P03"})
"""PostgreSQL's codes of a statement and of a lock that took too long."""
_PASSING: Final = frozenset({"40001", "40P01", "23505", "57P01", "57P02", "57P03", "53300"})
"""... of conflicts (two that make one session at once, too), of a server that is going down or coming up, and of one
with too many clients."""
_ALEMBIC: Final = threading.Lock()  # its proxies are global
_inherited: Final[list[Engine]] = []
"""Engines of a parent process: never used, closed or collected here, for their connections are the parent's."""

METADATA: Final = MetaData()


def _of_a_session() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["owner", "session_id"], ["agentic_kb_sessions.owner", "agentic_kb_sessions.id"], ondelete="CASCADE"
    )


sessions: Final = Table(
    "agentic_kb_sessions",
    METADATA,
    Column("owner", String(MAX_NAME), primary_key=True),
    Column("id", String(MAX_ID), primary_key=True),
    Column("display_name", Text, nullable=False),
    Column("user_pseudo_id", Text, nullable=False),
    Column("is_pinned", Boolean, nullable=False),
    Column("turn_count", Integer, nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Index("agentic_kb_sessions_by_update", "owner", "updated_at", "id"),
)
labels: Final = Table(
    "agentic_kb_session_labels",
    METADATA,
    Column("owner", String(MAX_NAME), primary_key=True),
    Column("session_id", String(MAX_ID), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("label", Text, nullable=False),
    _of_a_session(),
)
turns: Final = Table(
    "agentic_kb_turns",
    METADATA,
    Column("owner", String(MAX_NAME), primary_key=True),
    Column("session_id", String(MAX_ID), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("answer_id", String(MAX_ID), nullable=False),
    Column("question", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("completed_at", BigInteger, nullable=False),
    UniqueConstraint("owner", "session_id", "answer_id", name="agentic_kb_turns_answer"),
    _of_a_session(),
)


def microseconds(moment: datetime) -> int:
    """Return a time as microseconds since 1970; raise ``TypeError`` for one without a zone."""
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


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
        self._url = _database_url(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self._connections = connections
        self._engine = self._make_engine()
        reset_after_fork(self)
        if self._is_sqlite:
            with suppress(OSError):  # conversations are their owner's alone
                os.close(os.open(str(self._url.database), os.O_CREAT, 0o600))
        deadline = time.monotonic() + timeout
        if self.transact(_revision, write=False, deadline=deadline, what="opening the sessions") != REVISION:
            self.transact(_upgrade, write=True, deadline=deadline, what="upgrading the sessions")

    def close(self) -> None:
        """Close idle connections."""
        self._engine.dispose()

    def reset(self) -> None:
        """Begin anew in a forked child; the parent's connections are left as they are."""
        _inherited.append(self._engine)
        self._engine = self._make_engine()

    def transact(self, work: Callable[[Connection], T], *, write: bool, deadline: float, what: str) -> T:
        """Run work in one transaction, and commit it; what it raises rolls it back.

        Args:
            work: Takes the connection. It may be run again after a broken connection, even if it was committed.
            write: Whether it writes; one writer at a time. Else it reads all from one moment.
            deadline: ``time.monotonic()`` at which it is given up.
            what: Names it in errors.

        Raises:
            DeadlineExceededError: It waited too long for other writers, or for a server that is not there.
            SessionStoreError: The database failed.
        """
        pause = 0.02
        while True:
            try:
                with self._transaction(write=write, seconds=max(deadline - time.monotonic(), 0.001)) as connection:
                    return work(connection)
            except DBAPIError as error:
                left = deadline - time.monotonic()
                # Without the statement and its parameters: these are people's questions.
                message = f"{what}: {_text.one_line(_text.redacted(str(error.orig)))}"
                if _code(error) in _TOO_SLOW or (left <= 0 and _is_passing(error)):
                    raise DeadlineExceededError(f"{message} (not done by its deadline)") from error
                if not _is_passing(error):
                    raise SessionStoreError(message) from error
            time.sleep(min(pause, max(left, 0.0)))
            pause = min(pause * 2, 1.0)

    @contextmanager
    def _transaction(self, *, write: bool, seconds: float) -> Iterator[Connection]:
        milliseconds = int(seconds * 1000) + 1
        options: dict[str, Any] = {"write": write, "busy": milliseconds}
        if not self._is_sqlite:
            options = {} if write else {"isolation_level": "REPEATABLE READ"}
        with self._engine.connect().execution_options(**options) as connection, connection.begin():
            if not self._is_sqlite:  # the server gives up when the caller does
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = {milliseconds}")
            if not self._is_sqlite and write:
                connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
            yield connection

    def _make_engine(self) -> Engine:
        if self._is_sqlite:
            engine = create_engine(self._url, poolclass=NullPool)
            event.listen(engine, "connect", _set_up_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        try:
            return create_engine(
                self._url,
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


def _set_up_sqlite(connection: SQLiteConnection, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says, not where sqlite3 guesses
    # FULL: a turn counts as stored once its transaction ends, even if the power fails right after.
    for setting in ("busy_timeout = 1000", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {options['busy']}")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options["write"] else "BEGIN")


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar()  # noqa: S608 (a constant)
    return found


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


def _is_passing(error: DBAPIError) -> bool:
    """Return whether it may go well a moment later: SQLite is busy, the server is away, two were in conflict."""
    if re.search("database (table )?is locked", str(error.orig)):
        return True
    of_sqlite = type(error.orig).__module__.startswith("sqlite3")
    lost = error.connection_invalidated or (type(error.orig).__name__ == "OperationalError" and not of_sqlite)
    return lost or _code(error) in _PASSING
