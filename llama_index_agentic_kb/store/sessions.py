"""Sessions: conversations with their whole answers, kept in SQL, each by one owner.

    store = SessionStore("sessions.db")              # or postgresql://user@host/database
    turn = store.add_turn("alice", "-", "Who directed Titanic?", answer)
    store.session_messages("alice", turn.session_id) # the conversation so far, for a chat engine
    session = await store.aget("alice", turn.session_id, include_answers=True)

A turn (question, whole answer, times) is stored in one transaction: it is there whole once ``add_turn`` returns, or not
at all. Turns of a session are numbered 1, 2, ... in the order in which they were stored, whoever stores them.

The work inside a transaction comes to the same when it is run again after a connection broke: ids and times are made
before.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, Row, delete, insert, select
from sqlalchemy import update as sql_update

from llama_index_agentic_kb import _text
from llama_index_agentic_kb._aio import Call, WorkerPool, arun, run
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, NotFoundError
from llama_index_agentic_kb.schema.answer import (
    Answer,
    AnswerState,
    Session,
    SessionChanges,
    SessionPage,
    SessionQuery,
    Turn,
)
from llama_index_agentic_kb.schema.answer_query import NEW_SESSION
from llama_index_agentic_kb.schema.request import Message
from llama_index_agentic_kb.store.session_database import SessionDatabase
from llama_index_agentic_kb.store.session_listing import after_page, filter_clause, next_token, order_of, ordering
from llama_index_agentic_kb.store.session_tables import (
    MAX_ID,
    MAX_NAME,
    TURN_COLUMNS,
    dumped,
    labels,
    microseconds,
    read_answer,
    read_session,
    read_turn,
    sessions,
    turns,
)

__all__ = ["SessionStore"]

T = TypeVar("T")
P = ParamSpec("P")

_DONE: Final = (AnswerState.SUCCEEDED, AnswerState.FAILED)
_TITLE_CHARACTERS: Final = 200  # of the first question, as a display name
_NO_SEGMENT: Final = re.compile(r"[/\s]")
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""What no text column holds: PostgreSQL has no NUL, UTF-8 no lone surrogates."""


def _door(
    method: Callable[Concatenate[SessionStore, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SessionStore, P], T]:
    """Return the sync form of an async method."""

    @wraps(method)
    def door(self: SessionStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    door.__name__ = method.__name__.removeprefix("a")
    return door


class _Key(NamedTuple):
    """Whose session, and which."""

    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class _NewTurn:
    """A turn to store, and the session to make for it, if any."""

    key: _Key
    question: dict[str, Any]
    answer: Answer
    now: int
    made: SessionChanges | None


class SessionStore:
    """Sessions and answers in SQLite or PostgreSQL; safe for threads, processes and forked children.

    Every call names an owner, an opaque key (of a tenant's user, say); another owner's session is not found. Calls
    that come to nothing leave nothing behind. A call that ran into its deadline may yet be carried out: storing a turn
    again under the same ``answer.id`` stores it once.

    Args:
        url: A path (SQLite), or a URL: ``sqlite:///file``, ``postgresql://...`` (needs psycopg 3). Tables are made, and
            brought to this release's form, when it is opened.
        timeout: Seconds that a call may take where it has no earlier deadline; also waits for other writers and for a
            server that is restarted.
        connections: The most connections, and threads, at once.

    Raises:
        ConfigurationError: The URL can't be used, or the database is of a newer release.
        SessionStoreError: The database can't be opened.
    """

    def __init__(self, url: str | Path, *, timeout: float = 30.0, connections: int = 8) -> None:
        if timeout <= 0 or connections < 1:
            raise ConfigurationError("SessionStore: timeout must be positive, and connections at least 1")
        self._timeout = timeout
        self._database = SessionDatabase(url, connections=connections, timeout=timeout)
        self._pool = WorkerPool("sessions", connections)

    def __enter__(self) -> Self:
        """Return the store; it is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close idle connections."""
        self.close()

    def close(self) -> None:
        """Close idle connections; the next call opens new ones."""
        self._database.close()

    async def acreate(
        self, owner: str, changes: SessionChanges | None = None, *, deadline: float | None = None
    ) -> Session:
        """Make a session without turns.

        Args:
            owner: Whose it is.
            changes: What is said of it; without a display name it will be named for its first question.
            deadline: ``time.monotonic()``; None is the store's timeout.
        """
        key = _key(owner, uuid.uuid4().hex)
        work = partial(_create, key=key, changes=changes or SessionChanges(), now=microseconds(datetime.now(UTC)))
        return await self._do("creating a session", work, deadline, write=True)

    async def aget(
        self, owner: str, session_id: str, *, include_answers: bool = False, deadline: float | None = None
    ) -> Session:
        """Return a session with its turns, in their order.

        With ``include_answers`` each turn has its whole answer; else only the answer's id.

        Raises:
            NotFoundError: The owner has no such session.
        """
        work = partial(_load, key=_key(owner, session_id), include_answers=include_answers)
        return await self._do("reading a session", work, deadline, write=False)

    async def alist_sessions(
        self, owner: str, query: SessionQuery | None = None, *, deadline: float | None = None
    ) -> SessionPage:
        """Return a page of an owner's sessions, without turns; by default those changed last first, 50 a page.

        Raises:
            InvalidRequestError: The filter asks for what sessions don't have, or the page's token is unknown.
        """
        work = partial(_page, owner=_checked("owner", owner, MAX_NAME), query=query or SessionQuery())
        return await self._do("listing sessions", work, deadline, write=False)

    async def aupdate(
        self, owner: str, session_id: str, changes: SessionChanges, *, deadline: float | None = None
    ) -> Session:
        """Change a session's display name, labels, pin or user, and return it without turns.

        Raises:
            NotFoundError: The owner has no such session.
        """
        now = microseconds(datetime.now(UTC))
        work = partial(_update, key=_key(owner, session_id), changes=changes, now=now)
        return await self._do("changing a session", work, deadline, write=True)

    async def adelete(self, owner: str, session_id: str, *, deadline: float | None = None) -> None:
        """Delete a session with all its turns and answers.

        Raises:
            NotFoundError: The owner has no such session.
        """
        work = partial(_delete, key=_key(owner, session_id), tried=[])
        await self._do("deleting a session", work, deadline, write=True)

    async def aadd_turn(
        self,
        owner: str,
        session_id: str,
        query: str,
        answer: Answer,
        *,
        query_id: str = "",
        query_config: Mapping[str, str] | None = None,
        user_pseudo_id: str = "",
        may_make: bool = False,
        deadline: float | None = None,
    ) -> Turn:
        """Store a question and its whole answer as the next turn of a session.

        Args:
            owner: Whose session it is.
            session_id: The session; ``-`` makes one in the same transaction.
            query: The question.
            answer: The answer, succeeded or failed. Without an id it gets one. A turn with its id that the session has
                already is returned, and nothing is stored.
            query_id: The question's id, if it has one.
            query_config: What else is kept of the question.
            user_pseudo_id: Of a session that is made: its user.
            may_make: Whether a session that is not there is made, under this id and in the same transaction.
            deadline: ``time.monotonic()``; None is the store's timeout.

        Raises:
            InvalidRequestError: The answer is not complete.
            NotFoundError: The owner has no such session.
        """
        if answer.state not in _DONE:
            raise InvalidRequestError(
                f"answer.state: a turn holds a whole answer, succeeded or failed; this one is {answer.state.value!r}"
            )
        named = answer if answer.id else answer.model_copy(update={"id": uuid.uuid4().hex})
        if session_id == NEW_SESSION:
            # Of the answer's id: storing the same turn again finds the session that the first try made.
            may_make, session_id = True, uuid.uuid5(uuid.NAMESPACE_OID, f"{owner}\n{named.id}").hex
        question = {"query": query, "query_id": query_id, "query_config": dict(query_config or {})}
        made = SessionChanges(user_pseudo_id=user_pseudo_id) if may_make else None
        new = _NewTurn(_key(owner, session_id), question, named, microseconds(datetime.now(UTC)), made)
        return await self._do("storing a turn", partial(_add_turn, new=new), deadline, write=True)

    async def aget_answer(
        self, owner: str, session_id: str, answer_id: str, *, deadline: float | None = None
    ) -> Answer:
        """Return an answer of a session.

        Raises:
            NotFoundError: The owner has no such session, or it has no such answer.
        """
        work = partial(_load_answer, key=_key(owner, session_id), answer_id=answer_id)
        return await self._do("reading an answer", work, deadline, write=False)

    async def asession_messages(
        self, owner: str, session_id: str, *, last: int | None = None, deadline: float | None = None
    ) -> list[Message]:
        """Return a session as a conversation, oldest first: a user's and an assistant's message for each turn.

        It is what ``RetrievalRequest.messages`` and a chat engine's history begin with. Turns that were not answered
        for what was asked, or for what the answer said, are left out: else the next question would ask again for them.

        Args:
            owner: Whose session it is.
            session_id: Its id; ``-``, a session that is yet to be made, has no messages.
            last: How many turns at most, the newest; None returns all.
            deadline: ``time.monotonic()``; None is the store's timeout.

        Raises:
            NotFoundError: The owner has no such session.
        """
        if last is not None and last < 1:
            raise InvalidRequestError(f"last: at least 1 turn, or None for all; got {last}")
        if session_id == NEW_SESSION:
            return []
        work = partial(_messages, key=_key(owner, session_id), last=last)
        return await self._do("reading a conversation", work, deadline, write=False)

    create = _door(acreate)
    get = _door(aget)
    list_sessions = _door(alist_sessions)
    update = _door(aupdate)
    delete = _door(adelete)
    add_turn = _door(aadd_turn)
    get_answer = _door(aget_answer)
    session_messages = _door(asession_messages)

    async def _do(self, what: str, work: Callable[[Connection], T], deadline: float | None, *, write: bool) -> T:
        """Run work in a transaction, on a thread of the store's own."""
        limit = time.monotonic() + self._timeout
        until = limit if deadline is None else min(limit, deadline)
        transact = partial(self._database.transact, work, write=write, deadline=until, what=what)
        return await arun(Call(sync=transact, deadline=until, pool=self._pool, what=what).perform())


# -- keys -------------------------------------------------------------------------------------------------------------


def _key(owner: str, session_id: str) -> _Key:
    """Return the key of a session.

    Raises:
        InvalidRequestError: A part of it is empty, too long, or holds what can't be stored.
    """
    return _Key(_checked("owner", owner, MAX_NAME), _checked_id("session", session_id))


def _checked(field: str, value: str, limit: int) -> str:
    if not 1 <= len(value) <= limit:
        raise InvalidRequestError(f"{field}: a text of 1 to {limit} characters is needed")
    if _UNSTORABLE.search(value):
        raise InvalidRequestError(f"{field}: it holds a NUL or a lone surrogate")
    return value


def _checked_id(field: str, value: str) -> str:
    """Return a session's or an answer's id, if it can be a part of a resource name."""
    if _NO_SEGMENT.search(value):
        raise InvalidRequestError(f"{field}: an id holds neither '/' nor white space")
    return _checked(field, value, MAX_ID)


def _storable(text: str) -> str:
    """Return a text that every database holds: what it can't becomes U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


# -- reading, all of one moment ---------------------------------------------------------------------------------------


def _is(key: _Key) -> tuple[Any, ...]:
    return sessions.c.owner == key.owner, sessions.c.id == key.id


def _of(table: Any, key: _Key) -> tuple[Any, ...]:
    """Return the SQL that picks what belongs to a session, of its turns or labels."""
    return table.c.owner == key.owner, table.c.session_id == key.id


def _find(connection: Connection, key: _Key, *, lock: bool = False) -> Row[Any] | None:
    """Return a session's row, in PostgreSQL locked against other writers (SQLite has one writer at a time)."""
    statement = select(sessions).where(*_is(key))
    return connection.execute(statement.with_for_update() if lock else statement).one_or_none()


def _row(connection: Connection, key: _Key, *, lock: bool = False) -> Row[Any]:
    """Return a session's row.

    Raises:
        NotFoundError: It does not exist, or is another owner's.
    """
    row = _find(connection, key, lock=lock)
    if row is None:
        raise NotFoundError("session: there is no session of this name")
    return row


def _labels(connection: Connection, owner: str, ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the labels of some of an owner's sessions, by the session's id."""
    found: dict[str, list[str]] = {session_id: [] for session_id in ids}
    rows = connection.execute(
        select(labels.c.session_id, labels.c.label)
        .where(labels.c.owner == owner, labels.c.session_id.in_(ids))
        .order_by(labels.c.session_id, labels.c.position)
    )
    for session_id, label in rows:
        found[session_id].append(label)
    return found


def _session(connection: Connection, key: _Key, turns_of_it: Sequence[Turn] = ()) -> Session:
    return read_session(_row(connection, key), _labels(connection, key.owner, [key.id])[key.id], turns_of_it)


def _load(connection: Connection, key: _Key, *, include_answers: bool) -> Session:
    columns = (*TURN_COLUMNS, turns.c.answer) if include_answers else TURN_COLUMNS
    found = connection.execute(select(*columns).where(*_of(turns, key)).order_by(turns.c.number))
    return _session(connection, key, [read_turn(row) for row in found])


def _load_answer(connection: Connection, key: _Key, answer_id: str) -> Answer:
    _row(connection, key)
    where = (*_of(turns, key), turns.c.answer_id == _storable(answer_id))
    text = connection.execute(select(turns.c.answer).where(*where)).scalar()
    if text is None:
        raise NotFoundError("answer: the session has no answer of this name")
    return read_answer(text)


def _messages(connection: Connection, key: _Key, last: int | None) -> list[Message]:
    _row(connection, key)
    newest = select(*TURN_COLUMNS, turns.c.answer).where(*_of(turns, key)).order_by(turns.c.number.desc()).limit(last)
    conversation = []
    for turn in map(read_turn, reversed(connection.execute(newest).all())):
        if turn.answer is not None and turn.answer.is_kept_from_prompts:
            continue
        answer = turn.answer.text if turn.answer else ""
        conversation.append(Message.model_validate({"role": "user", "content": turn.query}))
        conversation.append(Message.model_validate({"role": "assistant", "content": answer}))
    return conversation


def _page(connection: Connection, owner: str, query: SessionQuery) -> SessionPage:
    found = connection.execute(
        select(sessions)
        .where(sessions.c.owner == owner, filter_clause(query.filters), after_page(query))
        .order_by(*ordering(order_of(query)))
        .limit(query.page_size + 1)
    ).all()
    shown = found[: query.page_size]
    token = next_token(query, shown[-1]) if len(found) > len(shown) else None
    by_session = _labels(connection, owner, [row.id for row in shown])
    return SessionPage(sessions=[read_session(row, by_session[row.id]) for row in shown], next_page_token=token)


# -- writing ----------------------------------------------------------------------------------------------------------


def _create(connection: Connection, key: _Key, changes: SessionChanges, now: int) -> Session:
    """Make a session, unless a lost try has made it already."""
    if _find(connection, key) is None:
        _insert(connection, key, changes, now)
    return _session(connection, key)


def _insert(connection: Connection, key: _Key, changes: SessionChanges, now: int) -> None:
    values = {"display_name": "", "user_pseudo_id": "", "is_pinned": False, "turn_count": 0}
    connection.execute(insert(sessions).values(owner=key.owner, id=key.id, started_at=now, updated_at=now, **values))
    _change(connection, key, changes)


def _update(connection: Connection, key: _Key, changes: SessionChanges, now: int) -> Session:
    row = _row(connection, key, lock=True)
    _change(connection, key, changes)
    connection.execute(sql_update(sessions).where(*_is(key)).values(updated_at=max(now, row.updated_at)))
    return _session(connection, key)


def _change(connection: Connection, key: _Key, changes: SessionChanges) -> None:
    said = changes.model_dump(exclude_none=True, exclude={"labels"}, by_alias=False)
    values = {name: _storable(value) if isinstance(value, str) else value for name, value in said.items()}
    if values:
        connection.execute(sql_update(sessions).where(*_is(key)).values(**values))
    if changes.labels is None:
        return
    connection.execute(delete(labels).where(*_of(labels, key)))
    numbered = [
        {"owner": key.owner, "session_id": key.id, "position": position, "label": label}
        for position, label in enumerate(dict.fromkeys(map(_storable, changes.labels)))
    ]
    if numbered:
        connection.execute(insert(labels), numbered)


def _delete(connection: Connection, key: _Key, tried: list[bool]) -> None:
    """Delete a session; run again after a lost try, it doesn't miss what is gone."""
    if not tried:
        _row(connection, key, lock=True)
        tried.append(True)
    for table in (turns, labels):
        connection.execute(delete(table).where(*_of(table, key)))
    connection.execute(delete(sessions).where(*_is(key)))


def _add_turn(connection: Connection, new: _NewTurn) -> Turn:
    """Store a turn under the next number, or return the one that has its answer's id."""
    key, answer_id = new.key, _checked_id("answer.id", new.answer.id or "")
    if new.made is not None and _find(connection, key, lock=True) is None:
        _insert(connection, key, new.made, new.now)
    row = _row(connection, key, lock=True)
    stored = select(turns).where(*_of(turns, key), turns.c.answer_id == answer_id)
    known = connection.execute(stored).one_or_none()
    if known is not None:
        return read_turn(known)
    completed, asked = max(new.now, row.updated_at), new.answer.created_at
    connection.execute(
        insert(turns).values(
            owner=key.owner,
            session_id=key.id,
            number=row.turn_count + 1,
            answer_id=answer_id,
            question=dumped(new.question),
            answer=dumped(new.answer.model_dump(by_alias=True)),
            created_at=completed if asked is None else microseconds(asked),
            completed_at=completed,
        )
    )
    title = row.display_name or _storable(_text.one_line(new.question["query"], _TITLE_CHARACTERS))
    connection.execute(
        sql_update(sessions)
        .where(*_is(key))
        .values(turn_count=row.turn_count + 1, updated_at=completed, ended_at=completed, display_name=title)
    )
    return read_turn(connection.execute(stored).one())
