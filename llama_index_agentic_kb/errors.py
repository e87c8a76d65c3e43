"""The exception classes of this library, all derived from ``AgenticKBError``.

Each class has a stable ``code`` for logs and JSON responses, a `remedy` (what to do, where the message names nothing
better), and a `status_code` if an HTTP status applies, as in Azure AI Search's API; a class without a code of its own
shares its parent's. Messages name the field or part at fault, and contain no secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llama_index_agentic_kb.llm import Usage

E = TypeVar("E", bound=Enum)


class AgenticKBError(Exception):
    """The base class of all errors that this library raises on purpose."""

    code: str = "agenticKbError"  # the kind of error, stable across releases
    remedy: str = "Read the message: it names what failed. `__cause__` holds the other library's own error."
    status_code: int | None = None

    @property
    def docs(self) -> str:
        """The section of the documentation on this kind of error."""
        return f"docs/troubleshooting.md#{self.code.lower()}"


class ConfigurationError(AgenticKBError, ValueError):
    """An object was constructed with invalid or conflicting arguments."""

    code = "configuration"
    remedy = "Correct the argument, the option or the file that the message names."


class StoreMismatchError(ConfigurationError):
    """A store was created with one embedding model and opened with another."""

    code = "storeMismatch"
    remedy = "Open the store with the embedding model that it was made with, or ingest into a new store."


class StoreDamagedError(ConfigurationError):
    """A store's files are damaged or inconsistent; the message names the remedy, usually ``agentic-kb repair``."""

    code = "storeDamaged"
    remedy = "Run `agentic-kb repair`; where documents.db itself is damaged, restore it from a copy, or ingest again."


class InvalidRequestError(AgenticKBError, ValueError):
    """A request is invalid; the message names the field and the remedy."""

    code = "invalidRequest"
    remedy = "Correct the field of the request that the message names."
    status_code = 400


@dataclass(frozen=True, slots=True)
class FailedSearch:
    """A failed search as data; contains no secrets, so it can be shown to users."""

    source: str
    stage: str  # "search", or a stage before it
    code: str  # of the error, or the name of its class
    message: str
    query: str


class RetrievalError(AgenticKBError):
    """No selected source could answer.

    ``causes`` are the exceptions of the failed searches, by ``"source: query"``, and ``failures`` the same as data.
    """

    code = "retrievalFailed"
    remedy = "Mend the sources that `failures` names (over HTTP: `details`), or ask others."
    status_code = 502

    def __init__(
        self, message: str, causes: Mapping[str, BaseException] | None = None, failures: Sequence[FailedSearch] = ()
    ) -> None:
        super().__init__(message)
        self.causes, self.failures = dict(causes or {}), tuple(failures)


class DeniedError(RetrievalError):
    """A filter could not be applied to a source, so the source was not searched (fail closed)."""

    code = "denied"
    remedy = (
        "Ask as a principal who may, or declare the filter's fields with the source: `KnowledgeSource(fields=...)`."
    )
    status_code = 403


class SourceUnavailableError(AgenticKBError):
    """A source was not called because its circuit breaker is open or its bulkhead is full."""

    code = "sourceUnavailable"
    remedy = "Ask again later; `source.health` shows what is at work, waiting and abandoned."


class CircuitOpenError(SourceUnavailableError):
    """A source is temporarily not called because of repeated recent failures (circuit breaker)."""

    code = "circuitOpen"
    remedy = "Mend the source, and ask again at the time that the message names."


class BulkheadFullError(SourceUnavailableError):
    """The waiting queue of a source is full, or all its concurrent calls hang (bulkhead)."""

    code = "bulkheadFull"
    remedy = (
        "Ask fewer questions at once, or raise `Resilience(max_concurrency=...)`; a source that hangs "
        "needs a `timeout`."
    )


class NotFoundError(AgenticKBError, LookupError):
    """The named object does not exist or belongs to another owner; the error does not reveal which."""

    code = "notFound"
    remedy = "Check the name, and that it belongs to whoever asks."
    status_code = 404


class SessionStoreError(AgenticKBError):
    """The session database is unreachable or failed; data written earlier is kept."""

    code = "sessionStoreFailed"
    remedy = "Start the database, or correct its address; what was written is still there."
    status_code = 503


class InvalidAnswerError(AgenticKBError, ValueError):
    """An ``Answer`` violates a rule of its schema; the message names the field."""

    code = "invalidAnswer"
    remedy = "Correct the field of the `Answer` that the message names."


class PlanningError(AgenticKBError):
    """A model's reply has no usable plan. The planner converts it into a warning and a simple plan."""

    code = "planningFailed"
    remedy = 'Use a stronger model for plans, or `effort="minimal"`, which makes none.'


class SynthesisError(AgenticKBError):
    """The language model failed while answering.

    ``step`` is the 0-based number of the failed call, and ``partial`` the text of the answer so far; may be empty.
    """

    code = "synthesisFailed"
    remedy = "The message has the model's own error, as `__cause__` has in Python; `partial` holds the text so far."

    def __init__(self, message: str, *, step: int = 0, partial: str = "") -> None:
        super().__init__(message)
        self.step, self.partial = step, partial


class LLMError(AgenticKBError):
    """A language model's reply can't be used: empty, refused, filtered or cut off.

    ``empty`` means no text although it was neither refused nor filtered; ``usage`` are the billed tokens, if known.
    """

    code = "llmFailed"
    remedy = "Ask again, raise the model's output limit, or use another model; the message has the model's reason."

    def __init__(self, message: str, *, empty: bool = False, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.empty, self.usage = empty, usage


class DeadlineExceededError(AgenticKBError, TimeoutError):
    """A step was still running at its deadline. ``partial`` is the text of the answer so far; may be empty."""

    code = "deadlineExceeded"
    remedy = "Raise `max_runtime_in_seconds`, or mend what the message names as slow."
    partial: str = ""


class IngestionError(AgenticKBError):
    """Documents could not be read or stored."""

    code = "ingestionFailed"
    remedy = "Correct what the message names (rights, room on the disk, another writer), and ingest again."


def by_value(kind: type[E], value: E | str, field: str) -> E:
    """Return the enum member with a value; else raise ``ConfigurationError``, which lists the known ones."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise ConfigurationError(f"{field}: {value!r} is unknown; known are {known}") from None
