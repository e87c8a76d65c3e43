"""Who asks: the caller on whose behalf a request is made."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError

__all__ = ["MAX_GROUPS", "MAX_NAME", "Principal"]

MAX_NAME: Final = 256
"""Characters of a tenant's, a user's or a group's name."""

MAX_GROUPS: Final = 10_000
"""Groups of one principal."""

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of characters that nobody sees: two names must not differ in these alone."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. Immutable and hashable; names are compared exactly, letter case included.

    A principal is made by the program that has authenticated its caller, never out of what the caller sends.

        alice = Principal(tenant="acme", user="alice", groups=["engineering", "managers"])

    Args:
        tenant: The organisation; None where there is only one.
        user: The person or service.
        groups: What it belongs to, in any order; kept as a frozenset.

    Raises:
        ConfigurationError: A name is empty, has hidden or control characters, or is too long; there are too many
            groups; or nothing is set.
    """

    tenant: str | None = None
    user: str | None = None
    groups: Iterable[str] = field(default=frozenset())

    def __post_init__(self) -> None:
        """Check every name, and keep the groups as a frozenset."""
        if isinstance(self.groups, (str, bytes)):
            raise ConfigurationError("Principal.groups: expected several names, got one text; put it into a list")
        groups = frozenset(self.groups)
        if len(groups) > MAX_GROUPS:
            raise ConfigurationError(f"Principal.groups: {len(groups)} groups are too many; at most {MAX_GROUPS}")
        object.__setattr__(self, "groups", groups)
        for name, value in (("tenant", self.tenant), ("user", self.user), *(("groups", group) for group in groups)):
            if value is not None:
                _check_name(name, value)
        if self.tenant is None and self.user is None and not groups:
            raise ConfigurationError("Principal: give a tenant, a user or groups; one who is nobody may see nothing")


def _check_name(field_name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigurationError(f"Principal.{field_name}: expected text, got {type(value).__name__}")
    if not value.strip():
        raise ConfigurationError(f"Principal.{field_name}: a name must not be empty")
    if len(value) > MAX_NAME:
        raise ConfigurationError(f"Principal.{field_name}: a name of {len(value)} characters; at most {MAX_NAME}")
    if any(unicodedata.category(character) in _HIDDEN for character in value):
        raise ConfigurationError(f"Principal.{field_name}: a name has control or hidden characters: {value!r}")
