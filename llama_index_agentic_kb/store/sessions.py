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

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Self, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Table, delete, insert, select
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
from llama_index_agentic_kb.store.session_database import (
    MAX_ID,
    MAX_NAME,
    SessionDatabase,
    labels,
    microseconds,
    sessions,
    turns,
)
from llama_index_agentic_kb.store.session_listing import next_token, page

__all__ = ["SessionStore"]

T = TypeVar("T")
P = ParamSpec("P")

_TITLE_CHARACTERS: Final = 200  # of the first question, as a display name
MAX_OWNER: Final = 100_000
"""Characters of an owner's name: a principal of many groups, or of long names, has a long one."""
_HASHED: Final = "sha256:"
_NO_SEGMENT: Final = re.compile(r"[/\s]")
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""What no text column holds: PostgreSQL has no NUL, UTF-8 no lone surrogates."""
_WITHOUT_ANSWER: Final = [column for column in turns.c if column.name != "answer"]
"""Of a turn all but its answer."""


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


class SessionStore:
    """Sessions and answers in SQLite or PostgreSQL; safe for threads, processes and forked children.

    Every call names an owner, an opaque key (of a tenant's user, say); another owner's session is not found. Calls
    that come to nothing leave nothing behind. A call that ran into its deadline may yet be carried out: storing a turn
    again under the same ``answer.id`` stores it once. A ``deadline`` is a ``time.monotonic()``; None is the store's
    timeout.

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
        """Make a session without turns; without a display name it will be named for its first question."""
        key, now = _key(owner, uuid.uuid4().hex), microseconds(datetime.now(UTC))

        def work(connection: Connection) -> Session:
            if _find(connection, key) is None:  # else a lost try has made it already
                _insert(connection, key, changes or SessionChanges(), now)
            return _session(connection, key)

        return await self._do("creating a session", work, deadline, write=True)

    async def aget(
        self, owner: str, session_id: str, *, include_answers: bool = False, deadline: float | None = None
    ) -> Session:
        """Return a session with its turns, in their order.

        With ``include_answers`` each turn has its whole answer; else only the answer's id.

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
        """Return a page of an owner's sessions, without turns; by default those changed last first, 50 a page.

        Raises:
            InvalidRequestError: The filter asks for what sessions don't have, or the page's token is unknown.
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
        """Change a session's display name, labels, pin or user, and return it without turns.

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
            if not tried:  # run again after a lost try, it doesn't miss what is gone
                _row(connection, key, lock=True)
            tried = True
            for table in (turns, labels):
                connection.execute(delete(table).where(*_of(table, key)))
            connection.execute(delete(sessions).where(*_is(key)))

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
            deadline: See the class.

        Raises:
            InvalidRequestError: The answer is not complete.
            NotFoundError: The owner has no such session.
        """
        if answer.state not in (AnswerState.SUCCEEDED, AnswerState.FAILED):
            raise InvalidRequestError(
                f"answer.state: a turn holds a whole answer, succeeded or failed; this one is {answer.state.value!r}"
            )
        named = answer if answer.id else answer.model_copy(update={"id": uuid.uuid4().hex})
        if session_id == NEW_SESSION:
            # Of the answer's id: storing the same turn again finds the session that the first try made.
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
            NotFoundError: The owner has no such session, or it has no such answer.
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

        It is what ``RetrievalRequest.messages`` and a chat engine's history begin with. Turns that were not answered
        for what was asked, or for what the answer said, are left out: else the next question would ask again for them.

        Args:
            owner: Whose session it is.
            session_id: Its id; ``-``, a session that is yet to be made, has no messages.
            last: How many turns at most, the newest; None returns all.
            deadline: See the class.

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


# -- what is in the database ------------------------------------------------------------------------------------------


def _key(owner: str, session_id: str) -> _Key:
    """Return the key of a session; raise ``InvalidRequestError`` where a part of it can't be stored."""
    return _Key(_owner(owner), _checked_id("session", session_id))


def _owner(owner: str) -> str:
    """Return an owner as the tables hold it: one that is too long by its hash, which no other owner can pass for."""
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
    """Return a session's or an answer's id, if it can be a part of a resource name."""
    if _NO_SEGMENT.search(value):
        raise InvalidRequestError(f"{field}: an id holds neither '/' nor white space")
    return _checked(field, value, MAX_ID)


def _storable(text: str) -> str:
    """Return a text that every database holds: what it can't becomes U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


def _is(key: _Key) -> tuple[ColumnElement[bool], ...]:
    return sessions.c.owner == key.owner, sessions.c.id == key.id


def _of(table: Table, key: _Key) -> tuple[ColumnElement[bool], ...]:
    """Return the SQL that picks what belongs to a session, of its turns or labels."""
    return table.c.owner == key.owner, table.c.session_id == key.id


def _find(connection: Connection, key: _Key, *, lock: bool = False) -> Row[Any] | None:
    """Return a session's row, in PostgreSQL locked against other writers (SQLite has one writer at a time)."""
    statement = select(sessions).where(*_is(key))
    return connection.execute(statement.with_for_update() if lock else statement).one_or_none()


def _row(connection: Connection, key: _Key, *, lock: bool = False) -> Row[Any]:
    """Return a session's row; raise ``NotFoundError`` where it does not exist, or is another owner's."""
    row = _find(connection, key, lock=lock)
    if row is None:
        raise NotFoundError("session: there is no session of this name")
    return row


def _labels(connection: Connection, owner: str, ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the labels of some of an owner's sessions, by the session's id."""
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
    """Return data as JSON in ASCII; what JSON has no type for, in a document's metadata, becomes text."""
    return json.dumps(_plain(data), separators=(",", ":"))


def _plain(data: object) -> object:
    # Not pydantic's own JSON mode: it raises on bytes that are no UTF-8, and an answer must not be lost for those.
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
    """Return the session of a row."""
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
    """Return the turn of a row, with its answer if the row has it."""
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
    # Not from the text itself: pydantic's parser refuses lone surrogates, which json's keeps.
    return Answer.model_validate(json.loads(text))
