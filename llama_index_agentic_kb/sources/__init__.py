"""Knowledge sources: searchable indexes and retrievers, and the computation and checking of their filters."""

from llama_index_agentic_kb.sources.base import Fields as Fields
from llama_index_agentic_kb.sources.base import KnowledgeSource as KnowledgeSource
from llama_index_agentic_kb.sources.filters import FilterField as FilterField
from llama_index_agentic_kb.sources.metadata import Facet as Facet
from llama_index_agentic_kb.sources.metadata import FacetBucket as FacetBucket
from llama_index_agentic_kb.sources.metadata import SourceDocument as SourceDocument
from llama_index_agentic_kb.sources.metadata import ValueGroup as ValueGroup
from llama_index_agentic_kb.sources.shards import ShardedSource as ShardedSource
from llama_index_agentic_kb.sources.tool import ToolSource as ToolSource
from llama_index_agentic_kb.sources.tool import WriteLedger as WriteLedger
from llama_index_agentic_kb.sources.tool import Writes as Writes
from llama_index_agentic_kb.sources.tool import mcp_sources as mcp_sources
