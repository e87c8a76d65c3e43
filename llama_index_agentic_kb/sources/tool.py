"""Tools as knowledge sources: functions, LlamaIndex's tools and the tools of an MCP server.

The query of a tool source is the JSON text of the tool's arguments, which ``planning.tool_turn`` takes from the user's
messages. So a tool is searched like any source, within its own time limit, bulkhead and circuit breaker, and its result
is a node with a time of its own. A tool that changes something (``Writes``) is called only after the user has confirmed
it, and at most once for each confirmation.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import hashlib
import json
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from inspect import iscoroutinefunction, signature
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, get_type_hints

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import AsyncBaseTool, BaseTool, FunctionTool, ToolMetadata, ToolOutput, adapt_to_async_tool
from pydantic import BaseModel, create_model
from pydantic_core import to_jsonable_python

from llama_index_agentic_kb._aio import Call, call_deadline, deadline_after, run
from llama_index_agentic_kb._aio.threads import start_in_background
from llama_index_agentic_kb._text import one_line, redacted_excerpt
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, DeniedError, RetrievalError
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, Resilience
from llama_index_agentic_kb.schema import FilterNode, Principal
from llama_index_agentic_kb.sources.base import DEFAULT_RESILIENCE, KnowledgeSource
from llama_index_agentic_kb.sources.tool_parameters import parameters_of

T = TypeVar("T")

MAX_RESULT: Final = 20_000  # the maximum length of a tool's result in characters; longer ones are cut

IDEMPOTENCY_KEY: Final = "idempotency_key"
"""A tool's parameter of this name gets the key of the confirmed call; neither a model nor the user sets it."""

LISTING_SECONDS: Final = 30.0  # the maximum number of seconds for listing the tools of an MCP server


# -- calls that change something --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """The audit record of a confirmed call.

    Args:
        key: The idempotency key: the token that the user confirmed.
        tool: The name of the source.
        principal: Who confirmed it.
        arguments: The arguments as JSON text.
        started: The time at which it was started, in ISO format.
        outcome: "ok", "error", "timeout"; "started" if the process ended meanwhile.
        result: The beginning of the result, or the error.
    """

    key: str
    tool: str
    principal: str
    arguments: str
    started: str
    outcome: str = "started"
    result: str = ""


class WriteLedger(NotPickled):
    """The record of all confirmed calls, by which each is executed at most once.

    A call is recorded before it is made: whatever happens then, the same confirmation never makes it again.

    Args:
        path: A file of the record, for several processes and after a restart. Defaults to this process's memory.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        if path is not None:
            os.close(os.open(path, os.O_CREAT, 0o600))
        self._db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None, timeout=10)
        weakref.finalize(self, self._db.close)
        self._lock = threading.Lock()
        columns = (
            "key TEXT PRIMARY KEY, tool TEXT, principal TEXT, arguments TEXT, started TEXT, outcome TEXT, result TEXT"
        )
        self._db.execute(f"CREATE TABLE IF NOT EXISTS writes ({columns})")

    def claim(self, record: WriteRecord) -> WriteRecord | None:
        """Record a call that is about to be made; if its key is recorded already, return that record instead."""
        with self._lock:
            done = self._db.execute(
                "INSERT OR IGNORE INTO writes VALUES (?, ?, ?, ?, ?, ?, ?)",
                (record.key, record.tool, record.principal, record.arguments, record.started, "started", ""),
            )
            if done.rowcount:
                return None
            return WriteRecord(*self._db.execute("SELECT * FROM writes WHERE key = ?", (record.key,)).fetchone())

    def finish(self, key: str, outcome: str, result: str) -> None:
        """Record the outcome of a call."""
        with self._lock:
            self._db.execute("UPDATE writes SET outcome = ?, result = ? WHERE key = ?", (outcome, result, key))

    @property
    def records(self) -> list[WriteRecord]:
        """All records, oldest first."""
        with self._lock:
            return [WriteRecord(*row) for row in self._db.execute("SELECT * FROM writes ORDER BY rowid")]


@dataclass(frozen=True, slots=True)
class Writes:
    """Marks a tool that changes something: it is called only for some principals, and after a confirmation.

    Args:
        permit: Returns whether a principal may call the tool. Requests without a principal never may.
        ledger: The record of its calls. Defaults to one in memory.
    """

    permit: Callable[[Principal], bool]
    ledger: WriteLedger = field(default_factory=WriteLedger)


def digest_of(principal: Principal | None) -> str:
    """Return a digest that identifies a principal."""
    parts = None if principal is None else [principal.tenant, principal.user, sorted(principal.groups)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


# -- the source -------------------------------------------------------------------------------------------------------


class ToolSource(KnowledgeSource):
    """A tool that is called where the user asks for it, with arguments from the user's messages.

        ToolSource(order_status, examples=["where is my order", "order status"])

    Args:
        tool: A function with type hints, or any LlamaIndex tool.
        name: The source's name. Defaults to the tool's.
        description: What the tool does, for the model that chooses tools. Defaults to the tool's.
        schema: The JSON schema of its arguments. Defaults to the tool's own.
        examples: Phrases that ask for the tool. Without a language model, the tool is chosen where a message has all
            content words of one of them.
        writes: Marks a tool that changes something. Its calls are never retried.
        resilience: The timeout, concurrency, retries and circuit breaker of its calls.

    Raises:
        ConfigurationError: The tool needs a workflow's context, or an argument is invalid.
    """

    kind = "tool"

    def __init__(
        self,
        tool: BaseTool | Callable[..., Any],
        name: str | None = None,
        description: str | None = None,
        *,
        schema: Mapping[str, Any] | None = None,
        examples: Sequence[str] = (),
        writes: Writes | None = None,
        resilience: Resilience = DEFAULT_RESILIENCE,
    ) -> None:
        if isinstance(tool, BaseTool):
            made = tool
        elif callable(tool):
            called = getattr(tool, "__name__", "tool")
            about = (tool.__doc__ or called.replace("_", " ")).strip()
            made = FunctionTool(tool, ToolMetadata(name=called, description=about))
        else:
            raise ConfigurationError(f"tool: expected a function or a LlamaIndex tool, got {type(tool).__name__}")
        self.tool = adapt_to_async_tool(made)
        name = name or made.metadata.get_name()
        if getattr(made, "requires_context", False):
            raise ConfigurationError(f"source {name!r}: a tool that needs a workflow's context can't be a source")
        if writes is not None:
            resilience = replace(resilience, retries=NO_RETRIES)
        native = iscoroutinefunction(getattr(made, "real_fn", None))
        super().__init__(
            name,
            description or one_line(made.metadata.description or name, 1_000),
            retriever=_ToolRetriever(self.tool, name, native_async=native),
            resilience=resilience,
            native_async=native,
            hybrid=False,
        )
        if schema is None:
            schema = made.metadata.get_parameters_dict() if isinstance(tool, BaseTool) else _schema_of(tool)
        every = parameters_of(schema)
        self.takes_key = every.pop(IDEMPOTENCY_KEY, None) is not None
        self.parameters = every
        self.examples = tuple(examples)
        self.writes = writes

    def permitted(self, principal: Principal | None) -> FilterNode | None:
        """Return None: results are not filtered.

        Raises:
            DeniedError: The tool changes something, and the principal may not call it.
        """
        if self.writes is None:
            return None
        try:
            allowed = principal is not None and self.writes.permit(principal)
        except Exception as error:
            raise DeniedError(f"whether the principal may call it is not known: {type(error).__name__}") from error
        if not allowed:
            raise DeniedError("the tool changes something, and the principal may not call it")
        return None


def _schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments; LlamaIndex's own resolves no annotations that are text."""
    hints, fields = get_type_hints(function, include_extras=True), dict[str, Any]()
    for name, parameter in signature(function).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            fields[name] = (hints.get(name, str), ... if parameter.default is parameter.empty else parameter.default)
    arguments: type[BaseModel] = create_model("Arguments", **fields)
    return arguments.model_json_schema()


class _ToolRetriever(BaseRetriever):
    """Calls a tool with the arguments in the query, and returns its result as nodes."""

    def __init__(self, tool: AsyncBaseTool, name: str, *, native_async: bool) -> None:
        super().__init__()
        self._tool = tool
        self._name = name
        self._native_async = native_async

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if self._native_async:
            raise NotImplementedError  # its own loop would end with the call, and its client's connections with it
        arguments = json.loads(query_bundle.query_str)
        return result_nodes(self._tool.call(**arguments), self._name, arguments)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        arguments = json.loads(query_bundle.query_str)
        return result_nodes(await self._tool.acall(**arguments), self._name, arguments)


def result_nodes(output: ToolOutput, name: str, arguments: Mapping[str, Any]) -> list[NodeWithScore]:
    """Return a tool's result as nodes: the nodes of a retriever tool, else one node with the time of the call.

    Raises:
        RetrievalError: The tool reports an error.
    """
    raw = output.raw_output
    text = _text_of(raw) or output.content or ""
    if output.is_error or getattr(raw, "is_error", False) or getattr(raw, "isError", False):
        raise RetrievalError(f"tool {name!r} failed: {redacted_excerpt(text)}")
    if isinstance(raw, list) and raw and all(isinstance(item, NodeWithScore) for item in raw):
        return raw
    if not text.strip():
        return []
    given = "; ".join(f"{key}: {value}" for key, value in arguments.items() if key != IDEMPOTENCY_KEY)
    metadata = {
        "title": one_line(f"{name} ({given})" if given else name, 150),
        "tool": name,
        "retrieved_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return [NodeWithScore(node=TextNode(text=text[:MAX_RESULT], metadata=metadata), score=1.0)]


def _text_of(raw: Any) -> str:
    """Return a result as text: objects as JSON, the texts of an MCP result; empty if only the tool can show it."""
    blocks = getattr(raw, "content", None)
    if isinstance(blocks, list) and hasattr(raw, "structured_content"):
        texts = [block.text for block in blocks if isinstance(getattr(block, "text", None), str)]
        return "\n".join(texts) or (_text_of(raw.structured_content) if raw.structured_content else "")
    if isinstance(raw, dict | list) or hasattr(raw, "model_dump"):
        return json.dumps(to_jsonable_python(raw, fallback=str, inf_nan_mode="null"), ensure_ascii=False)
    return ""


# -- MCP --------------------------------------------------------------------------------------------------------------


_TOOL_NAME: Final = re.compile(r"[\w./ -]{1,128}")
"""The names of tools that are read; the protocol allows fewer characters."""


class MCPClient(Protocol):
    """What is used of an MCP client: LlamaIndex's ``BasicMCPClient``, or a session of the official package."""

    async def list_tools(self) -> Any:
        """Return the server's tools."""

    async def call_tool(self, tool_name: str, arguments: dict[str, Any], /) -> Any:
        """Call a tool."""


def mcp_sources(
    client: MCPClient,
    *,
    reads: Collection[str],
    writes: Writes | None = None,
    examples: Mapping[str, Sequence[str]] | None = None,
    resilience: Resilience = DEFAULT_RESILIENCE,
) -> list[ToolSource]:
    """Return the tools of an MCP server as sources.

    The server's own word on which of its tools change nothing is not relied on.

        from llama_index.tools.mcp import BasicMCPClient

        sources = mcp_sources(BasicMCPClient("https://shop.example/mcp"), reads=["order_status"])

    Args:
        client: The client; all its calls are made on one event loop of this library.
        reads: The names of the tools that change nothing.
        writes: How all other tools are confirmed, and for whom. Defaults to leaving them out.
        examples: Phrases that ask for a tool, by its name; see ``ToolSource``.
        resilience: The timeout, concurrency, retries and circuit breaker of each tool's calls.

    Raises:
        ConfigurationError: The server has no tool of a name in ``reads`` or ``examples``.
    """
    deadline, what = deadline_after(LISTING_SECONDS), "listing an MCP server"
    listed = run(Call(sync=partial(_on_one_loop, client.list_tools), deadline=deadline, what=what).perform())
    tools = [tool for tool in listed.tools if _TOOL_NAME.fullmatch(tool.name)]
    unknown = sorted({*reads, *(examples or {})} - {tool.name for tool in tools})
    if unknown:
        raise ConfigurationError(f"reads, examples: the MCP server has no tool {unknown[0]!r}")
    made = []
    for tool in tools:
        if tool.name not in reads and writes is None:
            logger.info("tool %r of an MCP server is left out: it may change something", one_line(tool.name))
            continue
        metadata = ToolMetadata(name=tool.name, description=tool.description or tool.title or tool.name)
        source = ToolSource(
            FunctionTool(partial(_call_tool, client, tool.name), metadata),
            schema=tool.input_schema,
            examples=(examples or {}).get(tool.name, ()),
            writes=None if tool.name in reads else writes,
            resilience=resilience,
        )
        source.kind = "mcpServer"
        made.append(source)
    return made


def _call_tool(client: MCPClient, name: str, **arguments: Any) -> Any:
    return _on_one_loop(partial(client.call_tool, name, arguments))


def _on_one_loop(work: Callable[[], Awaitable[T]]) -> T:
    """Await a client's call on the background loop, to which its connections belong, until the call's deadline."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    async def perform() -> None:
        try:
            done.set_result(await work())
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            done.set_exception(error)

    cancel = start_in_background(perform, contextvars.copy_context())
    deadline = call_deadline()
    try:
        return done.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except TimeoutError as error:
        cancel()
        raise DeadlineExceededError("an MCP server did not answer in time") from error
