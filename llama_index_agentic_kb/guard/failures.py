"""Classification of failures: whether a call is worth retrying, and whether the called service is down.

Clients wrap the errors of their transport, so the causes of an error are inspected too. Error classes of clients are
recognised by name, without importing any client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
TRANSIENT_KINDS: Final = frozenset(
    {
        "APIConnectionError",
        "ClientConnectionError",
        "ConnectionError",
        "IncompleteRead",
        "NetworkError",
        "RemoteProtocolError",
        "ServerTimeoutError",
        "Timeout",
        "TimeoutError",
        "TimeoutException",
    }
)

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

MAX_CAUSES: Final = 8
"""The maximum number of errors inspected in a chain of causes."""


def is_transient(error: BaseException) -> bool:
    """Return whether the same call is likely to succeed if it is repeated.

    True for ``TRANSIENT_STATUSES``, for refused, reset or broken connections, and for timeouts. False for all other
    statuses, for an exhausted quota, and for errors other than of the transport. A server's ``x-should-retry`` header
    takes precedence.

    Args:
        error: The exception that the call raised.
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

    False for this package's own errors (except deadlines), for ``REQUEST_ERRORS``, and for HTTP statuses outside
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
            for name in ("status_code", "status", "code"):
                status = _status(getattr(holder, name, None), is_method=name == "code")
                if status is not None:
                    return status
    return None


def _status(value: Any, *, is_method: bool) -> int | None:
    """Return a value, or the result of a method, if it is an HTTP status of a failure."""
    if is_method:
        try:
            value = value() if callable(value) else None
        except Exception:  # noqa: BLE001 (somebody else's method)
            return None
    return int(value) if isinstance(value, int) and 400 <= value < 600 else None  # noqa: PLR2004 (RFC 9110, 15)


def retry_after(error: BaseException) -> float | None:
    """Return the number of seconds that a server asks clients to wait before a retry; None if it sets none.

    Reads the headers ``retry-after-ms`` and ``Retry-After`` (seconds, or an HTTP date; RFC 9110, 10.2.3) of the
    response attached to the failure or one of its causes. Returns 0 for a date in the past.
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
    """Yield a failure and its causes, at most ``MAX_CAUSES`` errors."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__
