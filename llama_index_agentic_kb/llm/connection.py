"""Calls of OpenAI's client that try once and end with their deadline.

LlamaIndex's ``OpenAI`` retries inside and outside of OpenAI's client, which retries too: 12 requests for one failing
call (llama-index-llms-openai 0.8.3, openai 2.54). And its sync client only bounds the time between two bytes, so that
a server which drips keeps a thread for ever. Here a shallow copy of the model is called, with clients of ours that
share the user's connections, settings and credentials.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import httpx

__all__ = ["GRACE_SECONDS", "Connection", "OnceClients", "connection"]

GRACE_SECONDS: Final = 0.1
"""How long after its deadline a call ends by itself: by then whoever waited for it has been told."""

connection: ContextVar[Connection | None] = ContextVar("agentic_kb_connection", default=None)
"""That of the call which this code runs in."""


class Connection:
    """What a sync call holds open, so that it can be ended from another thread.

    Args:
        deadline: ``time.monotonic()`` of the call; None is no limit.
    """

    def __init__(self, deadline: float | None) -> None:
        self._ends = None if deadline is None else deadline + GRACE_SECONDS
        self._socket: Any = None
        self._hung_up = False

    @property
    def left(self) -> float | None:
        """Seconds until the call shall end, at least 0.001; None is no limit."""
        return None if self._ends is None else max(0.001, self._ends - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether nobody waits for the call any more."""
        return self._hung_up or (self._ends is not None and time.monotonic() >= self._ends)

    def hold(self, response: httpx.Response) -> None:
        """Keep the socket that a response is read from."""
        stream = response.extensions.get("network_stream")
        self._socket = None if stream is None else stream.get_extra_info("socket")

    def release(self) -> None:
        """Let the socket go: its response was read."""
        self._socket = None

    def hang_up(self) -> None:
        """End a call that nobody waits for: what reads its socket comes back at once."""
        self._hung_up = True
        held = self._socket
        if isinstance(held, socket.socket):
            with suppress(OSError):  # closed already
                held.shutdown(socket.SHUT_RDWR)


class OnceClients:
    """Makes of an ``OpenAI``'s clients ones that try once; each is made once."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}

    def give(self, llm: Any, once: Any, *, is_async: bool) -> None:
        """Give the copy of a model its client; where the model makes a new client for each call, it does so itself.

        Args:
            llm: The user's ``OpenAI``: its client is made where there is none yet, as its own calls would.
            once: The copy, with ``max_retries=0``.
            is_async: Which client.
        """
        if not llm.reuse_client:
            return
        name = "_aclient" if is_async else "_client"
        theirs = llm._get_aclient() if is_async else llm._get_client()  # noqa: SLF001 (they have no public name)
        made = self._made.get(name)  # two threads may make one each: either serves
        if made is None or made[0] is not theirs:
            ours = theirs.with_options(max_retries=0) if is_async else _ending(theirs)
            made = self._made[name] = (theirs, ours)
        setattr(once, name, made[1])


def _ending(client: Any) -> Any:
    """Give a sync client that tries once, and ends with the deadline of the call that it serves."""
    import httpx  # noqa: PLC0415 (the client is loaded, so this is too)

    theirs = client._client  # noqa: SLF001 (OpenAI's client has no public name for it)
    ours = httpx.Client(
        transport=_transport_class()(theirs),
        headers=theirs.headers,
        cookies=theirs.cookies,
        params=theirs.params,
        timeout=theirs.timeout,
        trust_env=False,
    )
    return client.with_options(max_retries=0, http_client=ours)


@cache
def _transport_class() -> Any:
    """Give the transport's class; made late, for httpx is not imported with this module."""
    import httpx  # noqa: PLC0415

    class EndingStream(httpx.SyncByteStream):
        """A response's bytes, until its call is over."""

        def __init__(self, response: httpx.Response, held: Connection) -> None:
            self._response = response
            self._held = held

        def __iter__(self) -> Iterator[bytes]:
            for chunk in self._response.iter_raw():
                if self._held.over:
                    raise httpx.ReadTimeout("the call's deadline has passed", request=self._response.request)
                yield chunk

        def close(self) -> None:
            self._held.release()
            self._response.close()

    class EndingTransport(httpx.BaseTransport):
        """Sends through the user's own client: its proxies, certificates, authentication and pool."""

        def __init__(self, client: httpx.Client) -> None:
            self._client = client

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            held = connection.get() or Connection(None)
            if held.left is not None:
                given = request.extensions.get("timeout", {})
                request.extensions = {**request.extensions, "timeout": _shortened(given, held.left)}
            response = self._client.send(request, stream=True)
            held.hold(response)
            stream = EndingStream(response, held)
            return httpx.Response(
                response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
            )

    return EndingTransport


def _shortened(timeout: dict[str, float | None], left: float) -> dict[str, float]:
    return {
        phase: left if timeout.get(phase) is None else min(left, timeout[phase] or 0.0)
        for phase in ("connect", "read", "write", "pool")
    }
