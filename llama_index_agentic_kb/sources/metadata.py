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
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import partial, wraps
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Concatenate, Final, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast, get_args

from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from llama_index_agentic_kb._aio import Call, WorkerPool, arun, deadline_after, run
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError, InvalidRequestError, RetrievalError
from llama_index_agentic_kb.schema import FilterGroup, FilterLogic, FilterNode, Principal, all_of, matcher, value_key
from llama_index_agentic_kb.schema.filters import Scalar
from llama_index_agentic_kb.sources.base import KnowledgeSource, MetadataReader
from llama_index_agentic_kb.sources.filters import FilterLike, conditions, flat, to_tree
from llama_index_agentic_kb.sources.index import refusal, with_request_timeouts
from llama_index_agentic_kb.sources.stores import kind_of

T = TypeVar("T")

Metadata: TypeAlias = Mapping[str, Any]
Per: TypeAlias = Literal["document", "chunk"]
"""The unit to count."""
OrderBy: TypeAlias = Sequence[str | tuple[str, str]]
"""Sort fields in order of priority: "year", "year desc", or ("year", "desc"). Documents without the field are last."""
SortKey: TypeAlias = Callable[["SourceDocument"], Any]

_EVERY: Final = 256
"""The number of rows between two checks of the deadline."""
_PUSHED: Final = 100
"""The maximum number of filter values sent to a store in one request."""
_POOL: Final = WorkerPool("metadata", max_workers=4)
"""The threads that read metadata, separate from those of searches."""
_PERIODS: Final = ("year", "month", "day")


class MetadataRow(NamedTuple):
    """The metadata of one chunk, and the ID of its document. Rows of one document are consecutive."""

    document: str
    metadata: Metadata


# -- reading ----------------------------------------------------------------------------------------------------------


async def over_metadata(
    source: KnowledgeSource,
    work: Callable[[Iterator[MetadataRow]], T],
    filters: FilterNode | None,
    *,
    principal: Principal | None,
    deadline: float | None,
) -> T:
    """Run a function on a thread over the metadata of all chunks that pass a source's effective filter.

    Args:
        source: The source to read: through its ``metadata_reader``, else from its index.
        work: Takes the rows, without permission fields, which readers may not count.
        filters: The caller's filter, combined with the source's mandatory filter. Each row is checked here.
        principal: The principal of the request; only documents that it may see are read.
        deadline: The ``time.monotonic()`` value at which reading stops.

    Raises:
        DeniedError: The principal may not see the source.
        InvalidRequestError: The source can't list its documents.
        RetrievalError: Reading the metadata failed.
        DeadlineExceededError: The deadline passed while reading.
    """
    effective = source.effective_filter(all_of(source.permitted(principal), filters))
    read, permissions = metadata_reader(source, effective), source.permissions

    def read_all() -> T:
        try:
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
    """Return the source's own reader of metadata, or one of its index, which may apply the filter to save reading.

    Raises:
        InvalidRequestError: The source can't list its documents.
    """
    if source.metadata_reader is not None:
        return source.metadata_reader
    index = source.index
    if isinstance(index, VectorStoreIndex):
        store = with_request_timeouts(index.vector_store)
        if isinstance(store, SimpleVectorStore):  # the docstore may be shared, and keeps what was deleted here
            return lambda: _rows(index.docstore.get_nodes(list(store.data.embedding_dict)))
        if not store.stores_text or index._store_nodes_override:  # noqa: SLF001 (no public name)
            return lambda: _rows(index.docstore.get_nodes(list(index.index_struct.nodes_dict.values())))
        if type(store).get_nodes is not BasePydanticVectorStore.get_nodes:
            kind, asked = kind_of(store), _pushed(index, filters)
            return lambda: _rows({node.node_id: node for part in asked for node in kind.nodes(store, part)}.values())
    raise InvalidRequestError(
        f"source {source.name!r} can't list what it holds: that takes a store made by `agentic-kb ingest`, a "
        "VectorStoreIndex that keeps its nodes, or KnowledgeSource(metadata_reader=...)"
    )


def _pushed(index: VectorStoreIndex, filters: FilterNode | None) -> Sequence[FilterNode | None]:
    """Return the filters that the store can apply itself, one for each request; all rows are checked again anyway.

    The check reads the nodes' metadata, but a grant may have been removed only from the store's row. So a principal
    with hundreds of groups needs several requests.
    """
    if filters is None:
        return [None]
    tree = flat(filters)
    asked: list[list[FilterNode]] = [[]]
    for part in tree.filters if isinstance(tree, FilterGroup) and tree.logic is FilterLogic.AND else [tree]:
        pieces = [] if refusal(index, part) is not None else _pieces(part)
        if len(pieces) == 1 or len(asked) == 1:
            asked = [[*parts, piece] for parts in asked for piece in pieces] or asked
    return [all_of(*parts) for parts in asked]


def _pieces(part: FilterNode) -> list[FilterNode]:
    """Split a filter into alternatives (OR) small enough for a store; empty if it can't be split."""
    if _size(part) <= _PUSHED:
        return [part]
    if not isinstance(part, FilterGroup) or part.logic is not FilterLogic.OR or max(map(_size, part.filters)) > 1:
        return []
    starts = range(0, len(part.filters), _PUSHED)
    return [FilterGroup(logic=FilterLogic.OR, filters=part.filters[start : start + _PUSHED]) for start in starts]


def _size(part: FilterNode) -> int:
    return sum(len(condition.values) for condition in conditions(part))


def _rows(nodes: Iterable[BaseNode]) -> list[tuple[str, Metadata]]:
    return sorted(((node.ref_doc_id or node.node_id, node.metadata) for node in nodes), key=lambda row: row[0])


# -- units and values -------------------------------------------------------------------------------------------------


def _units(rows: Iterable[MetadataRow], per: Per) -> Iterator[list[MetadataRow]]:
    """Return the rows grouped by document, or each row on its own."""
    if per == "chunk":
        return ([row] for row in rows)
    return (list(together) for _, together in groupby(rows, key=attrgetter("document")))


def _values(unit: Iterable[MetadataRow], name: str) -> Iterator[Scalar]:
    """Yield all values of a field in a unit, duplicates included."""
    for row in unit:
        value = row.metadata.get(name)
        yield from filter(_is_value, value if isinstance(value, (list, tuple, set, frozenset)) else (value,))


def _keys(unit: Iterable[MetadataRow], name: str) -> set[tuple[bool, Scalar]]:
    """Return the keys of the distinct values of a field in a unit."""
    return {value_key(value) for value in _values(unit, name)}


def _is_value(value: Any) -> bool:
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def _rank(value: Scalar) -> tuple[int, Any]:
    """Return the sort key of a value of any type: booleans come first, then numbers, then text."""
    return 2 if isinstance(value, str) else 0 if isinstance(value, bool) else 1, value


# -- facets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facet:
    """A field whose values, or ranges of values, are to be counted.

    Args:
        field: The metadata key.
        limit: The maximum number of values, most frequent first. Defaults to the call's limit. Ignored for ranges.
        ranges: Ascending boundaries, all numbers or all text (ISO dates): ``[10, 20]`` counts below 10, from 10 to
            below 20, and from 20.
        interval: The width of equal numeric ranges starting at 0; or "year", "month" or "day" for ISO dates. Empty
            ranges are left out.

    Raises:
        InvalidRequestError: Both ``ranges`` and ``interval`` are given, or a value is invalid.
    """

    field: str
    limit: int | None = None
    ranges: Sequence[float | str] | None = None
    interval: float | str | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        problem, width = None, self.interval
        if self.limit is not None and self.limit < 1:
            problem = f"limit must be above 0, got {self.limit}"
        elif self.ranges is not None and width is not None:
            problem = "give ranges or an interval, not both"
        elif self.ranges is not None and not _ascending(self.ranges):
            problem = f"ranges must be ascending boundaries, all numbers or all text, got {list(self.ranges)!r}"
        elif width is not None and width not in _PERIODS and not (_is_number(width) and width > 0):  # type: ignore[operator]
            problem = f"interval must be a number above 0, or one of {', '.join(_PERIODS)}, got {width!r}"
        if problem:
            raise InvalidRequestError(f"facet {self.field!r}: {problem}")


def _is_number(value: Any) -> bool:
    return _is_value(value) and not isinstance(value, (bool, str))


def _ascending(boundaries: Sequence[Any]) -> bool:
    if isinstance(boundaries, str) or not boundaries:
        return False
    alike = all(isinstance(one, str) for one in boundaries) or all(map(_is_number, boundaries))
    return alike and all(one < other for one, other in pairwise(boundaries))


@dataclass(frozen=True, slots=True)
class FacetBucket:
    """The number of units that have a value, or a value within a range.

    Args:
        count: The number of units; 0 is possible only for given ranges.
        value: The value; None for a range.
        start: The inclusive start of the range; None if unbounded.
        end: The exclusive end of the range; None if unbounded.
    """

    count: int
    value: Scalar | None = None
    start: float | str | None = None
    end: float | str | None = None


class _Places(Protocol):
    """A rule that assigns values to buckets."""

    def place(self, value: Scalar) -> Hashable | None:
        """Return the key of a value's bucket; None if it belongs to no bucket."""

    def buckets(self, counts: Counter[Any]) -> list[FacetBucket]:
        """Return the buckets in order."""


def _most_frequent(counts: Counter[Any], limit: int) -> list[FacetBucket]:
    """Return the most frequent values by count; of equally frequent values, the smaller comes first."""
    best = heapq.nsmallest(limit, counts.items(), key=lambda item: (-item[1], _rank(item[0][1])))
    return [FacetBucket(count, value=value) for (_, value), count in best]


@dataclass(frozen=True, slots=True)
class _AllValues:
    limit: int

    def place(self, value: Scalar) -> Hashable:
        return value_key(value)

    def buckets(self, counts: Counter[Any]) -> list[FacetBucket]:
        return _most_frequent(counts, self.limit)


@dataclass(frozen=True, slots=True)
class _Ranges:
    boundaries: Sequence[Any]

    def place(self, value: Scalar) -> int | None:
        fits = not isinstance(value, bool) and isinstance(value, str) == isinstance(self.boundaries[0], str)
        return bisect_right(self.boundaries, value) if fits else None

    def buckets(self, counts: Counter[Any]) -> list[FacetBucket]:
        edges = pairwise([None, *self.boundaries, None])
        return [FacetBucket(counts[n], start=start, end=end) for n, (start, end) in enumerate(edges)]


@dataclass(frozen=True, slots=True)
class _Intervals:
    width: float

    def place(self, value: Scalar) -> int | None:
        if isinstance(value, (bool, str)):
            return None
        try:
            return math.floor(round(value / self.width, 9))  # without the noise of binary fractions: 0.3 is 3 times 0.1
        except OverflowError:
            return None

    def buckets(self, counts: Counter[Any]) -> list[FacetBucket]:
        return [FacetBucket(counts[n], start=self._edge(n), end=self._edge(n + 1)) for n in sorted(counts)]

    def _edge(self, number: int) -> float:
        edge = number * self.width
        return edge if isinstance(edge, int) else float(f"{edge:.12g}")


@dataclass(frozen=True, slots=True)
class _Periods:
    unit: str

    def place(self, value: Scalar) -> date | None:
        try:
            day = datetime.fromisoformat(value).date() if isinstance(value, str) else None
        except ValueError:
            return None
        if day is None or self.unit == "day":
            return day
        return day.replace(day=1) if self.unit == "month" else day.replace(month=1, day=1)

    def buckets(self, counts: Counter[Any]) -> list[FacetBucket]:
        return [FacetBucket(counts[day], start=day.isoformat(), end=self._next(day)) for day in sorted(counts)]

    def _next(self, day: date) -> str | None:
        """Return the first day of the next period; None after the year 9999."""
        try:
            if self.unit == "day":
                return date.fromordinal(day.toordinal() + 1).isoformat()
            month = day.month % 12 + 1 if self.unit == "month" else 1
            return day.replace(year=day.year + (month == 1), month=month).isoformat()
        except ValueError:
            return None


def _places(facet: Facet, limit: int) -> _Places:
    if facet.ranges is not None:
        return _Ranges(tuple(facet.ranges))
    if isinstance(facet.interval, str):
        return _Periods(facet.interval)
    return _AllValues(facet.limit or limit) if facet.interval is None else _Intervals(facet.interval)


def facet_buckets(
    rows: Iterable[MetadataRow], *, facets: Sequence[Facet], limit: int, per: Per
) -> dict[str, list[FacetBucket]]:
    """Count several facets in one pass.

    Args:
        rows: The metadata rows.
        facets: The facets to count.
        limit: The maximum number of values per facet, unless a facet sets its own.
        per: The unit to count: "document" or "chunk".

    Returns:
        The buckets of each facet, by field: values by descending count, then ascending value; ranges ascending.
    """
    counted: list[tuple[str, _Places, Counter[Any]]] = [(one.field, _places(one, limit), Counter()) for one in facets]
    for unit in _units(rows, per):
        for name, places, counts in counted:
            counts.update({key for value in _values(unit, name) if (key := places.place(value)) is not None})
    return {name: places.buckets(counts) for name, places, counts in counted}


# -- documents, listed in an order or grouped by a field's values -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document of a source, limited to its chunks that pass a filter.

    Args:
        document_id: The document's ID (the ``ref_doc_id`` of its nodes).
        chunks: The number of its chunks that pass the filter.
        metadata: The fields with the same value in all these chunks, without keys that begin with "_".
    """

    document_id: str
    chunks: int
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """The units that have a certain value of a field.

    Args:
        value: The value.
        count: The number of units.
        documents: The first documents with the value, in the requested order.
    """

    value: Scalar
    count: int
    documents: list[SourceDocument] = field(default_factory=list)


def list_documents(rows: Iterable[MetadataRow], *, order: SortKey, limit: int, offset: int) -> list[SourceDocument]:
    """Return one page of the sorted documents."""
    return heapq.nsmallest(offset + limit, map(_document, _units(rows, "document")), key=order)[offset:]


def value_groups(
    rows: Iterable[MetadataRow], *, field: str, limit: int, per: Per, hits: int, order: SortKey
) -> list[ValueGroup]:
    """Return the most frequent values of a field, each with its first documents.

    Args:
        rows: The metadata rows.
        field: The metadata key.
        limit: The maximum number of values.
        per: The unit to count: "document" or "chunk".
        hits: The maximum number of documents per value; 0 only counts.
        order: The sort key of documents.
    """
    counts: Counter[Any] = Counter()
    best: dict[Any, list[SourceDocument]] = {}
    for unit in _units(rows, "document"):
        for part in _units(unit, per):
            counts.update(_keys(part, field))
        if hits and (keys := _keys(unit, field)):
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


class _Descending:
    """A wrapper that sorts values in descending order."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and bool(self.value == other.value)

    def __lt__(self, other: _Descending) -> bool:
        return bool(other.value < self.value)

    __hash__ = None  # type: ignore[assignment]  # it is compared only


def sort_key(order_by: OrderBy) -> SortKey:
    """Return a sort key for documents: by the fields, then by document ID.

    Raises:
        InvalidRequestError: An item is not a field with an optional direction.
    """
    order = [_order(one) for one in ([order_by] if isinstance(order_by, str) else order_by)]

    def key(document: SourceDocument) -> tuple[Any, ...]:
        places: list[Any] = []
        for name, descending in order:
            value: Any = document.metadata.get(name)
            if _is_value(value):
                places.append((0, _Descending(_rank(value)) if descending else _rank(value)))
            else:
                places.append((1,))
        return (*places, document.document_id)

    return key


def _order(one: Any) -> tuple[str, bool]:
    """Return the field, and whether it sorts descending, of "year", "year desc" or ("year", "desc")."""
    if isinstance(one, str):
        head, _, last = one.rpartition(" ")
        one = (head, last) if head and last in ("asc", "desc") else (one, "asc")
    if len(one) != 2 or not one[0] or one[1] not in ("asc", "desc"):  # noqa: PLR2004 (field and direction)
        raise InvalidRequestError(f"order_by: expected 'field', 'field desc' or ('field', 'desc'), got {one!r}")
    return str(one[0]), one[1] == "desc"


# -- the queries ------------------------------------------------------------------------------------------------------

P = ParamSpec("P")
S = TypeVar("S")


def _bridged(method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[S, P], T]:
    """Return the sync form of an async method."""

    @wraps(method)
    def sync(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    sync.__name__ = method.__name__.removeprefix("a")
    sync.__qualname__ = f"MetadataQueries.{sync.__name__}"
    return cast("Callable[Concatenate[S, P], T]", sync)


class MetadataQueries:
    """Facets, counts, groups and lists over the metadata of index sources; a mixin of ``KnowledgeBase``.

    Every method reads all rows that pass the filters of the source, the knowledge base and the caller; other rows are
    neither listed nor counted. Time is linear in the number of chunks; memory is bounded by the size of the result and
    the number of distinct values.

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

            kb.facets("films", ["genre", Facet("year", interval=10)], filters="country eq 'IT'")

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
        return await self._over(source, work, filters, principal)

    facets = _bridged(afacets)

    async def acount(
        self, source: str, *, filters: FilterLike = None, per: Per = "document", principal: Principal | None = None
    ) -> int:
        """Count the documents or chunks that pass a filter; see ``facets`` for the arguments."""
        _check(per=per)
        return await self._over(source, lambda rows: sum(1 for _ in _units(rows, per)), filters, principal)

    count = _bridged(acount)

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

    group_by = _bridged(agroup_by)

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

    documents = _bridged(adocuments)

    async def _over(
        self,
        source: str,
        work: Callable[[Iterator[MetadataRow]], T],
        filters: FilterLike,
        principal: Principal | None,
    ) -> T:
        if source not in self.sources:
            raise InvalidRequestError(f"no source is named {source!r}; there are: {', '.join(self.sources)}")
        standing, seconds = self._standing()
        given = to_tree(filters)
        self.sources[source].refuse_hidden(given)
        caller, asking = all_of(standing, given), self._resolve_principal(principal)
        deadline = deadline_after(seconds)
        return await arun(over_metadata(self.sources[source], work, caller, principal=asking, deadline=deadline))


def _check(*, limit: int = 1, offset: int = 0, hits: int = 0, per: str = "document") -> None:
    numbers: tuple[tuple[str, object, int], ...] = (("limit", limit, 1), ("offset", offset, 0), ("hits", hits, 0))
    for name, value, minimum in numbers:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InvalidRequestError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    if per not in get_args(Per):
        raise InvalidRequestError(f"per must be one of {', '.join(get_args(Per))}, got {per!r}")
