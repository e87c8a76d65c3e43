"""The response: an answer or extracted data, with references, activity records and missing parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.schema._model import Model, Shown
from llama_index_agentic_kb.schema.activity import AnyActivity, Outcome, QueryPlan
from llama_index_agentic_kb.schema.conversation import DialogueState, ScopeState
from llama_index_agentic_kb.schema.grounding import GroundingLedger
from llama_index_agentic_kb.schema.request import Message


class SkippedReason(StrEnum):
    """The reason why there is no answer."""

    ADVERSARIAL_QUERY_IGNORED = "adversarialQueryIgnored"
    NON_ANSWER_SEEKING_QUERY_IGNORED = "nonAnswerSeekingQueryIgnored"  # small talk
    OUT_OF_DOMAIN_QUERY_IGNORED = "outOfDomainQueryIgnored"  # nothing highly relevant was found
    POTENTIAL_POLICY_VIOLATION = "potentialPolicyViolation"
    NO_RELEVANT_CONTENT = "noRelevantContent"  # nothing was found, or no result is relevant
    JAIL_BREAKING_QUERY_IGNORED = "jailBreakingQueryIgnored"
    CUSTOMER_POLICY_VIOLATION = "customerPolicyViolation"
    NON_ANSWER_SEEKING_QUERY_IGNORED_V2 = "nonAnswerSeekingQueryIgnoredV2"  # no clear intent
    LOW_GROUNDED_ANSWER = "lowGroundedAnswer"
    USER_DEFINED_CLASSIFICATION_QUERY_IGNORED = "userDefinedClassificationQueryIgnored"
    UNHELPFUL_ANSWER = "unhelpfulAnswer"


class SourceData(Model):
    """The document of a reference, with the same field names for all kinds of sources."""

    doc_key: str
    title: str
    content: str
    url: str | None = None
    terms: str | None = None
    metadata: dict[str, object] = Field(default_factory=dict)


_OWN_FIELDS: Final[Mapping[str, tuple[str, str]]] = {
    "azureBlob": ("blobUrl", "url"),
    "file": ("docName", "title"),
    "indexedOneLake": ("docUrl", "url"),
    "indexedSharePoint": ("docUrl", "url"),
    "indexedSql": ("docUrl", "url"),
    "mcpServer": ("toolName", "knowledgeSourceName"),
    "remoteSharePoint": ("webUrl", "url"),
}
"""By source kind: the additional field of Azure's reference, and the ``Reference`` field with its value."""


class Reference(Model):
    """One passage used for the response. ``type`` is the source's kind; JSON includes that kind's additional field."""

    model_config = ConfigDict(extra="ignore")  # the kind's additional field is redundant

    type: str = "searchIndex"
    id: str  # the N of ``[ref_id:N]``: "0", "1", ... in order of the evidence
    activity_source: int = Field(ge=0)  # id of the activity record of the first search that found the passage
    knowledge_source_name: str
    doc_key: str
    title: str
    url: str | None = None
    citation_url: str | None = None
    node_id: str
    score: float | None = None  # source's own score; scales differ between sources
    reranker_score: float | None = None  # score of a calibrated reranker, 0 to 4; None without one
    source_data: SourceData | None = None

    @model_serializer(mode="wrap")
    def _with_own_field(self, serialize: SerializerFunctionWrapHandler) -> JsonObject:
        data: JsonObject = serialize(self)
        name, field = _OWN_FIELDS.get(self.type, ("", ""))
        return {**data, name: data[field]} if data.get(field) is not None else data


class Extract(Model):
    """One item of the extracted data."""

    model_config = ConfigDict(alias_generator=None, extra="ignore")

    ref_id: int = Field(ge=0)
    title: str
    terms: str | None = None
    content: str


class MissingPart(Model):
    """Something that a response lacks, such as the passages of a source that failed, with the reason."""

    what: str
    outcome: Outcome
    reason: str
    sub_query_id: str | None = None


class RetrievalResponse(Shown, Model):
    """The response of a knowledge base to one request."""

    status_code: int = 200  # the HTTP status: 200, or 206 if a part is missing
    response: list[Message] = Field(default_factory=list)
    activity: list[AnyActivity] | None = None
    references: list[Reference] = Field(default_factory=list)
    missing: list[MissingPart] = Field(default_factory=list)
    plan: QueryPlan | None = None
    grounding: GroundingLedger | None = None
    """The grounding ledger: each claim of the answer, or of the draft of a withheld answer, with its evidence. None if
    there was no answer to check."""
    dialogue: DialogueState | None = None
    """The state of the conversation after this turn, for the next request; None if no source is a tool."""
    scope_state: ScopeState | None = None
    """The documents that the conversation is about, for the next request; None if the request had no such state."""
    skipped_reasons: list[SkippedReason] = Field(default_factory=list)
    """The reasons why there is no answer or it was withheld; ``text`` then contains a notice instead."""

    @property
    def text(self) -> str:
        """The answer, or the extracted data as JSON text."""
        return "\n".join(message.text for message in self.response)

    @property
    def extracts(self) -> list[Extract]:
        """The extracted data; an empty list if the response is an answer."""
        try:
            items = json.loads(self.text)
        except json.JSONDecodeError:
            return []
        if not isinstance(items, list) or not all(isinstance(item, dict) and "ref_id" in item for item in items):
            return []
        return [Extract.model_validate(item) for item in items]

    def __str__(self) -> str:
        """Return the text of the response."""
        return self.text

    def _shown(self) -> JsonObject:
        return self.to_dict()
