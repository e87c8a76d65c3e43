"""Revision 0002: the server's tables, for definitions and API keys."""

from __future__ import annotations

from alembic import op

from llama_index_agentic_kb.store.server_tables import METADATA

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the server's tables."""
    METADATA.create_all(op.get_bind())
