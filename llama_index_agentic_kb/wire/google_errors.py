"""Error bodies as Google's HTTP services send them: ``[{"error": {"code", "message", "status"}}]``."""

from __future__ import annotations

from typing import Any, Final

from llama_index_agentic_kb import _text
from llama_index_agentic_kb.errors import AgenticKBError

__all__ = ["encode_error"]

_STATUS: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_REPLACED: Final = {502: 503}
"""Google's list of statuses has no bad gateway."""
_INTERNAL: Final = 500
_LATE: Final = 504


def encode_error(error: BaseException) -> tuple[int, list[dict[str, Any]]]:
    """Give an error's HTTP status and body.

    An error of this library is told, without what looks like a secret; of any other only that there was one.
    """
    known = isinstance(error, AgenticKBError)
    status = _status(error) if known else _INTERNAL
    told = _text.printable(_text.redacted(str(error))) if known else "Internal error."
    return status, [{"error": {"code": status, "message": told, "status": _STATUS[status]}}]


def _status(error: BaseException) -> int:
    if isinstance(error, TimeoutError):
        return _LATE
    status = getattr(error, "status_code", None) or _INTERNAL
    status = _REPLACED.get(status, status)
    return status if status in _STATUS else _INTERNAL
