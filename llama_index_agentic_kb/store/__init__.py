"""Storage of a knowledge base: documents, vectors, the embedding model's fingerprint, and chat sessions.

    files ─▶ reading ─▶ chunking ─▶ ingestion ─▶ database ─▶ vectors, words

`KnowledgeStore` opens a store; `ingest` fills it. The database is the source of truth; vector indexes (HNSW graphs) and
lexical indexes are derived from it, and `repair_store` rebuilds them. Importing this package loads neither torch nor
any file reader.
"""

from __future__ import annotations

from llama_index_agentic_kb.store.database import SourceInfo
from llama_index_agentic_kb.store.embedding_model import (
    EmbedModelFingerprint,
    default_embed_model,
    embed_model_fingerprint,
    embed_model_name,
)
from llama_index_agentic_kb.store.ingestion import IngestReport, ingest
from llama_index_agentic_kb.store.store import KnowledgeStore, RepairReport, repair_store

__all__ = [
    "EmbedModelFingerprint",
    "IngestReport",
    "KnowledgeStore",
    "RepairReport",
    "SourceInfo",
    "default_embed_model",
    "embed_model_fingerprint",
    "embed_model_name",
    "ingest",
    "repair_store",
]
