"""Every error this library raises, as one tree under ``AgenticKBError``.

Each class has a stable ``code``, for logs and wire contracts, and a ``status_code`` where Azure AI Search's contract
has one for what happened: 400, 403, or 502. Messages name the field or part at fault and the remedy; they hold no
secrets.
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
    """Root of the tree: catch this to catch everything this library raises on purpose."""

    code: str = "agenticKbError"
    status_code: int | None = None


class ConfigurationError(AgenticKBError, ValueError):
    """An object was built with arguments that can't work together."""

    code = "configuration"


class StoreMismatchError(ConfigurationError):
    """A store was made with one embedding model and opened with another."""

    code = "storeMismatch"


class StoreDamagedError(ConfigurationError):
    """A store's files don't hold together; the message names the remedy, mostly ``agentic-kb repair``."""

    code = "storeDamaged"


class InvalidRequestError(AgenticKBError, ValueError):
    """A request can't be carried out as asked; the message names the field and the remedy."""

    code = "invalidRequest"
    status_code = 400


@dataclass(frozen=True, slots=True)
class FailedSearch:
    """One search that failed, as data that may be shown: it holds no secrets.

    Args:
        source: The source's name.
        stage: What failed there: "search", or the stage before it.
        code: The error's code, or its class.
        message: The cause in words.
        query: What was searched.
    """

    source: str
    stage: str
    code: str
    message: str
    query: str


class RetrievalError(AgenticKBError):
    """No selected source could answer.

    Args:
        message: What failed, in one sentence.
        causes: Each failed search's cause, by ``"source: query"``: the exceptions themselves, for programs.
        failures: The same as data, for accounts and responses.
    """

    code = "retrievalFailed"
    status_code = 502

    def __init__(
        self,
        message: str,
        causes: Mapping[str, BaseException] | None = None,
        failures: Sequence[FailedSearch] = (),
    ) -> None:
        """Keep the causes beside the message."""
        super().__init__(message)
        self.causes, self.failures = dict(causes or {}), tuple(failures)


class DeniedError(RetrievalError):
    """A filter could not be applied to a source, so the source was not searched (fail closed)."""

    code = "denied"
    status_code = 403


class SourceUnavailableError(AgenticKBError):
    """A source was not asked: it would not have answered, or others would have waited for it."""

    code = "sourceUnavailable"


class CircuitOpenError(SourceUnavailableError):
    """A source failed so often lately that it is left alone for a while."""

    code = "circuitOpen"


class BulkheadFullError(SourceUnavailableError):
    """As many calls as may wait for a source wait already, or all its places are held by calls that hang."""

    code = "bulkheadFull"


class NotFoundError(AgenticKBError, LookupError):
    """There is nothing of this name, or it is another owner's: the error does not say which."""

    code = "notFound"
    status_code = 404


class SessionStoreError(AgenticKBError):
    """The database of the sessions can't be reached, or failed; what was written before is kept."""

    code = "sessionStoreFailed"
    status_code = 503


class InvalidAnswerError(AgenticKBError, ValueError):
    """An answer breaks a rule of the contract that it was to be written in; the message names the field."""

    code = "invalidAnswer"


class PlanningError(AgenticKBError):
    """A model's reply held no usable plan. The planner turns it into a warning and a plain plan."""

    code = "planningFailed"


class SynthesisError(AgenticKBError):
    """The language model failed while answering.

    Args:
        message: What failed, in one sentence.
        step: The 0-based call that failed, in modes that make several.
        partial: The text of the answer so far; empty when there was none.
    """

    code = "synthesisFailed"

    def __init__(self, message: str, *, step: int = 0, partial: str = "") -> None:
        """Keep the failed step and the text before it."""
        super().__init__(message)
        self.step, self.partial = step, partial


class LLMError(AgenticKBError):
    """A language model's reply can't be used: empty, refused, filtered or cut off.

    Args:
        message: What is wrong with it.
        empty: Whether it simply holds no text: neither refused nor filtered.
        usage: What it billed all the same (``llm.Usage``); None where that is not known.
    """

    code = "llmFailed"

    def __init__(self, message: str, *, empty: bool = False, usage: Usage | None = None) -> None:
        """Keep the kind and the bill."""
        super().__init__(message)
        self.empty, self.usage = empty, usage


class DeadlineExceededError(AgenticKBError, TimeoutError):
    """A step was still running when its deadline passed. ``partial`` is the answer so far, where one was written."""

    code = "deadlineExceeded"
    partial: str = ""


class IngestionError(AgenticKBError):
    """Documents could not be read or stored."""

    code = "ingestionFailed"


def by_value(kind: type[E], value: E | str, field: str) -> E:
    """Return the member of an enum that a value names.

    Raises:
        ConfigurationError: It names none; the message lists those that are known.
    """
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise ConfigurationError(f"{field}: {value!r} is unknown; known are {known}") from None
