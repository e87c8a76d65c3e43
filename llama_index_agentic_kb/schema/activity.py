"""The query plan of a request and its activity log: one record per stage, as in Azure's ``activity`` array."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from pydantic import AliasChoices, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.conversation import TurnScope
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.schema.grounding import UnitScore
from llama_index_agentic_kb.schema.odata import to_odata
from llama_index_agentic_kb.schema.request import EffortField

Count: TypeAlias = Annotated[int, Field(ge=0)]


class QueryClass(StrEnum):
    """Classes of a query, by which an ``AnswerPolicy`` may withhold its answer; names are Google's."""

    ADVERSARIAL_QUERY = "adversarialQuery"
    NON_ANSWER_SEEKING_QUERY = "nonAnswerSeekingQuery"
    JAIL_BREAKING_QUERY = "jailBreakingQuery"
    NON_ANSWER_SEEKING_QUERY_V2 = "nonAnswerSeekingQueryV2"
    USER_DEFINED_CLASSIFICATION_QUERY = "userDefinedClassificationQuery"


class QueryClassification(Model):
    """Whether a query belongs to a class. Classes that were not checked have no entry."""

    type: QueryClass
    positive: bool


class SubQueryOrigin(StrEnum):
    """What a sub-query was made from."""

    QUESTION = "question"  # the question itself; it is always searched
    INTENT = "intent"
    PLANNER = "planner"
    REVISION = "revision"  # made by the language model after it has read the results of the plan
    TOOL = "tool"  # a call of a tool: the query is the JSON text of its arguments


class SubQuery(Model):
    """One query of a plan."""

    id: str
    query: str = Field(min_length=1)
    sources: list[str]  # names of the sources to search, in declaration order
    depends_on: list[str] = Field(default_factory=list)  # ids of the sub-queries whose findings are inserted
    origin: SubQueryOrigin = SubQueryOrigin.PLANNER
    filters: dict[str, FilterNode] = Field(default_factory=dict)
    """The planner's filters, by source name; each is combined (AND) with the source's other filters."""
    finds: str | None = None  # a description of the answer in the question's words, such as "the director of Titanic"
    template: str | None = None  # planned query with ``#q1`` for q1's finding; None without dependencies
    part_of: str | None = None  # id of the planned sub-query, if this is one of its branches (one branch per finding)
    wave: int = Field(default=1, ge=1)


class Confidence(StrEnum):
    """The certainty of a finding."""

    STATED = "stated"
    IMPLIED = "implied"  # it follows from several passages without contradiction, or from a passage in other words
    PARTIAL = "partial"  # it answers only a part of the sub-query, such as the town if the county was asked for


class Finding(Model):
    """An answer to a sub-query, extracted from the passages by the language model."""

    sub_query_id: str
    value: str = Field(min_length=1)  # answer, qualified as in a page title ("Paris, Texas")
    confidence: Confidence = Confidence.STATED
    node_id: str | None = None  # node id of the passage that states the answer; None if unknown
    title: str | None = None


class QueryPlan(Model):
    """All queries of a request, in the order in which their results are interleaved."""

    sub_queries: list[SubQuery]
    warnings: list[str] = Field(default_factory=list)  # errors in the model's plan, and how each was handled
    classifications: list[QueryClassification] | None = None  # None: not classified, which does not mean harmless
    labels: list[str] = Field(default_factory=list)


# -- the activity log -------------------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """The outcome of a search or a stage. A failure is never reported as "empty"."""

    OK = "ok"
    EMPTY = "empty"
    TIMEOUT = "timeout"
    ERROR = "error"
    SKIPPED = "skipped"
    DENIED = "denied"

    @property
    def failed(self) -> bool:
        """Whether evidence is missing because of this outcome."""
        return self in (Outcome.TIMEOUT, Outcome.ERROR, Outcome.DENIED)


class ActivityError(Model):
    """The error of a failed stage, as part of its activity record."""

    code: str
    message: str
    target: str | None = None
    stage: str | None = None  # failed step of a source ("preparation", "embedding" or "search"); else the record's type


class ModelInfo(Model):
    """The language model of a call."""

    model_name: str


class ActivityRecord(Model):
    """The fields that all activity records share."""

    id: Count
    type: str
    started_at: datetime | None = None
    completed_at: datetime | None = None
    elapsed_ms: Count | None = None
    outcome: Outcome | None = None
    error: ActivityError | None = None
    warning: str | None = None


class ModelQueryPlanningActivity(ActivityRecord):
    """A language model call for query planning."""

    type: Literal["modelQueryPlanning"] = "modelQueryPlanning"
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    model: ModelInfo | None = None
    purpose: Literal["plan", "findings", "revision", "tool"] = "plan"  # what the model was asked for
    sub_queries: list[str] | None = None  # with the original question; for a revision, the new ones
    classifications: list[QueryClassification] | None = None  # None: not classified, which does not mean harmless
    labels: list[str] | None = None  # user-defined labels that apply to the question; None if there are none


class SearchArguments(Model):
    """The query and filter sent to a source. JSON has a filter tree as ``filterTree`` and as OData ``filter``."""

    model_config = ConfigDict(extra="ignore")  # ``filter`` is redundant if ``filterTree`` is present

    search: str
    filter: FilterNode | str | None = Field(default=None, validation_alias=AliasChoices("filterTree", "filter"))
    """The effective filter: mandatory AND caller AND planner. OData text if it was loaded without its tree."""

    @model_serializer(mode="wrap")
    def _filter_as_text(self, serialize: SerializerFunctionWrapHandler) -> JsonObject:
        data: JsonObject = serialize(self)
        if self.filter is not None and not isinstance(self.filter, str):
            data["filterTree"] = data["filter"]
            data["filter"] = to_odata(self.filter)
        return data


class SearchLane(Model):
    """One retrieval method of a search, such as dense or lexical."""

    kind: str  # "dense", "lexical", "hybrid" (the store's own), or "retriever"
    count: Count  # number of documents that passed all checks
    candidates: Count
    elapsed_ms: Count | None = None
    error: ActivityError | None = None
    note: str | None = None
    shard: str | None = None  # name of the searched shard, if the source has several


class SourceActivity(ActivityRecord):
    """One search of a sub-query in one source. In JSON the key of its arguments is ``<type>Arguments``."""

    type: str = "searchIndex"
    knowledge_source_name: str
    sub_query_id: str
    query_time: datetime | None = None
    count: Count | None = None  # number of documents that passed all checks
    candidates: Count | None = None
    dropped_by_filter: Count | None = None  # number of returned documents that did not match the filter
    dropped_as_unusable: Count | None = None  # results that are not valid nodes; the notes in ``lanes`` say why
    dropped_by_threshold: Count | None = None  # below the reranker's threshold for every sub-query that found them
    retries: int | None = Field(default=None, ge=1)  # number of retries after failures; None if there were none
    lanes: list[SearchLane] | None = None
    arguments: SearchArguments | None = None

    @model_serializer(mode="wrap")
    def _named_arguments(self, serialize: SerializerFunctionWrapHandler) -> JsonObject:
        data: JsonObject = serialize(self)
        if "arguments" in data:
            data[f"{self.type}Arguments"] = data.pop("arguments")
        return data

    @model_validator(mode="before")
    @classmethod
    def _unnamed_arguments(cls, data: object) -> object:
        if isinstance(data, dict) and (name := f"{data.get('type', 'searchIndex')}Arguments") in data:
            return {**{key: value for key, value in data.items() if key != name}, "arguments": data[name]}
        return data


class EffortUse(Model):
    """The limits of a reasoning effort, or the amounts used."""

    sub_queries: Count  # distinct queries searched, excluding the question itself
    sources: Count  # largest number of sources searched for one sub-query
    waves: Count
    revisions: Count
    tokens: Count  # input and output tokens of the planning model, if it reports them
    seconds: float = Field(ge=0)
    documents_ranked: Count


class AgenticReasoningActivity(ActivityRecord):
    """The requested and applied reasoning effort, and the number of candidates after each step."""

    type: Literal["agenticReasoning"] = "agenticReasoning"
    reasoning_tokens: Count | None = None  # of language models that find and rank evidence, excluding planning
    retrieval_reasoning_effort: EffortField | None = None  # effort applied: ``minimal`` if the request was not planned
    logical_reasoning_effort: EffortField | None = None
    candidates: Count | None = None
    kept: Count | None = None
    merged: Count | None = None  # duplicate candidates: a candidate found by n searches counts n - 1
    joined: Count | None = None
    reranked: Count | None = None  # pairs of a sub-query and a candidate scored by the reranker
    dropped_by_threshold: Count | None = None
    dropped_by_budget: Count | None = None  # beyond the limit to return or to rank, or outside the conversation's scope
    dropped_by_postprocessors: Count | None = None  # by node postprocessors, or missing from the reranker's result
    dropped_by_cap: Count | None = None
    added_by_postprocessors: Count | None = None
    planned: EffortUse | None = None
    spent: EffortUse | None = None
    findings: list[Finding] | None = None
    signals: dict[str, float] | None = None  # strength of the evidence (0 to 1), if it decided about planning
    decision: str | None = None  # reason for planning or not, and the reason for stopping
    conversation: TurnScope | None = None  # how earlier messages changed the search; None without any


Purpose: TypeAlias = Literal["answer", "check", "repair", "relatedQuestions"]


class ModelAnswerSynthesisActivity(ActivityRecord):
    """The model calls for an answer: those that write it, check its claims, repair it, or propose related questions."""

    type: Literal["modelAnswerSynthesis"] = "modelAnswerSynthesis"
    purpose: Purpose = "answer"
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    model: ModelInfo | None = None
    calls: Count | None = None
    response_mode: str | None = None
    dropped_by_budget: Count | None = None  # passages left out because of the token budget or the model's context size
    links_removed: Count | None = None  # links removed from the model's replies because they point to no reference
    grounding_score: UnitScore | None = None  # mean score of the answer's claims; None if no claim was checked
    claims: Count | None = None
    supported_claims: Count | None = None


AnyActivity: TypeAlias = Annotated[
    ModelQueryPlanningActivity | AgenticReasoningActivity | ModelAnswerSynthesisActivity | SourceActivity,
    Field(union_mode="left_to_right"),
]
"""Any activity record. A ``type`` other than those of the first three classes is the kind of a source."""
