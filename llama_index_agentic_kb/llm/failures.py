"""Why a call of a language model failed, in words: whatever its client raises becomes one ``LLMError``."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Final

from llama_index_agentic_kb._text import error_message, one_line, redacted_excerpt
from llama_index_agentic_kb.errors import AgenticKBError, LLMError
from llama_index_agentic_kb.guard.failures import breaks_connection, status_of

__all__ = ["as_llm_error"]

SHOWN: Final = 200
"""Characters of a server's own words that are told."""

READ: Final = 2_000
"""Characters of them that are read: on one line, and without secrets, they may be fewer."""


def as_llm_error(error: Exception) -> LLMError:
    """Give the error that tells what came in place of a reply; the client's own is its cause, to be set by ``raise``.

    Args:
        error: What a model's client raised. An ``LLMError`` is given back as it is.
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
    """Tell what came where a client could make nothing of it."""
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
    told = getattr(reply, "error", None)
    if told:
        return f"the model's server sent an error in place of a reply: {_words(_message_in(told))}"
    return "the model's server sent a reply without choices"


def _broken(error: Exception) -> str | None:
    """Tell of a connection that broke; OpenAI's client says only "Connection error."."""
    if not breaks_connection(error):
        return None
    cause = error.__cause__ or error
    return f"the connection to the model's server failed: {_named(cause)}"


def _named(error: BaseException) -> str:
    words = one_line(redacted_excerpt(str(error), READ), SHOWN)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _reply_in(traceback: TracebackType | None) -> Any:
    """Give the parsed reply that a client stumbled over: what the innermost ``response`` is."""
    reply = None
    while traceback is not None:
        given = traceback.tb_frame.f_locals.get("response")
        if hasattr(given, "choices"):
            reply = given
        traceback = traceback.tb_next
    return reply if reply is not None and not reply.choices else None


def _message_of(error: Exception) -> str:
    """Give what a server said beside its status: the message of its error body, where it has one."""
    body = getattr(error, "body", None)
    return _message_in(body) if isinstance(body, dict) else str(error)


def _message_in(told: Any) -> str:
    message = told.get("message") if isinstance(told, dict) else None
    return str(message or told)


def _words(text: str) -> str:
    return one_line(redacted_excerpt(text, READ), SHOWN) or "nothing said"
