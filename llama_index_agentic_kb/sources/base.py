"""A knowledge source: a searchable index or retriever with fields, filters and resilience; the sources of a request.

Only this module computes the effective filter of a search (mandatory AND caller AND planner); each returned node is
checked against it again (``sources.search``).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Final, TypeAlias

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters
from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import ConfigurationError, DeniedError, InvalidRequestError, RetrievalError
from llama_index_agentic_kb.guard.permissions import Permissions, current_principal
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, CallProgress, Health, Resilience, ResilientCalls
from llama_index_agentic_kb.schema import (
    FilterNode,
    Principal,
    ResultsProcessing,
    RetrievalRequest,
    SourceData,
    SourceParams,
    all_of,
    matcher,
    parse_odata,
)
from llama_index_agentic_kb.schema.filters import conditions
from llama_index_agentic_kb.search.filters import FilterLike, lower, to_tree
from llama_index_agentic_kb.search.lexical import LexicalSearch
from llama_index_agentic_kb.sources.filters import FilterField, declared_fields
from llama_index_agentic_kb.sources.index import CHANGEABLE, has_native_async, index_retriever, kind_of, traits_of
from llama_index_agentic_kb.sources.lexical import IndexSearch, lexical_for
from llama_index_agentic_kb.sources.search import PreparedSource, bounded, search_source

RetrieverFactory: TypeAlias = Callable[[MetadataFilters | None], BaseRetriever]
MetadataReader: TypeAlias = Callable[[], Iterable[tuple[str, JsonMapping]]]
"""Returns the document ID and the metadata of each chunk of a source, grouped by document."""

DEFAULT_RESILIENCE: Final = Resilience()

_INTERNAL: Final = "agentic_kb"
"""The metadata key of this package's provenance data; it and keys that begin with "_" are not shown as fields."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The metadata keys of a source's documents.

    Args:
        title: The key of the title; the file name replaces a missing title.
        content: The key of the content to cite. Defaults to the node's text.
        url: The key of the URL.
        key: The key of the document key. Defaults to the source document's ID.
        terms: The key or keys of the document's terms. Defaults to no terms.
    """

    title: str = "title"
    content: str | None = None
    url: str = "url"
    key: str | None = None
    terms: str | Sequence[str] | None = None


def _terms(metadata: JsonMapping, names: str | Sequence[str]) -> str | None:
    """Return the values of the metadata keys of a document's terms as one text; None if there are none."""
    terms = list[str]()
    for name in [names] if isinstance(names, str) else names:
        value = metadata.get(name)
        terms += map(str, value) if isinstance(value, (list, tuple)) else [str(value)] if value else []
    return ", ".join(terms) or None


def _shown(metadata: JsonMapping) -> JsonObject:
    """Return a document's metadata as JSON-compatible data, without internal keys."""
    shown: JsonObject = {}
    for name, value in metadata.items():
        if name.startswith("_") or name == _INTERNAL:
            continue
        if isinstance(value, str):
            shown[name] = without_surrogates(value)
        else:
            shown[name] = value if type(value) in (int, bool) else _as_json(value)
    return shown


def _as_json(value: object) -> JsonValue:
    """Return a metadata value as JSON-compatible data without lone surrogates; other types become text."""
    try:
        text = json.dumps(to_jsonable_python(value, fallback=str, inf_nan_mode="null"), ensure_ascii=False)
    except ValueError:  # a circular reference, or bytes that are not UTF-8
        return without_surrogates(str(value))
    made: JsonValue = json.loads(without_surrogates(text))
    return made


def _check_kinds(name: object, **given: tuple[object, type | UnionType, str]) -> None:
    """Check the name of a source, and of each argument the value against its type; errors have the type's name."""
    if not (isinstance(name, str) and name.strip()):
        raise ConfigurationError(f"name: a source's name must not be empty, got {name!r}")
    for field, (value, kind, words) in given.items():
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigurationError(f"source {name!r}: {field}: expected {words}, got {type(value).__name__}")


def _check_values(name: str, weight: float, similarity_top_k: int | None, params: SourceParams | None) -> None:
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigurationError(f"source {name!r}: weight must be above 0, got {weight}")
    if similarity_top_k is not None and not similarity_top_k > 0:
        raise ConfigurationError(f"source {name!r}: similarity_top_k must be above 0, got {similarity_top_k}")
    if params is not None and not (params.filters is None and params.filter_add_on is None):
        raise ConfigurationError(f"source {name!r}: params: they have no filters; use filters=")


class KnowledgeSource(NotPickled):
    """Something to search: an index, a retriever, or a function from filters to a retriever.

    Args:
        name: The source's name, unique in a knowledge base; used in plans, the activity log and references.
        description: A description of the content, by which the planner chooses sources.
        index: Any LlamaIndex index. A new retriever is created for each effective filter.
        retriever: Any LlamaIndex retriever. It can't apply filters: a search with a filter is denied.
        retriever_factory: Takes ``MetadataFilters`` or None and returns a retriever that applies them; called for each
            search.
        retriever_kwargs: Additional arguments of the index's ``as_retriever`` (``vector_store_query_mode``, ...);
            ``filters`` are added to the mandatory filter, ``similarity_top_k`` is used if this class has none.
        filters: The mandatory filter. No request, plan or parameter can widen it.
        permissions: The metadata fields that say who may see a document. Each request then needs a ``Principal``, and
            finds only documents that this principal may see; without a principal the source is denied.
        trust: How far the source is trusted with text of others; higher is more. A query that was written after
            reading a source's passages goes only to sources of at least its level. Defaults to 1 for a source with
            permissions and 0 for others; two sources without levels of their own must also have the same permissions.
        filterable: The metadata fields that a planner may filter on, by name. Defaults to none.
        metadata_reader: Reads the metadata of the source's chunks, for facets and lists. Defaults to reading them from
            an index that stores its nodes.
        fields: The metadata keys of its documents' title, URL, ...
        weight: The weight of its results in rank fusion. Above 0. Default 1.
        similarity_top_k: The number of documents per search. Defaults to the number set by the effort.
        resilience: The timeout, concurrency, retries, circuit breaker, and the time to wait for this source after the
            others have answered.
        native_async: Whether ``aretrieve`` really awaits. Defaults to detecting this where possible. Pass False for a
            source whose async method blocks the event loop. If ``_retrieve`` raises NotImplementedError, sync calls use
            the async method.
        hybrid: Whether each search also queries a lexical index (BM25), which returns a ranked list of its own: a
            lexical index (it must apply filters), True to require one in memory (``sources.lexical``), or False for
            none. Defaults to building one if that is cheap.
        params: The parameters of requests that set none of their own; each field that a request sets, to false too,
            replaces the one here. They have no filters.

    Raises:
        ConfigurationError: Not exactly one of index, retriever and retriever_factory is given, an argument is invalid,
            or ``hybrid`` is True and no lexical index can be built.
    """

    kind = "searchIndex"
    """The ``type`` of its references and activity records."""
    shards: tuple[KnowledgeSource, ...] = ()
    """The parts that are searched in its place; see ``ShardedSource``."""

    def __init__(
        self,
        name: str,
        description: str = "",
        *,
        index: BaseIndex[Any] | None = None,
        retriever: BaseRetriever | None = None,
        retriever_factory: RetrieverFactory | None = None,
        retriever_kwargs: JsonMapping | None = None,
        filters: FilterLike = None,
        permissions: Permissions | None = None,
        trust: int | None = None,
        filterable: Mapping[str, FilterField] | None = None,
        metadata_reader: MetadataReader | None = None,
        fields: Fields | None = None,
        weight: float = 1.0,
        similarity_top_k: int | None = None,
        resilience: Resilience = DEFAULT_RESILIENCE,
        native_async: bool | None = None,
        hybrid: bool | LexicalSearch | None = None,
        params: SourceParams | None = None,
    ) -> None:
        further = dict(retriever_kwargs) if isinstance(retriever_kwargs, Mapping) else {}
        further_top_k = further.pop("similarity_top_k", None)
        similarity_top_k = further_top_k if similarity_top_k is None else similarity_top_k
        _check_kinds(
            name,
            index=(index, BaseIndex | None, "BaseIndex"),
            retriever=(retriever, BaseRetriever | None, "BaseRetriever"),
            retriever_factory=(None if callable(retriever_factory) else retriever_factory, NoneType, "a function"),
            retriever_kwargs=(retriever_kwargs, Mapping | None, "a mapping"),
            permissions=(permissions, Permissions | None, "Permissions"),
            trust=(trust, int | None, "a whole number"),
            filterable=(filterable, Mapping | None, "a mapping from names to FilterField"),
            fields=(fields, Fields | None, "Fields"),
            weight=(weight, Real, "a number"),
            similarity_top_k=(similarity_top_k, Integral | None, "a whole number"),
            resilience=(resilience, Resilience, "Resilience"),
            params=(params, SourceParams | None, "SourceParams"),
        )
        _check_values(name, weight, similarity_top_k, params)
        if sum(over is not None for over in (index, retriever, retriever_factory)) != 1:
            raise ConfigurationError(f"source {name!r}: give exactly one of index, retriever and retriever_factory")
        self.name = name
        self.description = description or ""
        self.mandatory = all_of(to_tree(filters), to_tree(further.pop("filters", None)))
        self.permissions = permissions
        self.trust = trust
        self.filterable = declared_fields(name, filterable, permissions)
        self.metadata_reader = metadata_reader
        self.fields = fields or Fields()
        self.params = params
        self.no_params = SourceParams(knowledge_source_name=name)  # of a request that has none for it
        self.weight = weight
        self.similarity_top_k = similarity_top_k
        self.resilience = resilience
        self.index = index
        self._retriever = retriever
        self._factory = retriever_factory
        self.has_factory = retriever_factory is not None  # ``prepare`` then calls user code, which may be slow
        self._retriever_kwargs = further
        self._native_async = native_async
        if native_async is None and retriever is not None and not isinstance(retriever, CHANGEABLE):
            self._native_async = has_native_async(retriever)
        self._prepared: PreparedSource | None = None  # of a retriever, which takes no filter
        self._calls = ResilientCalls(f"source {name!r}", resilience)
        unretried = replace(resilience, retries=NO_RETRIES)
        self._lexical_calls = ResilientCalls(f"lexical search of source {name!r}", unretried)
        self._lexical = lexical_for(name, index, hybrid=hybrid, retriever_kwargs=further)

    def __repr__(self) -> str:
        """Return the source's name and the class of its index, retriever or factory."""
        over = self.index or self._retriever or self._factory
        return f"{type(self).__name__}({self.name!r}, {type(over).__name__})"

    # -- filters ---------------------------------------------------------------------------------------------------

    def effective_filter(
        self, caller: FilterNode | None = None, planner: FilterNode | None = None
    ) -> FilterNode | None:
        """Return the effective filter of a search: mandatory AND caller AND planner; None if all are unset."""
        return all_of(self.mandatory, caller, planner)

    def permitted(self, principal: Principal | None) -> FilterNode | None:
        """Return the filter for documents that a principal may see; None if the source declares no permissions.

        Raises:
            DeniedError: The source declares permissions, and the principal is missing or lacks a required attribute.
        """
        return None if self.permissions is None else self.permissions.filter_for(principal)

    def may_learn_from(self, other: KnowledgeSource) -> bool:
        """Return whether a query may be sent to this source that was written after reading passages of ``other``."""
        if self.trust is other.trust is None:
            return other.permissions is None or other.permissions == self.permissions
        levels = [int(one.permissions is not None) if one.trust is None else one.trust for one in (self, other)]
        return self is other or levels[0] >= levels[1]

    def refuse_hidden(self, filters: FilterNode | None) -> None:
        """Raise ``InvalidRequestError`` if a filter uses metadata keys that say whom else documents are shared with."""
        if filters is None or self.permissions is None:
            return
        for condition in conditions(filters):
            if self.permissions.hides(condition.key):
                raise InvalidRequestError(
                    f"source {self.name!r}: {condition.key!r} says whom documents are shared with, and can't be "
                    "filtered on"
                )

    # -- health ----------------------------------------------------------------------------------------------------

    @property
    def health(self) -> Health:
        """The number of running, waiting and abandoned searches, and the state of the circuit breaker."""
        return self._calls.health

    @property
    def usual_seconds(self) -> float | None:
        """The median duration of its recent answers in seconds; None before the first."""
        return self._calls.median_seconds

    # -- searching -------------------------------------------------------------------------------------------------

    @property
    def is_limited_to_ids(self) -> bool:
        """Whether the source searches only some documents or nodes of its index, chosen by their IDs."""
        return any(self._retriever_kwargs.get(name) is not None for name in ("doc_ids", "node_ids"))

    def refusal(self, filters: FilterNode | None) -> str | None:
        """Return why the source's index or retriever can't apply a filter; None if it can, or if there is none."""
        if filters is None:
            return None
        if self.index is None:
            return "a plain retriever can't take filters; use retriever_factory"
        if not isinstance(self.index, VectorStoreIndex):
            return f"{type(self.index).__name__} ignores filters"
        return kind_of(self.index.vector_store).refusal(filters)

    def prepared(self, filters: FilterNode | None, top_k: int, made: BaseRetriever | None = None) -> PreparedSource:
        """Return the source prepared for one effective filter; ``top_k`` counts unless it has a number of its own.

        ``made`` is what its factory made, if it has one. Raises ``DeniedError`` if the filter can't be applied to it.
        """
        if self._prepared is not None and filters is None:
            return self._prepared
        if made is None and (reason := self.refusal(filters)) is not None:
            raise DeniedError(f"source {self.name!r} was not searched: its filter can't be applied ({reason})")
        if self.index is not None:  # whose store may have been replaced since the last search
            made = index_retriever(self.index, filters, self.similarity_top_k or top_k, self._retriever_kwargs)
        made = self._retriever if made is None else made
        assert made is not None
        return self._made_ready(made, filters)

    def _made_ready(self, made: BaseRetriever, filters: FilterNode | None) -> PreparedSource:
        retriever = bounded(made, theirs=self.index is None)
        traits = traits_of(retriever, self._native_async)
        # An index retriever that is not dense searches in its own way, without a lexical index.
        lexical = self._lexical if self.index is None or traits.kind == "dense" else None
        if isinstance(lexical, IndexSearch):
            lexical = replace(lexical)  # for one request
        passes, private = None if filters is None else matcher(filters), self.permissions is not None
        calls = self._calls, self._lexical_calls
        ready = PreparedSource(self.name, retriever, traits, filters, passes, *calls, lexical, is_private=private)
        if made is self._retriever and not isinstance(made, CHANGEABLE):
            self._prepared = ready
        return ready

    async def prepare(
        self, filters: FilterNode | None, top_k: int, progress: CallProgress | None = None
    ) -> PreparedSource:
        """Return the source prepared for one effective filter, calling its factory if it has one; see ``prepared``.

        A factory may fail like a search: late, or not called since its circuit is open or too many calls are waiting.
        """
        if self._factory is None:
            return self.prepared(filters, top_k)
        make = partial(self._factory, None if filters is None else lower(filters))
        call = Call(sync=make, what=f"retriever factory of source {self.name!r}")
        made: BaseRetriever | None = await self._calls.call(call, progress)
        if made is None:
            raise RetrievalError(f"source {self.name!r}: its retriever_factory returned no retriever")
        return self.prepared(filters, top_k, made)

    async def warm_up(self) -> None:
        """Load the embedding model and the store by a trial search, whose result is discarded."""
        if self.index is None or self.refusal(self.mandatory) is not None:
            return
        prepared, bundle = self.prepared(self.mandatory, 1), QueryBundle("warm up")
        model = prepared.traits.embed_model

        async def embedded() -> QueryBundle:
            if model is not None:
                warm = partial(model.get_query_embedding, bundle.query_str)
                bundle.embedding = await self._calls.bulkhead.call(Call(sync=warm, what="embedding model"))
            return bundle

        await search_source(prepared, bundle.query_str, embedded, limit=1, progress=CallProgress())

    def source_data(self, node: NodeWithScore) -> SourceData:
        """Return a node's document under uniform keys, without its permission fields."""
        inner, metadata, fields = node.node, node.node.metadata, self.fields
        content, url = metadata.get(fields.content) if fields.content else None, metadata.get(fields.url)
        key = metadata.get(fields.key) if fields.key else None
        if key in (None, ""):
            key = inner.ref_doc_id or inner.node_id
        title = metadata.get(fields.title) or metadata.get("file_name") or key
        return SourceData(
            doc_key=without_surrogates(str(key)),
            title=without_surrogates(str(title)),
            content=str(content) if content else inner.get_content(metadata_mode=MetadataMode.NONE),
            url=str(url) if url else None,
            terms=_terms(metadata, fields.terms) if fields.terms else None,
            metadata=_shown(metadata if self.permissions is None else self.permissions.without(metadata)),
        )


# -- the sources of a request ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SelectedSource:
    """A source that a request may search, with the request's parameters for it."""

    name: str
    """The name that plans use: that of the whole source for a shard."""
    source: KnowledgeSource
    params: SourceParams
    filters: FilterNode | None
    """The effective filter without a planner's filter."""
    warning: str | None = None
    """A warning that names its ignored parameters; None if there are none."""
    caller: FilterNode | None = None
    """The combined filter of principal, caller and request, without the source's mandatory filter."""
    denied: str | None = None
    """Why the principal may not search the source; None if it may."""
    top_k: int | None = None
    """The number of documents per search; None for the request's."""

    @property
    def shards(self) -> list[SelectedSource]:
        """The shards of the source, with the same filters, which they share; empty if it has none."""
        shards = self.source.shards
        return [replace(self, source=shard, top_k=shard.similarity_top_k or self.top_k) for shard in shards]


def select(
    sources: Mapping[str, KnowledgeSource],
    request: RetrievalRequest,
    filters: FilterNode | None,
    *,
    calibrated: bool = False,
) -> dict[str, SelectedSource]:
    """Return the sources that a request allows, by name, with the effective filter of each, ``filters`` included.

    A source that denies the request's principal (``current_principal``) is marked as denied; the others are searched.

    Raises:
        InvalidRequestError: A parameter names an unknown source or the wrong kind, its ``filterAddOn`` is not valid
            OData, its filter uses a permission field, or no source remains.
        DeniedError: The principal may search none of the sources. The error contains the reason for each.
    """
    given: dict[str, SourceParams] = {}
    for params in request.knowledge_source_params:
        name, source = params.knowledge_source_name, sources.get(params.knowledge_source_name)
        if source is None:
            known = ", ".join(sources)
            raise InvalidRequestError(f"knowledgeSourceParams: no source is named {name!r}; there are: {known}")
        if params.kind not in (None, source.kind):
            raise InvalidRequestError(
                f"knowledgeSourceParams: {name!r} is of kind {source.kind!r}, not {params.kind!r}"
            )
        given[name] = params if source.params is None else params.over(source.params)
    selected = _allowed(sources, given, request.results_processing, filters, calibrated=calibrated)
    if all(map(attrgetter("denied"), selected.values())):
        reasons = {name: chosen.denied or "" for name, chosen in selected.items()}
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        causes = {name: DeniedError(reason) for name, reason in reasons.items()}
        raise DeniedError(f"no source may be searched: {why}", causes)
    return selected


def _allowed(
    sources: Mapping[str, KnowledgeSource],
    given: Mapping[str, SourceParams],
    processing: ResultsProcessing | None,
    filters: FilterNode | None,
    *,
    calibrated: bool,
) -> dict[str, SelectedSource]:
    principal, selected = current_principal(), {}
    for name, source in sources.items():
        params = given.get(name) or source.params or source.no_params
        if reason := params.contradiction(processing):
            raise InvalidRequestError(f"knowledgeSourceParams[{name}]: {reason}")
        permitted, denied = None, None
        try:
            permitted = source.permitted(principal)
        except DeniedError as error:
            denied = str(error)
        own = params.filters if params.filter_add_on is None else _own_filter(params, params.filter_add_on)
        source.refuse_hidden(own)
        caller = all_of(permitted, filters, own)
        if params.never_query_source:
            continue
        warning = None
        if params.model_extra or params.reranker_threshold is not None:
            warning = _ignored(params, calibrated=calibrated)
        effective, top_k = source.effective_filter(caller), source.similarity_top_k
        selected[name] = SelectedSource(name, source, params, effective, warning, caller, denied, top_k)
    if not selected:
        raise InvalidRequestError("knowledgeSourceParams: neverQuerySource leaves no source to search")
    return selected


def _own_filter(params: SourceParams, add_on: str) -> FilterNode | None:
    try:
        return all_of(params.filters, parse_odata(add_on))
    except InvalidRequestError as error:
        at = f"knowledgeSourceParams[{params.knowledge_source_name}].filterAddOn"
        raise InvalidRequestError(f"{at}: {error}") from error


def _ignored(params: SourceParams, *, calibrated: bool) -> str | None:
    """Return a warning that names ignored parameters; None if there are none."""
    ignored = sorted(params.model_extra or ())
    if params.reranker_threshold is not None and not calibrated:
        ignored.append("rerankerThreshold (no calibrated reranker scores this source)")
    return f"ignored parameters: {', '.join(ignored)}" if ignored else None


def by_name(sources: Sequence[KnowledgeSource]) -> dict[str, KnowledgeSource]:
    """Return sources by name, in declaration order; ``ConfigurationError`` if there are none, or a name is repeated."""
    if not sources:
        raise ConfigurationError("sources: give at least one KnowledgeSource")
    named: dict[str, KnowledgeSource] = {}
    for source in sources:
        if not isinstance(source, KnowledgeSource):
            raise ConfigurationError(
                f"sources: expected KnowledgeSource, got {type(source).__name__}; "
                "from_defaults takes indexes and retrievers"
            )
        named[source.name] = source
    names = Counter(part.name for source in sources for part in (source, *source.shards))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigurationError(f"sources: {twice[0]} is given twice; names must differ")
    return named


def as_source(given: object, position: int) -> KnowledgeSource:
    """Return an index or a retriever as a source named ``source_<position>``; a source is returned unchanged."""
    name = f"source_{position}"
    if isinstance(given, KnowledgeSource):
        return given
    if isinstance(given, BaseIndex):
        return KnowledgeSource(name, index=given)
    if isinstance(given, BaseRetriever):
        return KnowledgeSource(name, retriever=given)
    raise ConfigurationError(f"sources: can't search a {type(given).__name__}; give a source, an index or a retriever")
