"""The HTTP application: its routes, the page at ``/`` (plain files without a build step), the OpenAPI description."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from llama_index.core.llms import LLM
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BeforeValidator, Field
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp

from llama_index_agentic_kb._text import know_secrets, printable
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, InvalidRequestError, NotFoundError
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.schema import RetrievalRequest, RetrievalResponse
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.server import catalog
from llama_index_agentic_kb.server.access import Access, FairQueue, JwksVerifier, Limits, Rates, TokenVerifier
from llama_index_agentic_kb.server.azure import REF, definition_routes, retrieval_routes
from llama_index_agentic_kb.server.catalog import KnowledgeBaseDefinition, Setting, SourceDefinition
from llama_index_agentic_kb.server.errors import ErrorBody
from llama_index_agentic_kb.server.google import google_routes
from llama_index_agentic_kb.server.http import GOOGLE, Gateway, JsonFormatter, ServerContext, error_response
from llama_index_agentic_kb.server.mcp_tool import mcp_routes
from llama_index_agentic_kb.server.service import Index, KnowledgeService
from llama_index_agentic_kb.sources import KnowledgeSource

FILES: Final = Path(__file__).parent / "static"
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""The types of the page's files by suffix: those that a machine's tables name may stop scripts."""
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
}


def create_app(
    service: KnowledgeService,
    *,
    keys: Mapping[str, catalog.ApiKey] | None = None,
    verifier: TokenVerifier | None = None,
    limits: Limits | None = None,
    cors_origins: Collection[str] = (),
) -> ASGIApp:
    """Return the ASGI application of a server.

    Args:
        service: The knowledge bases.
        keys: API keys beside those of the catalog, by hash (``catalog.hash_of``).
        verifier: Verifies bearer tokens. None refuses them all.
        limits: The limits of requests and questions. Defaults to ``Limits()``.
        cors_origins: The origins of web pages that may call the server.
    """
    limits = limits or Limits()
    access = Access(
        service.catalog,
        keys or {},
        verifier,
        Rates(limits.requests_per_minute, "this caller is allowed {} requests a minute"),
    )
    # What is left is for requests other than questions.
    context = ServerContext(service, access, FairQueue(limits, max(1, limits.running_requests * 4 // 5)), limits)
    context.metrics.waiting.set_function(lambda: context.queue.waiting)
    mcp_router, mcp_running = mcp_routes(context)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open_all()
        async with mcp_running():
            yield
        service.close()

    app = FastAPI(
        title="Agentic knowledge bases",
        version=version("llama-index-agentic-kb"),
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from a CDN
        redoc_url=None,
        exception_handlers=dict.fromkeys(
            (AgenticKBError, HTTPException, RequestValidationError, Exception), _answer_error
        ),
    )
    for router in (retrieval_routes(context), definition_routes(context), mcp_router, google_routes(context)):
        app.include_router(router)
    _add_own_routes(app, context)
    app.openapi = cache(partial(_described, app))  # type: ignore[method-assign]  # FastAPI's documented way
    return Gateway(app, context=context, origins=lambda path: [*cors_origins, *service.origins(path)])


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        codes = {404: "notFound", 405: "methodNotAllowed"}
        message = printable(f"{request.method} {request.url.path[:200]}: {error.detail}")
        named: JsonObject = {"code": codes.get(error.status_code, "invalidRequest"), "message": message}
        body: object = {"error": named}
        if request.url.path.startswith(GOOGLE):
            own: JsonObject = {"status": "UNIMPLEMENTED", "details": []}  # the one error here is 405
            body = [{"error": {"code": error.status_code, "message": message, **own}}]
        return JSONResponse(body, error.status_code, error.headers)
    if isinstance(error, RequestValidationError):
        found = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
        error = InvalidRequestError(f"query parameters: {found}")
    return error_response(error, request.url.path)


def _add_own_routes(app: FastAPI, context: ServerContext) -> None:
    @app.get("/healthz", tags=["operation"])
    async def health() -> dict[str, str]:
        """Return 200 while the process serves requests."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["operation"], responses={503: {"description": "The database can't be read."}})
    async def readiness() -> JsonObject:
        """Return 200 if the database can be read."""
        await context.service.catalog.snapshot()
        return {"status": "ready"}

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Return the server's metrics in Prometheus' text form."""
        return Response(generate_latest(context.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    names = {path.name for path in FILES.iterdir()}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """Return the page."""
        return await page_file("index.html")

    @app.get("/page/bases", include_in_schema=False)
    async def bases(request: Request) -> Response:
        """Return the names, descriptions and sources of the knowledge bases."""
        await context.access.caller(request)
        defined = {one["name"]: one for one in await context.service.shown("knowledgeSource")}
        shown = []
        for base in await context.service.shown("knowledgeBase"):
            used = [defined.get(one["name"], {"name": one["name"]}) for one in base["knowledgeSources"]]
            sources = [{key: one.get(key) for key in ("name", "kind", "description")} for one in used]
            shown.append({"name": base["name"], "description": base.get("description"), "sources": sources})
        return JSONResponse({"value": shown})

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        """Return a file of the page."""
        if name not in names:
            raise NotFoundError(f"page: there is no file {name[:128]!r}")
        return FileResponse(FILES / name, headers=_HEADERS, media_type=_TYPES[Path(name).suffix])


# -- the description of the routes that read their bodies themselves ---------------------------------------------------

_NOTE: Final = (
    "Azure AI Search's agentic retrieval API over knowledge bases. Each path with a name also has the OData form, "
    "such as /knowledgebases('kb')/retrieve; /agents is an older name of /knowledgebases. Google's Answer API is at "
    "/v1, and MCP at /knowledgebases/{name}/mcp."
)


def _described(app: FastAPI) -> JsonObject:
    """Return the OpenAPI description of an application, with the schemas of bodies that routes read themselves."""
    schema = get_openapi(title=app.title, version=app.version, description=_NOTE, routes=app.routes)
    sent = [(one, "validation") for one in (RetrievalRequest, KnowledgeBaseDefinition, SourceDefinition)]
    returned = [(one, "serialization") for one in (RetrievalResponse, ErrorBody)]
    made = models_json_schema([*sent, *returned], ref_template=REF)[1]["$defs"]  # type: ignore[list-item]
    schema["components"]["schemas"] = made
    for path in schema["paths"].values():
        for operation in path.values():
            operation.get("responses", {}).pop("422", None)  # parameters that are refused get 400
    return schema


# -- the configuration file, the service made from it, and its running -------------------------------------------------

MAX_STOPPING_SECONDS: Final = 120  # maximum seconds that running answers get to finish when the server stops
MIN_KEY: Final = 16  # minimum length of an API key: shorter ones can be guessed


def _secret(value: object) -> object:
    if isinstance(value, str) and not value.startswith(catalog.ENVIRONMENT):
        raise ValueError("a secret does not stand in the file: write env:NAME, and set the variable NAME")
    secret = catalog.resolved(value)
    know_secrets([str(secret)])
    return secret


Secret: TypeAlias = Annotated[str, BeforeValidator(_secret)]


class StoreSettings(Model):
    """A store of ``agentic-kb ingest``; its path alone is enough."""

    path: Setting  # a directory, relative to the folder of the file, or the URL of a PostgreSQL database
    permissions: dict[str, dict[str, str]] = Field(default_factory=dict)
    """By source: the fields of ``Permissions``. A source that is not named is open to every caller."""


class ModelSettings(Model):
    """A language model behind an OpenAI-compatible API."""

    api_key: Secret = ""
    api_base: Setting | None = None
    model: str | None = None  # model's name in the API; defaults to the name in the configuration
    context_window: int = Field(default=8_192, ge=512)


class KeySettings(Model):
    """API keys by role."""

    admin: list[Annotated[Secret, Field(min_length=MIN_KEY)]] = Field(default_factory=list)
    query: list[Annotated[Secret, Field(min_length=MIN_KEY)]] = Field(default_factory=list)


class Configuration(Model):
    """The content of the file of ``agentic-kb serve`` (``docs/server.md`` has an example).

    Secrets stand in environment variables: ``env:NAME`` is replaced by the variable's value when the server starts.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8_080, ge=0, le=65_535)
    database: Setting = catalog.DEFAULT_DATABASE
    stores: list[Annotated[StoreSettings, BeforeValidator(lambda one: {"path": one} if isinstance(one, str) else one)]]
    models: dict[str, ModelSettings] = Field(default_factory=dict)
    keys: KeySettings = Field(default_factory=KeySettings)
    tokens: JwksVerifier | None = None
    limits: Limits = Field(default_factory=Limits)
    cors_origins: list[str] = Field(default_factory=list)
    traces: bool = False
    knowledge_sources: list[SourceDefinition] = Field(default_factory=list)
    knowledge_bases: list[KnowledgeBaseDefinition] = Field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Configuration:
        """Read a file; paths in it are relative to its folder. Errors are ``ConfigurationError`` and name the field."""
        try:
            loaded = cls.parse(catalog.read_file(path))
        except InvalidRequestError as error:
            raise ConfigurationError(f"{path}: {error}") from error
        for store in loaded.stores:
            store.path = catalog.located(path, store.path)
        loaded.database = catalog.located(path, loaded.database)
        return loaded

    def service(self) -> KnowledgeService:
        """Return the service over the stores and models, with the definitions of the file stored in its catalog."""
        service = KnowledgeService(self.database, indexes=self._indexes(), models=self._models())

        async def define() -> None:
            for source in self.knowledge_sources:
                await service.put("knowledgeSource", source)
            for base in self.knowledge_bases:
                await service.put("knowledgeBase", base)

        asyncio.run(define())
        return service

    def api_keys(self) -> dict[str, catalog.ApiKey]:
        """Return the API keys of the configuration file, by their hash."""
        by_role: dict[catalog.Role, list[str]] = {"admin": self.keys.admin, "query": self.keys.query}
        made = datetime.now(UTC)
        return {
            catalog.hash_of(key): catalog.ApiKey(f"file-{role}-{number}", f"{role}-{number}", role, made)
            for role, keys in by_role.items()
            for number, key in enumerate(keys, start=1)
        }

    def _models(self) -> dict[str, LLM]:
        if not self.models:
            return {}
        from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible  # noqa: PLC0415 (loads the client)

        return {
            name: OpenAICompatible(
                model=one.model or name,
                api_key=one.api_key or "none",
                api_base=one.api_base,
                context_window=one.context_window,
            )
            for name, one in self.models.items()
        }

    def _indexes(self) -> dict[str, Index]:
        from llama_index_agentic_kb.store import KnowledgeStore  # noqa: PLC0415 (loads SQLite and more)

        found: dict[str, Index] = {}
        for settings in self.stores:
            store, declared = KnowledgeStore.open(settings.path), settings.permissions
            names = [info.name for info in store.sources()]
            if unknown := sorted(declared.keys() - set(names)):
                raise ConfigurationError(f"stores.permissions: {', '.join(unknown)}: the store has {', '.join(names)}")
            for name in names:
                if name in found:
                    raise ConfigurationError(f"stores: two have a source of the name {name!r}")
                permissions = Permissions(**declared[name]) if name in declared else None
                if permissions is not None:
                    store.check_permissions(name, permissions)
                index, hybrid = store.index(name), store.lexical(name)
                found[name] = partial(KnowledgeSource, index=index, hybrid=hybrid, permissions=permissions)
        return found


def serve(configuration: Configuration) -> None:
    """Serve until the process gets SIGTERM or SIGINT; running answers are finished first."""
    service, keys = configuration.service(), configuration.api_keys()
    if not keys and configuration.tokens is None:
        announce_first_key(service)
    if configuration.traces:
        _register_traces()
    app = create_app(
        service,
        keys=keys,
        verifier=configuration.tokens,
        limits=configuration.limits,
        cors_origins=configuration.cors_origins,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        uvicorn.run(
            app,
            host=configuration.host,
            port=configuration.port,
            access_log=False,  # the server writes its own
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=MAX_STOPPING_SECONDS,
            ws="none",
        )
    finally:
        root.removeHandler(handler)


def _register_traces() -> None:
    """Send LlamaIndex's spans and events to the OpenTelemetry collector of the standard environment variables."""
    try:
        from llama_index.observability.otel import LlamaIndexOpenTelemetry  # noqa: PLC0415 (only if traces are on)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 (same)
    except ModuleNotFoundError as error:
        raise ConfigurationError("traces: pip install llama-index-observability-otel") from error
    LlamaIndexOpenTelemetry(service_name_or_resource="agentic-kb", span_exporter=OTLPSpanExporter()).start_registering()


def announce_first_key(service: KnowledgeService) -> None:
    """Create an admin key and print it, if the catalog has none: nobody could use the server otherwise."""

    async def announce() -> None:
        if not (await service.catalog.snapshot()).keys:
            _, key = await service.catalog.add_key("admin", "first")
            sys.stderr.write(f"admin key (shown once, stored as a hash): {key}\n")

    asyncio.run(announce())
