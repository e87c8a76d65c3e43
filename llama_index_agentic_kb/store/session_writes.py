"""What is written inside of one transaction on the sessions' tables.

Each comes to the same when it is run again after a connection broke: ids and times are made before.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy import update as sql_update

from llama_index_agentic_kb import _text
from llama_index_agentic_kb.schema.sessions import Session, SessionChanges, Turn
from llama_index_agentic_kb.store.session_keys import (
    NewSession,
    NewTurn,
    Said,
    SessionKey,
    checked_id,
    find_session,
    is_session,
    its_labels,
    missing,
    session_row,
    storable,
)
from llama_index_agentic_kb.store.session_tables import (
    dumped,
    labels,
    microseconds,
    read_session,
    read_turn,
    sessions,
    turns,
)

__all__ = ["Deletion", "add_turn", "create", "update"]

TITLE_CHARACTERS: Final = 200
"""Of the first question, as a display name."""


def create(made: NewSession, connection: Connection) -> Session:
    """Make a session, unless a lost try has made it already."""
    found = find_session(connection, made.key)
    if found is None:
        _insert(connection, made)
        _change(connection, made.key, made.changes)
        found = session_row(connection, made.key)
    return read_session(found, its_labels(connection, made.key))


def _insert(connection: Connection, made: NewSession) -> None:
    now = microseconds(made.now)
    values = {"display_name": "", "user_pseudo_id": "", "is_pinned": False, "turn_count": 0}
    connection.execute(insert(sessions).values(owner=made.owner, id=made.id, started_at=now, updated_at=now, **values))


def update(key: SessionKey, changes: SessionChanges, now: datetime, connection: Connection) -> Session:
    """Change a session."""
    row = session_row(connection, key, lock=True)
    _change(connection, key, changes)
    moved = max(microseconds(now), row.updated_at)
    connection.execute(sql_update(sessions).where(*is_session(key)).values(updated_at=moved))
    return read_session(session_row(connection, key), its_labels(connection, key))


def _change(connection: Connection, key: SessionKey, changes: SessionChanges) -> None:
    given = changes.model_dump(exclude_none=True, exclude={"labels"}, by_alias=False)
    values = {name: storable(value) if isinstance(value, str) else value for name, value in given.items()}
    if values:
        connection.execute(sql_update(sessions).where(*is_session(key)).values(**values))
    if changes.labels is None:
        return
    connection.execute(delete(labels).where(labels.c.owner == key.owner, labels.c.session_id == key.id))
    wanted = dict.fromkeys(map(storable, changes.labels))
    numbered = [
        {"owner": key.owner, "session_id": key.id, "position": position, "label": label}
        for position, label in enumerate(wanted)
    ]
    if numbered:
        connection.execute(insert(labels), numbered)


class Deletion:
    """Deletes a session with all that belongs to it. Run again after a lost try, it doesn't miss what is gone."""

    def __init__(self, key: SessionKey) -> None:
        self._key = key
        self._found = False

    def __call__(self, connection: Connection) -> None:
        """Delete it."""
        key = self._key
        if find_session(connection, key, lock=True) is None:
            if self._found:
                return
            raise missing()
        self._found = True
        connection.execute(delete(turns).where(turns.c.owner == key.owner, turns.c.session_id == key.id))
        connection.execute(delete(labels).where(labels.c.owner == key.owner, labels.c.session_id == key.id))
        connection.execute(delete(sessions).where(*is_session(key)))


def add_turn(new: NewTurn, connection: Connection) -> Turn:
    """Store a turn under the next number, or give the one that has its answer's id."""
    key = new.key
    row = find_session(connection, key, lock=True)
    if row is None and new.made is not None:
        _insert(connection, new.made)
        _change(connection, key, new.made.changes)
        row = session_row(connection, key)
    if row is None:
        raise missing()
    answer_id = checked_id("answer.id", new.answer.id or "")
    same = (turns.c.owner == key.owner, turns.c.session_id == key.id, turns.c.answer_id == answer_id)
    its_row = select(turns).where(*same)
    stored = connection.execute(its_row).one_or_none()
    if stored is not None:
        return read_turn(stored)
    completed = max(microseconds(new.now), row.updated_at)
    asked = new.answer.created_at
    connection.execute(
        insert(turns).values(
            owner=key.owner,
            session_id=key.id,
            number=row.turn_count + 1,
            answer_id=answer_id,
            question=_question(new.said),
            answer=dumped(new.answer.model_dump(by_alias=True)),
            created_at=completed if asked is None else microseconds(asked),
            completed_at=completed,
        )
    )
    title = row.display_name or storable(_text.one_line(new.said.query, TITLE_CHARACTERS))
    connection.execute(
        sql_update(sessions)
        .where(*is_session(key))
        .values(turn_count=row.turn_count + 1, updated_at=completed, ended_at=completed, display_name=title)
    )
    return read_turn(connection.execute(its_row).one())


def _question(said: Said) -> str:
    return dumped({"query": said.query, "query_id": said.query_id, "query_config": said.query_config})
