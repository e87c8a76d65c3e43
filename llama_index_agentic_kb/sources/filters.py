"""Filter trees as LlamaIndex's ``MetadataFilters`` and back, and which stores can't apply them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    MetadataFilter,
    MetadataFilters,
)
from llama_index.core.vector_stores.types import FilterOperator as StoreOperator

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator
from llama_index_agentic_kb.schema.odata import parse_odata

__all__ = ["FilterLike", "conditions", "flat", "is_chroma", "lower", "store_refusal", "to_tree"]

FilterLike: TypeAlias = "Condition | FilterGroup | MetadataFilters | MetadataFilter | str | None"
"""What callers may pass as a filter; a string is OData text."""

_LOWERED: Final = {
    FilterOperator.EQ: StoreOperator.EQ,
    FilterOperator.NE: StoreOperator.NE,
    FilterOperator.GT: StoreOperator.GT,
    FilterOperator.GE: StoreOperator.GTE,
    FilterOperator.LT: StoreOperator.LT,
    FilterOperator.LE: StoreOperator.LTE,
    FilterOperator.IN: StoreOperator.IN,
    FilterOperator.NIN: StoreOperator.NIN,
    FilterOperator.ANY: StoreOperator.ANY,
}
_RAISED: Final = {store: ours for ours, store in _LOWERED.items()}
_ORDERS: Final = (FilterOperator.GT, FilterOperator.GE, FilterOperator.LT, FilterOperator.LE)
_OPPOSITES: Final = (
    (FilterOperator.EQ, FilterOperator.NE),
    (FilterOperator.GT, FilterOperator.LE),
    (FilterOperator.LT, FilterOperator.GE),
    (FilterOperator.IN, FilterOperator.NIN),
)
_NEGATED: Final = {**dict(_OPPOSITES), **{other: one for one, other in _OPPOSITES}}


def lower(tree: FilterNode) -> MetadataFilters:
    """Return the store's form of a filter, see ``flat``: few stores know ``not``.

    The negation of ``any``, which has no opposite, and "is not empty" are the only groups that come out under ``not``.
    """
    lowered = _lower(flat(tree))
    return lowered if isinstance(lowered, MetadataFilters) else MetadataFilters(filters=[lowered])


def _lower(tree: FilterNode) -> MetadataFilter | MetadataFilters:
    if isinstance(tree, FilterGroup):
        condition = FilterCondition(tree.logic.value)
        return MetadataFilters(filters=[_lower(child) for child in tree.filters], condition=condition)
    # Not validated: LlamaIndex's model refuses booleans, which stores take.
    make = MetadataFilter.model_construct
    if tree.operator is FilterOperator.EXISTS:
        empty = make(key=tree.key, value=None, operator=StoreOperator.IS_EMPTY)
        return MetadataFilters(filters=[empty], condition=FilterCondition.NOT)
    if tree.operator is FilterOperator.ANY and len(tree.values) == 1:
        return make(key=tree.key, value=tree.values[0], operator=StoreOperator.CONTAINS)
    value: Any = tree.value
    if isinstance(value, list) and {type(one) for one in value} == {int, float}:
        value = [float(one) for one in value]  # Chroma takes lists of one type only
    return make(key=tree.key, value=value, operator=_LOWERED[tree.operator])


def flat(tree: FilterNode, *, negate: bool = False) -> FilterNode:
    """Return a tree that lets through no more, without groups inside groups of the same logic and with few negations.

    Negations are pushed down to the conditions (De Morgan). Only those without an opposite, ``any`` and ``exists``,
    stay under a ``not`` of their own. Where all keys are known, the tree lets through the same.

    Args:
        tree: The filter.
        negate: Whether the opposite is meant.
    """
    if isinstance(tree, Condition):
        if not negate:
            return tree
        if tree.operator in _NEGATED:
            return tree.model_copy(update={"operator": _NEGATED[tree.operator]})
        return FilterGroup(logic=FilterLogic.NOT, filters=[tree])
    negates = tree.logic is FilterLogic.NOT  # none of them holds: the opposite of "or"
    negate = negate != negates
    joins = (tree.logic is not FilterLogic.AND) != negate
    logic = FilterLogic.OR if joins else FilterLogic.AND
    filters: list[FilterNode] = []
    for child in (flat(child, negate=negate) for child in tree.filters):
        same = isinstance(child, FilterGroup) and child.logic is logic
        filters.extend(child.filters if isinstance(child, FilterGroup) and same else [child])
    return filters[0] if len(filters) == 1 else FilterGroup(logic=logic, filters=filters)


def store_refusal(store: BasePydanticVectorStore, tree: FilterNode) -> str | None:
    """Return why a vector store can't apply a filter; None where it can, or where only the store itself knows.

    A store that can't must not be asked: it would raise, or ignore the condition and fill its result with what the
    check of each returned node then drops.
    """
    simple = flat(tree)
    if any(one.operator is FilterOperator.EXISTS for one in conditions(simple)) or _negates(simple):
        return "vector stores have no operator for 'exists', nor for the opposite of 'any'; compare with values instead"
    if not is_chroma(store):
        return None
    for one in conditions(simple):
        if one.operator is FilterOperator.ANY:
            return f"Chroma can't filter on items of lists, as 'any' on {one.key!r} does; keep a key for each item"
        if one.operator in _ORDERS and isinstance(one.value, str):
            return (
                f"Chroma orders numbers only, not text or dates, as {one.operator.value!r} on {one.key!r} does; "
                "keep a number such as 20240131"
            )
    return None


def _negates(tree: FilterNode) -> bool:
    return isinstance(tree, FilterGroup) and (tree.logic is FilterLogic.NOT or any(map(_negates, tree.filters)))


def is_chroma(store: Any) -> bool:
    """Return whether a vector store is LlamaIndex's over Chroma, or made of it; without importing it."""
    return any(base.__name__ == "ChromaVectorStore" for base in type(store).__mro__)


def conditions(tree: FilterNode) -> Iterator[Condition]:
    """Yield every condition of a tree."""
    if isinstance(tree, Condition):
        yield tree
        return
    for child in tree.filters:
        yield from conditions(child)


def to_tree(filters: FilterLike) -> FilterNode | None:
    """Return our form of what a caller passed; None for None.

    Raises:
        InvalidRequestError: It is empty (which would mean "everything"), is text that is no OData filter, or has an
            operator that can't be checked on returned nodes.
    """
    if filters is None or isinstance(filters, (Condition, FilterGroup)):
        return filters
    if isinstance(filters, str):
        return parse_odata(filters)
    if isinstance(filters, MetadataFilter):
        return _condition(filters)
    if not isinstance(filters, MetadataFilters):
        raise InvalidRequestError(
            f"filters: expected MetadataFilters, OData text or a filter tree, got {type(filters).__name__}"
        )
    if not filters.filters:
        raise InvalidRequestError("filters: MetadataFilters(filters=[]) is no filter; pass None to search everything")
    children = [child for one in filters.filters if (child := to_tree(one)) is not None]
    logic = FilterLogic((filters.condition or FilterCondition.AND).value)
    return FilterGroup(logic=logic, filters=children)


def _condition(one: MetadataFilter) -> FilterNode:
    if one.operator is StoreOperator.CONTAINS:
        return _checked(one.key, FilterOperator.ANY, [one.value])
    if one.operator is StoreOperator.ALL:
        each = _checked(one.key, FilterOperator.ANY, one.value).values
        return FilterGroup(filters=[_checked(one.key, FilterOperator.ANY, [value]) for value in each])
    operator = _RAISED.get(one.operator)
    if operator is None:
        known = (*_RAISED, StoreOperator.CONTAINS, StoreOperator.ALL)
        raise InvalidRequestError(
            f"filters: operator {one.operator.value!r} on {one.key!r} is not supported; use one of "
            + ", ".join(store.value for store in known)
        )
    return _checked(one.key, operator, one.value)


def _checked(key: str, operator: FilterOperator, value: Any) -> Condition:
    try:
        return Condition.model_validate({"key": key, "operator": operator, "value": value})
    except ValueError as error:
        raise InvalidRequestError(f"filters: {key!r}: {error}") from error
