"""Queries over a source's metadata without a question: facets, counts, groups and lists of documents.

The metadata are read under the source's effective filter: as a stream from a ``metadata_reader``, else all at once from
the index. Queries count *units*: a document (the metadata of all its chunks) or a chunk. A unit counts once for each
distinct value; each item of a list is a value. Values are texts, numbers and booleans; anything else is ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar, get_args

from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from llama_index_agentic_kb._aio import Call, WorkerPool, arun, bridged, deadline_after
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError, InvalidRequestError, RetrievalError
from llama_index_agentic_kb.guard.permissions import RESERVED
from llama_index_agentic_kb.schema import FilterGroup, FilterLogic, FilterNode, Principal, all_of, matcher
from llama_index_agentic_kb.schema.filters import conditions, flat
from llama_index_agentic_kb.search.filters import FilterLike, to_tree
from llama_index_agentic_kb.sources.base import KnowledgeSource, MetadataReader
from llama_index_agentic_kb.sources.facets import (
    Facet,
    FacetBucket,
    Metadata,
    MetadataRow,
    OrderBy,
    Per,
    SourceDocument,
    ValueGroup,
    facet_buckets,
    list_documents,
    sort_key,
    units,
    value_buckets,
    value_groups,
)
from llama_index_agentic_kb.sources.index import refusal, with_request_timeouts
from llama_index_agentic_kb.sources.stores import kind_of

T = TypeVar("T")

Counts: TypeAlias = Callable[..., list[tuple[Any, int]] | None]
"""`StoreKind.counts` of a store under a filter."""
OwnQuery: TypeAlias = Callable[[KnowledgeSource, Counts], T | None]
"""Asks the store of a source; None if it can't answer."""

_EVERY: Final = 256  # rows between two checks of the deadline
_POOL: Final = WorkerPool("metadata", max_workers=4)


# -- reading ----------------------------------------------------------------------------------------------------------


async def over_metadata(
    source: KnowledgeSource,
    work: Callable[[Iterator[MetadataRow]], T],
    filters: FilterNode | None,
    *,
    principal: Principal | None,
    deadline: float | None,
    own: OwnQuery[T] | None = None,
) -> T:
    """Run a function on a thread over the metadata of all chunks that a principal may see and that pass the filters.

    The rows have no permission fields, which readers may not count. They are read under the caller's filter and the
    mandatory filter, and each is checked here. ``own`` asks the source's store for the result; where that can't
    count, the rows are read. See `MetadataQueries` for the errors.
    """
    effective = source.effective_filter(all_of(source.permitted(principal), filters))
    read, permissions = metadata_reader(source, effective), source.permissions

    def read_all() -> T:
        try:
            counted = None if own is None else _asked_store(source, effective, own)
            if counted is not None:
                return counted
            with closing(_passing(read(), effective, deadline)) as rows:
                if permissions is None:
                    return work(rows)
                return work(MetadataRow(row.document, permissions.without(row.metadata)) for row in rows)
        except AgenticKBError:
            raise
        except Exception as error:
            message = error_message(error)
            raise RetrievalError(f"the metadata of source {source.name!r} could not be read: {message}") from error

    return await Call(sync=read_all, deadline=deadline, pool=_POOL, what=f"metadata of source {source.name!r}")


def _asked_store(source: KnowledgeSource, filters: FilterNode | None, own: OwnQuery[T]) -> T | None:
    """Return what the source's store itself answers under a filter; None if rows must be read."""
    index = source.index
    if source.metadata_reader or not isinstance(index, VectorStoreIndex) or refusal(index, filters) is not None:
        return None
    # Under reserved keys a store keeps texts of its own, with all metadata in them: rows have none of these.
    if filters is not None and any(one.key in RESERVED for one in conditions(filters)):
        return None
    kind = kind_of(index.vector_store)
    if source.permissions is not None and not kind.counts_exactly:
        return None
    return own(source, partial(kind.counts, index.vector_store, filters))


def _own_facets(
    source: KnowledgeSource, counts: Counts, *, facets: Sequence[Facet], limit: int, per: Per
) -> dict[str, list[FacetBucket]] | None:
    found: dict[str, list[FacetBucket]] = {}
    for facet in facets:
        hidden = facet.field in RESERVED or (source.permissions and source.permissions.declares(facet.field))
        counted = None
        if facet.ranges is None and not hidden:  # else a row's values do not count alone
            counted = counts(facet.field, documents=per == "document")
        if counted is None:
            return None
        found[facet.field] = value_buckets(counted, limit)
    return found


def _passing(
    rows: Iterable[tuple[str, Metadata]], filters: FilterNode | None, deadline: float | None
) -> Generator[MetadataRow, None, None]:
    passes = None if filters is None else matcher(filters)
    try:
        for number, (document, metadata) in enumerate(rows):
            if deadline is not None and number % _EVERY == 0 and time.monotonic() > deadline:
                raise DeadlineExceededError("the metadata were still being read when the time was over")
            if passes is None or passes(metadata):
                yield MetadataRow(document, metadata)
    finally:
        close = getattr(rows, "close", None)  # a generator may hold a connection
        if close is not None:
            close()


def metadata_reader(source: KnowledgeSource, filters: FilterNode | None) -> MetadataReader:
    """Return the source's own reader of metadata, or one of its index, which may apply the filter to save reading."""
    if source.metadata_reader is not None:
        return source.metadata_reader
    if shards := getattr(source, "shards", ()):  # each reads under the filter; a document is whole in one of them
        readers = [metadata_reader(shard, filters) for shard in shards]
        return lambda: chain.from_iterable(read() for read in readers)
    index = source.index
    offered = getattr(getattr(index, "vector_store", None), "metadata_rows", None)
    if offered is not None:  # a knowledge store, which reads under the filter
        return partial(offered, filters)
    if isinstance(index, VectorStoreIndex):
        store = with_request_timeouts(index.vector_store)
        if isinstance(store, SimpleVectorStore):  # the docstore may be shared, and keeps what was deleted here
            return lambda: _rows(index.docstore.get_nodes(list(store.data.embedding_dict)))
        if not store.stores_text or index._store_nodes_override:  # noqa: SLF001 (no public name)
            return lambda: _rows(index.docstore.get_nodes(list(index.index_struct.nodes_dict.values())))
        kind = kind_of(store)
        if kind.lists or type(store).get_nodes is not BasePydanticVectorStore.get_nodes:
            return lambda: _rows(kind.nodes(store, _pushed(index, filters)))
    raise InvalidRequestError(
        f"source {source.name!r} can't list what it holds: that takes a store made by `agentic-kb ingest`, a "
        "VectorStoreIndex that keeps its nodes, or KnowledgeSource(metadata_reader=...)"
    )


def _pushed(index: VectorStoreIndex, filters: FilterNode | None) -> FilterNode | None:
    """Return the part of a filter that the store can apply itself; all rows are checked again anyway.

    The check reads the nodes' metadata, but a grant may have been removed only from the store's row.
    """
    if filters is None:
        return None
    tree = flat(filters)
    parts = tree.filters if isinstance(tree, FilterGroup) and tree.logic is FilterLogic.AND else [tree]
    return all_of(*(part for part in parts if refusal(index, part) is None))


def _rows(nodes: Iterable[BaseNode]) -> list[tuple[str, Metadata]]:
    distinct = {node.node_id: node for node in nodes}.values()
    return sorted(((node.ref_doc_id or node.node_id, node.metadata) for node in distinct), key=lambda row: row[0])


# -- the queries ------------------------------------------------------------------------------------------------------


class MetadataQueries:
    """Facets, counts, groups and lists over the metadata of index sources; a mixin of ``KnowledgeBase``.

    Every method reads all rows that pass the filters of the source, the knowledge base and the caller, unless the store
    counts them itself. Of a knowledge store, or a ``metadata_reader``, memory is bounded by the size of the result and
    the number of distinct values; the metadata of other stores are read at once.

    Every method raises:
        DeniedError: The principal may not see the source, or a required principal is missing.
        InvalidRequestError: The source is unknown or can't list its documents, or an argument is invalid.
        RetrievalError: Reading the metadata failed.
        DeadlineExceededError: The query took longer than the knowledge base's ``max_runtime_in_seconds``.
    """

    @property
    def sources(self) -> Mapping[str, KnowledgeSource]:
        """The sources by name."""
        raise NotImplementedError

    def _standing(self) -> tuple[FilterNode | None, float | None]:
        """Return the knowledge base's own filter, and the maximum duration of a query in seconds."""
        raise NotImplementedError

    def _resolve_principal(self, given: Principal | None) -> Principal | None:
        """Return the principal of a request: passed to it, bound to the knowledge base, or set in the context."""
        raise NotImplementedError

    async def afacets(
        self,
        source: str,
        fields: str | Facet | Sequence[str | Facet],
        *,
        filters: FilterLike = None,
        limit: int = 10,
        per: Per = "document",
        principal: Principal | None = None,
    ) -> dict[str, list[FacetBucket]]:
        """Count the values, or ranges of values, of metadata fields; the class documents the errors.

            kb.facets("films", ["genre", Facet("year", ranges=[1990, 2000])], filters="country eq 'IT'")

        Args:
            source: The source's name.
            fields: Metadata keys, or a ``Facet`` for ranges; no field may occur twice.
            filters: A filter for the chunks to count; a filter tree, ``MetadataFilters`` or OData text.
            limit: The maximum number of values per field. Default 10.
            per: The unit to count, "document" or "chunk". Default "document".
            principal: The principal of the request; see ``KnowledgeBase.retrieve``.

        Returns:
            The buckets of each field: values by descending count, then ascending value; ranges ascending.
        """
        _check(limit=limit, per=per)
        given: list[Any] = [fields] if isinstance(fields, (str, Facet)) else list(fields)
        facets: list[Any] = [Facet(one) if isinstance(one, str) else one for one in given]
        if not facets or not all(isinstance(one, Facet) and one.field for one in facets):
            raise InvalidRequestError(f"fields: expected metadata keys or Facet, got {fields!r}")
        if len({one.field for one in facets}) < len(facets):
            raise InvalidRequestError("fields: a field is given twice; ask for its other facet in a second call")
        work = partial(facet_buckets, facets=facets, limit=limit, per=per)
        own = partial(_own_facets, facets=facets, limit=limit, per=per)
        return await self._over(source, work, filters, principal, own)

    facets = bridged(afacets)

    async def acount(
        self, source: str, *, filters: FilterLike = None, per: Per = "document", principal: Principal | None = None
    ) -> int:
        """Count the documents or chunks that pass a filter; see ``facets`` for the arguments."""
        _check(per=per)

        def own(_source: KnowledgeSource, counts: Counts) -> int | None:
            counted = counts(None, documents=per == "document")
            return None if counted is None else counted[0][1]

        return await self._over(source, lambda rows: sum(1 for _ in units(rows, per)), filters, principal, own)

    count = bridged(acount)

    async def agroup_by(
        self,
        source: str,
        field: str,
        *,
        filters: FilterLike = None,
        limit: int = 10,
        per: Per = "document",
        hits: int = 3,
        order_by: OrderBy = (),
        principal: Principal | None = None,
    ) -> list[ValueGroup]:
        """Group documents by the values of a field: the most frequent values, each with its first documents.

        Args:
            source: The source's name.
            field: The metadata key; a document with a list belongs to the group of each item.
            filters: A filter for the chunks to group; a filter tree, ``MetadataFilters`` or OData text.
            limit: The maximum number of values, most frequent first. Default 10.
            per: The unit to count, "document" or "chunk". Default "document".
            hits: The maximum number of documents per value; 0 only counts. Default 3.
            order_by: The order of the documents; see ``documents``.
            principal: The principal of the request; see ``KnowledgeBase.retrieve``.
        """
        _check(limit=limit, per=per, hits=hits)
        order = sort_key(order_by)
        work = partial(value_groups, field=field, limit=limit, per=per, hits=hits, order=order)
        return await self._over(source, work, filters, principal)

    group_by = bridged(agroup_by)

    async def adocuments(
        self,
        source: str,
        *,
        filters: FilterLike = None,
        order_by: OrderBy = (),
        limit: int = 100,
        offset: int = 0,
        principal: Principal | None = None,
    ) -> list[SourceDocument]:
        """Return one page of a source's documents.

        Args:
            source: The source's name.
            filters: A filter for the chunks to list; a filter tree, ``MetadataFilters`` or OData text.
            order_by: Sort fields in order of priority: "year", "year desc", or ("year", "desc"). Booleans come before
                numbers, numbers before text, documents without the field last. Ties are sorted by ID.
            limit: The maximum number of documents. Default 100.
            offset: The number of documents to skip. Default 0.
            principal: The principal of the request; see ``KnowledgeBase.retrieve``.
        """
        _check(limit=limit, offset=offset)
        work = partial(list_documents, order=sort_key(order_by), limit=limit, offset=offset)
        return await self._over(source, work, filters, principal)

    documents = bridged(adocuments)

    async def _over(
        self,
        source: str,
        work: Callable[[Iterator[MetadataRow]], T],
        filters: FilterLike,
        principal: Principal | None,
        own: OwnQuery[T] | None = None,
    ) -> T:
        if source not in self.sources:
            raise InvalidRequestError(f"no source is named {source!r}; there are: {', '.join(self.sources)}")
        standing, seconds = self._standing()
        given = to_tree(filters)
        self.sources[source].refuse_hidden(given)
        caller, asking = all_of(standing, given), self._resolve_principal(principal)
        deadline = deadline_after(seconds)
        source_of = self.sources[source]
        return await arun(over_metadata(source_of, work, caller, principal=asking, deadline=deadline, own=own))


def _check(*, limit: int = 1, offset: int = 0, hits: int = 0, per: str = "document") -> None:
    numbers: tuple[tuple[str, object, int], ...] = (("limit", limit, 1), ("offset", offset, 0), ("hits", hits, 0))
    for name, value, minimum in numbers:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InvalidRequestError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    if per not in get_args(Per):
        raise InvalidRequestError(f"per must be one of {', '.join(get_args(Per))}, got {per!r}")
