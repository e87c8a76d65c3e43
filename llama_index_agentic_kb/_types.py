"""Names of types, and a base class, that many modules use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Coroutine, Mapping
from typing import Any, Self, TypeAlias, TypeVar

T = TypeVar("T")

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, a node's metadata, or arguments by name."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""The same, read only."""
Work: TypeAlias = Coroutine[Any, Any, T]
"""A coroutine that returns a ``T``."""


class Closing:
    """A context manager that closes itself at the end of the block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release files, connections and processes; called at the end of a ``with`` block."""
