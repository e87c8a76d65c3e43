"""Knowledge sources: what is searched, and the one place where filters are computed and checked."""

from llama_index_agentic_kb.sources.base import KnowledgeSource, SearchResult

__all__ = ["KnowledgeSource", "SearchResult"]
