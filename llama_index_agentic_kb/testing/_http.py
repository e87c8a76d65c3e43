"""The sockets and HTTP/1.1 under the loopback server: keep-alive, chunks, resets and a quick end."""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

__all__ = ["HttpHandler", "HttpServer"]

# How long stop() waits for handlers, twice: once after they can read no more, once after they can't write either.
_STOP_WAIT = 0.5
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_STOPPED = "The loopback server was stopped."


class HttpServer(socketserver.ThreadingTCPServer):
    """A TCP server with a thread for each connection that can always be stopped.

    Args:
        port: The port on 127.0.0.1; 0 lets the system choose.
        handler: Makes the handler of a connection.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, port: int, handler: Callable[[Any, Any, Any], HttpHandler]) -> None:
        self.stopping = threading.Event()
        self.errors: list[Exception] = []
        self._open: set[socket.socket] = set()
        self._idle = threading.Condition()
        super().__init__(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), name="loopback-accept", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port listened on."""
        return int(self.server_address[1])

    def stop(self) -> None:
        """Stop listening and reset every connection, within about a second whatever the handlers do."""
        self.stopping.set()
        self.shutdown()
        self.server_close()
        self._thread.join()
        # Reset rather than closed: an asyncio client keeps a half-closed idle connection open and would leak it.
        self._shut_all(socket.SHUT_RD)
        if not self._wait_until_idle():
            self._shut_all(socket.SHUT_RDWR)
            self._wait_until_idle()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Note the connection, then give it a thread."""
        with self._idle:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; one that is to be reset must not say goodbye (FIN) first."""
        if resets_on_close(request):
            request.close()
        else:
            super().shutdown_request(request)
        with self._idle:
            self._open.discard(request)
            self._idle.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver's signature
        """Keep a handler's error for the test; a client that left is none."""
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, ConnectionError):
            self.errors.append(error)

    def _shut_all(self, how: int) -> None:
        with self._idle:
            for connection in self._open:
                reset_on_close(connection)
                _shut(connection, how)

    def _wait_until_idle(self) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, _STOP_WAIT)


class HttpHandler(BaseHTTPRequestHandler):
    """One connection: reads requests, and can answer them well or badly."""

    protocol_version = "HTTP/1.1"
    # Without it, the second small write of an answer waits up to 40 ms for the client's acknowledgement.
    disable_nagle_algorithm = True
    server: HttpServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""

    def version_string(self) -> str:
        """Name the server in its headers."""
        return "LoopbackOpenAI"

    def read_body(self) -> bytes:
        """Read the request's body; it has to come with a Content-Length."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def pause(self, seconds: float | None) -> None:
        """Wait, or with None wait for the end.

        Raises:
            ConnectionAbortedError: The server was stopped meanwhile.
        """
        if seconds != 0 and self.server.stopping.wait(seconds):
            raise ConnectionAbortedError(_STOPPED)

    def send_json(self, body: object, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> None:
        """Send a whole JSON answer."""
        self.send_whole(json.dumps(body).encode(), "application/json", status, headers)

    def send_whole(
        self, body: bytes, kind: str, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None
    ) -> None:
        """Send a whole answer of a known length."""
        self.start_body(kind, len(body), status, headers)
        self.wfile.write(body)

    def start_body(
        self, kind: str, length: int | None, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None
    ) -> None:
        """Send the status and headers; a body of unknown length (None) follows in chunks."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        framing = ("Transfer-Encoding", "chunked") if length is None else ("Content-Length", str(length))
        self.send_header(*framing)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk; an empty one ends the body."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def close(self) -> None:
        """Close the connection (FIN) once this request is done."""
        self.close_connection = True

    def reset(self) -> None:
        """Reset the connection (RST) once this request is done; what was sent before still arrives."""
        reset_on_close(self.connection)
        self.close_connection = True


def reset_on_close(connection: socket.socket) -> None:
    """Make close() reset the connection."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    except OSError:
        return  # closed already


def resets_on_close(connection: socket.socket) -> bool:
    """Tell whether close() would reset the connection."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == _RESET_ON_CLOSE


def _shut(connection: socket.socket, how: int) -> None:
    try:
        connection.shutdown(how)
    except OSError:
        return  # the client went first
