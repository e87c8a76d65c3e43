"""Whether a failed call is worth retrying, and whether the called service is down.

Clients wrap the errors of their transport, so the causes of an error are inspected too. Error classes of clients are
recognised by name, without importing any client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError

TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses worth a retry: timeouts, conflicts (as in OpenAI's client), rate limits and server errors."""

PERMANENT_CODES: Final = frozenset({"insufficient_quota", "billing_hard_limit_reached", "content_filter"})
"""Codes in error bodies of permanent failures, which are not retried whatever the status."""

OUTAGE_STATUSES: Final = frozenset({408, 425, 429, *range(500, 600)})
"""HTTP statuses that indicate a problem of the server, not of the request."""

# Names of exception classes of transports: Python's, requests', urllib3's, httpx's, aiohttp's, OpenAI's, Anthropic's.
# fmt: off
TRANSIENT_KINDS: Final = frozenset((
    "APIConnectionError", "ClientConnectionError", "ConnectionError", "IncompleteRead", "NetworkError",
    "RemoteProtocolError", "ServerTimeoutError", "Timeout", "TimeoutError", "TimeoutException",
))
# fmt: on

REQUEST_ERRORS: Final = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    RecursionError,
)
"""The exceptions that Python raises for an invalid request or a bug."""


def is_transient(error: BaseException) -> bool:
    """Return whether the same call is likely to succeed if it is repeated.

    True for ``TRANSIENT_STATUSES`` and for ``breaks_connection``. False for all else, and for an exhausted quota. A
    server's ``x-should-retry`` header takes precedence.
    """
    advice = (_header(error, "x-should-retry") or "").lower()
    if advice in ("true", "false"):
        return advice == "true"
    codes = [getattr(cause, "code", None) for cause in _chain(error)]
    if any(isinstance(code, str) and code in PERMANENT_CODES for code in codes):
        return False
    status = status_of(error)
    return breaks_connection(error) if status is None else status in TRANSIENT_STATUSES


def breaks_connection(error: BaseException) -> bool:
    """Return whether a failure is a transport error: no connection, a broken connection, or a timeout."""
    return any(kind.__name__ in TRANSIENT_KINDS for cause in _chain(error) for kind in type(cause).__mro__)


def is_outage(error: BaseException) -> bool:
    """Return whether a failure indicates a problem of the called service, not of the request.

    False for this package's own errors (except deadlines), for ``REQUEST_ERRORS``, and for other HTTP statuses than
    ``OUTAGE_STATUSES``.
    """
    if isinstance(error, DeadlineExceededError):
        return True
    status = status_of(error)
    if status is not None:
        return status in OUTAGE_STATUSES
    if isinstance(error, AgenticKBError):
        return type(error) is AgenticKBError  # wraps a BaseException that a source raised
    return isinstance(error, OSError) or not isinstance(error, REQUEST_ERRORS)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of a failure or of one of its causes; None if there is no status.

    Clients name it ``status_code`` (httpx, OpenAI, requests) or ``status`` (aiohttp, urllib); Chroma's errors have a
    method ``code``.
    """
    for cause in _chain(error):
        for holder in (cause, getattr(cause, "response", None)):
            code: Any = getattr(holder, "code", None)
            values = [getattr(holder, "status_code", None), getattr(holder, "status", None)]
            if callable(code):
                with suppress(Exception):  # somebody else's method
                    values.append(code())
            for value in values:
                if isinstance(value, int) and 400 <= value < 600:  # noqa: PLR2004 (RFC 9110, 15)
                    return int(value)
    return None


def retry_after(error: BaseException) -> float | None:
    """Return the number of seconds that a server asks clients to wait before a retry; None if it sets none.

    Reads ``retry-after-ms`` and ``Retry-After`` (seconds, or an HTTP date; RFC 9110, 10.2.3) in the response of the
    failure or of one of its causes.
    """
    milliseconds = _number(_header(error, "retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    header = _header(error, "retry-after")
    seconds = _number(header)
    if seconds is not None or header is None:
        return seconds
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    aware = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return max(0.0, number) if math.isfinite(number) else None


def _header(error: BaseException, name: str) -> str | None:
    for cause in _chain(error):
        for holder in (getattr(cause, "response", None), cause):
            items = getattr(getattr(holder, "headers", None), "items", None)
            for key, value in items() if callable(items) else ():
                if str(key).lower() == name:
                    return str(value)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield a failure and its causes, at most 8 errors."""
    cause: BaseException | None = error
    for _ in range(8):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__
