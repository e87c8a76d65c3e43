"""Encoder for responses of Azure AI Search's ``retrieve`` action, by API version.

The newest version has the JSON form of ``schema.RetrievalResponse``. In an older one, activity records and references
have the names and fields of that version, and a ``warning``, which only the newest defines. The fields that this
library adds to the response itself (``statusCode``, ``missing``, ...) are in all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from llama_index_agentic_kb.schema.response import RetrievalResponse
from llama_index_agentic_kb.wire.azure_request import VERSIONS, known_version

_Fields = dict[str, Any]

_RECORD: Final = (
    "type",
    "id",
    "knowledgeSourceName",
    "inputTokens",
    "outputTokens",
    "reasoningTokens",
    "retrievalReasoningEffort",
    "queryTime",
    "count",
    "elapsedMs",
    "error",
    "warning",
)
_REFERENCE: Final = (
    "type",
    "id",
    "activitySource",
    "docKey",
    "blobUrl",
    "docUrl",
    "webUrl",
    "rerankerScore",
    "sourceData",
)
_WEB: Final = ("type", "id", "activitySource", "url", "title", "rerankerScore", "sourceData")
_OLD_TYPES: Final = {"modelQueryPlanning": "ModelQueryPlanning", "agenticReasoning": "AzureSearchSemanticRanker"}
"""The types of 2025-05-01-preview, whose searches are all of the type ``AzureSearchQuery``."""


def encode_response(response: RetrievalResponse, *, api_version: str = "") -> _Fields:
    """Return a response as JSON data.

    Args:
        response: The response.
        api_version: The query parameter ``api-version`` of the request; empty means the newest version.

    Raises:
        InvalidRequestError: The version is unknown.
    """
    version, data = known_version(api_version), json.loads(response.to_json())
    if version == VERSIONS[-1]:
        return dict(data)
    record, reference = (_old_record, _old_reference) if version == VERSIONS[0] else (_record, _reference)
    if "activity" in data:
        data["activity"] = [record(one) for one in data["activity"]]
    return {**data, "references": [reference(one) for one in data["references"]]}


def _record(data: Mapping[str, Any]) -> _Fields:
    made = _only(data, _RECORD)
    name = f"{data['type']}Arguments"
    return made | ({name: _only(data[name], ("search", "filter"))} if name in data else {})


def _reference(data: Mapping[str, Any]) -> _Fields:
    return _only(data, _WEB if data["type"] == "web" else _REFERENCE)


def _old_record(data: Mapping[str, Any]) -> _Fields:
    made = _record(data)
    kind, query = str(data["type"]), made.pop(f"{data['type']}Arguments", None)
    made["type"] = _OLD_TYPES.get(kind, "AzureSearchQuery" if "knowledgeSourceName" in made else kind)
    if "knowledgeSourceName" in made:
        made |= {"targetIndex": made.pop("knowledgeSourceName"), "query": query or {}}
    if kind == "agenticReasoning":
        made |= {"inputTokens": made.pop("reasoningTokens", 0)}
        made.pop("retrievalReasoningEffort", None)
    return made


def _old_reference(data: Mapping[str, Any]) -> _Fields:
    names = ("id", "activitySource", "docKey", "rerankerScore", "sourceData")
    return {"type": "AzureSearchDoc", **_only(data, names)}


def _only(data: Mapping[str, Any], names: tuple[str, ...]) -> _Fields:
    return {name: data[name] for name in names if name in data}
