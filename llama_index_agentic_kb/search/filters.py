"""Filters of callers as trees, and trees as LlamaIndex's ``MetadataFilters``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from llama_index.core.vector_stores.types import FilterCondition, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.types import FilterOperator as StoreOperator
from pydantic import PrivateAttr

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator, parse_odata
from llama_index_agentic_kb.schema.filters import flat
from llama_index_agentic_kb.search.dialects import ANY_KEY, Language

FilterLike: TypeAlias = "Condition | FilterGroup | MetadataFilters | MetadataFilter | str | None"
"""A filter as callers may pass it; a string is an OData filter."""

_LOWERED: Final = {
    operator: StoreOperator[{"GE": "GTE", "LE": "LTE"}.get(operator.name, operator.name)]
    for operator in FilterOperator
    if operator is not FilterOperator.EXISTS
}
_RAISED: Final = {store: ours for ours, store in _LOWERED.items()}


class LoweredFilters(MetadataFilters):
    """LlamaIndex's form of a filter tree, which it carries."""

    _tree: FilterNode = PrivateAttr()
    _made: object = PrivateAttr()

    @property
    def tree(self) -> FilterNode | None:
        """The filter, of which this is one form; None once anything was added or changed, which must hold too."""
        return self._tree if _content(self) == self._made else None


class AnyStore(Language):
    """What no store can filter on through LlamaIndex's filters; it may lack more, which only it knows."""

    is_exact = True
    keys = ANY_KEY


def lower(tree: FilterNode) -> LoweredFilters:
    """Return a filter tree as ``MetadataFilters``, simplified by ``flat``: few stores support ``not``.

    Only negated conditions without an opposite, and "is not empty", become ``not`` groups.
    """
    whole = _lowered(flat(tree))
    is_group = isinstance(whole, MetadataFilters)
    lowered = (
        LoweredFilters.model_construct(**dict(whole)) if is_group else LoweredFilters.model_construct(filters=[whole])
    )
    lowered._tree, lowered._made = tree, _content(lowered)  # noqa: SLF001 (made here)
    return lowered


def _lowered(tree: FilterNode) -> MetadataFilter | MetadataFilters:
    """Return a flat tree in LlamaIndex's form. Not validated: its model refuses booleans, which stores take."""
    if isinstance(tree, FilterGroup):
        logic = FilterCondition(tree.logic.value)
        return MetadataFilters.model_construct(filters=list(map(_lowered, tree.filters)), condition=logic)
    make: Callable[..., MetadataFilter] = MetadataFilter.model_construct
    key, operator, value = tree.key, tree.operator, tree.value
    if operator is FilterOperator.EXISTS:
        is_empty = make(key=key, value=None, operator=StoreOperator.IS_EMPTY)
        return MetadataFilters.model_construct(filters=[is_empty], condition=FilterCondition.NOT)
    if operator is FilterOperator.ANY and len(tree.values) == 1:
        return make(key=key, value=tree.values[0], operator=StoreOperator.CONTAINS)
    if isinstance(value, list):  # Chroma takes lists of one type only; the tree's own list must not be changed
        value = [*map(float, value)] if {type(one) for one in value} == {int, float} else [*value]
    return make(key=key, value=value, operator=_LOWERED[operator])


def _content(part: object) -> object:
    """Return what a filter says, for comparisons: LlamaIndex's own takes 10 ms for a thousand conditions."""
    if isinstance(part, MetadataFilters):
        return part.condition, *map(_content, part.filters)
    if not isinstance(part, MetadataFilter):
        return part
    return part.key, part.operator, tuple(part.value) if isinstance(part.value, list) else part.value


def to_tree(filters: FilterLike) -> FilterNode | None:
    """Convert a caller's filter to a filter tree; None stays None.

    Raises:
        InvalidRequestError: The filter is empty (which would mean "everything"), is not valid OData, or has an
            operator that can't be checked on returned nodes.
    """
    if filters is None or isinstance(filters, (Condition, FilterGroup)):
        return filters
    if isinstance(filters, LoweredFilters) and (tree := filters.tree) is not None:
        return tree
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
    if one.operator is StoreOperator.IS_EMPTY:
        return _checked(one.key, FilterOperator.IS_EMPTY, value=True)
    if one.operator is StoreOperator.CONTAINS:
        return _checked(one.key, FilterOperator.ANY, [one.value])
    if one.operator is StoreOperator.ALL:
        each = _checked(one.key, FilterOperator.ANY, one.value).values
        return FilterGroup(filters=[_checked(one.key, FilterOperator.ANY, [value]) for value in each])
    operator = _RAISED.get(one.operator)
    if operator is None:
        known = ", ".join(store.value for store in (*_RAISED, StoreOperator.CONTAINS, StoreOperator.ALL))
        raise InvalidRequestError(
            f"filters: operator {one.operator.value!r} on {one.key!r} is not supported; use one of {known}"
        )
    return _checked(one.key, operator, one.value)


def _checked(key: str, operator: FilterOperator, value: object) -> Condition:
    try:
        return Condition.model_validate({"key": key, "operator": operator, "value": value})
    except ValueError as error:
        raise InvalidRequestError(f"filters: {key!r}: {error}") from error
