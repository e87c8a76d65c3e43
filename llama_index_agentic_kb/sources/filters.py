"""Planners' filters, over the fields that a source declares.

A filter written by the planner's model is checked against the declared fields, operators and values, and rejected with
a reason; nothing is guessed. A valid filter is combined by AND with the mandatory filter
(``KnowledgeSource.effective_filter``), so that it can only narrow a search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias

from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, PlanningError
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.schema import Condition, FilterNode, FilterOperator, parse_odata, to_odata, value_key
from llama_index_agentic_kb.schema.filters import ORDERS, Scalar, conditions, flat, value_kind

FieldType: TypeAlias = Literal["string", "integer", "number", "boolean", "date"]

MAX_FILTER: Final = 2_000
"""The maximum length of a planner's filter in characters."""
_LISTED_VALUES: Final = 30
"""The maximum number of a field's declared values listed in the planner's prompt."""

_EQUAL: Final = (FilterOperator.EQ, FilterOperator.NE)
_MANY: Final = (FilterOperator.IN, FilterOperator.NIN)
_OPERATORS: Final[Mapping[str, tuple[FilterOperator, ...]]] = {
    "string": (*_EQUAL, *_MANY),
    **dict.fromkeys(("integer", "number", "date"), (*_EQUAL, *ORDERS, *_MANY)),
    "boolean": _EQUAL,
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
        if self.values is not None:
            object.__setattr__(self, "values", _checked_values(self.values, self.type))
        fitting = _OPERATORS[self.type]
        operators, known = fitting if self.operators is None else self.operators, (*fitting, FilterOperator.ANY)
        if isinstance(operators, str) or not operators or not set(operators) <= set(known):
            raise ConfigurationError(
                f"FilterField: operators of a {self.type} are some of {', '.join(known)}, got {self.operators!r}"
            )
        object.__setattr__(self, "operators", tuple(map(FilterOperator, operators)))


def _checked_values(values: Sequence[Scalar], kind: FieldType) -> tuple[Scalar, ...]:
    if isinstance(values, str) or not values:
        raise ConfigurationError("FilterField: values is a list of at least one value, or None for any")
    for value in values:
        if not _is_of(kind, value):
            raise ConfigurationError(f"FilterField: {value!r} is no {kind}")
    return tuple(values)


def declared_fields(
    source: str, fields: Mapping[str, FilterField] | None, permissions: Permissions | None
) -> dict[str, FilterField]:
    """Return a source's declared fields; ``ConfigurationError`` for a wrong one, or one that readers may not see."""
    declared: list[tuple[object, object]] = list((fields or {}).items())
    for name, field in declared:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"source {source!r}: filterable: {name!r} is no name of a metadata field")
        if not isinstance(field, FilterField):
            kind = type(field).__name__
            raise ConfigurationError(f"source {source!r}: filterable[{name!r}]: expected FilterField, got {kind}")
        if permissions is not None and permissions.hides(name):
            raise ConfigurationError(f"source {source!r}: filterable: {name!r} says whom documents are shared with")
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
    """Parse and check a filter written by the planner, by the source's declared fields.

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
    if kind == "integer":
        return value_kind(value) == "number" and isinstance(value, int)
    if kind != "date":
        return value_kind(value) == kind
    try:
        return bool(datetime.fromisoformat(value)) if isinstance(value, str) else False
    except ValueError:
        return False
