"""The real MCP client, over HTTP and stdio."""

from __future__ import annotations

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from tests.server.serving import QUERY

TOOL = "knowledge_base_retrieve"


@pytest.mark.parametrize("path", ["knowledgebases/space/mcp", "knowledgebases('space')/mcp"])
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_client_asks_over_http(url: str, path: str, mode: str) -> None:
    """The tool is listed with the base's name, answers with references, and reports errors as results."""
    async with (
        httpx2.AsyncClient(headers={"api-key": QUERY}, timeout=60) as http,
        Client(streamable_http_client(f"{url}/{path}", http_client=http), mode=mode) as client,
    ):
        (tool,) = (await client.list_tools()).tools
        assert (tool.name, "space" in (tool.description or "")) == (TOOL, True)
        answered = await client.call_tool(TOOL, {"query": "How tall was the Saturn V?"})
        assert "110.6 m tall [ref_id:0]" in answered.content[0].text  # type: ignore[union-attr]
        assert answered.structured_content["references"][0]["title"] == "Saturn"
        refused = await client.call_tool(TOOL, {"query": "x", "surprise": 1})
        assert (refused.is_error, "surprise" in refused.content[0].text) == (True, True)  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_no_stream_is_held_open(url: str, method: str) -> None:
    """The server keeps no state to stream or delete; an open stream would take a place among running requests."""
    async with httpx2.AsyncClient(headers={"api-key": QUERY, "last-event-id": "1"}) as http:
        response = await http.request(method, f"{url}/knowledgebases/space/mcp")
    assert response.status_code == 405


async def test_nobody_asks_without_a_key(url: str) -> None:
    """MCP needs the same credentials as every other route."""
    async with httpx2.AsyncClient() as http:
        response = await http.post(
            f"{url}/knowledgebases/space/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "ping"}
        )
    assert response.status_code == 401
