"""Turns our filter trees into LlamaIndex's ``MetadataFilters`` and back."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from llama_index.core.vector_stores.types import (
    FilterCondition,
    MetadataFilter,
    MetadataFilters,
)
from llama_index.core.vector_stores.types import FilterOperator as StoreOperator

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator

__all__ = ["FilterLike", "flat", "lower", "to_tree"]

FilterLike: TypeAlias = "Condition | FilterGroup | MetadataFilters | MetadataFilter | None"
"""What callers may pass as a filter."""

_LOWERED: Final = {
    FilterOperator.EQ: StoreOperator.EQ,
    FilterOperator.NE: StoreOperator.NE,
    FilterOperator.GT: StoreOperator.GT,
    FilterOperator.GE: StoreOperator.GTE,
    FilterOperator.LT: StoreOperator.LT,
    FilterOperator.LE: StoreOperator.LTE,
    FilterOperator.IN: StoreOperator.IN,
    FilterOperator.NIN: StoreOperator.NIN,
}
_RAISED: Final = {store: ours for ours, store in _LOWERED.items()}
_NEGATED: Final = {
    FilterOperator.EQ: FilterOperator.NE,
    FilterOperator.NE: FilterOperator.EQ,
    FilterOperator.GT: FilterOperator.LE,
    FilterOperator.GE: FilterOperator.LT,
    FilterOperator.LT: FilterOperator.GE,
    FilterOperator.LE: FilterOperator.GT,
    FilterOperator.IN: FilterOperator.NIN,
    FilterOperator.NIN: FilterOperator.IN,
}


def lower(tree: FilterNode) -> MetadataFilters:
    """Give the store's form of a filter. Negations are pushed down to the conditions: few stores know ``not``."""
    lowered = _lower(flat(tree))
    return lowered if isinstance(lowered, MetadataFilters) else MetadataFilters(filters=[lowered])


def _lower(tree: FilterNode) -> MetadataFilter | MetadataFilters:
    if isinstance(tree, Condition):
        # Not validated: LlamaIndex's model refuses booleans, which stores take.
        value = _of_one_type(tree.value) if isinstance(tree.value, list) else tree.value
        return MetadataFilter.model_construct(key=tree.key, value=value, operator=_LOWERED[tree.operator])
    condition = FilterCondition.OR if tree.logic is FilterLogic.OR else FilterCondition.AND
    return MetadataFilters(filters=[_lower(child) for child in tree.filters], condition=condition)


def _of_one_type(values: list[Any]) -> list[Any]:
    """Whole numbers among decimal ones become decimal: Chroma takes lists of one type only."""
    return [float(value) for value in values] if {type(value) for value in values} == {int, float} else values


def flat(tree: FilterNode) -> FilterNode:
    """Give an equal tree without negations, and without groups inside groups of the same logic."""
    return _flatten(_without_not(tree))


def _flatten(tree: FilterNode) -> FilterNode:
    if isinstance(tree, Condition):
        return tree
    filters: list[FilterNode] = []
    for child in map(_flatten, tree.filters):
        joins = isinstance(child, FilterGroup) and child.logic is tree.logic
        filters.extend(child.filters if isinstance(child, FilterGroup) and joins else [child])
    return filters[0] if len(filters) == 1 else FilterGroup(logic=tree.logic, filters=filters)


def _without_not(tree: FilterNode, *, negate: bool = False) -> FilterNode:
    """De Morgan."""
    if isinstance(tree, Condition):
        return tree if not negate else tree.model_copy(update={"operator": _NEGATED[tree.operator]})
    if tree.logic is FilterLogic.NOT:
        inner = FilterLogic.OR if negate else FilterLogic.AND
        return FilterGroup(logic=inner, filters=[_without_not(child, negate=not negate) for child in tree.filters])
    logic = tree.logic
    if negate:
        logic = FilterLogic.AND if logic is FilterLogic.OR else FilterLogic.OR
    return FilterGroup(logic=logic, filters=[_without_not(child, negate=negate) for child in tree.filters])


def to_tree(filters: FilterLike) -> FilterNode | None:
    """Give our form of what a caller passed; None for None.

    Raises:
        InvalidRequestError: It is empty (which would mean "everything"), or has an operator that can't be checked on
            returned nodes.
    """
    if filters is None or isinstance(filters, (Condition, FilterGroup)):
        return filters
    if isinstance(filters, MetadataFilter):
        return _condition(filters)
    if not isinstance(filters, MetadataFilters):
        raise InvalidRequestError(f"filters: expected MetadataFilters or a filter tree, got {type(filters).__name__}")
    if not filters.filters:
        raise InvalidRequestError("filters: MetadataFilters(filters=[]) is no filter; pass None to search everything")
    children = [child for one in filters.filters if (child := to_tree(one)) is not None]
    logic = FilterLogic((filters.condition or FilterCondition.AND).value)
    return FilterGroup(logic=logic, filters=children)


def _condition(one: MetadataFilter) -> Condition:
    operator = _RAISED.get(one.operator)
    if operator is None:
        raise InvalidRequestError(
            f"filters: operator {one.operator.value!r} on {one.key!r} is not supported; use one of "
            + ", ".join(store.value for store in _RAISED)
        )
    try:
        return Condition.model_validate({"key": one.key, "operator": operator, "value": one.value})
    except ValueError as error:
        raise InvalidRequestError(f"filters: {one.key!r}: {error}") from error
