"""Manages a server's API keys by its configuration file, of which only the database is read; loads no LlamaIndex."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.server.catalog import Catalog, Role

DEFAULT_DATABASE: Final = "agentic-kb-server.db"
ENVIRONMENT: Final = "env:"


def read_file(path: Path) -> Mapping[str, Any]:
    """Return the data of a configuration file.

    Raises:
        ConfigurationError: The file can't be read, or is no YAML mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigurationError(f"{path}: a mapping is expected, such as stores: [...]")
    return data


def resolved(value: object) -> object:
    """Return a setting; ``env:NAME`` is replaced by the environment variable.

    Raises:
        ConfigurationError: The variable is not set.
    """
    if not isinstance(value, str) or not value.startswith(ENVIRONMENT):
        return value
    name = value.removeprefix(ENVIRONMENT)
    if not os.environ.get(name):
        raise ConfigurationError(f"the environment variable {name} is not set")
    return os.environ[name]


def located(path: Path, database: str) -> str:
    """Return a database's URL, or its path, which is relative to the folder of the configuration file."""
    return database if "://" in database else str(path.absolute().parent / database)


def manage_keys(path: Path, *, new: str | None, name: str, revoke: str | None) -> list[str]:
    """Create or revoke an API key, and return the lines to print: the new key, or the list of keys.

    Raises:
        ConfigurationError: The role is not known.
        NotFoundError: There is no key to revoke.
    """
    database = resolved(read_file(path).get("database", DEFAULT_DATABASE))
    catalog = Catalog(located(path, str(database)))

    async def managed() -> list[str]:
        if new is not None:
            roles: dict[str, Role] = {"admin": "admin", "query": "query"}
            if new not in roles:
                raise ConfigurationError(f"--new: {new!r} is no role; it is admin or query")
            made, secret = await catalog.add_key(roles[new], name)
            return [f"id {made.id}", f"key {secret}"]
        if revoke is not None:
            await catalog.remove_key(revoke)
        keys = (await catalog.snapshot()).keys.values()
        return [f"{key.id} {key.role} {key.created_at:%Y-%m-%d} {key.name}" for key in keys]

    try:
        return asyncio.run(managed())
    finally:
        catalog.close()
