"""The faults that are caused for real, each with the promise that it tests.

A fault is a function without arguments that causes it, runs a query (or an ingestion, ...) through the public API and
asserts the promise. It gives the seconds that the caller waited, or None where the promise is not about time.

    @fault("language model", "the server hangs", "the evidence is answered by the deadline, status 206", deadline=1.0)
    def hang() -> float:
        ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Final, TypeAlias

__all__ = ["AREAS", "Fault", "Inject", "Survival", "fault", "faults", "survive"]

Inject: TypeAlias = Callable[[], float | None]

AREAS: Final = ("sources", "models", "garbage", "permissions", "hostile", "wallet", "store", "secrets")
"""Modules of this package; each registers its own when it is imported."""

_KNOWN: list[Fault] = []


@dataclass(frozen=True)
class Fault:
    """One way in which something goes wrong.

    Args:
        area: Whose fault it is: "source", "language model", "store", "text", ...
        injected: What is done to it, in a few words.
        promise: What must hold all the same, in a few words.
        inject: Causes it and asserts the promise.
        deadline: Seconds that the request was given; None where the promise is not about time.
        slow: Whether it takes more than two seconds.
    """

    area: str
    injected: str
    promise: str
    inject: Inject
    deadline: float | None = None
    slow: bool = False

    @property
    def name(self) -> str:
        """Name it uniquely."""
        return f"{self.area}: {self.injected}"


@dataclass(frozen=True)
class Survival:
    """How a fault went.

    Args:
        fault: The fault.
        error: Why the promise was not kept; None where it was.
        waited: Seconds that the caller waited, where that was measured.
        took: Seconds of the whole.
    """

    fault: Fault
    error: BaseException | None
    waited: float | None
    took: float


def fault(
    area: str, injected: str, promise: str, *, deadline: float | None = None, slow: bool = False
) -> Callable[[Inject], Inject]:
    """Register a function as a fault; see ``Fault``."""

    def register(inject: Inject) -> Inject:
        made = Fault(area, injected, promise, inject, deadline, slow)
        if any(known.name == made.name for known in _KNOWN):
            raise ValueError(f"the fault {made.name!r} is registered twice")
        _KNOWN.append(made)
        return inject

    return register


def faults() -> list[Fault]:
    """Give all faults, area by area."""
    for area in AREAS:
        import_module(f"tests.faults.{area}")
    return list(_KNOWN)


def survive(one: Fault) -> Survival:
    """Cause a fault and see whether its promise is kept."""
    began = time.monotonic()
    try:
        waited = one.inject()
    except Exception as error:  # noqa: BLE001 (whatever is raised, the promise was not kept; it is told)
        return Survival(one, error, None, time.monotonic() - began)
    return Survival(one, None, waited, time.monotonic() - began)
