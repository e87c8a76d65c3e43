"""Names of types that many modules use."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, a node's metadata, or arguments by name."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""The same, read only."""
Work: TypeAlias = Coroutine[Any, Any, T]
"""A coroutine that returns a ``T``."""
