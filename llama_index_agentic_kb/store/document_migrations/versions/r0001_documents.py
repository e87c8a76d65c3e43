"""Revision 0001: the tables of sources, documents, chunks, their texts, words and vectors in PostgreSQL."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Paths are compared by bytes, as in SQLite. Vectors stay in their rows: an exact search reads all of them.
SCHEMA = """
CREATE EXTENSION IF NOT EXISTS vector;
CREATE TABLE state (key text PRIMARY KEY, value text);
INSERT INTO state VALUES ('changes', '0');
CREATE TABLE sources (
    name text COLLATE "C" PRIMARY KEY, description text NOT NULL, version bigint NOT NULL
);
CREATE TABLE languages (
    source text COLLATE "C" REFERENCES sources (name) ON DELETE CASCADE, language text, PRIMARY KEY (source, language)
);
CREATE TABLE scopes (
    source text COLLATE "C" PRIMARY KEY REFERENCES sources (name) ON DELETE CASCADE, data bytea NOT NULL
);
CREATE TABLE documents (
    source text COLLATE "C" NOT NULL REFERENCES sources (name) ON DELETE CASCADE,
    path text COLLATE "C" NOT NULL, origin text NOT NULL, root text NOT NULL,
    content_hash text NOT NULL, settings text NOT NULL,
    PRIMARY KEY (source, path)
);
CREATE TABLE chunks (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, node_id text NOT NULL UNIQUE,
    source text COLLATE "C" NOT NULL, path text COLLATE "C" NOT NULL, chunk_index integer NOT NULL,
    metadata jsonb NOT NULL, embedding_hash text NOT NULL, start_char bigint, end_char bigint,
    FOREIGN KEY (source, path) REFERENCES documents (source, path) ON DELETE CASCADE
);
CREATE INDEX chunks_of_document ON chunks (source, path, chunk_index);
CREATE INDEX chunks_by_embedding ON chunks (source, embedding_hash);
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
    for statement in SCHEMA.split(";"):
        op.execute(statement)
