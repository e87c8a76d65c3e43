"""Metadata filters as a tree: what a source is asked to narrow its search to.

A tree is a ``Condition`` (key, operator, value) or a ``FilterGroup`` (and, or, not over trees). The same tree is
lowered to a store's own filters (``sources.filters``) and evaluated here on each node that comes back: a store is
never trusted alone. Evaluation fails closed: a condition on an absent key is false, whatever the operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from llama_index_agentic_kb.schema._model import Model

__all__ = [
    "Condition",
    "FilterGroup",
    "FilterLogic",
    "FilterNode",
    "FilterOperator",
    "all_of",
    "any_of",
    "matches",
    "to_odata",
]

Scalar: TypeAlias = bool | int | float | str


class FilterOperator(StrEnum):
    """How a value of the metadata is compared."""

    EQ = "eq"
    NE = "ne"
    GT = "gt"
    GE = "ge"
    LT = "lt"
    LE = "le"
    IN = "in"
    NIN = "nin"


class FilterLogic(StrEnum):
    """How the trees of a group combine."""

    AND = "and"
    OR = "or"
    NOT = "not"


class Condition(Model):
    """One comparison: ``metadata[key] operator value``."""

    type: Literal["condition"] = "condition"
    key: str = Field(min_length=1)
    operator: FilterOperator = FilterOperator.EQ
    value: Scalar | list[Scalar]

    @model_validator(mode="after")
    def _value_fits_operator(self) -> Self:
        wants_list = self.operator in (FilterOperator.IN, FilterOperator.NIN)
        if wants_list != isinstance(self.value, list):
            raise ValueError(
                f"filter on {self.key!r}: {self.operator.value} takes a {'list' if wants_list else 'scalar'}"
            )
        if wants_list and not self.value:
            raise ValueError(f"filter on {self.key!r}: {self.operator.value} takes at least one value")
        return self


class FilterGroup(Model):
    """Several trees under one logic; ``not`` means none of them holds."""

    type: Literal["group"] = "group"
    logic: FilterLogic = FilterLogic.AND
    filters: list[FilterNode] = Field(min_length=1)
    """At least one: an empty group would let everything through."""


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "group" if "filters" in value else "condition"
    return "group" if isinstance(value, FilterGroup) else "condition"


FilterNode: TypeAlias = Annotated[
    Annotated[Condition, Tag("condition")] | Annotated[FilterGroup, Tag("group")], Discriminator(_kind)
]
"""A filter tree."""

FilterGroup.model_rebuild()


def all_of(*filters: FilterNode | None) -> FilterNode | None:
    """Give the tree that holds where all given ones hold; None where none is given."""
    given = [tree for tree in filters if tree is not None]
    if len(given) <= 1:
        return given[0] if given else None
    return FilterGroup(logic=FilterLogic.AND, filters=given)


def any_of(*filters: FilterNode) -> FilterNode:
    """Give the tree that holds where one of the given ones holds."""
    return FilterGroup(logic=FilterLogic.OR, filters=list(filters))


def matches(tree: FilterNode, metadata: Mapping[str, Any]) -> bool:
    """Tell whether a node's metadata passes a filter.

    Args:
        tree: The filter.
        metadata: The node's metadata, flat.

    Returns:
        False also where a key is absent or a value can't be compared (fail closed).
    """
    return _holds(tree, metadata) is True


def _holds(tree: FilterNode, metadata: Mapping[str, Any]) -> bool | None:
    """Evaluate in three-valued logic, as SQL does: None is unknown, and a negation of the unknown stays unknown."""
    if isinstance(tree, Condition):
        return _compare(tree, metadata.get(tree.key))
    held = [_holds(child, metadata) for child in tree.filters]
    decides = tree.logic is not FilterLogic.AND  # what decides a group: one that holds, or in "and" one that doesn't
    if decides in held:
        return tree.logic is FilterLogic.OR
    return None if None in held else tree.logic is not FilterLogic.OR


def _compare(condition: Condition, value: Any) -> bool | None:
    """Compare a value; None where it is absent or of another kind than what it is compared with."""
    if value is None:
        return None
    wanted: Any = condition.value
    if condition.operator in _EQUALITIES:
        return _EQUALITIES[condition.operator](value, wanted)
    if isinstance(value, str) != isinstance(wanted, str) or not isinstance(value, (str, int, float)):
        return None
    return bool(_ORDERS[condition.operator](value, wanted))


def _equal(value: Any, wanted: Scalar) -> bool:
    """Equality without Python's ``True == 1``."""
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


_EQUALITIES: Final[Mapping[FilterOperator, Callable[[Any, Any], bool]]] = {
    FilterOperator.EQ: _equal,
    FilterOperator.NE: lambda value, wanted: not _equal(value, wanted),
    FilterOperator.IN: lambda value, wanted: any(_equal(value, one) for one in wanted),
    FilterOperator.NIN: lambda value, wanted: not any(_equal(value, one) for one in wanted),
}
_ORDERS: Final[Mapping[FilterOperator, Callable[[Any, Any], bool]]] = {
    FilterOperator.GT: operator.gt,
    FilterOperator.GE: operator.ge,
    FilterOperator.LT: operator.lt,
    FilterOperator.LE: operator.le,
}


def to_odata(tree: FilterNode) -> str:
    """Write a filter as OData text, for accounts and contracts. Searches never rest on it."""
    if isinstance(tree, FilterGroup):
        parts = [to_odata(child) for child in tree.filters]
        joined = (" and " if tree.logic is FilterLogic.AND else " or ").join(parts)
        return f"not ({joined})" if tree.logic is FilterLogic.NOT else joined if len(parts) == 1 else f"({joined})"
    if isinstance(tree.value, list):
        equal = f"({' or '.join(f'{tree.key} eq {_literal(value)}' for value in tree.value)})"
        return f"not {equal}" if tree.operator is FilterOperator.NIN else equal
    return f"{tree.key} {tree.operator.value} {_literal(tree.value)}"


def _literal(value: Scalar) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower() if isinstance(value, bool) else str(value)
