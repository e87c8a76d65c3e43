"""The language model to use, what it can do, and a single call of it.

A call is made in the model's bulkhead, without retries; it ends at its deadline, and has a uniform error type.

LlamaIndex's ``OpenAI`` retries in addition to OpenAI's client: 12 requests for one failing call. Its sync client only
limits the time between two bytes, so a server that sends slowly can block a thread forever. Here a shallow copy of the
model is called, whose clients don't retry and share the user's connections, settings and credentials.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.llms import LLM, CustomLLM, MockLLM
from llama_index.core.settings import Settings
from llama_index.core.utils import get_tokenizer

from llama_index_agentic_kb._aio import Call, read_ahead
from llama_index_agentic_kb._text import know_secrets
from llama_index_agentic_kb._types import JsonObject, Work
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.guard.resilience import Bulkhead, Permit, RetryPolicy, retried

if TYPE_CHECKING:
    import httpx
    from openai import OpenAI as Client

M = TypeVar("M")

DEFAULT_MODEL: Final = "gpt-4o-mini"  # asked of a server that the environment names
MAX_PIECE: Final = 100_000  # maximum number of characters that are tokenized at once


def resolve_llm(llm: LLM | None) -> LLM | None:
    """Return the LLM to use: ``llm``, else ``Settings.llm`` if it was set, else that of the environment, else None.

    Without a server's address, the environment's is core's default, if there is an OpenAI key. A disabled LLM
    (``Settings.llm = None`` sets core's ``MockLLM``) counts as None.
    """
    if llm is not None:
        return of_any_name(llm)
    if Settings._llm is None:  # noqa: SLF001 (the getter would create core's default)
        if openai_address() is not None:
            return openai_from_environment()
        if not os.environ.get("OPENAI_API_KEY"):
            return None
    default: LLM = Settings.llm
    return None if isinstance(default, MockLLM) else of_any_name(default)


def of_any_name(llm: LLM) -> LLM:
    """Return the LLM; LlamaIndex's ``OpenAI`` with a model name that it does not know becomes ``OpenAICompatible``."""
    if not isinstance(llm, LLM):
        raise ConfigurationError(f"llm: expected an LLM of LlamaIndex, as OpenAI(model=...), got {type(llm).__name__}")
    module = sys.modules.get("llama_index.llms.openai.base")
    if module is None or type(llm) is not module.OpenAI:
        return llm
    if metadata_of(llm) is None:
        from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible  # noqa: PLC0415 (loads the client)

        # Core has no public names for a user's own HTTP clients.
        clients = {name: getattr(llm, f"_{name}") for name in ("http_client", "async_http_client")}
        fields = {name: getattr(llm, name) for name in type(llm).model_fields}
        return OpenAICompatible(**fields, **clients)
    return llm


def openai_address() -> str | None:
    """Return the address of the OpenAI-compatible server that the environment names."""
    return os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE") or None


def openai_from_environment(model: str | None = None, **arguments: Any) -> LLM:
    """Return a chat model of the environment's server: OPENAI_BASE_URL or OPENAI_API_BASE, and OPENAI_API_KEY."""
    from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible  # noqa: PLC0415 (loads the OpenAI client)

    key = os.environ.get("OPENAI_API_KEY") or None
    return OpenAICompatible(model=model or DEFAULT_MODEL, api_key=key, api_base=openai_address(), **arguments)


def warm_up_llm(llm: LLM) -> None:
    """Load the tokenizer and the clients, so that the first call does not block the event loop; send no request."""
    count_tokens("warm up")
    if not is_openai(llm):
        return
    takes_schema(llm)
    for make in ("_get_client", "_get_aclient"):
        client = getattr(llm, make, None)
        if client is not None:
            _ = client().chat.completions


def tokens_of(text: str) -> list[object]:
    """Return the tokens of a text, by LlamaIndex's global tokenizer.

    Long texts are split, which adds a token or two: OpenAI's tokenizer raises on a text of a million spaces.
    """
    encode = get_tokenizer()
    return [token for start in range(0, len(text), MAX_PIECE) for token in encode(text[start : start + MAX_PIECE])]


def count_tokens(text: str) -> int:
    """Return the number of tokens of a text, by LlamaIndex's global tokenizer."""
    return len(tokens_of(text))


def metadata_of(llm: LLM) -> LLMMetadata | None:
    """Return a model's metadata; None if there is none: LlamaIndex's OpenAI raises for names that it does not know."""
    try:
        return llm.metadata
    except ValueError:
        return None


def model_name(llm: LLM) -> str | None:
    """Return a model's name, or None if it has none."""
    name = getattr(llm, "model", None) or getattr(llm, "model_name", None)
    return name if isinstance(name, str) else getattr(metadata_of(llm), "model_name", None)


def takes_schema(llm: LLM) -> bool:
    """Return whether a model of OpenAI replies in a JSON schema."""
    utils = sys.modules.get("llama_index.llms.openai.utils")
    return utils is not None and is_openai(llm) and bool(utils.is_json_schema_supported(llm.model))  # type: ignore[attr-defined]


def structured_output(name: str, schema: JsonObject) -> JsonObject:
    """Return the arguments that make a model reply in a JSON schema, if it ``takes_schema``."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}}


def is_function_calling(llm: LLM) -> bool:
    """Return whether a model supports function calling."""
    return bool(getattr(metadata_of(llm), "is_function_calling_model", False)) and hasattr(llm, "chat_with_tools")


def is_openai(llm: object) -> bool:
    """Return whether a model is LlamaIndex's ``OpenAI``, without importing that class."""
    module = sys.modules.get("llama_index.llms.openai.base")
    return module is not None and isinstance(llm, module.OpenAI)


# -- calls ------------------------------------------------------------------------------------------------------------

MODEL_PLACES: Final = 128  # concurrent calls of one model object, including abandoned ones; further calls wait
GRACE_SECONDS: Final = 0.1  # after its deadline, when a sync call ends itself; its caller has the timeout error by then


class ModelCalls:
    """Calls a model's methods by name; all users of a model share one object (see ``calls_of``)."""

    def __init__(self, model: object, what: str, as_failure: Callable[[Exception], Exception]) -> None:
        self.what = what
        self.bulkhead = Bulkhead(what, MODEL_PLACES)
        self._model = weakref.ref(model)  # the user's; calls are made on a copy of it (see ``once``)
        self._as_failure = as_failure  # converts an exception of the model's client to the one that is raised
        self._speaks_openai = speaks_openai(model)
        self._clients: dict[str, tuple[object, object]] = {}
        know_secrets(secrets_of(model))

    def call(
        self, model: object, method: str, *args: object, policy: RetryPolicy, deadline: float | None, **kwargs: object
    ) -> Work[Any]:
        """Call a method of ``model``, a copy, by its sync name; the async method has the prefix "a"."""

        async def attempt(until: float | None) -> Any:
            with self._held(until) as permit:
                work = self._works(permit, model, method, args, kwargs)
                return await self.bulkhead.call(Call(*work, deadline=until, what=self.what), permit)

        return retried(attempt, policy=policy, deadline=deadline)

    async def stream(
        self, model: object, method: str, *args: object, deadline: float | None, **kwargs: object
    ) -> AsyncGenerator[Any, None]:
        """Open a stream and yield its chunks; see ``call``."""
        with self._held(deadline) as permit:
            sync, native = self._works(permit, model, method, args, kwargs)
            through = partial(self.bulkhead.call, permit=permit, deadline=deadline)
            chunks = read_ahead(sync=sync, native=native, deadline=deadline, what=self.what, through=through)
            try:
                async with aclosing(chunks):  # otherwise the model would continue to generate billed tokens
                    async for chunk in chunks:
                        yield chunk
            except DeadlineExceededError as error:
                if permit.began is None:
                    raise DeadlineExceededError(f"{self.what} was not begun by its deadline") from error
                raise
            finally:
                self.bulkhead.leave(permit)  # at once: a thread that has not begun yet sends no request

    @contextmanager
    def _held(self, deadline: float | None) -> Iterator[_SocketPermit]:
        """Yield the permit of a call; its errors are raised in one kind, and what still runs is ended."""
        permit = _SocketPermit(deadline=deadline)
        try:
            yield permit
        except Exception as error:
            know_secrets(secrets_of(self._model()))  # its client may have been made since, or its key changed
            if isinstance(error, DeadlineExceededError | NotImplementedError):  # the latter: a model that can't stream
                raise
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(f"{self.what} was still running at its deadline") from error
            failure = self._as_failure(error)
            if failure is error:
                raise
            raise failure from error
        finally:
            if permit.ended is None:
                permit.hang_up()

    def _works(
        self, permit: _SocketPermit, model: object, method: str, args: tuple[object, ...], kwargs: JsonObject
    ) -> tuple[Callable[[], Any], Callable[[], Awaitable[Any]] | None]:
        """Return functions that call a method synchronously and natively async; the latter is None if unsupported."""
        speaks, async_method = self._speaks_openai, f"a{method}"

        def sync() -> Any:
            _held_socket.set(permit)  # each call has its own context
            if speaks:
                self._set_client(model, is_async=False)
            return getattr(model, method)(*args, **kwargs)

        async def native() -> Any:
            if speaks:
                self._set_client(model, is_async=True)
            return await getattr(model, async_method)(*args, **kwargs)

        # The async methods of core's ``CustomLLM``, which spans wrap, block the event loop.
        if isinstance(model, CustomLLM):
            own, core = getattr(type(model), async_method), getattr(CustomLLM, async_method)
            return sync, None if inspect.unwrap(own) is inspect.unwrap(core) else native
        return sync, native

    def _set_client(self, model: Any, *, is_async: bool) -> None:
        """Set the client of a copied model to a cached one that does not retry, made of the user's model's own.

        A model that creates a new client for each call (``reuse_client=False``) is not changed.
        """
        if not model.reuse_client:
            return
        own: Any = self._model()
        name = "_aclient" if is_async else "_client"
        client = own._get_aclient() if is_async else own._get_client()  # noqa: SLF001 (they have no public name)
        made = self._clients.get(name)  # two threads may create one each: both work
        if made is None or made[0] is not client:
            ends = client.with_options(max_retries=0) if is_async else _ending_client(client)
            made = self._clients[name] = (client, ends)
        setattr(model, name, made[1])


_SECRET: Final = re.compile(
    r"(?:^|[_-])(?:api[_-]?key|key|token|secret|passw(?:or)?d|pwd|credentials?|auth(?:orization)?)(?:$|[_-])",
    re.IGNORECASE,
)
"""Names of attributes and variables whose values are secrets."""

_PLAIN_HEADERS: Final = re.compile(r"accept|connection$|content-|host$|user-agent$|x-stainless", re.IGNORECASE)

MAX_DEPTH: Final = 4  # maximum nesting depth of clients that are searched for secrets


def secrets_of(client: object) -> Iterator[str]:
    """Yield the secrets of a model, a client or arguments: keys, headers, credentials in URLs and the environment."""
    yield from (value for name, value in os.environ.items() if _SECRET.search(name) and not value.startswith("/"))
    yield from _secrets_in(client, MAX_DEPTH)


def _secrets_in(client: object, depth: int) -> Iterator[str]:
    private = getattr(client, "__pydantic_private__", None) or {}
    fields = client if isinstance(client, Mapping) else {**getattr(client, "__dict__", {}), **private}
    for name, held in list(fields.items()):
        value = held.get_secret_value() if hasattr(held, "get_secret_value") else held
        text = str(value) if isinstance(value, str) or type(value).__name__ == "URL" else ""
        yield from [text] if _SECRET.search(str(name)) else _secrets_at(str(name), value, text, depth)


def _secrets_at(name: str, value: object, text: str, depth: int) -> Iterator[str]:
    """Yield the secrets in the value of a field whose name is no secret's; ``text`` is empty if it is no text."""
    if "://" in text:
        address = urlsplit(text)
        yield from map(unquote, filter(None, (address.username, address.password)))
        yield from (part for _, part in parse_qsl(address.query))
    elif isinstance(value, Mapping) and re.search("header|query|cookie", name):
        yield from (str(part) for header, part in value.items() if not _PLAIN_HEADERS.match(str(header)))
    elif depth and (isinstance(value, dict) or name.endswith("client")):
        yield from _secrets_in(value, depth - 1)


_CALLS: Final[dict[int, ModelCalls]] = {}
"""The ``ModelCalls`` of each live model, by ``id(model)``. Single dictionary operations need no lock."""


def calls_of(model: object, what: str, as_failure: Callable[[Exception], Exception]) -> ModelCalls:
    """Return the shared ``ModelCalls`` of a model, created on first use and removed with the model object."""
    known = _CALLS.get(id(model))
    if known is None:
        known = _CALLS.setdefault(id(model), ModelCalls(model, what, as_failure))
        weakref.finalize(model, _CALLS.pop, id(model), None)
    return known


def speaks_openai(model: object) -> bool:
    """Return whether a model uses OpenAI's client: LlamaIndex's ``OpenAI`` or ``OpenAIEmbedding``, or a subclass."""
    kind: type = type(model)
    return is_openai(model) or is_a(kind, "OpenAIEmbedding")


@lru_cache(maxsize=256)
def is_a(kind: type, *names: str) -> bool:
    """Return whether a class or one of its bases has one of these names, without importing the integration."""
    return not set(names).isdisjoint(map(attrgetter("__name__"), kind.__mro__))


def retries_itself(model: object) -> bool:
    """Return whether a model's client retries and this can't be turned off."""
    own = getattr(model, "max_retries", None)
    return not speaks_openai(model) and isinstance(own, int) and own > 0


def once(twin: M, model: object) -> M:
    """Return a copy of a model with OpenAI's client that does not retry; any other model is returned unchanged.

    ``twin`` is the user's model itself, which is never changed, or a copy of it.
    """
    if not speaks_openai(model):
        return twin
    made = copy.copy(twin) if twin is model else twin
    made.max_retries = 0  # type: ignore[attr-defined]
    return made


# -- sync clients with a deadline ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _SocketPermit(Permit):
    """The permit of a call with a deadline; another thread can shut down a sync call's socket to end the call."""

    deadline: float | None = None
    _socket: socket.socket | None = None
    _hung_up: bool = False

    def cut(self, timeouts: dict[str, float | None]) -> dict[str, float | None]:
        """Return the timeouts of a request's phases, limited to the call's remaining time."""
        if self.deadline is None:
            return timeouts
        left = max(0.001, self.deadline + GRACE_SECONDS - time.monotonic())
        own = {phase: timeouts.get(phase) for phase in ("connect", "read", "write", "pool")}
        return {phase: left if seconds is None else min(left, seconds) for phase, seconds in own.items()}

    def hold(self, response: httpx.Response) -> None:
        """Store the socket of a response, and shut it down if the call was abandoned already."""
        stream = response.extensions.get("network_stream")
        held = None if stream is None else stream.get_extra_info("socket")
        self._socket = held if isinstance(held, socket.socket) else None
        if self._hung_up:
            self._shut_down()

    def hang_up(self) -> None:
        """Shut down the socket of a call that still runs after it was abandoned, so that it returns at once."""
        if self.at_work:
            self._hung_up = True
            self._shut_down()

    def _shut_down(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # closed already
                self._socket.shutdown(socket.SHUT_RDWR)


_held_socket: ContextVar[_SocketPermit | None] = ContextVar("agentic_kb_held_socket", default=None)
"""The permit of the current call."""


def _ending_client(client: Client) -> Client:
    """Return a copy of a sync client without retries, whose requests end at the deadline of their call.

    Requests are sent through the user's HTTP client, with its proxies, certificates, authentication and pool.
    """
    import httpx  # noqa: PLC0415 (already loaded by the client; not imported with this module)

    inner = client._client  # noqa: SLF001 (OpenAI's client has no public name for it)

    class EndingTransport(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            held = _held_socket.get()
            if held is not None:
                timeouts = held.cut(request.extensions.get("timeout", {}))
                request.extensions = {**request.extensions, "timeout": timeouts}
            response: httpx.Response = inner.send(request, stream=True)
            if held is not None:
                held.hold(response)
            return response

    ending = httpx.Client(
        transport=EndingTransport(),
        headers=inner.headers,
        cookies=inner.cookies,
        params=inner.params,
        timeout=inner.timeout,
        trust_env=False,
    )
    return client.with_options(max_retries=0, http_client=ending)
