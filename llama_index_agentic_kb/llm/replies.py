"""What a language model replied, what it billed, whether it can be used, and why a call failed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import json_repair
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.callbacks.token_counting import get_tokens_from_response

from llama_index_agentic_kb._text import error_message, one_line, redacted_excerpt
from llama_index_agentic_kb.errors import AgenticKBError, LLMError
from llama_index_agentic_kb.guard.failures import breaks_connection, status_of

__all__ = [
    "CUT_SHORT",
    "Reply",
    "Usage",
    "as_llm_error",
    "check",
    "finish_reason_of",
    "has_choices",
    "latest",
    "refusal_of",
    "refuses_form",
    "repair_json",
    "strip_code_fence",
    "text_of",
    "usage_of",
]

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
        self.input_tokens = _sum(self.input_tokens, other.input_tokens)
        self.output_tokens = _sum(self.output_tokens, other.output_tokens)
        self.calls += other.calls


@dataclass(slots=True)
class Reply:
    """What a model said."""

    text: str
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    tool_arguments: dict[str, Any] | None = None

    @property
    def cut_short(self) -> bool:
        """Whether the model ran out of tokens."""
        return self.finish_reason in ("length", "max_tokens")


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


def latest(seen: Usage, new: Usage) -> Usage:
    """Return the bill of a stream so far: it comes once, in the last chunks, or as a running total."""
    return Usage(
        new.input_tokens if new.input_tokens is not None else seen.input_tokens,
        new.output_tokens if new.output_tokens is not None else seen.output_tokens,
        calls=1,
    )


def has_choices(raw: Any) -> bool:
    """Return whether a raw response holds any choice."""
    return bool(_get(raw, "choices"))


def finish_reason_of(raw: Any) -> str | None:
    """Return why a model stopped, where its raw response says so."""
    choices = _get(raw, "choices")
    reason = _get(choices[0], "finish_reason") if choices else None
    return reason if isinstance(reason, str) else None


def refusal_of(raw: Any) -> str:
    """Return the words of a refusal; a stream has them in pieces."""
    choices = _get(raw, "choices")
    said = (_get(choices[0], "message") or _get(choices[0], "delta")) if choices else None
    return _get(said, "refusal") or ""


def check(reply: Reply, refusal: str) -> None:
    """Raise ``LLMError`` where a reply is empty, refused or filtered."""
    if refusal:
        raise LLMError(f"the model refused: {refusal}", usage=reply.usage)
    if reply.finish_reason == "content_filter":
        raise LLMError("the model's reply was stopped by a content filter", usage=reply.usage)
    if not reply.text.strip():
        why = f": {CUT_SHORT}" if reply.cut_short else ""
        raise LLMError(f"the model's reply is empty{why}", empty=True, usage=reply.usage)


def _sum(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else first + second


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


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
    status = status_of(error)
    if status is not None:
        return f"the model's server answered with status {status}: {_words(_message_of(error))}"
    if isinstance(error, AgenticKBError):
        return error_message(error)
    return _garbage(error) or _broken(error) or _named(error)


def _garbage(error: Exception) -> str | None:
    """Return what came where a client could make nothing of it."""
    if isinstance(error, json.JSONDecodeError):
        return f"the model's server sent JSON that is broken off or malformed: {_words(str(error))}"
    page = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(page, str):
        kind = "a web page" if page.lstrip().startswith("<") else "plain text"
        return f"the model's server sent {kind} in place of JSON: {_words(page)!r}"
    body = getattr(error, "body", None)
    if isinstance(body, dict):  # OpenAI's client found it in a stream
        return f"the model's server sent an error in place of a reply: {_words(_message_in(body))}"
    reply = _reply_in(error.__traceback__) if isinstance(error, (IndexError, TypeError, AttributeError)) else None
    if reply is None:
        return None
    error_body = getattr(reply, "error", None)
    if error_body:
        return f"the model's server sent an error in place of a reply: {_words(_message_in(error_body))}"
    return "the model's server sent a reply without choices"


def _broken(error: Exception) -> str | None:
    """Return which connection broke; OpenAI's client says only "Connection error."."""
    if not breaks_connection(error):
        return None
    cause = error.__cause__ or error
    return f"the connection to the model's server failed: {_named(cause)}"


def _named(error: BaseException) -> str:
    words = one_line(redacted_excerpt(str(error), READ), SHOWN)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _reply_in(traceback: TracebackType | None) -> Any:
    """Return the parsed reply that a client failed on: what the innermost ``response`` is."""
    reply = None
    while traceback is not None:
        response = traceback.tb_frame.f_locals.get("response")
        if hasattr(response, "choices"):
            reply = response
        traceback = traceback.tb_next
    return reply if reply is not None and not reply.choices else None


def _message_of(error: Exception) -> str:
    """Return what a server said beside its status: the message of its error body, where it has one."""
    body = getattr(error, "body", None)
    return _message_in(body) if isinstance(body, dict) else str(error)


def _message_in(body: Any) -> str:
    message = body.get("message") if isinstance(body, dict) else None
    return str(message or body)


def _words(text: str) -> str:
    return one_line(redacted_excerpt(text, READ), SHOWN) or "nothing said"
