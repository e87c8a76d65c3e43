"""The configuration file of ``agentic-kb serve``, the service made from it, its running, and its API keys.

    stores: [./store]                 # folders made by agentic-kb ingest; each of their sources is an index
    models:
      gpt-4o-mini: {apiKey: env:OPENAI_API_KEY}
    keys: {admin: [env:KB_ADMIN_KEY], query: [env:KB_QUERY_KEY]}
    knowledgeSources:
      - {name: docs, kind: searchIndex, searchIndexParameters: {searchIndexName: docs}}
    knowledgeBases:
      - {name: kb, knowledgeSources: [{name: docs}], models: [gpt-4o-mini]}

Secrets stand in environment variables: ``env:NAME`` is replaced by the variable's value when the server starts.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import uvicorn
from llama_index.core.llms import LLM
from pydantic import BeforeValidator, Field

from llama_index_agentic_kb._text import know_secrets
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.server.access import JwksVerifier
from llama_index_agentic_kb.server.app import MAX_BODY_BYTES, MAX_RUNNING, REQUESTS_PER_MINUTE, create_app
from llama_index_agentic_kb.server.catalog import (
    DEFAULT_DATABASE,
    ENVIRONMENT,
    ApiKey,
    Role,
    hash_of,
    located,
    read_file,
    resolved,
)
from llama_index_agentic_kb.server.definitions import KnowledgeBaseDefinition, SourceDefinition
from llama_index_agentic_kb.server.http import JsonFormatter
from llama_index_agentic_kb.server.quotas import Quotas
from llama_index_agentic_kb.server.service import Index, KnowledgeService
from llama_index_agentic_kb.sources import KnowledgeSource

MAX_STOPPING_SECONDS: Final = 120  # maximum seconds that running answers get to finish when the server stops
MIN_KEY: Final = 16  # minimum length of an API key: shorter ones can be guessed


def _secret(value: object) -> object:
    if isinstance(value, str) and not value.startswith(ENVIRONMENT):
        raise ValueError("a secret does not stand in the file: write env:NAME, and set the variable NAME")
    secret = resolved(value)
    know_secrets([str(secret)])
    return secret


Setting: TypeAlias = Annotated[str, BeforeValidator(resolved)]
Secret: TypeAlias = Annotated[str, BeforeValidator(_secret)]


class StoreSettings(Model):
    """A store of ``agentic-kb ingest``; its path alone is enough."""

    path: Setting  # a directory, relative to the folder of the file, or the URL of a PostgreSQL database
    permissions: dict[str, dict[str, str]] = Field(default_factory=dict)
    """By source: the fields of ``Permissions``. A source that is not named is open to every caller."""


class ModelSettings(Model):
    """A language model behind an OpenAI-compatible API."""

    api_key: Secret = ""
    api_base: Setting | None = None
    model: str | None = None  # model's name in the API; defaults to the name in the configuration
    context_window: int = Field(default=8_192, ge=512)


class KeySettings(Model):
    """API keys by role."""

    admin: list[Annotated[Secret, Field(min_length=MIN_KEY)]] = Field(default_factory=list)
    query: list[Annotated[Secret, Field(min_length=MIN_KEY)]] = Field(default_factory=list)


class TokenSettings(Model):
    """The arguments of ``JwksVerifier``."""

    issuer: Setting
    audience: Setting
    jwks: Setting
    tenant_claim: str = "tid"
    user_claims: list[str] = Field(default_factory=lambda: ["oid", "sub"])
    groups_claim: str = "groups"
    admin_role: str = "AgenticKB.Admin"
    query_role: str | None = None


class LimitSettings(Model):
    """The limits of a server."""

    requests_per_minute: int | None = Field(default=REQUESTS_PER_MINUTE, ge=1)
    running_requests: int = Field(default=MAX_RUNNING, ge=1)
    running_questions: int = Field(default=Quotas.running, ge=1)
    tenant_running_questions: int | None = Field(default=None, ge=1)
    tenant_questions_per_minute: int | None = Field(default=None, ge=1)
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    body_bytes: int = Field(default=MAX_BODY_BYTES, ge=1_000)


class Configuration(Model):
    """The content of the file."""

    host: str = "127.0.0.1"
    port: int = Field(default=8_080, ge=0, le=65_535)
    database: Setting = DEFAULT_DATABASE
    stores: list[Annotated[StoreSettings, BeforeValidator(lambda one: {"path": one} if isinstance(one, str) else one)]]
    models: dict[str, ModelSettings] = Field(default_factory=dict)
    keys: KeySettings = Field(default_factory=KeySettings)
    tokens: TokenSettings | None = None
    limits: LimitSettings = Field(default_factory=LimitSettings)
    cors_origins: list[str] = Field(default_factory=list)
    traces: bool = False
    knowledge_sources: list[SourceDefinition] = Field(default_factory=list)
    knowledge_bases: list[KnowledgeBaseDefinition] = Field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Configuration:
        """Read a file; paths in it are relative to its folder. Errors are ``ConfigurationError`` and name the field."""
        try:
            loaded = cls.parse(read_file(path))
        except InvalidRequestError as error:
            raise ConfigurationError(f"{path}: {error}") from error
        for store in loaded.stores:
            store.path = located(path, store.path)
        loaded.database = located(path, loaded.database)
        return loaded

    def service(self) -> KnowledgeService:
        """Return the service over the stores and models, with the definitions of the file stored in its catalog."""
        service = KnowledgeService(self.database, indexes=self._indexes(), models=self._models())
        asyncio.run(self._define(service))
        return service

    async def _define(self, service: KnowledgeService) -> None:
        for source in self.knowledge_sources:
            await service.put("knowledgeSource", source)
        for base in self.knowledge_bases:
            await service.put("knowledgeBase", base)

    def api_keys(self) -> dict[str, ApiKey]:
        """Return the keys of the file, by hash."""
        by_role: dict[Role, list[str]] = {"admin": self.keys.admin, "query": self.keys.query}
        made = datetime.now(UTC)
        return {
            hash_of(key): ApiKey(f"file-{role}-{number}", f"{role}-{number}", role, made)
            for role, keys in by_role.items()
            for number, key in enumerate(keys, start=1)
        }

    def _models(self) -> dict[str, LLM]:
        if not self.models:
            return {}
        from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible  # noqa: PLC0415 (loads the client)

        return {
            name: OpenAICompatible(
                model=one.model or name,
                api_key=one.api_key or "none",
                api_base=one.api_base,
                context_window=one.context_window,
            )
            for name, one in self.models.items()
        }

    def _indexes(self) -> dict[str, Index]:
        found: dict[str, Index] = {}
        for store in self.stores:
            for name, index in _indexes_of(store):
                if name in found:
                    raise ConfigurationError(f"stores: two have a source of the name {name!r}")
                found[name] = index
        return found


def _indexes_of(settings: StoreSettings) -> Iterator[tuple[str, Index]]:
    from llama_index_agentic_kb.store import KnowledgeStore  # noqa: PLC0415 (loads SQLite and more)

    store = KnowledgeStore.open(settings.path)
    names = [info.name for info in store.sources()]
    if unknown := sorted(settings.permissions.keys() - set(names)):
        raise ConfigurationError(f"stores.permissions: {', '.join(unknown)}: the store has {', '.join(names)}")
    for name in names:
        declared = settings.permissions.get(name)
        permissions = None if declared is None else Permissions(**declared)
        if permissions is not None:
            store.check_permissions(name, permissions)
        yield (
            name,
            partial(
                KnowledgeSource,
                index=store.index(name),
                hybrid=store.lexical(name),
                permissions=permissions,
            ),
        )


# -- running -----------------------------------------------------------------------------------------------------------


def serve(configuration: Configuration) -> None:
    """Serve until the process gets SIGTERM or SIGINT; running answers are finished first."""
    service, keys = configuration.service(), configuration.api_keys()
    tokens = configuration.tokens
    if not keys and tokens is None:
        announce_first_key(service)
    if configuration.traces:
        _register_traces()
    limits = configuration.limits
    app = create_app(
        service,
        keys=keys,
        verifier=None if tokens is None else JwksVerifier(**tokens.model_dump(by_alias=False)),
        requests_per_minute=limits.requests_per_minute,
        max_running=limits.running_requests,
        quotas=Quotas(
            running=limits.running_questions,
            tenant_running=limits.tenant_running_questions,
            tenant_per_minute=limits.tenant_questions_per_minute,
            weights=limits.tenant_weights,
        ),
        max_body_bytes=limits.body_bytes,
        cors_origins=configuration.cors_origins,
    )
    with _json_logs():
        uvicorn.run(
            app,
            host=configuration.host,
            port=configuration.port,
            access_log=False,  # the server writes its own
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=MAX_STOPPING_SECONDS,
            ws="none",
        )


def _register_traces() -> None:
    """Send LlamaIndex's spans and events to the OpenTelemetry collector of the standard environment variables."""
    try:
        from llama_index.observability.otel import LlamaIndexOpenTelemetry  # noqa: PLC0415 (only if traces are on)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 (same)
    except ModuleNotFoundError as error:
        raise ConfigurationError("traces: pip install llama-index-observability-otel") from error
    LlamaIndexOpenTelemetry(service_name_or_resource="agentic-kb", span_exporter=OTLPSpanExporter()).start_registering()


def announce_first_key(service: KnowledgeService) -> None:
    """Create an admin key and print it, if the catalog has none: nobody could use the server otherwise."""

    async def made() -> str | None:
        if (await service.catalog.snapshot()).keys:
            return None
        return (await service.catalog.add_key("admin", "first"))[1]

    key = asyncio.run(made())
    if key is not None:
        sys.stderr.write(f"admin key (shown once, stored as a hash): {key}\n")


@contextmanager
def _json_logs() -> Iterator[None]:
    """Write logs as lines of JSON to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
