"""The session database (SQLite or PostgreSQL): its schema, migrations and durable transactions.

Times are microseconds since 1970 in UTC, in both databases. Questions and answers are stored as ASCII JSON, so that
any text can be stored, including NUL and lone surrogates. A transaction whose connection breaks is retried until its
deadline, so its work must be idempotent.
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
from llama_index_agentic_kb.store.database import remedy

T = TypeVar("T")

REVISION: Final = "0003"
"""The latest revision of the tables and of the JSON in them; a change to either needs a new revision."""
VERSION_TABLE: Final = "agentic_kb_sessions_version"
MAX_NAME: Final = 512
"""The maximum length of an owner's key, in characters."""
MAX_ID: Final = 128
"""The maximum length of a session's or answer's id, in characters."""
_UPGRADE_LOCK: Final = 7_391_204_118
"""The key of the PostgreSQL advisory lock that allows one process at a time to upgrade the database."""
_TOO_SLOW: Final = frozenset({"57014", "55P03"})
"""PostgreSQL's error codes for statement timeouts and lock timeouts."""
_PASSING: Final = frozenset({"40001", "40P01", "23505", "57P01", "57P02", "57P03", "53300"})
"""PostgreSQL's error codes that are retried: conflicts (including concurrent creation of one session), server shutdown
or startup, and too many clients."""
_ALEMBIC: Final = threading.Lock()  # Alembic's proxies are global
_inherited: Final[list[Engine]] = []
"""Engines inherited from a parent process; never used, closed or garbage-collected, since the parent owns them."""

METADATA: Final = MetaData()


def _of_a_session() -> tuple[Column[str], Column[str], ForeignKeyConstraint]:
    """Return the columns that refer to a session, as part of the primary key; deleting it deletes the rows."""
    referred = ["agentic_kb_sessions.owner", "agentic_kb_sessions.id"]
    return (
        Column("owner", String(MAX_NAME), primary_key=True),
        Column("session_id", String(MAX_ID), primary_key=True),
        ForeignKeyConstraint(["owner", "session_id"], referred, ondelete="CASCADE"),
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
    *_of_a_session(),
    Column("position", Integer, primary_key=True),
    Column("label", Text, nullable=False),
)
turns: Final = Table(
    "agentic_kb_turns",
    METADATA,
    *_of_a_session(),
    Column("number", Integer, primary_key=True),
    Column("answer_id", String(MAX_ID), nullable=False),
    Column("question", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("completed_at", BigInteger, nullable=False),
    UniqueConstraint("owner", "session_id", "answer_id", name="agentic_kb_turns_answer"),
)


states: Final = Table(
    "agentic_kb_session_states",
    METADATA,
    *_of_a_session(),
    Column("data", Text, nullable=False),
)


def microseconds(moment: datetime) -> int:
    """Return a time as microseconds since 1970; raise ``TypeError`` if it has no time zone."""
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


class SessionDatabase:
    """A database engine whose connections are configured for durable transactions.

    SQLite: write-ahead log, ``synchronous=FULL``, one connection per transaction (a forked child inherits no open
    connection). PostgreSQL: ``synchronous_commit=on``, a pool of connections that are checked before use.

    Args:
        url: A path (SQLite), or a URL: ``sqlite:///...``, ``postgresql://...`` (psycopg 3).
        connections: The maximum number of concurrent PostgreSQL connections.
        timeout: The time limit for opening the database, in seconds.

    Raises:
        ConfigurationError: The URL is invalid, its driver is not installed, or a newer release created the database.
        SessionStoreError: The database can't be opened.
    """

    def __init__(self, url: str | Path, *, connections: int, timeout: float) -> None:
        self._url = _database_url(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self._connections = connections
        self._engine = self._make_engine()
        reset_after_fork(self)
        if self._is_sqlite:
            with suppress(OSError):  # readable only by the file's owner
                os.close(os.open(str(self._url.database), os.O_CREAT, 0o600))
        deadline = time.monotonic() + timeout
        if self.transact(_revision, write=False, deadline=deadline, what="opening the sessions") != REVISION:
            self.transact(_upgrade, write=True, deadline=deadline, what="upgrading the sessions")

    def close(self) -> None:
        """Close idle connections."""
        self._engine.dispose()

    def reset(self) -> None:
        """Replace the engine in a forked child, without closing the parent's connections."""
        _inherited.append(self._engine)
        self._engine = self._make_engine()

    def transact(self, work: Callable[[Connection], T], *, write: bool, deadline: float, what: str) -> T:
        """Run a function in one transaction and commit it; an exception rolls it back.

        Args:
            work: A function of the connection. After a connection error it may run again, even if it was committed.
            write: Whether the transaction writes. A read-only transaction sees one snapshot.
            deadline: The ``time.monotonic()`` value after which the transaction is aborted.
            what: The name of the operation in error messages.

        Raises:
            DeadlineExceededError: The deadline passed while waiting for other writers or an unreachable server.
            SessionStoreError: The database reported an error that can't be retried.
        """
        pause = 0.02
        while True:
            try:
                with self._transaction(write=write, seconds=max(deadline - time.monotonic(), 0.001)) as connection:
                    return work(connection)
            except DBAPIError as error:
                left = deadline - time.monotonic()
                # Without the statement and its parameters, which contain users' questions.
                message = f"{what}: {_text.one_line(_text.redacted(str(error.orig)))}"
                if _code(error) in _TOO_SLOW or (left <= 0 and _is_passing(error)):
                    raise DeadlineExceededError(f"{message} (not done by its deadline)") from error
                if not _is_passing(error):
                    raise SessionStoreError(f"{message}. {remedy(error.orig)}".rstrip(" .")) from error
            time.sleep(min(pause, max(left, 0.0)))
            pause = min(pause * 2, 1.0)

    @contextmanager
    def _transaction(self, *, write: bool, seconds: float) -> Iterator[Connection]:
        milliseconds = int(seconds * 1000) + 1
        options: dict[str, Any] = {"write": write, "busy": milliseconds}
        if not self._is_sqlite:
            options = {} if write else {"isolation_level": "REPEATABLE READ"}
        with self._engine.connect().execution_options(**options) as connection, connection.begin():
            if not self._is_sqlite:  # the server aborts at the caller's deadline
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
    connection.isolation_level = None  # SQLAlchemy begins transactions, not sqlite3 implicitly
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
    """Migrate the tables to the latest revision; wait if another process is already migrating them."""
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
    """Return whether an error is transient: SQLite is locked, the server is unreachable, or transactions conflict."""
    if re.search("database (table )?is locked", str(error.orig)):
        return True
    of_sqlite = type(error.orig).__module__.startswith("sqlite3")
    lost = error.connection_invalidated or (type(error.orig).__name__ == "OperationalError" and not of_sqlite)
    return lost or _code(error) in _PASSING
