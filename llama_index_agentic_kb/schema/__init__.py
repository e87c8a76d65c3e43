"""What goes in, what comes out, and what is said about it: pydantic models in the terms of agentic retrieval.

The names and shapes follow Azure AI Search's ``retrieve`` action (REST, camelCase on the wire, snake_case in
Python); ranges are ours: any sensible positive value. A contract's own ranges live in its codec under ``wire``.
"""

from llama_index_agentic_kb.schema.activity import (
    ActivityError,
    ActivityRecord,
    AgenticReasoningActivity,
    AnyActivity,
    EffortUse,
    ModelAnswerSynthesisActivity,
    ModelInfo,
    ModelQueryPlanningActivity,
    Outcome,
    SearchArguments,
    SearchLane,
    SourceActivity,
)
from llama_index_agentic_kb.schema.filters import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    FilterOperator,
    all_of,
    any_of,
    matcher,
    matches,
)
from llama_index_agentic_kb.schema.odata import parse_odata, to_odata
from llama_index_agentic_kb.schema.plan import Confidence, Finding, QueryPlan, SubQuery, SubQueryOrigin
from llama_index_agentic_kb.schema.principal import Principal
from llama_index_agentic_kb.schema.request import (
    ImageContent,
    Intent,
    Message,
    OutputMode,
    ReasoningEffort,
    ResultsProcessing,
    RetrievalRequest,
    SourceParams,
    TextContent,
)
from llama_index_agentic_kb.schema.response import Extract, MissingPart, Reference, RetrievalResponse, SourceData

__all__ = [
    "ActivityError",
    "ActivityRecord",
    "AgenticReasoningActivity",
    "AnyActivity",
    "Condition",
    "Confidence",
    "EffortUse",
    "Extract",
    "FilterGroup",
    "FilterLogic",
    "FilterNode",
    "FilterOperator",
    "Finding",
    "ImageContent",
    "Intent",
    "Message",
    "MissingPart",
    "ModelAnswerSynthesisActivity",
    "ModelInfo",
    "ModelQueryPlanningActivity",
    "Outcome",
    "OutputMode",
    "Principal",
    "QueryPlan",
    "ReasoningEffort",
    "Reference",
    "ResultsProcessing",
    "RetrievalRequest",
    "RetrievalResponse",
    "SearchArguments",
    "SearchLane",
    "SourceActivity",
    "SourceData",
    "SourceParams",
    "SubQuery",
    "SubQueryOrigin",
    "TextContent",
    "all_of",
    "any_of",
    "matcher",
    "matches",
    "parse_odata",
    "to_odata",
]
