"""The exception classes of this library, all derived from ``AgenticKBError``.

Each class has a stable ``code`` for logs and JSON responses, and a ``status_code`` if an HTTP status applies, as in
Azure AI Search's API. Messages name the field or part at fault and the remedy, and contain no secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llama_index_agentic_kb.llm.replies import Usage

E = TypeVar("E", bound=Enum)


class AgenticKBError(Exception):
    """The base class of all errors that this library raises on purpose."""

    code: str = "agenticKbError"
    status_code: int | None = None


class ConfigurationError(AgenticKBError, ValueError):
    """An object was constructed with invalid or conflicting arguments."""

    code = "configuration"


class StoreMismatchError(ConfigurationError):
    """A store was created with one embedding model and opened with another."""

    code = "storeMismatch"


class StoreDamagedError(ConfigurationError):
    """A store's files are damaged or inconsistent; the message names the remedy, usually ``agentic-kb repair``."""

    code = "storeDamaged"


class InvalidRequestError(AgenticKBError, ValueError):
    """A request is invalid; the message names the field and the remedy."""

    code = "invalidRequest"
    status_code = 400


@dataclass(frozen=True, slots=True)
class FailedSearch:
    """A failed search as data; contains no secrets, so it can be shown to users.

    Args:
        source: The source's name.
        stage: The stage that failed: "search", or a stage before it.
        code: The error's ``code``, or its class name.
        message: The error message.
        query: The search query.
    """

    source: str
    stage: str
    code: str
    message: str
    query: str


class RetrievalError(AgenticKBError):
    """No selected source could answer.

    Args:
        message: A one-sentence description of the failure.
        causes: The exception of each failed search, by ``"source: query"``.
        failures: The failed searches as data, for activity logs and responses.
    """

    code = "retrievalFailed"
    status_code = 502

    def __init__(
        self,
        message: str,
        causes: Mapping[str, BaseException] | None = None,
        failures: Sequence[FailedSearch] = (),
    ) -> None:
        """Set the message, the causes and the failures."""
        super().__init__(message)
        self.causes, self.failures = dict(causes or {}), tuple(failures)


class DeniedError(RetrievalError):
    """A filter could not be applied to a source, so the source was not searched (fail closed)."""

    code = "denied"
    status_code = 403


class SourceUnavailableError(AgenticKBError):
    """A source was not called because its circuit breaker is open or its bulkhead is full."""

    code = "sourceUnavailable"


class CircuitOpenError(SourceUnavailableError):
    """A source is temporarily not called because of repeated recent failures (circuit breaker)."""

    code = "circuitOpen"


class BulkheadFullError(SourceUnavailableError):
    """The waiting queue of a source is full, or all its concurrent calls hang (bulkhead)."""

    code = "bulkheadFull"


class NotFoundError(AgenticKBError, LookupError):
    """The named object does not exist or belongs to another owner; the error does not reveal which."""

    code = "notFound"
    status_code = 404


class SessionStoreError(AgenticKBError):
    """The session database is unreachable or failed; data written earlier is kept."""

    code = "sessionStoreFailed"
    status_code = 503


class InvalidAnswerError(AgenticKBError, ValueError):
    """An ``Answer`` violates a rule of its schema; the message names the field."""

    code = "invalidAnswer"


class PlanningError(AgenticKBError):
    """A model's reply has no usable plan. The planner converts it into a warning and a simple plan."""

    code = "planningFailed"


class SynthesisError(AgenticKBError):
    """The language model failed while answering.

    Args:
        message: A one-sentence description of the failure.
        step: The 0-based number of the failed call, in modes with several calls.
        partial: The text of the answer so far; may be empty.
    """

    code = "synthesisFailed"

    def __init__(self, message: str, *, step: int = 0, partial: str = "") -> None:
        """Set the message, the failed step and the partial text."""
        super().__init__(message)
        self.step, self.partial = step, partial


class LLMError(AgenticKBError):
    """A language model's reply can't be used: empty, refused, filtered or cut off.

    Args:
        message: A description of the problem.
        empty: Whether the reply has no text although it was neither refused nor filtered.
        usage: The billed tokens (``llm.Usage``); None if unknown.
    """

    code = "llmFailed"

    def __init__(self, message: str, *, empty: bool = False, usage: Usage | None = None) -> None:
        """Set the message, the empty flag and the usage."""
        super().__init__(message)
        self.empty, self.usage = empty, usage


class DeadlineExceededError(AgenticKBError, TimeoutError):
    """A step was still running at its deadline. ``partial`` is the text of the answer so far; may be empty."""

    code = "deadlineExceeded"
    partial: str = ""


class IngestionError(AgenticKBError):
    """Documents could not be read or stored."""

    code = "ingestionFailed"


def by_value(kind: type[E], value: E | str, field: str) -> E:
    """Return the enum member with the given value.

    Raises:
        ConfigurationError: The value is unknown; the message lists the known ones.
    """
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise ConfigurationError(f"{field}: {value!r} is unknown; known are {known}") from None
