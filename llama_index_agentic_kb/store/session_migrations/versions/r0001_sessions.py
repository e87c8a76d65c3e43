"""Sessions, their labels, and turns with whole answers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the first tables."""
    op.create_table(
        "agentic_kb_sessions",
        sa.Column("owner", sa.String(512), primary_key=True),
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("display_name", sa.Text, nullable=False),
        sa.Column("user_pseudo_id", sa.Text, nullable=False),
        sa.Column("is_pinned", sa.Boolean, nullable=False),
        sa.Column("turn_count", sa.Integer, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger),
    )
    op.create_index("agentic_kb_sessions_by_update", "agentic_kb_sessions", ["owner", "updated_at", "id"])
    op.create_table(
        "agentic_kb_session_labels",
        sa.Column("owner", sa.String(512), primary_key=True),
        sa.Column("session_id", sa.String(128), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("label", sa.Text, nullable=False),
        _of_a_session(),
    )
    op.create_table(
        "agentic_kb_turns",
        sa.Column("owner", sa.String(512), primary_key=True),
        sa.Column("session_id", sa.String(128), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("answer_id", sa.String(128), nullable=False),
        sa.Column("question", sa.Text, nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("completed_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("owner", "session_id", "answer_id", name="agentic_kb_turns_answer"),
        _of_a_session(),
    )


def downgrade() -> None:
    """Drop them, with all sessions."""
    op.drop_table("agentic_kb_turns")
    op.drop_table("agentic_kb_session_labels")
    op.drop_table("agentic_kb_sessions")


def _of_a_session() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["owner", "session_id"], ["agentic_kb_sessions.owner", "agentic_kb_sessions.id"], ondelete="CASCADE"
    )
