"""What a knowledge base keeps on disk: documents, vectors, and the model that made them agree; and sessions.

    files ─▶ reading ─▶ chunking ─▶ ingestion ─▶ database ─┬▶ vectors ─▶ chroma
                                                           └▶ lexical

`KnowledgeStore` is the directory that holds them; `ingest` fills it. The database (SQLite) is the truth, graphs and
lexical indexes are derived from it; `repair_store` builds these again. Importing this room loads neither Chroma, torch
nor any file reader: they come with the first call that needs them. ``chroma_search`` searches collections of others.
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
