"""Filters as conditions in SQL on a chunk's metadata, which stand in the database as JSON.

They hold exactly as ``schema.matches`` does: a condition on an absent key, or on a value of another kind, never holds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from llama_index.core.vector_stores.types import FilterCondition, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.types import FilterOperator as Operator

from llama_index_agentic_kb.errors import DeniedError

__all__ = ["sql_filter"]

_ORDERS: Final = {Operator.GT: ">", Operator.GTE: ">=", Operator.LT: "<", Operator.LTE: "<="}
_MANY: Final = 8  # equalities of an "or" group from which on they are looked up by the keys that a chunk has
_KINDS: Final = {bool: "'true', 'false'", float: "'integer', 'real'", str: "'text'"}

_FACTS: Final = (
    "EXISTS (SELECT 1 FROM json_each(metadata) AS fact WHERE fact.key || char(31) || fact.type || char(31) ||"
    " CASE fact.type WHEN 'text' THEN fact.atom ELSE '' END IN (SELECT value FROM json_each(?)))"
)

Sql = tuple[str, list[object]]


def sql_filter(filters: MetadataFilters) -> Sql:
    """Return a filter as a condition in SQL and its parameters.

    Args:
        filters: At least one filter; groups are "and" or "or".

    Raises:
        DeniedError: It is empty, which must not mean "everything", or has a group or an operator that is not known.
    """
    if not filters.filters or filters.condition not in (FilterCondition.AND, FilterCondition.OR, None):
        raise DeniedError("a filter of the store has at least one condition, and no groups under 'not'")
    parts = list(filters.filters)
    if filters.condition is not FilterCondition.OR:
        return _joined("AND", [_part(one) for one in parts])
    facts = [one for one in parts if _is_fact(one)]
    if len(facts) < _MANY:
        return _joined("OR", [_part(one) for one in parts])
    # Who is in a thousand groups has a thousand conditions, of which a chunk's metadata hold few keys.
    listed = json.dumps([_fact(one) for one in facts if isinstance(one, MetadataFilter)])
    return _joined("OR", [(_FACTS, [listed]), *(_part(one) for one in parts if not _is_fact(one))])


def _part(one: MetadataFilter | MetadataFilters) -> Sql:
    if isinstance(one, MetadataFilters):
        return sql_filter(one)
    _check_text([one.key, *(one.value if isinstance(one.value, list) else [one.value])])
    if one.operator in _ORDERS:
        # Of booleans and numbers, as Python orders them; of text by code points.
        kinds = "'text'" if isinstance(one.value, str) else "'integer', 'real', 'true', 'false'"
        path, word = _path(one.key), _ORDERS[one.operator]
        sql = f"json_type(metadata, ?) IN ({kinds}) AND json_extract(metadata, ?) {word} json_extract(?, '$')"
        return sql, [path, path, json.dumps(one.value)]
    if one.operator in (Operator.EQ, Operator.IN):
        return _equal(one)
    if one.operator in (Operator.NE, Operator.NIN):
        sql, parameters = _equal(one)
        return f"json_type(metadata, ?) IS NOT NULL AND NOT {sql}", [_path(one.key), *parameters]
    if one.operator in (Operator.CONTAINS, Operator.ANY):
        return "0", []  # no value of a store is a list
    raise DeniedError(f"the store has no operator {one.operator.value!r}, which the filter on {one.key!r} needs")


def _equal(one: MetadataFilter) -> Sql:
    values: list[Any] = one.value if isinstance(one.value, list) else [one.value]
    path = _path(one.key)
    parts: list[Sql] = []
    for kind, types in _KINDS.items():
        same = [value for value in values if _kind(value) is kind]
        sql = f"json_type(metadata, ?) IN ({types}) AND json_extract(metadata, ?) IN (SELECT value FROM json_each(?))"  # noqa: S608 (constants)
        if same:
            parts.append((sql, [path, path, json.dumps(same)]))
    return _joined("OR", parts) if parts else ("0", [])


def _joined(word: str, parts: Sequence[Sql]) -> Sql:
    """Join conditions as a balanced tree: SQLite refuses one that is 1,000 deep."""
    if len(parts) == 1:
        sql, parameters = parts[0]
        return f"({sql})", parameters
    half = len(parts) // 2
    left, right = _joined(word, parts[:half]), _joined(word, parts[half:])
    return f"({left[0]} {word} {right[0]})", [*left[1], *right[1]]


def _is_fact(one: MetadataFilter | MetadataFilters) -> bool:
    return isinstance(one, MetadataFilter) and one.operator is Operator.EQ and isinstance(one.value, (bool, str))


def _fact(one: MetadataFilter) -> str:
    _path(one.key)
    _check_text([one.key, one.value])
    kind = str(one.value).lower() if isinstance(one.value, bool) else "text"
    return f"{one.key}\x1f{kind}\x1f{one.value if kind == 'text' else ''}"


def _path(key: str) -> str:
    if any(letter in key for letter in '"\\\x1f'):  # they have no escape; no key of a store holds any
        raise DeniedError(f"no metadata key of the store is called {key[:60]!r}")
    return f'$."{key}"'


def _kind(value: object) -> type:
    return bool if isinstance(value, bool) else str if isinstance(value, str) else float


def _check_text(values: Sequence[object]) -> None:
    for value in values:
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise DeniedError("a filter holds a lone surrogate, which no text of the store does")
