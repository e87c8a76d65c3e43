"""A loopback server that records what Google's REST client sends, and sends what a test gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import discoveryengine_v1

from llama_index_agentic_kb.testing.server import Connection, HttpServer


@dataclass(frozen=True)
class Recorded:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes

    @property
    def resource(self) -> str:
        """The resource name in the path, without version and method."""
        return self.path.removeprefix("/v1/").rsplit(":", 1)[0]


class LoopbackGoogle:
    """Answers each request with ``body`` (or, where it is a list, with its pieces as chunks) and ``status``.

    Where there is a ``service``, it is asked for the body instead.
    """

    def __init__(self) -> None:
        self.requests: list[Recorded] = []
        self.status = 200
        self.body: bytes | list[bytes] = b"{}"
        self.service: Callable[[Recorded], bytes | list[bytes]] | None = None

    def __enter__(self) -> Self:
        outer = self

        class Handler(Connection):
            def _serve(self) -> None:
                parts = urlsplit(self.path)
                query = dict(parse_qsl(parts.query, keep_blank_values=True))
                outer.requests.append(Recorded(self.command, unquote(parts.path), query, self.read_body()))
                body = outer.body if outer.service is None else outer.service(outer.last)
                if isinstance(body, bytes):
                    self.send_whole(body, "application/json; charset=UTF-8", outer.status)
                    return
                self.start_body("application/json; charset=UTF-8", None, outer.status)
                for piece in [*filter(None, body), b""]:
                    self.send_chunk(piece)

            do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 (the base class's names)

        self._server = HttpServer(0, Handler)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        assert not self._server.errors, self._server.errors

    @property
    def last(self) -> Recorded:
        """The last request."""
        return self.requests[-1]

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.port}"

    @contextmanager
    def client(self, name: str) -> Iterator[Any]:
        """One of Google's clients over REST, pointed here."""
        options = ClientOptions(api_endpoint=self.url)
        client = getattr(discoveryengine_v1, name)(
            transport="rest",
            credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]  # google-auth is half typed
            client_options=options,
        )
        with client:
            yield client


def chunked(data: Iterable[bytes], size: int) -> list[bytes]:
    """Cut what is sent anew, characters and objects alike."""
    whole = b"".join(data)
    return [whole[at : at + size] for at in range(0, len(whole), size)]
