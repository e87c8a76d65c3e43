"""A server on 127.0.0.1 with OpenAI's API, and a real client configured to use it."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Protocol, Self

from llama_index_agentic_kb.testing.doubles import Script
from llama_index_agentic_kb.testing.openai_api import (
    ChatRequest,
    Json,
    Reply,
    Usage,
    completion,
    embeddings,
    error_body,
    fitting,
    stream_events,
)

if TYPE_CHECKING:
    import httpx
    from llama_index.llms.openai import OpenAI

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class RawAnswer(Protocol):
    """An answer that writes to the connection itself, possibly with faults; ``request`` is None if it is not a chat."""

    def send(self, connection: Connection, request: ChatRequest | None) -> None:
        """Answer one request."""


Answer = str | Reply | RawAnswer


@dataclass(frozen=True)
class RecordedRequest:
    """One HTTP request: path, JSON body (None for a GET), lower-case headers, and when it arrived (monotonic)."""

    path: str
    body: Json | None
    headers: Mapping[str, str]
    arrived: float


class HttpServer(socketserver.ThreadingTCPServer):
    """A TCP server on 127.0.0.1 with one thread for each connection; it can be stopped at any time."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(
        self, port: int, handler: Callable[[Any, Any, Any], Connection], errors: list[Exception] | None = None
    ) -> None:
        self.stopping = threading.Event()
        self.errors = [] if errors is None else errors
        self._open: set[socket.socket] = set()
        self._idle = threading.Condition()
        super().__init__(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), name="loopback-accept", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port of the server."""
        return int(self.server_address[1])

    def stop(self) -> None:
        """Stop listening and reset every connection, within about a second even if handlers are blocked."""
        self.stopping.set()
        self.shutdown()
        self.server_close()
        self._thread.join()
        # Reset, not closed: an asyncio client keeps a half-closed idle connection open and would leak it.
        for how in (socket.SHUT_RD, socket.SHUT_RDWR):
            with self._idle:
                for connection in self._open:
                    with contextlib.suppress(OSError):  # the client has already disconnected
                        reset_on_close(connection)
                        connection.shutdown(how)
                if self._idle.wait_for(lambda: not self._open, 0.5):
                    return

    def process_request(self, request: Any, client_address: Any) -> None:
        """Record the connection before its thread starts."""
        with self._idle:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; if it should be reset, no FIN may be sent before."""
        if request.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == _RESET_ON_CLOSE:
            request.close()
        else:
            super().shutdown_request(request)
        with self._idle:
            self._open.discard(request)
            self._idle.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver's signature
        """Add a handler's error to ``errors``, except for connection errors."""
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, ConnectionError):
            self.errors.append(error)


class Connection(BaseHTTPRequestHandler):
    """One connection: reads requests, and answers them with or without faults."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the second small write waits 40 ms for the client's acknowledgement
    server: HttpServer
    loopback: LoopbackOpenAI

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""

    def read_body(self) -> bytes:
        """Return the request's body, which needs a Content-Length header."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def pause(self, seconds: float | None) -> None:
        """Wait so many seconds, or with None until the server stops; then raise ``ConnectionAbortedError``."""
        if seconds != 0 and self.server.stopping.wait(seconds):
            raise ConnectionAbortedError("The loopback server was stopped.")

    def send_json(self, body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete JSON answer."""
        self.send_whole(json.dumps(body).encode(), "application/json", status, headers)

    def send_whole(self, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete answer with its Content-Length."""
        self.start_body(kind, len(body), status, headers)
        self.wfile.write(body)

    def start_body(
        self, kind: str, length: int | None, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send the status and headers; if ``length`` is None, the body follows in chunks."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        framing = ("Transfer-Encoding", "chunked") if length is None else ("Content-Length", str(length))
        for name, value in (framing, *(headers or {}).items()):
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk; an empty one ends the body."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def reset(self) -> None:
        """Reset the connection (RST) after this request; data sent before still arrives."""
        reset_on_close(self.connection)
        self.close_connection = True

    def reply(self, request: ChatRequest, reply: Reply) -> None:
        """Send a reply, plain or as a stream, and add its usage to the bill."""
        self.pause(reply.latency)
        if not request.stream:
            with self.loopback.charge(reply.usage_for(request)):
                self.send_json(completion(request, reply))
            return
        self.send_events(stream_events(request, reply), reply.chunk_delay)
        self.send_chunk(b"")

    def send_events(self, events: Iterable[tuple[bytes, Usage]], delay: float = 0.0) -> None:
        """Send the headers of a stream and its events, ``delay`` seconds apart; bill each event when it is sent."""
        self.start_body("text/event-stream; charset=utf-8", None)
        for at, (data, usage) in enumerate(events):
            self.pause(delay if at else 0)
            with self.loopback.charge(usage):
                self.send_chunk(data)

    def do_GET(self) -> None:
        """Answer a GET request."""
        self.loopback.answer(self, None)

    def do_POST(self) -> None:
        """Answer a POST request with a JSON object."""
        with contextlib.suppress(ValueError):
            body = json.loads(self.read_body())
            if isinstance(body, dict):
                return self.loopback.answer(self, body)
        return self.send_json(error_body("The body is not a JSON object.", 400), 400)


class LoopbackOpenAI:
    """A server with OpenAI's API on a free port of 127.0.0.1 that answers from a script, on a thread per connection.

    It supports ``POST /v1/chat/completions`` (plain, JSON schema, tools, streams) and ``POST /v1/embeddings``, accepts
    every model name and checks no key.

        with LoopbackOpenAI("Paris.") as server:
            assert server.llm().complete("The capital of France?").text == "Paris."
            assert server.billed.calls == 1

    Args:
        reply: Answers to chats: one for all; a list used in order; or a callable that maps each :class:`ChatRequest`
            to an answer, in the connection's thread, and may sleep. An answer is a str (JSON for a forced tool becomes
            its call), a :class:`Reply` that is sent unchanged, or a :class:`RawAnswer`. If the list is used up or the
            callable raises, the answer is HTTP 400, which no client retries, and ``errors`` has the error.
        embedding_fault: Answer to all requests for embeddings. Defaults to :func:`hash_vector` of each text.
    """

    def __init__(
        self,
        reply: Answer | Sequence[Answer] | Callable[[ChatRequest], Answer] = "OK.",
        *,
        embedding_fault: RawAnswer | None = None,
    ) -> None:
        self.embedding_fault = embedding_fault
        self.requests: list[RecordedRequest] = []  # all requests so far, in order of arrival
        self.errors: list[Exception] = []
        """Errors of the script, including the use of too many replies, and of connection handlers."""
        self._script: Script[ChatRequest, Answer] = Script(reply)
        self._bill: list[Usage] = []
        self._clients: list[httpx.Client] = []
        self._http: HttpServer | None = None
        self._port = 0

    def start(self) -> Self:
        """Start listening; after a stop, on the same port as before."""
        connection = type("_Connection", (Connection,), {"loopback": self})
        self._http = HttpServer(self._port, connection, self.errors)
        self._port = self._http.port
        return self

    def stop(self) -> None:
        """Reset every connection and stop listening, within about a second; do nothing if not running."""
        if self._http is not None:
            self._http.stop()
            self._http = None

    def __enter__(self) -> Self:
        """Start the server."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop the server and close the clients created by ``llm``."""
        self.stop()
        for client in self._clients:  # otherwise the garbage collector closes their sockets, with a warning
            client.close()

    @property
    def base_url(self) -> str:
        """The server's address with ``/v1``, for ``api_base``; known after the first start."""
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def chats(self) -> list[ChatRequest]:
        """The chat requests so far."""
        return [ChatRequest(one.body) for one in list(self.requests) if one.body is not None and one.path == _CHAT]

    @property
    def billed(self) -> Usage:
        """Total usage of the chats answered so far, without embeddings.

        A stream is billed its prompt at the first event, and its words when they are sent.
        """
        return sum(list(self._bill), Usage(calls=0))

    def llm(self, model: str = "gpt-4o-mini", **kwargs: Any) -> OpenAI:
        """Return a real ``llama_index.llms.openai.OpenAI`` that uses this server; ``kwargs`` are its arguments."""
        import httpx  # noqa: PLC0415 - only this method needs the client
        from llama_index.llms.openai import OpenAI  # noqa: PLC0415

        client = httpx.Client(verify=False)  # noqa: S501 - loopback over http: certificates would take 0.1 s to load
        self._clients.append(client)
        made = {"model": model, "api_base": self.base_url, "api_key": "sk-loopback-no-secret", "http_client": client}
        return OpenAI(**{**made, **kwargs})

    @contextlib.contextmanager
    def charge(self, usage: Usage) -> Iterator[None]:
        """Add usage to the bill before data is sent in this context, and remove it if sending fails."""
        self._bill.append(usage)
        try:
            yield
        except BaseException:
            self._bill.remove(usage)
            raise

    def answer(self, connection: Connection, body: Json | None) -> None:
        """Record one request and answer it on its connection."""
        path = connection.path.partition("?")[0]
        headers = {name.lower(): value for name, value in connection.headers.items()}
        self.requests.append(RecordedRequest(path, body, headers, time.monotonic()))
        # OpenAI's clients send their kind: an idle connection of an asyncio client outlives its loop, with a warning.
        connection.close_connection |= headers.get("x-stainless-async", "").startswith("async")
        if body is not None and path == "/v1/embeddings":
            if self.embedding_fault is None:
                connection.send_json(embeddings(body))
            else:
                self.embedding_fault.send(connection, None)
        elif body is not None and path == _CHAT:
            self._chat(connection, ChatRequest(body))
        else:
            connection.send_json(error_body(f"Nothing is served at {path}.", 404), 404)

    def _chat(self, connection: Connection, request: ChatRequest) -> None:
        try:
            answer = self._script.answer(request)
        except Exception as error:  # noqa: BLE001 - whatever the script raises, its client gets an answer
            self.errors.append(error)
            connection.send_json(error_body(f"The script raised {type(error).__name__}: {error}", 400), 400)
            return
        if isinstance(answer, str):
            answer = fitting(answer, request)
        if isinstance(answer, Reply):
            connection.reply(request, answer)
        else:
            answer.send(connection, request)


_CHAT = "/v1/chat/completions"


def reset_on_close(connection: socket.socket) -> None:
    """Configure a connection so that close() resets it (RST)."""
    with contextlib.suppress(OSError):  # closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
