"""The catalog: definitions of knowledge bases and sources, and API keys, in the database of the sessions.

Several servers may share one database. Each reads the catalog anew when its copy is older than ``MAX_AGE``, and at once
when a name or a key is not in its copy; so a change made on one server holds on all after at most ``MAX_AGE`` seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import yaml
from sqlalchemy import Connection, Row, delete, insert, select, update

from llama_index_agentic_kb._aio import Call, WorkerPool
from llama_index_agentic_kb.errors import ConfigurationError, NotFoundError
from llama_index_agentic_kb.server.definitions import Definition, KnowledgeBaseDefinition, SourceDefinition
from llama_index_agentic_kb.server.errors import ConflictError, PreconditionError
from llama_index_agentic_kb.store.session_database import SESSIONS, api_keys, definitions, microseconds
from llama_index_agentic_kb.store.sql import SqlDatabase

T = TypeVar("T")
Kind: TypeAlias = Literal["knowledgeBase", "knowledgeSource"]
Role: TypeAlias = Literal["admin", "query"]

DEFAULT_DATABASE: Final = "agentic-kb-server.db"
ENVIRONMENT: Final = "env:"
MAX_AGE: Final = 1.0  # age in seconds after which a server reads the catalog anew
_SECONDS: Final = 10.0  # time limit of each operation
_MODELS: Final[Mapping[str, type[KnowledgeBaseDefinition | SourceDefinition]]] = {
    "knowledgeBase": KnowledgeBaseDefinition,
    "knowledgeSource": SourceDefinition,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored definition and its ETag."""

    definition: Definition
    etag: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form that clients get."""
        warnings = self.definition.warnings()
        shown = {"@odata.etag": self.etag, **self.definition.to_dict()}
        return {**shown, "warnings": warnings} if warnings else shown


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key, without its secret."""

    id: str
    name: str
    role: Role
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The catalog as it was at one moment. ``keys`` is by hash."""

    bases: Mapping[str, Stored]
    sources: Mapping[str, Stored]
    keys: Mapping[str, ApiKey]
    read_at: float

    def of(self, kind: Kind) -> Mapping[str, Stored]:
        """Return the definitions of a kind by name."""
        return self.bases if kind == "knowledgeBase" else self.sources


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a change: ``If-Match`` and ``If-None-Match``, as sent."""

    if_match: str | None = None
    if_none_match: str | None = None

    def check(self, etag: str | None) -> None:
        """Raise ``PreconditionError`` if the stored ETag (None: nothing is stored) does not meet the conditions."""
        if self.if_match is not None and (etag is None or not _lists(self.if_match, etag)):
            raise PreconditionError("If-Match: the definition was changed or deleted meanwhile; get it again")
        if self.if_none_match is not None and etag is not None and _lists(self.if_none_match, etag):
            raise PreconditionError("If-None-Match: the definition exists already")


ANY: Final = Conditions()  # no conditions


def _lists(header: str, etag: str) -> bool:
    sent = [part.strip().removeprefix("W/").strip('"') for part in header.split(",")]
    return "*" in sent or etag.strip('"') in sent


def hash_of(key: str) -> str:
    """Return the hash under which an API key is stored. A key has 256 random bits, so that no salt is needed."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


class Catalog:
    """Reads and changes the catalog in the database of the sessions: a path (SQLite) or a URL; see ``SessionStore``."""

    def __init__(self, url: str | Path) -> None:
        self._database = SqlDatabase(url, SESSIONS, timeout=_SECONDS)
        self._pool = WorkerPool("catalog", 4)
        self._snapshot: Snapshot | None = None
        self._reading = asyncio.Lock()
        self._parsed: dict[tuple[str, str], Stored] = {}
        self._refused: set[str] = set()

    @property
    def copy(self) -> Snapshot | None:
        """The catalog as it was read last; None before the first reading, and after a change."""
        return self._snapshot

    def close(self) -> None:
        """Close idle connections."""
        self._database.close()

    async def snapshot(self, *, since: float | None = None) -> Snapshot:
        """Return the catalog, read anew if the copy is older than ``MAX_AGE``, or was read before ``since``."""
        oldest = time.monotonic() - MAX_AGE if since is None else since
        if self._snapshot is not None and self._snapshot.read_at >= oldest:
            return self._snapshot
        async with self._reading:
            if self._snapshot is None or self._snapshot.read_at < oldest:
                self._snapshot = await self._do("reading the catalog", self._read, write=False)
            return self._snapshot

    async def find(self, kind: Kind, name: str) -> Stored:
        """Return a definition; raise ``NotFoundError`` if there is none of this name."""
        asked = time.monotonic()
        found = (await self.snapshot()).of(kind).get(name) or (await self.snapshot(since=asked)).of(kind).get(name)
        if found is None:
            raise NotFoundError(f"{_WORDS[kind]}: there is none of the name {name[:128]!r}")
        return found

    async def put(
        self, kind: Kind, definition: Definition, conditions: Conditions = ANY, *, create: bool = False
    ) -> tuple[Stored, bool]:
        """Store a definition, and return it with whether it is new. An equal definition keeps its ETag.

        Raises:
            ConflictError: ``create`` is set, and there is a definition of this name.
            PreconditionError: The stored definition does not meet the conditions.
        """
        text = json.dumps(definition.to_dict(), separators=(",", ":"))
        etag = f'"{uuid.uuid4().hex}"'
        now = microseconds(datetime.now(UTC))
        here = (definitions.c.kind == kind, definitions.c.name == definition.name)

        def work(connection: Connection) -> tuple[str, bool]:
            row = connection.execute(select(definitions).where(*here).with_for_update()).one_or_none()
            if row is not None and row.etag == etag:  # an earlier try has stored it
                return etag, create
            if row is not None and create:
                raise ConflictError(f"{_WORDS[kind]}: there is one of the name {definition.name!r} already")
            conditions.check(None if row is None else row.etag)
            if row is not None and row.definition == text:
                return str(row.etag), False
            values = {"etag": etag, "definition": text, "updated_at": now}
            if row is None:
                connection.execute(insert(definitions).values(kind=kind, name=definition.name, **values))
            else:
                connection.execute(update(definitions).where(*here).values(**values))
            return etag, row is None

        kept, is_new = await self._change(f"storing a {_WORDS[kind]}", work)
        return Stored(definition, kept), is_new

    async def remove(self, kind: Kind, name: str, conditions: Conditions = ANY) -> None:
        """Delete a definition; raise as ``put`` does, or ``ConflictError`` if a knowledge base uses the source."""
        here = (definitions.c.kind == kind, definitions.c.name == name)
        tried = False

        def work(connection: Connection) -> None:
            nonlocal tried
            row = connection.execute(select(definitions).where(*here).with_for_update()).one_or_none()
            if row is None and not tried:  # on a retry it may be deleted already
                raise NotFoundError(f"{_WORDS[kind]}: there is none of the name {name[:128]!r}")
            tried = True
            if row is not None:
                conditions.check(row.etag)
            users = _users(connection, name) if kind == "knowledgeSource" else []
            if users:
                raise ConflictError(f"knowledge source: {', '.join(users)} uses it; change or delete that first")
            connection.execute(delete(definitions).where(*here))

        await self._change(f"deleting a {_WORDS[kind]}", work)

    async def add_key(self, role: Role, name: str) -> tuple[ApiKey, str]:
        """Make an API key, and return its description and the key itself, of which only the hash is stored.

        The role "admin" may change definitions and keys, "query" may only ask; the name is for lists and logs.
        """
        secret = secrets.token_urlsafe(32)
        made = ApiKey(uuid.uuid4().hex, name, role, datetime.now(UTC))
        values = {"id": made.id, "name": name, "role": role, "created_at": microseconds(made.created_at)}

        def work(connection: Connection) -> None:
            if connection.execute(select(api_keys.c.id).where(api_keys.c.id == made.id)).one_or_none() is None:
                connection.execute(delete(api_keys).where(api_keys.c.hash == hash_of(secret)))
                connection.execute(insert(api_keys).values(hash=hash_of(secret), **values))

        await self._change("storing an API key", work)
        return made, secret

    async def remove_key(self, key_id: str) -> None:
        """Revoke an API key, which is refused after at most ``MAX_AGE`` seconds."""
        if all(key.id != key_id for key in (await self.snapshot(since=time.monotonic())).keys.values()):
            raise NotFoundError(f"API key: there is none of the id {key_id[:64]!r}")
        await self._change(
            "revoking an API key", lambda one: one.execute(delete(api_keys).where(api_keys.c.id == key_id))
        )

    def _read(self, connection: Connection) -> Snapshot:
        read_at = time.monotonic()
        found: dict[str, dict[str, Stored]] = {kind: {} for kind in _MODELS}
        parsed: dict[tuple[str, str], Stored] = {}
        for row in connection.execute(select(definitions).order_by(definitions.c.name)):
            stored = self._parsed.get((row.kind, row.etag)) or self._stored(row)
            if stored is not None:
                parsed[row.kind, row.etag] = found[row.kind][row.name] = stored
        self._parsed = parsed
        keys = {
            row.hash: ApiKey(row.id, row.name, row.role, datetime.fromtimestamp(row.created_at / 1e6, UTC))
            for row in connection.execute(select(api_keys).order_by(api_keys.c.created_at))
        }
        return Snapshot(found["knowledgeBase"], found["knowledgeSource"], keys, read_at)

    def _stored(self, row: Row[Any]) -> Stored | None:
        """Return the definition of a row; None if this version would refuse it, which must not stop all others."""
        try:
            return Stored(_MODELS[row.kind].model_validate(json.loads(row.definition)), row.etag)
        except ValueError:  # its text may hold a secret
            from llama_index_agentic_kb.account.logs import logger  # noqa: PLC0415 (loads LlamaIndex)

            if row.etag not in self._refused:
                logger.error("the stored %s %r is left out: this version refuses it; store it anew", row.kind, row.name)
            self._refused.add(row.etag)
            return None

    async def _change(self, what: str, work: Callable[[Connection], T]) -> T:
        result = await self._do(what, work, write=True)
        self._snapshot = None
        return result

    async def _do(self, what: str, work: Callable[[Connection], T], *, write: bool) -> T:
        until = time.monotonic() + _SECONDS
        transact = partial(self._database.transact, work, write=write, deadline=until, what=what)
        return await Call(sync=transact, deadline=until, pool=self._pool, what=what)


_WORDS: Final = {"knowledgeBase": "knowledge base", "knowledgeSource": "knowledge source"}


def _users(connection: Connection, source: str) -> list[str]:
    """Return the names of the knowledge bases that use a source."""
    rows = connection.execute(select(definitions).where(definitions.c.kind == "knowledgeBase"))
    return sorted(
        row.name
        for row in rows
        if source in [used["name"] for used in json.loads(row.definition).get("knowledgeSources", [])]
    )


# -- the database that a configuration file names, and its keys: whoever manages them need not load all of the server --


def read_file(path: Path) -> Mapping[str, Any]:
    """Return the data of a configuration file; raise ``ConfigurationError`` if it is no YAML mapping."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigurationError(f"{path}: a mapping is expected, such as stores: [...]")
    return data


def resolved(value: object) -> object:
    """Return a setting; ``env:NAME`` is replaced by the environment variable, which must be set."""
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
    """Create or revoke an API key, and return the lines to print: the new key, or the list of keys."""
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
