"""Azure AI Search's routes: ``retrieve`` as JSON or as server-sent events; passages by their ids; definitions."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Self, TypeAlias
from urllib.parse import quote

from fastapi import APIRouter, Depends, Header, Query, Request, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from llama_index.core.data_structs.data_structs import IndexStruct
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.core.vector_stores import SimpleVectorStore
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.answering.sessions import parsed_states, session_owner, states_of
from llama_index_agentic_kb.errors import AgenticKBError, InvalidRequestError, NotFoundError
from llama_index_agentic_kb.knowledge_base import KnowledgeBase
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    FilterNode,
    MissingPart,
    Outcome,
    OutputMode,
    Principal,
    RetrievalRequest,
    RetrievalResponse,
    all_of,
    matches,
)
from llama_index_agentic_kb.schema.answer import NEW_SESSION
from llama_index_agentic_kb.server.catalog import MODELS, Kind, Stored
from llama_index_agentic_kb.server.errors import ForbiddenError, NotAcceptableError, described, error_body, status_of
from llama_index_agentic_kb.server.http import ServerContext, logger, read_body, request_id, streamed
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.sources import KnowledgeSource, ShardedSource
from llama_index_agentic_kb.sources.index import kind_of
from llama_index_agentic_kb.store.sessions import SessionStore
from llama_index_agentic_kb.wire.azure import VERSIONS, decode_retrieve, encode_response, known_version

REF: Final = "#/components/schemas/{model}"
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


_COMMON: Final = described(400, 401, 403, 429, 503)
_CREDENTIALS: Final = [  # described alone: ``Access`` reads them
    Security(APIKeyHeader(name="api-key", scheme_name="apiKey", auto_error=False)),
    Security(HTTPBearer(scheme_name="bearer", auto_error=False)),
]
_Version: TypeAlias = Annotated[str | None, Query(alias="api-version", json_schema_extra={"enum": [*VERSIONS]})]


def _body(model: type[BaseModel]) -> JsonObject:
    """Return the description of a body that a route reads itself."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def wants_events(accept: str) -> bool:
    """Return whether an ``Accept`` header asks for server-sent events; JSON is the default."""
    found = re.search(rf"(?:^|,)\s*{_EVENTS}\s*(;[^,]*)?(?:,|$)", accept.lower())
    return found is not None and not re.search(r";\s*q=[0.]*\s*(?:;|$)", found[1] or "")


# -- retrieve ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retrieval:
    """One ``retrieve`` request, decoded and authorised."""

    base: KnowledgeBase
    request: RetrievalRequest  # with the stored defaults
    context: ServerContext
    address: str  # URL of the server
    tenant: str
    state: KeptState | None  # where the conversation's state is kept; None if the request names no session

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response: they name the session."""
        return {} if self.state is None else {SESSION: self.state.id}

    async def respond(self, version: str) -> Response:
        """Return the response as JSON of an API version."""
        response = await self.base.aretrieve(self.request)
        await self._made(response)
        body = response.to_json()
        if version != VERSIONS[-1]:
            body = json.dumps(encode_response(response, api_version=version))
        return Response(body, response.status_code, self.headers, media_type="application/json")

    async def _made(self, response: RetrievalResponse) -> None:
        if self.state is not None:
            await self.state.keep(response)
        self.context.count(response)
        for reference in response.references:  # their citations lead to the server's page, which shows the passage
            parts = {"kb": self.base.name, "source": reference.knowledge_source_name, "passage": reference.node_id}
            named = "&".join(f"{name}={quote(value, safe='')}" for name, value in parts.items())
            reference.citation_url = f"{self.address}#{named}"

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the events of the stream, and a comment where none came for ``HEARTBEAT_SECONDS``.

        An error before the first of them is raised: it is an ordinary response. A later one is an event.
        """
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        work = asyncio.create_task(self._answer(queue))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        is_begun = False
        try:
            while True:
                try:
                    chunk = await asyncio.wait_for(queue.get(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    chunk = b": heartbeat\n\n"
                if chunk is None:
                    break
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
        base, started, completed = self.base, set[int](), set[int]()
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


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def retrieval_routes(context: ServerContext) -> APIRouter:
    """Return the routes of ``retrieve`` and of passages."""
    router = APIRouter(tags=["knowledge bases"], dependencies=_CREDENTIALS, responses=_COMMON)
    answered: JsonObject = {"model": RetrievalResponse}
    streamed_too = {**answered, "content": {_EVENTS: {"schema": {"type": "string"}}}}

    @router.post(
        "/knowledgebases/{name}/retrieve",
        operation_id="retrieve",
        responses={200: streamed_too, 206: answered, **described(404, 406, 413, 502)},
        openapi_extra=_body(RetrievalRequest),
    )
    async def retrieve(
        name: str,
        request: Request,
        asked_version: _Version = None,
        session: Annotated[str | None, Header(alias=SESSION)] = None,
    ) -> Response:
        """Answer a question, or return its evidence; with ``Accept: text/event-stream`` as events."""
        principal, tenant = await context.access.asker(request)
        version = known_version(asked_version or "")
        streams = wants_events(request.headers.get("accept", ""))
        if streams and version < STREAMING_SINCE:
            raise NotAcceptableError(f"{_EVENTS}: api-version {STREAMING_SINCE} and later stream; this is {version}")
        served = await context.service.base(name)
        sent = decode_retrieve(await read_body(request, context.limits.body_bytes), api_version=version)
        known: JsonObject = {"principal": principal}
        state = None
        if session is not None:
            state = await KeptState.opened(context.service.sessions, principal, session)
            known |= parsed_states({} if state.is_new else await state.store.aget_states(state.owner, state.id))
        asked = served.request(sent, **known)
        retrieval = Retrieval(served.base, asked, context, str(request.base_url), tenant, state)
        if streams:
            return await streamed(request, retrieval.chunks(), f"{_EVENTS}; charset=utf-8", retrieval.headers)
        return await context.answered(request, tenant, partial(retrieval.respond, version))

    @router.get("/knowledgebases/{name}/passage", operation_id="get_passage", responses=described(404))
    async def get_passage(name: str, source: str, id: str, request: Request) -> Response:  # noqa: A002 (a parameter)
        """Return a passage with its document's fields."""
        principal, _ = await context.access.asker(request)
        base = (await context.service.base(name)).base
        return JSONResponse(await find_passage(base, source, id, principal))

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

        Raises ``ForbiddenError`` if there is no user, and ``NotFoundError`` if the principal has no such session.
        """
        if principal is None or principal.user is None:
            raise ForbiddenError(f"{SESSION}: a session needs the token of a user")
        owner, is_new = session_owner(principal), named == NEW_SESSION
        if not is_new:
            await store.aget(owner, named)
        return cls(store, owner, uuid.uuid4().hex if is_new else named, is_new)

    async def keep(self, response: RetrievalResponse) -> None:
        """Store the state after a response; if that fails, the response says so in ``missing``."""
        states = {name: state.to_dict() for name, state in states_of(response).items()}
        try:
            await self.store.aset_states(self.owner, self.id, states, may_make=self.is_new)
        except AgenticKBError as error:  # what was answered, and maybe written, is not lost
            reason = f"the conversation's state was not stored: {error_message(error)}"
            response.missing.append(MissingPart(what="session", outcome=Outcome.ERROR, reason=reason))
            response.status_code = 206


# -- passages ----------------------------------------------------------------------------------------------------------


async def find_passage(base: KnowledgeBase, source: str, node_id: str, principal: Principal | None) -> JsonObject:
    """Return a passage as data; raise ``NotFoundError`` if there is none, or none that the principal may see."""
    found = base.sources.get(source)
    if found is not None and node_id.isprintable():
        principal = base.retriever.resolve_principal(principal)
        visible = all_of(found.effective_filter(found.permitted(principal)), base.retriever.filters)
        node = await Call(sync=lambda: _node(found, node_id, visible), what=f"passage of source {source!r}")
        if node is not None and (visible is None or matches(visible, node.metadata)):
            data = found.source_data(NodeWithScore(node=node)).to_dict()
            return {"knowledgeSourceName": source, "nodeId": node_id, **data}
    raise NotFoundError("passage: there is none of this id in this source")


def _node(source: KnowledgeSource, node_id: str, visible: FilterNode | None) -> BaseNode | None:
    """Return the node of a source's index with an ID, if its row in a store passes a filter."""
    if isinstance(source, ShardedSource):
        return next(filter(None, (_node(shard, node_id, visible) for shard in source.shards)), None)
    index = source.index
    if index is None or source.is_limited_to_ids or source.refusal(visible) is not None:
        return None
    found = _indexed(index, node_id)
    if found is None or visible is None or not isinstance(index, VectorStoreIndex):
        return found
    return found if node_id in kind_of(index.vector_store).passing([found], visible) else None


def _indexed(index: BaseIndex[IndexStruct], node_id: str) -> BaseNode | None:
    ids: Collection[str]
    if not isinstance(index, VectorStoreIndex):
        ids = getattr(index.index_struct, "nodes", ())
    elif isinstance(store := index.vector_store, SimpleVectorStore):
        ids = store.data.embedding_dict
    elif not store.stores_text:
        ids = index.index_struct.nodes_dict.values()
    else:
        try:
            return next((one for one in kind_of(store).with_ids([node_id]) if one.node_id == node_id), None)
        except NotImplementedError:  # the store finds nodes by their vectors only
            return None
    # Other indexes may share the document store.
    return index.docstore.get_node(node_id, raise_error=False) if node_id in ids else None


# -- definitions -------------------------------------------------------------------------------------------------------


def definition_routes(context: ServerContext) -> APIRouter:
    """Return the admin routes: definitions of knowledge bases and sources, their state, and service statistics."""

    async def check_admin(request: Request, version: _Version = None) -> None:
        await context.access.caller(request, admin=True)
        known_version(version or "")

    router = APIRouter(tags=["definitions"], dependencies=[*_CREDENTIALS, Depends(check_admin)], responses=_COMMON)
    _add(router, context.service, "knowledgeBase")
    _add(router, context.service, "knowledgeSource")

    @router.get("/knowledgesources/{name}/status", operation_id="get_source_status", responses=described(404))
    async def source_status(name: str) -> Response:
        """Return the state of a source; its documents are ingested by command, so that it is always active."""
        found = await context.service.find("knowledgeSource", name)
        return JSONResponse({"kind": found["kind"], "synchronizationStatus": "active"})

    @router.get("/servicestats", operation_id="get_service_statistics")
    async def service_statistics() -> Response:
        """Return the number of knowledge bases, sources and indexes."""
        used = {
            "knowledgeBasesCount": len(await context.service.shown("knowledgeBase")),
            "knowledgeSourcesCount": len(await context.service.shown("knowledgeSource")),
            "indexesCount": len(context.service.indexes),
        }
        counters = {name: {"usage": used.get(name, 0), "quota": None} for name in _COUNTERS}
        return JSONResponse({"counters": counters, "limits": {}, "indexersRuntime": {"usedSeconds": 0}})

    return router


def _add(router: APIRouter, service: KnowledgeService, kind: Kind) -> None:
    """Add the routes that list, create, replace, return and delete the definitions of a kind."""
    path, model = f"/{kind.lower()}s", MODELS[kind]
    sent = _body(model)

    @router.get(path, operation_id=f"list_{kind}s")
    async def list_all(
        request: Request,
        search: str = "",
        after: str = "",
        size: Annotated[int, Query(alias="pageSize", ge=1, le=MAX_PAGE)] = MAX_PAGE,
    ) -> Response:
        """Return a page of definitions in order of name: those after ``after`` whose names begin with ``search``."""
        found = [one for one in await service.shown(kind) if one["name"] > after and one["name"].startswith(search)]
        page: JsonObject = {"value": found[:size]}
        if len(found) > size:
            page["@odata.nextLink"] = str(request.url.include_query_params(after=found[size - 1]["name"]))
        return JSONResponse(page)

    @router.post(
        path, operation_id=f"create_{kind}", status_code=201, responses=described(409, 413), openapi_extra=sent
    )
    async def create(request: Request) -> Response:
        """Store a new definition."""
        definition = model.parse(await read_body(request, MAX_BYTES))
        stored, _ = await service.put(kind, definition, create=True)
        return _shown(stored, 201)

    replaced: dict[int | str, JsonObject] = {201: {"content": {"application/json": {}}}, **described(409, 412, 413)}

    @router.put(path + "/{name}", operation_id=f"put_{kind}", responses=replaced, openapi_extra=sent)
    async def put(name: str, request: Request) -> Response:
        """Store a definition, new or in place of another; ``If-Match`` and ``If-None-Match`` are obeyed."""
        definition = model.parse(await read_body(request, MAX_BYTES))
        if definition.name != name:
            raise InvalidRequestError(f"name: the body names {definition.name!r}, and the path {name!r}")
        stored, is_new = await service.put(kind, definition, request.headers)
        return _shown(stored, 201 if is_new else 200)

    @router.get(path + "/{name}", operation_id=f"get_{kind}", responses=described(404))
    async def get(name: str) -> Response:
        """Return a definition."""
        found = await service.find(kind, name)
        return JSONResponse(found, headers={"ETag": found["@odata.etag"]})

    @router.delete(path + "/{name}", operation_id=f"delete_{kind}", status_code=204, responses=described(404, 409, 412))
    async def delete(name: str, request: Request) -> Response:
        """Delete a definition; a source that a knowledge base uses is kept."""
        await service.remove(kind, name, request.headers)
        return Response(status_code=204)


def _shown(stored: Stored, status: int) -> Response:
    return JSONResponse(stored.to_dict(), status, {"ETag": stored.etag})
