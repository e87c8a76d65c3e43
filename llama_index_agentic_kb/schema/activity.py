"""The account of a request: one record a stage, in the terms of Azure's ``activity`` array."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, SerializerFunctionWrapHandler, Tag, model_serializer, model_validator

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.answer import QueryClassification
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.schema.odata import to_odata
from llama_index_agentic_kb.schema.plan import Finding
from llama_index_agentic_kb.schema.request import EffortField

__all__ = [
    "ActivityError",
    "ActivityRecord",
    "AgenticReasoningActivity",
    "AnyActivity",
    "EffortUse",
    "ModelAnswerSynthesisActivity",
    "ModelInfo",
    "ModelQueryPlanningActivity",
    "Outcome",
    "SearchArguments",
    "SearchLane",
    "SourceActivity",
]


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

    id: int = Field(ge=0)
    type: str
    started_at: datetime | None = None
    completed_at: datetime | None = None
    elapsed_ms: int | None = Field(default=None, ge=0)
    outcome: Outcome | None = None
    error: ActivityError | None = None
    warning: str | None = None


class ModelQueryPlanningActivity(ActivityRecord):
    """A call of the language model that decides what is searched."""

    type: Literal["modelQueryPlanning"] = "modelQueryPlanning"
    input_tokens: int | None = Field(default=None, ge=0)
    output_tokens: int | None = Field(default=None, ge=0)
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
    """What a source was asked."""

    search: str
    filter: FilterNode | str | None = None
    """The effective filter: mandatory AND caller AND planner. Text only where it was loaded without its tree."""

    @model_serializer(mode="wrap")
    def _filter_as_text(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """On the wire ``filter`` is OData text, as in Azure's; ``filterTree`` is the tree."""
        data: dict[str, Any] = serialize(self)
        if self.filter is not None and not isinstance(self.filter, str):
            data["filterTree"] = data["filter"]
            data["filter"] = to_odata(self.filter)
        return data

    @model_validator(mode="before")
    @classmethod
    def _filter_from_tree(cls, data: Any) -> Any:
        if isinstance(data, dict) and "filterTree" in data:
            return {**{key: value for key, value in data.items() if key != "filterTree"}, "filter": data["filterTree"]}
        return data


class SearchLane(Model):
    """One way in which a search asked its source."""

    kind: str
    """"dense", "lexical", "hybrid" (the store's own), or "retriever"."""
    count: int = Field(ge=0)
    """Documents that passed every check."""
    candidates: int = Field(ge=0)
    """Documents that came back."""
    elapsed_ms: int | None = Field(default=None, ge=0)
    error: ActivityError | None = None
    note: str | None = None


class SourceActivity(ActivityRecord):
    """One search: a sub-query at a source. Its ``type`` is the source's kind."""

    type: str = "searchIndex"
    knowledge_source_name: str
    sub_query_id: str
    query_time: datetime | None = None
    count: int | None = Field(default=None, ge=0)
    """Documents that passed every check."""
    candidates: int | None = Field(default=None, ge=0)
    """Documents that the source returned."""
    dropped_by_filter: int | None = Field(default=None, ge=0)
    """Documents that the source returned against its filter, dropped here."""
    dropped_as_unusable: int | None = Field(default=None, ge=0)
    """Results of the source that are no usable nodes; the lanes' notes say why."""
    dropped_by_threshold: int | None = Field(default=None, ge=0)
    """Documents below the reranker's threshold for every sub-query that found them; not counted in ``count``."""
    retries: int | None = Field(default=None, ge=1)
    """Repeated calls after failures; None without any."""
    lanes: list[SearchLane] | None = None
    """The ways in which the source was asked side by side."""
    arguments: SearchArguments | None = None

    @model_serializer(mode="wrap")
    def _named_arguments(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """On the wire the arguments are named after the kind: ``searchIndexArguments``."""
        data: dict[str, Any] = serialize(self)
        if "arguments" in data:
            data[f"{self.type}Arguments"] = data.pop("arguments")
        return data

    @model_validator(mode="before")
    @classmethod
    def _unnamed_arguments(cls, data: Any) -> Any:
        if isinstance(data, dict) and (name := f"{data.get('type', 'searchIndex')}Arguments") in data:
            return {**{key: value for key, value in data.items() if key != name}, "arguments": data[name]}
        return data


class EffortUse(Model):
    """What an effort may spend, or has spent."""

    sub_queries: int = Field(ge=0)
    """Distinct queries that were searched, the question's own not counted."""
    sources: int = Field(ge=0)
    """Sources that one sub-query went to."""
    waves: int = Field(ge=0)
    revisions: int = Field(ge=0)
    tokens: int = Field(ge=0)
    """Tokens that the planning model read and wrote, as far as it reports them."""
    seconds: float = Field(ge=0)
    documents_ranked: int = Field(ge=0)


class AgenticReasoningActivity(ActivityRecord):
    """What the agent was asked for, what it did, and what happened to the candidates."""

    type: Literal["agenticReasoning"] = "agenticReasoning"
    reasoning_tokens: int | None = Field(default=None, ge=0)
    """Tokens that language models read and wrote to find and rank the evidence, without planning."""
    retrieval_reasoning_effort: EffortField | None = None
    """The effort that was spent."""
    logical_reasoning_effort: EffortField | None = None
    """The effort that was asked for."""
    candidates: int | None = Field(default=None, ge=0)
    kept: int | None = Field(default=None, ge=0)
    merged: int | None = Field(default=None, ge=0)
    """Candidates that several searches found: times found, less one each."""
    joined: int | None = Field(default=None, ge=0)
    """Candidates that became part of a neighbouring chunk's reference."""
    reranked: int | None = Field(default=None, ge=0)
    """Pairs of a sub-query and a candidate that the reranker read."""
    dropped_by_threshold: int | None = Field(default=None, ge=0)
    """Candidates below the reranker's threshold."""
    dropped_by_budget: int | None = Field(default=None, ge=0)
    """Candidates beyond the number of documents, or the number that is ranked."""
    dropped_by_postprocessors: int | None = Field(default=None, ge=0)
    """Candidates that node postprocessors dropped, or the reranker left out."""
    dropped_by_cap: int | None = Field(default=None, ge=0)
    """Candidates beyond their source's ``maxOutputDocuments``."""
    added_by_postprocessors: int | None = Field(default=None, ge=0)
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
    input_tokens: int | None = Field(default=None, ge=0)
    output_tokens: int | None = Field(default=None, ge=0)
    model: ModelInfo | None = None
    calls: int | None = Field(default=None, ge=0)
    response_mode: str | None = None
    dropped_by_budget: int | None = Field(default=None, ge=0)
    """Passages that did not fit the budget, or the model."""
    links_removed: int | None = Field(default=None, ge=0)
    """Links of the model's replies that led to no reference, and were taken out."""
    grounding_score: float | None = Field(default=None, ge=0, le=1)
    """The mean score of the answer's claims; None where none was checked."""
    claims: int | None = Field(default=None, ge=0)
    """Claims of the answer that were checked against the evidence."""
    supported_claims: int | None = Field(default=None, ge=0)
    """Those of them that it supports."""


def _activity_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("modelQueryPlanning", "agenticReasoning", "modelAnswerSynthesis") else "source"


AnyActivity: TypeAlias = Annotated[
    Annotated[ModelQueryPlanningActivity, Tag("modelQueryPlanning")]
    | Annotated[SourceActivity, Tag("source")]
    | Annotated[AgenticReasoningActivity, Tag("agenticReasoning")]
    | Annotated[ModelAnswerSynthesisActivity, Tag("modelAnswerSynthesis")],
    Discriminator(_activity_tag),
]
"""Any record. A ``type`` that is not the model's or the agent's is a source's kind."""
