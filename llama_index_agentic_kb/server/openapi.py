"""The OpenAPI description of the routes that read their bodies themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from llama_index_agentic_kb.schema import RetrievalRequest
from llama_index_agentic_kb.server.definitions import KnowledgeBaseDefinition, SourceDefinition
from llama_index_agentic_kb.wire.azure import VERSIONS

_NOTE: Final = (
    "Azure AI Search's agentic retrieval API over knowledge bases. Each path with a name also has the OData form, "
    "such as /knowledgebases('kb')/retrieve; /agents is an older name of /knowledgebases. Google's Answer API is at "
    "/v1, and MCP at /knowledgebases/{name}/mcp."
)
_REF: Final = "#/components/schemas/{model}"
_ERROR: Final[Mapping[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "target": {"type": "string"},
                "details": {"type": "array", "items": {"type": "object"}},
                "innererror": {
                    "type": "object",
                    "properties": {"remedy": {"type": "string"}, "docs": {"type": "string"}},
                },
            },
        }
    },
}
_WORDS: Final = {
    "200": "Done.",
    "201": "Stored, and new.",
    "204": "Deleted.",
    "206": "Answered; a part is missing.",
    "400": "The request is not valid.",
    "401": "Credentials are missing or not valid.",
    "403": "The caller may not do this.",
    "404": "It does not exist.",
    "406": "This API version sends no events.",
    "409": "It contradicts what is stored.",
    "412": "The stored definition does not meet the conditions.",
    "413": "The body is too large.",
    "429": "The caller or its tenant exceeded a limit.",
    "502": "No source, or no model, answered.",
    "503": "The server is overloaded, or its database or the knowledge base's index can't be reached.",
}
_COMMON: Final = ("400", "401", "403", "429", "503")


@dataclass(frozen=True, slots=True)
class _Operation:
    body: type[BaseModel] | None = None
    done: tuple[str, ...] = ("200",)
    refused: tuple[str, ...] = ()
    answers: bool = False
    parameters: tuple[str, ...] = ()


def _of_kind(kind: str, model: type[BaseModel]) -> dict[str, _Operation]:
    return {
        f"list_{kind}s": _Operation(parameters=("search", "pageSize", "after")),
        f"create_{kind}": _Operation(model, ("201",), ("409", "413")),
        f"put_{kind}": _Operation(model, ("200", "201"), ("409", "412", "413")),
        f"get_{kind}": _Operation(refused=("404",)),
        f"delete_{kind}": _Operation(done=("204",), refused=("404", "409", "412")),
    }


_OPERATIONS: Final = {
    "retrieve": _Operation(RetrievalRequest, ("200", "206"), ("404", "406", "413", "502"), answers=True),
    "get_passage": _Operation(refused=("404",)),
    "get_source_status": _Operation(refused=("404",)),
    "get_service_statistics": _Operation(),
    **_of_kind("knowledgeBase", KnowledgeBaseDefinition),
    **_of_kind("knowledgeSource", SourceDefinition),
}


def describe_routes(app: FastAPI) -> None:
    """Make an application return the whole description at ``/openapi.json``."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _schema(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=_NOTE, routes=app.routes)
    bodies = {one.body for one in _OPERATIONS.values() if one.body is not None}
    by_name = sorted(bodies, key=lambda one: one.__name__)
    _, models = models_json_schema([(one, "validation") for one in by_name], ref_template=_REF)
    components = schema.setdefault("components", {})
    schemas = {**models["$defs"], "Error": dict(_ERROR), "RetrievalResponse": _response_schema()}
    components["schemas"] = {
        name: one for name, one in schemas.items() if name not in {"HTTPValidationError", "ValidationError"}
    }
    components["securitySchemes"] = {
        "apiKey": {"type": "apiKey", "in": "header", "name": "api-key"},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    for path in schema["paths"].values():
        for operation in path.values():
            known = _OPERATIONS.get(operation.get("operationId", ""))
            if known is not None:
                _complete(operation, known)
            operation.get("responses", {}).pop("422", None)  # values of parameters are texts: none is refused so
    return schema


def _complete(operation: dict[str, Any], known: _Operation) -> None:
    """Add parameters, body, responses and security to the description of an operation."""
    version = {"type": "string", "enum": list(VERSIONS)}
    operation.setdefault("parameters", []).append(
        {"name": "api-version", "in": "query", "required": False, "schema": version}
    )
    operation["parameters"] += [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}} for name in known.parameters
    ]
    operation["security"] = [{"apiKey": []}, {"bearer": []}]
    if known.body is not None:
        content = {"application/json": {"schema": {"$ref": _REF.format(model=known.body.__name__)}}}
        operation["requestBody"] = {"required": True, "content": content}
    responses: dict[str, Any] = {}
    for status in known.done:
        responses[status] = {"description": _WORDS[status]}
        if status != "204":
            shown = {"$ref": _REF.format(model="RetrievalResponse")} if known.answers else {"type": "object"}
            responses[status]["content"] = {"application/json": {"schema": shown}}
    if known.answers:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    for status in (*_COMMON, *known.refused):
        content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
        responses[status] = {"description": _WORDS[status], "content": content}
    operation["responses"] = responses


def _response_schema() -> dict[str, Any]:
    """Return the schema of a response's own fields; their contents are those of Azure's SDK, with additions."""
    lists = ("response", "activity", "references", "missing", "skippedReasons")
    return {
        "type": "object",
        "required": ["statusCode", "response", "references", "missing"],
        "properties": {
            "statusCode": {"type": "integer", "enum": [200, 206]},
            **{name: {"type": "array"} for name in lists},
            "plan": {"type": "object"},
            "grounding": {"type": "object"},
        },
    }
