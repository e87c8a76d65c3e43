"""Facets, groups and lists: what the metadata of a source say of its documents.

A facet counts how many documents or chunks have each value of a field, or fall into ranges of it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from itertools import pairwise
from typing import Any, Final, Protocol, TypeAlias

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.sources.metadata import (
    MetadataRow,
    Per,
    Value,
    distinct,
    is_value,
    rank,
    unit_values,
    units,
)

__all__ = [
    "Facet",
    "FacetBucket",
    "OrderBy",
    "SourceDocument",
    "ValueGroup",
    "count_units",
    "facet_buckets",
    "list_documents",
    "sort_key",
    "value_groups",
]

_PERIODS: Final = ("year", "month", "day")


@dataclass(frozen=True, slots=True)
class Facet:
    """What to count of a field: its values, or how many fall into ranges.

    Args:
        field: The metadata key.
        limit: Values to give, the most frequent first; None is the call's. Ranges are all given.
        ranges: Boundaries, ascending, all numbers or all text (ISO dates): ``[10, 20]`` counts below 10, from 10 to
            below 20, and from 20.
        interval: The width of equal ranges of numbers, counted from 0; or "year", "month" or "day" for ISO dates.
            Ranges without a unit are left out.

    Raises:
        InvalidRequestError: Ranges and interval are both given, or one can't be used.
    """

    field: str
    limit: int | None = None
    ranges: Sequence[float | str] | None = None
    interval: float | str | None = None

    def __post_init__(self) -> None:
        """Check the form."""
        problem = self._problem()
        if problem:
            raise InvalidRequestError(f"facet {self.field!r}: {problem}")

    def _problem(self) -> str | None:
        if self.limit is not None and self.limit < 1:
            return f"limit must be above 0, got {self.limit}"
        if self.ranges is not None and self.interval is not None:
            return "give ranges or an interval, not both"
        if self.ranges is not None and not _ascending(self.ranges):
            return f"ranges must be ascending boundaries, all numbers or all text, got {list(self.ranges)!r}"
        if self.interval is not None and self.interval not in _PERIODS and not _is_width(self.interval):
            return f"interval must be a number above 0, or one of {', '.join(_PERIODS)}, got {self.interval!r}"
        return None


@dataclass(frozen=True, slots=True)
class FacetBucket:
    """How many units have a value, or fall into a range.

    Args:
        count: The units; at least 1, but for given ranges.
        value: The value; None for a range.
        start: The range's start, itself inside; None where it is open.
        end: The range's end, itself outside; None where it is open.
    """

    count: int
    value: Value | None = None
    start: float | str | None = None
    end: float | str | None = None


def facet_buckets(
    rows: Iterable[MetadataRow], *, facets: Sequence[Facet], limit: int, per: Per
) -> dict[str, list[FacetBucket]]:
    """Count several facets in one pass.

    Args:
        rows: The metadata.
        facets: What to count.
        limit: Values of each, unless a facet says its own number.
        per: What is counted.

    Returns:
        The buckets of each facet, by its field: values by count, the smaller first among equals; ranges ascending.
    """
    places = [_places(facet, limit) for facet in facets]
    counts: list[Counter[Any]] = [Counter() for _ in facets]
    for unit in units(rows, per):
        for facet, one, counted in zip(facets, places, counts, strict=True):
            counted.update({key for value in unit_values(unit, facet.field) if (key := one.place(value)) is not None})
    return {facet.field: one.buckets(counted) for facet, one, counted in zip(facets, places, counts, strict=True)}


def count_units(rows: Iterable[MetadataRow], *, per: Per) -> int:
    """Count documents or chunks."""
    return sum(1 for _ in units(rows, per))


def most_frequent(counts: Counter[Any], limit: int) -> list[FacetBucket]:
    """Return the values, keyed by ``distinct``, by count; among equals the smaller value comes first."""
    best = heapq.nsmallest(limit, counts.items(), key=lambda item: (-item[1], rank(item[0][1])))
    return [FacetBucket(count, value=value) for (_, value), count in best]


class _Places(Protocol):
    """Where values fall, and what the buckets look like."""

    def place(self, value: Value) -> Hashable | None:
        """Return the bucket's key; None for a value that has no place."""

    def buckets(self, counts: Counter[Any]) -> list[FacetBucket]:
        """Return the buckets in order."""


@dataclass(frozen=True, slots=True)
class _Values:
    limit: int

    def place(self, value: Value) -> Hashable:
        return distinct(value)

    def buckets(self, counts: Counter[Any]) -> list[FacetBucket]:
        return most_frequent(counts, self.limit)


@dataclass(frozen=True, slots=True)
class _Ranges:
    boundaries: Sequence[Any]

    def place(self, value: Value) -> int | None:
        fits = not isinstance(value, bool) and isinstance(value, str) == isinstance(self.boundaries[0], str)
        return bisect_right(self.boundaries, value) if fits else None

    def buckets(self, counts: Counter[Any]) -> list[FacetBucket]:
        edges = [None, *self.boundaries, None]
        return [FacetBucket(counts[n], start=edges[n], end=edges[n + 1]) for n in range(len(edges) - 1)]


@dataclass(frozen=True, slots=True)
class _Intervals:
    width: float

    def place(self, value: Value) -> int | None:
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

    def place(self, value: Value) -> date | None:
        if not isinstance(value, str):
            return None
        try:
            day = datetime.fromisoformat(value).date()
        except ValueError:
            return None
        if self.unit == "day":
            return day
        return day.replace(day=1) if self.unit == "month" else day.replace(month=1, day=1)

    def buckets(self, counts: Counter[Any]) -> list[FacetBucket]:
        return [FacetBucket(counts[day], start=day.isoformat(), end=self._next(day)) for day in sorted(counts)]

    def _next(self, day: date) -> str | None:
        """Return the next period's first day; none comes after the year 9999."""
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
    return _Values(facet.limit or limit) if facet.interval is None else _Intervals(facet.interval)


def _ascending(boundaries: Sequence[Any]) -> bool:
    if isinstance(boundaries, str) or not boundaries:
        return False
    text = isinstance(boundaries[0], str)
    if not all(is_value(one) and not isinstance(one, bool) and isinstance(one, str) == text for one in boundaries):
        return False
    return all(one < other for one, other in pairwise(boundaries))


def _is_width(interval: Any) -> bool:
    return is_value(interval) and not isinstance(interval, (bool, str)) and interval > 0


# -- documents, listed in an order or grouped by a field's values ------------------------------------------------------

OrderBy: TypeAlias = Sequence[str | tuple[str, str]]
"""Fields, the first first: "year", "year desc", or ("year", "desc"). Documents without the field come last."""

SortKey: TypeAlias = Callable[["SourceDocument"], Any]


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document of a source, as far as a filter lets it be seen.

    Args:
        document_id: Its id: ``ref_doc_id`` of its nodes.
        chunks: Its chunks that pass the filter.
        metadata: The fields in which these agree, without those whose names begin with "_".
    """

    document_id: str
    chunks: int
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """The units that have one value of a field.

    Args:
        value: The value.
        count: How many there are.
        documents: The first of their documents, in the order asked for.
    """

    value: Value
    count: int
    documents: list[SourceDocument] = field(default_factory=list)


def list_documents(rows: Iterable[MetadataRow], *, order: SortKey, limit: int, offset: int) -> list[SourceDocument]:
    """Return a page of the documents, in order."""
    best = _Best(offset + limit, order)
    for unit in units(rows, "document"):
        best.add(_document(unit))
    return best.documents()[offset:]


def value_groups(
    rows: Iterable[MetadataRow], *, field: str, limit: int, per: Per, hits: int, order: SortKey
) -> list[ValueGroup]:
    """Group by the values of a field: the most frequent ones, each with the first of its documents.

    Args:
        rows: The metadata.
        field: The metadata key.
        limit: Values to give.
        per: What is counted.
        hits: Documents of each value; 0 only counts.
        order: The documents' order.
    """
    counts: Counter[Any] = Counter()
    best: dict[Any, _Best] = {}
    for unit in units(rows, "document"):
        for part in units(unit, per):
            counts.update(_keys(part, field))
        for key in _keys(unit, field) if hits else ():
            best.setdefault(key, _Best(hits, order)).add(_document(unit))
    return [
        ValueGroup(bucket.value, bucket.count, best[distinct(bucket.value)].documents() if hits else [])
        for bucket in most_frequent(counts, limit)
        if bucket.value is not None
    ]


def _keys(unit: Iterable[MetadataRow], field: str) -> set[tuple[bool, Value]]:
    return {distinct(value) for value in unit_values(unit, field)}


def _document(unit: Sequence[MetadataRow]) -> SourceDocument:
    agreed = {key: value for key, value in unit[0].metadata.items() if not key.startswith("_")}
    for row in unit[1:]:
        agreed = {key: value for key, value in agreed.items() if key in row.metadata and row.metadata[key] == value}
    return SourceDocument(unit[0].document, len(unit), agreed)


class _Descending:
    """A value that sorts the other way round."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and bool(self.value == other.value)

    def __lt__(self, other: _Descending) -> bool:
        return bool(other.value < self.value)

    __hash__ = None  # type: ignore[assignment]  # it is compared only


def sort_key(order_by: OrderBy) -> SortKey:
    """Return what documents are sorted by: the fields, then the id.

    Raises:
        InvalidRequestError: One is no field and direction.
    """
    order = [_order(one) for one in ([order_by] if isinstance(order_by, str) else order_by)]

    def key(document: SourceDocument) -> tuple[Any, ...]:
        places: list[Any] = []
        for name, descending in order:
            value: Any = document.metadata.get(name)
            if is_value(value):
                places.append((0, _Descending(rank(value)) if descending else rank(value)))
            else:
                places.append((1,))
        return (*places, document.document_id)

    return key


def _order(one: Any) -> tuple[str, bool]:
    """Read "year", "year desc" or ("year", "desc")."""
    if isinstance(one, str):
        head, _, last = one.rpartition(" ")
        one = (head, last) if head and last in ("asc", "desc") else (one, "asc")
    if len(one) != 2 or not one[0] or one[1] not in ("asc", "desc"):  # noqa: PLR2004 (field and direction)
        raise InvalidRequestError(f"order_by: expected 'field', 'field desc' or ('field', 'desc'), got {one!r}")
    return str(one[0]), one[1] == "desc"


class _Best:
    """The first documents of a stream, in order; memory is bounded by their number."""

    def __init__(self, number: int, key: Callable[[SourceDocument], Any]) -> None:
        self._number = number
        self._key = key
        self._kept: list[SourceDocument] = []

    def add(self, document: SourceDocument) -> None:
        self._kept.append(document)
        if len(self._kept) > 4 * self._number + 64:
            self._kept = self.documents()

    def documents(self) -> list[SourceDocument]:
        return heapq.nsmallest(self._number, self._kept, key=self._key)
