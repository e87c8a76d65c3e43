"""Revision 0001: tables for sessions, their labels, and turns with complete answers."""

from __future__ import annotations

from alembic import op

from llama_index_agentic_kb.store.session_database import METADATA

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the initial tables."""
    # From METADATA: the second revision must change METADATA and copy its present table definitions to here.
    METADATA.create_all(op.get_bind())
