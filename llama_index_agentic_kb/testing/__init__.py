"""Doubles for tests without a network: a server that speaks OpenAI's API, a model, sources and embeddings.

    server       LoopbackOpenAI    the real OpenAI client, every way it can fail, and the bill
    llms         ScriptedLLM       a language model in the same process
    sources      MemoryRetriever   a retriever that can be slow, fail or hang
    embeddings   HashEmbedding     vectors without weights
    rerankers    OverlapReranker   a node postprocessor that reranks, without weights
    injection    ObedientLLM       a model that obeys every order it reads, and poisoned documents to try it with

All are deterministic, may be used from many threads, and record what they were asked. No other module of the package
imports this one.
"""

from __future__ import annotations

from llama_index_agentic_kb.testing._faults import Fault, FaultKind
from llama_index_agentic_kb.testing._replies import ChatRequest, Reply, Usage
from llama_index_agentic_kb.testing._script import ScriptExhaustedError
from llama_index_agentic_kb.testing._text import count_tokens, hash_vector
from llama_index_agentic_kb.testing.embeddings import HashEmbedding
from llama_index_agentic_kb.testing.llms import ScriptedLLM, ScriptedReply
from llama_index_agentic_kb.testing.rerankers import OverlapReranker
from llama_index_agentic_kb.testing.server import LoopbackOpenAI, RecordedRequest
from llama_index_agentic_kb.testing.sources import MemoryRetriever, RecordedQuery, Verbatim

__all__ = [
    "ChatRequest",
    "Fault",
    "FaultKind",
    "HashEmbedding",
    "LoopbackOpenAI",
    "MemoryRetriever",
    "OverlapReranker",
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
