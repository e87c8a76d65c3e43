"""Google's routes (Discovery Engine v1): answers, sessions, checks. A data store or engine is a knowledge base.

``projects/P/locations/L/collections/C/engines/KB/servingConfigs/S:answer`` asks the knowledge base ``KB``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from llama_index_agentic_kb._aio import arun, deadline_after
from llama_index_agentic_kb.answering.sessions import session_owner
from llama_index_agentic_kb.errors import AgenticKBError, NotFoundError
from llama_index_agentic_kb.grounding.check import grounding_ledger
from llama_index_agentic_kb.knowledge_base import KnowledgeBase
from llama_index_agentic_kb.schema import Principal
from llama_index_agentic_kb.schema.answer import AnswerQuery, AnswerResponse
from llama_index_agentic_kb.search.rerank import arank
from llama_index_agentic_kb.server.http import GOOGLE, ServerContext, logger, read_body, streamed
from llama_index_agentic_kb.server.service import ServedBase
from llama_index_agentic_kb.store.sessions import SessionStore
from llama_index_agentic_kb.wire import google as codec
from llama_index_agentic_kb.wire import google_messages as names

_KINDS: Final = ("answers", "sessions", "servingConfigs", "groundingConfigs", "rankingConfigs")
_SECONDS: Final = 30.0  # time limit of a check or a ranking
_STREAM_TYPE: Final = "application/json; charset=UTF-8"


@dataclass(frozen=True, slots=True)
class _Call:
    """One authenticated request."""

    request: Request
    name: str  # resource name in its path, without the method after the colon
    context: ServerContext
    principal: Principal | None  # on whose behalf it runs
    tenant: str  # whose share it uses
    sessions: SessionStore  # of all owners
    owner: str  # whose the sessions are
    as_int: bool  # whether the client wants enums as numbers

    async def body(self) -> bytes:
        """Return the request's body, ``{}`` if it is empty; raise an error if it exceeds the limit."""
        return await read_body(self.request, self.context.limits.body_bytes) or b"{}"

    async def base(self, parent: str) -> ServedBase:
        """Return the knowledge base that a name's parent stands for, or raise ``NotFoundError``."""
        return await self.context.service.base(parent.rpartition("/")[2])


def google_routes(context: ServerContext) -> APIRouter:
    """Return the routes; one path takes all resource names, as they hold slashes and a method after a colon."""
    router = APIRouter(prefix=GOOGLE.rstrip("/"), tags=["Google"])

    @router.api_route("/{name:path}", methods=["GET", "POST", "PATCH", "DELETE"], include_in_schema=False)
    async def handle(name: str, request: Request) -> Response:
        """Answer by method and resource name."""
        principal, tenant = await context.access.asker(request)
        alt = request.query_params.get("$alt", "") + request.query_params.get("alt", "")
        resource, _, verb = name.partition(":")
        sessions, owner = context.service.sessions, session_owner(principal)
        call = _Call(request, resource, context, principal, tenant, sessions, owner, "enum-encoding=int" in alt)
        parts = resource.split("/")
        kind = next((one for one in _KINDS if one in parts[-2:]), "")
        listed = kind == "sessions" and parts[-1] == "sessions"
        method = _METHODS.get((request.method, f"{kind}*" if listed else kind, verb))
        if method is None:
            raise NotFoundError(f"{request.method} {name[:200]}: there is no such method")
        return await method(call)

    return router


# -- answers -----------------------------------------------------------------------------------------------------------


async def _query(call: _Call) -> tuple[KnowledgeBase, AnswerQuery, str]:
    """Return the knowledge base and the query of an ``:answer`` or ``:streamAnswer`` request, and the base's name."""
    parent = names.parse_serving_config(call.name)
    served = await call.base(parent)
    query = codec.decode_answer_query(await call.body(), serving_config=call.name)
    request = served.request(query.request, principal=call.principal)
    return served.base, query.model_copy(update={"request": request}), parent


async def _answer(call: _Call) -> Response:
    base, query, parent = await _query(call)

    async def answered() -> Response:
        made = await base.aanswer(query)
        call.context.count(made.account)
        return JSONResponse(
            codec.encode_answer_response(made.answer, parent=parent, session=made.session, enum_as_int=call.as_int)
        )

    return await call.context.answered(call.request, call.tenant, answered)


async def _stream_answer(call: _Call) -> Response:
    base, query, parent = await _query(call)

    async def pieces() -> AsyncGenerator[bytes]:
        stream, is_begun = codec.AnswerStream(parent=parent, enum_as_int=call.as_int), False
        try:
            async with call.context.queue.place(call.tenant):
                async for piece in base.astream_answer(query):
                    if isinstance(piece, AnswerResponse):
                        call.context.count(piece.account)
                    if data := stream.piece(piece):
                        is_begun = True
                        yield data
        except Exception as error:
            if not is_begun:
                raise
            if not isinstance(error, AgenticKBError):
                logger.error("a stream failed", exc_info=error)
            yield stream.fail()  # Google's client takes no error inside of an array

    return await streamed(call.request, pieces(), _STREAM_TYPE)


async def _get_answer(call: _Call) -> Response:
    parent, session, answer_id = names.parse_answer_name(call.name)
    await call.base(parent)
    answer = await call.sessions.aget_answer(call.owner, session, answer_id)
    return JSONResponse(codec.encode_answer(answer, name=call.name, enum_as_int=call.as_int))


# -- checks and ranking ------------------------------------------------------------------------------------------------


async def _check(call: _Call) -> Response:
    query = codec.decode_check_grounding(await call.body(), grounding_config=call.name)

    async def checked() -> Response:
        ledger = await arun(grounding_ledger(query, deadline=deadline_after(_SECONDS)))
        return JSONResponse(codec.encode_check_grounding(query, ledger))

    return await call.context.answered(call.request, call.tenant, checked)


async def _rank(call: _Call) -> Response:
    query = codec.decode_rank(await call.body(), ranking_config=call.name)

    async def ranked() -> Response:
        return JSONResponse(codec.encode_rank(query, await arank(query.query, query.records, timeout=_SECONDS)))

    return await call.context.answered(call.request, call.tenant, ranked)


# -- sessions ----------------------------------------------------------------------------------------------------------


async def _all_sessions(call: _Call) -> Response:
    """Create a session, or list them."""
    parent = names.parse_parent(call.name.rpartition("/")[0])
    await call.base(parent)
    if call.request.method == "POST":
        session = await call.sessions.acreate(call.owner, codec.decode_create_session(await call.body()))
        return JSONResponse(codec.encode_session(session, parent, enum_as_int=call.as_int))
    params = {name: value for name, value in call.request.query_params.items() if name in _LISTING}
    page = await call.sessions.alist_sessions(call.owner, codec.decode_list_sessions(params))
    return JSONResponse(codec.encode_session_page(page, parent, enum_as_int=call.as_int))


async def _one_session(call: _Call) -> Response:
    """Return, change or delete a session."""
    (parent, name), method, params = names.parse_session_name(call.name), call.request.method, call.request.query_params
    await call.base(parent)
    if method == "DELETE":
        await call.sessions.adelete(call.owner, name)
        return JSONResponse({})
    if method == "PATCH":
        changes = codec.decode_update_session(await call.body(), params.get("updateMask", ""))
        session = await call.sessions.aupdate(call.owner, name, changes)
    else:
        session = await call.sessions.aget(call.owner, name, include_answers=codec.wants_answer_details(dict(params)))
    return JSONResponse(codec.encode_session(session, parent, enum_as_int=call.as_int))


_LISTING: Final = frozenset({"pageSize", "page_size", "pageToken", "page_token", "filter", "orderBy", "order_by"})
_METHODS: Final[dict[tuple[str, str, str], Callable[[_Call], Awaitable[Response]]]] = {
    ("POST", "servingConfigs", "answer"): _answer,
    ("POST", "servingConfigs", "streamAnswer"): _stream_answer,
    ("POST", "groundingConfigs", "check"): _check,
    ("POST", "rankingConfigs", "rank"): _rank,
    ("GET", "answers", ""): _get_answer,
    **{(method, "sessions*", ""): _all_sessions for method in ("GET", "POST")},
    **{(method, "sessions", ""): _one_session for method in ("GET", "PATCH", "DELETE")},
}
"""By HTTP method, kind of resource (* for the collection) and verb."""
