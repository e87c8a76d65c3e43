"""Metadata filters of searches, as a tree.

A tree is a ``Condition`` (key, operator, value) or a ``FilterGroup`` (and, or, not over trees). The same tree is
written in a store's own language (``search.dialects``) and evaluated here on each returned node, so that the store's
filtering is verified. Evaluation fails closed: a condition on an absent key is false, except with ``is_empty``. The
text form of a tree is OData (``schema.odata``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import Discriminator, Field, Tag, model_validator

from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb._types import JsonMapping
from llama_index_agentic_kb.schema._model import Model

T = TypeVar("T")

Scalar: TypeAlias = bool | int | float | str


class FilterOperator(StrEnum):
    """The comparison operator of a condition."""

    EQ = "eq"
    NE = "ne"
    GT = "gt"
    GE = "ge"
    LT = "lt"
    LE = "le"
    IN = "in"
    NIN = "nin"
    ANY = "any"
    """The key's value is a list that contains at least one of the condition's values."""
    EXISTS = "exists"
    """The key is present, and its value is neither null nor an empty list. The condition's value is always true."""
    IS_EMPTY = "is_empty"
    """The key is absent, or its value is null, "" or an empty list; no other operator matches absent keys.
    The condition's value is always true."""
    TEXT_MATCH = "text_match"
    """The key's text contains the condition's value."""
    TEXT_MATCH_INSENSITIVE = "text_match_insensitive"
    """The key's text contains the condition's value, ignoring letter case."""


class FilterLogic(StrEnum):
    """The logical operator of a group."""

    AND = "and"
    OR = "or"
    NOT = "not"


_Evaluator: TypeAlias = Callable[[Mapping[str, object]], bool]
_INT64: Final = 2**63
_LISTS: Final = frozenset({FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY})
_RESERVED: Final = frozenset({"_node_content", "_node_type"})
"""Keys under which LlamaIndex's stores save the serialized node; not metadata of the document."""
EQUALITIES: Final = (FilterOperator.EQ, FilterOperator.IN)
INEQUALITIES: Final = (FilterOperator.NE, FilterOperator.NIN)
TEXT_MATCHES: Final = (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE)
ORDERS: Final = {FilterOperator.GT: ">", FilterOperator.GE: ">=", FilterOperator.LT: "<", FilterOperator.LE: "<="}
"""The operators that compare by size, with their signs in SQL."""
_OF_LISTS: Final = (FilterOperator.IS_EMPTY, FilterOperator.EXISTS, FilterOperator.ANY)
_EQUAL: Final = dict.fromkeys(EQUALITIES, True) | dict.fromkeys(INEQUALITIES, False)
_TAKES: Final[Mapping[FilterOperator, tuple[Callable[[Scalar], bool], str]]] = {
    **dict.fromkeys((FilterOperator.EXISTS, FilterOperator.IS_EMPTY), (lambda value: value is True, "true")),
    **dict.fromkeys(TEXT_MATCHES, (lambda value: isinstance(value, str) and value != "", "text")),
    **dict.fromkeys(ORDERS, (lambda value: not isinstance(value, bool), "a number or text")),
}
"""What the operators of single values take, besides eq and ne."""
_COMPARISONS: Final[Mapping[FilterOperator, Callable[[Any, Any], bool]]] = {
    FilterOperator.GT: operator.gt,
    FilterOperator.GE: operator.ge,
    FilterOperator.LT: operator.lt,
    FilterOperator.LE: operator.le,
    FilterOperator.TEXT_MATCH: operator.contains,
    FilterOperator.TEXT_MATCH_INSENSITIVE: lambda value, part: part.lower() in value.lower(),
}
_OPPOSITES: Final = {
    FilterOperator(one): FilterOperator(other)
    for one, other in (("eq", "ne"), ("gt", "le"), ("lt", "ge"), ("in", "nin"))
}
_NEGATED: Final = _OPPOSITES | {other: one for one, other in _OPPOSITES.items()}


class Condition(Model):
    """One comparison: ``metadata[key] operator value``."""

    type: Literal["condition"] = "condition"
    key: str = Field(min_length=1)
    operator: FilterOperator = FilterOperator.EQ
    value: Scalar | list[Scalar]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        """Reject what stores can't evaluate, such as keys that they read as operators; replace lone surrogates."""
        key, wants_list = without_surrogates(self.key), self.operator in _LISTS
        if key.startswith("$") or key in _RESERVED:
            raise ValueError(f"{key!r} is no field of a document: a name must not begin with '$', nor be a store's own")
        values = [without_surrogates(value) if isinstance(value, str) else value for value in self.values]
        if wants_list != isinstance(self.value, list):
            reason = f"{self.operator.value} takes a {'list' if wants_list else 'scalar'}"
        elif not values:
            reason = f"{self.operator.value} takes at least one value"
        elif not all(map(_is_storable, values)):
            reason = "a number must be finite, a whole one within 64 bits"
        elif (takes := _TAKES.get(self.operator)) and not takes[0](values[0]):
            reason = f"{self.operator.value} takes {takes[1]}"
        else:
            self.key, self.value = key, values if wants_list else values[0]
            return self
        raise ValueError(f"filter on {key!r}: {reason}")

    @property
    def values(self) -> list[Scalar]:
        """The values as a list, also for a single value."""
        return self.value if isinstance(self.value, list) else [self.value]


def _is_storable(value: Scalar) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) or -_INT64 <= value < _INT64


class FilterGroup(Model):
    """Several trees with one logical operator; ``not`` matches if none of them matches."""

    type: Literal["group"] = "group"
    logic: FilterLogic = FilterLogic.AND
    filters: list[FilterNode] = Field(min_length=1)
    """The child trees; at least one, as an empty group would match everything."""


def _kind(value: object) -> str:
    is_group = "filters" in value if isinstance(value, dict) else isinstance(value, FilterGroup)
    return "group" if is_group else "condition"


FilterNode: TypeAlias = Annotated[
    Annotated[Condition, Tag("condition")] | Annotated[FilterGroup, Tag("group")], Discriminator(_kind)
]

FilterGroup.model_rebuild()


def all_of(*filters: FilterNode | JsonMapping | None) -> FilterNode | None:
    """Combine filters, or their JSON forms, with AND in one group, ignoring None; return None if no filter remains.

    Raises:
        InvalidRequestError: A part is no filter.
    """
    trees: list[FilterNode] = []
    for given in filters:
        if isinstance(given, (Condition, FilterGroup)):
            trees.append(given)
        elif given is not None:
            trees += FilterGroup.parse({"filters": [given]}).filters
    if len(trees) <= 1:
        return trees[0] if trees else None
    parts: list[FilterNode] = []
    for tree in trees:
        parts += tree.filters if isinstance(tree, FilterGroup) and tree.logic is FilterLogic.AND else [tree]
    return FilterGroup.model_construct(logic=FilterLogic.AND, filters=parts)  # they are valid


def any_of(*filters: FilterNode) -> FilterNode:
    """Combine filters with OR."""
    return FilterGroup(logic=FilterLogic.OR, filters=list(filters))


def matches(tree: FilterNode, metadata: Mapping[str, object]) -> bool:
    """Return whether flat metadata pass a filter; they do not if a key is absent or a value can't be compared."""
    return matcher(tree)(metadata)


def matcher(tree: FilterNode, *, wanted: bool = True) -> _Evaluator:
    """Return a function that evaluates one filter on the metadata of many documents, equal to ``matches``.

    With ``wanted`` False, it evaluates whether documents are known not to match: they may be neither, as the negation
    of unknown is unknown. Only conditions on keys that a document has are evaluated: there may be a thousand groups.
    """
    if isinstance(tree, Condition):
        return partial(_compare, tree, frozenset(zip(map(value_kind, tree.values), tree.values, strict=True)), wanted)
    needs_all = (tree.logic is not FilterLogic.OR) is wanted
    by_key: dict[str, list[_Evaluator]] = {}
    others: list[_Evaluator] = []
    for child in tree.filters:
        same = others
        if isinstance(child, Condition) and child.operator is not FilterOperator.IS_EMPTY:
            same = by_key.setdefault(child.key, [])
        same.append(matcher(child, wanted=wanted is not (tree.logic is FilterLogic.NOT)))

    def holds(metadata: Mapping[str, object]) -> bool:
        if needs_all and not by_key.keys() <= metadata.keys():
            return False
        for evaluate in chain(*map(by_key.__getitem__, by_key.keys() & metadata.keys()), others):
            if evaluate(metadata) is not needs_all:
                return not needs_all
        return needs_all

    return holds


def _compare(
    condition: Condition, values: frozenset[tuple[str | None, Scalar]], wanted: bool, metadata: Mapping[str, object]
) -> bool:
    """Return whether a condition is known to hold, or known not to hold if ``wanted`` is False.

    Neither is known if the key is absent, or its value has another type than the condition's.
    """
    value, comparison = metadata.get(condition.key), condition.operator
    held: bool | None = None
    if comparison in _OF_LISTS:
        held = _holds_of_list(comparison, value, values)
    elif kind := value_kind(value):
        if comparison in _EQUAL:
            held = ((kind, value) in values) is _EQUAL[comparison]
        elif kind == value_kind(condition.value) and kind != "boolean":
            held = bool(_COMPARISONS[comparison](value, condition.value))
    return held is wanted


def _holds_of_list(comparison: FilterOperator, value: object, values: Collection[object]) -> bool | None:
    """Return whether an operator that reads lists holds; None if that is not known."""
    items = value if isinstance(value, (list, tuple, set, frozenset)) else None
    if comparison is FilterOperator.IS_EMPTY:
        return value in (None, "") if items is None else not items
    if comparison is FilterOperator.EXISTS:
        return None if value is None else items is None or bool(items)
    return None if items is None else any(value_kind(item) and (value_kind(item), item) in values for item in items)


def value_key(value: T) -> tuple[bool, T]:
    """Return a key that tells ``True`` from 1, as stores do; in Python the two are equal."""
    return isinstance(value, bool), value


def value_kind(value: object) -> Literal["boolean", "string", "number"] | None:
    """Return the type as which stores compare a value; None for a list, and for values that a condition can't have."""
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number" if isinstance(value, (int, float)) else None


def conditions(tree: FilterNode) -> Iterator[Condition]:
    """Yield every condition of a tree."""
    if isinstance(tree, Condition):
        yield tree
    else:
        for child in tree.filters:
            yield from conditions(child)


def flat(tree: FilterNode, *, negate: bool = False) -> FilterNode:
    """Return a simplified filter that matches no more nodes, without nested groups of the same logic.

    Negations are pushed down to the conditions (De Morgan), since few stores support ``not``. Only conditions without
    an opposite (``any``, ``exists``, ``is_empty`` and the text matches) keep a ``not`` group. For nodes that have all
    keys, the result matches exactly the same nodes. ``negate`` returns the negation.
    """
    if isinstance(tree, Condition):
        if not negate:
            return tree
        if tree.operator in _NEGATED:
            return tree.model_copy(update={"operator": _NEGATED[tree.operator]})
        return FilterGroup.model_construct(logic=FilterLogic.NOT, filters=[tree])
    negates = tree.logic is FilterLogic.NOT  # no child matches: the opposite of "or"
    negate = negate != negates
    joins = (tree.logic is not FilterLogic.AND) != negate
    logic = FilterLogic.OR if joins else FilterLogic.AND
    filters: list[FilterNode] = []
    for child in tree.filters:
        part = flat(child, negate=negate)
        filters += part.filters if isinstance(part, FilterGroup) and part.logic is logic else [part]
    return filters[0] if len(filters) == 1 else FilterGroup.model_construct(logic=logic, filters=filters)
