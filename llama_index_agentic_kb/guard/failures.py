"""What a failure says: whether the same call may succeed if it is made again, and whether what was called is down.

Clients wrap what their transport raised, so the causes of an error are read too. Error classes of clients are
recognised by name: no client is imported for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError

TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses worth another attempt: timeouts, conflicts (as OpenAI's client has it), limits, a server in trouble."""

PERMANENT_CODES: Final = frozenset({"insufficient_quota", "billing_hard_limit_reached", "content_filter"})
"""Codes of error bodies that no waiting changes, whatever the status."""

OUTAGE_STATUSES: Final = frozenset({408, 425, 429, *range(500, 600)})
"""HTTP statuses that speak of the server and not of the request."""

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
"""What Python raises where a request or a program is wrong."""

MAX_CAUSES: Final = 8
"""How far a chain of causes is followed."""


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may well succeed if it is made again.

    Yes for ``TRANSIENT_STATUSES``, for connections that were refused, reset or cut, and for timeouts. No for all other
    statuses, for a quota that is used up, and for everything that is no failure of a transport. A server's
    ``x-should-retry`` header has the last word.

    Args:
        error: What the call raised.
    """
    advice = (_header(error, "x-should-retry") or "").lower()
    if advice in ("true", "false"):
        return advice == "true"
    if any(getattr(cause, "code", None) in PERMANENT_CODES for cause in _chain(error)):
        return False
    status = status_of(error)
    return breaks_connection(error) if status is None else status in TRANSIENT_STATUSES


def breaks_connection(error: BaseException) -> bool:
    """Return whether a failure is a transport's: no connection, a broken one, or a timeout."""
    return any(kind.__name__ in TRANSIENT_KINDS for cause in _chain(error) for kind in type(cause).__mro__)


def is_outage(error: BaseException) -> bool:
    """Return whether a failure speaks of the thing that was called, and not of what it was asked.

    No for this package's own refusals, for ``REQUEST_ERRORS``, and for HTTP statuses that are no ``OUTAGE_STATUSES``.
    """
    if isinstance(error, DeadlineExceededError):
        return True
    status = status_of(error)
    if status is not None:
        return status in OUTAGE_STATUSES
    if isinstance(error, AgenticKBError):
        return type(error) is AgenticKBError  # what a source raised that is no Exception
    if isinstance(error, OSError):
        return True
    code = getattr(error, "code", None)  # Chroma's errors have their status as a method
    try:
        status = code() if callable(code) else None
    except Exception:  # noqa: BLE001 (somebody else's method)
        status = None
    return not isinstance(error, REQUEST_ERRORS) and (not isinstance(status, int) or status in OUTAGE_STATUSES)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that a failure or one of its causes holds."""
    for cause in _chain(error):
        for holder in (cause, getattr(cause, "response", None)):
            status = getattr(holder, "status_code", None)
            if isinstance(status, int):
                return status
    return None


def retry_after(error: BaseException) -> float | None:
    """Return the seconds after which a server wants to be asked again; None where it does not say.

    Reads the headers ``retry-after-ms`` and ``Retry-After`` (seconds, or an HTTP date; RFC 9110, 10.2.3) of the
    response that the failure or one of its causes holds. A time that has passed is 0.
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
    """Yield a failure and what caused it."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__
