"""Revision 0003, the first that is kept: sessions, their labels, turns and states, and the server's tables."""

from __future__ import annotations

from alembic import op

from llama_index_agentic_kb.store.sql import METADATA

revision = "0003"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    # From METADATA: the next revision must change METADATA and copy its present table definitions to here.
    METADATA.create_all(op.get_bind())
