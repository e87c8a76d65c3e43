"""Who may see an ingested file, and where its link leads: said by who ingests it, never by the file itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final, TypeAlias, TypedDict

from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.store.database import MetadataValue

STORE_PERMISSIONS: Final = Permissions(
    tenant="tenant", owner="owner", users="acl_user_", groups="acl_group_", public="acl_public"
)
"""The metadata fields that say who may see a document of a store, unless `ingest` names others."""


class Grants(TypedDict, total=False):
    """Who may see a document."""

    tenant: str
    owner: str
    users: Sequence[str]
    groups: Sequence[str]
    public: bool


Stamp: TypeAlias = Grants | Callable[[Path], Grants] | None
"""Who may see all files of an ingestion, or each one by its path."""


@dataclass(frozen=True)
class Access:
    """What the files of an ingestion may not say of themselves, and what is said of them instead."""

    permissions: Permissions | None = None
    """The fields that are stamped, beside those of `STORE_PERMISSIONS` protected from the files."""
    grants: Stamp = None
    trust_urls: bool = False
    """Whether a file's own ``url`` is its link."""

    def without(self, metadata: Mapping[str, MetadataValue]) -> dict[str, MetadataValue]:
        """Return what a file says of itself, without what says who may see it."""

        def protected(key: str) -> bool:
            return any(one.declares(name) for one in _both(self.permissions) for name in (key, key.casefold()))

        return {key: value for key, value in metadata.items() if not protected(key)}

    def stamp(self, path: Path, metadata: Mapping[str, MetadataValue]) -> dict[str, MetadataValue]:
        """Return what is said of a file: who may see it, and its link.

        Raises:
            ConfigurationError: It is granted by a field that the permissions don't declare, or to what can't be a name.
        """
        grants = self.grants(path) if callable(self.grants) else self.grants
        permissions = self.permissions or STORE_PERMISSIONS
        if self.permissions is None and "tenant" not in (grants or {}):
            permissions = replace(permissions, tenant=None)
        url = next((str(value) for key, value in metadata.items() if key.casefold() == "url"), "")
        stamped = {} if grants is None else permissions.stamp({}, **grants)
        return {**stamped, "url": url} if self.trust_urls and url else stamped

    def settings(self, path: Path) -> str:
        """Return what is recorded of a document: it is ingested again where this changes."""
        stamped = json.dumps(self.stamp(path, {}), sort_keys=True)
        digest = hashlib.sha256(stamped.encode()).hexdigest()[:16]
        return f"urls={self.trust_urls:d} stamp={digest} protects={','.join(sorted(_names(self.permissions)))}"


def unprotected(permissions: Permissions, settings: Iterable[str]) -> list[str]:
    """Return which fields of some permissions documents may have set themselves, by what was recorded of them."""
    recorded = [set(one.rpartition("protects=")[2].split(",")) if "protects=" in one else set() for one in settings]
    return sorted(name for name in _names(permissions) if not all(name in protected for protected in recorded))


def _names(permissions: Permissions | None) -> set[str]:
    """Return all names of fields that are kept from files."""
    return {name for one in _both(permissions) for role in fields(one) if (name := getattr(one, role.name)) is not None}


def _both(permissions: Permissions | None) -> list[Permissions]:
    return [STORE_PERMISSIONS] if permissions is None else [STORE_PERMISSIONS, permissions]
