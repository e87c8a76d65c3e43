"""Knowledge sources: what is searched, and the one place where filters are computed and checked."""

from llama_index_agentic_kb.sources.base import KnowledgeSource, SearchResult
from llama_index_agentic_kb.sources.facets import Facet, FacetBucket, SourceDocument, ValueGroup
from llama_index_agentic_kb.sources.fields import Fields
from llama_index_agentic_kb.sources.planner_filters import FilterField

__all__ = [
    "Facet",
    "FacetBucket",
    "Fields",
    "FilterField",
    "KnowledgeSource",
    "SearchResult",
    "SourceDocument",
    "ValueGroup",
]
