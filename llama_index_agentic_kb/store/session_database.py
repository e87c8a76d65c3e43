"""The tables of sessions and of the server, in SQLite or PostgreSQL.

Times are microseconds since 1970 in UTC, in both databases. Questions and answers are stored as ASCII JSON, so that
any text can be stored, including NUL and lone surrogates.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from llama_index_agentic_kb.store.sql import Revisions

SESSIONS: Final = Revisions("sessions", "0003", "agentic_kb_sessions_version")
MAX_NAME: Final = 512
"""The maximum length of an owner's key, in characters."""
MAX_ID: Final = 128
"""The maximum length of a session's or answer's id, in characters."""
METADATA: Final = MetaData()


def _of_a_session() -> tuple[Column[str], Column[str], ForeignKeyConstraint]:
    """Return the columns that refer to a session, as part of the primary key; deleting it deletes the rows."""
    referred = ["agentic_kb_sessions.owner", "agentic_kb_sessions.id"]
    return (
        Column("owner", String(MAX_NAME), primary_key=True),
        Column("session_id", String(MAX_ID), primary_key=True),
        ForeignKeyConstraint(["owner", "session_id"], referred, ondelete="CASCADE"),
    )


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
    *_of_a_session(),
    Column("position", Integer, primary_key=True),
    Column("label", Text, nullable=False),
)
turns: Final = Table(
    "agentic_kb_turns",
    METADATA,
    *_of_a_session(),
    Column("number", Integer, primary_key=True),
    Column("answer_id", String(MAX_ID), nullable=False),
    Column("question", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("completed_at", BigInteger, nullable=False),
    UniqueConstraint("owner", "session_id", "answer_id", name="agentic_kb_turns_answer"),
)


states: Final = Table("agentic_kb_session_states", METADATA, *_of_a_session(), Column("data", Text, nullable=False))

# The server's: definitions of knowledge bases and sources, and hashes of API keys.
definitions: Final = Table(
    "agentic_kb_definitions",
    METADATA,
    Column("kind", String(32), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("etag", String(64), nullable=False),
    Column("definition", Text, nullable=False),  # ASCII JSON
    Column("updated_at", BigInteger, nullable=False),
)
api_keys: Final = Table(
    "agentic_kb_api_keys",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("role", String(16), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
)


def microseconds(moment: datetime) -> int:
    """Return a time as microseconds since 1970; raise ``TypeError`` if it has no time zone."""
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
