"""An agentic knowledge base for LlamaIndex: plan, search many sources at once, answer with citations, check the answer.

The doors are ``KnowledgeBase`` and LlamaIndex's own (retriever, query engine, chat engine, index); docs/architecture.md
follows a query through the modules. Names are exported lazily (PEP 562): importing the package loads neither torch nor
chromadb nor a model's client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_index_agentic_kb.account import ActivityCallbackHandler as ActivityCallbackHandler
    from llama_index_agentic_kb.account import ActivityEndEvent as ActivityEndEvent
    from llama_index_agentic_kb.account import ActivityStartEvent as ActivityStartEvent
    from llama_index_agentic_kb.answering.policy import AnswerPolicy as AnswerPolicy
    from llama_index_agentic_kb.answering.sessions import SessionMemory as SessionMemory
    from llama_index_agentic_kb.answering.sessions import session_owner as session_owner
    from llama_index_agentic_kb.chat_engine import AgenticChatEngine as AgenticChatEngine
    from llama_index_agentic_kb.errors import AgenticKBError as AgenticKBError
    from llama_index_agentic_kb.errors import BulkheadFullError as BulkheadFullError
    from llama_index_agentic_kb.errors import CircuitOpenError as CircuitOpenError
    from llama_index_agentic_kb.errors import ConfigurationError as ConfigurationError
    from llama_index_agentic_kb.errors import DeadlineExceededError as DeadlineExceededError
    from llama_index_agentic_kb.errors import DeniedError as DeniedError
    from llama_index_agentic_kb.errors import InvalidRequestError as InvalidRequestError
    from llama_index_agentic_kb.errors import LLMError as LLMError
    from llama_index_agentic_kb.errors import NotFoundError as NotFoundError
    from llama_index_agentic_kb.errors import RetrievalError as RetrievalError
    from llama_index_agentic_kb.errors import SessionStoreError as SessionStoreError
    from llama_index_agentic_kb.errors import SourceUnavailableError as SourceUnavailableError
    from llama_index_agentic_kb.errors import StoreDamagedError as StoreDamagedError
    from llama_index_agentic_kb.errors import StoreMismatchError as StoreMismatchError
    from llama_index_agentic_kb.errors import SynthesisError as SynthesisError
    from llama_index_agentic_kb.grounding.check import acheck_grounding as acheck_grounding
    from llama_index_agentic_kb.grounding.check import check_grounding as check_grounding
    from llama_index_agentic_kb.grounding.scorers import CrossEncoderScorer as CrossEncoderScorer
    from llama_index_agentic_kb.grounding.scorers import LexicalScorer as LexicalScorer
    from llama_index_agentic_kb.grounding.scorers import LLMJudge as LLMJudge
    from llama_index_agentic_kb.grounding.settings import Grounding as Grounding
    from llama_index_agentic_kb.guard.permissions import Permissions as Permissions
    from llama_index_agentic_kb.guard.permissions import acting_as as acting_as
    from llama_index_agentic_kb.guard.resilience import NO_RETRIES as NO_RETRIES
    from llama_index_agentic_kb.guard.resilience import BreakerPolicy as BreakerPolicy
    from llama_index_agentic_kb.guard.resilience import Resilience as Resilience
    from llama_index_agentic_kb.guard.resilience import RetryPolicy as RetryPolicy
    from llama_index_agentic_kb.index import AgenticVectorStoreIndex as AgenticVectorStoreIndex
    from llama_index_agentic_kb.knowledge_base import KnowledgeBase as KnowledgeBase
    from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible as OpenAICompatible
    from llama_index_agentic_kb.planning import DEFAULT_LIMITS as DEFAULT_LIMITS
    from llama_index_agentic_kb.planning import EffortLimits as EffortLimits
    from llama_index_agentic_kb.query_engine import AgenticQueryEngine as AgenticQueryEngine
    from llama_index_agentic_kb.query_engine import cited_nodes as cited_nodes
    from llama_index_agentic_kb.retriever import AgenticRetriever as AgenticRetriever
    from llama_index_agentic_kb.retriever import RetrieverOptions as RetrieverOptions
    from llama_index_agentic_kb.schema import DialogueStage as DialogueStage
    from llama_index_agentic_kb.schema import DialogueState as DialogueState
    from llama_index_agentic_kb.schema import Finding as Finding
    from llama_index_agentic_kb.schema import GroundingLedger as GroundingLedger
    from llama_index_agentic_kb.schema import OutputMode as OutputMode
    from llama_index_agentic_kb.schema import Principal as Principal
    from llama_index_agentic_kb.schema import QueryPlan as QueryPlan
    from llama_index_agentic_kb.schema import ReasoningEffort as ReasoningEffort
    from llama_index_agentic_kb.schema import ResultsProcessing as ResultsProcessing
    from llama_index_agentic_kb.schema import RetrievalRequest as RetrievalRequest
    from llama_index_agentic_kb.schema import RetrievalResponse as RetrievalResponse
    from llama_index_agentic_kb.schema import ScopeState as ScopeState
    from llama_index_agentic_kb.schema import SkippedReason as SkippedReason
    from llama_index_agentic_kb.schema import SourceParams as SourceParams
    from llama_index_agentic_kb.schema import parse_odata as parse_odata
    from llama_index_agentic_kb.schema.answer import Answer as Answer
    from llama_index_agentic_kb.schema.answer import AnswerQuery as AnswerQuery
    from llama_index_agentic_kb.schema.answer import AnswerResponse as AnswerResponse
    from llama_index_agentic_kb.schema.request import InputLimits as InputLimits
    from llama_index_agentic_kb.search.embedding import EmbeddingCache as EmbeddingCache
    from llama_index_agentic_kb.search.fusion import interleave as interleave
    from llama_index_agentic_kb.search.fusion import reciprocal_rank_fusion as reciprocal_rank_fusion
    from llama_index_agentic_kb.search.fusion import relative_score_fusion as relative_score_fusion
    from llama_index_agentic_kb.search.rerank import Calibration as Calibration
    from llama_index_agentic_kb.search.rerank import Reranker as Reranker
    from llama_index_agentic_kb.search.rerank import arank as arank
    from llama_index_agentic_kb.search.rerank import rank as rank
    from llama_index_agentic_kb.sources import Facet as Facet
    from llama_index_agentic_kb.sources import Fields as Fields
    from llama_index_agentic_kb.sources import FilterField as FilterField
    from llama_index_agentic_kb.sources import KnowledgeSource as KnowledgeSource
    from llama_index_agentic_kb.sources import ShardedSource as ShardedSource
    from llama_index_agentic_kb.sources import ToolSource as ToolSource
    from llama_index_agentic_kb.sources import WriteLedger as WriteLedger
    from llama_index_agentic_kb.sources import Writes as Writes
    from llama_index_agentic_kb.sources import mcp_sources as mcp_sources
    from llama_index_agentic_kb.store import KnowledgeStore as KnowledgeStore
    from llama_index_agentic_kb.store import default_embed_model as default_embed_model
    from llama_index_agentic_kb.store import ingest as ingest
    from llama_index_agentic_kb.store.sessions import SessionStore as SessionStore
    from llama_index_agentic_kb.synthesis import AgenticAsyncStreamingResponse as AgenticAsyncStreamingResponse
    from llama_index_agentic_kb.synthesis import AgenticResponse as AgenticResponse
    from llama_index_agentic_kb.synthesis import AgenticStreamingResponse as AgenticStreamingResponse
    from llama_index_agentic_kb.synthesizers import get_response_synthesizer as get_response_synthesizer

__version__ = "0.1.0"

# Each module's public names, as above.
_HOMES = """
account: ActivityCallbackHandler ActivityEndEvent ActivityStartEvent
answering.policy: AnswerPolicy
answering.sessions: SessionMemory session_owner
chat_engine: AgenticChatEngine
errors: AgenticKBError BulkheadFullError CircuitOpenError ConfigurationError DeadlineExceededError DeniedError
    InvalidRequestError LLMError NotFoundError RetrievalError SessionStoreError SourceUnavailableError
    StoreDamagedError StoreMismatchError SynthesisError
grounding.check: acheck_grounding check_grounding
grounding.scorers: CrossEncoderScorer LLMJudge LexicalScorer
grounding.settings: Grounding
guard.permissions: Permissions acting_as
guard.resilience: NO_RETRIES BreakerPolicy Resilience RetryPolicy
index: AgenticVectorStoreIndex
knowledge_base: KnowledgeBase
llm.openai_compatible: OpenAICompatible
planning: DEFAULT_LIMITS EffortLimits
query_engine: AgenticQueryEngine cited_nodes
retriever: AgenticRetriever RetrieverOptions
schema.answer: Answer AnswerQuery AnswerResponse
schema: DialogueStage DialogueState Finding GroundingLedger OutputMode Principal QueryPlan ReasoningEffort
    ResultsProcessing RetrievalRequest RetrievalResponse ScopeState SkippedReason SourceParams parse_odata
schema.request: InputLimits
search.embedding: EmbeddingCache
search.fusion: interleave reciprocal_rank_fusion relative_score_fusion
search.rerank: Calibration Reranker arank rank
sources: Facet Fields FilterField KnowledgeSource ShardedSource ToolSource WriteLedger Writes mcp_sources
store: KnowledgeStore default_embed_model ingest
store.sessions: SessionStore
synthesis: AgenticAsyncStreamingResponse AgenticResponse AgenticStreamingResponse
synthesizers: get_response_synthesizer
"""
_HOME_OF = {}
for _line in _HOMES.replace("\n    ", " ").split("\n"):
    _home, _, _names = _line.partition(":")
    _HOME_OF.update(dict.fromkeys(_names.split(), _home))

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 (a list of names, computed once)


def __getattr__(name: str) -> Any:
    """Import a public name's home when it is first asked for."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
