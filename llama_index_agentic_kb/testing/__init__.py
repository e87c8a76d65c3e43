"""Test doubles that need no network: a server with OpenAI's API, a model, sources and embeddings.

    server       LoopbackOpenAI    a server for the real OpenAI client that counts tokens
    llms         ScriptedLLM       a language model in the same process
    sources      MemoryRetriever   a retriever that can be slow, fail or hang
    embeddings   HashEmbedding     vectors without weights

All are deterministic, thread-safe, and record their calls. No other module of the package imports this one.
"""

from __future__ import annotations

from llama_index_agentic_kb.testing.embeddings import HashEmbedding, count_tokens, hash_vector
from llama_index_agentic_kb.testing.llms import ScriptedLLM, ScriptedReply, ScriptExhaustedError
from llama_index_agentic_kb.testing.openai_api import ChatRequest, Reply, Usage
from llama_index_agentic_kb.testing.server import LoopbackOpenAI, RecordedRequest
from llama_index_agentic_kb.testing.sources import MemoryRetriever, RecordedQuery, Verbatim

__all__ = [
    "ChatRequest",
    "HashEmbedding",
    "LoopbackOpenAI",
    "MemoryRetriever",
    "RecordedQuery",
    "RecordedRequest",
    "Reply",
    "ScriptExhaustedError",
    "ScriptedLLM",
    "ScriptedReply",
    "Usage",
    "Verbatim",
    "count_tokens",
    "hash_vector",
]
