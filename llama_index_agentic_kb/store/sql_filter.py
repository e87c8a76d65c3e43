"""Filters as SQL conditions on a chunk's metadata, which are JSON text in SQLite and ``jsonb`` in PostgreSQL.

A condition is equivalent to ``schema.matches``: it is NULL if its key is absent or its value has another type, so that
neither it nor its negation matches.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, TypeAlias

from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema.filters import (
    EQUALITIES,
    INEQUALITIES,
    ORDERS,
    Condition,
    FilterLogic,
    FilterNode,
    FilterOperator,
)

Sql: TypeAlias = tuple[str, list[object]]
"""A SQL condition with ``?`` for its parameters, and these."""

_MANY: Final = 8
"""The minimum number of equalities in an OR group that are looked up by the chunk's own keys."""


class Dialect(ABC):
    """Filters in the SQL of one database."""

    document_id: ClassVar[str]
    """The expression of a chunk's document id."""
    forbidden: ClassVar[str]
    """The characters that no metadata key of the store contains."""

    def filter(self, tree: FilterNode, *, negated: bool = False) -> Sql:
        """Return a filter as a SQL condition; raise ``DeniedError`` for what the store can't contain or evaluate."""
        if isinstance(tree, Condition):
            return self._condition(tree, negated=negated)
        if tree.logic is FilterLogic.NOT:
            condition, parameters = joined("OR", [self.filter(part, negated=not negated) for part in tree.filters])
            return f"NOT {condition}", parameters
        if tree.logic is FilterLogic.AND:
            return joined("AND", [self.filter(part, negated=negated) for part in tree.filters])
        # A user in a thousand groups has a thousand conditions, but a chunk's metadata contain only a few of the keys.
        facts = [part for part in tree.filters if _is_fact(part)]
        if negated or len(facts) < _MANY:
            return joined("OR", [self.filter(part, negated=negated) for part in tree.filters])
        others = [self.filter(part) for part in tree.filters if not _is_fact(part)]
        return joined("OR", [self._facts([self._checked(fact) for fact in facts]), *others])

    def _condition(self, condition: FilterNode, *, negated: bool) -> Sql:
        condition = self._checked(condition)
        operator = condition.operator
        if operator in EQUALITIES:
            return self._equal(condition, negated=negated)
        if operator in INEQUALITIES:
            equal, parameters = self._equal(condition, negated=True)
            return f"NOT {equal}", parameters
        if operator in ORDERS:
            return self._ordered(condition, ORDERS[operator])
        if operator is FilterOperator.ANY:
            return "NULL", []  # the store contains no list values
        return self._other(condition)

    def _checked(self, condition: FilterNode) -> Condition:
        assert isinstance(condition, Condition)
        if any(letter in condition.key for letter in self.forbidden):
            raise DeniedError(f"no metadata key of the store is called {condition.key[:60]!r}")
        for text in (condition.key, *condition.values):
            if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in text):
                raise DeniedError("a filter holds a NUL or a lone surrogate, which no text of the store does")
        return condition

    @abstractmethod
    def listed(self, column: str, keys: Sequence[object]) -> Sql:
        """Return the condition that a column has one of any number of values."""

    @abstractmethod
    def _equal(self, condition: Condition, *, negated: bool) -> Sql:
        """Return the condition that a key has one of the values, of their types."""

    @abstractmethod
    def _ordered(self, condition: Condition, operator: str) -> Sql:
        """Return a comparison; booleans and numbers are ordered as in Python, text by code points."""

    @abstractmethod
    def _other(self, condition: Condition) -> Sql:
        """Return a condition with one of the other operators."""

    @abstractmethod
    def _facts(self, facts: Sequence[Condition]) -> Sql:
        """Return the condition that one of many equalities with a text or boolean holds; not below a negation."""


class SqliteDialect(Dialect):
    """Filters on a column ``metadata`` with JSON text."""

    document_id = "json_extract(metadata, '$.document_id')"
    forbidden = '"\\\x1f'  # they have no escape in a JSON path

    def listed(self, column: str, keys: Sequence[object]) -> Sql:
        """Return the condition that a column has one of any number of values."""
        return f"{column} IN (SELECT value FROM json_each(?))", [json.dumps(list(keys))]  # noqa: S608 (of a constant)

    def _equal(self, condition: Condition, *, negated: bool) -> Sql:  # noqa: ARG002 (NULL is handled either way)
        path = _path(condition)
        parts: list[Sql] = []
        for kinds, types in (((bool,), "'true', 'false'"), ((int, float), "'integer', 'real'"), ((str,), "'text'")):
            same = [value for value in condition.values if type(value) in kinds]
            listed = "json_extract(metadata, ?) IN (SELECT value FROM json_each(?))"
            sql = f"(json_type(metadata, ?) IN ({types}) AND {listed})"
            parts += [(sql, [path, path, json.dumps(same)])] if same else []
        if not parts:
            return "(json_type(metadata, ?) IS NULL AND NULL)", [path]
        return joined("OR", parts)

    def _ordered(self, condition: Condition, operator: str) -> Sql:
        path, value = _path(condition), condition.value
        kinds = "'text'" if isinstance(value, str) else "'integer', 'real', 'true', 'false'"
        compared = f"json_extract(metadata, ?) {operator} json_extract(?, '$')"
        return f"CASE WHEN json_type(metadata, ?) IN ({kinds}) THEN {compared} END", [path, path, json.dumps(value)]

    def _other(self, condition: Condition) -> Sql:
        path = _path(condition)
        if condition.operator is FilterOperator.EXISTS:
            return "CASE WHEN json_type(metadata, ?) IS NOT NULL THEN 1 END", [path]
        if condition.operator is FilterOperator.IS_EMPTY:
            return "coalesce(json_extract(metadata, ?), '') = ''", [path]
        return _denied(condition)

    def _facts(self, facts: Sequence[Condition]) -> Sql:
        sql = (
            "EXISTS (SELECT 1 FROM json_each(metadata) AS fact WHERE fact.key || char(31) || fact.type || char(31) ||"
            " CASE fact.type WHEN 'text' THEN fact.atom ELSE '' END IN (SELECT value FROM json_each(?)))"
        )
        listed = [
            f"{one.key}\x1f{'text' if isinstance(one.value, str) else str(one.value).lower()}"
            f"\x1f{one.value if isinstance(one.value, str) else ''}"
            for one in facts
        ]
        return sql, [json.dumps(listed)]


class PostgresDialect(Dialect):
    """Filters on a column ``metadata`` of type ``jsonb``. Positive equalities use its GIN index."""

    document_id = "metadata ->> 'document_id'"
    forbidden = "\x1f"

    def listed(self, column: str, keys: Sequence[object]) -> Sql:
        """Return the condition that a column has one of any number of values."""
        return f"{column} = ANY(?)", [list(keys)]

    def _equal(self, condition: Condition, *, negated: bool) -> Sql:
        values = condition.values
        if not negated and 0 < len(values) < _MANY:
            held = [json.dumps({condition.key: value}) for value in values]
            return joined("OR", [("metadata @> CAST(? AS jsonb)", [one]) for one in held])
        listed = "(SELECT jsonb_array_elements(CAST(? AS jsonb)))"
        sql = f"CASE WHEN {_VALUE} IS NOT NULL THEN {_VALUE} IN {listed} END"
        return sql, [condition.key, condition.key, json.dumps(values)]

    def _ordered(self, condition: Condition, operator: str) -> Sql:
        key, value = condition.key, condition.value
        if isinstance(value, str):
            sql = f"CASE jsonb_typeof({_VALUE}) WHEN 'string' THEN {_TEXT} COLLATE \"C\" {operator} CAST(? AS text) END"
            return sql, [key, key, value]
        number = str(int(value)) if isinstance(value, bool) else repr(value)
        compared = f"{operator} CAST(CAST(? AS text) AS numeric)"
        sql = (
            f"CASE jsonb_typeof({_VALUE}) WHEN 'number' THEN CAST({_TEXT} AS numeric) {compared}"
            f" WHEN 'boolean' THEN CAST(CAST({_TEXT} AS boolean) AS integer) {compared} END"
        )
        return sql, [key, key, number, key, number]

    def _other(self, condition: Condition) -> Sql:
        key = condition.key
        if condition.operator is FilterOperator.EXISTS:
            return f"CASE WHEN {_VALUE} IS NOT NULL THEN TRUE END", [key]
        if condition.operator is FilterOperator.IS_EMPTY:
            return f"coalesce({_TEXT}, '') = ''", [key]
        if condition.operator is FilterOperator.TEXT_MATCH:
            sql = f"CASE jsonb_typeof({_VALUE}) WHEN 'string' THEN strpos({_TEXT}, CAST(? AS text)) > 0 END"
            return sql, [key, key, condition.value]
        return _denied(condition)

    def _facts(self, facts: Sequence[Condition]) -> Sql:
        # PostgreSQL looks values up in a hash table of the array; a subquery would be compared row by row.
        sql = (
            "EXISTS (SELECT 1 FROM jsonb_each(metadata) AS fact WHERE fact.key || chr(31) || jsonb_typeof(fact.value)"
            " || chr(31) || (fact.value #>> '{}') = ANY(CAST(? AS text[])))"
        )
        listed = [
            f"{one.key}\x1f{'string' if isinstance(one.value, str) else 'boolean'}"
            f"\x1f{one.value if isinstance(one.value, str) else str(one.value).lower()}"
            for one in facts
        ]
        return sql, [listed]


_VALUE: Final = "(metadata -> CAST(? AS text))"
_TEXT: Final = "(metadata ->> CAST(? AS text))"


def joined(word: str, parts: Sequence[Sql]) -> Sql:
    """Join conditions with AND or OR as a balanced tree, since SQLite rejects expressions 1,000 levels deep."""
    if len(parts) == 1:
        return f"({parts[0][0]})", parts[0][1]
    half = len(parts) // 2
    left, right = joined(word, parts[:half]), joined(word, parts[half:])
    return f"({left[0]} {word} {right[0]})", [*left[1], *right[1]]


def _is_fact(part: FilterNode) -> bool:
    return isinstance(part, Condition) and part.operator is FilterOperator.EQ and isinstance(part.value, bool | str)


def _path(condition: Condition) -> str:
    return f'$."{condition.key}"'


def _denied(condition: Condition) -> Sql:
    name = condition.operator.value
    raise DeniedError(f"the store has no operator {name!r}, which the filter on {condition.key!r} needs")
