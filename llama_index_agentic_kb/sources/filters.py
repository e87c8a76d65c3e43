"""Conversion between filter trees and LlamaIndex's ``MetadataFilters``, and planners' filters.

A filter written by the planner's model is checked against the fields, operators and values that a source declares, and
rejected with a reason; nothing is guessed. A valid filter is combined by AND with the mandatory filter
(``KnowledgeSource.effective_filter``), so that it can only narrow a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

from llama_index.core.vector_stores.types import (
    FilterCondition,
    MetadataFilter,
    MetadataFilters,
)
from llama_index.core.vector_stores.types import FilterOperator as StoreOperator

from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, PlanningError
from llama_index_agentic_kb.schema import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    FilterOperator,
    parse_odata,
    to_odata,
    value_key,
)
from llama_index_agentic_kb.schema.filters import ORDERS, Scalar

FilterLike: TypeAlias = "Condition | FilterGroup | MetadataFilters | MetadataFilter | str | None"
"""A filter as callers may pass it; a string is an OData filter."""

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
    FilterOperator.TEXT_MATCH: StoreOperator.TEXT_MATCH,
    FilterOperator.TEXT_MATCH_INSENSITIVE: StoreOperator.TEXT_MATCH_INSENSITIVE,
    FilterOperator.IS_EMPTY: StoreOperator.IS_EMPTY,
}
_RAISED: Final = {store: ours for ours, store in _LOWERED.items()}
_OPPOSITES: Final = (
    (FilterOperator.EQ, FilterOperator.NE),
    (FilterOperator.GT, FilterOperator.LE),
    (FilterOperator.LT, FilterOperator.GE),
    (FilterOperator.IN, FilterOperator.NIN),
)
_NEGATED: Final = {**dict(_OPPOSITES), **{other: one for one, other in _OPPOSITES}}


def lower(tree: FilterNode) -> MetadataFilters:
    """Return a filter tree as ``MetadataFilters``, simplified by ``flat``: few stores support ``not``.

    Only negated ``any`` conditions, which have no opposite, and "is not empty" become ``not`` groups.
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
    """Return a simplified filter that matches no more nodes, without nested groups of the same logic.

    Negations are pushed down to the conditions (De Morgan). Only conditions without an opposite, ``any`` and
    ``exists``, keep a ``not`` group. For nodes that have all keys, the result matches exactly the same nodes.

    Args:
        tree: The filter.
        negate: Whether to return the negation of the filter.
    """
    if isinstance(tree, Condition):
        if not negate:
            return tree
        if tree.operator in _NEGATED:
            return tree.model_copy(update={"operator": _NEGATED[tree.operator]})
        return FilterGroup(logic=FilterLogic.NOT, filters=[tree])
    negates = tree.logic is FilterLogic.NOT  # no child matches: the opposite of "or"
    negate = negate != negates
    joins = (tree.logic is not FilterLogic.AND) != negate
    logic = FilterLogic.OR if joins else FilterLogic.AND
    filters: list[FilterNode] = []
    for child in (flat(child, negate=negate) for child in tree.filters):
        same = isinstance(child, FilterGroup) and child.logic is logic
        filters.extend(child.filters if isinstance(child, FilterGroup) and same else [child])
    return filters[0] if len(filters) == 1 else FilterGroup(logic=logic, filters=filters)


def conditions(tree: FilterNode) -> Iterator[Condition]:
    """Yield every condition of a tree."""
    if isinstance(tree, Condition):
        yield tree
        return
    for child in tree.filters:
        yield from conditions(child)


def to_tree(filters: FilterLike) -> FilterNode | None:
    """Convert a caller's filter to a filter tree; None stays None.

    Raises:
        InvalidRequestError: The filter is empty (which would mean "everything"), is not valid OData, or has an
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
    if one.operator is StoreOperator.IS_EMPTY:
        return _checked(one.key, FilterOperator.IS_EMPTY, value=True)
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


# -- planners' filters ------------------------------------------------------------------------------------------------

FieldType: TypeAlias = Literal["string", "integer", "number", "boolean", "date"]

MAX_FILTER: Final = 2_000
"""The maximum length of a planner's filter in characters."""
_LISTED_VALUES: Final = 30
"""The maximum number of a field's declared values listed in the planner's prompt."""

_EQUAL: Final = (FilterOperator.EQ, FilterOperator.NE)
_MANY: Final = (FilterOperator.IN, FilterOperator.NIN)
_OPERATORS: Final[Mapping[str, tuple[FilterOperator, ...]]] = {
    "string": (*_EQUAL, *_MANY),
    "integer": (*_EQUAL, *ORDERS, *_MANY),
    "number": (*_EQUAL, *ORDERS, *_MANY),
    "boolean": _EQUAL,
    "date": (*_EQUAL, *ORDERS, *_MANY),
}


@dataclass(frozen=True, slots=True)
class FilterField:
    """A metadata field that a planner may filter on.

    Args:
        type: The type of the values: "string", "integer", "number" (whole or decimal), "boolean", or "date". A date is
            an ISO date or date-time, compared as text, so all documents must use one format (Chroma compares only
            numbers: use an "integer" such as 20240131 there).
        description: A description of the field, for the planner.
        values: All allowed values; the planner may use no other. Defaults to any value of the type.
        operators: The allowed operators. Defaults to all that fit the type: eq, ne, in and nin (booleans: eq and ne),
            and gt, ge, lt and le for numbers and dates. ``("any",)`` declares a list-valued field.

    Raises:
        ConfigurationError: The type or an operator is unknown, or a value does not have the type.
    """

    type: FieldType
    description: str = ""
    values: Sequence[Scalar] | None = None
    operators: Sequence[FilterOperator | str] | None = None

    def __post_init__(self) -> None:
        """Check the declaration, and convert its sequences to tuples."""
        if self.type not in _OPERATORS:
            raise ConfigurationError(f"FilterField: type {self.type!r} is unknown; known are {', '.join(_OPERATORS)}")
        if self.values is not None and (isinstance(self.values, str) or not self.values):
            raise ConfigurationError("FilterField: values is a list of at least one value, or None for any")
        wrong = [value for value in self.values or () if not _is_of(self.type, value)]
        if wrong:
            raise ConfigurationError(f"FilterField: {wrong[0]!r} is no {self.type}")
        fitting = _OPERATORS[self.type]
        operators, known = fitting if self.operators is None else self.operators, (*fitting, FilterOperator.ANY)
        if isinstance(operators, str) or not operators or not set(operators) <= set(known):
            raise ConfigurationError(
                f"FilterField: operators of a {self.type} are some of {', '.join(known)}, got {self.operators!r}"
            )
        object.__setattr__(self, "values", None if self.values is None else tuple(self.values))
        object.__setattr__(self, "operators", tuple(map(FilterOperator, operators)))


def declared_fields(source: str, fields: Mapping[str, FilterField] | None) -> dict[str, FilterField]:
    """Return a source's declared fields after checking them.

    Raises:
        ConfigurationError: A value is not a ``FilterField``, or a field has no name.
    """
    declared: list[tuple[object, object]] = list((fields or {}).items())
    for name, field in declared:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"source {source!r}: filterable: {name!r} is no name of a metadata field")
        if not isinstance(field, FilterField):
            kind = type(field).__name__
            raise ConfigurationError(f"source {source!r}: filterable[{name!r}]: expected FilterField, got {kind}")
    return dict(fields or {})


def describe_fields(fields: Mapping[str, FilterField]) -> str:
    """Return the planner's description of the filterable fields, one line each; empty if there are no fields."""
    lines = []
    for name, field in fields.items():
        about = f": {one_line(field.description)}" if field.description else ""
        values = ""
        if field.values is not None:
            shown = ", ".join(_literal(value) for value in field.values[:_LISTED_VALUES])
            more = len(field.values) - _LISTED_VALUES
            values = f"; values: {shown}" + (f" and {more} more" if more > 0 else "")
        lines.append(f"- {_example(name, field)} ({field.type}{about}{values})")
    return "\n".join(lines)


def _example(name: str, field: FilterField) -> str:
    """Return the field as written in an OData filter, with its allowed operators."""
    if field.operators == (FilterOperator.ANY,):
        return to_odata(Condition(key=name, operator=FilterOperator.ANY, value=["..."]))
    key = to_odata(Condition(key=name, value=0)).removesuffix(" eq 0")
    words = [str(word) for word in field.operators or () if word not in (FilterOperator.NIN, FilterOperator.ANY)]
    return f"{key} {'|'.join(words)}"


def _literal(value: Scalar) -> str:
    return to_odata(Condition(key="x", value=value)).removeprefix("x eq ")


def read_planner_filter(text: str, fields: Mapping[str, FilterField]) -> FilterNode:
    """Parse and check a filter written by the planner.

    Args:
        text: The OData filter.
        fields: The source's declared fields.

    Raises:
        PlanningError: The text is not a valid filter, or uses an undeclared field, operator or value; the message names
            it and the declared ones.
    """
    if len(text) > MAX_FILTER:
        raise PlanningError(f"the filter has {len(text)} characters; at most {MAX_FILTER} are read")
    try:
        tree = parse_odata(text)
    except InvalidRequestError as error:
        raise PlanningError(str(error)) from error
    for condition in conditions(flat(tree)):  # "not" is resolved first: it may need an undeclared operator
        _check_declared(condition, fields)
    return tree


def _check_declared(condition: Condition, fields: Mapping[str, FilterField]) -> None:
    key, field = condition.key, fields.get(condition.key)
    if field is None:
        raise PlanningError(f"the field {key!r} can't be filtered on; declared are: {', '.join(fields) or 'none'}")
    if condition.operator not in (field.operators or ()):
        known = ", ".join(field.operators or ())
        raise PlanningError(f"{condition.operator.value!r} can't be used on {key!r}; declared are: {known}")
    for value in condition.values:
        if not _is_of(field.type, value):
            raise PlanningError(f"{value!r} is no {field.type}, as values of {key!r} are")
        if field.values is not None and value_key(value) not in map(value_key, field.values):
            known = one_line(", ".join(map(_literal, field.values[:_LISTED_VALUES])))
            raise PlanningError(f"{value!r} is no value of {key!r}; declared are: {known}")


def _is_of(kind: str, value: object) -> bool:
    if kind == "boolean":
        return isinstance(value, bool)
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
    if not isinstance(value, str):
        return False
    try:
        return kind == "string" or bool(datetime.fromisoformat(value))
    except ValueError:
        return False
