"""Every error this library raises, as one tree.

    AgenticKBError
    ├── ConfigurationError (ValueError)      how an object was built
    │   └── StoreMismatchError               a store opened with another embedding model
    ├── InvalidRequestError (ValueError)     what a caller asked for
    ├── RetrievalError                       no selected source could answer
    │   └── DeniedError                      a mandatory filter could not be applied
    ├── PlanningError                        a plan could not be made (never leaves the retriever)
    ├── SynthesisError                       the language model failed while answering
    ├── LLMError                             a language model's reply can't be used
    ├── DeadlineExceededError (TimeoutError) a step was still running at its deadline
    └── IngestionError                       documents could not be read or stored

Each class has a stable ``code``, for logs and wire contracts. Messages name the field or part at fault and the
remedy; they hold no secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = [
    "AgenticKBError",
    "ConfigurationError",
    "DeadlineExceededError",
    "DeniedError",
    "IngestionError",
    "InvalidRequestError",
    "LLMError",
    "PlanningError",
    "RetrievalError",
    "StoreMismatchError",
    "SynthesisError",
]


class AgenticKBError(Exception):
    """Root of the tree: catch this to catch everything this library raises on purpose."""

    code: str = "agenticKbError"


class ConfigurationError(AgenticKBError, ValueError):
    """An object was built with arguments that can't work together."""

    code = "configuration"


class StoreMismatchError(ConfigurationError):
    """A store was made with one embedding model and opened with another."""

    code = "storeMismatch"


class InvalidRequestError(AgenticKBError, ValueError):
    """A request can't be carried out as asked; the message names the field and the remedy."""

    code = "invalidRequest"


class RetrievalError(AgenticKBError):
    """No selected source could answer.

    Args:
        message: What failed, in one sentence.
        causes: Each failed search's cause, by ``"source: query"``.
    """

    code = "retrievalFailed"

    def __init__(self, message: str, causes: Mapping[str, BaseException] | None = None) -> None:
        """Keep the causes beside the message."""
        super().__init__(message)
        self.causes: Mapping[str, BaseException] = MappingProxyType(dict(causes or {}))


class DeniedError(RetrievalError):
    """A filter could not be applied to a source, so the source was not searched (fail closed)."""

    code = "denied"


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
        self.step = step
        self.partial = partial


class LLMError(AgenticKBError):
    """A language model's reply can't be used: empty, refused, filtered or cut off.

    Args:
        message: What is wrong with it.
        empty: Whether it simply holds no text: neither refused nor filtered.
        usage: What it billed all the same (``llm.Usage``); None where that is not known.
    """

    code = "llmFailed"

    def __init__(self, message: str, *, empty: bool = False, usage: Any = None) -> None:
        """Keep the kind and the bill."""
        super().__init__(message)
        self.empty = empty
        self.usage = usage


class DeadlineExceededError(AgenticKBError, TimeoutError):
    """A step was still running when its deadline passed."""

    code = "deadlineExceeded"


class IngestionError(AgenticKBError):
    """Documents could not be read or stored."""

    code = "ingestionFailed"
