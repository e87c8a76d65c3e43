"""Definitions of knowledge bases and sources, as clients send them, and API keys, in the database of the sessions.

Several servers may share one database. Each reads the catalog anew when its copy is older than ``MAX_AGE``, and at once
when a name or a key is not in its copy; so a change made on one server holds on all after at most ``MAX_AGE`` seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel, to_snake
from sqlalchemy import Connection, Row, delete, insert, select, update

from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import ConfigurationError, NotFoundError
from llama_index_agentic_kb.schema import OutputMode, ResultsProcessing
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.request import MAX_DOCUMENTS, MAX_SECONDS, MAX_TOKENS, Documents, EffortField
from llama_index_agentic_kb.server.errors import ConflictError, PreconditionError
from llama_index_agentic_kb.store.sql import SESSIONS, SqlDatabase, api_keys, definitions

T = TypeVar("T")
MAX_TAGS: Final = 10
_OF_OTHERS: Final = "wrap the service as a LlamaIndex retriever, and pass create_app a KnowledgeBase over it"
_INSTEAD: Final = {
    "web": f"this server searches no web: {_OF_OTHERS}",
    "mcpServer": "pass create_app a KnowledgeBase with a ToolSource over the server's tools",
    **dict.fromkeys(("remoteSharePoint", "workIQ", "fabricDataAgent", "fabricOntology"), _OF_OTHERS),
}
"""Azure's kinds of sources that are not served, and what to use."""
_PARTS: Final = ("folderPath", "targetPath", "query")  # fields that narrow what Azure's services would ingest
_UNUSED: Final = ("enableImageServing", "enableFreshness", "resourceUri", "authIdentity", "maxAgeInSeconds")
_INDEX: Final = {"azureBlob": "container_name", "indexedOneLake": "lakehouse_id", "indexedSql": "table_or_view"}
"""By kind: the parameter that names the index. That of other kinds has the source's own name."""

Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$")]
"""A name that needs no escaping in a URL. Azure's names are a part of these."""


class _Definition(Model):
    """The definition of a source or knowledge base: null fields count as absent, ``@odata.*`` fields are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        if data.get("encryptionKey"):
            raise ValueError("encryptionKey: this server encrypts no definitions; leave it out")
        given = {
            key: value for key, value in data.items() if value is not None and key not in ("encryptionKey", "warnings")
        }
        return {key: value for key, value in given.items() if not str(key).startswith("@odata.")}


class SourceName(_Definition):
    """A knowledge base's reference to one of its sources."""

    name: Name
    enable_image_serving: bool | None = None
    enable_freshness: bool | None = None


class ModelParameters(_Definition):
    """The parameters of a model in Azure's form. ``deploymentId`` names a model of the server's configuration."""

    deployment_id: str | None = None
    model_name: str | None = None
    resource_uri: str | None = None
    auth_identity: JsonObject | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_secret(cls, data: object) -> object:
        if isinstance(data, Mapping) and data.get("apiKey"):
            raise ValueError(
                "apiKey: the server stores no secrets; configure the model on the server (models:, apiKey: env:NAME), "
                "name it in deploymentId, and leave apiKey out"
            )
        return {key: value for key, value in data.items() if key != "apiKey"} if isinstance(data, Mapping) else data


class ModelReference(_Definition):
    """A language model of a knowledge base."""

    kind: Literal["azureOpenAI"] = "azureOpenAI"
    azure_open_ai_parameters: ModelParameters = Field(alias="azureOpenAIParameters")

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, data: object) -> object:
        return {"azureOpenAIParameters": {"deploymentId": data}} if isinstance(data, str) else data


class RetrieveDefaults(_Definition):
    """The values of a request's fields that the request omits."""

    max_runtime_in_seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = None
    max_output_documents: Documents | None = None
    max_output_size_in_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None


class CorsOptions(_Definition):
    """The web pages' origins that may call a knowledge base."""

    allowed_origins: list[str]
    max_age_in_seconds: int | None = Field(default=None, ge=0)


class KnowledgeBaseDefinition(_Definition):
    """A knowledge base: its sources, model and defaults."""

    name: Name
    knowledge_sources: list[SourceName] = Field(min_length=1)
    models: list[ModelReference] = Field(default_factory=list, max_length=1)
    retrieval_reasoning_effort: EffortField | None = None
    output_mode: OutputMode | None = None
    retrieval_instructions: str | None = None
    answer_instructions: str | None = None
    description: str | None = None
    tags: Annotated[dict[str, str], Field(max_length=MAX_TAGS)] | None = None
    retrieve_defaults: RetrieveDefaults | None = None
    cors_options: CorsOptions | None = None

    @model_validator(mode="after")
    def _unique_sources(self) -> KnowledgeBaseDefinition:
        if len({source.name for source in self.knowledge_sources}) < len(self.knowledge_sources):
            raise ValueError("knowledgeSources: a source is named twice")
        return self

    def warnings(self) -> list[str]:
        """Return a sentence about each part that is stored without effect."""
        parts: list[tuple[str, _Definition]] = [(f"knowledgeSources.{one.name}", one) for one in self.knowledge_sources]
        parts += [("models.azureOpenAIParameters", one.azure_open_ai_parameters) for one in self.models]
        parts += [("corsOptions", self.cors_options)] if self.cors_options else []
        asked = [f"{path}.{name}" for path, part in parts for name in _UNUSED if part.to_dict().get(name)]
        return [f"{name}: it has no effect on this server" for name in asked]


class SearchIndexParameters(_Definition):
    """The index of a source. Parameters of Azure's indexes are stored; those without a counterpart have no effect."""

    search_index_name: str = Field(min_length=1, max_length=MAX_DOCUMENTS)
    base_filter: str | None = None
    source_data_fields: list[JsonObject] | None = None
    search_fields: list[JsonObject] | None = None
    semantic_configuration_name: str | None = None
    query_hints: JsonObject | None = None


_SECRETS: Final = ("key", "secret", "password", "token", "signature")  # how names of fields end that hold secrets


def _secret(data: object) -> str | None:
    """Return the name of a field, at any depth, that holds a key, or more than a resource's id to connect by."""
    if isinstance(data, list):
        return next(filter(None, map(_secret, data)), None)
    for name, value in data.items() if isinstance(data, Mapping) else ():
        plain = re.sub("[^a-z]", "", str(name).lower())
        connects = plain == "connectionstring" and not re.fullmatch(r"ResourceId=[^;=]*;?", str(value or "ResourceId="))
        if connects or (plain.endswith(_SECRETS) and value):
            return str(name)
        if inner := _secret(value):
            return inner
    return None


def _sent(data: object, name: str) -> object:
    """Return the value of a field that is given in camel or snake case; None if there is none."""
    fields = data.items() if isinstance(data, Mapping) else ()
    return next((value for key, value in fields if to_camel(str(key)) == name and value), None)


class IndexedParameters(_Definition):
    """What a service of Azure would ingest; here an index of the server has it."""

    model_config = ConfigDict(extra="allow")

    container_name: str | None = None
    lakehouse_id: str | None = None
    table_or_view: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _whole_and_without_secret(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        if name := _secret(data):
            raise ValueError(f"{name}: the server stores no secrets and reads no storage; leave it out")
        if _sent(_sent(data, "ingestionParameters"), "ingestionPermissionOptions"):
            raise ValueError(
                "ingestionPermissionOptions: declare permissions on the server (stores.permissions); leave it out"
            )
        if part := next((name for name in _PARTS if _sent(data, name)), None):
            raise ValueError(f"{part}: this server would search everything; ingest that part under a name of its own")
        return {key: value for key, value in data.items() if key != "createdResources"}


class SourceDefinition(_Definition):
    """A knowledge source over an index of the server."""

    name: Name
    kind: Literal["searchIndex", "azureBlob", "file", "indexedOneLake", "indexedSharePoint", "indexedSql"]
    description: str | None = None
    results_processing: ResultsProcessing | None = None
    search_index_parameters: SearchIndexParameters | None = None
    azure_blob_parameters: IndexedParameters | None = None
    file_parameters: IndexedParameters | None = None
    indexed_one_lake_parameters: IndexedParameters | None = None
    indexed_share_point_parameters: IndexedParameters | None = None
    indexed_sql_parameters: IndexedParameters | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_kind(cls, data: object) -> object:
        kind = data.get("kind") if isinstance(data, Mapping) else None
        if isinstance(kind, str) and (instead := _INSTEAD.get(kind)):
            raise ValueError(f"kind: {kind!r} is not served; {instead}")
        return data

    @model_validator(mode="after")
    def _of_its_kind(self) -> SourceDefinition:
        given = [name for name in type(self).model_fields if name.endswith("_parameters") and getattr(self, name)]
        own = f"{to_snake(self.kind)}_parameters"
        if given != [own] and (given or self.kind != "file"):
            raise ValueError(f"{to_camel(own)}: kind {self.kind!r} needs these parameters, and no others")
        return self

    @property
    def _parameters(self) -> SearchIndexParameters | IndexedParameters:
        found = getattr(self, f"{to_snake(self.kind)}_parameters")
        return IndexedParameters() if found is None else found

    @property
    def index_name(self) -> str:
        """The name of the index that is searched: by kind the container, lakehouse or table, or the source's own."""
        asked = self._parameters
        if isinstance(asked, SearchIndexParameters):
            return asked.search_index_name
        return (getattr(asked, _INDEX[self.kind]) if self.kind in _INDEX else None) or self.name

    @property
    def base_filter(self) -> str | None:
        """The filter on every search, in OData."""
        return getattr(self.search_index_parameters, "base_filter", None)

    def warnings(self) -> list[str]:
        """Return a sentence about each part that is stored without effect."""
        stored, own = self._parameters.to_dict(), to_camel(f"{to_snake(self.kind)}_parameters")
        used = {"searchIndexName", "baseFilter", to_camel(_INDEX.get(self.kind, "search_index_name"))}
        return [f"{own}.{name}: it has no effect on this server" for name in stored if name not in used]


Definition: TypeAlias = KnowledgeBaseDefinition | SourceDefinition


# -- the stored definitions and keys -----------------------------------------------------------------------------------

Kind: TypeAlias = Literal["knowledgeBase", "knowledgeSource"]
Role: TypeAlias = Literal["admin", "query"]

DEFAULT_DATABASE: Final = "agentic-kb-server.db"
ENVIRONMENT: Final = "env:"
MAX_AGE: Final = 1.0  # age in seconds after which a server reads the catalog anew
_SECONDS: Final = 10.0  # time limit of each operation
_WORDS: Final = {"knowledgeBase": "knowledge base", "knowledgeSource": "knowledge source"}
MODELS: Final[Mapping[str, type[KnowledgeBaseDefinition | SourceDefinition]]] = {
    "knowledgeBase": KnowledgeBaseDefinition,
    "knowledgeSource": SourceDefinition,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored definition and its ETag."""

    definition: Definition
    etag: str

    def to_dict(self) -> JsonObject:
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

    definitions: Mapping[str, Mapping[str, Stored]]  # by kind and name
    keys: Mapping[str, ApiKey]
    read_at: float


def _check(headers: Mapping[str, str], etag: str | None) -> None:
    """Raise ``PreconditionError`` if the stored ETag (None: nothing is stored) does not meet a change's conditions."""
    stored = set() if etag is None else {"*", etag.strip('"')}
    sent = {
        name: {part.strip().removeprefix("W/").strip('"') for part in headers[name].split(",")}
        for name in ("if-match", "if-none-match")
        if name in headers
    }
    if "if-match" in sent and not stored & sent["if-match"]:
        raise PreconditionError("If-Match: the definition was changed or deleted meanwhile; get it again")
    if "if-none-match" in sent and stored & sent["if-none-match"]:
        raise PreconditionError("If-None-Match: the definition exists already")


def hash_of(key: str) -> str:
    """Return the hash under which an API key is stored; it has no salt, as keys have 256 random bits."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


class Catalog:
    """Reads and changes the catalog in the database of the sessions: a path (SQLite) or a URL; see ``SessionStore``."""

    def __init__(self, url: str | Path) -> None:
        self._database = SqlDatabase(url, SESSIONS, timeout=_SECONDS)
        self.copy: Snapshot | None = None
        """The catalog as it was read last; None before the first reading, and after a change."""
        self._reading = asyncio.Lock()
        self._parsed: dict[tuple[str, str], Stored | None] = {}  # by kind and ETag; None: refused

    def close(self) -> None:
        """Close idle connections."""
        self._database.close()

    async def snapshot(self, *, since: float | None = None) -> Snapshot:
        """Return the catalog, read anew if the copy is older than ``MAX_AGE``, or was read before ``since``."""
        oldest = time.monotonic() - MAX_AGE if since is None else since
        if self.copy is not None and self.copy.read_at >= oldest:
            return self.copy
        async with self._reading:
            if self.copy is None or self.copy.read_at < oldest:
                self.copy = await self._do("reading the catalog", self._read, write=False)
            return self.copy

    async def find(self, kind: Kind, name: str) -> Stored:
        """Return a definition; raise ``NotFoundError`` if there is none of this name."""
        asked = time.monotonic()
        found = (await self.snapshot()).definitions[kind].get(name)
        found = found or (await self.snapshot(since=asked)).definitions[kind].get(name)
        if found is None:
            raise NotFoundError(f"{_WORDS[kind]}: there is none of the name {name[:128]!r}")
        return found

    async def put(
        self, kind: Kind, definition: Definition, headers: Mapping[str, str] = {}, *, create: bool = False
    ) -> tuple[Stored, bool]:
        """Store a definition, and return it with whether it is new. An equal definition keeps its ETag.

        Raises:
            ConflictError: ``create`` is set, and there is a definition of this name.
            PreconditionError: The stored definition does not meet ``If-Match`` or ``If-None-Match`` of the headers.
        """
        text = json.dumps(definition.to_dict(), separators=(",", ":"))
        etag = f'"{uuid.uuid4().hex}"'
        here = (definitions.c.kind == kind, definitions.c.name == definition.name)

        def work(connection: Connection) -> tuple[str, bool]:
            row = connection.execute(select(definitions).where(*here).with_for_update()).one_or_none()
            if row is not None and row.etag == etag:  # an earlier try has stored it
                return etag, create
            if row is not None and create:
                raise ConflictError(f"{_WORDS[kind]}: there is one of the name {definition.name!r} already")
            _check(headers, None if row is None else row.etag)
            if row is not None and row.definition == text:
                return str(row.etag), False
            values = {"etag": etag, "definition": text, "updated_at": datetime.now(UTC)}
            if row is None:
                connection.execute(insert(definitions).values(kind=kind, name=definition.name, **values))
            else:
                connection.execute(update(definitions).where(*here).values(**values))
            return etag, row is None

        kept, is_new = await self._do(f"storing a {_WORDS[kind]}", work)
        return Stored(definition, kept), is_new

    async def remove(self, kind: Kind, name: str, headers: Mapping[str, str] = {}) -> None:
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
                _check(headers, row.etag)
            if kind == "knowledgeSource":
                bases = connection.execute(select(definitions).where(definitions.c.kind == "knowledgeBase"))
                used = {base.name: json.loads(base.definition).get("knowledgeSources", []) for base in bases}
                if users := sorted(base for base, sources in used.items() if name in [one["name"] for one in sources]):
                    raise ConflictError(f"knowledge source: {', '.join(users)} uses it; change or delete that first")
            connection.execute(delete(definitions).where(*here))

        await self._do(f"deleting a {_WORDS[kind]}", work)

    async def add_key(self, role: Role, name: str) -> tuple[ApiKey, str]:
        """Make an API key, and return its description and the key itself, of which only the hash is stored.

        The role "admin" may change definitions and keys, "query" may only ask; the name is for lists and logs.
        """
        secret = secrets.token_urlsafe(32)
        made = ApiKey(uuid.uuid4().hex, name, role, datetime.now(UTC))
        values = {"id": made.id, "name": name, "role": role, "created_at": made.created_at}

        def work(connection: Connection) -> None:
            connection.execute(delete(api_keys).where(api_keys.c.id == made.id))  # that an earlier try has stored
            connection.execute(insert(api_keys).values(hash=hash_of(secret), **values))

        await self._do("storing an API key", work)
        return made, secret

    async def remove_key(self, key_id: str) -> None:
        """Revoke an API key, which is refused after at most ``MAX_AGE`` seconds."""
        if all(key.id != key_id for key in (await self.snapshot(since=time.monotonic())).keys.values()):
            raise NotFoundError(f"API key: there is none of the id {key_id[:64]!r}")
        revoke = delete(api_keys).where(api_keys.c.id == key_id)
        await self._do("revoking an API key", lambda connection: connection.execute(revoke))

    def _read(self, connection: Connection) -> Snapshot:
        read_at = time.monotonic()
        found: dict[str, dict[str, Stored]] = {kind: {} for kind in MODELS}
        parsed: dict[tuple[str, str], Stored | None] = {}
        for row in connection.execute(select(definitions).order_by(definitions.c.name)):
            version = row.kind, row.etag
            stored = self._parsed[version] if version in self._parsed else _parsed(row)
            parsed[version] = stored
            if stored is not None:
                found[row.kind][row.name] = stored
        self._parsed = parsed
        keys = {
            row.hash: ApiKey(row.id, row.name, row.role, row.created_at)
            for row in connection.execute(select(api_keys).order_by(api_keys.c.created_at))
        }
        return Snapshot(found, keys, read_at)

    async def _do(self, what: str, work: Callable[[Connection], T], *, write: bool = True) -> T:
        result = await self._database.atransact(work, write=write, what=what)
        if write:
            self.copy = None
        return result


def _parsed(row: Row[tuple[str, ...]]) -> Stored | None:
    """Return a stored definition; one that this version would refuse is logged, and must not stop all others."""
    try:
        return Stored(MODELS[row.kind].model_validate(json.loads(row.definition)), row.etag)
    except ValueError:  # its text may hold a secret
        from llama_index_agentic_kb.account.logs import logger  # noqa: PLC0415 (loads LlamaIndex)

        text = "the stored %s %r is left out: this version refuses it; store it anew"
        logger.error(text, row.kind, row.name)
        return None


# -- the database that a configuration file names, and its keys: whoever manages them need not load all of the server --


def read_file(path: Path) -> JsonMapping:
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


Setting: TypeAlias = Annotated[str, BeforeValidator(resolved)]


def located(path: Path, database: str) -> str:
    """Return a database's URL, or its path, which is relative to the folder of the configuration file."""
    return database if "://" in database else str(path.absolute().parent / database)


def manage_keys(path: Path, *, new: str | None, name: str, revoke: str | None) -> list[str]:
    """Create or revoke an API key, and return the lines to print: the new key, or the list of keys."""
    if new not in (None, "admin", "query"):
        raise ConfigurationError(f"--new: {new!r} is no role; it is admin or query")
    database = resolved(read_file(path).get("database", DEFAULT_DATABASE))
    catalog = Catalog(located(path, str(database)))

    async def managed() -> list[str]:
        if new is not None:
            made, secret = await catalog.add_key("admin" if new == "admin" else "query", name)
            return [f"id {made.id}", f"key {secret}"]
        if revoke is not None:
            await catalog.remove_key(revoke)
        keys = (await catalog.snapshot()).keys.values()
        return [f"{key.id} {key.role} {key.created_at:%Y-%m-%d} {key.name}" for key in keys]

    try:
        return asyncio.run(managed())
    finally:
        catalog.close()
