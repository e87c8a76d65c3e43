"""The plan of a request and the account of it: one record a stage, in the terms of Azure's ``activity`` array."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.schema.grounding import UnitScore
from llama_index_agentic_kb.schema.odata import to_odata
from llama_index_agentic_kb.schema.request import EffortField

Count: TypeAlias = Annotated[int, Field(ge=0)]


class QueryClass(StrEnum):
    """The classes of a query."""

    ADVERSARIAL_QUERY = "adversarialQuery"
    NON_ANSWER_SEEKING_QUERY = "nonAnswerSeekingQuery"
    JAIL_BREAKING_QUERY = "jailBreakingQuery"
    NON_ANSWER_SEEKING_QUERY_V2 = "nonAnswerSeekingQueryV2"
    USER_DEFINED_CLASSIFICATION_QUERY = "userDefinedClassificationQuery"


class QueryClassification(Model):
    """Whether a query is of a class. Classes that were not judged are absent."""

    type: QueryClass
    positive: bool


# -- the plan ---------------------------------------------------------------------------------------------------------


class SubQueryOrigin(StrEnum):
    """Where a sub-query comes from."""

    QUESTION = "question"
    """The question itself; it is always searched."""
    INTENT = "intent"
    """An intent of the request."""
    PLANNER = "planner"
    """The language model."""
    REVISION = "revision"
    """The language model, after it had read what the plan found."""


class SubQuery(Model):
    """One query of a plan."""

    id: str
    query: str = Field(min_length=1)
    sources: list[str]
    """Names of the sources that it goes to, in declaration order."""
    depends_on: list[str] = Field(default_factory=list)
    """Ids of the sub-queries whose findings it builds on."""
    origin: SubQueryOrigin = SubQueryOrigin.PLANNER
    filters: dict[str, FilterNode] = Field(default_factory=dict)
    """The planner's filter, by the name of each source that declares its fields; it joins the effective filter."""
    finds: str | None = None
    """What its answer will be, in the question's own words: "the director of Titanic"."""
    template: str | None = None
    """The query as it was planned, ``#q1`` standing for what q1 finds; None where it depends on nothing."""
    part_of: str | None = None
    """The planned sub-query of which this is a branch, with one of several answers put in."""
    wave: int = Field(default=1, ge=1)
    """The round of searches that it belongs to."""


class Confidence(StrEnum):
    """How certain a finding is."""

    STATED = "stated"
    """A passage says it in so many words."""
    IMPLIED = "implied"
    """The passages tie it together and nothing in them contradicts it, or its passage words it otherwise."""
    PARTIAL = "partial"
    """It is only nearer to what was asked: the town, where the county was asked."""


class Finding(Model):
    """What a sub-query found, as the model read it in the passages."""

    sub_query_id: str
    value: str = Field(min_length=1)
    """The answer, qualified as a page's title would have it."""
    confidence: Confidence = Confidence.STATED
    node_id: str | None = None
    """The passage that it was read in; None where it is unknown."""
    title: str | None = None
    """The title of its document."""


class QueryPlan(Model):
    """All queries of a request, in the order in which their evidence is interleaved."""

    sub_queries: list[SubQuery]
    warnings: list[str] = Field(default_factory=list)
    """What was wrong with the model's plan, and what was done about it."""
    classifications: list[QueryClassification] | None = None
    """The classes that were asked for and judged. None, where it was not classified, never means harmless."""
    labels: list[str] = Field(default_factory=list)
    """Which of the user's own labels fit the question."""

    @property
    def sources(self) -> list[str]:
        """Every source that a sub-query goes to, once, in order of appearance."""
        return list(dict.fromkeys(name for sub_query in self.sub_queries for name in sub_query.sources))


# -- the account ------------------------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """How a search, or a stage, ended. "Empty" is never used for "failed"."""

    OK = "ok"
    EMPTY = "empty"
    TIMEOUT = "timeout"
    ERROR = "error"
    SKIPPED = "skipped"
    DENIED = "denied"

    @property
    def failed(self) -> bool:
        """Whether something is missing from the evidence because of it."""
        return self in (Outcome.TIMEOUT, Outcome.ERROR, Outcome.DENIED)


class ActivityError(Model):
    """What went wrong in a stage."""

    code: str
    message: str
    target: str | None = None
    """The source or model at fault."""
    stage: str | None = None
    """What it was doing: "preparation", "embedding" or "search" of a source; else the record's type."""


class ModelInfo(Model):
    """Which language model was called."""

    model_name: str


class ActivityRecord(Model):
    """What every record has."""

    id: Count
    type: str
    started_at: datetime | None = None
    completed_at: datetime | None = None
    elapsed_ms: Count | None = None
    outcome: Outcome | None = None
    error: ActivityError | None = None
    warning: str | None = None


class ModelQueryPlanningActivity(ActivityRecord):
    """A call of the language model that decides what is searched."""

    type: Literal["modelQueryPlanning"] = "modelQueryPlanning"
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    model: ModelInfo | None = None
    purpose: Literal["plan", "findings", "revision"] = "plan"
    """Whether it planned, read what a round of searches had found, or looked for gaps at the end."""
    sub_queries: list[str] | None = None
    """The plan's queries, the original question included; a revision's new ones."""
    classifications: list[QueryClassification] | None = None
    """The classes of the question, as far as it was judged; None where it was not classified."""
    labels: list[str] | None = None
    """The user's own labels that fit the question, where any does."""


class SearchArguments(Model):
    """What a source was asked. On the wire ``filter`` is OData text, as Azure has it, and ``filterTree`` the tree."""

    model_config = ConfigDict(extra="ignore")  # where there is a tree, the text says nothing more

    search: str
    filter: FilterNode | str | None = Field(default=None, validation_alias=AliasChoices("filterTree", "filter"))
    """The effective filter: mandatory AND caller AND planner. Text only where it was loaded without its tree."""

    @model_serializer(mode="wrap")
    def _filter_as_text(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        if self.filter is not None and not isinstance(self.filter, str):
            data["filterTree"] = data["filter"]
            data["filter"] = to_odata(self.filter)
        return data


class SearchLane(Model):
    """One way in which a search asked its source."""

    kind: str
    """"dense", "lexical", "hybrid" (the store's own), or "retriever"."""
    count: Count
    """Documents that passed every check."""
    candidates: Count
    """Documents that came back."""
    elapsed_ms: Count | None = None
    error: ActivityError | None = None
    note: str | None = None


class SourceActivity(ActivityRecord):
    """One search: a sub-query at a source. On the wire its arguments are named for its type, the source's kind."""

    type: str = "searchIndex"
    knowledge_source_name: str
    sub_query_id: str
    query_time: datetime | None = None
    count: Count | None = None
    """Documents that passed every check."""
    candidates: Count | None = None
    """Documents that the source returned."""
    dropped_by_filter: Count | None = None
    """Documents that the source returned against its filter, dropped here."""
    dropped_as_unusable: Count | None = None
    """Results of the source that are no usable nodes; the lanes' notes say why."""
    dropped_by_threshold: Count | None = None
    """Documents below the reranker's threshold for every sub-query that found them; not counted in ``count``."""
    retries: int | None = Field(default=None, ge=1)
    """Repeated calls after failures; None without any."""
    lanes: list[SearchLane] | None = None
    """The ways in which the source was asked side by side."""
    arguments: SearchArguments | None = None

    @model_serializer(mode="wrap")
    def _named_arguments(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialize(self)
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
    """What an effort may spend, or has spent."""

    sub_queries: Count
    """Distinct queries that were searched, the question's own not counted."""
    sources: Count
    """Sources that one sub-query went to."""
    waves: Count
    revisions: Count
    tokens: Count
    """Tokens that the planning model read and wrote, as far as it reports them."""
    seconds: float = Field(ge=0)
    documents_ranked: Count


class AgenticReasoningActivity(ActivityRecord):
    """What the agent was asked for, what it did, and what happened to the candidates."""

    type: Literal["agenticReasoning"] = "agenticReasoning"
    reasoning_tokens: Count | None = None
    """Tokens that language models read and wrote to find and rank the evidence, without planning."""
    retrieval_reasoning_effort: EffortField | None = None
    """The effort that was spent."""
    logical_reasoning_effort: EffortField | None = None
    """The effort that was asked for."""
    candidates: Count | None = None
    kept: Count | None = None
    merged: Count | None = None
    """Candidates that several searches found: times found, less one each."""
    joined: Count | None = None
    """Candidates that became part of a neighbouring chunk's reference."""
    reranked: Count | None = None
    """Pairs of a sub-query and a candidate that the reranker read."""
    dropped_by_threshold: Count | None = None
    """Candidates below the reranker's threshold."""
    dropped_by_budget: Count | None = None
    """Candidates beyond the number of documents, or the number that is ranked."""
    dropped_by_postprocessors: Count | None = None
    """Candidates that node postprocessors dropped, or the reranker left out."""
    dropped_by_cap: Count | None = None
    """Candidates beyond their source's ``maxOutputDocuments``."""
    added_by_postprocessors: Count | None = None
    """Nodes that node postprocessors added."""
    planned: EffortUse | None = None
    """The limits of the effort."""
    spent: EffortUse | None = None
    findings: list[Finding] | None = None
    """What sub-queries found on the way, each with the passage that says it."""
    signals: dict[str, float] | None = None
    """How strong the question's own evidence was (0 to 1), where it decided about planning."""
    decision: str | None = None
    """Why it planned or did not, and why it stopped."""


class ModelAnswerSynthesisActivity(ActivityRecord):
    """The calls that wrote the answer, and those that checked and repaired it."""

    type: Literal["modelAnswerSynthesis"] = "modelAnswerSynthesis"
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    model: ModelInfo | None = None
    calls: Count | None = None
    response_mode: str | None = None
    dropped_by_budget: Count | None = None
    """Passages that did not fit the budget, or the model."""
    links_removed: Count | None = None
    """Links of the model's replies that led to no reference, and were taken out."""
    grounding_score: UnitScore | None = None
    """The mean score of the answer's claims; None where none was checked."""
    claims: Count | None = None
    """Claims of the answer that were checked against the evidence."""
    supported_claims: Count | None = None
    """Those of them that it supports."""


AnyActivity: TypeAlias = Annotated[
    ModelQueryPlanningActivity | AgenticReasoningActivity | ModelAnswerSynthesisActivity | SourceActivity,
    Field(union_mode="left_to_right"),
]
"""Any record. A ``type`` that is not the model's or the agent's is a source's kind."""
