"""What every request passes: ids, path forms, security headers, CORS, the limit of running requests, metrics, logs."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, TypeVar
from urllib.parse import quote

from llama_index_instrumentation.dispatcher import instrument_tags
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_index_agentic_kb._types import JsonObject, Work
from llama_index_agentic_kb.account.logs import logger as package_logger
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import RetrievalResponse
from llama_index_agentic_kb.server.access import Access, FairQueue, Limits
from llama_index_agentic_kb.server.errors import OverloadedError, RequestError, TooLargeError, error_body, status_of
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.wire.google import encode_error

T = TypeVar("T")
logger: Final = logging.getLogger("llama_index_agentic_kb.server")
for _redacting in package_logger.filters:  # a logger's filters do not apply to its children
    logger.addFilter(_redacting)
request_id: Final[ContextVar[str]] = ContextVar("agentic_kb_request_id", default="")

# The seconds in which a request's body must arrive; until then it has a place among the running requests.
BODY_SECONDS: Final = 30.0
CLIENT_ID: Final = "x-ms-client-request-id"
_ID: Final = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_ODATA: Final = re.compile(r"/(knowledgebases|knowledgesources|agents)(?:\('((?:[^'/]|'')*)'\))?(/[^?]*)?")
_SECURITY: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
"""Headers of each response that does not set them itself."""
_ALLOWED_HEADERS: Final = (
    "api-key, authorization, content-type, accept, if-match, if-none-match, prefer, "
    "x-ms-client-request-id, x-ms-query-source-authorization, mcp-protocol-version, mcp-session-id, "
    "x-agentic-kb-session"
)
_EXPOSED_HEADERS: Final = "request-id, x-ms-client-request-id, x-agentic-kb-session, etag, retry-after"
GOOGLE: Final = "/v1/"  # what the paths of Google's methods begin with: errors have Google's form there
GONE: Final = Response(status_code=499)  # to a client that disconnected: nginx's status, for log and metrics
_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"})
_ALWAYS_OPEN: Final = frozenset({"/healthz", "/readyz", "/metrics"})  # served even if too many requests run


class Metrics:
    """The server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        labels = ("route", "method", "status")
        self.requests = Counter("agentic_kb_requests", "HTTP requests.", labels, registry=own)
        self.seconds = Histogram("agentic_kb_request_seconds", "Seconds to a response's end.", ("route",), registry=own)
        self.running = Gauge("agentic_kb_running_requests", "Requests that run now.", registry=own)
        self.waiting = Gauge("agentic_kb_waiting_questions", "Questions that wait their turn.", registry=own)
        self.tokens = Counter("agentic_kb_tokens", "Tokens billed by models.", ("direction",), registry=own)
        self.missing = Counter("agentic_kb_missing_parts", "Parts that responses lack.", ("outcome",), registry=own)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts of a server that its routes use."""

    service: KnowledgeService
    access: Access
    queue: FairQueue
    limits: Limits
    metrics: Metrics = field(default_factory=Metrics)

    async def answered(self, request: Request, tenant: str, work: Callable[[], Work[Response]]) -> Response:
        """Return the response that work makes at its place in the queue, unless the client disconnects."""

        async def placed() -> Response:
            async with self.queue.place(tenant):
                return await work()

        return await unless_gone(request.receive, placed()) or GONE

    def count(self, response: RetrievalResponse | None) -> None:
        """Add a response's tokens and missing parts to the metrics."""
        if response is None:
            return
        for record in response.activity or ():
            for direction in ("input", "output"):
                self.metrics.tokens.labels(direction).inc(getattr(record, f"{direction}_tokens", None) or 0)
        for part in response.missing:
            self.metrics.missing.labels(part.outcome.value).inc()


class Gateway:
    """The outermost ASGI application; ``origins`` returns those of web pages that may call a path ("*" means all)."""

    def __init__(self, app: ASGIApp, *, context: ServerContext, origins: Callable[[str], Collection[str]]) -> None:
        self._app, self._metrics, self._origins = app, context.metrics, origins
        self._max_running, self._running = context.limits.running_requests, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass on what is not HTTP."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, whole = time.monotonic(), 500, False
        own_id = uuid.uuid4().hex
        token = request_id.set(own_id)
        request = Request(scope)
        scope["path"] = plain_path(scope["path"])
        added = self._headers(request, own_id)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=[*message["headers"]])
                for name, value in added.items():
                    headers.setdefault(name, value)
                message["headers"] = headers.raw
            await send(message)

        async def receive_in_time() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout(started + BODY_SECONDS - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise InvalidRequestError(f"body: it did not arrive within {BODY_SECONDS:g} s") from None
            whole = not message.get("more_body", False)
            return message

        self._running += 1
        self._metrics.running.inc()
        try:
            with instrument_tags({"agentic_kb.request_id": own_id}):  # an attribute of each span of the request
                await self._serve(request, receive_in_time, send_with_headers)
        finally:
            self._running -= 1
            self._metrics.running.dec()
            self._account(request, status, time.monotonic() - started)
            request_id.reset(token)

    async def _serve(self, request: Request, receive: Receive, send: Send) -> None:
        scope = request.scope
        if request.method == "OPTIONS" and "access-control-request-method" in request.headers:
            await Response(status_code=204)(scope, receive, send)
        elif self._running > self._max_running and scope["path"] not in _ALWAYS_OPEN:
            error = OverloadedError(f"the server runs {self._max_running} requests already; try again")
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            with suppress(Exception):  # it was logged, and a response sent: Starlette raises it again
                await self._app(scope, receive, send)

    def _headers(self, request: Request, own_id: str) -> dict[str, str]:
        added = {**_SECURITY, "request-id": own_id}
        sent = request.headers.get(CLIENT_ID, "")
        if _ID.fullmatch(sent):
            added |= {CLIENT_ID: sent}
        origin = request.headers.get("origin")
        if origin is None:
            return added
        allowed = self._origins(request.scope["path"])
        if origin in allowed or "*" in allowed:
            added |= {
                "Access-Control-Allow-Origin": origin,
                "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE",
                "Access-Control-Allow-Headers": _ALLOWED_HEADERS,
                "Access-Control-Expose-Headers": _EXPOSED_HEADERS,
                "Cross-Origin-Resource-Policy": "cross-origin",
            }
        return {**added, "Vary": "Origin"}

    def _account(self, request: Request, status: int, seconds: float) -> None:
        route = getattr(request.scope.get("route"), "path", "other")
        method = request.method if request.method in _METHODS else "other"
        self._metrics.requests.labels(route, method, status).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        if request.scope["path"] in _ALWAYS_OPEN:
            return
        logger.info(
            "request",
            extra={
                "request_fields": {
                    "method": request.method,
                    "path": quote(request.scope["path"][:300]),
                    "status": status,
                    "ms": round(seconds * 1000, 1),
                    "caller": getattr(request.state, "caller", None),
                    "client_request_id": request.headers.get(CLIENT_ID, "")[:128] or None,
                }
            },
        )


def plain_path(path: str) -> str:
    """Return a path with OData keys or older names in the plain form: ``/agents('a')/x`` is ``/knowledgebases/a/x``."""
    found = _ODATA.fullmatch(path)
    if found is None:
        return path
    kind, key, rest = found.groups()
    kind = "knowledgebases" if kind == "agents" else kind
    inner = "" if key is None else "/" + key.replace("''", "'")
    return f"/{kind}{inner}{rest or ''}"


def error_response(error: BaseException, path: str) -> JSONResponse:
    """Return the response with an error, in the form of the path's API, Azure's or Google's; log an unexpected one."""
    is_googles = path.startswith(GOOGLE)
    status, body = encode_error(error) if is_googles else (status_of(error), error_body(error, request_id.get()))
    if status == 500:  # noqa: PLR2004 (the status of errors that nobody foresaw)
        logger.error("a request failed", exc_info=error)
    return JSONResponse(body, status, dict(error.headers) if isinstance(error, RequestError) else {})


async def read_body(request: Request, limit: int) -> bytes:
    """Return a request's body; raise ``TooLargeError`` beyond ``limit`` bytes, without reading the rest."""
    too_large = TooLargeError(f"the body is larger than {limit:,} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def unless_gone(receive: Receive, work: Work[T]) -> T | None:
    """Return the result of work; None if the client disconnected meanwhile, which cancels the work."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
        return None
    finally:
        gone.cancel()
        task.cancel()


class _Stream(Response):
    """Sends chunks as they are made; a disconnect cancels what makes them once, and waits for its clean-up."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks; Starlette's class would cancel their clean-up too."""
        del scope
        await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._rest) as rest:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for chunk in rest:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def streamed(
    request: Request, chunks: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str] = {}
) -> Response:
    """Return a response of chunks, each sent when it is made; raise an error that comes before the first of them."""

    async def begun() -> bytes:
        return await anext(chunks)

    first = await unless_gone(request.receive, begun())
    return GONE if first is None else _Stream(first, chunks, media_type, headers)


class JsonFormatter(logging.Formatter):
    """Formats log records as lines of JSON with the request id."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of JSON."""
        fields: JsonObject = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id.get() or None,
            **(getattr(record, "request_fields", None) or {}),
        }
        if record.exc_info or record.exc_text:
            fields["error"] = record.exc_text or self.formatException(record.exc_info)  # type: ignore[arg-type]
        return json.dumps({name: value for name, value in fields.items() if value is not None})
