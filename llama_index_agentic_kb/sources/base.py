"""A knowledge source: one thing that can be searched, its fields, its filters and its bulkhead.

This is the one place where the effective filter of a search is computed (mandatory AND caller AND planner; no plan
makes filters yet) and where each returned node is checked against it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, IndexNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters
from pydantic_core import to_jsonable_python

from llama_index_agentic_kb._flow import Call, Flow, WorkerPool
from llama_index_agentic_kb.account.callbacks import guard_component
from llama_index_agentic_kb.errors import ConfigurationError, DeniedError, RetrievalError
from llama_index_agentic_kb.schema import FilterNode, SourceData, all_of, matches
from llama_index_agentic_kb.sources.filters import FilterLike, lower, to_tree
from llama_index_agentic_kb.sources.index import (
    has_native_async,
    index_retriever,
    query_embedding_model,
    score_scale,
    search_kind,
    takes_filters,
)
from llama_index_agentic_kb.sources.recursion import own_recursion, resolve_index_nodes

__all__ = [
    "KnowledgeSource",
    "NodeKey",
    "NodeList",
    "PreparedSource",
    "SearchResult",
    "distinct_nodes",
    "node_key",
]

MANY: Final = 200
"""Nodes that are looked through on the event loop at a time: about 2 ms."""

NodeKey: TypeAlias = tuple[str, str]
"""A node's id and text."""

RetrieverFactory = Callable[[MetadataFilters | None], BaseRetriever]


@dataclass(frozen=True, slots=True)
class NodeList:
    """One ranked list of a search: a source may search in several ways at once.

    Args:
        kind: "dense", "lexical", "hybrid" (the store's own), or "retriever" (its way is its own).
        nodes: Best first, every one checked against the effective filter; wrappers of our own.
        scale: Lists of one scale have scores that can be compared; None is a scale of its own.
        weight: How much it counts beside the search's other lists.
        candidates: How many the source returned.
        dropped_by_filter: How many of these broke the filter.
        elapsed_ms: How long it took; None where it was not taken apart from the search.
        error: Why it has no nodes, where it failed; the search goes on with the others.
        note: What else should be known of it: that it was searched exactly, or again with more candidates.
    """

    kind: str
    nodes: list[NodeWithScore]
    scale: Hashable | None = None
    weight: float = 1.0
    candidates: int = 0
    dropped_by_filter: int = 0
    elapsed_ms: int | None = None
    error: Exception | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What one search gave: its ranked lists, not fused yet."""

    lists: tuple[NodeList, ...]

    @property
    def nodes(self) -> list[NodeWithScore]:
        """The nodes of all lists, each once, in the lists' order."""
        return distinct_nodes(self.lists)

    @property
    def candidates(self) -> int:
        """How many nodes the source returned, in all lists."""
        return sum(ranked.candidates for ranked in self.lists)

    @property
    def dropped_by_filter(self) -> int:
        """How many of these broke the filter."""
        return sum(ranked.dropped_by_filter for ranked in self.lists)


def distinct_nodes(lists: Sequence[NodeList]) -> list[NodeWithScore]:
    """Give the nodes of several lists, each once (by id and text), where it comes first."""
    nodes = {node_key(node.node): node for ranked in reversed(lists) for node in reversed(ranked.nodes)}
    return list(reversed(nodes.values()))


def node_key(node: BaseNode) -> NodeKey:
    """Give what tells nodes apart: the same text under two ids stays two, and one id with two texts as well."""
    return node.node_id, node.get_content(metadata_mode=MetadataMode.NONE)


@dataclass(frozen=True, slots=True)
class PreparedSource:
    """A source's retriever for one effective filter."""

    retriever: BaseRetriever
    filters: FilterNode | None
    embed_model: BaseEmbedding | None
    scale: Hashable | None
    """Searches of one scale have scores that can be compared."""
    kind: str = "retriever"
    """What its list is called; see ``NodeList``."""

    def result(self, nodes: list[NodeWithScore], candidates: int, dropped: int = 0) -> SearchResult:
        """Give the result of a search that gave one list."""
        return SearchResult((NodeList(self.kind, nodes, self.scale, 1.0, candidates, dropped),))


class KnowledgeSource:
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
        title_field: Metadata key of a document's title. Default "title", then the file name.
        content_field: Metadata key of the content to cite; None is the node's text.
        url_field: Metadata key of a document's URL. Default "url".
        key_field: Metadata key of a document's key; None is the source document's id.
        terms_field: Metadata key of a document's terms, shown in extracts; None shows none.
        weight: How much its results count in fusion beside those of others. Above 0. Default 1.
        similarity_top_k: Documents of each search; None is the effort's own number.
        always_query: Whether each sub-query goes to it, whatever the planner chose.
        timeout: Seconds that one search may take; None is the effort's own number.
        max_concurrency: Searches of this source that run on threads at once; more wait their turn. Native async
            searches hold no thread and are not counted. Default 8.
        native_async: Whether ``aretrieve`` really awaits; None finds out as far as it can. A source that blocks the
            event loop in its async method should be given False. An async-only retriever raises NotImplementedError
            from ``_retrieve``: sync calls then take its async way.

    Raises:
        ConfigurationError: Not exactly one of index, retriever and retriever_factory is given, or a field is unusable.
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
        title_field: str = "title",
        content_field: str | None = None,
        url_field: str = "url",
        key_field: str | None = None,
        terms_field: str | None = None,
        weight: float = 1.0,
        similarity_top_k: int | None = None,
        always_query: bool = False,
        timeout: float | None = None,
        max_concurrency: int = 8,
        native_async: bool | None = None,
    ) -> None:
        further = dict(retriever_kwargs or {})
        similarity_top_k = similarity_top_k or further.pop("similarity_top_k", None)
        _check(name, weight, similarity_top_k, timeout, max_concurrency)
        if sum(given is not None for given in (index, retriever, retriever_factory)) != 1:
            raise ConfigurationError(f"source {name!r}: give exactly one of index, retriever and retriever_factory")
        self.name = name
        self.description = description
        self.kind = kind
        self.mandatory = all_of(to_tree(filters), to_tree(further.pop("filters", None)))
        self.title_field = title_field
        self.content_field = content_field
        self.url_field = url_field
        self.key_field = key_field
        self.terms_field = terms_field
        self.weight = weight
        self.similarity_top_k = similarity_top_k
        self.always_query = always_query
        self.timeout = timeout
        self._index = index
        self._retriever = retriever
        self._factory = retriever_factory
        self._retriever_kwargs = further
        self._native_async = native_async
        self._pool = WorkerPool(f"source-{name}", max_workers=max_concurrency)

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

    @property
    def prepares_at_once(self) -> bool:
        """Whether ``prepare`` calls nothing of the user's that may take its time."""
        return self._factory is None

    def prepare(self, filters: FilterNode | None, top_k: int) -> Flow[PreparedSource]:
        """Give a retriever that applies the effective filter.

        Args:
            filters: What ``effective_filter`` gave.
            top_k: Documents of a search, unless the source has a number of its own.

        Raises:
            DeniedError: The filter can't be applied to this source.
        """
        top_k = self.similarity_top_k or top_k
        if self._index is not None:
            if filters is not None and not takes_filters(self._index):
                raise self._denied(f"{type(self._index).__name__} ignores filters")
            retriever = own_recursion(index_retriever(self._index, filters, top_k, self._retriever_kwargs))
        elif self._factory is not None:
            make = partial(self._factory, None if filters is None else lower(filters))
            retriever = yield Call(sync=make, pool=self._pool, what=f"retriever factory of source {self.name!r}")
        elif filters is not None:
            raise self._denied("a plain retriever can't take filters; use retriever_factory")
        else:
            assert self._retriever is not None
            retriever = self._retriever
        model, scale, kind = query_embedding_model(retriever), score_scale(retriever), search_kind(retriever)
        return PreparedSource(retriever, filters, model, scale, kind)

    def search(
        self, prepared: PreparedSource, bundle: QueryBundle, *, top_k: int, deadline: float | None
    ) -> Flow[SearchResult]:
        """Search with a fresh bundle and check what comes back.

        Args:
            prepared: What ``prepare`` gave.
            bundle: The query; its vector is used where the retriever wants one.
            top_k: Documents to keep, unless the source has a number of its own.
            deadline: ``time.monotonic()`` at which it is given up.

        Raises:
            RetrievalError: The source returned something that is no list of nodes.
            DeadlineExceededError: It did not answer in time.
        """
        retriever = guard_component(prepared.retriever)
        found = yield from self._retrieve(retriever, bundle, deadline)
        limit = self.similarity_top_k or top_k
        if prepared.filters is None and isinstance(found, list) and not any(_stands_for_more(n) for n in found[:limit]):
            return prepared.result(_scored(found[:limit], self.name), len(found))
        nodes = yield from self._at_leisure(partial(_scored, found, self.name), found, deadline)
        nodes = yield from resolve_index_nodes(retriever, nodes, bundle, deadline=deadline, pool=self._pool)
        kept = yield from self._at_leisure(partial(_passing, nodes, prepared.filters), nodes, deadline)
        return prepared.result(kept[:limit], len(nodes), len(nodes) - len(kept))

    def _at_leisure(self, work: Callable[[], Any], over: Any, deadline: float | None) -> Flow[Any]:
        """Do work over nodes; over very many of them off the event loop, which it would hold up."""
        if not isinstance(over, Sequence) or len(over) <= MANY:
            return work()
        return (yield Call(sync=work, deadline=deadline, pool=self._pool, what=f"checking source {self.name!r}"))

    def _retrieve(self, retriever: BaseRetriever, bundle: QueryBundle, deadline: float | None) -> Flow[Any]:
        native = has_native_async(retriever) if self._native_async is None else self._native_async
        what = f"source {self.name!r}"
        aretrieve = partial(retriever.aretrieve, bundle)
        try:
            return (
                yield Call(
                    sync=partial(retriever.retrieve, bundle),
                    native=aretrieve if native else None,
                    deadline=deadline,
                    pool=self._pool,
                    what=what,
                )
            )
        except NotImplementedError:
            if not native:
                raise
            return (yield Call(native=aretrieve, deadline=deadline, what=what))  # async only, called from sync

    def warm_up(self) -> Flow[None]:
        """Load what the first search would have to load: embedding model and store. What fails is left to it."""
        if self._index is None or (self.mandatory is not None and not takes_filters(self._index)):
            return
        prepared = yield from self.prepare(self.effective_filter(), 1)
        bundle = QueryBundle("warm up")
        if prepared.embed_model is not None:
            warm = partial(prepared.embed_model.get_query_embedding, bundle.query_str)
            bundle.embedding = yield Call(sync=warm, pool=self._pool, what="embedding model")
        yield from self._retrieve(prepared.retriever, bundle, None)

    def _denied(self, why: str) -> DeniedError:
        return DeniedError(f"source {self.name!r} was not searched: its filter can't be applied ({why})")

    # -- fields ----------------------------------------------------------------------------------------------------

    def source_data(self, node: NodeWithScore) -> SourceData:
        """Give a node's document under uniform keys."""
        inner = node.node
        metadata = inner.metadata
        content = metadata.get(self.content_field) if self.content_field else None
        key = metadata.get(self.key_field) if self.key_field else None
        if key is None or key == "":
            key = inner.ref_doc_id or inner.node_id
        title = metadata.get(self.title_field) or metadata.get("file_name") or key
        url = metadata.get(self.url_field)
        terms = metadata.get(self.terms_field) if self.terms_field else None
        return SourceData(
            doc_key=str(key),
            title=str(title),
            content=str(content) if content else inner.get_content(metadata_mode=MetadataMode.NONE),
            url=str(url) if url else None,
            terms=", ".join(map(str, terms)) if isinstance(terms, (list, tuple)) else str(terms or "") or None,
            metadata={name: _plain(value) for name, value in metadata.items() if not name.startswith("_")},
        )


def _check(name: str, weight: float, top_k: int | None, timeout: float | None, concurrency: int) -> None:
    if not name.strip():
        raise ConfigurationError("a source's name must not be empty")
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigurationError(f"source {name!r}: weight must be above 0, got {weight}")
    for field, value in (("similarity_top_k", top_k), ("timeout", timeout), ("max_concurrency", concurrency)):
        if value is not None and value <= 0:
            raise ConfigurationError(f"source {name!r}: {field} must be above 0, got {value}")


def _plain(value: Any) -> Any:
    """Give a value of the metadata as JSON has it; what is none of JSON's as text."""
    try:
        return to_jsonable_python(value, fallback=str, inf_nan_mode="null")
    except ValueError:  # it holds itself, or bytes that are no text
        return str(value)


def _stands_for_more(node: Any) -> bool:
    return isinstance(getattr(node, "node", None), IndexNode)


def _passing(nodes: list[NodeWithScore], filters: FilterNode | None) -> list[NodeWithScore]:
    return nodes if filters is None else [node for node in nodes if matches(filters, node.node.metadata)]


def _scored(found: Any, source: str) -> list[NodeWithScore]:
    """Give our own wrappers of what a source returned; scores that are no numbers become None."""
    if (
        isinstance(found, str)
        or not isinstance(found, Sequence)
        or not all(isinstance(node, NodeWithScore) for node in found)
    ):
        raise RetrievalError(f"source {source!r} returned no list of NodeWithScore: {type(found).__name__}")
    return [
        NodeWithScore(node=n.node, score=n.score if n.score is not None and math.isfinite(n.score) else None)
        for n in found
    ]
