"""Whose session, and which: keys, what a turn or a session is made of, and their rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, select

from llama_index_agentic_kb.errors import InvalidRequestError, NotFoundError
from llama_index_agentic_kb.schema.answer import Answer
from llama_index_agentic_kb.schema.sessions import SessionChanges
from llama_index_agentic_kb.store.session_tables import MAX_ID, MAX_NAME, labels, sessions

__all__ = [
    "NewSession",
    "NewTurn",
    "Said",
    "SessionKey",
    "checked_id",
    "checked_owner",
    "find_session",
    "is_session",
    "its_labels",
    "key_of",
    "labels_of",
    "missing",
    "session_row",
    "storable",
]

_NO_SEGMENT: Final = re.compile(r"[/\s]")
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""What no text column holds: PostgreSQL has no NUL, UTF-8 no lone surrogates."""


class SessionKey(NamedTuple):
    """Whose session, and which."""

    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class Said:
    """What the user said of a turn."""

    query: str
    query_id: str
    query_config: dict[str, str]
    user_pseudo_id: str


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to make."""

    owner: str
    id: str
    now: datetime
    changes: SessionChanges

    @property
    def key(self) -> SessionKey:
        """Where it will be."""
        return SessionKey(self.owner, self.id)


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn to store, and the session to make for it, if any."""

    key: SessionKey
    said: Said
    answer: Answer
    now: datetime
    made: NewSession | None


def checked_owner(owner: str) -> str:
    """Give an owner's key.

    Raises:
        InvalidRequestError: It is empty, too long, or holds what can't be stored.
    """
    return _checked("owner", owner, MAX_NAME)


def key_of(owner: str, session_id: str) -> SessionKey:
    """Give the key of a session.

    Raises:
        InvalidRequestError: A part of it is empty, too long, or holds what can't be stored.
    """
    return SessionKey(checked_owner(owner), checked_id("session", session_id))


def _checked(field: str, value: str, limit: int) -> str:
    """Give a name, if it can be stored as it is."""
    if not 1 <= len(value) <= limit:
        raise InvalidRequestError(f"{field}: a text of 1 to {limit} characters is needed")
    if _UNSTORABLE.search(value):
        raise InvalidRequestError(f"{field}: it holds a NUL or a lone surrogate")
    return value


def checked_id(field: str, value: str) -> str:
    """Give a session's or an answer's id, if it can be a part of a resource name."""
    if _NO_SEGMENT.search(value):
        raise InvalidRequestError(f"{field}: an id holds neither '/' nor white space")
    return _checked(field, value, MAX_ID)


def storable(text: str) -> str:
    """Give a text that every database holds: what it can't becomes U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


def its_labels(connection: Connection, key: SessionKey) -> Sequence[str]:
    """Give a session's labels, in their order."""
    return labels_of(connection, key.owner, [key.id]).get(key.id, ())


def labels_of(connection: Connection, owner: str, ids: Sequence[str]) -> dict[str, list[str]]:
    """Give the labels of some of an owner's sessions, by the session's id."""
    found: dict[str, list[str]] = {}
    rows = connection.execute(
        select(labels.c.session_id, labels.c.label)
        .where(labels.c.owner == owner, labels.c.session_id.in_(ids))
        .order_by(labels.c.session_id, labels.c.position)
    )
    for session_id, label in rows:
        found.setdefault(session_id, []).append(label)
    return found


def is_session(key: SessionKey) -> tuple[Any, ...]:
    """Give the SQL that picks a session."""
    return sessions.c.owner == key.owner, sessions.c.id == key.id


def find_session(connection: Connection, key: SessionKey, *, lock: bool = False) -> Row[Any] | None:
    """Give a session's row, in PostgreSQL locked against other writers (SQLite has one writer at a time)."""
    statement = select(sessions).where(*is_session(key))
    return connection.execute(statement.with_for_update() if lock else statement).one_or_none()


def session_row(connection: Connection, key: SessionKey, *, lock: bool = False) -> Row[Any]:
    """Give a session's row; see ``find_session``.

    Raises:
        NotFoundError: There is none.
    """
    row = find_session(connection, key, lock=lock)
    if row is None:
        raise missing()
    return row


def missing() -> NotFoundError:
    """Give the error of a session that is not there, or another owner's."""
    return NotFoundError("session: there is no session of this name")
