"""What a language model replied, what it billed, whether it can be used, and why a call failed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

import json_repair
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.callbacks.token_counting import get_tokens_from_response

from llama_index_agentic_kb._text import error_message, one_line, redacted_excerpt
from llama_index_agentic_kb.errors import AgenticKBError, LLMError
from llama_index_agentic_kb.guard.failures import breaks_connection, status_of

FORM_REFUSED: Final = (400, 404, 415, 422, 501)
"""HTTP statuses with which servers refuse a request form that they don't know."""

MAX_REPAIRED: Final = 8_000
"""Characters of broken JSON that are repaired, which takes quadratic time (20,000 brackets: 7 s, measured)."""

SHOWN: Final = 200
"""Characters of a server's own words in an error's message."""

READ: Final = 2_000
"""Characters of them that are read: on one line, and without secrets, they may be fewer."""

_FENCE: Final = re.compile(r"```(?:json)?(.*?)```", re.DOTALL | re.IGNORECASE)  # no \s*: it would be quadratic

CUT_SHORT: Final = "the model stopped before it was done"


@dataclass(slots=True)
class Usage:
    """What language model calls billed; None where a reply did not say."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    calls: int = 0

    def add(self, other: Usage) -> None:
        """Add another bill to this one."""
        if other.input_tokens is not None:
            self.input_tokens = (self.input_tokens or 0) + other.input_tokens
        if other.output_tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + other.output_tokens
        self.calls += other.calls


@dataclass(slots=True)
class Reply:
    """What a model said."""

    text: str
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    tool_arguments: dict[str, Any] | None = None
    thoughts: int = 0
    """Characters of a reasoning model's thoughts that were left out of the text."""
    refusal: str = ""

    @classmethod
    def of(cls, response: ChatResponse | CompletionResponse) -> Reply:
        """Read a whole response."""
        choice = Choice.of(response.raw)
        return cls(text_of(response), usage_of(response), choice.finish_reason, refusal=choice.refusal)

    @property
    def cut_short(self) -> bool:
        """Whether the model ran out of tokens."""
        return self.finish_reason in ("length", "max_tokens")

    def check(self) -> None:
        """Raise ``LLMError`` where it is empty, refused or filtered."""
        if self.refusal:
            raise LLMError(f"the model refused: {self.refusal}", usage=self.usage)
        if self.finish_reason == "content_filter":
            raise LLMError("the model's reply was stopped by a content filter", usage=self.usage)
        if not self.text.strip():
            why = f": {CUT_SHORT}" if self.cut_short else ""
            raise LLMError(f"the model's reply is empty{why}", empty=True, usage=self.usage)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the first choice of a raw response, or of a stream's chunk, says beside its text."""

    is_there: bool = False
    finish_reason: str | None = None
    refusal: str = ""
    """A stream has it in pieces."""

    @classmethod
    def of(cls, raw: Any) -> Choice:
        """Read a raw response, an object or a dictionary."""
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


def usage_of(response: ChatResponse | CompletionResponse) -> Usage:
    """Return what a response says that it billed."""
    try:
        read, written = get_tokens_from_response(response)
    except (TypeError, ValueError, AttributeError):  # a raw reply of a shape that core doesn't know
        read, written = 0, 0
    counted = bool(read or written)
    return Usage(read if counted else None, written if counted else None, calls=1)


def refuses_form(error: BaseException) -> bool:
    """Return whether an error may mean that the server doesn't know the form of structured output asked for."""
    return status_of(error) in FORM_REFUSED


def strip_code_fence(text: str) -> str:
    """Return what stands in a reply's first code fence, or the reply itself."""
    fence = _FENCE.search(text)
    return fence.group(1) if fence else text


def repair_json(text: str) -> Any:
    """Return the JSON value that broken text was meant to be, as far as its start shows.

    Raises:
        ValueError: It has no JSON.
        RecursionError: It is nested too deep.
    """
    return json_repair.loads(text[:MAX_REPAIRED])


# -- failures ---------------------------------------------------------------------------------------------------------


def as_llm_error(error: Exception) -> LLMError:
    """Return the error that says what came in place of a reply; ``raise`` sets the client's own as its cause.

    Args:
        error: What a model's client raised. An ``LLMError`` is returned as it is.
    """
    return error if isinstance(error, LLMError) else LLMError(_reason(error))


def _reason(error: Exception) -> str:
    status, body = status_of(error), getattr(error, "body", None)
    if status is not None:
        said = _message_in(body) if isinstance(body, dict) else str(error)
        return f"the model's server answered with status {status}: {_words(said)}"
    if isinstance(error, AgenticKBError):
        return error_message(error)
    if (sent := _sent_instead(error, body)) is not None:
        return f"the model's server sent {sent}"
    if breaks_connection(error):  # OpenAI's client says only "Connection error."
        return f"the connection to the model's server failed: {_named(error.__cause__ or error)}"
    return _named(error)


def _sent_instead(error: Exception, body: object) -> str | None:
    """Return what came where a client could make nothing of it."""
    if isinstance(error, json.JSONDecodeError):
        return f"JSON that is broken off or malformed: {_words(str(error))}"
    page = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(page, str):
        kind = "a web page" if page.lstrip().startswith("<") else "plain text"
        return f"{kind} in place of JSON: {_words(page)!r}"
    if not isinstance(body, dict):  # one that is was found in a stream by OpenAI's client
        reply = _reply_in(error) if isinstance(error, (IndexError, TypeError, AttributeError)) else None
        body = getattr(reply, "error", None)
        if not body:
            return None if reply is None else "a reply without choices"
    return f"an error in place of a reply: {_words(_message_in(body))}"


def _reply_in(error: Exception) -> Any:
    """Return the parsed reply without choices that a client failed on: what the innermost ``response`` is."""
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
