"""Test doubles that need no network: a server with OpenAI's API, a model, sources and embeddings.

    LoopbackOpenAI    a server for the real OpenAI client that counts tokens
    ScriptedLLM       a language model in the same process
    MemoryRetriever   a retriever that can be slow, fail or hang
    HashEmbedding     vectors without weights

All are deterministic, thread-safe, and record their calls. No other module of the package imports this one.
"""

from __future__ import annotations

from llama_index_agentic_kb.replay import ScriptedReply
from llama_index_agentic_kb.testing.doubles import (
    HashEmbedding,
    MemoryRetriever,
    ScriptedLLM,
    ScriptExhaustedError,
    Verbatim,
    count_tokens,
    hash_vector,
)
from llama_index_agentic_kb.testing.openai_api import ChatRequest, LoopbackOpenAI, RecordedRequest, Reply, Usage

__all__ = [
    "ChatRequest",
    "HashEmbedding",
    "LoopbackOpenAI",
    "MemoryRetriever",
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
