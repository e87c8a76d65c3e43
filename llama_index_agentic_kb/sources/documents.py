"""The documents of a source as its metadata tell of them: listed in an order, or grouped by a field's values."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.sources.facets import most_frequent
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

__all__ = ["OrderBy", "SourceDocument", "ValueGroup", "list_documents", "sort_key", "value_groups"]

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
    """Give a page of the documents, in order."""
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
    """Give what documents are sorted by: the fields, then the id.

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
        raise InvalidRequestError(f"order_by: {one!r} is none of 'field', 'field desc' and ('field', 'desc')")
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
