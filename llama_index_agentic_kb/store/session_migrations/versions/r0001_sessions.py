"""Sessions, their labels, and turns with whole answers."""

from __future__ import annotations

from alembic import op

from llama_index_agentic_kb.store.session_database import METADATA

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the first tables."""
    # As the code has them: the second revision changes METADATA, and copies the tables as they are now to here.
    METADATA.create_all(op.get_bind())
