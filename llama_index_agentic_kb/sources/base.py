"""A knowledge source: one thing that can be searched, its fields, its filters and its bulkhead.

This is the one place where the effective filter of a search is computed (mandatory AND caller AND planner) and where
each returned node is checked against it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import ConfigurationError, DeniedError
from llama_index_agentic_kb.guard.breaker import BreakerPolicy
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.guard.pipeline import Health, Progress, ResiliencePipeline
from llama_index_agentic_kb.guard.retries import RetryPolicy
from llama_index_agentic_kb.schema import FilterNode, Principal, SourceData, all_of
from llama_index_agentic_kb.search.lexical import LexicalSearch
from llama_index_agentic_kb.sources.fields import SourceFields
from llama_index_agentic_kb.sources.filters import FilterLike, lower, to_tree
from llama_index_agentic_kb.sources.index import (
    index_retriever,
    query_embedding_model,
    refusal,
    score_scale,
    search_kind,
)
from llama_index_agentic_kb.sources.lexical import lexical_for
from llama_index_agentic_kb.sources.metadata import MetadataReader
from llama_index_agentic_kb.sources.planner_filters import FilterField, declared_fields
from llama_index_agentic_kb.sources.recursion import bounded, own_recursion
from llama_index_agentic_kb.sources.results import NodeKey, NodeList, SearchResult, distinct_nodes, node_key
from llama_index_agentic_kb.sources.search import BundleFlow, PreparedSource, SourceWays
from llama_index_agentic_kb.sources.settings import SEARCH_BREAKER, SEARCH_RETRIES, check_numbers, grace_of

__all__ = [
    "KnowledgeSource",
    "NodeKey",
    "NodeList",
    "PreparedSource",
    "SearchResult",
    "distinct_nodes",
    "node_key",
]

RetrieverFactory = Callable[[MetadataFilters | None], BaseRetriever]


class KnowledgeSource(NotPickled):
    """Something to search: an index, a retriever, or a function from filters to a retriever.

    Args:
        name: Unique in a knowledge base. Planner, activity and references call the source by it.
        description: What is in it, for the planner to choose by.
        index: Any LlamaIndex index. Its retriever is made anew for each effective filter.
        retriever: Any LlamaIndex retriever. It can't take filters: a search under one is denied.
        retriever_factory: Takes ``MetadataFilters`` or None and gives a retriever that applies them.
        retriever_kwargs: Further arguments of the index's ``as_retriever`` (``vector_store_query_mode``, ...); its
            ``filters`` join the mandatory filter, its ``similarity_top_k`` stands in for this class's own.
        kind: The ``type`` of its references and activity records. Default "searchIndex".
        filters: The mandatory filter. No request, plan or parameter can widen it.
        permissions: The metadata fields that say who may see a document. Each request then needs a ``Principal``, and
            finds what that one may see; without one the source is denied.
        filterable: The metadata fields that a planner may filter on, by name; None lets it make no filters.
        metadata_reader: Gives the document's id and the metadata of each chunk, a document's chunks one after the
            other, for facets and lists; None reads them from the index where it keeps its nodes.
        title_field: Metadata key of a document's title. Default "title", then the file name.
        content_field: Metadata key of the content to cite; None is the node's text.
        url_field: Metadata key of a document's URL. Default "url".
        key_field: Metadata key of a document's key; None is the source document's id.
        terms_field: Metadata key of a document's terms, shown in extracts; None shows none.
        weight: How much its results count in fusion beside those of others. Above 0. Default 1.
        similarity_top_k: Documents of each search; None is the effort's own number.
        always_query: Whether each sub-query goes to it, whatever the planner chose.
        timeout: Seconds that one search may take; None is the effort's own number.
        straggler_grace: Seconds that are waited for this source when the others have answered and it is at work
            (three times as many before its first answer; twice its usual time, or the others', where that is more).
            None waits for its whole timeout. Default 1, and None for a source whose ``timeout`` is set.
        max_concurrency: Searches of this source that are under way at once, on threads and event loops together;
            more wait their turn, those of its lexical side apart. One that was given up holds its place until it
            returns. Default 8: a Chroma server does no more with more.
        breaker: When the source is left alone after failures, and for how long; None never leaves it alone. Default
            after 5 failures in a row or 10 of the last 20, for 10 s.
        retries: How often a search is tried again whose failure is worth it (a refused or reset connection, the
            statuses 429 and 503), out of the request's retry budget. Default once. ``NO_RETRIES`` never does.
        hedge_after: Seconds after which a search that has not answered is made a second time beside the first, or a
            percentile of the source's last answers ("p95"). The first answer wins, the other is stopped; each costs
            the retry budget one. Default None, never.
        native_async: Whether ``aretrieve`` really awaits; None finds out as far as it can. A source that blocks the
            event loop in its async method should be given False. An async-only retriever raises NotImplementedError
            from ``_retrieve``: sync calls then take its async way.
        hybrid: Whether each search asks a lexical index (BM25) beside the source, with a ranked list of its own.
            None does where it can be had cheaply: one is given, or a ``VectorStoreIndex`` that is searched plainly
            is small enough to index in memory (see ``sources.lexical``). True demands it, False forgoes it.
        lexical: What to ask. It has to apply filters; what it returns is checked again.

    Raises:
        ConfigurationError: Not exactly one of index, retriever and retriever_factory is given, a field is unusable, or
            ``hybrid`` is True where there is no lexical index and none can be made.

    ``health`` tells how the source stands at the moment.
    """

    def __init__(
        self,
        name: str,
        description: str = "",
        *,
        index: BaseIndex[Any] | None = None,
        retriever: BaseRetriever | None = None,
        retriever_factory: RetrieverFactory | None = None,
        retriever_kwargs: Mapping[str, Any] | None = None,
        kind: str = "searchIndex",
        filters: FilterLike = None,
        permissions: Permissions | None = None,
        filterable: Mapping[str, FilterField] | None = None,
        metadata_reader: MetadataReader | None = None,
        title_field: str = "title",
        content_field: str | None = None,
        url_field: str = "url",
        key_field: str | None = None,
        terms_field: str | None = None,
        weight: float = 1.0,
        similarity_top_k: int | None = None,
        always_query: bool = False,
        timeout: float | None = None,
        straggler_grace: float | Literal["auto"] | None = "auto",
        max_concurrency: int = 8,
        breaker: BreakerPolicy | None = SEARCH_BREAKER,
        retries: RetryPolicy = SEARCH_RETRIES,
        hedge_after: float | str | None = None,
        native_async: bool | None = None,
        hybrid: bool | None = None,
        lexical: LexicalSearch | None = None,
    ) -> None:
        further = dict(retriever_kwargs or {})
        similarity_top_k = similarity_top_k or further.pop("similarity_top_k", None)
        check_numbers(name, weight, similarity_top_k, timeout, max_concurrency)
        if sum(given is not None for given in (index, retriever, retriever_factory)) != 1:
            raise ConfigurationError(f"source {name!r}: give exactly one of index, retriever and retriever_factory")
        self.name = name
        self.description = description
        self.kind = kind
        self.mandatory = all_of(to_tree(filters), to_tree(further.pop("filters", None)))
        if permissions is not None and not isinstance(permissions, Permissions):
            raise ConfigurationError(
                f"source {name!r}: permissions: expected Permissions, got {type(permissions).__name__}"
            )
        self.permissions = permissions
        self.filterable = declared_fields(name, filterable)
        self.metadata_reader = metadata_reader
        self.fields = SourceFields(title_field, content_field, url_field, key_field, terms_field)
        self.weight = weight
        self.similarity_top_k = similarity_top_k
        self.always_query = always_query
        self.timeout = timeout
        self._index = index
        self._retriever = retriever
        self._factory = retriever_factory
        self._retriever_kwargs = further
        self.straggler_grace = grace_of(name, straggler_grace, timeout)
        own = ResiliencePipeline(
            f"source {name!r}", places=max_concurrency, breaker=breaker, retries=retries, hedge_after=hedge_after
        )
        words = ResiliencePipeline(f"lexical search of source {name!r}", places=max_concurrency, breaker=breaker)
        self._search = SourceWays(name, own, words, native_async=native_async)
        self._lexical = lexical_for(name, index, hybrid=hybrid, lexical=lexical, retriever_kwargs=further)

    def __repr__(self) -> str:
        """Name the source and what it is over."""
        over = self._index or self._retriever or self._factory
        return f"{type(self).__name__}({self.name!r}, {type(over).__name__})"

    # -- searching -------------------------------------------------------------------------------------------------

    def effective_filter(
        self, caller: FilterNode | None = None, planner: FilterNode | None = None
    ) -> FilterNode | None:
        """Give the filter of a search: mandatory AND caller AND planner. None where none is set."""
        return all_of(self.mandatory, caller, planner)

    def permitted(self, principal: Principal | None) -> FilterNode | None:
        """Give the filter of what a principal may see; None where the source has no permissions declared.

        Raises:
            DeniedError: It has, and there is no principal, or one that lacks what they ask for.
        """
        return None if self.permissions is None else self.permissions.filter_for(principal)

    @property
    def health(self) -> Health:
        """How the source stands: searches at work, waiting and abandoned, and the state of its circuit breaker."""
        return self._search.own.health

    @property
    def lexical_health(self) -> Health | None:
        """How its lexical side stands; None where it has none."""
        return None if self._lexical is None else self._search.lexical.health

    @property
    def usual_seconds(self) -> float | None:
        """How long its last answers took, the middle one; None before the first."""
        return self._search.own.latencies.median

    @property
    def prepares_at_once(self) -> bool:
        """Whether ``prepare`` calls nothing of the user's that may take its time."""
        return self._factory is None

    async def prepare(
        self,
        filters: FilterNode | None,
        top_k: int,
        *,
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> PreparedSource:
        """Give a retriever that applies the effective filter.

        Args:
            filters: What ``effective_filter`` gave.
            top_k: Documents of a search, unless the source has a number of its own.
            deadline: ``time.monotonic()`` at which a factory is given up.
            progress: Told of a factory's calls.

        Raises:
            DeniedError: The filter can't be applied to this source.
            DeadlineExceededError: The factory did not return in time.
            SourceUnavailableError: The factory was not called: see ``search``.
        """
        top_k = self.similarity_top_k or top_k
        if self._index is not None:
            why = refusal(self._index, filters)
            if why is not None:
                raise self._denied(why)
            retriever = own_recursion(index_retriever(self._index, filters, top_k, self._retriever_kwargs), self.name)
        elif self._factory is not None:
            make = partial(self._factory, None if filters is None else lower(filters))
            call = Call(sync=make, deadline=deadline, what=f"retriever factory of source {self.name!r}")
            retriever = bounded((await self._search.own.call(call, progress or Progress())), self.name)
        elif filters is not None:
            raise self._denied("a plain retriever can't take filters; use retriever_factory")
        else:
            assert self._retriever is not None
            retriever = bounded(self._retriever, self.name)
        model, scale, kind = query_embedding_model(retriever), score_scale(retriever), search_kind(retriever)
        # A retriever that turns out to search in a way of its own is left to it.
        lexical = self._lexical if self._index is None or kind == "dense" else None
        private = self.permissions is not None
        return PreparedSource(retriever, filters, model, scale, kind, lexical, private)

    async def search(
        self,
        prepared: PreparedSource,
        bundle: QueryBundle,
        *,
        top_k: int,
        deadline: float | None,
        complete: BundleFlow | None = None,
        progress: Progress | None = None,
    ) -> SearchResult:
        """Search with a fresh bundle and check what comes back.

        Args:
            prepared: What ``prepare`` gave.
            bundle: The query; its vector is used where the retriever wants one.
            top_k: Documents to keep of each list, unless the source has a number of its own.
            deadline: ``time.monotonic()`` at which it is given up.
            complete: Gives the bundle with its vector, for the retriever alone: a lexical search does not wait for it.
            progress: Told of all calls; it holds the request's retry budget.

        Raises:
            RetrievalError: The source returned something that is no list of nodes.
            DeadlineExceededError: It did not answer in time.
            SourceUnavailableError: It was not asked: it failed too often lately, or too many calls wait for it.
        """
        limit = self.similarity_top_k or top_k
        given = complete or partial(_as_given, bundle)
        query = bundle.query_str
        return await self._search.search(prepared, query, given, limit=limit, deadline=deadline, progress=progress)

    async def warm_up(self) -> None:
        """Load what the first search would have to load: embedding model and store. What fails is left to it."""
        if self._index is None or refusal(self._index, self.mandatory) is not None:
            return
        prepared = await self.prepare(self.effective_filter(), 1)
        bundle = QueryBundle("warm up")
        given = partial(self._embedded, bundle, prepared.embed_model)
        await self._search.search(prepared, bundle.query_str, given, limit=1, deadline=None)

    async def _embedded(self, bundle: QueryBundle, model: BaseEmbedding | None) -> QueryBundle:
        if model is not None:
            warm = partial(model.get_query_embedding, bundle.query_str)
            bundle.embedding = await self._search.own.plain_call(Call(sync=warm, what="embedding model"))
        return bundle

    def _denied(self, why: str) -> DeniedError:
        return DeniedError(f"source {self.name!r} was not searched: its filter can't be applied ({why})")

    # -- fields ----------------------------------------------------------------------------------------------------

    def source_data(self, node: NodeWithScore) -> SourceData:
        """Give a node's document under uniform keys. Whom it is shared with is not told to its readers."""
        data = self.fields.data(node)
        if self.permissions is not None:
            data.metadata = self.permissions.without(data.metadata)
        return data


async def _as_given(bundle: QueryBundle) -> QueryBundle:
    return bundle
