"""The faults that are caused for real, each with the promise that it tests.

A fault is a function without arguments that causes it, runs a query (or an ingestion, ...) through the public API and
asserts the promise. It returns the seconds that the caller waited, or None where the promise is not about time.

    @fault("language model", "the server hangs", "the evidence is answered by the deadline, status 206", deadline=1.0)
    def hang() -> float:
        ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Final, TypeAlias

Inject: TypeAlias = Callable[[], float | None]

AREAS: Final = ("sources", "models", "garbage", "permissions", "hostile", "wallet", "store", "secrets")
"""Modules of this package; each registers its own when it is imported."""

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
