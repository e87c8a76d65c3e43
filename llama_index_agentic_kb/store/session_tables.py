"""The tables of sessions and their turns, and what a row means.

``session_migrations`` makes and changes these tables; here they are as the newest revision leaves them. Times are
microseconds since 1970 in UTC, the same and comparable in every database. What a turn says is JSON in ASCII, so that
any text can be stored, NUL and lone surrogates included.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from llama_index_agentic_kb.schema.answer import Answer, Session, Turn

__all__ = [
    "METADATA",
    "REVISION",
    "TURN_COLUMNS",
    "VERSION_TABLE",
    "dumped",
    "from_microseconds",
    "labels",
    "microseconds",
    "read_answer",
    "read_session",
    "read_turn",
    "sessions",
    "turns",
]

REVISION: Final = "0001"
"""The newest revision of the tables, and of the JSON in them: a change of either needs a new one."""
VERSION_TABLE: Final = "agentic_kb_sessions_version"
MAX_NAME: Final = 512
"""Characters of an owner's key."""
MAX_ID: Final = 128
"""Characters of a session's or an answer's id."""

METADATA: Final = MetaData()

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
    Column("owner", String(MAX_NAME), primary_key=True),
    Column("session_id", String(MAX_ID), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("label", Text, nullable=False),
    ForeignKeyConstraint(
        ["owner", "session_id"], ["agentic_kb_sessions.owner", "agentic_kb_sessions.id"], ondelete="CASCADE"
    ),
)
turns: Final = Table(
    "agentic_kb_turns",
    METADATA,
    Column("owner", String(MAX_NAME), primary_key=True),
    Column("session_id", String(MAX_ID), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("answer_id", String(MAX_ID), nullable=False),
    Column("question", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("completed_at", BigInteger, nullable=False),
    UniqueConstraint("owner", "session_id", "answer_id", name="agentic_kb_turns_answer"),
    ForeignKeyConstraint(
        ["owner", "session_id"], ["agentic_kb_sessions.owner", "agentic_kb_sessions.id"], ondelete="CASCADE"
    ),
)
TURN_COLUMNS: Final = (
    turns.c.session_id,
    turns.c.number,
    turns.c.answer_id,
    turns.c.question,
    turns.c.created_at,
    turns.c.completed_at,
)
"""Of a turn all but its answer."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def microseconds(moment: datetime) -> int:
    """Return a time as microseconds since 1970."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def from_microseconds(count: int) -> datetime:
    """Return the time of so many microseconds since 1970, in UTC."""
    return _EPOCH + timedelta(microseconds=count)


def dumped(data: Any) -> str:
    """Return data as JSON in ASCII; what JSON has no type for, in a document's metadata, becomes text."""
    return json.dumps(_plain(data), separators=(",", ":"))


def _plain(data: Any) -> Any:
    # Not pydantic's own JSON mode: it raises on bytes that are no UTF-8, and an answer must not be lost for those.
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        return [_plain(value) for value in data]
    if data is None or isinstance(data, (str, bool, int, float)):
        return data
    return data.isoformat() if isinstance(data, date) else str(data)


def read_session(row: Row[Any], its_labels: Iterable[str], its_turns: Iterable[Turn] = ()) -> Session:
    """Return the session of a row."""
    return Session(
        id=row.id,
        display_name=row.display_name,
        user_pseudo_id=row.user_pseudo_id,
        is_pinned=row.is_pinned,
        labels=list(its_labels),
        turns=list(its_turns),
        started_at=from_microseconds(row.started_at),
        updated_at=from_microseconds(row.updated_at),
        ended_at=None if row.ended_at is None else from_microseconds(row.ended_at),
    )


def read_turn(row: Row[Any]) -> Turn:
    """Return the turn of a row, with its answer if the row has it."""
    return Turn(
        session_id=row.session_id,
        number=row.number,
        answer_id=row.answer_id,
        answer=read_answer(row.answer) if hasattr(row, "answer") else None,
        created_at=from_microseconds(row.created_at),
        completed_at=from_microseconds(row.completed_at),
        **json.loads(row.question),
    )


def read_answer(text: str) -> Answer:
    """Return the answer of its JSON."""
    # Not from the text itself: pydantic's parser refuses lone surrogates, which json's keeps.
    return Answer.model_validate(json.loads(text))
