"""Revision 0003: a table for the state of a session's conversation."""

from __future__ import annotations

from alembic import op

from llama_index_agentic_kb.store.session_database import METADATA

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table, unless revision 0001 of this release already did."""
    METADATA.create_all(op.get_bind())
