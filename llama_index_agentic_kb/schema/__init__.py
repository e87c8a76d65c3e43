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
from llama_index_agentic_kb.schema.answer import Answer, QueryClass, SkippedReason
from llama_index_agentic_kb.schema.answer_query import (
    AnswerPiece,
    AnswerQuery,
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
from llama_index_agentic_kb.schema.grounding import ClaimFlag, GroundedClaim, GroundingLedger, Verdict
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
from llama_index_agentic_kb.schema.response import (
    AnswerResponse,
    Extract,
    MissingPart,
    Reference,
    RetrievalResponse,
    SourceData,
)
from llama_index_agentic_kb.schema.sessions import Session, Turn

__all__ = [
    "ActivityError",
    "ActivityRecord",
    "AgenticReasoningActivity",
    "Answer",
    "AnswerPiece",
    "AnswerQuery",
    "AnswerResponse",
    "AnyActivity",
    "ClaimFlag",
    "Condition",
    "Confidence",
    "EffortUse",
    "Extract",
    "FilterGroup",
    "FilterLogic",
    "FilterNode",
    "FilterOperator",
    "Finding",
    "GroundedClaim",
    "GroundingLedger",
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
    "QueryClass",
    "QueryPlan",
    "ReasoningEffort",
    "Reference",
    "ResultsProcessing",
    "RetrievalRequest",
    "RetrievalResponse",
    "SearchArguments",
    "SearchLane",
    "Session",
    "SkippedReason",
    "SourceActivity",
    "SourceData",
    "SourceParams",
    "SubQuery",
    "SubQueryOrigin",
    "TextContent",
    "Turn",
    "Verdict",
    "all_of",
    "any_of",
    "matcher",
    "matches",
    "parse_odata",
    "to_odata",
]
