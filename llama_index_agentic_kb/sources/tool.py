"""Tools as knowledge sources: functions, LlamaIndex's tools and the tools of an MCP server.

The query of a tool source is the JSON text of the tool's arguments, which ``planning.tool_turn`` takes from the user's
messages. So a tool is searched like any source, within its own time limit, bulkhead and circuit breaker, and its result
is a node with a time of its own. A tool that changes something (``Writes``) is called only after the user has confirmed
it, and at most once for each confirmation. Its parameters are known by its JSON schema: values are checked against it,
and found in a user's words by it.
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
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from inspect import iscoroutinefunction, signature
from itertools import accumulate, count
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeVar, get_type_hints

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import AsyncBaseTool, BaseTool, FunctionTool, ToolMetadata, ToolOutput, adapt_to_async_tool
from pydantic import BaseModel, JsonValue, StringConstraints, TypeAdapter, ValidationError, create_model
from pydantic_core import SchemaError, to_jsonable_python

from llama_index_agentic_kb._aio import Call, call_deadline, deadline_after, run, start_in_background
from llama_index_agentic_kb._text import normalize, one_line, redacted_excerpt
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, DeniedError, RetrievalError
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, Resilience
from llama_index_agentic_kb.schema import FilterNode, Principal
from llama_index_agentic_kb.sources.base import DEFAULT_RESILIENCE, KnowledgeSource

T = TypeVar("T")

MAX_RESULT: Final = 20_000  # the maximum length of a tool's result in characters; longer ones are cut

LISTING_SECONDS: Final = 30.0  # the maximum number of seconds for listing the tools of an MCP server
IDEMPOTENCY_KEY: Final = "idempotency_key"
"""A tool's parameter of this name gets the key of the confirmed call; neither a model nor the user sets it."""


# -- calls that change something --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """The audit record of a confirmed call."""

    key: str  # the idempotency key: the token that the user confirmed
    tool: str  # the name of the source
    principal: str  # who confirmed it
    arguments: str  # as JSON text
    started: str  # in ISO format
    outcome: str = "started"  # or "ok", "error", "timeout"; "started" is left if the process ended meanwhile
    result: str = ""  # the beginning of the result, or the error


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
        schema: JsonMapping | None = None,
        examples: Sequence[str] = (),
        writes: Writes | None = None,
        resilience: Resilience = DEFAULT_RESILIENCE,
    ) -> None:
        made = tool if isinstance(tool, BaseTool) else _tool_of(tool)
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
        """Return None: results are not filtered. Raise ``DeniedError`` if the principal may not call the tool."""
        if self.writes is None:
            return None
        try:
            allowed = principal is not None and self.writes.permit(principal)
        except Exception as error:
            raise DeniedError(f"whether the principal may call it is not known: {type(error).__name__}") from error
        if not allowed:
            raise DeniedError("the tool changes something, and the principal may not call it")
        return None


def _tool_of(function: Callable[..., Any]) -> FunctionTool:
    if not callable(function):
        raise ConfigurationError(f"tool: expected a function or a LlamaIndex tool, got {type(function).__name__}")
    name = getattr(function, "__name__", "tool")
    about = (function.__doc__ or name.replace("_", " ")).strip()
    return FunctionTool(function, ToolMetadata(name=name, description=about))


def _schema_of(function: Callable[..., Any]) -> JsonObject:
    """Return the JSON schema of a function's arguments; LlamaIndex's own resolves no annotations that are text."""
    hints, fields = get_type_hints(function, include_extras=True), JsonObject()
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


def result_nodes(output: ToolOutput, name: str, arguments: JsonMapping) -> list[NodeWithScore]:
    """Return a tool's result as nodes: the nodes of a retriever tool, else one node with the time of the call."""
    raw = output.raw_output
    text = _text_of(raw) or output.content or ""
    if any((output.is_error, getattr(raw, "is_error", False), getattr(raw, "isError", False))):
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

    async def call_tool(self, tool_name: str, arguments: JsonObject, /) -> Any:
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
    examples = examples or {}
    deadline, what = deadline_after(LISTING_SECONDS), "listing an MCP server"
    listed = run(Call(sync=partial(_on_one_loop, client.list_tools), deadline=deadline, what=what).perform())
    tools = [tool for tool in listed.tools if _TOOL_NAME.fullmatch(tool.name)]
    if unknown := sorted({*reads, *examples}.difference(map(attrgetter("name"), tools))):
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
            examples=examples.get(tool.name, ()),
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

    cancel = start_in_background(perform(), contextvars.copy_context())
    deadline = call_deadline()
    try:
        return done.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except TimeoutError as error:
        cancel()
        raise DeadlineExceededError("an MCP server did not answer in time") from error


# -- parameters -------------------------------------------------------------------------------------------------------

MAX_SCHEMA: Final = 50_000  # the maximum length of a tool's schema as JSON text, in characters
MAX_DEPTH: Final = 50  # the maximum nesting depth of a tool's schema
MAX_CHECKS: Final = 10_000  # of a schema's keywords for one value: references multiply them
MAX_VALUE: Final = 500  # the maximum length of a text argument in characters
MAX_READ: Final = 2_000  # the maximum number of characters of a message in which values are looked for
MAX_PATTERN: Final = 200  # the maximum length of a schema's pattern that is looked for in messages
MAX_FOUND: Final = 20  # the maximum number of matches that are looked at; so many are ambiguous anyway
MAX_MATCH: Final = 100  # the maximum length of a match in characters

# The formats that can be found in a text; others are only checked.
_FORMATS: Final[Mapping[str, str]] = {
    "date": r"\d{4}-\d{2}-\d{2}",
    "date-time": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(?::\d{2})?(?:Z|[+-]\d{2}:\d{2})?",
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
_NUMBERS: Final[Mapping[str, str]] = {"integer": r"[+-]?\d+", "number": r"[+-]?\d+(?:\.\d+)?"}
_BOOLEANS: Final = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool."""

    name: str
    schema: JsonMapping  # its JSON schema, without the variant null
    required: bool  # whether the tool can't be called without it
    label: str  # what it is, for the user: its description, or else its name

    @property
    def options(self) -> list[JsonValue]:
        """The only allowed values; empty if there is no such list."""
        return list(self.schema.get("enum") or ([self.schema["const"]] if "const" in self.schema else []))

    @property
    def free(self) -> bool:
        """Whether the parameter accepts any text; then no value can be recognised in a sentence."""
        fixed = self.options or self.schema.get("pattern") or self.schema.get("format")
        return self.schema.get("type") == "string" and not fixed

    @property
    def derived(self) -> bool:
        """Whether a value may be written otherwise than in the user's words: an option, a yes or no, a date."""
        by_format = str(self.schema.get("format", "")).startswith("date")
        return bool(self.options) or by_format or self.schema.get("type") == "boolean"

    def read(self, value: object) -> JsonValue:
        """Return a value as the schema's type; raise ``ValueError`` if it does not fit the schema."""
        if isinstance(value, str):
            value = self._of_text(value.strip())
        elif self.schema.get("type") == "string" and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and len(value) > MAX_VALUE:
            raise ValueError(f"{self.name}: at most {MAX_VALUE} characters")
        try:
            problem = next(_validator(self.schema).iter_errors(value), None)
        except Exception as error:  # no valid schema, or one that refers to another
            raise ValueError(f"{self.name}: its schema can't be checked: {type(error).__name__}") from error
        if value is None or problem is not None:
            raise ValueError(f"{self.name}: {one_line(problem.message if problem else 'it is null')}")
        return value  # type: ignore[return-value]  # the schema describes JSON

    def _of_text(self, text: str) -> JsonValue:
        kind = self.schema.get("type")
        value: JsonValue = text
        if kind == "boolean":
            value = _BOOLEANS.get(text.casefold(), text)
        elif kind in ("integer", "number") and re.fullmatch(r"[+-]?\d+(?:\.\d+)?", text):
            value = int(text) if re.fullmatch(r"[+-]?\d{1,300}", text) else float(text)
        return next((one for one in self.options if normalize(str(one)) == normalize(str(value))), value)

    def found_in(self, text: str) -> list[JsonValue]:
        """Return the distinct values in a text: options, matches of the pattern or format, numbers."""
        text, kind = text[:MAX_READ], str(self.schema.get("type"))
        if self.options:
            words = f" {_spaced(text)} "
            found = [str(one) for one in self.options if f" {_spaced(str(one))} " in words]
        else:
            pattern = self.schema.get("pattern") or _FORMATS.get(str(self.schema.get("format"))) or _NUMBERS.get(kind)
            found = _matches(pattern, text) if isinstance(pattern, str) else []
        distinct: dict[str, JsonValue] = {}
        for one in [*dict.fromkeys(found)][:MAX_FOUND]:
            for form in (one, one.upper(), one.lower()):
                try:
                    value = self.read(form)
                except ValueError:
                    continue
                distinct.setdefault(repr(value), value)
                break
        return list(distinct.values())


def parameters_of(schema: JsonMapping) -> dict[str, Parameter]:
    """Return the parameters of a tool's JSON schema by name, in its order; raise if it can't be used."""
    made: dict[str, Parameter] = {}
    try:
        _check_size(json.dumps(schema, default=str))
        shared = {key: {**schema[key]} for key in ("$defs", "definitions") if key in schema}
        required = [*(schema.get("required") or ())]
        for name, declared in {**(schema.get("properties") or {})}.items():
            own = _resolved(declared if isinstance(declared, Mapping) else {}, shared)
            label = one_line(str(own.get("description") or name.replace("_", " ")), 150)
            made[name] = Parameter(name, {**own, **shared}, name in required, label)
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ConfigurationError(f"a tool's schema can't be used: {one_line(str(error))}") from error
    return made


def _check_size(schema: str) -> None:
    signs = re.sub(r'"(?:[^"\\]|\\.)*"', "", schema[: MAX_SCHEMA + 1])  # brackets within texts nest nothing
    if len(schema) > MAX_SCHEMA or max(accumulate((c in "{[") - (c in "}]") for c in signs), default=0) > MAX_DEPTH:
        raise ValueError(f"at most {MAX_SCHEMA:,} characters of JSON, nested {MAX_DEPTH} deep, are read")


def _resolved(schema: JsonMapping, shared: JsonMapping) -> JsonMapping:
    """Return a schema without a local reference at its top, and without the variant null."""
    variants = [one for one in schema.get("anyOf") or schema.get("oneOf") or () if one.get("type") != "null"]
    if len(variants) == 1:
        schema = {**_without(schema, "anyOf", "oneOf", "default"), **variants[0]}
    section, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
    target = shared.get(section, {}).get(name)
    if isinstance(target, Mapping):
        schema = {**target, **_without(schema, "$ref")}
    return schema


def _without(schema: JsonMapping, *names: str) -> JsonObject:
    return {key: value for key, value in schema.items() if key not in names}


def _validator(schema: JsonMapping) -> Any:
    import jsonschema  # noqa: PLC0415 (0.1 s; only tools need it)
    from referencing import Registry  # noqa: PLC0415

    if re.search("patternProperties|unevaluated", json.dumps(schema, default=str)):
        raise ValueError("patternProperties and unevaluatedProperties are not checked")

    def pattern_errors(_validator: object, pattern: str, instance: object, _schema: object) -> Iterator[Exception]:
        if isinstance(instance, str) and not _fits(pattern, instance):
            yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")

    standard, done, depth = jsonschema.Draft202012Validator, count(), 0
    checks = {**standard.VALIDATORS, "pattern": pattern_errors}

    def counted(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def errors(*args: Any) -> Iterator[Any]:
            nonlocal depth
            depth += 1  # beyond the interpreter's own limit, ``referencing`` panics
            try:
                if next(done) >= MAX_CHECKS or depth > MAX_DEPTH:
                    raise ValueError("its references lead to too many checks")
                yield from check(*args) or ()
            finally:
                depth -= 1

        return errors

    # An empty registry: a schema's references are never fetched.
    kind = jsonschema.validators.extend(standard, {name: counted(check) for name, check in checks.items()})
    return kind(schema, format_checker=standard.FORMAT_CHECKER, registry=Registry())


@lru_cache(maxsize=1_024)
def _matcher(pattern: str) -> TypeAdapter[str]:
    return TypeAdapter(Annotated[str, StringConstraints(pattern=pattern, strict=True)])


def _fits(pattern: str, text: str) -> bool:
    """Return whether a pattern is found in a text, in linear time; ``SchemaError`` if the engine does not read it."""
    # Pydantic's engine (Rust's) never backtracks: a tool's schema may come from a server that is not trusted.
    try:
        _matcher(pattern).validate_python(text)
    except ValidationError:
        return False
    return True


def _matches(pattern: str, text: str) -> list[str]:
    """Return the parts of a text that match a pattern and stand alone as words: from each start, the longest."""
    if len(pattern) > MAX_PATTERN:
        return []
    pattern = pattern.removeprefix("^").removesuffix("$")
    ends = [found.start() for found in re.finditer(r"(?<=\S)(?![\w-]|\.\d)", text)]
    words: list[str] = []
    try:
        if not _fits(f"(?i:{pattern})", text):  # most messages: one look in linear time
            return []
        for found in re.finditer(r"(?<![\w.-])(?=\S)", text):
            words += filter(None, [_longest_match(pattern, text, found.start(), ends)])
            if len(words) > MAX_FOUND:
                break
    except SchemaError:
        return []
    return words


def _longest_match(pattern: str, text: str, start: int, ends: Sequence[int]) -> str:
    """Return the longest part of a text from a start that matches a pattern; empty if there is none that counts.

    In another letter case ("a-4711", where the pattern says A) a part counts if it has a digit or is the whole text:
    plain words would match too often.
    """
    for end in reversed(ends):
        if start < end <= start + MAX_MATCH and _fits(f"^(?i:{pattern})$", part := text[start:end]):
            counts = part == text.strip(" .!,") or any(map(str.isdigit, part)) or _fits(f"^(?:{pattern})$", part)
            return part if counts else ""
    return ""


def _spaced(text: str) -> str:
    return " ".join(re.findall(r"\w+", normalize(text.replace("_", " "))))
