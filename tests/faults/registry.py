"""The faults that are caused for real, each with the promise that it tests.

A fault is a function without arguments that causes it, runs a query (or an ingestion, ...) through the public API and
asserts the promise. It returns the seconds that the caller waited, or None where the promise is not about time.

    @fault("language model", "the server hangs", "the evidence is answered by the deadline, status 206", deadline=1.0)
    def hang() -> float:
        ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeAlias, TypeVar

import pytest

from llama_index_agentic_kb import RetrievalResponse
from llama_index_agentic_kb.schema import SourceActivity

Inject: TypeAlias = Callable[[], float | None]
Raised = TypeVar("Raised", bound=BaseException)

AREAS: Final = ("sources", "models", "garbage", "permissions", "hostile", "store")
"""Modules of this package; each registers its own when it is imported."""

HANGS: Final = 20.0
"""Seconds that a promise that is not kept would take, or more."""

_KNOWN: dict[str, Fault] = {}


@dataclass(frozen=True)
class Fault:
    """One way in which something goes wrong: whose fault it is, what is done, what must hold, and what causes it."""

    area: str
    injected: str
    promise: str
    inject: Inject
    deadline: float | None = None

    @property
    def name(self) -> str:
        return f"{self.area}: {self.injected}"


def fault(area: str, injected: str, promise: str, *, deadline: float | None = None) -> Callable[[Inject], Inject]:
    """Register a function as a fault; ``deadline`` is in seconds, None where the promise is not about time."""

    def register(inject: Inject) -> Inject:
        made = Fault(area, injected, promise, inject, deadline)
        if _KNOWN.setdefault(made.name, made) is not made:
            raise ValueError(f"the fault {made.name!r} is registered twice")
        return inject

    return register


def faults() -> list[Fault]:
    for area in AREAS:
        import_module(f"tests.faults.{area}")
    return list(_KNOWN.values())


def failing(kind: type[Raised], words: str, work: Callable[[], object]) -> Raised:
    """Return the error of a kind, with certain words if any are given, that some work must raise."""
    with pytest.raises(kind, match=words or None) as raised:
        work()
    return raised.value


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what some work gives, and the seconds that it took."""
    began = time.monotonic()
    result = work()
    waited = time.monotonic() - began
    assert waited < HANGS, waited
    return result, waited


def searches(response: RetrievalResponse, name: str | None = None) -> list[SourceActivity]:
    """Return the records of what was searched, at one source or at all."""
    records = (one for one in response.activity or [] if isinstance(one, SourceActivity))
    return [one for one in records if name in (None, one.knowledge_source_name)]
