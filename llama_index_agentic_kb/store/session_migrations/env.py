"""What Alembic runs: all migrations in the transaction that the caller has begun."""

from __future__ import annotations

from alembic import context

from llama_index_agentic_kb.store.session_tables import METADATA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
