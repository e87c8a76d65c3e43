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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import LLM, CustomLLM, MockLLM
from llama_index.core.settings import Settings
from llama_index.core.utils import get_tokenizer

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import know_secrets
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.guard.bulkhead import Bulkhead, Permit

if TYPE_CHECKING:
    import httpx

DEFAULT_MODEL: Final = "gpt-4o-mini"
"""The chat model asked of a server that the environment names."""

MAX_PIECE: Final = 100_000
"""Maximum number of characters that are tokenized at once."""


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
    module = sys.modules.get("llama_index.llms.openai.base")
    if module is None or type(llm) is not module.OpenAI:
        return llm
    try:
        _ = llm.metadata
    except ValueError:
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
    structured_output(llm, "warm_up", {})
    for make in ("_get_client", "_get_aclient"):
        client = getattr(llm, make, None)
        if client is not None:
            _ = client().chat.completions


def tokens_of(text: str) -> list[Any]:
    """Return the tokens of a text, by LlamaIndex's global tokenizer.

    Long texts are split, which adds a token or two: OpenAI's tokenizer raises on a text of a million spaces.
    """
    encode = get_tokenizer()
    if len(text) <= MAX_PIECE:
        return encode(text)
    return [token for start in range(0, len(text), MAX_PIECE) for token in encode(text[start : start + MAX_PIECE])]


def count_tokens(text: str) -> int:
    """Return the number of tokens of a text, by LlamaIndex's global tokenizer."""
    return len(tokens_of(text))


def model_name(llm: LLM) -> str | None:
    """Return a model's name, or None if it has none."""
    name = getattr(llm, "model", None) or getattr(llm, "model_name", None)
    if isinstance(name, str):
        return name
    try:
        return llm.metadata.model_name
    except ValueError:
        return None


def structured_output(llm: LLM, name: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments that make an OpenAI model reply in a JSON schema; None if the model does not support it."""
    utils = sys.modules.get("llama_index.llms.openai.utils")
    if utils is None or not is_openai(llm) or not utils.is_json_schema_supported(llm.model):  # type: ignore[attr-defined]
        return None
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}}


def is_function_calling(llm: LLM) -> bool:
    """Return whether a model supports function calling."""
    try:
        return bool(llm.metadata.is_function_calling_model) and hasattr(llm, "chat_with_tools")
    except ValueError:
        return False


def chats(llm: LLM) -> bool:
    """Return whether a model is a chat model; otherwise it only completes prompts."""
    try:
        return bool(llm.metadata.is_chat_model)
    except ValueError:  # llama_index's OpenAI raises for names that it doesn't know
        return True


def prompt_of(llm: LLM, messages: Sequence[ChatMessage]) -> str:
    """Return messages as one prompt for a completion model, in the form that LlamaIndex core makes."""
    if len(messages) == 1 and messages[0].role is MessageRole.USER:
        return llm.completion_to_prompt(messages[0].content or "")  # type: ignore[misc]  # core's validators set both
    return llm.messages_to_prompt(messages)  # type: ignore[misc]


def is_openai(llm: LLM) -> bool:
    """Return whether a model is LlamaIndex's ``OpenAI``, without importing that class."""
    module = sys.modules.get("llama_index.llms.openai.base")
    return module is not None and isinstance(llm, module.OpenAI)


def has_native_async(llm: LLM, method: str = "achat") -> bool:
    """Return whether an async method is truly async; that of core's ``CustomLLM`` blocks the event loop."""
    if not isinstance(llm, CustomLLM):
        return True
    return inspect.unwrap(getattr(type(llm), method)) is not inspect.unwrap(getattr(CustomLLM, method))  # core's spans


# -- calls ------------------------------------------------------------------------------------------------------------

MODEL_PLACES: Final = 128
"""Maximum number of concurrent calls of one model object, including abandoned ones; further calls wait."""
GRACE_SECONDS: Final = 0.1
"""Seconds after its deadline at which a sync call ends itself; its caller has the timeout error by then."""

NextChunk: TypeAlias = Callable[[], Awaitable[Any]]


class ModelCalls:
    """Calls a model's methods by name; all users of a model share one object (see ``calls_of``).

    Args:
        model: The user's model, weakly referenced. Calls are made on a copy of it (see ``once``).
        what: The model's name in error messages.
        as_failure: Converts an exception of the model's client to the one that is raised.
    """

    def __init__(self, model: Any, what: str, as_failure: Callable[[Exception], Exception]) -> None:
        self.what = what
        self.bulkhead = Bulkhead(what, MODEL_PLACES)
        self._model = weakref.ref(model)
        self._as_failure = as_failure
        self._clients: dict[str, tuple[Any, Any]] = {}
        know_secrets(secrets_of(model))

    async def call(self, model: Any, method: str, *args: Any, deadline: float | None, **kwargs: Any) -> Any:
        """Call a method of ``model``, a copy, by its sync name; the async method has the prefix "a".

        Raises:
            Exception: The call failed; the error is the result of ``as_failure``, with the client's own as its cause.
            DeadlineExceededError: The call did not return by ``deadline``.
        """
        held, permit = _HeldSocket(deadline), Permit()
        work = self._works(held, model, method, args, kwargs)
        try:
            return await self.bulkhead.call(Call(*work, deadline=deadline, what=self.what), permit)
        except Exception as error:  # noqa: BLE001 (raised again, in one kind)
            self._raise(error, deadline)
        finally:
            held.hang_up(permit)

    @asynccontextmanager
    async def stream(
        self, model: Any, method: str, *args: Any, deadline: float | None, **kwargs: Any
    ) -> AsyncIterator[NextChunk]:
        """Open a stream and yield a function that returns its next chunk, or ``END``; see ``call``."""
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceededError(f"{self.what} was not begun: its deadline had passed")
        held, permit = _HeldSocket(deadline), Permit()
        work = self._works(held, model, method, args, kwargs)
        try:
            opened = await self.bulkhead.open(*work, permit, deadline=deadline, what=self.what)
        except Exception as error:  # noqa: BLE001 (raised again, in one kind)
            self._raise(error, deadline)

        async def next_chunk() -> Any:
            try:
                return await opened.next(deadline=deadline)
            except Exception as error:  # noqa: BLE001
                self._raise(error, deadline)

        try:
            yield next_chunk
        finally:
            opened.close()  # otherwise the model would continue to generate billed tokens
            self.bulkhead.leave(permit)
            held.hang_up(permit)

    def _raise(self, error: Exception, deadline: float | None) -> NoReturn:
        """Raise a failed call's error: ``DeadlineExceededError`` after the deadline, else that of ``as_failure``."""
        know_secrets(secrets_of(self._model()))  # its client may have been made since, or its key changed
        if isinstance(error, DeadlineExceededError | NotImplementedError):  # the latter: a model that can't stream
            raise error
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceededError(f"{self.what} was still running at its deadline") from error
        failure = self._as_failure(error)
        if failure is error:
            raise error
        raise failure from error

    def _works(
        self, held: _HeldSocket, model: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[[], Any], Callable[[], Awaitable[Any]] | None]:
        """Return functions that call a method synchronously and natively async; the latter is None if unsupported."""
        speaks, async_method = speaks_openai(model), f"a{method}"

        def sync() -> Any:
            _held_socket.set(held)  # each call has its own context
            if speaks:
                self._set_client(model, is_async=False)
            return getattr(model, method)(*args, **kwargs)

        async def native() -> Any:
            if speaks:
                self._set_client(model, is_async=True)
            return await getattr(model, async_method)(*args, **kwargs)

        return sync, native if has_native_async(model, async_method) else None

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

MAX_DEPTH: Final = 4
"""Maximum nesting depth of clients that are searched for secrets."""


def secrets_of(client: object, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yield the secrets of a client: API keys, header values, and credentials in URLs and environment variables.

    Args:
        client: A model, its client, or a mapping of arguments.
        depth: Remaining nesting depth of clients to search.
    """
    if depth == MAX_DEPTH:
        yield from (value for name, value in os.environ.items() if _SECRET.search(name) and not value.startswith("/"))
    private = getattr(client, "__pydantic_private__", None) or {}
    fields = client if isinstance(client, Mapping) else {**getattr(client, "__dict__", {}), **private}
    for name, held in [(str(name), held) for name, held in fields.items()]:
        value = held.get_secret_value() if hasattr(held, "get_secret_value") else held
        text = str(value) if isinstance(value, str) or type(value).__name__ == "URL" else ""
        address = urlsplit(text) if "://" in text else None
        if _SECRET.search(name):
            yield text
        elif address is not None:
            yield from (unquote(part) for part in (address.username or "", address.password or ""))
            yield from (value for _, value in parse_qsl(address.query))
        elif isinstance(value, Mapping) and re.search("header|query|cookie", name):
            yield from (str(one) for header, one in value.items() if not _PLAIN_HEADERS.match(str(header)))
        elif depth and (isinstance(value, dict) or name.endswith("client")):
            yield from secrets_of(value, depth - 1)


_CALLS: Final[dict[int, ModelCalls]] = {}
"""The ``ModelCalls`` of each live model, by ``id(model)``. Single dictionary operations need no lock."""


def calls_of(model: Any, what: str, as_failure: Callable[[Exception], Exception]) -> ModelCalls:
    """Return the shared ``ModelCalls`` of a model, created on first use and removed with the model object."""
    known = _CALLS.get(id(model))
    if known is None:
        known = _CALLS.setdefault(id(model), ModelCalls(model, what, as_failure))
        weakref.finalize(model, _CALLS.pop, id(model), None)
    return known


def speaks_openai(model: Any) -> bool:
    """Return whether a model uses OpenAI's client: LlamaIndex's ``OpenAI`` or ``OpenAIEmbedding``, or a subclass."""
    return is_openai(model) or is_a(model, "OpenAIEmbedding")


def is_a(model: object, *names: str) -> bool:
    """Return whether a model's class or one of its bases has one of these names, without importing the integration."""
    return not {kind.__name__ for kind in type(model).__mro__}.isdisjoint(names)


def share_clients(model: Any) -> None:
    """Create the clients of a model with OpenAI's client, so that copies of the model share them."""
    if speaks_openai(model) and getattr(model, "reuse_client", False):
        model._get_client()  # noqa: SLF001 (they have no public name)
        model._get_aclient()  # noqa: SLF001


def retries_itself(model: Any) -> bool:
    """Return whether a model's client retries and this can't be turned off."""
    own = getattr(model, "max_retries", None)
    return not speaks_openai(model) and isinstance(own, int) and own > 0


def once(twin: Any, model: Any) -> Any:
    """Return a copy of a model with OpenAI's client that does not retry; any other model is returned unchanged.

    ``twin`` is the user's model itself, which is never changed, or a copy of it.
    """
    if not speaks_openai(model):
        return twin
    made = copy.copy(model) if twin is model else twin
    made.max_retries = 0
    return made


# -- sync clients with a deadline ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _HeldSocket:
    """The socket of a sync call with a deadline, which another thread can shut down to end the call."""

    _deadline: float | None
    _socket: Any = None
    _hung_up: bool = False

    def cut(self, timeouts: dict[str, float | None]) -> dict[str, float | None]:
        """Return the timeouts of a request's phases, limited to the call's remaining time."""
        if self._deadline is None:
            return timeouts
        left = max(0.001, self._deadline + GRACE_SECONDS - time.monotonic())
        own = {phase: timeouts.get(phase) for phase in ("connect", "read", "write", "pool")}
        return {phase: left if seconds is None else min(left, seconds) for phase, seconds in own.items()}

    def hold(self, response: httpx.Response) -> None:
        """Store the socket of a response, and shut it down if the call was abandoned already."""
        stream = response.extensions.get("network_stream")
        self._socket = None if stream is None else stream.get_extra_info("socket")
        if self._hung_up:
            self._shut_down()

    def hang_up(self, permit: Permit) -> None:
        """Shut down the socket of a call that still runs after it was abandoned, so that it returns at once."""
        if permit.at_work:
            self._hung_up = True
            self._shut_down()

    def _shut_down(self) -> None:
        if isinstance(self._socket, socket.socket):
            with suppress(OSError):  # closed already
                self._socket.shutdown(socket.SHUT_RDWR)


_held_socket: ContextVar[_HeldSocket | None] = ContextVar("agentic_kb_held_socket", default=None)
"""The socket holder of the current call."""


def _ending_client(client: Any) -> Any:
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
