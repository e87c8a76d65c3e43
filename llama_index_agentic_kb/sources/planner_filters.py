"""Filters that a planner may make: only over the fields, operators and values that a source declares.

What a model writes is checked against the declaration and refused with a reason; nothing is guessed. A filter that
passes is joined to the mandatory one (``KnowledgeSource.effective_filter``), so that it can only narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, PlanningError
from llama_index_agentic_kb.schema import Condition, FilterNode, FilterOperator, parse_odata, to_odata
from llama_index_agentic_kb.sources.filters import conditions, flat

__all__ = ["FieldType", "FilterField", "declared_fields", "describe_fields", "read_planner_filter"]

FieldType: TypeAlias = Literal["string", "integer", "number", "boolean", "date"]
Value: TypeAlias = bool | int | float | str

MAX_FILTER: Final = 2_000
"""Characters of a planner's filter."""
_LISTED_VALUES: Final = 30
"""Declared values that the planner is shown of a field."""

_EQUAL: Final = (FilterOperator.EQ, FilterOperator.NE)
_MANY: Final = (FilterOperator.IN, FilterOperator.NIN)
_ORDER: Final = (FilterOperator.GT, FilterOperator.GE, FilterOperator.LT, FilterOperator.LE)
_OPERATORS: Final[Mapping[str, tuple[FilterOperator, ...]]] = {
    "string": (*_EQUAL, *_MANY),
    "integer": (*_EQUAL, *_ORDER, *_MANY),
    "number": (*_EQUAL, *_ORDER, *_MANY),
    "boolean": _EQUAL,
    "date": (*_EQUAL, *_ORDER, *_MANY),
}


@dataclass(frozen=True, slots=True)
class FilterField:
    """A metadata field that a planner may filter on.

    Args:
        type: What its values are: "string", "integer", "number" (whole or decimal), "boolean", or "date": text that
            is an ISO date or date-time, compared as text, so that all documents must write it in one form (Chroma
            orders numbers only: there, an "integer" such as 20240131).
        description: What it says of a document, for the planner.
        values: All values that it has; the planner may use no other. None leaves them open.
        operators: Those that may be used. None is all that fit the type: eq and ne, their lists (in, nin), and the
            orders (gt, ge, lt, le) of numbers and dates. ``("any",)`` declares a list-valued field.

    Raises:
        ConfigurationError: Type or operators are unknown, or a value is not of the type.
    """

    type: FieldType
    description: str = ""
    values: Sequence[Value] | None = None
    operators: Sequence[FilterOperator | str] | None = None

    def __post_init__(self) -> None:
        """Check the declaration, and fix its lists."""
        if self.type not in _OPERATORS:
            raise ConfigurationError(f"FilterField: type {self.type!r} is unknown; known are {', '.join(_OPERATORS)}")
        if self.values is not None and (isinstance(self.values, str) or not self.values):
            raise ConfigurationError("FilterField: values is a list of at least one value, or None for any")
        wrong = [value for value in self.values or () if not _is_of(self.type, value)]
        if wrong:
            raise ConfigurationError(f"FilterField: {wrong[0]!r} is no {self.type}")
        object.__setattr__(self, "values", None if self.values is None else tuple(self.values))
        object.__setattr__(self, "operators", self._known_operators())

    def _known_operators(self) -> tuple[FilterOperator, ...]:
        if self.operators is None:
            return _OPERATORS[self.type]
        known = (*_OPERATORS[self.type], FilterOperator.ANY)
        unknown = [one for one in self.operators if one not in known]
        if unknown or not self.operators or isinstance(self.operators, str):
            raise ConfigurationError(
                f"FilterField: operators of a {self.type} are some of {', '.join(known)}, got {self.operators!r}"
            )
        return tuple(FilterOperator(one) for one in self.operators)


def declared_fields(source: str, fields: Mapping[str, FilterField] | None) -> dict[str, FilterField]:
    """Return a source's declared fields, checked.

    Raises:
        ConfigurationError: One is no ``FilterField``, or has no name.
    """
    declared: Mapping[Any, Any] = fields or {}
    for name, field in declared.items():
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"source {source!r}: filterable: {name!r} is no name of a metadata field")
        if not isinstance(field, FilterField):
            raise ConfigurationError(
                f"source {source!r}: filterable[{name!r}]: expected FilterField, got {type(field).__name__}"
            )
    return dict(fields or {})


def describe_fields(fields: Mapping[str, FilterField]) -> str:
    """Return what a planner reads of the fields that it may filter on, a line each; empty where there are none."""
    return "\n".join(_described(name, field) for name, field in fields.items())


def _described(name: str, field: FilterField) -> str:
    about = f": {one_line(field.description)}" if field.description else ""
    values = ""
    if field.values is not None:
        shown = ", ".join(_literal(value) for value in field.values[:_LISTED_VALUES])
        more = len(field.values) - _LISTED_VALUES
        values = f"; values: {shown}" + (f" and {more} more" if more > 0 else "")
    return f"- {_example(name, field)} ({field.type}{about}{values})"


def _example(name: str, field: FilterField) -> str:
    """Return the field as it stands in a filter, with the words that may follow it."""
    value = Condition(key=name, operator=FilterOperator.ANY, value=["..."])
    if field.operators == (FilterOperator.ANY,):
        return to_odata(value)
    key = to_odata(Condition(key=name, value=0)).removesuffix(" eq 0")
    words = [str(one) for one in field.operators or () if one not in (FilterOperator.NIN, FilterOperator.ANY)]
    return f"{key} {'|'.join(words)}"


def _literal(value: Value) -> str:
    return to_odata(Condition(key="x", value=value)).removeprefix("x eq ")


def read_planner_filter(text: str, fields: Mapping[str, FilterField]) -> FilterNode:
    """Return the tree of a filter that a planner wrote.

    Args:
        text: OData.
        fields: What the source declares.

    Raises:
        PlanningError: It is no filter, or has a field, an operator or a value that is not declared; the message names
            it, and what is declared.
    """
    if len(text) > MAX_FILTER:
        raise PlanningError(f"the filter has {len(text)} characters; at most {MAX_FILTER} are read")
    try:
        tree = parse_odata(text)
    except InvalidRequestError as error:
        raise PlanningError(str(error)) from error
    for condition in conditions(flat(tree)):  # with "not" resolved: it may need an operator that is not declared
        _check(condition, fields)
    return tree


def _check(condition: Condition, fields: Mapping[str, FilterField]) -> None:
    field = fields.get(condition.key)
    if field is None:
        raise PlanningError(
            f"the field {condition.key!r} can't be filtered on; declared are: {', '.join(fields) or 'none'}"
        )
    operators = field.operators or ()
    if condition.operator not in operators:
        known = ", ".join(operators)
        raise PlanningError(f"{condition.operator.value!r} can't be used on {condition.key!r}; declared are: {known}")
    for value in condition.values:
        if not _is_of(field.type, value):
            raise PlanningError(f"{value!r} is no {field.type}, as values of {condition.key!r} are")
        if field.values is not None and not _declared(value, field.values):
            known = one_line(", ".join(map(_literal, field.values[:_LISTED_VALUES])))
            raise PlanningError(f"{value!r} is no value of {condition.key!r}; declared are: {known}")


def _declared(value: Value, values: Sequence[Value]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _is_of(kind: str, value: Any) -> bool:
    if kind == "boolean":
        return isinstance(value, bool)
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, str) and (kind == "string" or _is_date(value))


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
