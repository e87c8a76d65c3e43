"""Pydantic models of requests, responses, plans and activity records of agentic retrieval.

The names and shapes follow Azure AI Search's ``retrieve`` action (camelCase in JSON, snake_case in Python). Numeric
ranges are wider than Azure's: any sensible positive value. The ranges of each HTTP API are checked by its codec under
``wire``. Import ``Answer`` and ``AnswerQuery`` from the module ``answer``.
"""

from llama_index_agentic_kb.schema.activity import ActivityError as ActivityError
from llama_index_agentic_kb.schema.activity import ActivityRecord as ActivityRecord
from llama_index_agentic_kb.schema.activity import AgenticReasoningActivity as AgenticReasoningActivity
from llama_index_agentic_kb.schema.activity import Confidence as Confidence
from llama_index_agentic_kb.schema.activity import EffortUse as EffortUse
from llama_index_agentic_kb.schema.activity import Finding as Finding
from llama_index_agentic_kb.schema.activity import ModelAnswerSynthesisActivity as ModelAnswerSynthesisActivity
from llama_index_agentic_kb.schema.activity import ModelInfo as ModelInfo
from llama_index_agentic_kb.schema.activity import ModelQueryPlanningActivity as ModelQueryPlanningActivity
from llama_index_agentic_kb.schema.activity import Outcome as Outcome
from llama_index_agentic_kb.schema.activity import QueryClass as QueryClass
from llama_index_agentic_kb.schema.activity import QueryClassification as QueryClassification
from llama_index_agentic_kb.schema.activity import QueryPlan as QueryPlan
from llama_index_agentic_kb.schema.activity import SearchArguments as SearchArguments
from llama_index_agentic_kb.schema.activity import SearchLane as SearchLane
from llama_index_agentic_kb.schema.activity import SourceActivity as SourceActivity
from llama_index_agentic_kb.schema.activity import SubQuery as SubQuery
from llama_index_agentic_kb.schema.activity import SubQueryOrigin as SubQueryOrigin
from llama_index_agentic_kb.schema.conversation import DialogueStage as DialogueStage
from llama_index_agentic_kb.schema.conversation import DialogueState as DialogueState
from llama_index_agentic_kb.schema.conversation import PendingWrite as PendingWrite
from llama_index_agentic_kb.schema.conversation import ScopedDocument as ScopedDocument
from llama_index_agentic_kb.schema.conversation import ScopeReason as ScopeReason
from llama_index_agentic_kb.schema.conversation import ScopeState as ScopeState
from llama_index_agentic_kb.schema.conversation import Topic as Topic
from llama_index_agentic_kb.schema.conversation import TopicShift as TopicShift
from llama_index_agentic_kb.schema.conversation import TurnScope as TurnScope
from llama_index_agentic_kb.schema.filters import Condition as Condition
from llama_index_agentic_kb.schema.filters import FilterGroup as FilterGroup
from llama_index_agentic_kb.schema.filters import FilterLogic as FilterLogic
from llama_index_agentic_kb.schema.filters import FilterNode as FilterNode
from llama_index_agentic_kb.schema.filters import FilterOperator as FilterOperator
from llama_index_agentic_kb.schema.filters import all_of as all_of
from llama_index_agentic_kb.schema.filters import any_of as any_of
from llama_index_agentic_kb.schema.filters import matcher as matcher
from llama_index_agentic_kb.schema.filters import matches as matches
from llama_index_agentic_kb.schema.filters import value_key as value_key
from llama_index_agentic_kb.schema.grounding import GroundingLedger as GroundingLedger
from llama_index_agentic_kb.schema.odata import parse_odata as parse_odata
from llama_index_agentic_kb.schema.odata import to_odata as to_odata
from llama_index_agentic_kb.schema.request import ImageContent as ImageContent
from llama_index_agentic_kb.schema.request import Intent as Intent
from llama_index_agentic_kb.schema.request import Message as Message
from llama_index_agentic_kb.schema.request import OutputMode as OutputMode
from llama_index_agentic_kb.schema.request import Principal as Principal
from llama_index_agentic_kb.schema.request import ReasoningEffort as ReasoningEffort
from llama_index_agentic_kb.schema.request import ResultsProcessing as ResultsProcessing
from llama_index_agentic_kb.schema.request import RetrievalRequest as RetrievalRequest
from llama_index_agentic_kb.schema.request import SourceParams as SourceParams
from llama_index_agentic_kb.schema.response import MissingPart as MissingPart
from llama_index_agentic_kb.schema.response import Reference as Reference
from llama_index_agentic_kb.schema.response import RetrievalResponse as RetrievalResponse
from llama_index_agentic_kb.schema.response import SkippedReason as SkippedReason
from llama_index_agentic_kb.schema.response import SourceData as SourceData
