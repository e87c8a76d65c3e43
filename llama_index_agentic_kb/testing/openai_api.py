"""What goes over the wire between OpenAI's client and the loopback server: requests, replies and their JSON forms."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index_agentic_kb.testing.doubles import DIMENSIONS, count_tokens, hash_vector

Json = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """Token counts of one call, or the sum over several calls."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 1

    def __add__(self, other: Usage) -> Usage:
        """Return the sum of token counts and calls."""
        prompt, completion = self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens
        return Usage(prompt, completion, self.calls + other.calls)

    @property
    def total_tokens(self) -> int:
        """The sum of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> Json:
        """Return the token counts with OpenAI's field names."""
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return {**counts, "total_tokens": self.total_tokens}


@dataclass(frozen=True)
class ChatRequest:
    """The JSON body of one ``POST /v1/chat/completions``, as received."""

    body: Json

    @property
    def messages(self) -> list[Json]:
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
    def response_format(self) -> Json | None:
        """The ``response_format``, such as a JSON schema. None if it is not set."""
        return self.body.get("response_format")

    @property
    def tools(self) -> list[Json]:
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
    tool_calls: Sequence[tuple[str, Mapping[str, Any] | str]] = ()
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


def error_body(message: str, status: int) -> Json:
    """Return the body of an error in the form of OpenAI's API."""
    return {"error": {"message": message, "type": "loopback_error", "param": None, "code": str(status)}}


def envelope(request: ChatRequest, choices: Sequence[Json]) -> Json:
    """Return an answer, or a chunk of one, with these choices; its time is constant for reproducible answers."""
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    body = {
        "id": "chatcmpl-loopback",
        "object": kind,
        "created": 1_700_000_000,
        "model": str(request.body.get("model", "")),
    }
    return {**body, "choices": [*choices]}


def completion(request: ChatRequest, reply: Reply) -> Json:
    """Return the JSON body of an answer that is not streamed."""
    message: Json = {"role": "assistant", "content": reply.content, "refusal": reply.refusal}
    if reply.calls:
        message["tool_calls"] = [_tool_call(index, *call) for index, call in enumerate(reply.calls)]
    body = envelope(request, [{"index": 0, "message": message, "logprobs": None, "finish_reason": reply.stop_reason}])
    return body | ({"usage": reply.usage_for(request).to_json()} if reply.report_usage else {})


def stream_events(request: ChatRequest, reply: Reply) -> Iterator[tuple[bytes, Usage]]:
    """Yield the events of a streamed answer, from the role to ``[DONE]``, each with its usage."""
    whole, sent, billed = reply.usage_for(request), "", 0
    asks_usage = bool((request.body.get("stream_options") or {}).get("include_usage"))

    def chunk(delta: Json, finish_reason: str | None = None) -> bytes:
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


def event(body: Json | str) -> bytes:
    """Return one server-sent event; a str is sent unchanged."""
    return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode()


def _deltas(reply: Reply) -> Iterator[tuple[Json, str]]:
    """Yield the pieces of a streamed answer and the words in each: content, refusal, then each tool call."""
    for kind, text in (("content", reply.content), ("refusal", reply.refusal)):
        for piece in _split(text or "", reply.chunk_size):
            yield {kind: piece}, piece
    for index, (name, arguments) in enumerate(reply.calls):
        yield {"tool_calls": [{**_tool_call(index, name, ""), "index": index}]}, f" {name} "
        for piece in _split(arguments, reply.chunk_size):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, piece


def _split(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def _tool_call(index: int, name: str, arguments: str) -> Json:
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def embeddings(body: Json) -> Json:
    """Return the answer to a request for embeddings: the hash vector of each text."""
    asked, dimensions = body.get("input", ""), int(body.get("dimensions") or DIMENSIONS)
    texts = [asked] if isinstance(asked, str) else list(map(str, asked))
    data = [
        {"object": "embedding", "index": index, "embedding": hash_vector(text, dimensions)}
        for index, text in enumerate(texts)
    ]
    tokens = sum(map(count_tokens, texts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.get("model", ""), "usage": usage}


def fitting(text: str, request: ChatRequest) -> Reply:
    """Return a text as a reply: a call of the forced tool if the text is a JSON object, else plain content."""
    with contextlib.suppress(ValueError):
        if request.forced_tool is not None and isinstance(json.loads(text), dict):
            return Reply(tool_calls=[(request.forced_tool, text)])
    return Reply(text)


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return content or ""
