"""The server's tables in the session database: definitions of knowledge bases and sources, and hashes of API keys."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, MetaData, String, Table, Text

METADATA: Final = MetaData()

definitions: Final = Table(
    "agentic_kb_definitions",
    METADATA,
    Column("kind", String(32), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("etag", String(64), nullable=False),
    Column("definition", Text, nullable=False),  # ASCII JSON
    Column("updated_at", BigInteger, nullable=False),
)
api_keys: Final = Table(
    "agentic_kb_api_keys",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("role", String(16), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
)
