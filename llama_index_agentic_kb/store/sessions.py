"""Sessions: conversations with their complete answers, stored in SQL; each session belongs to one owner.

    store = SessionStore("sessions.db")              # or postgresql://user@host/database
    turn = store.add_turn("alice", "-", "Who directed Titanic?", answer)
    store.session_messages("alice", turn.session_id) # the conversation so far, for a chat engine
    session = await store.aget("alice", turn.session_id, include_answers=True)

A turn (question, complete answer, times) is stored in one transaction, which is committed before ``add_turn`` returns.
The turns of a session are numbered 1, 2, ... in the order in which they were stored.

The work inside a transaction is idempotent, so that it can be retried after a connection error: ids and times are
generated before the transaction.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Table, delete, insert, select
from sqlalchemy import update as sql_update

from llama_index_agentic_kb import _text
from llama_index_agentic_kb._aio import Call, WorkerPool, arun, bridged
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
from llama_index_agentic_kb.store.session_database import (
    MAX_ID,
    MAX_NAME,
    SESSIONS,
    labels,
    microseconds,
    sessions,
    states,
    turns,
)
from llama_index_agentic_kb.store.session_listing import next_token, page
from llama_index_agentic_kb.store.sql import CONNECTIONS, SqlDatabase

__all__ = ["SessionStore"]

T = TypeVar("T")

_TITLE_CHARACTERS: Final = 200  # of the first question, used as a display name
MAX_OWNER: Final = 100_000
"""The maximum length of an owner's name in characters; principals with many groups have long names."""
_HASHED: Final = "sha256:"
_NO_SEGMENT: Final = re.compile(r"[/\s]")
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""Characters that no text column can store: NUL (PostgreSQL) and lone surrogates (UTF-8)."""
_WITHOUT_ANSWER: Final = [column for column in turns.c if column.name != "answer"]
"""All columns of a turn except its answer."""


class _Key(NamedTuple):
    """The key of a session: its owner and its id."""

    owner: str
    id: str


class SessionStore:
    """A store of sessions and answers in SQLite or PostgreSQL; safe for threads, processes and forked children.

    Every call takes an owner, an opaque key (of a tenant's user, for example), and finds only this owner's sessions. A
    failed call changes nothing, but a call that exceeded its deadline may still complete: storing a turn again under
    the same ``answer.id`` stores it only once. A ``deadline`` is a ``time.monotonic()`` value; it defaults to the
    store's timeout.

    Args:
        url: A path (SQLite), or a URL: ``sqlite:///file``, ``postgresql://...`` (needs psycopg 3). Opening the store
            creates or migrates the tables.
        timeout: The time limit of a call in seconds, unless its deadline is earlier. Includes waiting for other writers
            and for a server restart.

    Raises:
        ConfigurationError: An argument is invalid, or a newer release created the database.
        SessionStoreError: The database can't be opened.
    """

    def __init__(self, url: str | Path, *, timeout: float = 30.0) -> None:
        if timeout <= 0:
            raise ConfigurationError("SessionStore: timeout must be positive")
        self._timeout = timeout
        self._database = SqlDatabase(url, SESSIONS, timeout=timeout)
        self._pool = WorkerPool("sessions", CONNECTIONS)

    def __enter__(self) -> Self:
        """Return the store, which is closed at the end of the block."""
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
        """Create a session without turns; if it has no display name, the first question becomes its name."""
        key, now = _key(owner, uuid.uuid4().hex), microseconds(datetime.now(UTC))

        def work(connection: Connection) -> Session:
            if _find(connection, key) is None:  # else an earlier try has created it
                _insert(connection, key, changes or SessionChanges(), now)
            return _session(connection, key)

        return await self._do("creating a session", work, deadline, write=True)

    async def aget(
        self, owner: str, session_id: str, *, include_answers: bool = False, deadline: float | None = None
    ) -> Session:
        """Return a session with its turns in order.

        With ``include_answers`` each turn has its complete answer; otherwise only the answer's id.

        Raises:
            NotFoundError: The owner has no such session.
        """
        key, columns = _key(owner, session_id), turns.c if include_answers else _WITHOUT_ANSWER

        def work(connection: Connection) -> Session:
            found = connection.execute(select(*columns).where(*_of(turns, key)).order_by(turns.c.number))
            return _session(connection, key, [_turn(row) for row in found])

        return await self._do("reading a session", work, deadline, write=False)

    async def alist_sessions(
        self, owner: str, query: SessionQuery | None = None, *, deadline: float | None = None
    ) -> SessionPage:
        """Return a page of an owner's sessions, without turns; by default the latest updated first, 50 per page.

        Raises:
            InvalidRequestError: The filter uses an unknown field, operator or value, or the page token is invalid.
        """
        query = query or SessionQuery()
        statement = page(_owner(owner), query)

        def work(connection: Connection) -> SessionPage:
            found = connection.execute(statement).all()
            shown = found[: query.page_size]
            named = _labels(connection, _owner(owner), [row.id for row in shown])
            token = next_token(query, shown[-1]) if len(found) > len(shown) else None
            return SessionPage(sessions=[_read(row, named[row.id]) for row in shown], next_page_token=token)

        return await self._do("listing sessions", work, deadline, write=False)

    async def aupdate(
        self, owner: str, session_id: str, changes: SessionChanges, *, deadline: float | None = None
    ) -> Session:
        """Change a session's display name, labels, pinned state or user, and return it without turns.

        Raises:
            NotFoundError: The owner has no such session.
        """
        key, now = _key(owner, session_id), microseconds(datetime.now(UTC))

        def work(connection: Connection) -> Session:
            row = _row(connection, key, lock=True)
            _change(connection, key, changes)
            _set(connection, key, updated_at=max(now, row.updated_at))
            return _session(connection, key)

        return await self._do("changing a session", work, deadline, write=True)

    async def adelete(self, owner: str, session_id: str, *, deadline: float | None = None) -> None:
        """Delete a session with all its turns and answers.

        Raises:
            NotFoundError: The owner has no such session.
        """
        key, tried = _key(owner, session_id), False

        def work(connection: Connection) -> None:
            nonlocal tried
            if not tried:  # on a retry, the session may already be deleted
                _row(connection, key, lock=True)
            tried = True
            connection.execute(delete(sessions).where(*_is(key)))  # and, by cascade, its turns and labels

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
        """Store a question and its complete answer as the next turn of a session.

        Args:
            owner: The session's owner.
            session_id: The session's id; ``-`` creates a new session in the same transaction.
            query: The question.
            answer: The answer, succeeded or failed. If it has no id, one is generated. If the session already has a
                turn with this answer id, that turn is returned and nothing is stored.
            query_id: The question's id. Defaults to an empty id.
            query_config: Additional parameters to store with the question.
            user_pseudo_id: The user's pseudonymous id, used only if a session is created.
            may_make: Whether to create a missing session under this id, in the same transaction.
            deadline: The time limit of the call; see the class.

        Raises:
            InvalidRequestError: The answer is not complete, or an id can't be stored.
            NotFoundError: The owner has no such session.
        """
        if answer.state not in (AnswerState.SUCCEEDED, AnswerState.FAILED):
            raise InvalidRequestError(
                f"answer.state: a turn holds a whole answer, succeeded or failed; this one is {answer.state.value!r}"
            )
        named = answer if answer.id else answer.model_copy(update={"id": uuid.uuid4().hex})
        if session_id == NEW_SESSION:
            # Derived from the answer's id: storing the same turn again finds the session created by the first try.
            may_make, session_id = True, uuid.uuid5(uuid.NAMESPACE_OID, f"{owner}\n{named.id}").hex
        key, now = _key(owner, session_id), microseconds(datetime.now(UTC))
        answer_id = _checked_id("answer.id", named.id or "")
        question = {"query": query, "query_id": query_id, "query_config": dict(query_config or {})}

        def work(connection: Connection) -> Turn:
            if may_make and _find(connection, key, lock=True) is None:
                _insert(connection, key, SessionChanges(user_pseudo_id=user_pseudo_id), now)
            row = _row(connection, key, lock=True)
            stored = select(turns).where(*_of(turns, key), turns.c.answer_id == answer_id)
            if known := connection.execute(stored).one_or_none():
                return _turn(known)
            completed, asked = max(now, row.updated_at), named.created_at
            values = {
                "owner": key.owner,
                "session_id": session_id,
                "number": row.turn_count + 1,
                "answer_id": answer_id,
                "question": _dumped(question),
                "answer": _dumped(named.model_dump(by_alias=True)),
                "created_at": completed if asked is None else microseconds(asked),
                "completed_at": completed,
            }
            connection.execute(insert(turns).values(**values))
            title = row.display_name or _storable(_text.one_line(query, _TITLE_CHARACTERS))
            times = {"updated_at": completed, "ended_at": completed}
            _set(connection, key, turn_count=row.turn_count + 1, display_name=title, **times)
            return _turn(connection.execute(stored).one())

        return await self._do("storing a turn", work, deadline, write=True)

    async def aget_answer(
        self, owner: str, session_id: str, answer_id: str, *, deadline: float | None = None
    ) -> Answer:
        """Return an answer of a session.

        Raises:
            NotFoundError: The owner has no such session, or the session has no such answer.
        """
        key = _key(owner, session_id)

        def work(connection: Connection) -> Answer:
            _row(connection, key)
            wanted = (*_of(turns, key), turns.c.answer_id == _storable(answer_id))
            text = connection.execute(select(turns.c.answer).where(*wanted)).scalar()
            if text is None:
                raise NotFoundError("answer: the session has no answer of this name")
            return _answer(text)

        return await self._do("reading an answer", work, deadline, write=False)

    async def asession_messages(
        self, owner: str, session_id: str, *, last: int | None = None, deadline: float | None = None
    ) -> list[Message]:
        """Return a session as a conversation, oldest first: a user's and an assistant's message for each turn.

        The messages can be passed to ``RetrievalRequest.messages`` or a chat engine's history. Turns that failed, or
        were refused because of their question or answer, are omitted: the next question must not repeat their content.

        Args:
            owner: The session's owner.
            session_id: The session's id; ``-``, a session not yet created, has no messages.
            last: The maximum number of turns, the newest ones. Defaults to all turns.
            deadline: The time limit of the call; see the class.

        Raises:
            NotFoundError: The owner has no such session.
        """
        if last is not None and last < 1:
            raise InvalidRequestError(f"last: at least 1 turn, or None for all; got {last}")
        if session_id == NEW_SESSION:
            return []
        key = _key(owner, session_id)

        def work(connection: Connection) -> list[Message]:
            _row(connection, key)
            newest = select(turns).where(*_of(turns, key)).order_by(turns.c.number.desc()).limit(last)
            conversation = []
            for turn in map(_turn, reversed(connection.execute(newest).all())):
                if turn.answer is None or not turn.answer.is_kept_from_prompts:
                    said = {"user": turn.query, "assistant": turn.answer.text if turn.answer else ""}
                    conversation += [Message.model_validate({"role": role, "content": said[role]}) for role in said]
            return conversation

        return await self._do("reading a conversation", work, deadline, write=False)

    async def aget_states(self, owner: str, session_id: str, *, deadline: float | None = None) -> dict[str, Any]:
        """Return the state of a session's conversation, as stored by ``aset_states``; empty if none was stored."""
        key = _key(owner, session_id)

        def work(connection: Connection) -> dict[str, Any]:
            stored = connection.execute(select(states.c.data).where(*_of(states, key))).scalar()
            return {} if stored is None else json.loads(stored)

        return await self._do("reading a conversation's state", work, deadline, write=False)

    async def aset_states(
        self,
        owner: str,
        session_id: str,
        data: Mapping[str, Any],
        *,
        may_make: bool = False,
        deadline: float | None = None,
    ) -> None:
        """Store the state of a session's conversation as JSON, in place of the earlier one.

        ``may_make`` makes a session that does not exist.

        Raises:
            NotFoundError: The owner has no such session.
        """
        key, now = _key(owner, session_id), microseconds(datetime.now(UTC))

        def work(connection: Connection) -> None:
            if may_make and _find(connection, key, lock=True) is None:
                _insert(connection, key, SessionChanges(), now)
            _row(connection, key, lock=True)
            connection.execute(delete(states).where(*_of(states, key)))
            values = {"owner": key.owner, "session_id": key.id, "data": _dumped(data)}
            connection.execute(insert(states).values(**values))

        await self._do("storing a conversation's state", work, deadline, write=True)

    create = bridged(acreate)
    get = bridged(aget)
    list_sessions = bridged(alist_sessions)
    update = bridged(aupdate)
    delete = bridged(adelete)
    add_turn = bridged(aadd_turn)
    get_answer = bridged(aget_answer)
    session_messages = bridged(asession_messages)
    get_states = bridged(aget_states)
    set_states = bridged(aset_states)

    async def _do(self, what: str, work: Callable[[Connection], T], deadline: float | None, *, write: bool) -> T:
        """Run a function in a transaction, on a thread of the store's pool, and return its result."""
        limit = time.monotonic() + self._timeout
        until = limit if deadline is None else min(limit, deadline)
        transact = partial(self._database.transact, work, write=write, deadline=until, what=what)
        return await arun(Call(sync=transact, deadline=until, pool=self._pool, what=what).perform())


# -- rows and keys ----------------------------------------------------------------------------------------------------


def _key(owner: str, session_id: str) -> _Key:
    """Return the key of a session; raise ``InvalidRequestError`` if the owner or the id can't be stored."""
    return _Key(_owner(owner), _checked_id("session", session_id))


def _owner(owner: str) -> str:
    """Return the owner's key in the tables: its name, or a hash if it is too long or could be mistaken for a hash."""
    if len(owner) > MAX_NAME or owner.startswith(_HASHED):
        _checked("owner", owner, MAX_OWNER)
        return _HASHED + hashlib.sha256(owner.encode()).hexdigest()
    return _checked("owner", owner, MAX_NAME)


def _checked(field: str, value: str, limit: int) -> str:
    if not 1 <= len(value) <= limit:
        raise InvalidRequestError(f"{field}: a text of 1 to {limit} characters is needed")
    if _UNSTORABLE.search(value):
        raise InvalidRequestError(f"{field}: it holds a NUL or a lone surrogate")
    return value


def _checked_id(field: str, value: str) -> str:
    """Return a session's or answer's id; raise ``InvalidRequestError`` if it is invalid in a resource name."""
    if _NO_SEGMENT.search(value):
        raise InvalidRequestError(f"{field}: an id holds neither '/' nor white space")
    return _checked(field, value, MAX_ID)


def _storable(text: str) -> str:
    """Return a text with characters that can't be stored replaced by U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


def _is(key: _Key) -> tuple[ColumnElement[bool], ...]:
    return sessions.c.owner == key.owner, sessions.c.id == key.id


def _of(table: Table, key: _Key) -> tuple[ColumnElement[bool], ...]:
    """Return the SQL conditions that select a session's rows from the table of turns or labels."""
    return table.c.owner == key.owner, table.c.session_id == key.id


def _find(connection: Connection, key: _Key, *, lock: bool = False) -> Row[Any] | None:
    """Return a session's row or None; with ``lock``, locked for writing (PostgreSQL; SQLite has a single writer)."""
    statement = select(sessions).where(*_is(key))
    return connection.execute(statement.with_for_update() if lock else statement).one_or_none()


def _row(connection: Connection, key: _Key, *, lock: bool = False) -> Row[Any]:
    """Return a session's row; raise ``NotFoundError`` if it does not exist or belongs to another owner."""
    row = _find(connection, key, lock=lock)
    if row is None:
        raise NotFoundError("session: there is no session of this name")
    return row


def _labels(connection: Connection, owner: str, ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the labels of the given sessions of an owner, by session id."""
    found: dict[str, list[str]] = {session_id: [] for session_id in ids}
    wanted = (labels.c.owner == owner, labels.c.session_id.in_(ids))
    listed = select(labels).where(*wanted).order_by(labels.c.session_id, labels.c.position)
    for row in connection.execute(listed):
        found[row.session_id].append(row.label)
    return found


def _session(connection: Connection, key: _Key, its_turns: Sequence[Turn] = ()) -> Session:
    return _read(_row(connection, key), _labels(connection, key.owner, [key.id])[key.id], its_turns)


def _insert(connection: Connection, key: _Key, changes: SessionChanges, now: int) -> None:
    values = {"display_name": "", "user_pseudo_id": "", "is_pinned": False, "turn_count": 0}
    connection.execute(insert(sessions).values(owner=key.owner, id=key.id, started_at=now, updated_at=now, **values))
    _change(connection, key, changes)


def _set(connection: Connection, key: _Key, **values: str | int) -> None:
    connection.execute(sql_update(sessions).where(*_is(key)).values(**values))


def _change(connection: Connection, key: _Key, changes: SessionChanges) -> None:
    changed = changes.model_dump(exclude_none=True, exclude={"labels"}, by_alias=False)
    if changed:
        texts = {name: _storable(value) if isinstance(value, str) else value for name, value in changed.items()}
        _set(connection, key, **texts)
    if changes.labels is not None:
        connection.execute(delete(labels).where(*_of(labels, key)))
        for position, label in enumerate(dict.fromkeys(map(_storable, changes.labels))):
            values = {"owner": key.owner, "session_id": key.id, "position": position, "label": label}
            connection.execute(insert(labels).values(**values))


def _dumped(data: object) -> str:
    """Return data as ASCII JSON; values of types that JSON lacks (in a document's metadata) are converted to text."""
    return json.dumps(_plain(data), separators=(",", ":"))


def _plain(data: object) -> object:
    # Not pydantic's JSON mode: it raises on bytes that are not UTF-8, which must not prevent storing an answer.
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple | set | frozenset):
        return [_plain(value) for value in data]
    if data is None or isinstance(data, str | bool | int | float):
        return data
    return data.isoformat() if isinstance(data, date) else str(data)


def _moment(count: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=count)


def _read(row: Row[Any], its_labels: Iterable[str], its_turns: Iterable[Turn] = ()) -> Session:
    """Return a session from its row, labels and turns."""
    return Session(
        id=row.id,
        display_name=row.display_name,
        user_pseudo_id=row.user_pseudo_id,
        is_pinned=row.is_pinned,
        labels=list(its_labels),
        turns=list(its_turns),
        started_at=_moment(row.started_at),
        updated_at=_moment(row.updated_at),
        ended_at=None if row.ended_at is None else _moment(row.ended_at),
    )


def _turn(row: Row[Any]) -> Turn:
    """Return a turn from its row, with its answer if the row includes it."""
    return Turn(
        session_id=row.session_id,
        number=row.number,
        answer_id=row.answer_id,
        answer=_answer(row.answer) if hasattr(row, "answer") else None,
        created_at=_moment(row.created_at),
        completed_at=_moment(row.completed_at),
        **json.loads(row.question),
    )


def _answer(text: str) -> Answer:
    # Not model_validate_json: pydantic's parser rejects lone surrogates, which json's accepts.
    return Answer.model_validate(json.loads(text))
