"""Access permissions and links of ingested files, set by the caller of `ingest` and never by the files themselves."""

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
"""The default metadata fields for document permissions, used unless `ingest` is given others."""


class Grants(TypedDict, total=False):
    """The tenant, owner, users and groups that may see a document, or whether it is public."""

    tenant: str
    owner: str
    users: Sequence[str]
    groups: Sequence[str]
    public: bool


Stamp: TypeAlias = Grants | Callable[[Path], Grants] | None
"""The grants for all files of an ingestion, or a function from a file's path to its grants."""


@dataclass(frozen=True)
class Access:
    """The metadata fields that ingested files may not set, and the grants that are written instead."""

    permissions: Permissions | None = None
    """The fields that grants are written to. Files can set neither these nor those of `STORE_PERMISSIONS`."""
    grants: Stamp = None
    trust_urls: bool = False
    """Whether the ``url`` in a file's metadata is used as its link."""

    def without(self, metadata: Mapping[str, MetadataValue]) -> dict[str, MetadataValue]:
        """Return a file's metadata without the permission fields."""

        def protected(key: str) -> bool:
            return any(one.declares(name) for one in _both(self.permissions) for name in (key, key.casefold()))

        return {key: value for key, value in metadata.items() if not protected(key)}

    def stamp(self, path: Path, metadata: Mapping[str, MetadataValue]) -> dict[str, MetadataValue]:
        """Return a file's permission fields and, if trusted, link; raise ``ConfigurationError`` for a wrong grant."""
        grants = self.grants(path) if callable(self.grants) else self.grants
        permissions = self.permissions or STORE_PERMISSIONS
        if self.permissions is None and "tenant" not in (grants or {}):
            permissions = replace(permissions, tenant=None)
        url = next((str(value) for key, value in metadata.items() if key.casefold() == "url"), "")
        stamped = {} if grants is None else permissions.stamp({}, **grants)
        return {**stamped, "url": url} if self.trust_urls and url else stamped

    def settings(self, path: Path) -> str:
        """Return the access settings recorded with a document; a change causes it to be ingested again."""
        stamped = json.dumps(self.stamp(path, {}), sort_keys=True)
        digest = hashlib.sha256(stamped.encode()).hexdigest()[:16]
        return f"urls={self.trust_urls:d} stamp={digest} protects={','.join(sorted(_names(self.permissions)))}"


def unprotected(permissions: Permissions, settings: Iterable[str]) -> list[str]:
    """Return the permission fields that documents may have set themselves, according to their recorded settings."""
    recorded = [set(one.rpartition("protects=")[2].split(",")) if "protects=" in one else set() for one in settings]
    return sorted(name for name in _names(permissions) if not all(name in protected for protected in recorded))


def _names(permissions: Permissions | None) -> set[str]:
    """Return the names of all permission fields that files can't set."""
    return {name for one in _both(permissions) for role in fields(one) if (name := getattr(one, role.name)) is not None}


def _both(permissions: Permissions | None) -> list[Permissions]:
    return [STORE_PERMISSIONS] if permissions is None else [STORE_PERMISSIONS, permissions]
