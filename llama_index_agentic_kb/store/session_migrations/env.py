"""Alembic environment: runs all migrations in the transaction that ``store.session_database`` has begun.

Add a new revision to ``versions/`` under the next number, and set ``session_database.REVISION`` to it.
"""

from __future__ import annotations

from alembic import context

from llama_index_agentic_kb.store.session_database import METADATA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
