"""The sessions' database: how it is opened, upgraded and shared, and what it does when it is not there."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import psycopg
import pytest

from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, SessionStoreError
from llama_index_agentic_kb.schema.answer import Answer
from llama_index_agentic_kb.store import sql
from llama_index_agentic_kb.store.session_database import SESSIONS
from llama_index_agentic_kb.store.sessions import SessionStore
from tests.kills_sessions.postgres import PostgresServer, why_not

ANSWER = Answer(text="a")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A real server, for these tests alone: it is stopped."""
    if reason := why_not():
        pytest.skip(reason)
    with PostgresServer() as server:
        yield server


@pytest.mark.slow
def test_tables_are_made_once_in_postgresql(postgres: PostgresServer) -> None:
    """By eight stores that are opened at once."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE once")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: SessionStore(postgres.url.removesuffix("postgres") + "once").close(), range(8)))


def test_a_store_is_opened_by_many_at_once(path: Path) -> None:
    """Threads and processes that open a new store at the same moment all get it, made once."""
    program = (
        "import sys; from llama_index_agentic_kb.store.sessions import SessionStore;"
        "from llama_index_agentic_kb.schema.answer import Answer;"
        "SessionStore(sys.argv[1]).add_turn('o', '-', 'Q?', Answer())"
    )
    processes = [subprocess.Popen([sys.executable, "-W", "error", "-c", program, str(path)]) for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: SessionStore(path).close(), range(4)))
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    with SessionStore(path) as store:
        assert len(store.list_sessions("o").sessions) == 2


def test_what_is_stored_outlives_the_store(path: Path) -> None:
    """A store that is opened anew, by path or by URL, has what was stored; it is durable by its settings."""
    with SessionStore(path) as store:
        turn = store.add_turn("o", "-", "Q?", ANSWER)
        settings: list[Any] = []

        def look(connection: Any) -> None:
            for name in ("journal_mode", "synchronous", "foreign_keys"):
                settings.append(connection.exec_driver_sql(f"PRAGMA {name}").scalar())

        store._database.transact(look, write=True, deadline=time.monotonic() + 9, what="looking")
        assert settings == ["wal", 2, 1]
    with SessionStore(f"sqlite:///{path}") as store:
        assert store.get("o", turn.session_id).turns[0].query == "Q?"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://h/d", "the URL begins with sqlite:/// or postgresql://"),
        ("://", "the URL begins with sqlite:///"),
        ("sqlite://", "SQLite keeps them in a file; give its path"),
        ("sqlite:///:memory:", "SQLite keeps them in a file"),
        ("sqlite:///x.db?mode=ro", "a sqlite:/// URL takes no options; found mode"),
    ],
)
def test_urls_that_can_not_be_used_are_refused(url: str, message: str) -> None:
    """The remedy is told."""
    with pytest.raises(ConfigurationError, match=message):
        SessionStore(url)
    with pytest.raises(ConfigurationError, match="timeout must be positive"):
        SessionStore("x", timeout=0)


def test_a_database_of_a_newer_release_is_refused(path: Path) -> None:
    """It is left as it is, and the remedy is told."""
    SessionStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {SESSIONS.table} SET version_num = '9999'")
    connection.close()
    with pytest.raises(ConfigurationError, match=r"has revision 9999; this release knows .* Upgrade"):
        SessionStore(path)


def test_a_file_that_is_no_database_is_refused(path: Path, tmp_path: Path) -> None:
    """Neither a text nor a folder that is not there is taken for a store."""
    path.write_text("no database, but long enough to look like one " * 100)
    with pytest.raises(SessionStoreError, match="opening the sessions: file is not a database"):
        SessionStore(path)
    assert path.read_text().startswith("no database")
    with pytest.raises(SessionStoreError, match="unable to open database file"):
        SessionStore(tmp_path / "nowhere" / "sessions.db")


async def test_a_writer_that_holds_on_costs_the_deadline(path: Path) -> None:
    """While another program writes, a write waits until its deadline, a read not at all; afterwards all is well."""
    store = SessionStore(path)
    turn = store.add_turn("o", "-", "Q?", ANSWER)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DeadlineExceededError):
        store.add_turn("o", turn.session_id, "R?", ANSWER, deadline=time.monotonic() + 0.3)
    with pytest.raises(DeadlineExceededError):
        await store.aadd_turn("o", turn.session_id, "R?", ANSWER, deadline=time.monotonic() + 0.3)
    assert len(store.get("o", turn.session_id, deadline=time.monotonic() + 30).turns) == 1
    other.execute("ROLLBACK")
    other.close()
    assert store.add_turn("o", turn.session_id, "S?", ANSWER).number >= 2


def test_a_failing_transaction_leaves_nothing(path: Path) -> None:
    """What raises in the middle of storing a turn leaves the session as it was; the error tells no question."""
    store = SessionStore(path)
    turn = store.add_turn("o", "-", "Q?", ANSWER)
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TRIGGER broken BEFORE UPDATE ON agentic_kb_sessions BEGIN SELECT RAISE(ABORT, 'disk on fire'); END"
    )
    connection.commit()
    with pytest.raises(SessionStoreError, match="storing a turn: disk on fire") as failed:
        store.add_turn("o", turn.session_id, "my secret question", ANSWER)
    assert "secret" not in str(failed.value)
    assert len(store.get("o", turn.session_id).turns) == 1
    connection.execute("DROP TRIGGER broken")
    connection.commit()
    connection.close()
    assert store.add_turn("o", turn.session_id, "R?", ANSWER).number == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("database", ["path", pytest.param("postgres", marks=pytest.mark.slow)])
def test_a_forked_child_goes_on_with_the_store(request: pytest.FixtureRequest, database: str) -> None:
    """Parent and child both write, each over connections of its own: the child doesn't touch the parent's."""
    found = request.getfixturevalue(database)
    with SessionStore(getattr(found, "url", found)) as store:
        turn = store.add_turn("fork", "-", "parent", ANSWER)
        if (pid := os.fork()) == 0:
            try:
                store.add_turn("fork", turn.session_id, "child", ANSWER)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        store.add_turn("fork", turn.session_id, "parent again", ANSWER)
        asked = [one.query for one in store.get("fork", turn.session_id).turns]
    assert asked == ["parent", "child", "parent again"]
    assert sql._inherited == []  # only a child has inherited any


@pytest.mark.slow
def test_a_server_that_hangs_costs_the_deadline(postgres: PostgresServer) -> None:
    """A server that is stopped in the middle answers nothing: the caller is free at the deadline, and goes on later."""
    with SessionStore(postgres.url, timeout=60.0) as store:
        turn = store.add_turn("o", "-", "Q?", ANSWER)
        server = psutil.Process(postgres.pid)
        stopped = [server, *server.children()]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            begun = time.monotonic()
            with pytest.raises(DeadlineExceededError):
                store.get("o", turn.session_id, deadline=time.monotonic() + 0.5)
            assert time.monotonic() - begun < 10
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        assert store.add_turn("o", turn.session_id, "R?", ANSWER).number == 2


def test_a_missing_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without psycopg the error names what to install."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigurationError, match=r"psycopg is needed for PostgreSQL: pip install .*\[postgres\]"):
        SessionStore("postgresql://127.0.0.1/x")
