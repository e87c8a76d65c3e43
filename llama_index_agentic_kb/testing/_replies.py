"""What the loopback server is asked, and what it can be told to answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index_agentic_kb.testing._text import count_tokens

__all__ = ["ChatRequest", "Reply", "Usage", "fit_to_request"]


@dataclass(frozen=True)
class Usage:
    """Tokens of one call, or the sum over several.

    Args:
        prompt_tokens: Tokens of the messages' texts.
        completion_tokens: Tokens of what was answered.
        calls: How many calls they belong to.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 1

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        """Add both token counts and the calls."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.calls + other.calls,
        )

    def __neg__(self) -> Usage:
        """Return what takes this usage back when added."""
        return Usage(-self.prompt_tokens, -self.completion_tokens, -self.calls)


@dataclass(frozen=True)
class ChatRequest:
    """The body of one ``POST /v1/chat/completions``.

    Args:
        body: The JSON object as it was sent.
    """

    body: dict[str, Any]

    @property
    def model(self) -> str:
        """The model asked for; the server knows every name."""
        return str(self.body.get("model", ""))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages in wire form, oldest first."""
        return list(self.body.get("messages") or [])

    @property
    def text(self) -> str:
        """The text of all messages, joined by line feeds."""
        return "\n".join(_message_text(message) for message in self.messages)

    @property
    def last(self) -> str:
        """The text of the last message; empty when there is none."""
        return _message_text(self.messages[-1]) if self.messages else ""

    @property
    def stream(self) -> bool:
        """Whether server-sent events are asked for."""
        return bool(self.body.get("stream"))

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with a chunk of token counts."""
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def response_format(self) -> dict[str, Any] | None:
        """The ``response_format``, such as a JSON schema, or None."""
        return self.body.get("response_format")

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools offered to the model, in wire form."""
        return list(self.body.get("tools") or [])

    @property
    def forced_tool(self) -> str | None:
        """The tool that has to be called: the one named by ``tool_choice``, the first if it is "required", or None."""
        choice = self.body.get("tool_choice")
        if isinstance(choice, dict):
            return str(choice["function"]["name"])
        if choice == "required" and self.tools:
            return str(self.tools[0]["function"]["name"])
        return None


@dataclass(frozen=True)
class Reply:
    """One answer of the model.

    Args:
        content: The text; None is sent as JSON null.
        tool_calls: Pairs of a tool's name and its arguments. Arguments given as a str are sent as they are, valid
            JSON or not.
        finish_reason: Why the model stopped; "stop" becomes "tool_calls" when there are some.
        refusal: The model's words of refusal, or None.
        latency: Seconds before the first byte.
        chunk_delay: Seconds before each further piece of a stream.
        chunk_size: Characters in each piece of a stream.
        usage: What is reported and billed; None counts the messages' and the answer's tokens with
            :func:`count_tokens`.
        report_usage: False leaves the counts out of the answer, as some gateways do; they are billed all the same.
    """

    content: str | None = None
    tool_calls: Sequence[tuple[str, Mapping[str, Any] | str]] = ()
    finish_reason: str = "stop"
    refusal: str | None = None
    latency: float = 0.0
    chunk_delay: float = 0.0
    chunk_size: int = 16
    usage: Usage | None = None
    report_usage: bool = True
    calls: list[tuple[str, str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the piece size and write the arguments as JSON.

        Raises:
            ValueError: ``chunk_size`` is below 1.
        """
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}.")
        calls = [
            (name, arguments if isinstance(arguments, str) else json.dumps(arguments))
            for name, arguments in self.tool_calls
        ]
        object.__setattr__(self, "calls", calls)

    @property
    def stop_reason(self) -> str:
        """The finish reason as sent."""
        return "tool_calls" if self.calls and self.finish_reason == "stop" else self.finish_reason

    def usage_for(self, request: ChatRequest) -> Usage:
        """Return what this answer to this request costs."""
        if self.usage is not None:
            return self.usage
        spoken = [self.content or "", self.refusal or "", *(part for call in self.calls for part in call)]
        return Usage(count_tokens(request.text), sum(map(count_tokens, spoken)))


def fit_to_request(text: str, request: ChatRequest) -> Reply:
    """Make the reply a well-behaved model would make of a text.

    A JSON object becomes a call of the forced tool. Everything else is content, with a ``response_format`` too.
    """
    tool = request.forced_tool
    if tool is None or not _is_json_object(text):
        return Reply(text)
    return Reply(tool_calls=[(tool, text)])


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return content or ""
