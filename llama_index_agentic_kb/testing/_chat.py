"""How the loopback server speaks: good answers, streams and every fault, over one connection."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llama_index_agentic_kb.testing import _wire
from llama_index_agentic_kb.testing._faults import Fault, FaultKind
from llama_index_agentic_kb.testing._http import HttpHandler
from llama_index_agentic_kb.testing._replies import ChatRequest, Reply, Usage
from llama_index_agentic_kb.testing._text import count_tokens

__all__ = ["Ledger", "answer_fault", "answer_nothing", "answer_reply"]

_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_PAGE = b"<!doctype html><html><body><h1>Sign in to the network</h1></body></html>"
# So short that half of the default text is several pieces.
_FAULT_CHUNK = 8


class Ledger:
    """What the server billed, over all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Usage(calls=0)

    @property
    def total(self) -> Usage:
        """The sum so far."""
        with self._lock:
            return self._total

    @contextmanager
    def charge(self, usage: Usage) -> Iterator[None]:
        """Bill what is sent in this context, and take it back if sending fails.

        It is billed first, so that a client holding its answer always finds it on the bill.
        """
        self._add(usage)
        try:
            yield
        except BaseException:
            self._add(-usage)
            raise

    def _add(self, usage: Usage) -> None:
        with self._lock:
            self._total += usage


def answer_reply(handler: HttpHandler, ledger: Ledger, request: ChatRequest, reply: Reply) -> None:
    """Send a reply, plain or as a stream, and bill it."""
    handler.pause(reply.latency)
    if request.stream:
        _Stream(handler, ledger, request, reply).tell_all()
        return
    with ledger.charge(reply.usage_for(request)):
        handler.send_json(_wire.completion(request, reply))


def answer_fault(handler: HttpHandler, ledger: Ledger, request: ChatRequest, fault: Fault) -> None:
    """Fail as told."""
    reply = fault.as_reply()
    if reply is not None:
        answer_reply(handler, ledger, request, reply)
        return
    handler.pause(fault.latency)
    if fault.kind in _BEFORE_ANSWER:
        _BEFORE_ANSWER[fault.kind](handler, fault)
    elif fault.kind in _BODIES:
        _send_body(handler, request, _BODIES[fault.kind](request))
    elif fault.kind is FaultKind.DRIP:
        _drip(handler, ledger, request, fault)
    elif request.stream:
        _break_stream(handler, ledger, request, fault)
    else:
        _break_body(handler, request, fault)


def answer_nothing(handler: HttpHandler, fault: Fault) -> None:
    """Fail as told where no chat was asked for.

    Raises:
        ValueError: The fault is one of chats alone.
    """
    if fault.kind not in _BEFORE_ANSWER:
        kinds = ", ".join(_BEFORE_ANSWER)
        raise ValueError(f"Only chats fail by {fault.kind}; other requests by {kinds}.")
    handler.pause(fault.latency)
    _BEFORE_ANSWER[fault.kind](handler, fault)


class _Stream:
    """One answer told as server-sent events, billed as it is told."""

    def __init__(self, handler: HttpHandler, ledger: Ledger, request: ChatRequest, reply: Reply) -> None:
        self._handler = handler
        self._ledger = ledger
        self._request = request
        self._reply = reply
        self._usage = reply.usage_for(request)
        self._told = ""
        self._billed = 0

    def tell_all(self) -> None:
        """Send the whole stream."""
        self.open()
        for piece in _wire.pieces(self._reply):
            self.tell(piece)
        rest = Usage(0, self._usage.completion_tokens - self._billed, calls=0)
        with self._ledger.charge(rest):
            self._handler.send_chunk(_wire.closing_events(self._request, self._reply))
            self._handler.send_chunk(b"")

    def tell_half(self) -> None:
        """Send the first half of the pieces, at least one, and stop there."""
        self.open()
        told = list(_wire.pieces(self._reply))
        for piece in told[: max(1, len(told) // 2)]:
            self.tell(piece)

    def open(self) -> None:
        """Send the headers and the first event, and bill the prompt."""
        with self._ledger.charge(Usage(self._usage.prompt_tokens, 0)):
            self._handler.start_body(_EVENTS, None)
            self._handler.send_chunk(_wire.event(_wire.opening(self._request, self._reply)))

    def tell(self, piece: _wire.Piece) -> None:
        """Send one piece; it is billed up to the reply's own count."""
        delta, words = piece
        self._handler.pause(self._reply.chunk_delay)
        self._told += words
        due = min(count_tokens(self._told), self._usage.completion_tokens)
        with self._ledger.charge(Usage(0, due - self._billed, calls=0)):
            self._handler.send_chunk(_wire.delta_event(self._request, delta))
        self._billed = due


def _status(handler: HttpHandler, fault: Fault) -> None:
    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    handler.send_json(_wire.error(f"Scripted status {fault.code}.", fault.code), fault.code, headers)


def _hang(handler: HttpHandler, fault: Fault) -> None:
    handler.close()
    handler.pause(fault.seconds)


def _reset(handler: HttpHandler, _fault: Fault) -> None:
    handler.reset()


def _html(handler: HttpHandler, _fault: Fault) -> None:
    handler.send_whole(_PAGE, "text/html; charset=utf-8")


_BEFORE_ANSWER: dict[FaultKind, Callable[[HttpHandler, Fault], None]] = {
    FaultKind.STATUS: _status,
    FaultKind.HANG: _hang,
    FaultKind.RESET: _reset,
    FaultKind.HTML: _html,
}

_BODIES: dict[FaultKind, Callable[[ChatRequest], str]] = {
    FaultKind.BAD_JSON: lambda _request: '{"id": "chatcmpl-loopback", "choices": [{"index": 0, "mess',
    FaultKind.ERROR_BODY: lambda _request: json.dumps(_wire.error("Scripted error in a 200 answer.", 500)),
    FaultKind.NO_CHOICES: lambda request: json.dumps(_wire.empty(request)),
}


def _send_body(handler: HttpHandler, request: ChatRequest, body: str) -> None:
    if not request.stream:
        handler.send_whole(body.encode(), _JSON)
        return
    handler.start_body(_EVENTS, None)
    handler.send_chunk(_wire.event(body))
    handler.send_chunk(_wire.DONE)
    handler.send_chunk(b"")


def _drip(handler: HttpHandler, ledger: Ledger, request: ChatRequest, fault: Fault) -> None:
    reply = Reply(fault.content)
    with ledger.charge(reply.usage_for(request)):
        if request.stream:
            _drip_stream(handler, request, reply, fault.seconds)
        else:
            _drip_body(handler, request, reply, fault.seconds)


def _drip_body(handler: HttpHandler, request: ChatRequest, reply: Reply, seconds: float | None) -> None:
    body = json.dumps(_wire.completion(request, reply)).encode()
    handler.start_body(_JSON, len(body))
    for value in body:
        handler.wfile.write(bytes([value]))
        handler.pause(seconds)


def _drip_stream(handler: HttpHandler, request: ChatRequest, reply: Reply, seconds: float | None) -> None:
    events = _wire.event(_wire.opening(request, reply))
    events += b"".join(_wire.delta_event(request, delta) for delta, _words in _wire.pieces(reply))
    handler.start_body(_EVENTS, None)
    for value in events + _wire.closing_events(request, reply):
        handler.send_chunk(bytes([value]))
        handler.pause(seconds)
    handler.send_chunk(b"")


def _break_stream(handler: HttpHandler, ledger: Ledger, request: ChatRequest, fault: Fault) -> None:
    handler.close()
    _Stream(handler, ledger, request, Reply(fault.content, chunk_size=_FAULT_CHUNK)).tell_half()
    if fault.kind is FaultKind.STREAM_CUT:
        handler.send_chunk(b"")
    elif fault.kind is FaultKind.STREAM_HANG:
        handler.pause(fault.seconds)
    elif fault.kind is FaultKind.STREAM_RESET:
        handler.reset()


def _break_body(handler: HttpHandler, request: ChatRequest, fault: Fault) -> None:
    body = json.dumps(_wire.completion(request, Reply(fault.content))).encode()
    handler.close()
    handler.start_body(_JSON, len(body))
    handler.wfile.write(body[: len(body) // 2])
    if fault.kind is FaultKind.STREAM_HANG:
        handler.pause(fault.seconds)
    elif fault.kind is FaultKind.STREAM_RESET:
        handler.reset()
