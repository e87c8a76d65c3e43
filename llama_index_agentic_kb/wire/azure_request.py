"""Parser for requests of Azure AI Search's ``retrieve`` action in preview versions; returns current requests.

A field is accepted in the API versions that define it, and refused in others, as by the service:

* 2025-05-01-preview: ``targetIndexParams`` with ``indexName``, ``maxDocsForReranker``, ``IncludeReferenceSourceData``.
* 2025-08-01-preview: ``requestLimits`` and ``outputConfiguration``.
* Later versions use the names of ``schema.RetrievalRequest``, which accepts both names of the output's size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.request import RetrievalRequest

_INDEXES: Final = "2025-05-01-preview"
_LIMITS: Final = "2025-08-01-preview"
_PARAMS: Final = {
    "indexName": "knowledgeSourceName",
    "filterAddOn": "filterAddOn",
    "rerankerThreshold": "rerankerThreshold",
    "maxDocsForReranker": "maxOutputDocuments",
    "includeReferenceSourceData": "includeReferenceSourceData",
    "IncludeReferenceSourceData": "includeReferenceSourceData",
}
_LIMIT_NAMES: Final = {"maxRuntimeInSeconds": "maxRuntimeInSeconds", "maxOutputSize": "maxOutputSize"}
_STORED: Final = ("retrievalInstructions", "retrieval_instructions", "answerInstructions", "answer_instructions")
_FAST: Final = "attemptFastPath"
_OUTPUT_NAMES: Final = {"includeActivity": "includeActivity", "modality": "outputMode", _FAST: _FAST}


def decode_retrieve(body: object, *, api_version: str = "") -> RetrievalRequest:
    """Parse the body of a ``retrieve`` request.

    Args:
        body: JSON text, or parsed JSON.
        api_version: The query parameter ``api-version``; empty means the newest version.

    Raises:
        InvalidRequestError: The body is invalid, or has fields of another API version; the error names the field.
    """
    fields = _fields_of(body)
    if api_version == _INDEXES:
        if fields.get("knowledgeSourceParams") is not None:
            raise InvalidRequestError(f"knowledgeSourceParams: {_INDEXES} has none; send targetIndexParams")
        params = fields.pop("targetIndexParams", None) or []
        if not isinstance(params, list):
            raise InvalidRequestError("targetIndexParams: a list is expected")
        named = [_renamed(one, _PARAMS, f"targetIndexParams.{position}") for position, one in enumerate(params)]
        fields["knowledgeSourceParams"] = named
    if api_version == _LIMITS:
        fields |= _renamed(fields.pop("requestLimits", None), _LIMIT_NAMES, "requestLimits")
        fields |= _renamed(fields.pop("outputConfiguration", None), _OUTPUT_NAMES, "outputConfiguration")
        fast = fields.pop(_FAST, False)
        if not isinstance(fast, bool):
            raise InvalidRequestError(f"outputConfiguration.{_FAST}: true or false is expected")
        if fast:  # no planning if the first search suffices
            fields.setdefault("retrievalReasoningEffort", {"kind": "auto"})
    return RetrievalRequest.parse(fields)


def _fields_of(body: object) -> dict[str, object]:
    try:
        data = json.loads(body) if isinstance(body, (str, bytes, bytearray)) else body
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"body: it is no JSON that can be read: {error}") from None
    if not isinstance(data, Mapping):
        raise InvalidRequestError("body: an object is expected")
    for name in _STORED:
        if name in data:
            raise InvalidRequestError(f"{name}: the knowledge base's definition has it, not a request")
    return dict(data)


def _renamed(data: object, names: Mapping[str, str], path: str) -> dict[str, object]:
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InvalidRequestError(f"{path}: an object is expected")
    for name in data:
        if name not in names:
            raise InvalidRequestError(f"{path}.{str(name)[:60]}: there is no such field; known are {', '.join(names)}")
    return {names[name]: value for name, value in data.items() if value is not None}
