"""The knowledge bases that a server answers from, built from their definitions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from llama_index.core.llms import LLM

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, NotFoundError
from llama_index_agentic_kb.knowledge_base import KnowledgeBase
from llama_index_agentic_kb.llm import resolve_llm
from llama_index_agentic_kb.schema import OutputMode, RetrievalRequest, SourceParams, all_of, parse_odata
from llama_index_agentic_kb.search.filters import to_tree
from llama_index_agentic_kb.server.catalog import (
    Catalog,
    Definition,
    Kind,
    KnowledgeBaseDefinition,
    RetrieveDefaults,
    SourceDefinition,
    Stored,
)
from llama_index_agentic_kb.server.errors import ConflictError, UnavailableError
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.store.sessions import SessionStore

Index: TypeAlias = Callable[..., KnowledgeSource]
"""Returns a source over an index, called with ``name=``, ``description=``, ``filters=`` and ``params=``:
``partial(KnowledgeSource, index=..., permissions=...)``."""

_PASSED_ON: Final = {"name", "description", "output_mode", "retrieval_instructions", "answer_instructions"}
"""Fields of a definition that are arguments of ``KnowledgeBase``."""
STATIC_ETAG: Final = '"registered"'  # ETag of a knowledge base that the program registered


@dataclass(frozen=True, slots=True)
class ServedBase:
    """A knowledge base with the defaults that its definition adds to requests."""

    base: KnowledgeBase
    etags: tuple[str, ...] = ()
    defaults: RetrieveDefaults = field(default_factory=RetrieveDefaults)

    def request(self, sent: RetrievalRequest, **known: object) -> RetrievalRequest:
        """Return a request with the fields that the server knows, and the stored defaults in those that it omits."""
        defaults = self.defaults.model_dump(by_alias=False, exclude_none=True)
        omitted = {name: value for name, value in defaults.items() if getattr(sent, name) is None}
        return sent.model_copy(update=omitted | known)


class KnowledgeService:
    """The knowledge bases of a server: those of its catalog, and those that the program registers.

    Args:
        database: The database of catalog and sessions: a path (SQLite) or a URL; see ``SessionStore``.
        indexes: What source definitions may search, by the name in ``searchIndexName``.
        models: The language models that definitions may name.
        bases: Knowledge bases made in Python. They can't be changed over HTTP.

    Raises:
        ConfigurationError: Two knowledge bases have the same name, or the database can't be used.
    """

    def __init__(
        self,
        database: str | Path,
        *,
        indexes: Mapping[str, Index] | None = None,
        models: Mapping[str, LLM] | None = None,
        bases: Sequence[KnowledgeBase] = (),
    ) -> None:
        self.indexes, self.models = dict(indexes or {}), dict(models or {})
        self.sessions = SessionStore(database)
        self.catalog = Catalog(database)
        self._registered = {base.name: ServedBase(base) for base in bases}
        if len(self._registered) < len(bases):
            raise ConfigurationError("bases: two knowledge bases have the same name")
        for base in bases:
            base.sessions = base.sessions or self.sessions
        self._built: dict[str, ServedBase] = {}
        self._building: dict[str, asyncio.Lock] = {}

    def close(self) -> None:
        """Close the connections of the database."""
        self.catalog.close()
        self.sessions.close()

    # -- asking ----------------------------------------------------------------------------------------------------

    async def base(self, name: str) -> ServedBase:
        """Return a knowledge base, built or rebuilt if its definition or one of its sources' has changed.

        Raises ``NotFoundError``, or ``UnavailableError`` if its definition names what this server lacks.
        """
        if name in self._registered:
            return self._registered[name]
        stored = await self.catalog.find("knowledgeBase", name)
        try:
            return await self._current(stored)
        except (InvalidRequestError, ConfigurationError, NotFoundError) as error:
            raise UnavailableError(f"knowledge base {name!r} can't be opened on this server: {error}") from error

    async def open_all(self) -> None:
        """Build and warm up all knowledge bases, so that no question waits; one that can't be opened is logged."""
        for served in self._registered.values():
            await served.base.awarm_up()
        for name in (await self.catalog.snapshot()).definitions["knowledgeBase"]:
            try:
                await self.base(name)
            except Exception:  # noqa: BLE001 (one store that is damaged must not keep the others from being served)
                logger.warning("knowledge base %r can't be opened", name, exc_info=True)

    async def _current(self, stored: Stored) -> ServedBase:
        definition, name = stored.definition, stored.definition.name
        assert isinstance(definition, KnowledgeBaseDefinition)
        sources = [await self.catalog.find("knowledgeSource", used.name) for used in definition.knowledge_sources]
        etags = (stored.etag, *(source.etag for source in sources))
        async with self._building.setdefault(name, asyncio.Lock()):
            served = self._built.get(name)
            if served is None or served.etags != etags:
                build = partial(self._build, definition, sources, etags)
                served = self._built[name] = await Call(sync=build, what=f"building {name}")
        return served

    def _build(
        self, definition: KnowledgeBaseDefinition, sources: Sequence[Stored], etags: tuple[str, ...]
    ) -> ServedBase:
        set_fields = definition.model_dump(by_alias=False, include=_PASSED_ON, exclude_none=True)
        if definition.retrieval_reasoning_effort is not None:
            set_fields["effort"] = definition.retrieval_reasoning_effort
        base = KnowledgeBase(
            [self._source(one.definition) for one in sources if isinstance(one.definition, SourceDefinition)],
            llm=self._model(definition),
            sessions=self.sessions,
            **set_fields,
        )
        return ServedBase(base.warm_up(), etags, definition.retrieve_defaults or RetrieveDefaults())

    def _source(self, definition: SourceDefinition) -> KnowledgeSource:
        name, base_filter, index = definition.name, definition.base_filter, self._index(definition)
        own = index.keywords.get("filters") if isinstance(index, partial) else None  # it would else be replaced
        source = index(
            name=name,
            description=definition.description or "",
            filters=all_of(to_tree(own), None if base_filter is None else parse_odata(base_filter)),
            params=SourceParams(knowledge_source_name=name, results_processing=definition.results_processing),
        )
        source.kind = definition.kind
        return source

    def _index(self, definition: SourceDefinition) -> Index:
        if (name := definition.index_name) not in self.indexes:
            known = ", ".join(sorted(self.indexes)) or "none"
            raise InvalidRequestError(f"there is no index {name[:128]!r}; the server has: {known}")
        return self.indexes[name]

    def _model(self, definition: KnowledgeBaseDefinition) -> LLM | None:
        if not definition.models:
            return None
        asked = definition.models[0].azure_open_ai_parameters
        name = asked.deployment_id or asked.model_name
        if name not in self.models:
            known = ", ".join(sorted(self.models)) or "none"
            raise InvalidRequestError(f"models: {name!r} is not configured on this server; it has: {known}")
        return self.models[name]

    def origins(self, path: str) -> list[str]:
        """Return the CORS origins allowed by the knowledge base that a URL path names (``corsOptions``)."""
        kind, name = [*path.split("/"), "", ""][1:3]
        copy = self.catalog.copy
        stored = None if copy is None or kind != "knowledgebases" else copy.definitions["knowledgeBase"].get(name)
        options = getattr(stored and stored.definition, "cors_options", None)
        return [] if options is None else list(options.allowed_origins)

    # -- definitions -----------------------------------------------------------------------------------------------

    async def shown(self, kind: Kind) -> list[JsonObject]:
        """Return all definitions of a kind, by name, in the form that clients get."""
        found = {name: stored.to_dict() for name, stored in (await self.catalog.snapshot()).definitions[kind].items()}
        for name, served in self._registered.items() if kind == "knowledgeBase" else ():
            base = served.base
            found[name] = {
                "@odata.etag": STATIC_ETAG,
                "name": name,
                "description": base.description,
                "knowledgeSources": [{"name": source} for source in base.sources],
                "outputMode": base.output_mode.value,
                "retrievalReasoningEffort": {"kind": base.retriever.effort.value},
            }
        return [found[name] for name in sorted(found)]

    async def find(self, kind: Kind, name: str) -> JsonObject:
        """Return a definition in the form that clients get; raise ``NotFoundError`` if there is none of this name."""
        if kind == "knowledgeBase" and name in self._registered:
            return next(one for one in await self.shown(kind) if one["name"] == name)
        return (await self.catalog.find(kind, name)).to_dict()

    async def put(
        self, kind: Kind, definition: Definition, headers: Mapping[str, str] = {}, *, create: bool = False
    ) -> tuple[Stored, bool]:
        """Store a definition after checking what it names; see ``Catalog.put``.

        Raises:
            InvalidRequestError: It names a source, an index or a model that the server lacks.
            ConflictError: The name is taken (``create``), or belongs to a registered knowledge base.
        """
        if kind == "knowledgeBase" and definition.name in self._registered:
            raise ConflictError(f"knowledge base: {definition.name!r} is registered by the program")
        if isinstance(definition, KnowledgeBaseDefinition):
            llm = resolve_llm(self._model(definition))
            if definition.output_mode is OutputMode.ANSWER_SYNTHESIS and llm is None:
                raise InvalidRequestError(
                    "outputMode: answerSynthesis needs a model; name one of the server's in models"
                )
            for used in definition.knowledge_sources:
                try:
                    await self.catalog.find("knowledgeSource", used.name)
                except NotFoundError as error:
                    raise InvalidRequestError(f"knowledgeSources: {error}") from error
        else:
            self._index(definition)
            if definition.base_filter is not None:
                parse_odata(definition.base_filter)
        return await self.catalog.put(kind, definition, headers, create=create)

    async def remove(self, kind: Kind, name: str, headers: Mapping[str, str] = {}) -> None:
        """Delete a definition; see ``Catalog.remove``."""
        if kind == "knowledgeBase" and name in self._registered:
            raise ConflictError(f"knowledge base: {name!r} is registered by the program")
        await self.catalog.remove(kind, name, headers)
        if kind == "knowledgeBase":
            self._built.pop(name, None)
