"""What a knowledge base keeps on disk: vectors, documents, and the model that made them agree.

    files ─▶ readers ─▶ chunking ─▶ embedding_model ─▶ chroma      (vectors, for searching)
                                                    └▶ documents   (text and hashes, for rebuilding)
                                                         └▶ lexical (words, for searching)

`KnowledgeStore` is the directory that holds them; `ingest` fills it; `repair_store` makes vectors and words again from
the documents, which survive what damages those (`recovery` tells when that is). Importing this room loads neither
Chroma, torch nor any file reader: they come with the first call that needs them.
"""

from __future__ import annotations

from llama_index_agentic_kb.store.embedding_model import (
    EmbedModelFingerprint,
    default_embed_model,
    embed_model_fingerprint,
    embed_model_name,
)
from llama_index_agentic_kb.store.ingestion import IngestReport, ingest
from llama_index_agentic_kb.store.records import SourceInfo
from llama_index_agentic_kb.store.recovery import repair_store
from llama_index_agentic_kb.store.repair import RepairReport
from llama_index_agentic_kb.store.store import KnowledgeStore

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
