"""A server on 127.0.0.1 that speaks OpenAI's API, and the real client pointed at it."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from llama_index_agentic_kb.testing import _wire
from llama_index_agentic_kb.testing._chat import Ledger, answer_fault, answer_nothing, answer_reply
from llama_index_agentic_kb.testing._faults import Fault
from llama_index_agentic_kb.testing._http import HttpHandler, HttpServer
from llama_index_agentic_kb.testing._replies import ChatRequest, Reply, Usage, fit_to_request
from llama_index_agentic_kb.testing._script import Script
from llama_index_agentic_kb.testing._text import DEFAULT_DIMENSIONS

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import httpx
    from llama_index.llms.openai import OpenAI

__all__ = ["Answer", "LoopbackOpenAI", "RecordedRequest"]

Answer = str | Reply | Fault

_KEY = "sk-loopback-no-secret"


@dataclass(frozen=True)
class RecordedRequest:
    """One HTTP request, as it arrived.

    Args:
        path: Such as ``/v1/chat/completions``.
        body: The JSON object sent; None for a GET.
        headers: By lower-case name.
        arrived: When the body was read, in seconds of :func:`time.monotonic`.
    """

    path: str
    body: dict[str, Any] | None
    headers: Mapping[str, str]
    arrived: float


class LoopbackOpenAI:
    """OpenAI's API on a free port of 127.0.0.1, answering from a script.

    It speaks ``POST /v1/chat/completions`` (plain, JSON schema, tools, streams), ``POST /v1/embeddings`` and
    ``GET /v1/models``, knows every model name and checks no key. Each connection has a thread of its own.

        with LoopbackOpenAI("Paris.") as server:
            assert server.llm().complete("The capital of France?").text == "Paris."
            assert server.billed.calls == 1

    Args:
        reply: What chats are answered: one answer for all; a list, consumed in order; or a callable, which is given
            each :class:`ChatRequest` in the connection's own thread and may sleep. An answer is a str (JSON for a
            forced tool becomes its call, see :func:`fit_to_request`), a :class:`Reply`, sent exactly as it is, or a
            :class:`Fault`. A list used up and a callable that raises are answered by HTTP 400, which no client
            retries, and noted in ``errors``.
        keep_alive: Whether connections are kept after an answer. None keeps those of sync clients only: an asyncio
            client whose event loop ends with an idle connection leaves a ResourceWarning behind. Set True to see
            what happens when such a client is used from a second event loop.
        models: What ``GET /v1/models`` lists.
        dimensions: The length of embeddings, unless a request names another.
        embedding_fault: How requests for embeddings fail: by ``Fault.status``, ``hang``, ``reset`` or ``html``. None
            answers them. May be set while the server runs, as ``dimensions`` may.
    """

    def __init__(
        self,
        reply: Answer | Sequence[Answer] | Callable[[ChatRequest], Answer] = "OK.",
        *,
        keep_alive: bool | None = None,
        models: Sequence[str] = ("gpt-4o-mini",),
        dimensions: int = DEFAULT_DIMENSIONS,
        embedding_fault: Fault | None = None,
    ) -> None:
        self.keep_alive = keep_alive
        self.models = tuple(models)
        self.dimensions = dimensions
        self.embedding_fault = embedding_fault
        self._script: Script[ChatRequest, Answer] = Script(reply)
        self._ledger = Ledger()
        self._clients: list[httpx.Client] = []
        self._lock = threading.Lock()
        self._requests: list[RecordedRequest] = []
        self._errors: list[Exception] = []
        self._http: HttpServer | None = None
        self._port = 0

    def start(self) -> Self:
        """Listen. After a stop, the same port is listened on again.

        Raises:
            RuntimeError: The server is running.
        """
        if self._http is not None:
            raise RuntimeError("The loopback server is running already.")
        self._http = HttpServer(self._port, functools.partial(_Handler, self))
        self._port = self._http.port
        return self

    def stop(self) -> None:
        """Reset every connection and stop listening, within about a second; harmless when not running."""
        if self._http is None:
            return
        self._http.stop()
        self._errors.extend(self._http.errors)
        self._http = None

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, for good: the clients that ``llm`` made are closed too."""
        self.stop()
        for client in self._clients:  # else the garbage collector closes their sockets, with a warning
            client.close()

    @property
    def base_url(self) -> str:
        """The address with ``/v1``, as ``api_base`` takes it; known from the first start on.

        Raises:
            RuntimeError: The server was never started.
        """
        if not self._port:
            raise RuntimeError("The loopback server has no address before it is started.")
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def requests(self) -> list[RecordedRequest]:
        """Every request so far, in order of arrival."""
        with self._lock:
            return list(self._requests)

    @property
    def chats(self) -> list[ChatRequest]:
        """The chat requests among them."""
        return [ChatRequest(r.body) for r in self.requests if r.body is not None and r.path == _CHAT]

    @property
    def billed(self) -> Usage:
        """What the chats answered so far cost.

        A plain answer is billed once all of it was sent; a stream is billed its prompt at the first event and its
        words as they are sent, so that one broken off costs what was told. Embeddings are not counted.
        """
        return self._ledger.total

    @property
    def errors(self) -> list[Exception]:
        """What the script raised, a list used up included."""
        running = self._http.errors if self._http is not None else []
        return [*self._errors, *running]

    def llm(self, model: str = "gpt-4o-mini", **kwargs: Any) -> OpenAI:
        """Make the real ``llama_index.llms.openai.OpenAI`` that talks to this server.

        Args:
            model: Any name; LlamaIndex itself raises for the ``metadata`` of one it does not know.
            **kwargs: For the constructor, such as ``max_retries=0``; LlamaIndex's own default is 3.
        """
        import httpx  # noqa: PLC0415 - only this method needs the client
        from llama_index.llms.openai import OpenAI  # noqa: PLC0415

        client = httpx.Client(verify=False)  # noqa: S501 - loopback over http: certificates would take 0.1 s to load
        self._clients.append(client)
        return OpenAI(**{"model": model, "api_base": self.base_url, "api_key": _KEY, "http_client": client, **kwargs})

    def answer(self, handler: HttpHandler, path: str, body: dict[str, Any] | None) -> None:
        """Answer one request; for the handler of a connection."""
        self._record(RecordedRequest(path, body, {k.lower(): v for k, v in handler.headers.items()}, time.monotonic()))
        if body is None and path == "/v1/models":
            handler.send_json(_wire.model_list(self.models))
        elif body is not None and path == "/v1/embeddings":
            self._embed(handler, body)
        elif body is not None and path == _CHAT:
            self._chat(handler, ChatRequest(body))
        else:
            handler.send_json(_wire.error(f"Nothing is served at {path}.", HTTPStatus.NOT_FOUND), HTTPStatus.NOT_FOUND)

    def _embed(self, handler: HttpHandler, body: dict[str, Any]) -> None:
        if self.embedding_fault is not None:
            answer_nothing(handler, self.embedding_fault)
            return
        handler.send_json(_wire.embeddings(body, self.dimensions))

    def _chat(self, handler: HttpHandler, request: ChatRequest) -> None:
        try:
            answer = self._script.answer(request)
        except Exception as error:  # noqa: BLE001 - whatever the script raises, its client gets an answer
            self._refuse(handler, error)
            return
        if isinstance(answer, Fault):
            answer_fault(handler, self._ledger, request, answer)
            return
        reply = fit_to_request(answer, request) if isinstance(answer, str) else answer
        answer_reply(handler, self._ledger, request, reply)

    def _refuse(self, handler: HttpHandler, error: Exception) -> None:
        with self._lock:
            self._errors.append(error)
        message = f"The script raised {type(error).__name__}: {error}"
        handler.send_json(_wire.error(message, HTTPStatus.BAD_REQUEST), HTTPStatus.BAD_REQUEST)

    def _record(self, request: RecordedRequest) -> None:
        with self._lock:
            self._requests.append(request)


class _Handler(HttpHandler):
    """Reads requests and has the loopback server answer them."""

    def __init__(self, loopback: LoopbackOpenAI, *args: Any) -> None:
        self._loopback = loopback
        super().__init__(*args)

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        """Answer a GET."""
        self._answer(None)

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        """Answer a POST of a JSON object."""
        raw = self.read_body()
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            message = "The body is no JSON object."
            self.send_json(_wire.error(message, HTTPStatus.BAD_REQUEST), HTTPStatus.BAD_REQUEST)
            return
        self._answer(body)

    def _answer(self, body: dict[str, Any] | None) -> None:
        if not self._keeps_alive():
            self.close()
        self._loopback.answer(self, self.path.partition("?")[0], body)

    def _keeps_alive(self) -> bool:
        if self._loopback.keep_alive is None:
            # OpenAI's clients tell which one they are.
            return not self.headers.get("x-stainless-async", "").startswith("async")
        return self._loopback.keep_alive


_CHAT = "/v1/chat/completions"
