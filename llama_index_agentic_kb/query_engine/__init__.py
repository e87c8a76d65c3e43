"""The query engine: retrieval, synthesis and grounding joined to one way of a question.

retrieval ─▶ synthesis ─▶ grounding ─▶ response
"""

from llama_index_agentic_kb.query_engine.engine import AgenticQueryEngine, default_mode
from llama_index_agentic_kb.query_engine.responses import (
    AgenticAsyncStreamingResponse,
    AgenticResponse,
    AgenticStreamingResponse,
    Answered,
)

__all__ = [
    "AgenticAsyncStreamingResponse",
    "AgenticQueryEngine",
    "AgenticResponse",
    "AgenticStreamingResponse",
    "Answered",
    "default_mode",
]
