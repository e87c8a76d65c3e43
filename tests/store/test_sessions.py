"""Sessions in both databases: turns whole and in order, each owner apart; and how the databases are opened and fail."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from sqlalchemy import Connection, select

from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    SessionStoreError,
)
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterNode
from llama_index_agentic_kb.schema.answer import (
    Answer,
    AnswerState,
    ChunkReference,
    Citation,
    Session,
    SessionChanges,
    SessionOrder,
    SessionQuery,
    Turn,
)
from llama_index_agentic_kb.store import sql
from llama_index_agentic_kb.store.sessions import SessionStore
from llama_index_agentic_kb.store.sql import SESSIONS, labels, turns
from llama_index_agentic_kb.wire.google import decode_list_sessions
from tests.kills_sessions.postgres import PostgresServer
from tests.wire.strategies import TEXTS, answers

ANSWER = Answer(
    text="Cameron.", citations=[Citation(start=0, end=8, sources=[0])], references=[ChunkReference(chunk="c")]
)


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "sqlite":
        return str(tmp_path_factory.mktemp("sessions") / "sessions.db")
    return str(request.getfixturevalue("postgres").url)


@pytest.fixture
def store(url: str) -> Iterator[SessionStore]:
    with SessionStore(url) as opened:
        yield opened


@pytest.fixture
def owner() -> str:
    return uuid.uuid4().hex


def numbers(session: Session) -> list[int]:
    return [turn.number for turn in session.turns]


def attempts(store: SessionStore, owner: str, turn: Turn) -> list[Callable[[], object]]:
    return [
        lambda: store.get(owner, turn.session_id),
        lambda: store.delete(owner, turn.session_id),
        lambda: store.update(owner, turn.session_id, SessionChanges(display_name="x")),
        lambda: store.add_turn(owner, turn.session_id, "S?", ANSWER),
        lambda: store.get_answer(owner, turn.session_id, turn.answer_id),
        lambda: store.session_messages(owner, turn.session_id),
    ]


def test_a_session_is_made_by_its_first_turn(store: SessionStore, owner: str) -> None:
    """``-`` makes a session that is named for its first question; later turns follow, with whole answers on request."""
    first = store.add_turn(owner, "-", "Who directed\nTitanic?", ANSWER, query_id="q", query_config={"a": "b"})
    second = store.add_turn(owner, first.session_id, "And Avatar?", Answer(id="mine", text="He too."))
    assert (first.number, second.number, second.answer_id) == (1, 2, "mine")
    session = store.get(owner, first.session_id)
    assert (session.display_name, numbers(session)) == ("Who directed Titanic?", [1, 2])
    assert [turn.answer for turn in session.turns] == [None, None]
    assert (session.turns[0].query, session.turns[0].query_config) == ("Who directed\nTitanic?", {"a": "b"})
    assert session.started_at <= session.turns[0].completed_at <= session.updated_at == session.ended_at
    whole = store.get(owner, first.session_id, include_answers=True)
    assert [turn.answer for turn in whole.turns] == [first.answer, second.answer]
    assert first.answer == ANSWER.model_copy(update={"id": first.answer_id})
    assert store.get_answer(owner, first.session_id, "mine").text == "He too."


def test_a_session_is_made_changed_and_deleted(store: SessionStore, owner: str) -> None:
    """What is said of a session is kept; a change touches nothing else; deleting takes turns and answers along."""
    made = store.create(owner, SessionChanges(labels=["b", "a", "b"], user_pseudo_id="u"))
    assert (made.labels, made.user_pseudo_id, made.display_name, made.is_pinned) == (["b", "a"], "u", "", False)
    turn = store.add_turn(owner, made.id, "Q?", ANSWER)
    changed = store.update(owner, made.id, SessionChanges(is_pinned=True, display_name="N"))
    assert (changed.is_pinned, changed.display_name, changed.labels) == (True, "N", ["b", "a"])
    assert store.update(owner, made.id, SessionChanges(labels=[])).labels == []
    store.add_turn(owner, made.id, "R?", ANSWER)
    assert store.get(owner, made.id).display_name == "N"
    store.update(owner, made.id, SessionChanges(labels=["c"]))
    store.delete(owner, made.id)

    def left(connection: Connection) -> int:
        return sum(
            len(connection.execute(select(table).where(table.c.owner == owner)).all()) for table in (turns, labels)
        )

    assert store._database.transact(left, write=False, deadline=time.monotonic() + 30, what="a test") == 0
    for again in attempts(store, owner, turn):
        with pytest.raises(NotFoundError, match="no session of this name"):
            again()


def test_owners_see_nothing_of_each_other(store: SessionStore, owner: str) -> None:
    """Another owner's session is not found, in the very words of one that is not there."""
    turn = store.add_turn(owner, "-", "Q?", ANSWER)
    mallory = owner + "x"
    for attempt in attempts(store, mallory, turn):
        with pytest.raises(NotFoundError) as refused:
            attempt()
        with pytest.raises(NotFoundError) as missing:
            store.get(mallory, "nothing")
        assert str(refused.value) == str(missing.value)
    assert store.list_sessions(mallory).sessions == []
    assert numbers(store.get(owner, turn.session_id)) == [1]
    with pytest.raises(NotFoundError, match="no answer of this name"):
        store.get_answer(owner, turn.session_id, "nothing")


def test_a_turn_stored_twice_is_stored_once(store: SessionStore, owner: str) -> None:
    """Who doesn't know whether a turn was stored stores it again under its answer's id, in a new session too."""
    answer = ANSWER.model_copy(update={"id": "once"})
    turn = store.add_turn(owner, "-", "Q?", answer)
    assert store.add_turn(owner, "-", "Q?", answer) == turn
    assert store.add_turn(owner, turn.session_id, "Q?", answer) == turn
    assert numbers(store.get(owner, turn.session_id)) == [1]


def test_turns_of_many_threads_and_tasks_keep_one_order(store: SessionStore, owner: str) -> None:
    """32 threads and 32 tasks store into one session: every turn is there once, numbered without a gap."""
    session_id = store.create(owner).id

    def add(name: str) -> list[int]:
        return [store.add_turn(owner, session_id, f"{name}.{at}", ANSWER).number for at in range(3)]

    async def tasks() -> list[int]:
        made = await asyncio.gather(*(store.aadd_turn(owner, session_id, f"a{at}", ANSWER) for at in range(32)))
        return [turn.number for turn in made]

    with ThreadPoolExecutor(32) as threads:
        begun = [threads.submit(add, f"t{at}") for at in range(32)]
        stored = asyncio.run(tasks()) + [number for one in begun for number in one.result()]
    session = store.get(owner, session_id)
    assert sorted(stored) == numbers(session) == list(range(1, 129))
    for at in range(32):  # each thread's own turns are in its order
        mine = [turn.query for turn in session.turns if turn.query.startswith(f"t{at}.")]
        assert mine == [f"t{at}.0", f"t{at}.1", f"t{at}.2"]
    times = [turn.completed_at for turn in session.turns]
    assert times == sorted(times)


def test_first_turns_at_once_make_one_session(store: SessionStore, owner: str) -> None:
    """A session of a given id is made by its first turn, by many at once too; only where the caller says so."""
    session_id, asked = uuid.uuid4().hex, [f"Q{at}" for at in range(16)]
    with pytest.raises(NotFoundError):
        store.add_turn(owner, session_id, "Q?", ANSWER)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda query: store.add_turn(owner, session_id, query, ANSWER, may_make=True), asked))
    session = store.get(owner, session_id)
    assert (sorted(turn.query for turn in session.turns), numbers(session)) == (sorted(asked), list(range(1, 17)))
    store.add_turn(owner + "x", session_id, "Mine", ANSWER, may_make=True)
    assert numbers(store.get(owner + "x", session_id)) == [1]
    assert len(store.get(owner, session_id).turns) == 16


def test_a_session_is_a_conversation(store: SessionStore, owner: str) -> None:
    """Its turns are messages, oldest first; only the newest where so many are wanted; none before the first."""
    assert store.session_messages(owner, "-") == []
    turn = store.add_turn(owner, "-", "A?", Answer(text="a"))
    for name in "BC":
        store.add_turn(owner, turn.session_id, f"{name}?", Answer(text=name.lower()))
    found = [(one.role, one.text) for one in store.session_messages(owner, turn.session_id)]
    assert found == [one for name in "ABC" for one in (("user", f"{name}?"), ("assistant", name.lower()))]
    assert [one.text for one in store.session_messages(owner, turn.session_id, last=1)] == ["C?", "c"]
    with pytest.raises(InvalidRequestError, match="last: at least 1 turn"):
        store.session_messages(owner, turn.session_id, last=0)


def without_metadata(data: Any) -> Any:
    """An answer's data but for what documents bring, which becomes JSON."""
    if isinstance(data, dict):
        return {key: without_metadata(value) for key, value in data.items() if key not in ("metadata", "data")}
    return [without_metadata(one) for one in data] if isinstance(data, list) else data


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(answer=answers(done=True), query=TEXTS)
def test_any_answer_comes_back_as_it_was(store: SessionStore, answer: Answer, query: str) -> None:
    """Text of any kind, NUL and lone surrogates included, is kept to the letter."""
    owner = uuid.uuid4().hex
    turn = store.add_turn(owner, "-", query, answer, query_config={query: query})
    (kept,) = store.get(owner, turn.session_id, include_answers=True).turns
    assert (kept.query, kept.query_config) == (query, {query: query})
    assert kept.answer is not None
    assert without_metadata(kept.answer.model_dump()) == without_metadata(answer.model_dump())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.get("", "s"), "owner: a text of 1 to 512 characters"),
        (lambda store: store.get("o" * 100_001, "s"), "owner: a text of 1 to 100000"),
        (lambda store: store.get("a\x00", "s"), "owner: it holds a NUL or a lone surrogate"),
        (lambda store: store.create("a\ud800"), "owner: it holds a NUL"),
        (lambda store: store.get("a", "s" * 129), "session: a text of 1 to 128"),
        (lambda store: store.get("a", "x/y"), "session: an id holds neither '/' nor white space"),
        (lambda store: store.add_turn("a", "-", "Q?", Answer(id="x y")), "answer.id: an id holds neither"),
        (
            lambda store: store.add_turn("a", "-", "Q?", Answer(state=AnswerState.STREAMING)),
            "answer.state: a turn holds a whole answer",
        ),
    ],
)
def test_what_can_not_be_stored_is_refused(store: SessionStore, call: Any, message: str) -> None:
    """The field is named, and nothing is stored."""
    with pytest.raises(InvalidRequestError, match=message):
        call(store)
    assert store.list_sessions("a").sessions == []


def test_owners_of_any_length_are_apart(store: SessionStore) -> None:
    """Principals of many groups have long names; nobody passes for one of them by the name that is stored for it."""
    long = uuid.uuid4().hex * 40
    turn = store.add_turn(long, "-", "Q?", ANSWER)
    store.update(long, turn.session_id, SessionChanges(labels=["x"]))
    assert [one.labels for one in store.list_sessions(long).sessions] == [["x"]]
    stored = "sha256:" + hashlib.sha256(long.encode()).hexdigest()
    for other in (long + "x", long[:512], stored):
        with pytest.raises(NotFoundError):
            store.get(other, turn.session_id)
    store.delete(long, turn.session_id)


def test_names_lose_only_what_no_column_holds(store: SessionStore, owner: str) -> None:
    """Display names and labels keep any text but NUL and lone surrogates, which become U+FFFD."""
    made = store.create(owner, SessionChanges(display_name="a\x00b😀", labels=["\ud800", "ä"], user_pseudo_id="\x00"))
    assert (made.display_name, made.labels, made.user_pseudo_id) == ("a\ufffdb😀", ["\ufffd", "ä"], "\ufffd")


@pytest.fixture
def listed(store: SessionStore, owner: str) -> list[str]:
    """Seven sessions, some pinned and labelled; their ids, oldest first."""
    ids = []
    for at in range(7):
        labels = ["hidden"] if at % 3 == 0 else ["x", "y"] if at == 1 else []
        user = f"u{at % 2}"
        changes = SessionChanges(display_name=f"n{at}", labels=labels, is_pinned=at in (2, 5), user_pseudo_id=user)
        ids.append(store.create(owner, changes).id)
        time.sleep(0.001)
    return ids


def paged(store: SessionStore, owner: str, size: int, **query: Any) -> list[str]:
    token, ids = None, []
    while True:
        page = store.list_sessions(owner, SessionQuery(page_size=size, page_token=token, **query))
        assert len(page.sessions) <= size
        ids += [one.id for one in page.sessions]
        token = page.next_page_token
        if token is None:
            return ids


@pytest.mark.parametrize("size", [1, 3, 50])
def test_pages_hold_every_session_once(store: SessionStore, owner: str, listed: list[str], size: int) -> None:
    """Whatever the order and the size of a page, each session is listed once, in order."""
    names = {name: at for at, name in enumerate(listed)}
    assert paged(store, owner, size) == listed[::-1]
    for order, expected in (
        (["started_at"], [0, 1, 2, 3, 4, 5, 6]),
        (["-is_pinned", "started_at"], [2, 5, 0, 1, 3, 4, 6]),
        (["is_pinned", "-updated_at"], [6, 4, 3, 1, 0, 5, 2]),
        (["-id"], [names[one] for one in sorted(listed, reverse=True)]),
    ):
        by: Any = [SessionOrder(key=key.lstrip("-"), descending=key[0] == "-") for key in order]
        assert [names[one] for one in paged(store, owner, size, order_by=by)] == expected


def test_pages_go_on_behind_what_was_deleted(store: SessionStore, owner: str, listed: list[str]) -> None:
    """Neither a deleted nor a new session makes one be listed twice, or not at all."""
    query = SessionQuery(page_size=3, order_by=[SessionOrder(key="started_at")])
    first = store.list_sessions(owner, query)
    store.delete(owner, listed[2])
    store.delete(owner, listed[3])
    store.create(owner)
    second = store.list_sessions(owner, query.model_copy(update={"page_token": first.next_page_token}))
    assert [one.id for one in second.sessions] == listed[4:7]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ("is_pinned=true", [2, 5]),
        ("starred = false AND NOT labels:hidden", [1, 4]),
        ("NOT (labels:hidden OR labels:x)", [2, 4, 5]),
        ("labels = y", [1]),
        ('labels: ANY("y", "hidden")', [0, 1, 3, 6]),
        ("user_pseudo_id = u1", [1, 3, 5]),
        ('display_name = "n4" OR display_name = n5', [4, 5]),
        ('display_name >= "n5"', [5, 6]),
        ('display_name: ANY("n1", "n\\"")', [1]),
        ("state = IN_PROGRESS", [0, 1, 2, 3, 4, 5, 6]),
        ("NOT state = IN_PROGRESS", []),
        ('create_time > "1970-01-01T12:00:00Z"', [0, 1, 2, 3, 4, 5, 6]),
        ('update_time > "2999-01-01T00:00:00+00:00"', []),
        (Condition(key="labels", operator="exists", value=True), [0, 1, 3, 6]),
        (Condition(key="labels", operator="nin", value=["hidden", "y"]), [2, 4, 5]),
        (Condition(key="user_pseudo_id", operator="ne", value="u0"), [1, 3, 5]),
        (Condition(key="display_name", operator="nin", value=["n1"]), [0, 2, 3, 4, 5, 6]),
        (FilterGroup(logic="not", filters=[Condition(key="is_pinned", value=True)]), [0, 1, 3, 4, 6]),
    ],
    ids=str,
)
def test_filters_pick_sessions(
    store: SessionStore, owner: str, listed: list[str], filters: FilterNode | str, found: list[int]
) -> None:
    """Google's text for ListSessions, and our trees with operators that it doesn't have."""
    tree = decode_list_sessions({"filter": filters}).filters if isinstance(filters, str) else filters
    ids = paged(store, owner, 2, filters=tree, order_by=[SessionOrder(key="started_at")])
    assert [listed.index(one) for one in ids] == found


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"filters": {"key": "owner", "value": "x"}}, "filters: sessions have no 'owner'; there are id, display_name"),
        ({"filters": {"key": "is_pinned", "value": "yes"}}, "filters: is_pinned is true or false, found 'yes'"),
        ({"filters": {"key": "labels", "operator": "gt", "value": "a"}}, "labels is equal or not, it has no order"),
        ({"filters": {"key": "started_at", "value": "soon"}}, "filters: started_at is compared with a time such as"),
        ({"filters": {"key": "started_at", "value": "2024-01-01"}}, "filters: started_at is compared with a time"),
        ({"page_token": "x"}, "pageToken: it was not returned for this filter and order"),
        ({"page_token": "W10"}, "pageToken: it was not returned"),
        ({"page_token": "\ud800"}, "pageToken: it was not returned"),
    ],
)
def test_lists_that_can_not_be_are_refused(store: SessionStore, owner: str, query: Any, message: str) -> None:
    """The field and what would do are told; a token is no way to another owner's sessions."""
    with pytest.raises(InvalidRequestError, match=message):
        store.list_sessions(owner, SessionQuery.model_validate(query))


@pytest.mark.parametrize("value", [1 << 70, "a", None, 1.5])
def test_forged_tokens_are_refused(store: SessionStore, owner: str, listed: list[str], value: object) -> None:
    """Whatever stands in the place of a time; and a token of another order."""
    token = store.list_sessions(owner, SessionQuery(page_size=1)).next_page_token or ""
    digest, values = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    forged = base64.urlsafe_b64encode(json.dumps([digest, [value, *values[1:]]]).encode()).decode()
    deep = base64.urlsafe_b64encode(b"[" * 100_000).decode()
    for one, order in ((forged, []), (deep, []), (token, [SessionOrder(key="id")])):
        with pytest.raises(InvalidRequestError, match="pageToken"):
            store.list_sessions(owner, SessionQuery(page_size=1, page_token=one, order_by=order))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


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
        ("postgresql://kb:pass@h:54x/kb", "the URL begins with sqlite:///"),
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
