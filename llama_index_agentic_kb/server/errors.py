"""Errors of the server, and the JSON of every error that a client sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel

from llama_index_agentic_kb._text import printable, redacted
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError, RetrievalError, SynthesisError


class RequestError(AgenticKBError):
    """A request that the server refuses. ``headers`` are sent with the response."""

    headers: Mapping[str, str] = {}


class UnauthorizedError(RequestError):
    """The request has no credentials, or credentials that can't be verified."""

    code, status_code, headers = "unauthorized", 401, {"WWW-Authenticate": 'Bearer realm="agentic-kb"'}
    remedy = "Send a key (`api-key`) or a token (`Authorization: Bearer`) that the server knows."


class ForbiddenError(RequestError):
    """The caller may not do this."""

    code, status_code = "forbidden", 403
    remedy = "Ask with a key or a token that has the right which the message names."


class NotAcceptableError(RequestError):
    """The API version can't answer in the form that the client accepts."""

    code, status_code = "notAcceptable", 406
    remedy = "Accept `application/json`, or use an API version that streams."


class ConflictError(RequestError):
    """The change contradicts what is stored."""

    code, status_code = "conflict", 409
    remedy = "Use another name, or change first what the message names."


class PreconditionError(RequestError):
    """The stored definition does not meet ``If-Match`` or ``If-None-Match``."""

    code, status_code = "preconditionFailed", 412
    remedy = "Read the definition again, and send its present ETag."


class TooLargeError(RequestError):
    """The body is larger than the server accepts."""

    code, status_code = "requestTooLarge", 413
    remedy = "Send a smaller body, or raise the server's limit."


class TooManyRequestsError(RequestError):
    """The caller or its tenant exceeded a limit; ``Retry-After`` says when to try again."""

    code, status_code = "tooManyRequests", 429
    remedy = "Wait as long as `Retry-After` says, or raise the limit that the message names."

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(max(1, round(seconds + 0.5)))}


class OverloadedError(RequestError):
    """The server is running its maximum of requests, or is shutting down."""

    code, status_code, headers = "overloaded", 503, {"Retry-After": "1"}
    remedy = "Wait as long as `Retry-After` says, and send the request again."


class UnavailableError(RequestError):
    """A knowledge base can't be opened: what its definition names is not configured on this server."""

    code, status_code = "knowledgeBaseUnavailable", 503
    remedy = "Configure on the server what the message names, or correct the definition."


_OTHER_STATUSES: Final = ((SynthesisError, 502), (DeadlineExceededError, 502))
"""The statuses of errors whose class has none: the model's server is a gateway's upstream here."""


class _Error(BaseModel):
    code: str
    message: str
    target: str = ""
    details: list[JsonObject] = []
    innererror: dict[str, str] = {}


class ErrorBody(BaseModel):
    """The body of every error."""

    error: _Error


def described(*statuses: int) -> dict[int | str, JsonObject]:
    """Return the description of a route's errors, as FastAPI takes it."""
    return {status: {"model": ErrorBody} for status in statuses}


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error; 500 for one that this library does not raise on purpose."""
    if isinstance(error, AgenticKBError) and error.status_code is not None:
        return error.status_code
    return next((status for kind, status in _OTHER_STATUSES if isinstance(error, kind)), 500)


def error_body(error: BaseException, request_id: str) -> JsonObject:
    """Return Azure's error object with the remedy; the log has the message of an unexpected error, by request id."""
    if not isinstance(error, AgenticKBError):
        message = f"The server failed; its log names the reason under the request id {request_id}."
        return {"error": {"code": "internalError", "message": message}}
    shown: JsonObject = {
        "code": error.code,
        "message": printable(redacted(str(error))),
        "innererror": {"remedy": error.remedy, "docs": error.docs},
    }
    if isinstance(error, RetrievalError) and error.failures:
        shown["details"] = [
            {
                "code": failure.code,
                "message": printable(redacted(failure.message)),
                "target": failure.source,
                "additionalInfo": [{"type": "stage", "info": {"stage": failure.stage, "query": failure.query}}],
            }
            for failure in error.failures
        ]
        if len({failure.source for failure in error.failures}) == 1:
            shown["target"] = error.failures[0].source
    return {"error": shown}
