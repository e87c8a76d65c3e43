"""Filters as SQL: over metadata in a column of JSON (PostgreSQL, DuckDB), or in typed fields (LanceDB).

Comparisons are by type, as in ``schema.filters``: 1 is 1.0, and "1" is neither. No key and no value becomes code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar, Final

from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator
from llama_index_agentic_kb.schema.filters import EQUALITIES, INEQUALITIES, ORDERS, TEXT_MATCHES, Scalar
from llama_index_agentic_kb.sources.filters import conditions

_MANY_FLAGS: Final = 4
"""The number of boolean keys from which one pass over all of a row's metadata is faster than a look at each key."""


def value_kind(value: Scalar) -> str:
    """Return the type of a value, as the classes below name it."""
    return "boolean" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"


class Sql:
    """Writes filters as SQL over metadata in a column of JSON, compared by the types of JSON."""

    _kinds: ClassVar[dict[str, str]]
    """The database's names of JSON's types, quoted, by ours."""
    _by_code_point: ClassVar[str] = ""

    def _kind(self, key: str) -> str:
        """Return the SQL for the type of a key's value: NULL where the key is absent."""
        raise NotImplementedError

    def _scalar(self, key: str, kind: str) -> str:
        """Return the SQL for a key's value, to be compared with a literal of that kind."""
        raise NotImplementedError

    def _literal(self, value: Scalar) -> str:
        """Return the SQL for a value."""
        raise NotImplementedError

    def _any_of(self, key: str, values: Sequence[Scalar]) -> str:
        """Return the SQL for a list that contains one of the values."""
        raise NotImplementedError

    def write(self, tree: FilterNode) -> str:
        """Return a filter without negations that have an opposite (``flat``) as SQL."""
        if isinstance(tree, Condition):
            return f"({self._condition(tree)})"
        parts = [self.write(child) for child in tree.filters]
        if tree.logic is FilterLogic.NOT:
            return f"(NOT ({' OR '.join(parts)}))"
        return f"({f' {tree.logic.value.upper()} '.join(parts)})"

    def _condition(self, condition: Condition) -> str:
        key, operator, value = condition.key, condition.operator, condition.value
        if operator in EQUALITIES or operator in INEQUALITIES:
            equal = " OR ".join(self._compare(key, "=", one) for one in condition.values)
            return equal if operator in EQUALITIES else f"{self._is_scalar(key)} AND NOT ({equal})"
        if operator is FilterOperator.ANY:
            return self._any_of(key, condition.values)
        if operator is FilterOperator.IS_EMPTY:
            return self._is_empty(key)
        if operator is FilterOperator.EXISTS:
            return self._exists(key)
        assert not isinstance(value, list)
        if operator in TEXT_MATCHES:
            return self._contains(key, str(value), ignoring_case=operator is FilterOperator.TEXT_MATCH_INSENSITIVE)
        return self._compare(key, ORDERS[operator], value)

    def _compare(self, key: str, operator: str, value: Scalar) -> str:
        kind = value_kind(value)
        collation = self._by_code_point if kind == "string" and operator != "=" else ""
        scalar = self._scalar(key, kind)
        return f"({self._kind(key)} IN ({self._kinds[kind]}) AND {scalar}{collation} {operator} {self._literal(value)})"

    def _contains(self, key: str, text: str, *, ignoring_case: bool) -> str:
        value, part = self._scalar(key, "string"), self._literal(text)
        if ignoring_case:
            value, part = f"lower({value})", f"lower({part})"
        # NULL, not false, for values of other types: their opposite does not hold either.
        return f"CASE WHEN {self._kind(key)} = {self._kinds['string']} THEN strpos({value}, {part}) > 0 END"

    def _is_scalar(self, key: str) -> str:
        return f"{self._kind(key)} IN ({self._kinds['string']}, {self._kinds['number']}, {self._kinds['boolean']})"

    def _is_empty(self, key: str) -> str:
        kind, text, kinds = self._kind(key), self._scalar(key, "string"), self._kinds
        empty_text = f"{kind} = {kinds['string']} AND {text} = ''"
        empty_list = f"{kind} = {kinds['list']} AND {text} = '[]'"
        return f"{kind} IS NULL OR {kind} = {kinds['null']} OR ({empty_text}) OR ({empty_list})"

    def _exists(self, key: str) -> str:
        kind = f"NULLIF({self._kind(key)}, {self._kinds['null']})"  # as in ``matches``, the opposite of NULL is NULL
        is_list = f"{kind} = {self._kinds['list']}"
        return f"NOT ({is_list}) OR ({is_list} AND {self._scalar(key, 'string')} <> '[]')"


class PostgresSql(Sql):
    """Keys and values are bound, none stands in the text."""

    _kinds: ClassVar = {
        "string": "'string'",
        "number": "'number'",
        "boolean": "'boolean'",
        "list": "'array'",
        "null": "'null'",
    }
    _by_code_point = ' COLLATE "C"'

    def __init__(self) -> None:
        self.bound: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def _bind(self, text: str) -> str:
        if text not in self._names:
            name = self._names[text] = f"agentic_kb_{len(self._names)}"
            self.bound[name] = text
        return f"CAST(:{self._names[text]} AS text)"

    def _json(self, key: str) -> str:
        return f"CAST(metadata_ -> {self._bind(key)} AS jsonb)"

    def _kind(self, key: str) -> str:
        return f"jsonb_typeof({self._json(key)})"

    def _scalar(self, key: str, kind: str) -> str:
        return self._json(key) if kind == "number" else f"(metadata_ ->> {self._bind(key)})"

    def _literal(self, value: Scalar) -> str:
        if value_kind(value) == "number":
            return f"CAST({self._bind(json.dumps(value))} AS jsonb)"  # compared as decimals of any length
        return self._bind(value if isinstance(value, str) else json.dumps(value))

    def write(self, tree: FilterNode) -> str:
        """Look for many boolean keys, as the groups of a principal are, in one pass over a row's metadata."""
        if not isinstance(tree, FilterGroup) or tree.logic is not FilterLogic.OR:
            return super().write(tree)
        flags: list[FilterNode] = []
        others: list[FilterNode] = []
        for one in tree.filters:
            is_flag = isinstance(one, Condition) and one.operator is FilterOperator.EQ and one.value is True
            (flags if is_flag else others).append(one)
        if len(flags) < _MANY_FLAGS:
            return super().write(tree)
        keys = ", ".join(self._bind(condition.key) for flag in flags for condition in conditions(flag))
        held = f"SELECT 1 FROM json_each(CAST(metadata_ AS json)) AS held WHERE held.key IN ({keys})"  # noqa: S608 (bound)
        parts = [f"EXISTS ({held} AND CAST(held.value AS text) = 'true')", *map(self.write, others)]
        return f"({' OR '.join(parts)})"

    def _any_of(self, key: str, values: Sequence[Scalar]) -> str:
        held = " OR ".join(f"{self._json(key)} @> CAST({self._bind(json.dumps(one))} AS jsonb)" for one in values)
        return f"CASE WHEN {self._kind(key)} = 'array' THEN {held} END"


class DuckSql(Sql):
    """Keys are plain names, and text is quoted."""

    _kinds: ClassVar = {
        "string": "'VARCHAR'",
        "number": "'BIGINT', 'UBIGINT', 'DOUBLE'",
        "boolean": "'BOOLEAN'",
        "list": "'ARRAY'",
        "null": "'NULL'",
    }

    def _kind(self, key: str) -> str:
        return f"json_type(metadata_, '$.{key}')"

    def _scalar(self, key: str, kind: str) -> str:
        text = f"json_extract_string(metadata_, '$.{key}')"
        return f"TRY_CAST({text} AS DOUBLE)" if kind == "number" else text

    def _literal(self, value: Scalar) -> str:
        if isinstance(value, bool):
            return quoted(json.dumps(value))
        return quoted(value) if isinstance(value, str) else f"CAST('{value!r}' AS DOUBLE)"


class LanceSql(Sql):
    """Metadata is one column with a fixed set of typed fields: another key is absent everywhere."""

    _NEVER: ClassVar = "id IS NULL"

    def __init__(self, fields: dict[str, str]) -> None:
        self._fields = fields

    def _literal(self, value: Scalar) -> str:
        return quoted(value) if isinstance(value, str) else json.dumps(value)

    def _compare(self, key: str, operator: str, value: Scalar) -> str:
        if self._fields.get(key) not in (value_kind(value), *(("whole",) if value_kind(value) == "number" else ())):
            return self._NEVER
        as_float = self._fields[key] == "whole" and isinstance(value, float)
        column = f"CAST(metadata.{key} AS double)" if as_float else f"metadata.{key}"
        return f"({column} {operator} {self._literal(value)})"

    def _contains(self, key: str, text: str, *, ignoring_case: bool) -> str:
        if self._fields.get(key) != "string":
            return self._NEVER
        value, part = f"metadata.{key}", self._literal(text.lower() if ignoring_case else text)
        return f"strpos({f'lower({value})' if ignoring_case else value}, {part}) > 0"

    def _is_scalar(self, key: str) -> str:
        return f"metadata.{key} IS NOT NULL" if key in self._fields else self._NEVER

    def _is_empty(self, key: str) -> str:
        if key not in self._fields:
            return "id IS NOT NULL"
        return f"metadata.{key} IS NULL OR {self._compare(key, '=', '')}"


def quoted(text: str) -> str:
    """Return text as a literal of SQL in which only quotes mean anything."""
    return "'" + text.replace("'", "''") + "'"
