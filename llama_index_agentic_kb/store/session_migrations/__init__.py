"""Alembic's migrations of the sessions' tables; ``store.session_database`` runs them when a database is opened.

A new revision stands in ``versions/``, under the next number, and ``session_tables.REVISION`` names it.
"""
