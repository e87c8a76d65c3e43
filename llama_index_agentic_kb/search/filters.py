"""Filters of callers as trees, what a language of filters is, and trees as LlamaIndex's ``MetadataFilters``."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar, Final, Generic, TypeAlias, TypeVar

from llama_index.core.vector_stores.types import FilterCondition, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.types import FilterOperator as StoreOperator
from pydantic import PrivateAttr

from llama_index_agentic_kb.errors import DeniedError, InvalidRequestError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator, parse_odata
from llama_index_agentic_kb.schema.filters import ORDERS, conditions, flat, value_kind

Written = TypeVar("Written")
FilterLike: TypeAlias = "Condition | FilterGroup | MetadataFilters | MetadataFilter | str | None"
"""A filter as callers may pass it; a string is an OData filter."""

_EXACT: Final = 2**53  # whole numbers up to this are exact as floating-point numbers
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ANY_KEY: Final = re.compile(".+", re.DOTALL)

_LOWERED: Final = {
    operator: StoreOperator[{"GE": "GTE", "LE": "LTE"}.get(operator.name, operator.name)]
    for operator in FilterOperator
    if operator is not FilterOperator.EXISTS
}
_RAISED: Final = {store: ours for ours, store in _LOWERED.items()}


class Dialect(ABC, Generic[Written]):
    """A language of filters. ``_condition`` and ``_group`` write the parts of a tree."""

    name: ClassVar[str] = "this vector store"
    lacks: ClassVar[Collection[FilterOperator]] = ()  # the operators that have no form in the language
    negations: ClassVar[bool] = False
    """Whether "exists" and the opposites of what has no opposite operator can be expressed."""
    orders_text: ClassVar[bool] = True
    is_exact: ClassVar[bool] = False  # whether whole numbers beyond 2**53 are compared exactly
    keys: ClassVar[re.Pattern[str]] = _PLAIN  # the form of the keys that can be filtered on

    @abstractmethod
    def _condition(self, condition: Condition) -> Written: ...

    @abstractmethod
    def _group(self, logic: FilterLogic, parts: list[Written]) -> Written: ...

    def write(self, tree: FilterNode) -> Written:
        """Return a filter in the language; raise ``DeniedError`` if it can't be expressed."""
        if reason := self.refusal(tree):
            raise DeniedError(reason)
        return self._walk(flat(tree))

    def _walk(self, tree: FilterNode) -> Written:  # of a tree as ``flat`` returns it
        if isinstance(tree, Condition):
            return self._condition(tree)
        return self._group(tree.logic, list(map(self._walk, tree.filters)))

    @classmethod
    def refusal(cls, tree: FilterNode) -> str | None:
        """Return why a filter can't be expressed; None if it can."""
        simple = flat(tree)
        if not cls.negations and _negates(simple):
            return (
                f"{cls.name} has no 'exists', nor the opposite of 'any' or of text matches; compare with values instead"
            )
        for one in conditions(simple):
            if (why := cls._why_not(one)) is not None:
                return f"{one.operator.value!r} on {one.key!r}: {cls.name} {why}"
        return None

    @classmethod
    def _why_not(cls, one: Condition) -> str | None:
        if one.operator in cls.lacks:
            hint = "; keep a key for each item of a list" if one.operator is FilterOperator.ANY else ""
            return f"has no such operator for metadata{hint}"
        if one.operator in ORDERS and isinstance(one.value, str) and not cls.orders_text:
            return "orders numbers only, not text or dates; keep a number such as 20240131"
        if not cls.keys.fullmatch(one.key):
            return "can't filter on such a key; use letters, digits and underscores"
        if not cls.is_exact and any(value_kind(value) == "number" and abs(value) > _EXACT for value in one.values):  # type: ignore[arg-type]
            return "compares numbers up to 2**53 exactly, and no larger ones"
        return None


def _negates(tree: FilterNode) -> bool:
    if isinstance(tree, Condition):
        return tree.operator is FilterOperator.EXISTS
    return tree.logic is FilterLogic.NOT or any(map(_negates, tree.filters))


class LoweredFilters(MetadataFilters):
    """LlamaIndex's form of a filter tree, which it carries."""

    _tree: FilterNode = PrivateAttr()
    _made: object = PrivateAttr()

    @property
    def tree(self) -> FilterNode | None:
        """The filter, of which this is one form; None once anything was added or changed, which must hold too."""
        return self._tree if _content(self) == self._made else None


class Lowering(Dialect[MetadataFilter | MetadataFilters]):
    """LlamaIndex's filters. Not validated: its model refuses booleans, which stores take."""

    is_exact = True
    keys = ANY_KEY

    def _group(self, logic: FilterLogic, parts: list[MetadataFilter | MetadataFilters]) -> MetadataFilters:
        return MetadataFilters.model_construct(filters=parts, condition=FilterCondition(logic.value))

    def _condition(self, condition: Condition) -> MetadataFilter | MetadataFilters:
        make: Callable[..., MetadataFilter] = MetadataFilter.model_construct
        key, operator, value = condition.key, condition.operator, condition.value
        if operator is FilterOperator.EXISTS:
            return self._group(FilterLogic.NOT, [make(key=key, value=None, operator=StoreOperator.IS_EMPTY)])
        if operator is FilterOperator.ANY and len(condition.values) == 1:
            return make(key=key, value=condition.values[0], operator=StoreOperator.CONTAINS)
        if isinstance(value, list):  # Chroma takes lists of one type only; the tree's own list must not be changed
            value = [*map(float, value)] if {type(one) for one in value} == {int, float} else [*value]
        return make(key=key, value=value, operator=_LOWERED[operator])


def lower(tree: FilterNode) -> LoweredFilters:
    """Return a filter tree as ``MetadataFilters``, simplified by ``flat``: few stores support ``not``.

    Only negated conditions without an opposite, and "is not empty", become ``not`` groups.
    """
    whole = Lowering()._walk(flat(tree))  # noqa: SLF001 (also what an unknown store may lack)
    is_group = isinstance(whole, MetadataFilters)
    lowered = (
        LoweredFilters.model_construct(**dict(whole)) if is_group else LoweredFilters.model_construct(filters=[whole])
    )
    lowered._tree, lowered._made = tree, _content(lowered)  # noqa: SLF001 (made here)
    return lowered


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
