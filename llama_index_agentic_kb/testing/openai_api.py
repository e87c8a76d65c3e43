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
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.testing.doubles import DIMENSIONS, count_tokens, hash_vector, scripted

if TYPE_CHECKING:
    import httpx
    from llama_index.llms.openai import OpenAI


_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_CHAT: Final = "/v1/chat/completions"


@dataclass(frozen=True)
class Usage:
    """Token counts of one call, or the sum over several calls."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 1

    def __add__(self, other: Usage) -> Usage:
        """Return the sum of token counts and calls."""
        completion = self.completion_tokens + other.completion_tokens
        return Usage(self.prompt_tokens + other.prompt_tokens, completion, self.calls + other.calls)

    @property
    def total_tokens(self) -> int:
        """The sum of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> JsonObject:
        """Return the token counts with OpenAI's field names."""
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return {**counts, "total_tokens": self.total_tokens}


@dataclass(frozen=True)
class ChatRequest:
    """The JSON body of one ``POST /v1/chat/completions``, as received."""

    body: JsonObject

    @property
    def messages(self) -> list[JsonObject]:
        """The messages in JSON form, oldest first."""
        return list(self.body.get("messages") or [])

    @property
    def text(self) -> str:
        """The texts of all messages, joined by line feeds."""
        return "\n".join(_text_of(message) for message in self.messages)

    @property
    def last(self) -> str:
        """The text of the last message; empty if there are no messages."""
        return _text_of(self.messages[-1]) if self.messages else ""

    @property
    def stream(self) -> bool:
        """Whether the client requests server-sent events."""
        return bool(self.body.get("stream"))

    @property
    def response_format(self) -> JsonObject | None:
        """The ``response_format``, such as a JSON schema. None if it is not set."""
        return self.body.get("response_format")

    @property
    def tools(self) -> list[JsonObject]:
        """The tools offered to the model, in JSON form."""
        return list(self.body.get("tools") or [])

    @property
    def forced_tool(self) -> str | None:
        """The tool named by ``tool_choice``, or the first tool if it is "required". None if no tool is forced."""
        choice = self.body.get("tool_choice")
        chosen = self.tools[0] if choice == "required" and self.tools else choice
        return str(chosen["function"]["name"]) if isinstance(chosen, dict) else None


@dataclass(frozen=True)
class Reply:
    """One answer of the model; times are in seconds.

    ``tool_calls`` are pairs of a tool's name and its arguments: an object, or a str that is sent unchanged.
    """

    content: str | None = None
    tool_calls: Sequence[tuple[str, JsonMapping | str]] = ()
    finish_reason: str = "stop"  # becomes "tool_calls" if there are tool calls
    refusal: str | None = None
    latency: float = 0.0  # before the first byte
    chunk_delay: float = 0.0  # before each further piece of a stream
    chunk_size: int = 16  # characters in each piece of a stream, at least 1
    usage: Usage | None = None  # reported and billed; defaults to the counted tokens of messages and answer
    report_usage: bool = True  # some gateways omit it; it is billed in any case

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The tool calls as pairs of a name and arguments in JSON text."""
        return [(name, given if isinstance(given, str) else json.dumps(given)) for name, given in self.tool_calls]

    @property
    def stop_reason(self) -> str:
        """The finish reason that is sent."""
        return "tool_calls" if self.tool_calls and self.finish_reason == "stop" else self.finish_reason

    def usage_for(self, request: ChatRequest) -> Usage:
        """Return the usage of this answer to a request."""
        parts = [self.content or "", self.refusal or "", *(part for call in self.calls for part in call)]
        return self.usage or Usage(count_tokens(request.text), sum(map(count_tokens, parts)))


def error_body(message: str, status: int) -> JsonObject:
    """Return the body of an error in the form of OpenAI's API."""
    return {"error": {"message": message, "type": "loopback_error", "param": None, "code": str(status)}}


def envelope(request: ChatRequest, choices: Sequence[JsonObject]) -> JsonObject:
    """Return an answer, or a chunk of one, with these choices; its time is constant for reproducible answers."""
    kind, model = "chat.completion.chunk" if request.stream else "chat.completion", str(request.body.get("model", ""))
    made = {"id": "chatcmpl-loopback", "object": kind, "created": 1_700_000_000, "model": model}
    return {**made, "choices": [*choices]}


def completion(request: ChatRequest, reply: Reply) -> JsonObject:
    """Return the JSON body of an answer that is not streamed."""
    message: JsonObject = {"role": "assistant", "content": reply.content, "refusal": reply.refusal}
    if reply.calls:
        message["tool_calls"] = [_tool_call(index, *call) for index, call in enumerate(reply.calls)]
    body = envelope(request, [{"index": 0, "message": message, "logprobs": None, "finish_reason": reply.stop_reason}])
    return body | ({"usage": reply.usage_for(request).to_json()} if reply.report_usage else {})


def stream_events(request: ChatRequest, reply: Reply) -> Iterator[tuple[bytes, Usage]]:
    """Yield the events of a streamed answer, from the role to ``[DONE]``, each with its usage."""
    whole, sent, billed = reply.usage_for(request), "", 0
    asks_usage = bool((request.body.get("stream_options") or {}).get("include_usage"))

    def chunk(delta: JsonObject, finish_reason: str | None = None) -> bytes:
        body = envelope(request, [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}])
        # OpenAI puts a null into all but the last chunk.
        return event(body | {"usage": None} if asks_usage else body)

    yield chunk({"role": "assistant", "content": reply.content and "", "refusal": None}), Usage(whole.prompt_tokens)
    for delta, words in _deltas(reply):
        sent += words
        due = min(count_tokens(sent), whole.completion_tokens)
        yield chunk(delta), Usage(0, due - billed, calls=0)
        billed = due
    ending = chunk({}, reply.stop_reason)
    if asks_usage and reply.report_usage:
        ending += event(envelope(request, []) | {"usage": whole.to_json()})
    yield ending + b"data: [DONE]\n\n", Usage(0, whole.completion_tokens - billed, calls=0)


def event(body: JsonObject | str) -> bytes:
    """Return one server-sent event; a str is sent unchanged."""
    return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode()


def _deltas(reply: Reply) -> Iterator[tuple[JsonObject, str]]:
    """Yield the pieces of a streamed answer and the words in each: content, refusal, then each tool call."""

    def split(text: str) -> list[str]:
        return [text[start : start + reply.chunk_size] for start in range(0, len(text), reply.chunk_size)]

    for kind, text in (("content", reply.content), ("refusal", reply.refusal)):
        for piece in split(text or ""):
            yield {kind: piece}, piece
    for index, (name, arguments) in enumerate(reply.calls):
        yield {"tool_calls": [{**_tool_call(index, name, ""), "index": index}]}, f" {name} "
        for piece in split(arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, piece


def _tool_call(index: int, name: str, arguments: str) -> JsonObject:
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def embeddings(body: JsonObject) -> JsonObject:
    """Return the answer to a request for embeddings: the hash vector of each text."""
    asked, dimensions = body.get("input", ""), int(body.get("dimensions") or DIMENSIONS)
    texts = [asked] if isinstance(asked, str) else list(map(str, asked))
    vectors = [hash_vector(text, dimensions) for text in texts]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    usage = dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(count_tokens, texts)))
    return {"object": "list", "data": data, "model": body.get("model", ""), "usage": usage}


def _text_of(message: JsonMapping) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return content or ""


# -- the server -------------------------------------------------------------------------------------------------------


class RawAnswer(Protocol):
    """An answer that writes to the connection itself, possibly with faults; ``request`` is None if it is not a chat."""

    def send(self, connection: Connection, request: ChatRequest | None) -> None:
        """Answer one request."""


Answer = str | Reply | RawAnswer


@dataclass(frozen=True)
class RecordedRequest:
    """One HTTP request: path, JSON body (None for a GET), lower-case headers, and when it arrived (monotonic)."""

    path: str
    body: JsonObject | None
    headers: Mapping[str, str]
    arrived: float


class HttpServer(socketserver.ThreadingTCPServer):
    """A TCP server on 127.0.0.1 with one thread for each connection; it can be stopped at any time."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, port: int, handler: Callable[[Any, Any, Any], Connection], errors: list[Exception]) -> None:
        self.stopping, self.errors = threading.Event(), errors
        self._open: set[socket.socket] = set()
        self._idle = threading.Condition()
        super().__init__(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), name="loopback-accept", daemon=True)
        self._thread.start()

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
        self._script: Callable[[ChatRequest], Answer] = scripted(reply)
        self._bill: list[Usage] = []
        self._clients: list[httpx.Client] = []
        self._http: HttpServer | None = None
        self._port = 0

    def start(self) -> Self:
        """Start listening; after a stop, on the same port as before."""
        connection = type("_Connection", (Connection,), {"loopback": self})
        self._http = HttpServer(self._port, connection, self.errors)
        self._port = int(self._http.server_address[1])
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

    def answer(self, connection: Connection, body: JsonObject | None) -> None:
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
            answer = self._script(request)
        except Exception as error:  # noqa: BLE001 - whatever the script raises, its client gets an answer
            self.errors.append(error)
            connection.send_json(error_body(f"The script raised {type(error).__name__}: {error}", 400), 400)
            return
        if isinstance(answer, str):
            text, answer = answer, Reply(answer)
            with contextlib.suppress(ValueError):  # JSON for a forced tool becomes its call
                if request.forced_tool is not None and isinstance(json.loads(text), dict):
                    answer = Reply(tool_calls=[(request.forced_tool, text)])
        if isinstance(answer, Reply):
            connection.reply(request, answer)
        else:
            answer.send(connection, request)


def reset_on_close(connection: socket.socket) -> None:
    """Configure a connection so that close() resets it (RST)."""
    with contextlib.suppress(OSError):  # closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
