"""An HTTP server on loopback that answers by a function: what the tests' stand-ins of services have in common."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from llama_index_agentic_kb._types import Closing


class Asked(NamedTuple):
    method: str
    path: str  # with its query
    headers: Message
    body: bytes


class Loopback(Closing):
    """A server on a free port; ``answer`` returns a status and a page (a str) or JSON data."""

    def __init__(self, answer: Callable[[Asked], tuple[int, Any]], headers: Mapping[str, str] | None = None) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # otherwise the second small write waits 40 ms for an acknowledgement

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, made = answer(Asked(self.command, self.path, self.headers, body))
                data = made.encode() if isinstance(made, str) else json.dumps(made).encode()
                kind = "text/html" if isinstance(made, str) else "application/json"
                self.send_response(status)
                for header in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
                    self.send_header(*header)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _serve  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
