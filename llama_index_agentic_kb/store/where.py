"""Chroma's form of a filter, and the rows it matches, asked for in requests that Chroma can take.

Limits of the embedded Chroma (measured with 1.5.9): 32,766 values in one request ("too many SQL variables"), about a
thousand conditions ("Expression tree is too large"), and some 5 ms for each condition, whereas a list of a thousand
values costs no more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

from llama_index.core.vector_stores.types import FilterCondition, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.types import FilterOperator as StoreOperator

from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.store.ranking import check_deadline

__all__ = ["Where", "chroma_where", "fits", "matching_ids"]

Where: TypeAlias = dict[str, Any]
"""``{key: {operator: value}}``, or ``{"$and": [...]}``, ``{"$or": [...]}``."""

GetIds: TypeAlias = Callable[[Where], list[str]]

MAX_VALUES: Final = 10_000
"""Values of one request."""

MAX_CONDITIONS: Final = 100
"""Conditions of one request."""

_OPERATORS: Final = {
    StoreOperator.EQ: "$eq",
    StoreOperator.NE: "$ne",
    StoreOperator.GT: "$gt",
    StoreOperator.LT: "$lt",
    StoreOperator.GTE: "$gte",
    StoreOperator.LTE: "$lte",
    StoreOperator.IN: "$in",
    StoreOperator.NIN: "$nin",
}
_LISTED: Final = {"$or": ("$eq", "$in"), "$and": ("$ne", "$nin")}
"""In each kind of group, the conditions on one key that make one list together."""


def chroma_where(filters: MetadataFilters) -> Where:
    """Return the ``where`` of a filter.

    Args:
        filters: At least one filter; groups are "and" or "or".

    Returns:
        An equal ``where``, in which equalities on one key stand in one list.

    Raises:
        DeniedError: Chroma has no such operator or group.
    """
    if filters.condition is FilterCondition.NOT:
        raise DeniedError("Chroma has no 'not': filters over it must come without negated groups")
    parts = [_part(one) for one in filters.filters]
    if len(parts) == 1:
        return parts[0]
    logic = "$or" if filters.condition is FilterCondition.OR else "$and"
    merged = _merged(logic, parts)
    return merged[0] if len(merged) == 1 else {logic: merged}


def _part(one: MetadataFilter | MetadataFilters) -> Where:
    if isinstance(one, MetadataFilters):
        return chroma_where(one)
    if one.operator not in _OPERATORS:
        raise DeniedError(f"Chroma has no operator {one.operator.value!r}, which the filter on {one.key!r} needs")
    return {one.key: {_OPERATORS[one.operator]: one.value}}


def _merged(logic: str, parts: list[Where]) -> list[Where]:
    """Put ``$eq`` of one key in an "or" into one ``$in``, and ``$ne`` in an "and" into one ``$nin``."""
    single, many = _LISTED[logic]
    lists: dict[tuple[str, type], list[Any]] = {}
    others: list[Where] = []
    for part in parts:
        key, condition = next(iter(part.items()))
        operator, value = next(iter(condition.items())) if isinstance(condition, dict) else ("", None)  # no group
        if operator not in (single, many):
            others.append(part)
            continue
        values: list[Any] = list(value or []) if operator == many else [value]
        lists.setdefault((key, type(values[0])), []).extend(values)  # Chroma's lists have one type
    joined = [
        {key: {single: values[0]} if len(values) == 1 else {many: list(dict.fromkeys(values))}}
        for (key, _), values in lists.items()
    ]
    return joined + others


def fits(where: Where) -> bool:
    """Return whether one request can hold it."""
    conditions, values = _size(where)
    return conditions <= MAX_CONDITIONS and values <= MAX_VALUES


def _size(where: Where) -> tuple[int, int]:
    """Count conditions and values."""
    key, inner = next(iter(where.items()))
    if key in _LISTED:
        sizes = [_size(part) for part in inner]
        return sum(conditions for conditions, _ in sizes), sum(values for _, values in sizes)
    value = next(iter(inner.values()))
    return 1, len(value) if isinstance(value, list) else 1


def matching_ids(get: GetIds, where: Where, deadline: float | None) -> list[str]:
    """Ask for the ids of all rows that match, in as many requests as it takes.

    Args:
        get: Asks for one ``where`` that ``fits``.
        where: The filter, of any size.
        deadline: ``time.monotonic()`` after which no further request is begun; None asks on.

    Returns:
        Each id once, in the store's order for each request.

    Raises:
        DeadlineExceededError: The time was over before the last request.
    """
    check_deadline(deadline)
    if fits(where):
        return get(where)
    key, inner = next(iter(where.items()))
    if key in _LISTED:
        found = [matching_ids(get, part, deadline) for part in _packed(key, inner)]
        return _united(found) if key == "$or" else _common(found)
    operator, values = next(iter(inner.items()))
    slices = [values[start : start + MAX_VALUES] for start in range(0, len(values), MAX_VALUES)]
    found = [matching_ids(get, {key: {operator: part}}, deadline) for part in slices]
    return _united(found) if operator == "$in" else _common(found)


def _packed(logic: str, parts: list[Where]) -> Iterator[Where]:
    """Put parts together, as many as fit one request."""
    batch: list[Where] = []
    conditions = values = 0
    for part in parts:
        more = _size(part)
        if batch and (conditions + more[0] > MAX_CONDITIONS or values + more[1] > MAX_VALUES):
            yield _group(logic, batch)
            batch, conditions, values = [], 0, 0
        batch.append(part)
        conditions, values = conditions + more[0], values + more[1]
    yield _group(logic, batch)


def _group(logic: str, parts: list[Where]) -> Where:
    return parts[0] if len(parts) == 1 else {logic: parts}


def _united(found: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(node_id for ids in found for node_id in ids))


def _common(found: list[list[str]]) -> list[str]:
    others = [set(ids) for ids in found[1:]]
    return [node_id for node_id in found[0] if all(node_id in ids for ids in others)]
