"""Routes of definitions, by the paths of Azure's SDK: knowledge bases and sources, their status, service statistics."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.server.azure import api_version
from llama_index_agentic_kb.server.catalog import Conditions, Kind, Stored
from llama_index_agentic_kb.server.context import ServerContext
from llama_index_agentic_kb.server.definitions import (
    KnowledgeBaseDefinition,
    SourceDefinition,
    check_name,
)
from llama_index_agentic_kb.server.http import read_body

MAX_BYTES: Final = 1_000_000
"""The maximum size of a definition."""
MAX_PAGE: Final = 1_000
_COUNTERS: Final = (
    "aliasesCount",
    "documentCount",
    "indexesCount",
    "indexersCount",
    "dataSourcesCount",
    "storageSize",
    "synonymMaps",
    "skillsetCount",
    "vectorIndexSize",
    "knowledgeBasesCount",
    "knowledgeSourcesCount",
)


def definition_routes(context: ServerContext) -> APIRouter:
    """Return the routes of definitions."""
    router = APIRouter(tags=["definitions"])
    _add(router, context, "knowledgeBase", KnowledgeBaseDefinition)
    _add(router, context, "knowledgeSource", SourceDefinition)

    @router.get("/knowledgesources/{name}/status", operation_id="get_source_status")
    async def source_status(name: str, request: Request) -> Response:
        """Return the state of a source; its documents are ingested by command, so that it is always active."""
        await _admin(context, request)
        found = await context.service.find("knowledgeSource", name)
        return JSONResponse({"kind": found["kind"], "synchronizationStatus": "active"})

    @router.get("/servicestats", operation_id="get_service_statistics")
    async def service_statistics(request: Request) -> Response:
        """Return the number of knowledge bases, sources and indexes."""
        await _admin(context, request)
        counts = await context.service.counts()
        used = {
            "knowledgeBasesCount": counts["knowledgeBase"],
            "knowledgeSourcesCount": counts["knowledgeSource"],
            "indexesCount": len(context.service.indexes),
        }
        counters = {name: {"usage": used.get(name, 0), "quota": None} for name in _COUNTERS}
        return JSONResponse({"counters": counters, "limits": {}, "indexersRuntime": {"usedSeconds": 0}})

    return router


def _add(
    router: APIRouter,
    context: ServerContext,
    kind: Kind,
    model: type[KnowledgeBaseDefinition | SourceDefinition],
) -> None:
    """Add the routes that list, create, replace, return and delete the definitions of a kind."""
    service, path = context.service, f"/{kind.lower()}s"

    @router.get(path, operation_id=f"list_{kind}s")
    async def list_all(request: Request) -> Response:
        """Return the definitions by name: those that begin with ``search``, ``pageSize`` of them after ``after``."""
        await _admin(context, request)
        return JSONResponse(_page(await service.list_all(kind), request))

    @router.post(path, operation_id=f"create_{kind}", status_code=201)
    async def create(request: Request) -> Response:
        """Store a new definition."""
        await _admin(context, request)
        definition = model.parse(await read_body(request, MAX_BYTES))
        stored, _ = await service.put(kind, definition, create=True)
        return _shown(stored, 201)

    @router.put(path + "/{name}", operation_id=f"put_{kind}")
    async def put(name: str, request: Request) -> Response:
        """Store a definition, new or in place of another; ``If-Match`` and ``If-None-Match`` are obeyed."""
        await _admin(context, request)
        definition = model.parse(await read_body(request, MAX_BYTES))
        check_name(definition, name)
        stored, is_new = await service.put(kind, definition, _conditions(request))
        return _shown(stored, 201 if is_new else 200)

    @router.get(path + "/{name}", operation_id=f"get_{kind}")
    async def get(name: str, request: Request) -> Response:
        """Return a definition."""
        await _admin(context, request)
        found = await service.find(kind, name)
        return JSONResponse(found, headers={"ETag": found["@odata.etag"]})

    @router.delete(path + "/{name}", operation_id=f"delete_{kind}", status_code=204)
    async def delete(name: str, request: Request) -> Response:
        """Delete a definition; a source that a knowledge base uses is kept."""
        await _admin(context, request)
        await service.remove(kind, name, _conditions(request))
        return Response(status_code=204)


def _page(found: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    params = request.query_params
    after, prefix, size = params.get("after", ""), params.get("search", ""), params.get("pageSize", "1000")
    if not size.isascii() or not size.isdigit() or not 1 <= int(size[:5]) <= MAX_PAGE:
        raise InvalidRequestError(f"pageSize: a number from 1 to {MAX_PAGE:,} is expected")
    rest = [one for one in found if one["name"] > after and one["name"].startswith(prefix)]
    shown = rest[: int(size)]
    if len(rest) == len(shown):
        return {"value": shown}
    following = request.url.include_query_params(after=shown[-1]["name"])
    return {"value": shown, "@odata.nextLink": str(following)}


async def _admin(context: ServerContext, request: Request) -> None:
    await context.access.caller(request, admin=True)
    api_version(request)


def _conditions(request: Request) -> Conditions:
    return Conditions(request.headers.get("if-match"), request.headers.get("if-none-match"))


def _shown(stored: Stored, status: int) -> Response:
    return JSONResponse(stored.to_dict(), status, {"ETag": stored.etag})
