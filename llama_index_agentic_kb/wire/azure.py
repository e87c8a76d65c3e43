"""Codec of Azure AI Search's ``retrieve`` action, by API version: requests and responses of ``schema``.

A field is accepted in the API versions that define it, and refused in others, as by the service:

* 2025-05-01-preview: messages with roles, ``targetIndexParams``; extracted data only.
* 2025-08-01-preview: ``requestLimits`` and ``outputConfiguration``.
* 2025-11-01-preview: intents, efforts up to medium, limits in the request itself.
* 2026-04-01: intents and extracted data only, without a model.
* 2026-08-01-preview: all fields of ``schema.RetrievalRequest`` but the instructions, which a definition has.

A null counts as absent. Ranges of numbers are those of ``schema``, which are wider than the service's.

The newest version's response has the JSON form of ``schema.RetrievalResponse``. In an older one, activity records and
references have the names and fields of that version, and a ``warning``, which only the newest defines. The fields that
this library adds to the response itself (``statusCode``, ``missing``, ...) are in all of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.request import OutputMode, ReasoningEffort, RetrievalRequest
from llama_index_agentic_kb.schema.response import RetrievalResponse

VERSIONS: Final = ("2025-05-01-preview", "2025-08-01-preview", "2025-11-01-preview", "2026-04-01", "2026-08-01-preview")
_INDEXES, _CONFIGURED, _PREVIEW, _STABLE, _NEWEST = VERSIONS

RANKED: Final = 50  # documents that Azure's ranker takes; ``maxDocsForReranker`` is rounded up to a multiple of it


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of one API version."""

    fields: str  # of a request
    params: Mapping[str, str]  # by field of a source's parameters, the name in ``schema.SourceParams``
    kinds: tuple[str, ...] | None = None  # kinds of sources; None if any is accepted
    source_list: str = "knowledgeSourceParams"  # field that holds the sources' parameters
    efforts: tuple[str, ...] = ()
    fixed: JsonMapping = field(default_factory=dict)  # fields that a request can't set


_SOURCE: Final = (
    "knowledgeSourceName kind includeReferences includeReferenceSourceData rerankerThreshold "
    "filterAddOn filterExpressionAddOn language market count freshness"
).split()
_STABLE_KINDS: Final = ("searchIndex", "azureBlob", "indexedOneLake", "web")
_KINDS: Final = (*_STABLE_KINDS, "indexedSharePoint", "remoteSharePoint")
_PREVIEW_SOURCE: Final = {name: name for name in (*_SOURCE, "alwaysQuerySource")}

_NAMES: Final[Mapping[str, _Names]] = {
    _INDEXES: _Names(
        "messages targetIndexParams",
        {
            "indexName": "knowledgeSourceName",
            "filterAddOn": "filterAddOn",
            "rerankerThreshold": "rerankerThreshold",
            "maxDocsForReranker": "maxOutputDocuments",
            "includeReferenceSourceData": "includeReferenceSourceData",
            "IncludeReferenceSourceData": "includeReferenceSourceData",
        },
        source_list="targetIndexParams",
        fixed={"outputMode": OutputMode.EXTRACTIVE_DATA},
    ),
    _CONFIGURED: _Names(
        "messages knowledgeSourceParams requestLimits outputConfiguration",
        {**_PREVIEW_SOURCE, "maxSubQueries": "maxSubQueries"},
        _KINDS,
    ),
    _PREVIEW: _Names(
        "messages intents retrievalReasoningEffort outputMode includeActivity maxRuntimeInSeconds maxOutputSize "
        "knowledgeSourceParams",
        _PREVIEW_SOURCE,
        _KINDS,
        efforts=(ReasoningEffort.MINIMAL, ReasoningEffort.LOW, ReasoningEffort.MEDIUM),
    ),
    _STABLE: _Names(
        "intents retrievalReasoningEffort includeActivity maxRuntimeInSeconds maxOutputSizeInTokens "
        "knowledgeSourceParams",
        {name: name for name in _SOURCE},
        _STABLE_KINDS,
        efforts=(ReasoningEffort.MINIMAL,),
        fixed={"outputMode": OutputMode.EXTRACTIVE_DATA, "retrievalReasoningEffort": ReasoningEffort.MINIMAL},
    ),
}
"""The names of each version but the newest, whose names are those of the models."""

_OLD_NAMES: Final = {
    "knowledgeSourceParams": "targetIndexParams",
    "knowledgeSourceName": "indexName",
    "maxOutputDocuments": "maxDocsForReranker",
}
"""The names of 2025-05-01-preview in error messages."""
_LIMIT_NAMES: Final = {name: name for name in ("maxRuntimeInSeconds", "maxOutputSize")}
_OUTPUT_NAMES: Final = {"includeActivity": "includeActivity", "modality": "outputMode", "attemptFastPath": "fast"}
_STORED: Final = ("retrievalInstructions", "retrieval_instructions", "answerInstructions", "answer_instructions")


def known_version(api_version: str) -> str:
    """Return an API version, the newest if it is empty; raise ``InvalidRequestError`` if it is not known."""
    if api_version and api_version not in VERSIONS:
        raise InvalidRequestError(f"api-version: {api_version[:40]!r} is not known; known are {', '.join(VERSIONS)}")
    return api_version or _NEWEST


def decode_retrieve(body: object, *, api_version: str = "") -> RetrievalRequest:
    """Parse the body of a ``retrieve`` request, JSON text or parsed JSON, of an API version (the newest if empty).

    Raises ``InvalidRequestError`` for an unknown version, and with the field's name for an invalid body or field.
    """
    version, fields = known_version(api_version), _fields_of(body)
    names = _NAMES.get(version)
    if names is not None:
        _check_names(fields, names.fields.split(), "", version)
        fields["knowledgeSourceParams"] = _source_params(fields.pop(names.source_list, []), names, version)
        _check_effort(fields.get("retrievalReasoningEffort"), names, version)
        fields |= names.fixed
    if version == _INDEXES:
        _check_roles(fields.get("messages"))
    if version == _CONFIGURED:
        fields |= _configured(fields)
    if fields.get("outputMode") == "extractedData":  # as examples of the service's documentation have it
        fields["outputMode"] = OutputMode.EXTRACTIVE_DATA
    try:
        return RetrievalRequest.parse(fields)
    except InvalidRequestError as error:
        if version != _INDEXES:
            raise
        message = str(error)
        for ours, theirs in _OLD_NAMES.items():
            message = message.replace(ours, theirs)
        raise InvalidRequestError(message) from error


def _fields_of(body: object) -> JsonObject:
    try:
        data = json.loads(body) if isinstance(body, (str, bytes, bytearray)) else body
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"body: it is no JSON that can be read: {error}") from None
    if not isinstance(data, Mapping):
        raise InvalidRequestError("body: an object is expected")
    for name in _STORED:
        if name in data:
            raise InvalidRequestError(f"{name}: the knowledge base's definition has it, not a request")
    return {name: value for name, value in data.items() if value is not None}


def _check_effort(effort: object, names: _Names, version: str) -> None:
    kind = effort.get("kind") if isinstance(effort, Mapping) else effort
    if kind is not None and kind not in names.efforts:
        known = ", ".join(names.efforts)
        raise InvalidRequestError(f"retrievalReasoningEffort: {version} has no {str(kind)[:60]!r}; it has {known}")


def _check_roles(messages: object) -> None:
    for position, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, Mapping) and message.get("role") is None:
            raise InvalidRequestError(f"messages.{position}.role: a role is required")


def _check_names(data: Mapping[str, object], names: Collection[str], at: str, version: str) -> None:
    for name in data:
        if name not in names:
            raise InvalidRequestError(f"{at}{str(name)[:60]}: {version} has no such field; it has {', '.join(names)}")


def _source_params(sent: object, names: _Names, version: str) -> list[JsonObject]:
    """Return the parameters of the sources under our names."""
    if not isinstance(sent, list):
        raise InvalidRequestError(f"{names.source_list}: a list is expected")
    params = []
    for position, item in enumerate(sent):
        at = f"{names.source_list}.{position}"
        one = _renamed(item, names.params, at, version)
        kind = one.get("kind")
        if names.kinds is not None and kind is not None and kind not in names.kinds:
            known = ", ".join(names.kinds)
            raise InvalidRequestError(f"{at}.kind: {version} has no kind {str(kind)[:60]!r}; it has {known}")
        ranked = one.get("maxOutputDocuments")
        if isinstance(ranked, int) and not isinstance(ranked, bool):
            one["maxOutputDocuments"] = -(-ranked // RANKED) * RANKED
        params.append(one)
    return params


def _renamed(data: object, names: Mapping[str, str], path: str, version: str) -> JsonObject:
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InvalidRequestError(f"{path}: an object is expected")
    _check_names(data, names, f"{path}.", version)
    return {names[name]: value for name, value in data.items() if value is not None}


def _configured(fields: JsonObject) -> JsonObject:
    """Take the limits and the output's settings of 2025-08-01-preview out of ``fields``, and return them as ours."""
    read = _renamed(fields.pop("requestLimits", None), _LIMIT_NAMES, "requestLimits", _CONFIGURED)
    read |= _renamed(fields.pop("outputConfiguration", None), _OUTPUT_NAMES, "outputConfiguration", _CONFIGURED)
    fast = read.pop("fast", False)
    if not isinstance(fast, bool):
        raise InvalidRequestError("outputConfiguration.attemptFastPath: true or false is expected")
    if fast:  # no planning if the first search suffices
        read["retrievalReasoningEffort"] = ReasoningEffort.AUTO
    return read


# -- responses --------------------------------------------------------------------------------------------------------

_RECORD: Final = (
    "type id knowledgeSourceName inputTokens outputTokens reasoningTokens retrievalReasoningEffort queryTime count "
    "elapsedMs error warning"
).split()
_REFERENCE: Final = "type id activitySource docKey blobUrl docUrl webUrl rerankerScore sourceData".split()
_WEB: Final = "type id activitySource url title rerankerScore sourceData".split()
_OLD_REFERENCE: Final = "type id activitySource docKey rerankerScore sourceData".split()
_OLD_TYPES: Final = {"modelQueryPlanning": "ModelQueryPlanning", "agenticReasoning": "AzureSearchSemanticRanker"}
"""The types of 2025-05-01-preview, whose searches are all of the type ``AzureSearchQuery``."""


def encode_response(response: RetrievalResponse, *, api_version: str = "") -> JsonObject:
    """Return a response as JSON data of an API version, or the newest; raise ``InvalidRequestError`` if unknown."""
    version, data = known_version(api_version), json.loads(response.to_json())
    if version == _NEWEST:
        return dict(data)
    old = version == _INDEXES
    if "activity" in data:
        data["activity"] = [_record(one, old=old) for one in data["activity"]]
    references = []
    for one in data["references"]:
        names = _OLD_REFERENCE if old else _WEB if one["type"] == "web" else _REFERENCE
        references.append({**_only(one, names), **({"type": "AzureSearchDoc"} if old else {})})
    return {**data, "references": references}


def _record(data: JsonMapping, *, old: bool) -> JsonObject:
    made, kind = _only(data, _RECORD), str(data["type"])
    query = _only(data.get(name := f"{kind}Arguments", {}), ("search", "filter"))
    if not old:
        return made | ({name: query} if name in data else {})
    made["type"] = _OLD_TYPES.get(kind, "AzureSearchQuery" if "knowledgeSourceName" in made else kind)
    if "knowledgeSourceName" in made:
        made |= {"targetIndex": made.pop("knowledgeSourceName"), "query": query}
    if kind == "agenticReasoning":
        made |= {"inputTokens": made.pop("reasoningTokens", 0)}
        made.pop("retrievalReasoningEffort", None)
    return made


def _only(data: JsonMapping, names: Sequence[str]) -> JsonObject:
    return {name: data[name] for name in names if name in data}
