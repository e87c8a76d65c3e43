"""Replies of language models: their text without reasoning, token usage, validity and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import json_repair
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, ToolCallBlock
from llama_index.core.callbacks.token_counting import get_tokens_from_response

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message, one_line, redacted_excerpt
from llama_index_agentic_kb.errors import AgenticKBError, LLMError
from llama_index_agentic_kb.guard.failures import breaks_connection, status_of

T = TypeVar("T")

FORM_REFUSED: Final = (400, 404, 415, 422, 501)
"""HTTP statuses of servers that don't support the requested output format."""

MAX_REPAIRED: Final = 8_000
"""Maximum number of characters of broken JSON to repair; repair takes quadratic time (7 s for 20,000 brackets)."""
MAX_INLINE: Final = 2_000
"""Maximum number of characters of a reply that is parsed on the event loop: at worst 0.1 s, if it needs repair."""
SHOWN: Final = 200
READ: Final = 2_000
"""Maximum number of characters of a server's message that are quoted in an error message, and that are read for it."""

_FENCE: Final = re.compile(r"```(?:json)?(.*?)```", re.DOTALL | re.IGNORECASE)  # no \s*: it would be quadratic

CUT_SHORT: Final = "the model stopped before it was done"


@dataclass(slots=True)
class Usage:
    """Token usage and number of model calls; a token count is None if no reply reported it."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    calls: int = 0
    model: str | None = None
    """The name of the last model; set in the sum of several calls."""

    @property
    def tokens(self) -> int | None:
        """Input and output tokens together; None if there were calls and no reply reported them."""
        if self.input_tokens is None and self.output_tokens is None:
            return None if self.calls else 0
        return (self.input_tokens or 0) + (self.output_tokens or 0)

    def add(self, other: Usage) -> None:
        """Add another usage to this one."""
        if other.input_tokens is not None:
            self.input_tokens = (self.input_tokens or 0) + other.input_tokens
        if other.output_tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + other.output_tokens
        self.calls += other.calls


@dataclass(slots=True)
class Reply:
    """The reply of a model."""

    text: str
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    tool_arguments: dict[str, Any] | None = None
    thoughts: int = 0
    """Number of reasoning characters that were removed from the text."""
    refusal: str = ""

    @classmethod
    def of(cls, response: ChatResponse | CompletionResponse) -> Reply:
        """Build a reply from a complete response."""
        choice = Choice.of(response.raw)
        return cls(text_of(response), usage_of(response), choice.finish_reason, refusal=choice.refusal)

    @property
    def cut_short(self) -> bool:
        """Whether the reply ended at the token limit."""
        return self.finish_reason in ("length", "max_tokens")

    def check(self) -> None:
        """Raise ``LLMError`` if the reply is empty, the model refused, or a content filter stopped it."""
        if self.refusal:
            raise LLMError(f"the model refused: {self.refusal}", usage=self.usage)
        if self.finish_reason == "content_filter":
            raise LLMError("the model's reply was stopped by a content filter", usage=self.usage)
        if not self.text.strip():
            why = f": {CUT_SHORT}" if self.cut_short else ""
            raise LLMError(f"the model's reply is empty{why}", empty=True, usage=self.usage)


@dataclass(frozen=True, slots=True)
class Choice:
    """Data from the first choice of a raw response or stream chunk, apart from its text."""

    is_there: bool = False
    finish_reason: str | None = None
    refusal: str = ""
    """Refusal text of the model; a stream sends it in pieces."""

    @classmethod
    def of(cls, raw: Any) -> Choice:
        """Build a choice from a raw response, which is an object or a dictionary."""
        choices = _get(raw, "choices")
        if not choices:
            return cls()
        reason = _get(choices[0], "finish_reason")
        said = _get(choices[0], "message") or _get(choices[0], "delta")
        return cls(True, reason if isinstance(reason, str) else None, _get(said, "refusal") or "")  # noqa: FBT003


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


def text_of(response: ChatResponse | CompletionResponse) -> str:
    """Return a response's text."""
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""


def tool_arguments_of(response: ChatResponse) -> str:
    """Return the arguments of a response's tool calls as the model wrote them, or as text."""
    message = response.message
    blocks = [str(block.tool_kwargs) for block in message.blocks if isinstance(block, ToolCallBlock)]
    return "".join(blocks) or str(message.additional_kwargs.get("tool_calls", ""))


def usage_of(response: ChatResponse | CompletionResponse) -> Usage:
    """Return the token usage that a response reports."""
    try:
        read, written = get_tokens_from_response(response)
    except (TypeError, ValueError, AttributeError):  # a raw reply of a shape that core doesn't know
        read, written = 0, 0
    counted = bool(read or written)
    return Usage(read if counted else None, written if counted else None, calls=1)


def refuses_form(error: BaseException) -> bool:
    """Return whether an error's HTTP status may mean that the server does not support structured output."""
    return status_of(error) in FORM_REFUSED


async def parsed(read: Callable[[], T], text: str, *, deadline: float | None = None, max_inline: int = MAX_INLINE) -> T:
    """Return what a function reads from a reply; for a long reply it runs on a thread, not on the event loop.

    Raises:
        Exception: The exception of ``read``.
        DeadlineExceededError: A reply of more than ``max_inline`` characters was still being read at its deadline.
    """
    if len(text) <= max_inline:
        return read()
    return await Call(sync=read, deadline=deadline, what="reading a reply")


def strip_code_fence(text: str) -> str:
    """Return the content of a reply's first code fence, or the reply itself if it has none."""
    fence = _FENCE.search(text)
    return fence.group(1) if fence else text


def repair_json(text: str) -> Any:
    """Return the JSON value of a text, repaired if broken; only the first ``MAX_REPAIRED`` characters are used.

    Raises:
        ValueError: The text contains no JSON.
        RecursionError: The JSON is nested too deeply.
    """
    return json_repair.loads(text[:MAX_REPAIRED])


def read_json(text: str, opening: str = "{") -> Any:
    """Return the JSON value in a reply, also in a code fence, behind a preamble or broken; None if there is none.

    It begins at the first of the ``opening`` signs.
    """
    body = strip_code_fence(text)
    start = min((at for at in map(body.find, opening) if at >= 0), default=-1)
    try:
        return repair_json(body[start:]) if start >= 0 else None
    except (ValueError, RecursionError):
        return None


# -- reasoning text ---------------------------------------------------------------------------------------------------

_THOUGHTS: Final = ("think", "thinking", "thought", "reasoning")
_OPEN: Final = re.compile(rf"(?<!`)<({'|'.join(_THOUGHTS)})>", re.IGNORECASE)
_CLOSE: Final = re.compile(rf"(?<!`)</(?:{'|'.join(_THOUGHTS)})>", re.IGNORECASE)
_BEGUN: Final = re.compile(r"</?[a-z]{0,9}\Z", re.IGNORECASE)


@dataclass(slots=True)
class ThoughtFilter:
    """Removes reasoning blocks from a reply that arrives in pieces.

    A tag after a backquote is normal text. A closing tag without an opening one ends reasoning that began in the
    prompt: all text before it is removed, in a stream only the text that was not returned yet.
    """

    left_out: int = 0
    """Number of reasoning characters removed so far."""
    _held: str = ""
    _inside: str | None = None
    _started: bool = False
    """Whether any visible text was returned."""
    _last: str = ""

    def feed(self, delta: str) -> str:
        """Process a piece of the reply and return the text that can be shown now."""
        text, passed = self._held + delta, ""
        self._held = ""
        while text:
            if self._inside is not None:
                text = self._think(text, self._inside)
                continue
            # The previous character decides whether this is a tag: a backquote makes it text.
            found = _OPEN.search(self._last + text) or None
            ended = _CLOSE.search(self._last + text)
            if ended is not None and (found is None or ended.start() < found.start()):
                self.left_out += len(passed) + ended.end() - len(self._last)
                text, passed, self._last = text[ended.end() - len(self._last) :], "", ""
            elif found is not None:
                start = found.start() - len(self._last)
                passed += text[:start]
                text = text[found.end() - len(self._last) :]
                self._inside, self._last = found[1].lower(), ""
            else:
                begun = _BEGUN.search(text)
                at = len(text) if begun is None else begun.start()
                passed += text[:at]
                self._last, self._held, text = (text[:at] or self._last)[-1:], text[at:], ""
        return self._given(passed)

    def _think(self, text: str, name: str) -> str:
        """Remove reasoning text, and return the text after its closing tag."""
        end, tag = text.lower().find(f"</{name}>"), len(name) + 3
        if end < 0:
            cut = max(0, len(text) - tag + 1)
            self.left_out += cut
            self._held = text[cut:]
            return ""
        self.left_out += end
        self._inside = None
        return text[end + tag :]

    def close(self) -> str:
        """Return the remaining text at the end of the reply; an unclosed reasoning block is removed."""
        rest, self._held = self._held, ""
        if self._inside is not None:
            self.left_out += len(rest)
            return ""
        return self._given(rest)

    def _given(self, text: str) -> str:
        """Return a text, without whitespace between the reasoning and the reply's first word."""
        shown = text if self._started or not self.left_out else text.lstrip()
        self._started = self._started or bool(shown.strip())
        return shown


def without_thoughts(text: str) -> tuple[str, int]:
    """Return a complete reply without its reasoning text, and the number of removed characters."""
    thoughts = ThoughtFilter()
    return thoughts.feed(text) + thoughts.close(), thoughts.left_out


# -- failures ---------------------------------------------------------------------------------------------------------


def as_llm_error(error: Exception) -> LLMError:
    """Return an ``LLMError`` that describes an error of the model's client, to be raised ``from`` it."""
    status, body = status_of(error), getattr(error, "body", None)
    if isinstance(error, LLMError):
        return error
    if status is not None:
        said = _message_in(body) if isinstance(body, dict) else str(error)
        reason = f"the model's server answered with status {status}: {_words(said)}"
    elif isinstance(error, AgenticKBError):
        reason = error_message(error)
    elif (sent := _sent_instead(error, body)) is not None:
        reason = f"the model's server sent {sent}"
    elif breaks_connection(error):  # OpenAI's client says only "Connection error."
        reason = f"the connection to the model's server failed: {_named(error.__cause__ or error)}"
    else:
        reason = _named(error)
    return LLMError(reason)


def _sent_instead(error: Exception, body: object) -> str | None:
    """Return a description of an unusable response from the server; None if the error has another cause."""
    if isinstance(error, json.JSONDecodeError):
        return f"JSON that is broken off or malformed: {_words(str(error))}"
    page = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(page, str):
        kind = "a web page" if page.lstrip().startswith("<") else "plain text"
        return f"{kind} in place of JSON: {_words(page)!r}"
    if not isinstance(body, dict):  # OpenAI's client sets a dictionary for errors in a stream
        reply = _reply_in(error) if isinstance(error, (IndexError, TypeError, AttributeError)) else None
        body = getattr(reply, "error", None)
        if not body:
            return None if reply is None else "a reply without choices"
    return f"an error in place of a reply: {_words(_message_in(body))}"


def _reply_in(error: Exception) -> Any:
    """Return the parsed reply without choices that a client failed on, taken from the error's traceback."""
    reply, traceback = None, error.__traceback__
    while traceback is not None:
        response = traceback.tb_frame.f_locals.get("response")
        if hasattr(response, "choices"):
            reply = response
        traceback = traceback.tb_next
    return reply if reply is not None and not reply.choices else None


def _named(error: BaseException) -> str:
    words = one_line(redacted_excerpt(str(error), READ), SHOWN)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _message_in(body: Any) -> str:
    message = body.get("message") if isinstance(body, dict) else None
    return str(message or body)


def _words(text: str) -> str:
    return one_line(redacted_excerpt(text, READ), SHOWN) or "nothing said"
