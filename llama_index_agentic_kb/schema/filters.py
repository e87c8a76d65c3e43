"""Metadata filters as a tree: what a source is asked to narrow its search to.

A tree is a ``Condition`` (key, operator, value) or a ``FilterGroup`` (and, or, not over trees). The same tree is
lowered to a store's own filters (``sources.filters``) and evaluated here on each node that comes back: a store is
never trusted alone. Evaluation fails closed: a condition on an absent key is false, whatever the operator. As text a
tree is OData (``schema.odata``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb.schema._model import Model

__all__ = [
    "Condition",
    "FilterGroup",
    "FilterLogic",
    "FilterNode",
    "FilterOperator",
    "all_of",
    "any_of",
    "matcher",
    "matches",
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
    ANY = "any"
    """One of the items of a list-valued key is one of the values."""
    EXISTS = "exists"
    """The key is there, with a value that is no empty list; its own value is always true."""


class FilterLogic(StrEnum):
    """How the trees of a group combine."""

    AND = "and"
    OR = "or"
    NOT = "not"


_INT64: Final = 2**63
_LISTS: Final = frozenset({FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY})
_RESERVED: Final = frozenset({"_node_content", "_node_type"})
"""Keys under which LlamaIndex's stores keep the node itself: they say nothing of a document."""


class Condition(Model):
    """One comparison: ``metadata[key] operator value``."""

    type: Literal["condition"] = "condition"
    key: str = Field(min_length=1)
    operator: FilterOperator = FilterOperator.EQ
    value: Scalar | list[Scalar]

    @field_validator("key", "value", mode="before")
    @classmethod
    def _writable(cls, value: Any) -> Any:
        """Replace lone surrogates, as in documents: no store could be asked for them."""
        if isinstance(value, list):
            return [without_surrogates(item) if isinstance(item, str) else item for item in value]
        return without_surrogates(value) if isinstance(value, str) else value

    @field_validator("key")
    @classmethod
    def _names_a_field(cls, key: str) -> str:
        """A key is as much from outside as a value: stores read ``$or`` and its like as operators."""
        if key.startswith("$") or key in _RESERVED:
            raise ValueError(f"{key!r} is no field of a document: a name must not begin with '$', nor be a store's own")
        return key

    @model_validator(mode="after")
    def _value_fits_operator(self) -> Self:
        wants_list = self.operator in _LISTS
        if wants_list != isinstance(self.value, list):
            raise ValueError(
                f"filter on {self.key!r}: {self.operator.value} takes a {'list' if wants_list else 'scalar'}"
            )
        if wants_list and not self.value:
            raise ValueError(f"filter on {self.key!r}: {self.operator.value} takes at least one value")
        if self.operator is FilterOperator.EXISTS and self.value is not True:
            raise ValueError(f"filter on {self.key!r}: exists takes true; what is unknown can't be asked for")
        for value in self.values:
            fits = (
                -_INT64 <= value < _INT64 if isinstance(value, int) else isinstance(value, str) or math.isfinite(value)
            )
            if not fits:
                raise ValueError(f"filter on {self.key!r}: a number must be finite, a whole one within 64 bits")
        return self

    @property
    def values(self) -> list[Scalar]:
        """The value, or those of the list."""
        return self.value if isinstance(self.value, list) else [self.value]


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
    """Return the tree that holds where all of these hold; None without any."""
    trees = [tree for tree in filters if tree is not None]
    if len(trees) <= 1:
        return trees[0] if trees else None
    return FilterGroup(logic=FilterLogic.AND, filters=trees)


def any_of(*filters: FilterNode) -> FilterNode:
    """Return the tree that holds where one of these holds."""
    return FilterGroup(logic=FilterLogic.OR, filters=list(filters))


def matches(tree: FilterNode, metadata: Mapping[str, Any]) -> bool:
    """Return whether a node's metadata passes a filter.

    Args:
        tree: The filter.
        metadata: The node's metadata, flat.

    Returns:
        False also where a key is absent or a value can't be compared (fail closed).
    """
    return _ready(tree)(metadata) is True


def matcher(tree: FilterNode) -> Callable[[Mapping[str, Any]], bool]:
    """Return ``matches`` for one filter and the metadata of many documents.

    A caller in a thousand groups has a filter of a thousand conditions, of which a document's metadata hold few keys:
    only these are compared.
    """
    holds = _ready(tree)
    return lambda metadata: holds(metadata) is True


_Ready: TypeAlias = Callable[[Mapping[str, Any]], bool | None]

_MANY: Final = 8
"""Conditions of a group from which on they are looked up by the keys that are there."""


def _ready(tree: FilterNode) -> _Ready:
    if isinstance(tree, Condition):
        return lambda metadata: _compare(tree, metadata.get(tree.key))
    by_key: dict[str, list[Condition]] = {}
    if tree.logic is FilterLogic.OR and len(tree.filters) >= _MANY:
        for child in tree.filters:
            if isinstance(child, Condition):
                by_key.setdefault(child.key, []).append(child)
    others = [_ready(child) for child in tree.filters if not (by_key and isinstance(child, Condition))]
    decides = tree.logic is not FilterLogic.AND
    decided = tree.logic is FilterLogic.OR

    def holds(metadata: Mapping[str, Any]) -> bool | None:
        known = [key for key in metadata if key in by_key]
        unknown = len(known) < len(by_key)  # a condition on an absent key
        held = (_compare(one, metadata[key]) for key in known for one in by_key[key])
        for one in chain(held, (other(metadata) for other in others)):
            if one is decides:
                return decided
            unknown = unknown or one is None
        return None if unknown else not decided

    return holds


def _compare(condition: Condition, value: Any) -> bool | None:
    """Compare a value; None where it is absent or of another kind than what it is compared with."""
    if value is None:
        return None
    if condition.operator is FilterOperator.EXISTS:
        return not (isinstance(value, _COLLECTIONS) and len(value) == 0)
    if condition.operator is FilterOperator.ANY:
        return _any_item(value, condition.values) if isinstance(value, _COLLECTIONS) else None
    return _compare_scalar(condition, value) if isinstance(value, (str, int, float)) else None


def _compare_scalar(condition: Condition, value: str | float) -> bool | None:
    expected: Any = condition.value
    if condition.operator in _EQUALITIES:
        return _EQUALITIES[condition.operator](value, expected)
    if isinstance(value, str) != isinstance(expected, str):
        return None
    return bool(_ORDERS[condition.operator](value, expected))


def _any_item(items: Iterable[Any], expected: list[Scalar]) -> bool:
    return any(_equal(item, value) for item in items for value in expected)


def _equal(value: Any, expected: Scalar) -> bool:
    """Equality without Python's ``True == 1``."""
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)


_COLLECTIONS: Final = (list, tuple, set, frozenset)
_EQUALITIES: Final[Mapping[FilterOperator, Callable[[Any, Any], bool]]] = {
    FilterOperator.EQ: _equal,
    FilterOperator.NE: lambda value, expected: not _equal(value, expected),
    FilterOperator.IN: lambda value, expected: any(_equal(value, one) for one in expected),
    FilterOperator.NIN: lambda value, expected: not any(_equal(value, one) for one in expected),
}
_ORDERS: Final[Mapping[FilterOperator, Callable[[Any, Any], bool]]] = {
    FilterOperator.GT: operator.gt,
    FilterOperator.GE: operator.ge,
    FilterOperator.LT: operator.lt,
    FilterOperator.LE: operator.le,
}
