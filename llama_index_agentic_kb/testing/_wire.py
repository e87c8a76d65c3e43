"""OpenAI's wire forms, as plain JSON objects."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from llama_index_agentic_kb.testing._replies import ChatRequest, Reply, Usage
from llama_index_agentic_kb.testing._text import count_tokens, hash_vector

__all__ = [
    "DONE",
    "Json",
    "Piece",
    "closing_events",
    "completion",
    "delta_event",
    "embeddings",
    "empty",
    "error",
    "event",
    "model_list",
    "opening",
    "pieces",
]

Json = dict[str, Any]
# What a chunk adds to the answer: its delta, and the words in it that are billed.
Piece = tuple[Json, str]

DONE = b"data: [DONE]\n\n"

# Every answer is a function of the request alone, so it carries no clock.
_CREATED = 1_700_000_000


def error(message: str, status: int) -> Json:
    """Return an error body."""
    return {"error": {"message": message, "type": "loopback_error", "param": None, "code": str(status)}}


def completion(request: ChatRequest, reply: Reply) -> Json:
    """Return the body of a plain answer."""
    message: Json = {"role": "assistant", "content": reply.content, "refusal": reply.refusal}
    if reply.calls:
        message["tool_calls"] = [_tool_call(index, *call) for index, call in enumerate(reply.calls)]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.stop_reason}
    body = _envelope(request, "chat.completion", [choice])
    if reply.report_usage:
        body["usage"] = _usage(reply.usage_for(request))
    return body


def opening(request: ChatRequest, reply: Reply) -> Json:
    """Return the first chunk of a stream: the role and, if there will be text, an empty content, as OpenAI sends it."""
    return _chunk(request, {"role": "assistant", "content": reply.content and "", "refusal": None}, None)


def pieces(reply: Reply) -> Iterator[Piece]:
    """Yield what a stream tells, piece by piece: content, refusal, then each tool call."""
    for text in _split(reply.content or "", reply.chunk_size):
        yield {"content": text}, text
    for text in _split(reply.refusal or "", reply.chunk_size):
        yield {"refusal": text}, text
    for index, (name, arguments) in enumerate(reply.calls):
        yield {"tool_calls": [_tool_call(index, name, "") | {"index": index}]}, f" {name} "
        for text in _split(arguments, reply.chunk_size):
            yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}, text


def event(body: Json | str) -> bytes:
    """Return one server-sent event; a str is sent as it is."""
    data = body if isinstance(body, str) else json.dumps(body)
    return f"data: {data}\n\n".encode()


def delta_event(request: ChatRequest, delta: Json) -> bytes:
    """Return the event of one piece."""
    return event(_chunk(request, delta, None))


def closing_events(request: ChatRequest, reply: Reply) -> bytes:
    """Return the events that end a stream: the finish reason, the token counts if asked for, and ``[DONE]``."""
    events = event(_chunk(request, {}, reply.stop_reason))
    if request.include_usage and reply.report_usage:
        counts = _envelope(request, "chat.completion.chunk", [])
        events += event(counts | {"usage": _usage(reply.usage_for(request))})
    return events + DONE


def empty(request: ChatRequest) -> Json:
    """Return an answer, or a chunk, without choices."""
    return _envelope(request, "chat.completion.chunk" if request.stream else "chat.completion", [])


def model_list(names: Sequence[str]) -> Json:
    """Return the body of ``GET /v1/models``."""
    models = [{"id": name, "object": "model", "created": _CREATED, "owned_by": "loopback"} for name in names]
    return {"object": "list", "data": models}


def embeddings(body: Json, dimensions: int) -> Json:
    """Return the body of ``POST /v1/embeddings``: one :func:`hash_vector` for each input.

    Inputs are a str, a list of str, or lists of token ids, which are embedded as the words they are written with.
    """
    texts = _embedding_inputs(body.get("input", ""))
    size = int(body.get("dimensions") or dimensions)
    packed = body.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _pack(vector) if packed else vector}
        for index, vector in enumerate(hash_vector(text, size) for text in texts)
    ]
    tokens = sum(map(count_tokens, texts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.get("model", ""), "usage": usage}


def _embedding_inputs(given: str | list[str] | list[int] | list[list[int]]) -> list[str]:
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [" ".join(map(str, given))]
    return [text if isinstance(text, str) else " ".join(map(str, text)) for text in given if not isinstance(text, int)]


def _pack(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _envelope(request: ChatRequest, kind: str, choices: list[Json]) -> Json:
    return {"id": "chatcmpl-loopback", "object": kind, "created": _CREATED, "model": request.model, "choices": choices}


def _chunk(request: ChatRequest, delta: Json, finish_reason: str | None) -> Json:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    body = _envelope(request, "chat.completion.chunk", [choice])
    # OpenAI puts a null into every chunk before the one that holds the counts.
    return body | {"usage": None} if request.include_usage else body


def _tool_call(index: int, name: str, arguments: str) -> Json:
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def _split(text: str, size: int) -> Iterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]
