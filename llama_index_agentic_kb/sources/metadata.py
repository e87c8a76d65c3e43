"""Queries over a source's metadata without a question: facets, counts, groups and lists of documents.

The metadata are read under the source's effective filter: as a stream from a ``metadata_reader``, else all at once from
the index. Queries count *units*: a document (the metadata of all its chunks) or a chunk. A unit counts once for each
distinct value; each item of a list is a value. Values are texts, numbers and booleans; anything else is ignored.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, pairwise
from operator import attrgetter
from typing import Final, Literal, NamedTuple, TypeAlias, TypeGuard, TypeVar, get_args

from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from llama_index_agentic_kb._aio import Call, WorkerPool, arun, bridged, deadline_after
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError, InvalidRequestError, RetrievalError
from llama_index_agentic_kb.guard.permissions import RESERVED
from llama_index_agentic_kb.schema import FilterGroup, FilterLogic, FilterNode, Principal, all_of, matcher, value_key
from llama_index_agentic_kb.schema.filters import Scalar, conditions, flat
from llama_index_agentic_kb.search.filters import FilterLike, to_tree
from llama_index_agentic_kb.sources.base import KnowledgeSource, MetadataReader
from llama_index_agentic_kb.sources.index import kind_of
from llama_index_agentic_kb.sources.stores import Counts, StoreKind

T = TypeVar("T")

Per: TypeAlias = Literal["document", "chunk"]
"""The unit to count."""
OrderBy: TypeAlias = Sequence[str | Sequence[str]]
"""Sort fields in order of priority: "year", "year desc", or ("year", "desc"). Documents without the field are last."""
SortKey: TypeAlias = Callable[["SourceDocument"], tuple[object, ...]]
Value: TypeAlias = tuple[bool, Scalar]
"""The ``value_key`` of a value."""


class MetadataRow(NamedTuple):
    """The metadata of one chunk, and the ID of its document. Rows of one document are consecutive."""

    document: str
    metadata: JsonMapping


def units(rows: Iterable[MetadataRow], per: Per) -> Iterator[list[MetadataRow]]:
    """Return the rows grouped by document, or each row on its own."""
    if per == "chunk":
        return ([row] for row in rows)
    return (list(together) for _, together in groupby(rows, key=attrgetter("document")))


def _values(unit: Iterable[MetadataRow], name: str) -> set[Value]:
    """Return the distinct values of a field in a unit."""
    found = set[Value]()
    for row in unit:
        value = row.metadata.get(name)
        listed = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
        found.update(map(value_key, filter(_is_value, listed)))
    return found


def _is_value(value: object) -> TypeGuard[Scalar]:
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def _rank(value: Scalar) -> tuple[int, Scalar]:
    """Return the sort key of a value of any type: booleans come first, then numbers, then text."""
    return 2 if isinstance(value, str) else 0 if isinstance(value, bool) else 1, value


@dataclass(frozen=True, slots=True)
class Facet:
    """A field whose values, or ranges of values, are to be counted.

    Args:
        field: The metadata key.
        ranges: Ascending boundaries, all numbers or all text (ISO dates): ``[10, 20]`` counts below 10, from 10 to
            below 20, and from 20.

    Raises:
        InvalidRequestError: ``ranges`` is invalid.
    """

    field: str
    ranges: Sequence[float | str] | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.ranges is None:
            return
        kinds = {_rank(one)[0] if _is_value(one) else None for one in self.ranges}
        alike = not isinstance(self.ranges, str) and len(kinds) == 1 and kinds <= {1, 2}
        if not alike or any(_rank(one) >= _rank(other) for one, other in pairwise(self.ranges)):
            raise InvalidRequestError(
                f"facet {self.field!r}: ranges must be ascending boundaries, all numbers or all text, got "
                f"{list(self.ranges)!r}"
            )


@dataclass(frozen=True, slots=True)
class FacetBucket:
    """The number of units that have a value, or one in a range from ``start`` (inclusive) to ``end`` (exclusive).

    An unbounded end of a range is None. A count of 0 is possible only for given ranges.
    """

    count: int
    value: Scalar | None = None
    start: float | str | None = None
    end: float | str | None = None


def _most_frequent(counts: Counter[Value], limit: int) -> list[FacetBucket]:
    """Return the most frequent values by count; of equally frequent values, the smaller comes first."""
    best = heapq.nsmallest(limit, counts.items(), key=lambda item: (-item[1], _rank(item[0][1])))
    return [FacetBucket(count, value=value) for (_, value), count in best]


def _ranges(counts: Counter[Value], bounds: Sequence[float | str]) -> list[FacetBucket]:
    edges = enumerate(pairwise([None, *bounds, None]))
    return [FacetBucket(counts[False, at], start=start, end=end) for at, (start, end) in edges]


def facet_buckets(
    rows: Iterable[MetadataRow], *, facets: Sequence[Facet], limit: int, per: Per
) -> dict[str, list[FacetBucket]]:
    """Return the buckets of each facet, by field, counted in one pass; see ``MetadataQueries.afacets``."""
    counted = [(facet, Counter[Value](), list(map(_rank, facet.ranges or ()))) for facet in facets]
    for unit in units(rows, per):
        for facet, counts, bounds in counted:
            found = _values(unit, facet.field)
            if bounds:  # a value of another type belongs to no range
                ranks = [_rank(value) for _, value in found]
                found = {(False, bisect_right(bounds, rank)) for rank in ranks if rank[0] == bounds[0][0]}
            counts.update(found)
    return {
        facet.field: _most_frequent(counts, limit) if facet.ranges is None else _ranges(counts, facet.ranges)
        for facet, counts, _ in counted
    }


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document of a source: the number of its chunks that pass a filter, and the metadata that these agree in.

    ``document_id`` is the ``ref_doc_id`` of its nodes. Keys that begin with "_" are left out.
    """

    document_id: str
    chunks: int
    metadata: JsonObject


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """The number of units that have a value of a field, and the first documents with it in the requested order."""

    value: Scalar
    count: int
    documents: list[SourceDocument] = field(default_factory=list)


def list_documents(rows: Iterable[MetadataRow], *, order: SortKey, limit: int, offset: int) -> list[SourceDocument]:
    """Return one page of the sorted documents."""
    return heapq.nsmallest(offset + limit, map(_document, units(rows, "document")), key=order)[offset:]


def value_groups(
    rows: Iterable[MetadataRow], *, field: str, limit: int, per: Per, hits: int, order: SortKey
) -> list[ValueGroup]:
    """Return the most frequent values of a field, each with its first documents; see ``MetadataQueries.agroup_by``."""
    counts, best = Counter[Value](), dict[Value, list[SourceDocument]]()
    for unit in units(rows, "document"):
        for part in units(unit, per):
            counts.update(_values(part, field))
        if hits and (keys := _values(unit, field)):
            document = _document(unit)
            for key in keys:
                kept = best.setdefault(key, [])
                kept.append(document)
                if len(kept) > 4 * hits + 64:  # memory is bounded by the size of the result
                    kept[:] = heapq.nsmallest(hits, kept, key=order)
    return [
        ValueGroup(value, bucket.count, heapq.nsmallest(hits, best.get(value_key(value), []), key=order))
        for bucket in _most_frequent(counts, limit)
        if (value := bucket.value) is not None
    ]


def _document(unit: Sequence[MetadataRow]) -> SourceDocument:
    agreed = {key: value for key, value in unit[0].metadata.items() if not key.startswith("_")}
    for row in unit[1:]:
        agreed = {key: value for key, value in agreed.items() if key in row.metadata and row.metadata[key] == value}
    return SourceDocument(unit[0].document, len(unit), agreed)


def sort_key(order_by: OrderBy) -> SortKey:
    """Return a sort key for documents: by the fields, then by document ID.

    Raises:
        InvalidRequestError: An item is not a field with an optional direction.
    """
    order: list[tuple[str, bool]] = []
    for item in [order_by] if isinstance(order_by, str) else order_by:
        given = tuple(item) if isinstance(item, (list, tuple)) else (item, "asc")
        if isinstance(item, str) and item.endswith((" asc", " desc")):
            given = tuple(item.rsplit(" ", 1))
        match given:
            case (str(name), "asc" | "desc" as direction) if name:
                order.append((name, direction == "desc"))
            case _:
                raise InvalidRequestError(
                    f"order_by: expected 'field', 'field desc' or ('field', 'desc'), got {item!r}"
                )

    def key(document: SourceDocument) -> tuple[object, ...]:
        held = ((document.metadata.get(name), descending) for name, descending in order)
        return (*(_place(value, descending=descending) for value, descending in held), document.document_id)

    return key


def _place(value: object, *, descending: bool) -> tuple[object, ...]:
    """Return the sort key of a document by a value: one without a value comes last in either direction."""
    if not _is_value(value):
        return (1,)
    kind, held = _rank(value)
    if not descending:
        return 0, kind, held
    if isinstance(held, str):
        return 0, -kind, [*(-ord(letter) for letter in held), 1]  # the longer of two that begin alike comes first
    return 0, -kind, -held


# -- reading ----------------------------------------------------------------------------------------------------------

CountBy: TypeAlias = Callable[[str | None], Counts | None]
"""Returns the counts of a field's values, or that of all units, by a store; None if rows must be read."""

_EVERY: Final = 256  # rows between two checks of the deadline
_POOL: Final = WorkerPool("metadata", max_workers=4)


def _by_store(source: KnowledgeSource, filters: FilterNode | None, per: Per) -> CountBy | None:
    """Return what asks a source's store for counts under a filter; None if rows must be read."""
    index, permissions = source.index, source.permissions
    if source.metadata_reader or not isinstance(index, VectorStoreIndex) or source.refusal(filters) is not None:
        return None
    # Under reserved keys a store keeps texts of its own, with all metadata in them: rows have none of these.
    kind, keys = kind_of(index.vector_store), () if filters is None else {one.key for one in conditions(filters)}
    if not RESERVED.isdisjoint(keys) or not (permissions is None or kind.counts_exactly):
        return None

    def count(field: str | None) -> Counts | None:
        if field in RESERVED or (field and permissions and permissions.declares(field)):
            return None
        return kind.counts(filters, field, documents=per == "document")

    return count


def _passing(
    rows: Iterable[tuple[str, JsonMapping]], filters: FilterNode | None, deadline: float | None
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
    if shards := source.shards:  # each reads under the filter; a document is whole in one of them
        readers = [metadata_reader(shard, filters) for shard in shards]
        return lambda: chain.from_iterable(read() for read in readers)
    index = source.index
    offered = getattr(getattr(index, "vector_store", None), "metadata_rows", None)
    if offered is not None:  # a knowledge store, which reads under the filter
        return partial(offered, filters)
    if isinstance(index, VectorStoreIndex):
        kind = kind_of(index.vector_store)
        store = kind.store
        if isinstance(store, SimpleVectorStore):  # the docstore may be shared, and keeps what was deleted here
            return lambda: _rows(index.docstore.get_nodes(list(store.data.embedding_dict)))
        if not store.stores_text or index._store_nodes_override:  # noqa: SLF001 (no public name)
            return lambda: _rows(index.docstore.get_nodes(list(index.index_struct.nodes_dict.values())))
        if kind.lists or type(store).get_nodes is not BasePydanticVectorStore.get_nodes:
            return lambda: _rows(kind.nodes(_pushed(kind, filters)))
    raise InvalidRequestError(
        f"source {source.name!r} can't list what it holds: that takes a store made by `agentic-kb ingest`, a "
        "VectorStoreIndex that keeps its nodes, or KnowledgeSource(metadata_reader=...)"
    )


def _pushed(kind: StoreKind[BasePydanticVectorStore], filters: FilterNode | None) -> FilterNode | None:
    """Return the part of a filter that the store can apply itself; all rows are checked again anyway.

    The check reads the nodes' metadata, but a grant may have been removed only from the store's row.
    """
    if filters is None:
        return None
    tree = flat(filters)
    parts = tree.filters if isinstance(tree, FilterGroup) and tree.logic is FilterLogic.AND else [tree]
    return all_of(*(part for part in parts if kind.refusal(part) is None))


def _rows(nodes: Iterable[BaseNode]) -> list[tuple[str, JsonMapping]]:
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

    def _asking(self, principal: Principal | None) -> tuple[Principal | None, FilterNode | None, float | None]:
        """Return a request's principal, the knowledge base's own filter, and the maximum seconds of a query."""
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
        given = [fields] if isinstance(fields, (str, Facet)) else fields
        facets = [Facet(one) if isinstance(one, str) else one for one in given]
        if not facets or not all(getattr(one, "field", None) for one in facets):
            raise InvalidRequestError(f"fields: expected metadata keys or Facet, got {fields!r}")
        if len({one.field for one in facets}) < len(facets):
            raise InvalidRequestError("fields: a field is given twice; ask for its other facet in a second call")
        work = partial(facet_buckets, facets=facets, limit=limit, per=per)

        def own(count: CountBy) -> dict[str, list[FacetBucket]] | None:
            found: dict[str, list[FacetBucket]] = {}
            for facet in facets:
                if facet.ranges is not None or (counted := count(facet.field)) is None:
                    return None
                values = {value_key(value): number for value, number in counted if _is_value(value)}
                found[facet.field] = _most_frequent(Counter(values), limit)
            return found

        return await self._over(source, work, filters, principal, own, per)

    facets = bridged(afacets)

    async def acount(
        self, source: str, *, filters: FilterLike = None, per: Per = "document", principal: Principal | None = None
    ) -> int:
        """Count the documents or chunks that pass a filter; see ``facets`` for the arguments."""
        _check(per=per)

        def own(count: CountBy) -> int | None:
            counted = count(None)
            return None if counted is None else counted[0][1]

        return await self._over(source, lambda rows: sum(1 for _ in units(rows, per)), filters, principal, own, per)

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

        A document whose field is a list belongs to the group of each item. There are at most ``limit`` values, the most
        frequent first, with ``hits`` documents of each (0: only counts) in the order that ``documents`` describes. See
        ``facets`` for the other arguments.
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
        """Return one page of a source's documents: at most ``limit``, without the first ``offset`` ones.

        ``order_by`` has sort fields in order of priority: "year", "year desc", or ("year", "desc"). Booleans come
        before numbers, numbers before text, documents without the field last. Ties are sorted by ID. See ``facets`` for
        the other arguments.
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
        own: Callable[[CountBy], T | None] | None = None,
        per: Per = "document",
    ) -> T:
        """Run a function on a thread over the metadata of all chunks that a principal may see and that pass.

        The rows have no permission fields, which readers may not count. They are read under the caller's filter and the
        mandatory filter, and each is checked here. ``own`` makes the result of what the source's store counts; where
        that can't count, the rows are read.
        """
        if source not in self.sources:
            raise InvalidRequestError(f"no source is named {source!r}; there are: {', '.join(self.sources)}")
        asked, given = self.sources[source], to_tree(filters)
        who, standing, seconds = self._asking(principal)
        asked.refuse_hidden(given)
        deadline, permissions = deadline_after(seconds), asked.permissions
        permitted = asked.permitted(who)
        effective = asked.effective_filter(all_of(permitted, standing, given))
        read = metadata_reader(asked, effective)

        def read_all() -> T:
            try:
                count = None if own is None else _by_store(asked, effective, per)
                if own is not None and count is not None and (counted := own(count)) is not None:
                    return counted
                with closing(_passing(read(), effective, deadline)) as rows:
                    if permissions is None:
                        return work(rows)
                    return work(MetadataRow(row.document, permissions.without(row.metadata)) for row in rows)
            except AgenticKBError:
                raise
            except Exception as error:
                message = error_message(error)
                raise RetrievalError(f"the metadata of source {source!r} could not be read: {message}") from error

        call = Call(sync=read_all, deadline=deadline, pool=_POOL, what=f"metadata of source {source!r}")
        return await arun(call.perform())


def _check(*, limit: int = 1, offset: int = 0, hits: int = 0, per: str = "document") -> None:
    numbers: tuple[tuple[str, object, int], ...] = (("limit", limit, 1), ("offset", offset, 0), ("hits", hits, 0))
    for name, value, minimum in numbers:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InvalidRequestError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    if per not in get_args(Per):
        raise InvalidRequestError(f"per must be one of {', '.join(get_args(Per))}, got {per!r}")
