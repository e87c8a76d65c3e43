"""SQL databases (SQLite or PostgreSQL): engines, durable transactions with retries, migrations by Alembic, tables.

A transaction whose connection breaks is retried until its deadline, so its work must be idempotent.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy import Column, Connection, Engine, String, Table
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from llama_index_agentic_kb import _text
from llama_index_agentic_kb._aio import WorkerPool, reset_after_fork
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, DeadlineExceededError, SessionStoreError

T = TypeVar("T")

_UPGRADE_LOCK: Final = 7_391_204_118
"""The key of the PostgreSQL advisory lock that allows one process at a time to upgrade the database."""
CONNECTIONS: Final = 8  # the maximum number of concurrent connections to PostgreSQL
_TOO_SLOW: Final = frozenset({"57014", "55P03"})  # PostgreSQL's error codes for statement timeouts and lock timeouts
_PASSING: Final = frozenset({"40001", "40P01", "23505", "57P01", "57P02", "57P03", "53300"})
"""PostgreSQL's error codes that are retried: conflicts (including concurrent creation of one session), server shutdown
or startup, and too many clients."""
_REMEDIES: Final = {
    "locked|busy": "Another program holds it locked: wait for that to end, or end it, then run this again.",
    "full|disk I/O": "Make room on the disk, then run this again: what was stored before stays.",
    "readonly|unable to open": "Grant this user the right to write into its directory, or copy it to where it may be "
    "written.",
    "53100": "Make room on the server's disk, then run this again: what was stored before stays.",
}
"""What to do about an error, by a text in SQLite's message, or by PostgreSQL's error code."""
_ALEMBIC: Final = threading.Lock()  # Alembic's proxies are global
_inherited: Final[list[Engine]] = []
"""Engines inherited from a parent process; never used, closed or garbage-collected, since the parent owns them."""


@dataclass(frozen=True)
class Revisions:
    """The versions of a set of tables, which Alembic migrates."""

    what: str  # the tables' content, in error messages and as the folder of Alembic's scripts
    latest: str  # the latest revision, of the tables and of the JSON in them; a change to either needs a new one
    table: str  # the table that holds the revision of a database
    schema: str = ""  # the PostgreSQL schema of the tables. Defaults to the first one of the connection's search path.

    def found(self, connection: Connection) -> str | None:
        """Return the revision of a database; None if it has no such tables."""
        if not sa.inspect(connection).has_table(self.table):
            return None
        found: str | None = connection.exec_driver_sql(f"SELECT version_num FROM {self.table}").scalar()  # noqa: S608 (a constant)
        return found

    def upgrade(self, connection: Connection) -> None:
        """Migrate the tables to the latest revision; wait if another process is already migrating them."""
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
        found = self.found(connection)
        if found == self.latest:
            return
        if found is not None and found > self.latest:
            raise ConfigurationError(
                f"{self.what}: the database has revision {found}; this release knows {self.latest}. "
                "Upgrade llama-index-agentic-kb."
            )
        from alembic import command  # noqa: PLC0415 (only for databases that are new or old)
        from alembic.config import Config  # noqa: PLC0415 (same)

        if self.schema:
            connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")
        config, scripts = Config(), Path(__file__).with_name("migrations")
        config.set_main_option("path_separator", "newline")  # a path may have any other character
        for option, folder in (("script_location", scripts), ("version_locations", scripts / self.what)):
            config.set_main_option(option, str(folder).replace("%", "%%"))
        config.attributes |= {"connection": connection, "version_table": self.table}
        with _ALEMBIC:
            command.upgrade(config, self.latest)


class SqlDatabase:
    """A database engine whose connections are configured for durable transactions.

    SQLite: write-ahead log, ``synchronous=FULL``, a file that only its owner can read. PostgreSQL:
    ``synchronous_commit=on``, a pool of connections that are checked before use.

    Args:
        url: A path (SQLite), or a URL: ``sqlite:///...``, ``postgresql://...`` (psycopg 3).
        revisions: The tables, which are created or migrated. Without them, the caller makes the tables, and connections
            to SQLite are kept open, which a forked child must not use; else each transaction has one of its own.
        timeout: The time limit for opening the database, and of `atransact`, in seconds.
        create: Whether to create missing tables. Defaults to True.

    Raises:
        ConfigurationError: The URL is invalid, its driver is not installed, or a newer release created the database.
        SessionStoreError: The database can't be opened.
    """

    def __init__(
        self, url: str | Path, revisions: Revisions | None = None, *, timeout: float = 30.0, create: bool = True
    ) -> None:
        what = revisions.what if revisions else "documents"
        self._timeout = timeout
        self._schema = revisions.schema if revisions else ""
        self._threads = WorkerPool(what, CONNECTIONS)
        self._url = _database_url(url, what)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self._pool: JsonObject = {"poolclass": sa.NullPool} if revisions else {"max_overflow": -1}
        if self._is_sqlite:
            file = Path(str(self._url.database)).absolute()
            with suppress(OSError):
                os.close(os.open(file, os.O_CREAT, 0o600))
            # "rw": a file that somebody deletes is not made again.
            self._url = URL.create("sqlite", database=file.as_uri(), query={"uri": "true", "mode": "rw"})
        self._engine = self._make_engine()
        reset_after_fork(self)
        try:
            if revisions is not None:
                deadline = time.monotonic() + timeout
                found = self.transact(revisions.found, write=False, deadline=deadline, what=f"opening the {what}")
                if found is None and not create:
                    remedy = "make them with `agentic-kb ingest FOLDER --store URL`"
                    raise ConfigurationError(f"there are no {what} in this database; {remedy}")  # noqa: TRY301 (closes)
                if found != revisions.latest:
                    self.transact(revisions.upgrade, write=True, deadline=deadline, what=f"upgrading the {what}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close idle connections."""
        self._engine.dispose()

    def reset(self) -> None:
        """Replace the engine in a forked child, without closing the parent's connections."""
        _inherited.append(self._engine)
        self._engine = self._make_engine()

    def transact(self, work: Callable[[Connection], T], *, write: bool, deadline: float, what: str) -> T:
        """Run a function in one transaction and commit it; an exception rolls it back.

        ``work`` may run again after a connection error, even if it was committed. A read-only transaction sees one
        snapshot. At the deadline (of ``time.monotonic()``) it is aborted with ``DeadlineExceededError``; other errors
        of the database become ``SessionStoreError``. ``what`` names the operation in error messages.
        """
        with self.translated(what, SessionStoreError):
            return self.attempt(work, deadline, write=write)

    async def atransact(
        self, work: Callable[[Connection], T], *, write: bool, deadline: float | None = None, what: str
    ) -> T:
        """Run `transact` on a thread; the deadline defaults to the database's time limit, and can't be later."""
        from llama_index_agentic_kb._aio import Call  # noqa: PLC0415 (loads LlamaIndex, which a store needs not)

        limit = time.monotonic() + self._timeout
        until = limit if deadline is None else min(limit, deadline)
        transact = partial(self.transact, work, write=write, deadline=until, what=what)
        return await Call(sync=transact, deadline=until, pool=self._threads, what=what)

    def attempt(self, work: Callable[[Connection], T], deadline: float, *, write: bool) -> T:
        """Run a function in one transaction as `transact` does, and leave the database's errors as they are."""

        def run() -> T:
            with self.transaction(write=write, seconds=deadline - time.monotonic()) as connection:
                return work(connection)

        return self.retry(run, deadline)

    def retry(self, run: Callable[[], T], deadline: float) -> T:
        """Run a function, again and again while the connection breaks, until a deadline; see `transact`."""
        pause = 0.02
        while True:
            try:
                return run()
            except (DBAPIError, PoolTimeoutError) as error:
                left = deadline - time.monotonic()
                if left <= 0 or (isinstance(error, DBAPIError) and not _is_passing(error)):
                    raise
            time.sleep(min(pause, left))
            pause = min(pause * 2, 1.0)

    @staticmethod
    @contextmanager
    def translated(what: str, error_class: type[AgenticKBError]) -> Iterator[None]:
        """Convert the database's errors: what it did not do in time is ``DeadlineExceededError``."""
        try:
            yield
        except PoolTimeoutError as error:
            raise DeadlineExceededError(f"{what}: all connections are in use") from error
        except DBAPIError as error:
            late = _code(error) in _TOO_SLOW or _is_passing(error)
            reason = _text.one_line(_text.redacted(str(error.orig)))  # without the statement and its parameters
            message = f"{what}: {reason}{' (not done by its deadline)' if late else ''}. {remedy_of(error)}"
            raise (DeadlineExceededError if late else error_class)(message.rstrip(" .")) from error

    @contextmanager
    def transaction(self, *, write: bool, seconds: float) -> Iterator[Connection]:
        """Run the ``with`` block as one transaction, without retries; statements are aborted after so many seconds."""
        milliseconds = int(max(seconds, 0.0) * 1000) + 1
        options: JsonObject = {"write": write, "busy": milliseconds}
        if not self._is_sqlite:
            options = {} if write else {"isolation_level": "REPEATABLE READ"}
        with self._engine.connect().execution_options(**options) as connection, connection.begin():
            if not self._is_sqlite:  # the server aborts at the caller's deadline
                first = f"SET LOCAL statement_timeout = {milliseconds}; SET LOCAL synchronous_commit = on"
                if self._schema:
                    path = f"'{self._schema}, ' || current_setting('search_path')"
                    first += f"; SELECT set_config('search_path', {path}, true)"
                connection.exec_driver_sql(first)
            yield connection

    def driver(self) -> Any:
        """Return a pooled connection, whose methods are the driver's; its errors are not converted."""
        return self._engine.raw_connection()

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """Yield a connection outside of transactions, for what PostgreSQL refuses in one; nothing limits its time."""
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield connection

    def _make_engine(self) -> Engine:
        if self._is_sqlite:
            engine = sa.create_engine(self._url, **self._pool)
            sa.event.listen(engine, "connect", _set_up_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
            return engine
        try:
            return sa.create_engine(
                self._url,
                pool_size=CONNECTIONS,
                max_overflow=0,
                pool_timeout=0.5,  # `retry` asks again until its deadline
                pool_pre_ping=True,
                connect_args={"connect_timeout": 5, "application_name": "llama-index-agentic-kb"},
            )
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"{error.name} is needed for PostgreSQL: pip install 'llama-index-agentic-kb[postgres]'"
            ) from error


def parsed_url(given: str) -> URL | None:
    """Return the URL of a database, whose passwords are from then on removed from errors and logs; None for no URL."""
    try:
        url = sa.make_url(given)
        url.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError):
        return None
    _text.know_secrets(filter(None, [url.password and str(url.password)]))
    for name, values in url.normalized_query.items():
        if _text.redacted(f"?{name}=value") != f"?{name}=value":  # the name of a secret
            _text.know_secrets(values)
    return url


def _database_url(given: str | Path, what: str) -> URL:
    if isinstance(given, Path) or "://" not in given:
        return URL.create("sqlite", database=str(Path(given).absolute()))
    url = parsed_url(given)
    if url is None or url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigurationError(f"{what}: the URL begins with sqlite:/// or postgresql://; a plain path is SQLite too")
    if url.get_backend_name() == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if not url.database or url.database == ":memory:":
        raise ConfigurationError(f"{what}: SQLite keeps them in a file; give its path")
    if url.query:
        raise ConfigurationError(f"{what}: a sqlite:/// URL takes no options; found {', '.join(sorted(url.query))}")
    return url


def _set_up_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy begins transactions, not sqlite3 implicitly
    # FULL: a turn counts as stored once its transaction ends, even if the power fails right after.
    for setting in ("busy_timeout = 1000", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {options['busy']}")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options["write"] else "BEGIN")


def remedy_of(error: BaseException | None, remedies: Mapping[str, str] = _REMEDIES) -> str:
    """Return what to do about an error of the database; empty if unknown."""
    if not isinstance(error, DBAPIError):
        return ""
    text = str(error.orig) if isinstance(error.orig, sqlite3.OperationalError) else _code(error)
    return next((remedy for words, remedy in remedies.items() if re.search(words, text)), "")


def _code(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")


def _is_passing(error: DBAPIError) -> bool:
    """Return whether an error is transient: SQLite is locked, the server is unreachable, or transactions conflict."""
    if re.search("database (table )?is locked", str(error.orig)):
        return True
    if re.search("FATAL: .*(authentication|does not exist|permission denied)", str(error.orig)):
        return False
    of_sqlite = type(error.orig).__module__.startswith("sqlite3")
    lost = error.connection_invalidated or (type(error.orig).__name__ == "OperationalError" and not of_sqlite)
    return _code(error) not in _TOO_SLOW and (lost or _code(error) in _PASSING)


# -- the tables of sessions and of the server --------------------------------------------------------------------------
#
# Questions and answers are ASCII JSON, so that any text can be stored, including NUL and lone surrogates.

SESSIONS: Final = Revisions("sessions", "0003", "agentic_kb_sessions_version")
MAX_NAME: Final = 512  # the maximum length of an owner's key, in characters
MAX_ID: Final = 128  # the maximum length of a session's or answer's id, in characters
METADATA: Final = sa.MetaData()


class Moment(sa.TypeDecorator[datetime]):
    """A time with a zone, stored as microseconds since 1970 in UTC."""

    impl, cache_ok = sa.BigInteger, True
    _start: Final = datetime.fromtimestamp(0, UTC)

    def process_bind_param(self, value: datetime | None, dialect: object) -> int | None:  # noqa: ARG002, D102 (SQLAlchemy's)
        return None if value is None else (value - self._start) // timedelta(microseconds=1)

    def process_result_value(self, value: int | None, dialect: object) -> datetime | None:  # noqa: ARG002, D102 (same)
        return None if value is None else self._start + timedelta(microseconds=value)


def _of_a_session() -> tuple[Column[str], Column[str], sa.ForeignKeyConstraint]:
    """Return the columns that refer to a session, as part of the primary key; deleting it deletes the rows."""
    referred = ["agentic_kb_sessions.owner", "agentic_kb_sessions.id"]
    return (
        Column("owner", String(MAX_NAME), primary_key=True),
        Column("session_id", String(MAX_ID), primary_key=True),
        sa.ForeignKeyConstraint(["owner", "session_id"], referred, ondelete="CASCADE"),
    )


sessions: Final = Table(
    "agentic_kb_sessions",
    METADATA,
    Column("owner", String(MAX_NAME), primary_key=True),
    Column("id", String(MAX_ID), primary_key=True),
    Column("display_name", sa.Text, nullable=False),
    Column("user_pseudo_id", sa.Text, nullable=False),
    Column("is_pinned", sa.Boolean, nullable=False),
    Column("turn_count", sa.Integer, nullable=False),
    Column("started_at", Moment, nullable=False),
    Column("updated_at", Moment, nullable=False),
    Column("ended_at", Moment),
    sa.Index("agentic_kb_sessions_by_update", "owner", "updated_at", "id"),
)
labels: Final = Table(
    "agentic_kb_session_labels",
    METADATA,
    *_of_a_session(),
    Column("position", sa.Integer, primary_key=True),
    Column("label", sa.Text, nullable=False),
)
turns: Final = Table(
    "agentic_kb_turns",
    METADATA,
    *_of_a_session(),
    Column("number", sa.Integer, primary_key=True),
    Column("answer_id", String(MAX_ID), nullable=False),
    Column("question", sa.Text, nullable=False),
    Column("answer", sa.Text, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("completed_at", Moment, nullable=False),
    sa.UniqueConstraint("owner", "session_id", "answer_id", name="agentic_kb_turns_answer"),
)


states: Final = Table("agentic_kb_session_states", METADATA, *_of_a_session(), Column("data", sa.Text, nullable=False))

# The server's: definitions of knowledge bases and sources, and hashes of API keys.
definitions: Final = Table(
    "agentic_kb_definitions",
    METADATA,
    Column("kind", String(32), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("etag", String(64), nullable=False),
    Column("definition", sa.Text, nullable=False),  # ASCII JSON
    Column("updated_at", Moment, nullable=False),
)
api_keys: Final = Table(
    "agentic_kb_api_keys",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("role", String(16), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("created_at", Moment, nullable=False),
)
