from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import pytest
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool, RetrieverTool, ToolMetadata, ToolOutput
from llama_index.core.workflow import Context
from llama_index.tools.mcp import BasicMCPClient
from mcp.server import MCPServer
from pydantic import BaseModel

from llama_index_agentic_kb import (
    ConfigurationError,
    DeniedError,
    Principal,
    Resilience,
    RetrievalError,
    ToolSource,
    WriteLedger,
    Writes,
    mcp_sources,
)
from llama_index_agentic_kb._aio import arun
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.sources.tool import WriteRecord, _call_tool, _on_one_loop, parameters_of, result_nodes
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.server.serving import Served
from tests.sources.conftest import search, searching


class Size(enum.Enum):
    """An enumeration: pydantic's schema refers to it."""

    SMALL = "S"
    LARGE = "L"


class Arguments(BaseModel):
    order: str
    count: int = 1
    price: float | None = None
    size: Size = Size.SMALL
    day: date | None = None
    express: bool = False


KINDS = parameters_of(Arguments.model_json_schema())
PATTERN = {"type": "string", "pattern": r"^A-\d{4}$"}
OTHERS = parameters_of(
    {
        "properties": {
            "code": PATTERN,
            "colour": {"enum": ["dark red", "blue", 7]},
            "mail": {"type": "string", "format": "email"},
            "strange": {"type": "string", "pattern": "("},
            "slow": {"type": "string", "pattern": "^(a+)+b$"},  # minutes in an engine that backtracks
            "wrong": {"type": 7},
            "remote": {"$ref": "http://127.0.0.1:9/schema.json"},
        }
    }
)


def test_a_schema_is_read() -> None:
    """References and optional variants are resolved; descriptions are labels."""
    assert [one.name for one in KINDS.values() if one.required] == ["order"]
    assert KINDS["size"].options == ["S", "L"]
    assert [KINDS[name].free for name in ("order", "count", "day")] == [True, False, False]
    assert parameters_of({"properties": {"order_id": {}}})["order_id"].label == "order id"


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("order", 4711, "4711"),
        ("count", "3", 3),
        ("price", "2.50", 2.5),
        ("size", "l", "L"),
        ("day", "2026-11-22", "2026-11-22"),
        ("express", "yes", True),
    ],
)
def test_values_are_read_as_their_types(name: str, value: Any, read: Any) -> None:
    """A model writes numbers as text, and text as numbers."""
    made = KINDS[name].read(value)
    assert (made, type(made)) == (read, type(read))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("order", value) for value in (None, ["a"], "x" * 501)),
        *(("count", value) for value in ("three", 1.5, True)),
        *(("size", "XL"), ("day", "tomorrow"), ("express", "maybe")),
    ],
)
def test_values_that_do_not_fit_are_refused(name: str, value: Any) -> None:
    """The error names the parameter."""
    with pytest.raises(ValueError, match=name):
        KINDS[name].read(value)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("code", "It is a-4711, or A-4712?", ["A-4711", "A-4712"]),
        ("code", "AA-4711 A-47111 xA-4711", []),
        ("colour", "Dark-red, please", ["dark red"]),
        ("colour", "number 7", [7]),
        ("mail", "write to ann@example.org.", ["ann@example.org"]),
        ("strange", "(", []),
        ("count", "take 3 of them, at 2.50 each", [3]),
        ("price", "at 2.50 each", [2.5]),
        ("day", "on 2026-11-22, not 2026-13-40", ["2026-11-22"]),
        ("order", "anything", []),
        ("count", " ".join(map(str, range(500))), list(range(20))),
    ],
)
def test_values_are_found_in_words(name: str, text: str, found: list[Any]) -> None:
    """By pattern, options, format and type, as whole words; a decimal is no whole number; a bound is 20."""
    assert {**KINDS, **OTHERS}[name].found_in(text) == found


TWICE = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
ENDLESS = {"d0": {"anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d0"}]}}
NESTED: dict[str, Any] = reduce(lambda inner, _: {"not": inner}, range(900), dict[str, Any]())
ITSELF = {"d0": {"if": {"$ref": "#"}, "then": {"$ref": "#"}}}


@pytest.mark.parametrize("shared", [TWICE, ENDLESS, ITSELF], ids=["doubling", "endless", "itself"])
def test_references_that_multiply_are_not_followed(shared: dict[str, Any]) -> None:
    """Forty lines of a server's schema would be 2 ** 40 checks, on the event loop."""
    order = parameters_of({"$defs": shared, "properties": {"order": {"type": "string", "$ref": "#/$defs/d0"}}})
    with pytest.raises(ValueError, match="can't be checked"):
        order["order"].read("A-7")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{n}": {"type": "string"} for n in range(5_000)}},
        {"properties": {"order": NESTED}},
        {"properties": [1]},
        {"properties": {"order": {"anyOf": "null"}}},
        {"properties": {"order": {}}, "required": 5},
        {"properties": {"order": {"$ref": "#/$defs/0"}}, "$defs": [1]},
    ],
    ids=["large", "deep", "list", "text", "number", "definitions"],
)
def test_schemas_of_other_forms_are_refused(schema: Any) -> None:
    """A server's schema may be anything: it is refused where the tool is declared, never in a question."""
    with pytest.raises(ConfigurationError, match="schema can't be used"):
        ToolSource(FunctionTool(print, ToolMetadata("x", "x")), schema=schema)


def test_references_of_a_schema_are_never_fetched() -> None:
    """A server's schema can't make this process send requests; what can't be checked fits nothing."""
    for name in ("remote", "wrong", "strange"):
        with pytest.raises(ValueError, match=f"{name}: its schema can't be checked"):
            OTHERS[name].read("x")


def weather(city: str) -> dict[str, str]:
    """The weather in a city."""
    return {"city": city, "sky": "clear"}


async def aweather(city: str, days: int = 1) -> str:
    """The weather in a city."""
    return f"clear in {city} for {days} days"


def texts(source: ToolSource, arguments: str) -> list[str]:
    return [node.get_content() for node in search(source, arguments).nodes]


@pytest.mark.parametrize("make", [lambda f: f, FunctionTool.from_defaults], ids=["function", "tool"])
async def test_every_tool_is_called_at_every_door(make: Callable[[Any], Any]) -> None:
    """Functions and LlamaIndex's tools, sync and async, with their own names and descriptions."""
    sync, native = ToolSource(make(weather)), ToolSource(make(aweather))
    assert (sync.name, "weather in a city" in sync.description, sync.kind) == ("weather", True, "tool")
    assert [*native.parameters] == ["city", "days"]
    for source, text in ((sync, '{"city": "Oslo", "sky": "clear"}'), (native, "clear in Oslo for 1 days")):
        assert texts(source, '{"city": "Oslo"}') == [text]
        found = await arun(searching(source, '{"city": "Oslo"}'))
        assert [node.get_content() for node in found.nodes] == [text]


def test_a_retriever_tool_returns_its_own_nodes() -> None:
    """They keep their metadata."""
    node = TextNode(text="rain report", metadata={"title": "Rain"})
    source = ToolSource(RetrieverTool.from_defaults(MemoryRetriever([node]), name="rain", description="rain"))
    (found,) = search(source, '{"input": "rain"}').nodes
    assert found.node.metadata["title"] == "Rain"


@pytest.mark.parametrize(
    ("raw", "content", "text"),
    [
        ({"a": [1, None]}, "", '{"a": [1, null]}'),
        (Arguments(order="x"), "", None),
        (None, "plain", "plain"),
        (float("nan"), "nan", "nan"),
        ("x" * 30_000, "x" * 30_000, "x" * 20_000),
        ("", "", None),
    ],
)
def test_results_are_texts_with_a_time(raw: Any, content: str, text: str | None) -> None:
    """Objects become JSON, long results are cut, and nothing is nothing."""
    output = ToolOutput(tool_name="t", content=content, raw_input={}, raw_output=raw)
    nodes = result_nodes(output, "t", {"city": "Oslo"})
    if isinstance(raw, BaseModel):
        assert '"order": "x"' in nodes[0].get_content()
    else:
        assert [node.get_content() for node in nodes] == ([] if text is None else [text])
    assert all(
        node.node.metadata["title"] == "t (city: Oslo)" and "retrieved_at" in node.node.metadata for node in nodes
    )


def test_tools_that_fail_are_failed_searches() -> None:
    """Whether the tool raises or says so; secrets of its message are not repeated."""
    output = ToolOutput(tool_name="t", content="key sk-abcdefghijklmnop1234 refused", raw_input={}, is_error=True)
    with pytest.raises(RetrievalError, match="tool 't' failed") as failed:
        result_nodes(output, "t", {})
    assert "abcdefghijklmnop" not in str(failed.value)
    with pytest.raises(ZeroDivisionError):
        search(ToolSource(lambda city: 1 // 0, "x", "y"), '{"city": "Oslo"}')


def needs_context(ctx: Context, city: str) -> str:
    """Needs a workflow."""
    return city


def test_what_can_not_be_a_tool_is_refused() -> None:
    """The error says why."""
    needs_context.__annotations__["ctx"] = Context  # LlamaIndex reads no annotations that are text
    with pytest.raises(ConfigurationError, match="workflow's context"):
        ToolSource(FunctionTool.from_defaults(needs_context))
    with pytest.raises(ConfigurationError, match="expected a function or a LlamaIndex tool, got int"):
        ToolSource(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("principal", [None, Principal(user="eve"), Principal(user="mallory")])
def test_a_write_is_denied_in_doubt(principal: Principal | None) -> None:
    """Nobody, others, and where the check itself fails."""

    def permit(principal: Principal) -> bool:
        if principal.user == "mallory":
            raise KeyError(principal.user)
        return principal.user == "ann"

    source = ToolSource(weather, writes=Writes(permit), resilience=Resilience())
    with pytest.raises(DeniedError):
        source.permitted(principal)
    assert source.permitted(Principal(user="ann")) is None
    assert source.resilience.retries.attempts == 1


def record(key: str) -> WriteRecord:
    return WriteRecord(key, "returns", "ann", "{}", "2026-11-22")


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_key_is_claimed_once(tmp_path: Path, *, on_disk: bool) -> None:
    """By 16 threads, over two ledgers of one file, and after a restart."""
    path = tmp_path / "writes.db" if on_disk else None
    first = WriteLedger(path)
    ledgers = [first, WriteLedger(path) if on_disk else first]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda at: ledgers[at % 2].claim(record("k")), range(16))).count(None) == 1
    first.finish("k", "ok", "R-1")
    again = (WriteLedger(path) if on_disk else first).claim(record("k"))
    assert again is not None
    assert (again.outcome, again.result) == ("ok", "R-1")
    assert path is None or path.stat().st_mode & 0o777 == 0o600


@pytest.fixture(scope="module")
def mcp_url() -> Iterator[str]:
    """A server of the Model Context Protocol on a loopback port."""
    server = MCPServer("shop")

    @server.tool()
    def order_status(order: str) -> dict[str, str]:
        """The status of an order."""
        if order == "broken":
            raise ValueError("no such order")
        return {"order": order, "status": "delivered"}

    @server.tool()
    def submit_return(order: str, reason: Literal["damaged", "other"]) -> str:
        """Submit a return."""
        return f"returned {order}: {reason}"

    with Served(server.streamable_http_app()) as url:
        yield f"{url}/mcp"


@contextmanager
def client_of(url: str) -> Iterator[BasicMCPClient]:
    """A client whose connections are closed where they were opened."""
    client = BasicMCPClient(url)
    yield client
    assert client.http_client is not None
    _on_one_loop(client.http_client.aclose)


@pytest.fixture
def client(mcp_url: str) -> Iterator[BasicMCPClient]:
    with client_of(mcp_url) as opened:
        yield opened


def test_tools_of_a_server_are_sources(client: BasicMCPClient) -> None:
    """With the server's own schema; called from threads and from loops, on one connection's loop."""
    permit = Writes(permit=lambda _: True)
    status, returns = mcp_sources(client, reads=["order_status"], writes=permit)
    assert (status.name, status.kind, status.writes) == ("order_status", "mcpServer", None)
    assert returns.writes is permit
    assert returns.parameters["reason"].options == ["damaged", "other"]
    for _ in range(2):
        assert texts(status, '{"order": "A-1"}') == ['{\n  "order": "A-1",\n  "status": "delivered"\n}']
        found = asyncio.run(arun(searching(status, '{"order": "A-2"}')))
        assert "A-2" in found.nodes[0].get_content()
    with pytest.raises(RetrievalError, match="tool 'order_status' failed: Error executing"):
        search(status, '{"order": "broken"}')


def test_tools_that_may_change_something_are_left_out(client: BasicMCPClient) -> None:
    """The server's own hints decide nothing, and a name that is none is an error."""
    assert [source.name for source in mcp_sources(client, reads=["order_status"])] == ["order_status"]
    with pytest.raises(ConfigurationError, match="no tool 'refund'"):
        mcp_sources(client, reads=["refund"])


def test_a_server_that_is_silent_costs_its_time() -> None:
    """A listening port without a server ends the call at its deadline."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        with client_of(url) as client:
            tool = FunctionTool(partial(_call_tool, client, "x"), ToolMetadata("x", "x"))
            source = ToolSource(tool, schema={})
            with pytest.raises(DeadlineExceededError):
                search(source, "{}", seconds=0.5)
