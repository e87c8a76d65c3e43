"""Definitions of knowledge bases and knowledge sources, as clients send them and the catalog stores them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel, to_snake

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import OutputMode, ResultsProcessing
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.request import MAX_DOCUMENTS, MAX_SECONDS, MAX_TOKENS, Documents, EffortField

MAX_TAGS: Final = 10
_OF_OTHERS: Final = "wrap the service as a LlamaIndex retriever, and pass create_app a KnowledgeBase over it"
_INSTEAD: Final = {
    "web": f"this server searches no web: {_OF_OTHERS}",
    "mcpServer": "pass create_app a KnowledgeBase with a ToolSource over the server's tools",
    **dict.fromkeys(("remoteSharePoint", "workIQ", "fabricDataAgent", "fabricOntology"), _OF_OTHERS),
}
"""Azure's kinds of sources that are not served, and what to use."""
_PARTS: Final = ("folderPath", "targetPath", "query")  # fields that narrow what Azure's services would ingest
_INDEX: Final = {"azureBlob": "container_name", "indexedOneLake": "lakehouse_id", "indexedSql": "table_or_view"}
"""By kind: the parameter that names the index. That of other kinds has the source's own name."""

Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$")]
"""A name that needs no escaping in a URL. Azure's names are a part of these."""


class _Definition(Model):
    """A definition: null fields count as absent; ``@odata.*`` fields are the server's and are left out."""

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        if data.get("encryptionKey"):
            raise ValueError("encryptionKey: this server encrypts no definitions; leave it out")
        dropped = {"encryptionKey", "warnings"}
        return {
            key: value
            for key, value in data.items()
            if value is not None and key not in dropped and not str(key).startswith("@odata.")
        }

    def warnings(self) -> list[str]:
        """Return a sentence about each part that is stored without effect."""
        return []


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
    auth_identity: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_secret(cls, data: object) -> object:
        if isinstance(data, Mapping) and data.get("apiKey"):
            raise ValueError(
                "apiKey: the server stores no secrets; configure the model on the server (models:, apiKey: env:NAME), "
                "name it in deploymentId, and leave apiKey out"
            )
        return {key: value for key, value in data.items() if key != "apiKey"} if isinstance(data, Mapping) else data

    @property
    def name(self) -> str | None:
        """The name of the configured model."""
        return self.deployment_id or self.model_name


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
        names = [source.name for source in self.knowledge_sources]
        if len(set(names)) < len(names):
            raise ValueError("knowledgeSources: a source is named twice")
        return self

    def warnings(self) -> list[str]:
        """Return a sentence about each part that is stored without effect."""
        asked = [
            f"knowledgeSources.{source.name}.{name}"
            for source in self.knowledge_sources
            for name in ("enableImageServing", "enableFreshness")
            if source.to_dict().get(name)
        ]
        asked += [
            f"models.azureOpenAIParameters.{name}"
            for model in self.models
            for name in ("resourceUri", "authIdentity")
            if model.azure_open_ai_parameters.to_dict().get(name)
        ]
        if self.cors_options is not None and self.cors_options.max_age_in_seconds is not None:
            asked.append("corsOptions.maxAgeInSeconds")
        return [f"{name}: it has no effect on this server" for name in asked]


class SearchIndexParameters(_Definition):
    """The index of a source. Parameters of Azure's indexes are stored; those without a counterpart have no effect."""

    model_config = ConfigDict(extra="forbid")

    search_index_name: str = Field(min_length=1, max_length=MAX_DOCUMENTS)
    base_filter: str | None = None
    source_data_fields: list[dict[str, Any]] | None = None
    search_fields: list[dict[str, Any]] | None = None
    semantic_configuration_name: str | None = None
    query_hints: dict[str, Any] | None = None


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
        parameters = self.search_index_parameters
        return None if parameters is None else parameters.base_filter

    def warnings(self) -> list[str]:
        """Return a sentence about each part that is stored without effect."""
        stored, own = self._parameters.to_dict(), to_camel(f"{to_snake(self.kind)}_parameters")
        used = {"searchIndexName", "baseFilter", to_camel(_INDEX.get(self.kind, "search_index_name"))}
        return [f"{own}.{name}: it has no effect on this server" for name in stored if name not in used]


Definition: TypeAlias = KnowledgeBaseDefinition | SourceDefinition


def check_name(definition: Definition, name: str) -> None:
    """Raise ``InvalidRequestError`` if a definition's name differs from the one in the request's path."""
    if definition.name != name:
        raise InvalidRequestError(f"name: the body names {definition.name!r}, and the path {name!r}")
