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

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, Row

from llama_index_agentic_kb import _text
from llama_index_agentic_kb._aio import arun, bridged
from llama_index_agentic_kb._types import Closing, JsonMapping, JsonObject
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, NotFoundError
from llama_index_agentic_kb.schema.answer import (
    NEW_SESSION,
    Answer,
    AnswerState,
    Session,
    SessionChanges,
    SessionOrder,
    SessionPage,
    SessionQuery,
    SessionState,
    Turn,
)
from llama_index_agentic_kb.schema.filters import (
    INEQUALITIES,
    ORDERS,
    TEXT_MATCHES,
    Condition,
    FilterLogic,
    FilterNode,
    FilterOperator,
)
from llama_index_agentic_kb.schema.request import Message
from llama_index_agentic_kb.store.sql import MAX_ID, MAX_NAME, SESSIONS, SqlDatabase, labels, sessions, states, turns

__all__ = ["SessionStore"]

T = TypeVar("T")

_TITLE_CHARACTERS: Final = 200  # of the first question, used as a display name
MAX_OWNER: Final = 100_000
"""The maximum length of an owner's name in characters; principals with many groups have long names."""
_HASHED: Final = "sha256:"
_NO_SEGMENT: Final = re.compile(r"[/\s]")
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""Characters that no text column can store: NUL (PostgreSQL) and lone surrogates (UTF-8)."""


class _Key(NamedTuple):
    owner: str
    session_id: str


class SessionStore(Closing):
    """A store of sessions and answers in SQLite or PostgreSQL; safe for threads, processes and forked children.

    Every call takes an owner, an opaque key (of a tenant's user, for example), and finds only this owner's sessions;
    all but `alist_sessions` and `aget_states`, which then find nothing, raise ``NotFoundError`` for any other. A failed
    call changes nothing, but a call that exceeded its deadline may still complete: storing a turn again under the same
    ``answer.id`` stores it only once. A ``deadline`` is a ``time.monotonic()`` value; it defaults to the store's
    timeout.

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
        self._database = SqlDatabase(url, SESSIONS, timeout=timeout)

    def close(self) -> None:
        """Close idle connections; the next call opens new ones."""
        self._database.close()

    async def acreate(
        self, owner: str, changes: SessionChanges | None = None, *, deadline: float | None = None
    ) -> Session:
        """Create a session without turns; if it has no display name, the first question becomes its name."""
        key, now = _key(owner, uuid.uuid4().hex), datetime.now(UTC)

        def work(connection: Connection) -> Session:
            row = _row(connection, key, make=changes or SessionChanges(), now=now)  # an earlier try may have made it
            return _read(connection, [row])[0]

        return await self._do("creating a session", work, deadline, write=True)

    async def aget(
        self, owner: str, session_id: str, *, include_answers: bool = False, deadline: float | None = None
    ) -> Session:
        """Return a session with its turns in order.

        With ``include_answers`` each turn has its complete answer; otherwise only the answer's id.
        """
        key = _key(owner, session_id)
        columns = [column for column in turns.c if include_answers or column is not turns.c.answer]
        statement = sa.select(*columns).where(*_of(turns, key)).order_by(turns.c.number)

        def work(connection: Connection) -> Session:
            found = list(map(_turn, connection.execute(statement)))
            return _read(connection, [_row(connection, key)])[0].model_copy(update={"turns": found})

        return await self._do("reading a session", work, deadline, write=False)

    async def alist_sessions(
        self, owner: str, query: SessionQuery | None = None, *, deadline: float | None = None
    ) -> SessionPage:
        """Return a page of an owner's sessions, without turns; by default the latest updated first, 50 per page.

        Raises:
            InvalidRequestError: The filter uses an unknown field, operator or value, or the page token is invalid.
        """
        query = query or SessionQuery()
        statement = _page(_owner(owner), query)

        def work(connection: Connection) -> SessionPage:
            found = connection.execute(statement).all()
            shown = found[: query.page_size]
            token = None
            if len(found) > len(shown):  # the next page starts after the last row
                place = [_digest(query), [getattr(shown[-1], by.key) for by in _order(query)]]
                token = base64.urlsafe_b64encode(_dumped(place).encode()).decode().rstrip("=")
            return SessionPage(sessions=_read(connection, shown), next_page_token=token)

        return await self._do("listing sessions", work, deadline, write=False)

    async def aupdate(
        self, owner: str, session_id: str, changes: SessionChanges, *, deadline: float | None = None
    ) -> Session:
        """Change a session's display name, labels, pinned state or user, and return it without turns."""
        key, now = _key(owner, session_id), datetime.now(UTC)

        def work(connection: Connection) -> Session:
            row = _row(connection, key, lock=True)
            _change(connection, key, changes)
            _set(connection, key, {"updated_at": max(now, row.updated_at)})
            return _read(connection, [_row(connection, key)])[0]

        return await self._do("changing a session", work, deadline, write=True)

    async def adelete(self, owner: str, session_id: str, *, deadline: float | None = None) -> None:
        """Delete a session with all its turns and answers."""
        key, tried = _key(owner, session_id), False

        def work(connection: Connection) -> None:
            nonlocal tried
            if not tried:  # on a retry, the session may already be deleted
                _row(connection, key, lock=True)
            tried = True
            connection.execute(sa.delete(sessions).where(*_of(sessions, key)))  # and, by cascade, turns and labels

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
        """
        if answer.state not in (AnswerState.SUCCEEDED, AnswerState.FAILED):
            raise InvalidRequestError(
                f"answer.state: a turn holds a whole answer, succeeded or failed; this one is {answer.state.value!r}"
            )
        named = answer if answer.id else answer.model_copy(update={"id": uuid.uuid4().hex})
        if session_id == NEW_SESSION:
            # Derived from the answer's id: storing the same turn again finds the session created by the first try.
            may_make, session_id = True, uuid.uuid5(uuid.NAMESPACE_OID, f"{owner}\n{named.id}").hex
        key, now = _key(owner, session_id), datetime.now(UTC)
        answer_id = _checked_id("answer.id", named.id or "")
        question = {"query": query, "query_id": query_id, "query_config": dict(query_config or {})}

        def work(connection: Connection) -> Turn:
            made = SessionChanges(user_pseudo_id=user_pseudo_id) if may_make else None
            row = _row(connection, key, lock=True, make=made, now=now)
            stored = sa.select(turns).where(*_of(turns, key), turns.c.answer_id == answer_id)
            if known := connection.execute(stored).one_or_none():
                return _turn(known)
            number, completed = row.turn_count + 1, max(now, row.updated_at)
            times = {"created_at": named.created_at or completed, "completed_at": completed}
            texts = {"question": _dumped(question), "answer": _dumped(named.model_dump(by_alias=True))}
            values = {**key._asdict(), "number": number, "answer_id": answer_id, **texts, **times}
            connection.execute(sa.insert(turns).values(values))
            title = row.display_name or _storable(_text.one_line(query, _TITLE_CHARACTERS))
            changed = {"turn_count": number, "display_name": title, "updated_at": completed, "ended_at": completed}
            _set(connection, key, changed)
            return _turn(connection.execute(stored).one())

        return await self._do("storing a turn", work, deadline, write=True)

    async def aget_answer(
        self, owner: str, session_id: str, answer_id: str, *, deadline: float | None = None
    ) -> Answer:
        """Return an answer of a session; raise ``NotFoundError`` if it has no such answer."""
        key = _key(owner, session_id)

        def work(connection: Connection) -> Answer:
            _row(connection, key)
            wanted = (*_of(turns, key), turns.c.answer_id == _storable(answer_id))
            text = connection.execute(sa.select(turns.c.answer).where(*wanted)).scalar()
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
        """
        if last is not None and last < 1:
            raise InvalidRequestError(f"last: at least 1 turn, or None for all; got {last}")
        if session_id == NEW_SESSION:
            return []
        key = _key(owner, session_id)

        def work(connection: Connection) -> list[Message]:
            _row(connection, key)
            newest = sa.select(turns).where(*_of(turns, key)).order_by(turns.c.number.desc()).limit(last)
            conversation = []
            for turn in map(_turn, reversed(connection.execute(newest).all())):
                if turn.answer is None or not turn.answer.is_kept_from_prompts:
                    said = {"user": turn.query, "assistant": turn.answer.text if turn.answer else ""}
                    conversation += [Message.model_validate({"role": role, "content": said[role]}) for role in said]
            return conversation

        return await self._do("reading a conversation", work, deadline, write=False)

    async def aget_states(self, owner: str, session_id: str, *, deadline: float | None = None) -> JsonObject:
        """Return the state of a session's conversation, as stored by ``aset_states``; empty if none was stored."""
        key = _key(owner, session_id)

        def work(connection: Connection) -> JsonObject:
            stored = connection.execute(sa.select(states.c.data).where(*_of(states, key))).scalar()
            return {} if stored is None else json.loads(stored)

        return await self._do("reading a conversation's state", work, deadline, write=False)

    async def aset_states(
        self, owner: str, session_id: str, data: JsonMapping, *, may_make: bool = False, deadline: float | None = None
    ) -> None:
        """Store the state of a session's conversation as JSON, in place of the earlier one.

        ``may_make`` makes a session that does not exist.
        """
        key, now = _key(owner, session_id), datetime.now(UTC)

        def work(connection: Connection) -> None:
            _row(connection, key, lock=True, make=SessionChanges() if may_make else None, now=now)
            connection.execute(sa.delete(states).where(*_of(states, key)))
            connection.execute(sa.insert(states).values(**key._asdict(), data=_dumped(data)))

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
        return await arun(self._database.atransact(work, write=write, deadline=deadline, what=what))


# -- rows and keys ----------------------------------------------------------------------------------------------------


def _key(owner: str, session_id: str) -> _Key:
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
    return _UNSTORABLE.sub("\ufffd", text)


def _of(table: sa.Table, key: _Key) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions on the first columns of the primary key, by position: the owner and the session's id."""
    return tuple(column == value for column, value in zip(table.primary_key, key, strict=False))


def _row(
    connection: Connection,
    key: _Key,
    *,
    lock: bool = False,
    make: SessionChanges | None = None,
    now: datetime | None = None,
) -> Row[Any]:
    """Return a session's row, with ``lock`` locked for writing (PostgreSQL; SQLite has a single writer).

    A missing one is made if ``make`` is given, else ``NotFoundError`` is raised, as for another owner's.
    """
    statement = sa.select(sessions).where(*_of(sessions, key))
    statement = statement.with_for_update() if lock else statement
    row = connection.execute(statement).one_or_none()
    if row is None and make is not None:
        new = {"display_name": "", "user_pseudo_id": "", "is_pinned": False, "turn_count": 0, "started_at": now}
        connection.execute(sa.insert(sessions).values(owner=key.owner, id=key.session_id, updated_at=now, **new))
        _change(connection, key, make)
        row = connection.execute(statement).one()
    if row is None:
        raise NotFoundError("session: there is no session of this name")
    return row


def _set(connection: Connection, key: _Key, values: JsonObject) -> None:
    connection.execute(sa.update(sessions).where(*_of(sessions, key)).values(values))


def _change(connection: Connection, key: _Key, changes: SessionChanges) -> None:
    changed = changes.model_dump(exclude_none=True, exclude={"labels"}, by_alias=False)
    if changed:
        texts = {name: _storable(value) if isinstance(value, str) else value for name, value in changed.items()}
        _set(connection, key, texts)
    if changes.labels is not None:
        connection.execute(sa.delete(labels).where(*_of(labels, key)))
        for position, label in enumerate(dict.fromkeys(map(_storable, changes.labels))):
            connection.execute(sa.insert(labels).values(**key._asdict(), position=position, label=label))


def _dumped(data: object) -> str:
    """Return data as ASCII JSON; values of types that JSON lacks (in a document's metadata) are converted."""
    # Not pydantic's JSON mode: it raises on bytes that are not UTF-8, which must not prevent storing an answer.
    return json.dumps(data, separators=(",", ":"), default=_plain, skipkeys=True)


def _plain(data: object) -> object:
    if isinstance(data, Mapping):
        return dict(data)
    if isinstance(data, set | frozenset):
        return list(data)
    return data.isoformat() if isinstance(data, date) else str(data)


def _read(connection: Connection, rows: Sequence[Row[Any]]) -> list[Session]:
    """Return an owner's sessions from their rows, with their labels and without turns."""
    wanted = (labels.c.owner.in_({row.owner for row in rows}), labels.c.session_id.in_([row.id for row in rows]))
    named: dict[str, list[str]] = {}
    for found in connection.execute(sa.select(labels).where(*wanted).order_by(labels.c.session_id, labels.c.position)):
        named.setdefault(found.session_id, []).append(found.label)
    held = [{name: value for name, value in row._asdict().items() if name in Session.model_fields} for row in rows]
    return [Session(**one, labels=named.get(one["id"], [])) for one in held]


def _turn(row: Row[Any]) -> Turn:
    held = {name: value for name, value in row._asdict().items() if name in Turn.model_fields}
    answer = _answer(held["answer"]) if "answer" in held else None
    return Turn(**json.loads(row.question), **{**held, "answer": answer})


def _answer(text: str) -> Answer:
    # Not model_validate_json: pydantic's parser rejects lone surrogates, which json's accepts.
    return Answer.model_validate(json.loads(text))


# -- listing ----------------------------------------------------------------------------------------------------------

Clause: TypeAlias = ColumnElement[bool]

_TIMES: Final = ("started_at", "updated_at")
_TEXTS: Final = ("id", "display_name", "user_pseudo_id")
_FILTERED: Final = (*_TEXTS, "state", "is_pinned", "labels", *_TIMES)


def _page(owner: str, query: SessionQuery) -> sa.Select[Any]:
    """Return the SQL statement for a page of an owner's sessions, plus one row to detect a next page.

    Pages begin after a row, not at an offset: sessions created or deleted meanwhile cause no duplicates nor gaps.
    """
    order = _order(query)
    columns = (sa.desc(_place(by.key)) if by.descending else sa.asc(_place(by.key)) for by in order)
    wanted = (sessions.c.owner == owner, _filter(query.filters), _after(query, order))
    return sa.select(sessions).where(*wanted).order_by(*columns).limit(query.page_size + 1)


def _filter(tree: FilterNode | None) -> Clause:
    if tree is None:
        return sa.true()
    if isinstance(tree, Condition):
        return _condition(tree)
    parts = [_filter(child) for child in tree.filters]
    if tree.logic is FilterLogic.AND:
        return sa.and_(*parts)
    return sa.or_(*parts) if tree.logic is FilterLogic.OR else sa.not_(sa.or_(*parts))


def _condition(condition: Condition) -> Clause:
    key, operator = condition.key, condition.operator
    if key not in _FILTERED:
        raise InvalidRequestError(f"filters: sessions have no {key[:60]!r}; there are {', '.join(_FILTERED)}")
    if operator is FilterOperator.EXISTS:
        return _has_label(sa.true()) if key == "labels" else sa.true()
    if operator in (FilterOperator.IS_EMPTY, *TEXT_MATCHES):
        raise InvalidRequestError(f"filters: sessions are not filtered by {operator.value}")
    if operator in ORDERS and key not in (*_TIMES, *_TEXTS):
        raise InvalidRequestError(f"filters: {key} is equal or not, it has no order")
    values = [_value(key, value) for value in condition.values]
    if operator in ORDERS:
        return sessions.c[key].bool_op(ORDERS[operator])(values[0])
    other = {"labels": labels.c.label, "state": sa.literal(SessionState.IN_PROGRESS.value)}
    found: Clause = (other[key] if key in other else sessions.c[key]).in_(values)
    found = _has_label(found) if key == "labels" else found
    return sa.not_(found) if operator in INEQUALITIES else found


def _has_label(which: Clause) -> Clause:
    same = sa.and_(labels.c.owner == sessions.c.owner, labels.c.session_id == sessions.c.id)
    return sa.exists(sa.select(labels.c.label).where(same, which))


def _value(key: str, value: object) -> str | int | datetime:
    if key in _TIMES:
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise InvalidRequestError(
                f"filters: {key} is compared with a time such as 2024-01-31T12:00:00Z, found {str(value)[:40]!r}"
            )
        return moment
    if key != "is_pinned":
        return _storable(str(value))
    if not isinstance(value, bool):
        raise InvalidRequestError(f"filters: is_pinned is true or false, found {str(value)[:40]!r}")
    return value


def _order(query: SessionQuery) -> list[SessionOrder]:
    """Return a query's sort order without duplicate fields, with the session id added as tie-breaker."""
    order = list({by.key: by for by in reversed(query.order_by)}.values())[::-1]
    return order if any(by.key == "id" for by in order) else [*order, SessionOrder(key="id")]


def _after(query: SessionQuery, order: list[SessionOrder]) -> Clause:
    """Return the SQL condition for rows after the query's page token; always true without a token."""
    if query.page_token is None:
        return sa.true()
    clauses: list[Clause] = []
    equal: Clause = sa.true()
    try:
        digest, values = json.loads(base64.urlsafe_b64decode(query.page_token + "=" * (-len(query.page_token) % 4)))
        if digest != _digest(query):
            raise ValueError("another query")  # noqa: TRY301 (as any other text)
        for by, value in zip(order, values, strict=True):
            place, held = _place(by.key), _value(by.key, value)
            held = int(held) if isinstance(held, bool) else held
            clauses.append(sa.and_(equal, place < held if by.descending else place > held))
            equal = sa.and_(equal, place == held)
    except (ValueError, TypeError, RecursionError, InvalidRequestError):
        raise InvalidRequestError(
            "pageToken: it was not returned for this filter and order; ask for the first page"
        ) from None
    return sa.or_(*clauses)


def _place(key: str) -> ColumnElement[Any]:
    """Return a column as it is ordered; SQLAlchemy has no ">" for booleans."""
    return sa.cast(sessions.c[key], sa.Integer) if key == "is_pinned" else sessions.c[key]


def _digest(query: SessionQuery) -> str:
    asked = query.model_dump_json(include={"filters", "order_by"}, fallback=str)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]
