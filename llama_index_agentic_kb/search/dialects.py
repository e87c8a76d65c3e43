"""Filters in the languages of stores: a class for each, which says what it can't express.

LlamaIndex's adapters can't be trusted with a filter that must hold: some put keys and values into text without escaping
all of it, others raise for booleans or groups, compare "12" as a number, or ignore what they don't know. So a filter is
written here, from the tree; no key and no value becomes code. What a language can't express is refused with the reason.
``tests/stores`` and ``tests/store`` compare each with ``schema.matches``, on real stores.

Comparisons are by the types of JSON: 1 is 1.0, and "1" is neither.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Final, Generic, NamedTuple, TypeAlias, TypeVar

from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator
from llama_index_agentic_kb.schema.filters import (
    EQUALITIES,
    INEQUALITIES,
    ORDERS,
    TEXT_MATCHES,
    Scalar,
    conditions,
    flat,
    value_kind,
)

Written = TypeVar("Written")
SqlCondition: TypeAlias = tuple[str, list[object]]  # a SQL condition with ``?`` for its parameters, and these

_MANY: Final = 4  # number of boolean keys (groups of a principal) from which a row's own keys are looked up instead
_LISTED: Final = 8  # number of values from which they are compared as a list, and not one by one by PostgreSQL's index
_MARK: Final = re.compile("\0([0-9]+)\0")
_EXACT: Final = 2**53  # whole numbers up to this are exact as floating-point numbers
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ANY_KEY: Final = re.compile(".+", re.DOTALL)


class Language:
    """A store's filter language: what it can't express, and so refuses."""

    name: ClassVar[str] = "this vector store"
    lacks: ClassVar[Collection[FilterOperator]] = ()  # the operators that have no form in the language
    negations: ClassVar[bool] = False
    """Whether "exists" and the opposites of what has no opposite operator can be expressed."""
    orders_text: ClassVar[bool] = True
    is_exact: ClassVar[bool] = False  # whether whole numbers beyond 2**53 are compared exactly
    keys: ClassVar[re.Pattern[str]] = _PLAIN  # the form of the keys that can be filtered on

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


class Dialect(Language, ABC, Generic[Written]):
    """A language of filters that is written here. ``_condition`` and ``_group`` write the parts of a tree."""

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


def _negates(tree: FilterNode) -> bool:
    if isinstance(tree, Condition):
        return tree.operator is FilterOperator.EXISTS
    return tree.logic is FilterLogic.NOT or any(map(_negates, tree.filters))


# -- SQL --------------------------------------------------------------------------------------------------------------


def _kinds(*names: str) -> dict[str, str]:
    return dict(zip(("string", "number", "boolean", "list", "null"), names, strict=True))


class Sql(Dialect[str]):
    """SQL over metadata in a column of JSON. In each template, {} is a key.

    Below NOT, a condition that is unknown is NULL and not false, so that its opposite does not hold either.
    """

    negations = True
    kind: ClassVar[str]  # the type of a key's value; NULL where the key is absent
    kinds: ClassVar[Mapping[str, str]]  # the database's names of JSON's types, quoted
    text: ClassVar[str]  # a key's value as text
    number: ClassVar[str]  # a key's value as a number
    by_code_point: ClassVar[str] = ""
    find: ClassVar[str] = "strpos"

    @classmethod
    def _why_not(cls, one: Condition) -> str | None:
        has_nul = any("\0" in value for value in one.values if isinstance(value, str))
        return "has no text with a NUL" if has_nul else super()._why_not(one)

    def _of(self, template: str, key: str) -> str:
        return template.replace("{}", key)

    def _literal(self, value: Scalar) -> str:
        return quoted(value) if isinstance(value, str) else json.dumps(value)

    def _any_of(self, key: str, values: Sequence[Scalar]) -> str:  # noqa: ARG002
        return "NULL"  # of a store that keeps no lists

    def _group(self, logic: FilterLogic, parts: list[str]) -> str:
        return f"(NOT {joined('OR', parts)})" if logic is FilterLogic.NOT else joined(logic.value.upper(), parts)

    def _condition(self, condition: Condition) -> str:
        key, operator, value = condition.key, condition.operator, condition.values[0]
        if operator in EQUALITIES or operator in INEQUALITIES:
            equal = self._equal(key, condition.values)
            return equal if operator in EQUALITIES else f"({self._is_scalar(key)} AND NOT {equal})"
        if operator in ORDERS:
            return self._compare(key, ORDERS[operator], value)
        if operator in TEXT_MATCHES:
            return self._contains(key, str(value), ignoring_case=operator is FilterOperator.TEXT_MATCH_INSENSITIVE)
        if operator is FilterOperator.ANY:
            return self._any_of(key, condition.values)
        if operator is FilterOperator.IS_EMPTY:
            return f"({self._is_empty(key)})"
        kind = f"NULLIF({self._of(self.kind, key)}, {self.kinds['null']})"
        return f"(NOT ({kind} = {self.kinds['list']} AND {self._of(self.text, key)} = '[]'))"

    def _equal(self, key: str, values: Sequence[Scalar]) -> str:
        kind, parts = self._of(self.kind, key), []
        for name, template in (("string", self.text), ("number", self.number), ("boolean", self.text)):
            same = [value for value in values if value_kind(value) == name]
            if same:
                listed = f"{self._of(template, key)} IN ({self._listed(same)})"
                parts.append(f"({kind} IN ({self.kinds[name]}) AND {listed})")
        return joined("OR", parts)

    def _listed(self, values: Sequence[Scalar]) -> str:  # within the parentheses of IN
        return ", ".join(map(self._literal, values))

    def _compare(self, key: str, sign: str, value: Scalar) -> str:
        held = self._of(self.text, key) + self.by_code_point if isinstance(value, str) else self._of(self.number, key)
        kind = f"{self._of(self.kind, key)} IN ({self.kinds[value_kind(value) or '']})"
        return f"({kind} AND {held} {sign} {self._literal(value)})"

    def _contains(self, key: str, text: str, *, ignoring_case: bool) -> str:
        value, part = self._of(self.text, key), self._literal(text)
        if ignoring_case:
            value, part = f"lower({value})", f"lower({part})"
        is_text = f"{self._of(self.kind, key)} = {self.kinds['string']}"
        return f"CASE WHEN {is_text} THEN {self.find}({value}, {part}) > 0 END"

    def _is_scalar(self, key: str) -> str:
        listed = ", ".join(self.kinds[name] for name in ("string", "number", "boolean"))
        return f"{self._of(self.kind, key)} IN ({listed})"

    def _is_empty(self, key: str) -> str:
        kind, text, kinds = self._of(self.kind, key), self._of(self.text, key), self.kinds
        empty_text = f"{kind} = {kinds['string']} AND {text} = ''"
        empty_list = f"{kind} = {kinds['list']} AND {text} = '[]'"
        return f"{kind} IS NULL OR {kind} = {kinds['null']} OR ({empty_text}) OR ({empty_list})"


class BoundSql(Sql):
    """SQL in which keys and values are parameters."""

    is_exact = True
    keys = re.compile("[^\0]+")

    def __init__(self) -> None:
        self.values: list[object] = []

    @classmethod
    def _why_not(cls, one: Condition) -> str | None:
        if one.operator is FilterOperator.TEXT_MATCH_INSENSITIVE and not str(one.value).isascii():
            return "ignores the case of ASCII letters only"
        return super()._why_not(one)

    def _of(self, template: str, key: str) -> str:
        return template.replace("{}", self._bind(key))

    def _walk(self, tree: FilterNode) -> str:
        if isinstance(tree, FilterGroup) and tree.logic is FilterLogic.OR:
            keys = [one.key for one in tree.filters if isinstance(one, Condition) and _is_flag(one)]
            if len(keys) >= _MANY:
                others = [self._walk(one) for one in tree.filters if not _is_flag(one)]
                return joined("OR", [self._flags(keys), *others])
        return super()._walk(tree)

    @abstractmethod
    def _flags(self, keys: list[str]) -> str:
        """Return the SQL for "one of many keys is true", by one pass over a row's keys."""

    def _bind(self, value: object) -> str:
        self.values.append(value)
        return f"\0{len(self.values) - 1}\0"

    @classmethod
    def filter(cls, tree: FilterNode) -> SqlCondition:
        """Return a filter as a SQL condition; raise ``DeniedError`` for what the store can't contain or compare."""
        dialect = cls()
        sql = dialect.write(tree)
        return _MARK.sub("?", sql), [dialect.values[int(found[1])] for found in _MARK.finditer(sql)]

    def named(self, tree: FilterNode) -> tuple[str, dict[str, object]]:
        """Return a filter as a SQL condition with parameters by name."""
        sql = _MARK.sub(r":agentic_kb_\1", self.write(tree))
        return sql, {f"agentic_kb_{number}": value for number, value in enumerate(self.values)}


class StoreDialect(BoundSql):
    """The SQL of a knowledge store's database, whose metadata hold no lists."""

    name = "the store"
    document_id: ClassVar[str]  # the expression of a chunk's document id

    @staticmethod
    @abstractmethod
    def any_value(column: str, values: Sequence[object]) -> SqlCondition:
        """Return the condition that a column has one of any number of values."""


class SqliteSql(StoreDialect):
    """Filters of a knowledge store in SQLite, over a column ``metadata`` of text."""

    keys = re.compile(r'[^"\\\0]+')  # they have no escape in a JSON path
    kind = "json_type(metadata, {})"
    kinds = _kinds("'text'", "'integer', 'real'", "'true', 'false'", "'array'", "'null'")
    text = number = "json_extract(metadata, {})"
    find = "instr"
    document_id = "json_extract(metadata, '$.document_id')"

    @staticmethod
    def any_value(column: str, values: Sequence[object]) -> SqlCondition:  # noqa: D102
        return f"{column} IN (SELECT value FROM json_each(?))", [json.dumps(list(values))]  # noqa: S608 (of a constant)

    def _of(self, template: str, key: str) -> str:
        return template.replace("{}", self._bind(f"$.{json.dumps(key)}"))  # escaped as in the column

    def _literal(self, value: Scalar) -> str:
        return self._bind(value)

    def _listed(self, values: Sequence[Scalar]) -> str:
        return f"SELECT value FROM json_each({self._bind(json.dumps(values))})"  # noqa: S608 (bound)

    def _flags(self, keys: list[str]) -> str:
        listed = f"SELECT value FROM json_each({self._bind(json.dumps(keys))})"  # noqa: S608 (bound)
        held = "SELECT 1 FROM json_each(metadata) AS held"
        return f"EXISTS ({held} WHERE held.type = 'true' AND held.key IN ({listed}))"


class PostgresSql(BoundSql):
    """Filters over the column ``metadata_`` of LlamaIndex's adapter for PostgreSQL."""

    name = "PostgreSQL"
    number = "CAST(metadata_ -> CAST({} AS text) AS jsonb)"  # compared as decimals of any length
    text = "(metadata_ ->> CAST({} AS text))"
    kind = f"jsonb_typeof({number})"
    kinds = _kinds("'string'", "'number'", "'boolean'", "'array'", "'null'")
    by_code_point = ' COLLATE "C"'
    each: ClassVar[str] = "json_each(CAST(metadata_ AS json))"

    def _literal(self, value: Scalar) -> str:
        return f"CAST({self._bind(value)} AS text)" if isinstance(value, str) else self._as_json(value)

    def _as_json(self, value: object) -> str:
        return f"CAST({self._bind(json.dumps(value))} AS jsonb)"

    def _equal(self, key: str, values: Sequence[Scalar]) -> str:
        held = self._of(self.number, key)
        if len(values) == 1:
            return f"({held} = {self._as_json(values[0])})"
        return f"({held} IN (SELECT jsonb_array_elements({self._as_json(values)})))"

    def _any_of(self, key: str, values: Sequence[Scalar]) -> str:
        held = " OR ".join(f"{self._of(self.number, key)} @> {self._as_json(one)}" for one in values)
        return f"CASE WHEN {self._of(self.kind, key)} = 'array' THEN {held} END"

    def _flags(self, keys: list[str]) -> str:
        # PostgreSQL looks keys up in a hash table of the array; a subquery would be compared row by row.
        is_key = f"held.key = ANY(CAST({self._bind(keys)} AS text[]))"
        held = f"SELECT 1 FROM {self.each} AS held"  # noqa: S608 (a constant)
        return f"EXISTS ({held} WHERE {is_key} AND CAST(held.value AS text) = 'true')"


class PostgresStoreSql(StoreDialect, PostgresSql):
    """Filters of a knowledge store in PostgreSQL, over an indexed column ``metadata`` of ``jsonb``."""

    number = "(metadata -> CAST({} AS text))"
    text = "(metadata ->> CAST({} AS text))"
    kind = f"jsonb_typeof({number})"
    each = "jsonb_each(metadata)"
    document_id = "metadata ->> 'document_id'"

    @staticmethod
    def any_value(column: str, values: Sequence[object]) -> SqlCondition:  # noqa: D102
        return f"{column} = ANY(?)", [list(values)]

    def _equal(self, key: str, values: Sequence[Scalar]) -> str:
        if len(values) >= _LISTED:
            return super()._equal(key, values)
        return joined("OR", [f"metadata @> {self._as_json({key: value})}" for value in values])  # by the index


class DuckSql(Sql):
    """Filters of LlamaIndex's adapter for DuckDB: keys are plain names, and text is quoted."""

    name = "DuckDB"
    lacks = (FilterOperator.ANY,)  # its adapter keeps no lists
    negations = False
    kind = "json_type(metadata_, '$.{}')"
    kinds = _kinds("'VARCHAR'", "'BIGINT', 'UBIGINT', 'DOUBLE'", "'BOOLEAN'", "'ARRAY'", "'NULL'")
    text = "json_extract_string(metadata_, '$.{}')"
    number = f"TRY_CAST({text} AS DOUBLE)"

    def _literal(self, value: Scalar) -> str:
        if isinstance(value, bool):
            return quoted(json.dumps(value))
        return quoted(value) if isinstance(value, str) else f"CAST('{value!r}' AS DOUBLE)"


class LanceSql(Sql):
    """Filters of LanceDB, where metadata is one column with a fixed set of typed fields: other keys are absent.

    Args:
        fields: The type of each field: "whole" for integers, else what ``value_kind`` returns for its values ("number",
            "string", "boolean"); fields of other types match nothing.
    """

    name = "LanceDB"
    lacks = (FilterOperator.ANY,)  # its adapter keeps no lists
    negations = False
    _never: ClassVar = "id IS NULL"

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields

    def _equal(self, key: str, values: Sequence[Scalar]) -> str:
        return joined("OR", [self._compare(key, "=", value) for value in values])

    def _compare(self, key: str, sign: str, value: Scalar) -> str:
        field = self._fields.get(key)
        if value_kind(value) != ("number" if field == "whole" else field):
            return self._never
        as_float = field == "whole" and isinstance(value, float)
        column = f"CAST(metadata.{key} AS double)" if as_float else f"metadata.{key}"
        return f"({column} {sign} {self._literal(value)})"

    def _contains(self, key: str, text: str, *, ignoring_case: bool) -> str:
        if self._fields.get(key) != "string":
            return self._never
        value, part = f"metadata.{key}", self._literal(text.lower() if ignoring_case else text)
        return f"strpos({f'lower({value})' if ignoring_case else value}, {part}) > 0"

    def _is_scalar(self, key: str) -> str:
        return f"metadata.{key} IS NOT NULL" if key in self._fields else self._never

    def _is_empty(self, key: str) -> str:
        if key not in self._fields:
            return "id IS NOT NULL"
        return f"metadata.{key} IS NULL OR {self._compare(key, '=', '')}"


def _is_flag(tree: FilterNode) -> bool:
    return isinstance(tree, Condition) and tree.operator is FilterOperator.EQ and tree.value is True


def all_hold(*conditions: SqlCondition) -> SqlCondition:
    """Join conditions with AND."""
    return joined("AND", [sql for sql, _ in conditions]), [value for _, values in conditions for value in values]


def joined(word: str, parts: Sequence[str]) -> str:
    """Join conditions with AND or OR as a balanced tree, since SQLite rejects expressions 1,000 levels deep."""
    if len(parts) == 1:
        return f"({parts[0]})"
    half = len(parts) // 2
    return f"({joined(word, parts[:half])} {word} {joined(word, parts[half:])})"


def quoted(text: str) -> str:
    """Return text as a literal of SQL in which only quotes mean anything."""
    return "'" + text.replace("'", "''") + "'"


# -- other languages --------------------------------------------------------------------------------------------------


class Milvus(Dialect[str]):
    """Expressions of Milvus over its dynamic fields."""

    name = "Milvus"
    lacks = (FilterOperator.TEXT_MATCH_INSENSITIVE, FilterOperator.IS_EMPTY)

    @classmethod
    def _why_not(cls, one: Condition) -> str | None:
        if one.operator is FilterOperator.TEXT_MATCH and re.search(r"[%_\\]", str(one.value)):
            return "takes % and _ for any letters"
        return super()._why_not(one)

    def _group(self, logic: FilterLogic, parts: list[str]) -> str:
        return joined(logic.value, parts)

    def _condition(self, condition: Condition) -> str:
        key, operator = condition.key, condition.operator
        values = [json.dumps(one, ensure_ascii=False) for one in condition.values]
        if operator in EQUALITIES:
            return " or ".join(f"{key} == {value}" for value in values)
        if operator in INEQUALITIES:
            return " and ".join([f"exists {key}", *(f"{key} != {value}" for value in values)])
        if operator is FilterOperator.ANY:
            return f"json_contains_any({key}, [{', '.join(values)}])"
        if operator is FilterOperator.TEXT_MATCH:
            return f"{key} like {json.dumps(f'%{condition.value}%', ensure_ascii=False)}"
        return f"{key} {ORDERS[operator]} {values[0]}"


class Qdrant(Dialect[JsonObject]):
    """Filters of Qdrant, as JSON. What its text match finds depends on a full-text index."""

    name = "Qdrant"
    lacks = TEXT_MATCHES
    orders_text = False

    def _group(self, logic: FilterLogic, parts: list[JsonObject]) -> JsonObject:
        return {"must" if logic is FilterLogic.AND else "should": parts}

    def _condition(self, condition: Condition) -> JsonObject:
        key, operator = condition.key, condition.operator
        if operator in ORDERS:
            name = {FilterOperator.GE: "gte", FilterOperator.LE: "lte"}.get(operator, operator.value)
            return {"must": [{"key": key, "range": {name: condition.value}}]}
        equal: list[JsonObject] = []
        for value in [""] if operator is FilterOperator.IS_EMPTY else condition.values:
            is_number = value_kind(value) == "number"  # a range: 1 and 1.0 are one number
            same = {"range": {"gte": value, "lte": value}} if is_number else {"match": {"value": value}}
            equal.append({"key": key, **same})
        if operator is FilterOperator.IS_EMPTY or operator in INEQUALITIES:
            equal.append({"is_empty": {"key": key}})
        return {"must_not" if operator in INEQUALITIES else "should": equal}


Where: TypeAlias = JsonObject
"""A filter of Chroma: ``{key: {operator: value}}``, ``{"$and": [...]}`` or ``{"$or": [...]}``."""
_CHROMA: Final = {FilterOperator.GE: "$gte", FilterOperator.LE: "$lte"}


class Chroma(Dialect[Where]):
    """Filters of Chroma. Its ``$ne`` and ``$nin`` let rows without the key through."""

    name = "Chroma"
    lacks = (*TEXT_MATCHES, FilterOperator.IS_EMPTY, FilterOperator.ANY)
    orders_text = False
    is_exact = True
    keys = ANY_KEY

    def _group(self, logic: FilterLogic, parts: list[Where]) -> Where:
        if logic is FilterLogic.OR:  # equalities on one key become one list for each type
            lists: dict[tuple[str, type], list[Scalar]] = {}
            others: list[Where] = []
            for part in parts:
                ((key, inner),) = part.items()
                values = inner.get("$in") or [inner["$eq"]] if key[0] != "$" and inner.keys() <= {"$in", "$eq"} else []
                if values:
                    lists.setdefault((key, type(values[0])), []).extend(values)
                else:
                    others.append(part)
            same = [(key, list(dict.fromkeys(values))) for (key, _), values in lists.items()]
            parts = [{key: {"$in": values} if len(values) > 1 else {"$eq": values[0]}} for key, values in same] + others
        return parts[0] if len(parts) == 1 else {f"${logic.value}": parts}

    def _condition(self, condition: Condition) -> Where:
        key, operator, values = condition.key, condition.operator, condition.values
        if not isinstance(condition.value, list):
            return {key: {_CHROMA.get(operator, f"${operator.value}"): condition.value}}
        kinds = dict.fromkeys(map(value_kind, values))
        lists: list[list[Scalar]] = [[one for one in values if value_kind(one) == kind] for kind in kinds]
        lists = [list(map(float, same)) if {int, float} == set(map(type, same)) else same for same in lists]
        parts = [{key: {f"${operator.value}": same}} for same in lists]
        return self._group(FilterLogic.OR if operator is FilterOperator.IN else FilterLogic.AND, parts)


# -- Elasticsearch and OpenSearch -------------------------------------------------------------------------------------

_NOTHING: Final[JsonObject] = {"match_none": {}}
_ELASTIC_RANGES: Final = {">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}
_ELASTIC_ROUNDED: Final = ("float", "half_float", "scaled_float")
_ELASTIC_KINDS: Final = {"boolean": "boolean"} | dict.fromkeys(
    (*_ELASTIC_ROUNDED, "long", "integer", "short", "byte", "unsigned_long", "double"), "number"
)


class ElasticField(NamedTuple):
    """What a mapping says of a field: its type in JSON, or the mapping's own name of one that is not compared here.

    ``path`` is what is compared, ``whole`` what is there if the key has a value. Text of more than ``longest``
    characters is not indexed. Numbers that the store rounds can't be counted.
    """

    kind: str
    path: str
    whole: str
    longest: int | None = None
    counts: bool = True


def elastic_fields(properties: JsonMapping, prefix: str = "") -> Iterator[tuple[str, ElasticField]]:
    """Yield the fields of a mapping of metadata; a key with a dot is an object to these stores."""
    for name, mapped in properties.items():
        path, kind = f"metadata.{prefix}{name}", mapped.get("type", "object")
        texts = {path: mapped, **{f"{path}.{sub}": one for sub, one in mapped.get("fields", {}).items()}}
        exact = [at for at, one in texts.items() if one.get("type") == "keyword" and "normalizer" not in one]
        if exact:
            yield prefix + name, ElasticField("string", exact[0], path, texts[exact[0]].get("ignore_above"))
        elif "properties" in mapped:
            yield from elastic_fields(mapped["properties"], f"{prefix}{name}.")
        else:
            counts = kind in _ELASTIC_KINDS and kind not in _ELASTIC_ROUNDED
            yield prefix + name, ElasticField(_ELASTIC_KINDS.get(kind, kind), path, path, counts=counts)


class Elasticsearch(Dialect[JsonObject]):
    """JSON of the query language, by the fields of an index's mapping: another key is absent everywhere.

    Lists are compared item by item. What a mapping can't compare exactly is refused when the filter is written.
    """

    name = "Elasticsearch"
    lacks = TEXT_MATCHES
    keys = ANY_KEY

    def __init__(self, fields: Mapping[str, ElasticField]) -> None:
        self._fields = fields

    def _group(self, logic: FilterLogic, parts: list[JsonObject]) -> JsonObject:
        if logic is FilterLogic.AND:
            return {"bool": {"filter": parts}}
        # Most of a principal's groups are keys of no document, and the number of conditions is limited (1,024).
        return _should([part for part in parts if part != _NOTHING])

    def _condition(self, condition: Condition) -> JsonObject:
        operator, field = condition.operator, self._fields.get(condition.key)
        if field is None:
            return {"match_all": {}} if operator is FilterOperator.IS_EMPTY else _NOTHING
        if (why := _unmapped(field, condition)) is not None:
            raise DeniedError(f"{operator.value!r} on {condition.key!r}: {self.name} {why}")
        exists = {"exists": {"field": field.whole}}
        if operator is FilterOperator.IS_EMPTY:
            return _should([{"bool": {"must_not": [exists]}}, _terms(field, [""])])
        if operator in ORDERS:
            same = value_kind(condition.values[0]) == field.kind
            return {"range": {field.path: {_ELASTIC_RANGES[ORDERS[operator]]: condition.value}}} if same else _NOTHING
        equal = _terms(field, condition.values)
        return {"bool": {"filter": [exists], "must_not": [equal]}} if operator in INEQUALITIES else equal


class OpenSearch(Elasticsearch):  # noqa: D101 (the same language)
    name = "OpenSearch"


def _should(parts: list[JsonObject]) -> JsonObject:
    return {"bool": {"should": parts, "minimum_should_match": 1}} if parts else _NOTHING


def _terms(field: ElasticField, values: Sequence[Scalar]) -> JsonObject:
    same = [value for value in values if value_kind(value) == field.kind]
    return {"terms": {field.path: same}} if same else _NOTHING


def _unmapped(field: ElasticField, condition: Condition) -> str | None:
    if field.kind not in ("string", "number", "boolean"):
        return f"keeps it as {field.kind}, which is not compared as here; map it as keyword"
    if field.longest is None:
        return None
    if condition.operator in (*INEQUALITIES, FilterOperator.IS_EMPTY) and field.path == field.whole:
        return f"takes text beyond {field.longest} characters for none; map it as keyword without ignore_above"
    texts = [value for value in condition.values if isinstance(value, str)]
    if texts and condition.operator in ORDERS:
        return f"does not index its text beyond {field.longest} characters; map it as keyword without ignore_above"
    if any(len(text.encode("utf-16-le")) > 2 * field.longest for text in texts):
        return f"does not index text beyond {field.longest} characters, and it is compared with a longer one"
    return None
