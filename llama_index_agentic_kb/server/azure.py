"""Azure AI Search's routes: ``retrieve`` as JSON or as server-sent events; definitions of bases and sources."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.answering.sessions import parsed_states, session_owner, states_of
from llama_index_agentic_kb.errors import AgenticKBError, InvalidRequestError
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    MissingPart,
    Outcome,
    OutputMode,
    Principal,
    RetrievalRequest,
    RetrievalResponse,
)
from llama_index_agentic_kb.schema.answer_query import NEW_SESSION
from llama_index_agentic_kb.server.catalog import Conditions, Kind, Stored
from llama_index_agentic_kb.server.definitions import KnowledgeBaseDefinition, SourceDefinition, check_name
from llama_index_agentic_kb.server.errors import ForbiddenError, NotAcceptableError, error_body, status_of
from llama_index_agentic_kb.server.http import (
    GONE,
    ServerContext,
    logger,
    read_body,
    request_id,
    streamed,
    unless_gone,
)
from llama_index_agentic_kb.server.page import link_passages
from llama_index_agentic_kb.server.service import ServedBase
from llama_index_agentic_kb.store.sessions import SessionStore
from llama_index_agentic_kb.wire.azure import VERSIONS, decode_retrieve, encode_response, known_version

STREAMING_SINCE: Final = "2026-08-01-preview"
HEARTBEAT_SECONDS: Final = 15.0
_EVENTS: Final = "text/event-stream"
MAX_BYTES: Final = 1_000_000  # maximum size of a definition
MAX_PAGE: Final = 1_000
SESSION: Final = "x-agentic-kb-session"
"""The header of a request and its response that names the session; "-" makes one."""
_COUNTERS: Final = (
    "aliasesCount documentCount indexesCount indexersCount dataSourcesCount storageSize synonymMaps skillsetCount "
    "vectorIndexSize knowledgeBasesCount knowledgeSourcesCount"
).split()


def api_version(request: Request) -> str:
    """Return the API version of a request; the newest if it names none."""
    return known_version(request.query_params.get("api-version", ""))


def wants_events(accept: str) -> bool:
    """Return whether an ``Accept`` header asks for server-sent events; JSON is the default."""
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        if kind == _EVENTS:
            weights = [piece[2:] for piece in parameters if piece.startswith("q=")]
            return not weights or weights[0].strip("0.") != ""
    return False


# -- retrieve ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retrieval:
    """One ``retrieve`` request, decoded and authorised, with the stored defaults; ``address`` is the server's URL.

    ``state`` is where the conversation's state is kept; None if the request names no session.
    """

    served: ServedBase
    request: RetrievalRequest
    context: ServerContext
    address: str
    tenant: str
    state: KeptState | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response that name the session."""
        return {} if self.state is None else {SESSION: self.state.id}

    async def respond(self, version: str) -> Response:
        """Return the response as JSON of an API version."""
        async with self.context.queue.place(self.tenant):
            response = await self.served.base.aretrieve(self.request)
        await self._made(response)
        is_newest = version == VERSIONS[-1]
        body = response.to_json() if is_newest else json.dumps(encode_response(response, api_version=version))
        return Response(body, response.status_code, self.headers, media_type="application/json")

    async def _made(self, response: RetrievalResponse) -> None:
        if self.state is not None:
            await self.state.keep(response)
        self.context.count(response)
        link_passages(response, self.address, self.served.base.name)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the events of the stream, and a comment where none came for ``HEARTBEAT_SECONDS``.

        An error before the first of them is raised: it is an ordinary response. A later one is an event.
        """
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        work = asyncio.create_task(self._answer(queue))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        is_begun = False
        try:
            while (chunk := await _next(queue)) is not None:
                is_begun = True
                yield chunk
            if (error := work.exception()) is not None:
                if not is_begun:
                    raise error
                if status_of(error) == 500:  # noqa: PLR2004 (the status of errors that nobody foresaw)
                    logger.error("a stream failed", exc_info=error)
                yield _event("error", json.dumps(error_body(error, request_id.get())))
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work

    async def _answer(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Put the events of the answer into a queue; the first says what was asked."""
        base, started, completed = self.served.base, set[int](), set[int]()
        mode = self.request.output_mode or base.output_mode
        effort = self.request.retrieval_reasoning_effort or base.retriever.effort
        begun = {
            "requestId": request_id.get(),
            "knowledgeBaseName": base.name,
            "outputMode": mode.value,
            "reasoningEffort": {"kind": effort.value},
        }

        def put(name: str, data: str) -> None:
            if begun:  # not before the first step: without any, an error is an ordinary response
                queue.put_nowait(_event("retrieval.started", json.dumps(begun)))
                begun.clear()
            queue.put_nowait(_event(name, data))

        def observe(record: ActivityRecord) -> None:
            if record.id not in started:
                put("activity.started", record.to_json())
                started.add(record.id)
            if record.completed_at is not None and record.id not in completed:  # later changes are in the response
                completed.add(record.id)
                put("activity.completed", record.to_json())

        async with self.context.queue.place(self.tenant):
            async for item in base.astream_retrieve(self.request, on_activity=observe):
                if not isinstance(item, RetrievalResponse):
                    put("answer.delta", json.dumps({"messageIndex": 0, "delta": item}))
                    continue
                await self._made(item)
                shown = item.to_dict()
                if mode is OutputMode.ANSWER_SYNTHESIS and item.response:
                    put("answer.completed", json.dumps({"messageIndex": 0, "message": shown["response"][0]}))
                put("references.completed", json.dumps(shown.get("references", [])))
                put("response.completed", json.dumps({"statusCode": item.status_code, "response": shown}))


async def _next(queue: asyncio.Queue[bytes | None]) -> bytes | None:
    try:
        return await asyncio.wait_for(queue.get(), HEARTBEAT_SECONDS)
    except TimeoutError:
        return b": heartbeat\n\n"


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def retrieval_routes(context: ServerContext) -> APIRouter:
    """Return the route of ``retrieve``."""
    router = APIRouter()

    @router.post("/knowledgebases/{name}/retrieve", operation_id="retrieve", tags=["knowledge bases"])
    async def retrieve(name: str, request: Request) -> Response:
        """Answer a question, or return its evidence; with ``Accept: text/event-stream`` as events."""
        principal, tenant = await context.access.asker(request)
        version = api_version(request)
        streams = wants_events(request.headers.get("accept", ""))
        if streams and version < STREAMING_SINCE:
            raise NotAcceptableError(f"{_EVENTS}: api-version {STREAMING_SINCE} and later stream; this is {version}")
        served = await context.service.base(name)
        sent = decode_retrieve(await read_body(request, context.max_body_bytes), api_version=version)
        asked, named, state = sent.model_copy(update={"principal": principal}), request.headers.get(SESSION), None
        if named is not None:
            state = await KeptState.opened(context.service.sessions, principal, named)
            asked = await state.added_to(asked)
        retrieval = Retrieval(served, served.request(asked), context, str(request.base_url), tenant, state)
        if streams:
            return await streamed(request, retrieval.chunks(), f"{_EVENTS}; charset=utf-8", retrieval.headers)
        return await unless_gone(request.receive, retrieval.respond(version)) or GONE

    return router


# -- sessions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state of a conversation (``ScopeState``, ``DialogueState``), kept in a session of its principal.

    The messages are the client's, as in any request; the session has no turns.
    """

    store: SessionStore
    owner: str
    id: str
    is_new: bool
    """Whether ``keep`` makes the session: a question that is refused or fails leaves none."""

    @classmethod
    async def opened(cls, store: SessionStore, principal: Principal | None, named: str) -> Self:
        """Return the state of a session that a principal has, or of a new one.

        Raises:
            ForbiddenError: There is no user.
            NotFoundError: The principal has no such session.
        """
        if principal is None or principal.user is None:
            raise ForbiddenError(f"{SESSION}: a session needs the token of a user")
        owner, is_new = session_owner(principal), named == NEW_SESSION
        if not is_new:
            await store.aget(owner, named)
        return cls(store, owner, uuid.uuid4().hex if is_new else named, is_new)

    async def added_to(self, request: RetrievalRequest) -> RetrievalRequest:
        """Return a request with the state."""
        stored = {} if self.is_new else await self.store.aget_states(self.owner, self.id)
        return request.model_copy(update=parsed_states(stored))

    async def keep(self, response: RetrievalResponse) -> None:
        """Store the state after a response; if that fails, the response says so in ``missing``."""
        states = {name: state.to_dict() for name, state in states_of(response).items()}
        try:
            await self.store.aset_states(self.owner, self.id, states, may_make=self.is_new)
        except AgenticKBError as error:  # what was answered, and maybe written, is not lost
            reason = f"the conversation's state was not stored: {error_message(error)}"
            response.missing.append(MissingPart(what="session", outcome=Outcome.ERROR, reason=reason))
            response.status_code = 206


# -- definitions -------------------------------------------------------------------------------------------------------


def definition_routes(context: ServerContext) -> APIRouter:
    """Return the routes of definitions."""

    async def check_admin(request: Request) -> None:
        await context.access.caller(request, admin=True)
        api_version(request)

    router = APIRouter(tags=["definitions"], dependencies=[Depends(check_admin)])
    _add(router, context, "knowledgeBase", KnowledgeBaseDefinition)
    _add(router, context, "knowledgeSource", SourceDefinition)

    @router.get("/knowledgesources/{name}/status", operation_id="get_source_status")
    async def source_status(name: str) -> Response:
        """Return the state of a source; its documents are ingested by command, so that it is always active."""
        found = await context.service.find("knowledgeSource", name)
        return JSONResponse({"kind": found["kind"], "synchronizationStatus": "active"})

    @router.get("/servicestats", operation_id="get_service_statistics")
    async def service_statistics() -> Response:
        """Return the number of knowledge bases, sources and indexes."""
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
        return JSONResponse(_page(await service.list_all(kind), request))

    @router.post(path, operation_id=f"create_{kind}", status_code=201)
    async def create(request: Request) -> Response:
        """Store a new definition."""
        definition = model.parse(await read_body(request, MAX_BYTES))
        stored, _ = await service.put(kind, definition, create=True)
        return _shown(stored, 201)

    @router.put(path + "/{name}", operation_id=f"put_{kind}")
    async def put(name: str, request: Request) -> Response:
        """Store a definition, new or in place of another; ``If-Match`` and ``If-None-Match`` are obeyed."""
        definition = model.parse(await read_body(request, MAX_BYTES))
        check_name(definition, name)
        stored, is_new = await service.put(kind, definition, _conditions(request))
        return _shown(stored, 201 if is_new else 200)

    @router.get(path + "/{name}", operation_id=f"get_{kind}")
    async def get(name: str) -> Response:
        """Return a definition."""
        found = await service.find(kind, name)
        return JSONResponse(found, headers={"ETag": found["@odata.etag"]})

    @router.delete(path + "/{name}", operation_id=f"delete_{kind}", status_code=204)
    async def delete(name: str, request: Request) -> Response:
        """Delete a definition; a source that a knowledge base uses is kept."""
        await service.remove(kind, name, _conditions(request))
        return Response(status_code=204)


def _page(found: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    params = request.query_params
    after, prefix, size = params.get("after", ""), params.get("search", ""), params.get("pageSize", "1000")
    if not re.fullmatch("[0-9]{1,4}", size) or not 1 <= int(size) <= MAX_PAGE:
        raise InvalidRequestError(f"pageSize: a number from 1 to {MAX_PAGE:,} is expected")
    rest = [one for one in found if one["name"] > after and one["name"].startswith(prefix)]
    shown = rest[: int(size)]
    if len(rest) == len(shown):
        return {"value": shown}
    following = request.url.include_query_params(after=shown[-1]["name"])
    return {"value": shown, "@odata.nextLink": str(following)}


def _conditions(request: Request) -> Conditions:
    return Conditions(request.headers.get("if-match"), request.headers.get("if-none-match"))


def _shown(stored: Stored, status: int) -> Response:
    return JSONResponse(stored.to_dict(), status, {"ETag": stored.etag})
