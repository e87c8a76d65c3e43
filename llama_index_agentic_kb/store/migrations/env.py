"""Alembic environment: runs all migrations in the transaction that ``store.sql`` has begun.

Add a new revision to ``sessions/`` or ``documents/`` under the next number, and set it in their ``Revisions``.
"""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
with context.begin_transaction():
    context.run_migrations()
