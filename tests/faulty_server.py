"""The ways a language model's server fails: answers of the loopback server that no working server gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llama_index_agentic_kb.testing.openai_api import (
    ChatRequest,
    Connection,
    Reply,
    completion,
    envelope,
    error_body,
    stream_events,
)

_SPOKEN: Final = "This answer is cut before all of it was sent."
_PAGE: Final = b"<!doctype html><html><body><h1>Sign in to the network</h1></body></html>"

_Send = Callable[[Connection, ChatRequest | None, "Fault"], None]


@dataclass(frozen=True)
class Fault:
    """One failure, for the place of a reply; made by the constructors below.

    Refused, filtered and truncated answers are billed in full, a drip if it arrives, and a broken stream what was sent
    before it broke. The others cost nothing.
    """

    kind: str
    act: _Send
    code: int = 200
    retry_after: float | str | None = None
    seconds: float | None = None
    content: str = _SPOKEN

    def send(self, connection: Connection, request: ChatRequest | None) -> None:
        self.act(connection, request, self)

    def __str__(self) -> str:
        """Return a name that is the same in every process, for the ids of tests."""
        return f"{self.kind}-{self.code}"

    @classmethod
    def status(cls, code: int, retry_after: float | str | None = None) -> Fault:
        """An HTTP error with OpenAI's JSON error body, such as 429, 500 or 503."""
        return cls("status", _status, code=code, retry_after=retry_after)

    @classmethod
    def hang(cls, seconds: float | None = None) -> Fault:
        """Nothing, then the end of the connection: after so many seconds, or None when the server stops."""
        return cls("hang", _hang, seconds=seconds)

    @classmethod
    def reset(cls) -> Fault:
        """A reset of the connection (TCP RST) without a byte of answer."""
        return cls("reset", lambda connection, _, __: connection.reset())

    @classmethod
    def cut(cls) -> Fault:
        """The end of the connection (TCP FIN) midway through the body, plain or streamed."""
        return cls("cut", _break)

    @classmethod
    def html(cls) -> Fault:
        """200 with a web page, as a captive portal or a proxy answers."""
        return cls("html", lambda connection, _, __: connection.send_whole(_PAGE, "text/html; charset=utf-8"))

    @classmethod
    def bad_json(cls) -> Fault:
        """200 with half a JSON object."""
        return cls("bad_json", _body_of(lambda _: '{"id": "chatcmpl-loopback", "choices": [{"index": 0, "mess'))

    @classmethod
    def error_body(cls) -> Fault:
        """200 with ``{"error": ...}`` in the body."""
        return cls("error_body", _body_of(lambda _: json.dumps(error_body("Scripted error in a 200 answer.", 500))))

    @classmethod
    def no_choices(cls) -> Fault:
        """200 with a completion whose ``choices`` are empty."""
        return cls("no_choices", _body_of(lambda request: json.dumps(envelope(request, []))))

    @classmethod
    def null_content(cls) -> Fault:
        """``"content": null`` and nothing else, finished by "stop"."""
        return cls("null_content", _reply(lambda _: Reply(None)))

    @classmethod
    def refusal(cls, content: str = "I'm sorry, but I can't help with that.") -> Fault:
        """A refusal: the words stand in ``refusal``, the content is null, finished by "stop"."""
        return cls("refusal", _reply(lambda fault: Reply(None, refusal=fault.content)), content=content)

    @classmethod
    def content_filter(cls, content: str = "") -> Fault:
        """What the provider's filter left over, finished by "content_filter"."""
        reply = _reply(lambda fault: Reply(fault.content, finish_reason="content_filter"))
        return cls("content_filter", reply, content=content)

    @classmethod
    def length(cls, content: str = _SPOKEN) -> Fault:
        """A text that was cut off at the token limit, finished by "length"."""
        return cls("length", _reply(lambda fault: Reply(fault.content, finish_reason="length")), content=content)

    @classmethod
    def drip(cls, seconds: float = 0.3, content: str = _SPOKEN) -> Fault:
        """A good answer one byte at a time, so many seconds apart: no read timeout ever fires."""
        return cls("drip", _drip, seconds=seconds, content=content)

    @classmethod
    def stream_cut(cls, content: str = _SPOKEN) -> Fault:
        """A stream that ends cleanly after half the text, without finish reason; a plain body: as ``cut``."""
        return cls("stream_cut", _break, content=content)

    @classmethod
    def stream_hang(cls, seconds: float | None = None, content: str = _SPOKEN) -> Fault:
        """Silence after half the text, or half the plain body; ``seconds`` as in :meth:`hang`."""
        return cls("stream_hang", _break, seconds=seconds, content=content)

    @classmethod
    def stream_reset(cls, content: str = _SPOKEN) -> Fault:
        """A reset of the connection (TCP RST) after half the text, or half the plain body."""
        return cls("stream_reset", _break, content=content)


def _status(connection: Connection, _: ChatRequest | None, fault: Fault) -> None:
    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    connection.send_json(error_body(f"Scripted status {fault.code}.", fault.code), fault.code, headers)


def _hang(connection: Connection, _: ChatRequest | None, fault: Fault) -> None:
    connection.close_connection = True
    connection.pause(fault.seconds)


def _reply(make: Callable[[Fault], Reply]) -> _Send:
    return lambda connection, request, fault: connection.reply(request or ChatRequest({}), make(fault))


def _body_of(make: Callable[[ChatRequest], str]) -> _Send:
    return lambda connection, request, _: connection.send_whole(
        make(request or ChatRequest({})).encode(), "application/json"
    )


def _drip(connection: Connection, request: ChatRequest | None, fault: Fault) -> None:
    assert request is not None
    reply = Reply(fault.content)
    body = json.dumps(completion(request, reply)).encode()
    with connection.loopback.charge(reply.usage_for(request)):
        connection.start_body("application/json", len(body))
        for value in body:
            connection.wfile.write(bytes([value]))
            connection.pause(fault.seconds)


def _break(connection: Connection, request: ChatRequest | None, fault: Fault) -> None:
    """Send half of an answer, then end it, go silent, or reset the connection."""
    assert request is not None
    connection.close_connection = True
    if request.stream:
        events = list(stream_events(request, Reply(fault.content, chunk_size=8)))
        connection.send_events(events[: 1 + max(1, (len(events) - 2) // 2)])
        if fault.kind == "stream_cut":
            connection.send_chunk(b"")
    else:
        body = json.dumps(completion(request, Reply(fault.content))).encode()
        connection.start_body("application/json", len(body))
        connection.wfile.write(body[: len(body) // 2])
    if fault.kind == "stream_hang":
        connection.pause(fault.seconds)
    elif fault.kind == "stream_reset":
        connection.reset()
