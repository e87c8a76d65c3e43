"""Facets, groups and lists of documents, counted from rows of metadata; ``sources.metadata`` reads the rows."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cmp_to_key
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import value_key
from llama_index_agentic_kb.schema.filters import Scalar

Metadata: TypeAlias = Mapping[str, Any]
Per: TypeAlias = Literal["document", "chunk"]
"""The unit to count."""
OrderBy: TypeAlias = Sequence[str | tuple[str, str]]
"""Sort fields in order of priority: "year", "year desc", or ("year", "desc"). Documents without the field are last."""
SortKey: TypeAlias = Callable[["SourceDocument"], Any]


class MetadataRow(NamedTuple):
    """The metadata of one chunk, and the ID of its document. Rows of one document are consecutive."""

    document: str
    metadata: Metadata


# -- units and values -------------------------------------------------------------------------------------------------


def units(rows: Iterable[MetadataRow], per: Per) -> Iterator[list[MetadataRow]]:
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
        ranges: Ascending boundaries, all numbers or all text (ISO dates): ``[10, 20]`` counts below 10, from 10 to
            below 20, and from 20.

    Raises:
        InvalidRequestError: ``ranges`` is invalid.
    """

    field: str
    ranges: Sequence[float | str] | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.ranges is not None and not _ascending(self.ranges):
            raise InvalidRequestError(
                f"facet {self.field!r}: ranges must be ascending boundaries, all numbers or all text, got "
                f"{list(self.ranges)!r}"
            )


def _ascending(boundaries: Sequence[Any]) -> bool:
    if isinstance(boundaries, str) or not boundaries:
        return False
    plain = [one for one in boundaries if _is_value(one) and not isinstance(one, bool)]
    alike = len(plain) == len(boundaries) and len({isinstance(one, str) for one in plain}) == 1
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


def _most_frequent(counts: Counter[Any], limit: int) -> list[FacetBucket]:
    """Return the most frequent values by count; of equally frequent values, the smaller comes first."""
    best = heapq.nsmallest(limit, counts.items(), key=lambda item: (-item[1], _rank(item[0][1])))
    return [FacetBucket(count, value=value) for (_, value), count in best]


def _place(facet: Facet, value: Scalar) -> Any:
    """Return the key of a value's bucket; None if it belongs to no bucket."""
    if facet.ranges is None:
        return value_key(value)
    boundaries: Sequence[Any] = facet.ranges
    fits = not isinstance(value, bool) and isinstance(value, str) == isinstance(boundaries[0], str)
    return bisect_right(boundaries, value) if fits else None


def _buckets(facet: Facet, counts: Counter[Any], limit: int) -> list[FacetBucket]:
    """Return a facet's buckets in order."""
    if facet.ranges is None:
        return _most_frequent(counts, limit)
    edges = enumerate(pairwise([None, *facet.ranges, None]))
    return [FacetBucket(counts[number], start=start, end=end) for number, (start, end) in edges]


def facet_buckets(
    rows: Iterable[MetadataRow], *, facets: Sequence[Facet], limit: int, per: Per
) -> dict[str, list[FacetBucket]]:
    """Return the buckets of each facet, by field, counted in one pass; see ``MetadataQueries.afacets``."""
    counted = [(facet, Counter[Any]()) for facet in facets]
    for unit in units(rows, per):
        for facet, counts in counted:
            keys = {_place(facet, value) for value in _values(unit, facet.field)}
            counts.update(keys - {None})
    return {facet.field: _buckets(facet, counts, limit) for facet, counts in counted}


def value_buckets(counted: Iterable[tuple[Any, int]], limit: int) -> list[FacetBucket]:
    """Return the most frequent of the values that a store has counted."""
    return _most_frequent(Counter({value_key(value): count for value, count in counted if _is_value(value)}), limit)


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
    return heapq.nsmallest(offset + limit, map(_document, units(rows, "document")), key=order)[offset:]


def value_groups(
    rows: Iterable[MetadataRow], *, field: str, limit: int, per: Per, hits: int, order: SortKey
) -> list[ValueGroup]:
    """Return the most frequent values of a field, each with its first documents; see ``MetadataQueries.agroup_by``."""
    counts: Counter[Any] = Counter()
    best: dict[Any, list[SourceDocument]] = {}
    for unit in units(rows, "document"):
        for part in units(unit, per):
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


def sort_key(order_by: OrderBy) -> SortKey:
    """Return a sort key for documents: by the fields, then by document ID.

    Raises:
        InvalidRequestError: An item is not a field with an optional direction.
    """
    order = [_order(one) for one in ([order_by] if isinstance(order_by, str) else order_by)]

    def compare(one: SourceDocument, other: SourceDocument) -> int:
        for name, descending in order:
            ours: Any = one.metadata.get(name)
            theirs: Any = other.metadata.get(name)
            if not (_is_value(ours) and _is_value(theirs)):
                if _is_value(ours) != _is_value(theirs):
                    return 1 if _is_value(theirs) else -1
            elif _rank(ours) != _rank(theirs):
                return 1 if (_rank(ours) < _rank(theirs)) == descending else -1
        return 1 if one.document_id > other.document_id else -1

    return cmp_to_key(compare)


def _order(one: Any) -> tuple[str, bool]:
    """Return the field, and whether it sorts descending, of "year", "year desc" or ("year", "desc")."""
    if isinstance(one, str):
        head, _, last = one.rpartition(" ")
        one = (head, last) if head and last in ("asc", "desc") else (one, "asc")
    if len(one) != 2 or not one[0] or one[1] not in ("asc", "desc"):  # noqa: PLR2004 (field and direction)
        raise InvalidRequestError(f"order_by: expected 'field', 'field desc' or ('field', 'desc'), got {one!r}")
    return str(one[0]), one[1] == "desc"
