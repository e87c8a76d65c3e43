"""Revision 0001: the tables of sources, documents, chunks, their texts, words and vectors in PostgreSQL."""

from __future__ import annotations

from alembic import op

from llama_index_agentic_kb.store.database import TABLES

revision = "0001"
down_revision = None

ROW = "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
# Paths are compared by bytes, as in SQLite. Vectors stay in their rows: an exact search reads all of them.
COMMON = TABLES.format(name='text COLLATE "C"', row=ROW, json="jsonb", by_key="")
SCHEMA = """
CREATE TABLE languages (
    source text COLLATE "C" REFERENCES sources (name) ON DELETE CASCADE, language text, PRIMARY KEY (source, language)
);
CREATE TABLE scopes (
    source text COLLATE "C" PRIMARY KEY REFERENCES sources (name) ON DELETE CASCADE, data bytea NOT NULL
);
CREATE INDEX chunks_by_metadata ON chunks USING gin (metadata jsonb_path_ops);
CREATE TABLE contents (
    id bigint PRIMARY KEY REFERENCES chunks (id) ON DELETE CASCADE, of_source text COLLATE "C" NOT NULL,
    text text NOT NULL, vector vector NOT NULL, words tsvector NOT NULL
);
ALTER TABLE contents ALTER COLUMN vector SET STORAGE MAIN;
CREATE INDEX contents_of_source ON contents (of_source);
CREATE INDEX contents_by_words ON contents USING gin (words)
"""


def upgrade() -> None:
    """Create the tables."""
    # The next revision must copy the present tables to here.
    for statement in ("CREATE EXTENSION IF NOT EXISTS vector;" + COMMON + SCHEMA).split(";"):
        op.execute(statement)
