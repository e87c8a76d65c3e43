"""The HTTP application: knowledge bases behind Azure AI Search's API, and the OpenAPI description of its routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from llama_index_agentic_kb._text import printable
from llama_index_agentic_kb.errors import AgenticKBError, InvalidRequestError
from llama_index_agentic_kb.schema import RetrievalRequest, RetrievalResponse
from llama_index_agentic_kb.server.access import Access, TokenVerifier
from llama_index_agentic_kb.server.azure import SESSION, definition_routes, retrieval_routes
from llama_index_agentic_kb.server.catalog import ApiKey
from llama_index_agentic_kb.server.definitions import KnowledgeBaseDefinition, SourceDefinition
from llama_index_agentic_kb.server.google import PREFIX, google_error, google_routes
from llama_index_agentic_kb.server.http import Gateway, ServerContext, error_response
from llama_index_agentic_kb.server.mcp_tool import McpRoutes
from llama_index_agentic_kb.server.page import page_routes, passage_routes
from llama_index_agentic_kb.server.quotas import FairQueue, Quotas, Rates
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.wire.azure import VERSIONS

MAX_BODY_BYTES: Final = 4_000_000
MAX_RUNNING: Final = 500
REQUESTS_PER_MINUTE: Final = 1_200


def create_app(
    service: KnowledgeService,
    *,
    keys: Mapping[str, ApiKey] | None = None,
    verifier: TokenVerifier | None = None,
    requests_per_minute: int | None = REQUESTS_PER_MINUTE,
    max_running: int = MAX_RUNNING,
    quotas: Quotas = Quotas(),  # noqa: B008 (it can't be changed)
    max_body_bytes: int = MAX_BODY_BYTES,
    cors_origins: Collection[str] = (),
) -> ASGIApp:
    """Return the ASGI application of a server.

    Args:
        service: The knowledge bases.
        keys: API keys beside those of the catalog, by hash (``catalog.hash_of``).
        verifier: Verifies bearer tokens. None refuses them all.
        requests_per_minute: The rate of each caller. None means no limit.
        max_running: The maximum number of requests that run at the same time; further ones get status 503.
        quotas: The limits of questions, by tenant. At most two fifths of ``max_running`` are answered at the same time.
        max_body_bytes: The maximum size of a request's body; a larger one gets status 413.
        cors_origins: The origins of web pages that may call the server.
    """
    access = Access(service.catalog, keys or {}, verifier, Rates(requests_per_minute))
    queue = FairQueue(quotas, max(1, max_running * 4 // 5))  # what is left is for requests other than questions
    context = ServerContext(service, access, queue, max_body_bytes)
    context.metrics.waiting.set_function(lambda: queue.waiting)
    return Gateway(
        _application(context),
        metrics=context.metrics,
        origins=lambda path: [*cors_origins, *service.origins(path)],
        max_running=max_running,
    )


def _application(context: ServerContext) -> FastAPI:
    """Return the application with all routes."""
    mcp = McpRoutes(context)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await context.service.open_all()
        async with mcp.running():
            yield
        context.service.close()

    app = FastAPI(
        title="Agentic knowledge bases",
        version=version("llama-index-agentic-kb"),
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from a CDN
        redoc_url=None,
        exception_handlers={
            AgenticKBError: _answer_error,
            HTTPException: _answer_http_error,
            RequestValidationError: _answer_missing_parameter,
            Exception: _answer_error,
        },
    )
    for router in (
        retrieval_routes(context),
        passage_routes(context),
        definition_routes(context),
        mcp.router(),
        google_routes(context),
        page_routes(context),
    ):
        app.include_router(router)
    _add_own_routes(app, context)
    app.openapi = cache(partial(_described, app))  # type: ignore[method-assign]  # FastAPI's documented way
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    return google_error(error) if request.url.path.startswith(PREFIX) else error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "notFound", 405: "methodNotAllowed"}
    message = printable(f"{request.method} {request.url.path[:200]}: {error.detail}")
    body = {"error": {"code": codes.get(error.status_code, "invalidRequest"), "message": message}}
    return JSONResponse(body, error.status_code, error.headers)


async def _answer_missing_parameter(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    names = ", ".join(str(problem["loc"][-1]) for problem in error.errors())
    return error_response(InvalidRequestError(f"query parameters: {names}: missing, or not valid"))


def _add_own_routes(app: FastAPI, context: ServerContext) -> None:
    @app.get("/healthz", tags=["operation"])
    async def health() -> dict[str, str]:
        """Return 200 while the process serves requests."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["operation"], responses={503: {"description": "The database can't be read."}})
    async def readiness() -> dict[str, Any]:
        """Return 200 if the database can be read."""
        await context.service.catalog.snapshot()
        return {"status": "ready"}

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Return the server's metrics in Prometheus' text form."""
        return Response(generate_latest(context.metrics.registry), media_type=CONTENT_TYPE_LATEST)


# -- the description of the routes that read their bodies themselves ---------------------------------------------------

_NOTE: Final = (
    "Azure AI Search's agentic retrieval API over knowledge bases. Each path with a name also has the OData form, "
    "such as /knowledgebases('kb')/retrieve; /agents is an older name of /knowledgebases. Google's Answer API is at "
    "/v1, and MCP at /knowledgebases/{name}/mcp."
)
_REF: Final = "#/components/schemas/{model}"
_COMMON: Final = ("400", "401", "403", "429", "503")


class _Error(BaseModel):
    code: str
    message: str
    target: str = ""
    details: list[dict[str, Any]] = []
    innererror: dict[str, str] = {}


class ErrorBody(BaseModel):
    """The body of every error."""

    error: _Error


class _Operation(NamedTuple):
    body: type[BaseModel] | None = None
    done: tuple[str, ...] = ("200",)
    refused: tuple[str, ...] = ()
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
    "retrieve": _Operation(RetrievalRequest, ("200", "206"), ("404", "406", "413", "502")),
    "get_passage": _Operation(refused=("404",)),
    "get_source_status": _Operation(refused=("404",)),
    "get_service_statistics": _Operation(),
    **_of_kind("knowledgeBase", KnowledgeBaseDefinition),
    **_of_kind("knowledgeSource", SourceDefinition),
}


def _described(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description of an application."""
    schema = get_openapi(title=app.title, version=app.version, description=_NOTE, routes=app.routes)
    sent = (RetrievalRequest, KnowledgeBaseDefinition, SourceDefinition)
    returned = (RetrievalResponse, ErrorBody)
    _, models = models_json_schema(
        [*((one, "validation") for one in sent), *((one, "serialization") for one in returned)], ref_template=_REF
    )
    schema["components"] = {
        "schemas": models["$defs"],
        "securitySchemes": {
            "apiKey": {"type": "apiKey", "in": "header", "name": "api-key"},
            "bearer": {"type": "http", "scheme": "bearer"},
        },
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
    named: dict[str, dict[str, Any]] = {"api-version": {"type": "string", "enum": [*VERSIONS]}}
    named |= {name: {"type": "string"} for name in known.parameters}
    operation.setdefault("parameters", []).extend(
        {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in named.items()
    )
    operation["security"] = [{"apiKey": []}, {"bearer": []}]
    if known.body is not None:
        operation["requestBody"] = {"required": True, "content": _json_of(known.body)}
    answers = known.body is RetrievalRequest
    done = _json_of(RetrievalResponse) if answers else {"application/json": {"schema": {"type": "object"}}}
    contents = {status: {} if status == "204" else dict(done) for status in known.done}
    contents |= {status: _json_of(ErrorBody) for status in (*_COMMON, *known.refused)}
    if answers:
        operation["parameters"].append({"name": SESSION, "in": "header", "schema": {"type": "string"}})
        contents["200"]["text/event-stream"] = {"schema": {"type": "string"}}
    operation["responses"] = {
        status: {"description": HTTPStatus(int(status)).phrase, **({"content": content} if content else {})}
        for status, content in contents.items()
    }


def _json_of(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
