"""Each knowledge base as an MCP server with one tool, ``knowledge_base_retrieve``, over HTTP or stdio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Final, TypeAlias

import mcp_types
from fastapi import APIRouter, Request
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llama_index_agentic_kb._types import JsonMapping
from llama_index_agentic_kb.errors import AgenticKBError, InvalidRequestError
from llama_index_agentic_kb.knowledge_base import KnowledgeBase
from llama_index_agentic_kb.schema import Principal, RetrievalRequest, RetrievalResponse
from llama_index_agentic_kb.server.errors import error_body
from llama_index_agentic_kb.server.http import ServerContext, logger, request_id
from llama_index_agentic_kb.server.service import ServedBase

TOOL: Final = "knowledge_base_retrieve"
_TARGET: Final = "agentic_kb.mcp_target"
_INPUT: Final[JsonMapping] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "minLength": 1, "description": "The question, complete in itself."},
        "outputMode": {
            "type": "string",
            "enum": ["extractiveData", "answerSynthesis"],
            "description": "The passages themselves, or an answer with citations. Defaults to the knowledge base's.",
        },
        "maxOutputDocuments": {"type": "integer", "minimum": 1, "description": "The maximum number of passages."},
    },
    "required": ["query"],
    "additionalProperties": False,
}

Target: TypeAlias = tuple[ServedBase, Principal | None, Callable[[], AbstractAsyncContextManager[None]]]
"""The knowledge base and principal of a message, and what holds a question's place."""
Context: TypeAlias = ServerRequestContext[dict[str, object], Request]


def tool_server(
    target_of: Callable[[Context], Target], count: Callable[[RetrievalResponse], None]
) -> Server[dict[str, object]]:
    """Return an MCP server with the tool; ``target_of`` says what a message is for, ``count`` gets each response."""

    async def list_tools(context: Context, _: mcp_types.PaginatedRequestParams | None) -> mcp_types.ListToolsResult:
        base = target_of(context)[0].base
        tool = mcp_types.Tool(
            name=TOOL,
            description=f"Answers questions from the knowledge base {base.name}, with references. {base.description}",
            input_schema=dict(_INPUT),
            annotations=mcp_types.ToolAnnotations(read_only_hint=True),
        )
        return mcp_types.ListToolsResult(tools=[tool])

    async def call_tool(context: Context, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
        served, principal, place = target_of(context)
        try:
            request = served.request(_request(params), principal=principal)
            async with place():
                response = await served.base.aretrieve(request)
        except Exception as error:  # noqa: BLE001 (a tool's errors are results, so that the model sees them)
            message = error_body(error, request_id.get())["error"]["message"]
            if isinstance(error, AgenticKBError):
                message = f"{message.rstrip('.')}. {error.remedy}"
            else:
                logger.error("a tool call failed", exc_info=error)
            return mcp_types.CallToolResult(content=[mcp_types.TextContent(text=message)], is_error=True)
        count(response)
        named = [f"[ref_id:{one.id}] {one.title} {one.url or one.doc_key}" for one in response.references]
        missing = [f"missing: {part.what}: {part.reason}" for part in response.missing]
        text = mcp_types.TextContent(text="\n".join([response.text, *named, *missing]))
        return mcp_types.CallToolResult(content=[text], structured_content=response.to_dict())

    return Server(
        "agentic-kb", version=version("llama-index-agentic-kb"), on_list_tools=list_tools, on_call_tool=call_tool
    )


def _request(params: mcp_types.CallToolRequestParams) -> RetrievalRequest:
    arguments = dict(params.arguments or {})
    if params.name != TOOL:
        raise InvalidRequestError(f"there is no tool {params.name[:60]!r}; there is {TOOL}")
    unknown = sorted(arguments.keys() - _INPUT["properties"].keys())
    if unknown or not isinstance(query := arguments.pop("query", None), str):
        raise InvalidRequestError(f"{', '.join(unknown) or 'query'}: the tool takes {', '.join(_INPUT['properties'])}")
    return RetrievalRequest.parse({"messages": [{"role": "user", "content": query}], **arguments})


def mcp_routes(context: ServerContext) -> tuple[APIRouter, Callable[[], AbstractAsyncContextManager[None]]]:
    """Return the route ``/knowledgebases/{name}/mcp``, and what is to be entered while the server runs.

    The servers of all knowledge bases are stateless, so that any of several processes may get a message.
    """

    def target_of(message: Context) -> Target:
        assert message.request is not None  # it came over HTTP
        target: Target = message.request.scope[_TARGET]
        return target

    router, server = APIRouter(tags=["MCP"]), tool_server(target_of, context.count)
    manager: StreamableHTTPSessionManager | None = None

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        nonlocal manager
        manager = StreamableHTTPSessionManager(  # a new one, as each runs only once
            server, json_response=True, stateless=True, max_request_body_size=context.limits.body_bytes
        )
        async with manager.run():
            yield

    class Handled(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            assert manager is not None  # the server runs
            await manager.handle_request(scope, receive, send)

    @router.post("/knowledgebases/{name}/mcp", include_in_schema=False)
    async def messages(name: str, request: Request) -> Response:
        """Handle a message of the Model Context Protocol (streamable HTTP, without streams that a GET opens)."""
        principal, tenant = await context.access.asker(request)
        request.scope[_TARGET] = (await context.service.base(name), principal, partial(context.queue.place, tenant))
        return Handled()

    return router, running


async def serve_stdio(base: KnowledgeBase) -> None:
    """Serve a knowledge base over stdin and stdout until stdin ends."""
    target: Target = (ServedBase(base), None, nullcontext)
    server = tool_server(lambda _: target, lambda _: None)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())
