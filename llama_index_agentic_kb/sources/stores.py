"""Filters of vector stores, written in each store's own language.

LlamaIndex's adapters can't be trusted with a filter that must hold. Those of PostgreSQL, LanceDB and Milvus put values
and keys into text without escaping all of it: a quote in a user's filter is SQL. Others raise for booleans or groups,
compare "12" as a number, or ignore what they don't know. So the filter of a known store is written here, from the tree,
and a copy of the store carries it. What a store can't express is refused with the reason. ``tests/stores`` compares
each with what ``schema.filters`` says, on real stores.

A store that is not known here gets ``MetadataFilters``. Before a filtered search it is asked for what can't exist,
and is refused if it returns anything; no more once a search with these operators has found something.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final, TypeVar
from uuid import uuid4

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    FilterOperator,
    all_of,
    matcher,
)
from llama_index_agentic_kb.schema.filters import EQUALITIES, INEQUALITIES, ORDERS, TEXT_MATCHES
from llama_index_agentic_kb.sources.filters import conditions, flat, lower
from llama_index_agentic_kb.sources.sql import DuckSql, LanceSql, PostgresSql, quoted, value_kind

Store = TypeVar("Store", bound=BasePydanticVectorStore)

_EXACT: Final = 2**53
"""Whole numbers up to this are exact as floating-point numbers."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_ID: Final = re.compile(r"[\w.:/#@ -]+")


class StoreKind:
    """What is known of one kind of vector store."""

    name: ClassVar[str] = "This vector store"
    ignores_doc_ids: ClassVar[bool] = False
    """Whether a query's ``doc_ids`` are ignored, so that everything would be searched."""
    async_client: ClassVar[str | None] = None
    """The attribute that is None if the store was made without an async client."""
    expresses_negations: ClassVar[bool] = False
    """Whether "exists" and the opposite of "any" can be expressed."""
    needs_copy: ClassVar[bool] = True
    """Whether its adapter can't be trusted with filters itself."""
    escapes_ids: ClassVar[bool] = True
    """Whether its adapter can be asked for any ID; others may put an ID into a query as it is."""

    def has_async_client(self, store: Any) -> bool:
        """Return whether an asynchronous query can be made."""
        return self.async_client is None or getattr(store, self.async_client, None) is not None

    def why_not(self, store: Any, condition: Condition) -> str | None:  # noqa: ARG002
        """Return why a condition can't be expressed; None if it can."""
        return None

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        """Return a copy of a store that applies a filter to each query that has one, whatever the query's says."""
        raise NotImplementedError

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterable[BaseNode]:
        """Return all nodes that pass a filter."""
        nodes: list[BaseNode] = store.get_nodes(None, None if tree is None else lower(tree))
        return nodes

    def with_ids(self, store: Any, node_ids: Sequence[str]) -> Iterable[BaseNode]:
        """Return the nodes with these IDs that there are."""
        if not (self.escapes_ids or hasattr(type(store), "filtered_search")):
            node_ids = [one for one in node_ids if _PLAIN_ID.fullmatch(one)]
        nodes: list[BaseNode] = store.get_nodes(list(node_ids), None) if node_ids else []  # none would mean all
        return nodes

    def passing(self, store: Any, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        """Return the IDs of the nodes whose rows pass a filter: a grant may have been removed from the row alone."""
        documents: list[Any] = sorted({node.ref_doc_id or "None" for node in nodes})
        of_these = Condition(key="ref_doc_id", operator=FilterOperator.IN, value=documents)
        return {node.node_id for node in self.nodes(store, all_of(tree, of_these))} if documents else set()

    def count(self, store: Any, tree: FilterNode | None, *, documents: bool) -> int | None:  # noqa: ARG002
        """Return the number of documents, or of chunks, that pass a filter; None if the store can't count them."""
        return None

    def count_values(
        self,
        store: Any,  # noqa: ARG002
        tree: FilterNode | None,  # noqa: ARG002
        field: str,  # noqa: ARG002
        *,
        documents: bool,  # noqa: ARG002
    ) -> list[tuple[Any, int]] | None:
        """Return each value of a field with its number of documents or chunks; None if the store can't count them."""
        return None

    def text_search(self, store: Any) -> VectorStoreQueryMode | None:  # noqa: ARG002
        """Return the mode of a query by the store's own full-text search; None if the store was made without."""
        return None


class _Unknown(StoreKind):
    needs_copy = False
    escapes_ids = False

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        return store if tree is None or hasattr(type(store), "filtered_search") else _probed(store, tree)

    def passing(self, store: Any, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:  # noqa: ARG002
        return {node.node_id for node in nodes}  # nothing is known of its rows


class _Simple(StoreKind):
    """LlamaIndex's store in memory, which applies some operators wrongly: it gets the IDs that pass instead."""

    name = "SimpleVectorStore"
    expresses_negations = True

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        if tree is None:
            return store
        passes = matcher(tree)

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            rows = list(store.data.metadata_dict.items())
            if not rows:  # none, or persisted without metadata, which is an error
                return type(store).query(store, query, **kwargs)  # type: ignore[no-any-return]
            allowed = {row for row, metadata in rows if passes(metadata)}
            if query.node_ids is not None:
                allowed.intersection_update(query.node_ids)
            narrow = VectorStoreQuery(**{**vars(query), "filters": None, "node_ids": list(allowed)})
            return type(store).query(store, narrow, **kwargs)  # type: ignore[no-any-return]

        return _copy(store, query=query)

    def passing(self, store: Any, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        passes, rows = matcher(tree), store.data.metadata_dict
        return {node.node_id for node in nodes if passes(rows.get(node.node_id, node.metadata))}


class _Chroma(StoreKind):
    name = "Chroma"
    ignores_doc_ids = True
    needs_copy = False

    def why_not(self, store: Any, condition: Condition) -> str | None:  # noqa: ARG002
        key, operator = condition.key, condition.operator
        if operator in TEXT_MATCHES or operator is FilterOperator.IS_EMPTY:
            return f"Chroma has no operator {operator.value!r} for metadata, as asked for on {key!r}"
        if operator is FilterOperator.ANY:
            return f"Chroma can't filter on items of lists, as 'any' on {key!r} does; keep a key for each item"
        if operator in ORDERS and isinstance(condition.value, str):
            return _orders_numbers_only(self.name, condition)
        return None

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:  # noqa: ARG002 (its adapter is right)
        return store

    def passing(self, store: Any, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        if not nodes:
            return set()
        rows = store.client.get(ids=[node.node_id for node in nodes], include=["metadatas"])
        passes = matcher(tree)
        return {row for row, own in zip(rows["ids"], rows["metadatas"], strict=True) if passes(own or {})}


_POSTGRES_UNITS: Final = ("id", "COALESCE(NULLIF(metadata_ ->> 'ref_doc_id', 'None'), node_id)")
"""What is distinct of each chunk, and of each document."""


class _Postgres(StoreKind):
    name = "PostgreSQL"
    ignores_doc_ids = True
    expresses_negations = True

    def has_async_client(self, store: Any) -> bool:  # noqa: ARG002
        return False  # its connections belong to the event loop of their first use, and fail on any other

    def why_not(self, store: Any, condition: Condition) -> str | None:  # noqa: ARG002
        if condition.operator is FilterOperator.TEXT_MATCH_INSENSITIVE and not str(condition.value).isascii():
            return (
                f"PostgreSQL may ignore the case of ASCII letters only, and {condition.key!r} is compared with others"
            )
        return None

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        from sqlalchemy import func  # noqa: PLC0415 (a second)

        if tree is None:
            return store
        clause = _postgres_clause(tree)
        twin = _connected_copy(store, _recursively_apply_filters=clause)

        def exactly(embedding: Any, *rest: Any, **kwargs: Any) -> Any:
            statement = type(store)._build_query(twin, embedding, *rest, **kwargs)  # noqa: SLF001 (no other way)
            distance = store._table_class.embedding.cosine_distance(embedding)  # noqa: SLF001
            return statement.order_by(None).order_by(func.abs(distance))  # no index of vectors is of this

        exact = _connected_copy(store, _recursively_apply_filters=clause, _build_query=exactly)

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            result: VectorStoreQueryResult = type(store).query(twin, query, **kwargs)
            if query.mode is VectorStoreQueryMode.DEFAULT and len(result.ids or ()) < query.similarity_top_k:
                # An index of vectors reads the nearest rows, and drops those that do not pass: it may have lost some.
                result = type(store).query(exact, query, **kwargs)
            return result

        return _copy(twin, query=query)

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterator[BaseNode]:
        # The adapter's own way reads all rows at once, with their vectors.
        return (metadata_dict_to_node(metadata) for (metadata,) in self._select(store, tree, ["metadata_"]))

    def count(self, store: Any, tree: FilterNode | None, *, documents: bool) -> int | None:
        ((count,),) = self._select(store, tree, [f"count(DISTINCT {_POSTGRES_UNITS[documents]})"])
        return int(count)

    def count_values(
        self, store: Any, tree: FilterNode | None, field: str, *, documents: bool
    ) -> list[tuple[Any, int]] | None:
        from sqlalchemy import Text, cast, func, text  # noqa: PLC0415 (a second)

        value = "CAST(metadata_ -> CAST(:field AS text) AS jsonb)"
        many = f"CASE WHEN jsonb_typeof({value}) = 'array' THEN {value} ELSE jsonb_build_array({value}) END"
        item = func.jsonb_array_elements(text(many).bindparams(field=field)).column_valued(
            "item", joins_implicitly=True
        )
        counts = f"count(DISTINCT {_POSTGRES_UNITS[documents]})"
        return [(json.loads(one), count) for one, count in self._select(store, tree, [cast(item, Text), counts], item)]

    def _select(self, store: Any, tree: FilterNode | None, columns: Sequence[Any], *groups: Any) -> Iterator[Any]:
        """Yield the rows of a query over those that pass a filter."""
        from sqlalchemy import select, text  # noqa: PLC0415 (a second)

        store._initialize()  # noqa: SLF001 (the adapter has no other way)
        query = select(*(text(one) if isinstance(one, str) else one for one in columns))
        query = query.select_from(store._table_class).group_by(*groups)  # noqa: SLF001
        if tree is not None:
            query = query.where(_postgres_clause(tree)(None))
        with store._session() as session:  # noqa: SLF001
            yield from session.execute(query.execution_options(yield_per=1_000))

    def text_search(self, store: Any) -> VectorStoreQueryMode | None:
        return VectorStoreQueryMode.SPARSE if store.hybrid_search else None


def _postgres_clause(tree: FilterNode) -> Callable[[Any], Any]:
    """Return what makes a filter as a clause of SQLAlchemy, whatever the adapter's filter says."""
    from sqlalchemy import text  # noqa: PLC0415 (a second)

    sql = PostgresSql()
    where = sql.write(flat(tree))
    return lambda _filters: text(where).bindparams(**sql.bound)


def _connected_copy(store: Any, **methods: Callable[..., Any]) -> Any:
    """Return a copy of a store of PostgreSQL that uses the store's connections, which are made at first use."""

    def connected() -> None:
        store._initialize()  # noqa: SLF001 (the adapter has no other way)
        twin.__pydantic_private__.update(store.__pydantic_private__)

    twin = _copy(store, _initialize=connected, **methods)
    return twin


class _Duck(StoreKind):
    name = "DuckDB"
    ignores_doc_ids = True

    def why_not(self, store: Any, condition: Condition) -> str | None:  # noqa: ARG002
        return _not_a_name(self.name, condition) or _no_lists(self.name, condition) or _inexact(self.name, condition)

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        if tree is None:
            return store
        from duckdb import SQLExpression  # noqa: PLC0415 (only who has such a store has the package)

        where = DuckSql().write(flat(tree))
        return _copy(store, _build_metadata_filter_expressions=lambda metadata_filters: SQLExpression(where))  # noqa: ARG005

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterable[BaseNode]:
        return super().nodes(self.narrowed(store, tree), tree)


class _Lance(StoreKind):
    name = "LanceDB"
    ignores_doc_ids = True

    def why_not(self, store: Any, condition: Condition) -> str | None:  # noqa: ARG002
        return _not_a_name(self.name, condition) or _no_lists(self.name, condition) or _inexact(self.name, condition)

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        def where() -> dict[str, str]:  # the table is read when it is searched: it may be made, or grow, until then
            return {} if tree is None else {"where": LanceSql(_lance_fields(store)).write(flat(tree))}

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            unfiltered = VectorStoreQuery(**{**vars(query), "filters": None})
            try:
                return type(store).query(store, unfiltered, **kwargs, **where())  # type: ignore[no-any-return]
            except Warning as nothing:  # this is how the adapter says that nothing was found
                if type(nothing) is not Warning:
                    raise
                return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])

        def get_nodes(node_ids: Any = None, filters: Any = None, **kwargs: Any) -> Any:  # noqa: ARG001
            return type(store).get_nodes(store, None, None, **kwargs, **where())

        return _copy(store, query=query, get_nodes=get_nodes)

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterable[BaseNode]:
        return super().nodes(self.narrowed(store, tree), tree)

    def with_ids(self, store: Any, node_ids: Sequence[str]) -> Iterable[BaseNode]:
        where = f"id IN ({', '.join(map(quoted, node_ids))})"  # the adapter quotes IDs as names of columns
        nodes: list[BaseNode] = store.get_nodes(None, None, where=where) if node_ids else []
        return nodes


def _lance_fields(store: Any) -> dict[str, str]:
    names = {"string": "string", "large_string": "string", "bool": "boolean", "double": "number", "float": "number"}
    fields = store.table.schema.field("metadata").type
    return {one.name: names.get(str(one.type), "whole" if "int" in str(one.type) else "other") for one in fields}


# -- Milvus and Qdrant ------------------------------------------------------------------------------------------------


def _milvus_condition(condition: Condition) -> str:
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


def _milvus(tree: FilterNode) -> str:
    if isinstance(tree, Condition):
        return f"({_milvus_condition(tree)})"
    return f"({f' {tree.logic.value} '.join(map(_milvus, tree.filters))})"


class _Milvus(StoreKind):
    name = "Milvus"
    escapes_ids = False
    async_client = "_async_milvusclient"

    def why_not(self, store: Any, condition: Condition) -> str | None:
        if condition.operator in (FilterOperator.TEXT_MATCH_INSENSITIVE, FilterOperator.IS_EMPTY):
            return f"Milvus has no operator {condition.operator.value!r}, as asked for on {condition.key!r}"
        if condition.operator is FilterOperator.TEXT_MATCH and re.search(r"[%_\\]", str(condition.value)):
            return f"in Milvus % and _ stand for any letters, and {condition.key!r} is asked for text with them"
        if condition.key in ("id", store.text_key, store.doc_id_field, store.embedding_field):
            return f"Milvus's adapter keeps something else under {condition.key!r}"
        return _not_a_name(self.name, condition) or _inexact(self.name, condition)

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        if tree is None:
            return store
        where, prepare = _milvus(flat(tree)), type(store)._prepare_before_search  # noqa: SLF001 (no other way)

        def prepared(query: VectorStoreQuery, **kwargs: Any) -> tuple[str, list[str]]:
            own, fields = prepare(store, VectorStoreQuery(**{**vars(query), "filters": None}), **kwargs)
            return (f"{where} and ({own})" if own else where), fields

        return _copy(store, _prepare_before_search=prepared)

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterator[BaseNode]:
        where = 'id != ""' if tree is None else _milvus(flat(tree))
        rows = store.client.query_iterator(store.collection_name, filter=where, output_fields=["*"])
        try:
            while batch := rows.next():
                yield from (metadata_dict_to_node(row, text=row.get(store.text_key)) for row in batch)
        finally:
            rows.close()


def _qdrant(tree: FilterNode) -> Any:
    from qdrant_client.http import models as rest  # noqa: PLC0415 (only who has such a store has the package)

    if isinstance(tree, FilterGroup):
        parts = [_qdrant(child) for child in tree.filters]
        return {
            FilterLogic.AND: partial(rest.Filter, must=parts),
            FilterLogic.OR: partial(rest.Filter, should=parts),
            FilterLogic.NOT: partial(rest.Filter, must_not=parts),
        }[tree.logic]()
    key, operator = tree.key, tree.operator
    empty = rest.IsEmptyCondition(is_empty=rest.PayloadField(key=key))
    if operator in ORDERS:
        name = {FilterOperator.GE: "gte", FilterOperator.LE: "lte"}.get(operator, operator.value)
        return rest.FieldCondition(key=key, range=rest.Range(**{name: tree.value}))
    if operator is FilterOperator.IS_EMPTY:
        return rest.Filter(should=[empty, rest.FieldCondition(key=key, match=rest.MatchValue(value=""))])
    equal: list[Any] = []
    for value in tree.values:  # a range: 1 and 1.0 are one number
        if value_kind(value) == "number":
            equal.append(rest.FieldCondition(key=key, range=rest.Range(gte=value, lte=value)))
        else:
            equal.append(rest.FieldCondition(key=key, match=rest.MatchValue(value=value)))
    return rest.Filter(must_not=[*equal, empty]) if operator in INEQUALITIES else rest.Filter(should=equal)


class _Qdrant(StoreKind):
    name = "Qdrant"
    async_client = "_aclient"

    def why_not(self, store: Any, condition: Condition) -> str | None:  # noqa: ARG002
        key, operator = condition.key, condition.operator
        if operator in TEXT_MATCHES:
            return f"what Qdrant finds by {operator.value!r} depends on a full-text index on {key!r}"
        if operator in ORDERS and isinstance(condition.value, str):
            return _orders_numbers_only(self.name, condition)
        if operator in ORDERS and isinstance(condition.value, bool):
            return f"Qdrant does not order booleans, as {operator.value!r} on {key!r} does"
        return _not_a_name(self.name, condition) or _inexact(self.name, condition)

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        return store if tree is None else _copy(store, _build_subfilter=lambda _filters: _qdrant(_grouped(tree)))

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterator[BaseNode]:
        where, offset = None if tree is None else _qdrant(_grouped(tree)), None
        while True:
            points, offset = store.client.scroll(store.collection_name, where, limit=1_000, offset=offset)
            yield from store.parse_to_query_result(points).nodes
            if offset is None:
                return

    def text_search(self, store: Any) -> VectorStoreQueryMode | None:
        return VectorStoreQueryMode.SPARSE if store.enable_hybrid else None


def _grouped(tree: FilterNode) -> FilterNode:
    simple = flat(tree)
    return simple if isinstance(simple, FilterGroup) else FilterGroup(filters=[simple])


def _not_a_name(store: str, condition: Condition) -> str | None:
    plain = _NAME.fullmatch(condition.key)
    return (
        None if plain else f"{store} filters on keys of letters, digits and underscores only, not on {condition.key!r}"
    )


def _no_lists(store: str, condition: Condition) -> str | None:
    any_of = condition.operator is FilterOperator.ANY
    return (
        f"{store}'s adapter keeps no lists, as 'any' on {condition.key!r} needs; keep a key for each item"
        if any_of
        else None
    )


def _orders_numbers_only(store: str, condition: Condition) -> str:
    return (
        f"{store} orders numbers only, not text or dates, as {condition.operator.value!r} on {condition.key!r} does; "
        "keep a number such as 20240131"
    )


def _inexact(store: str, condition: Condition) -> str | None:
    big = any(value_kind(one) == "number" and abs(float(one)) > _EXACT for one in condition.values)
    return (
        f"{store} compares numbers up to 2**53 exactly, and {condition.key!r} is compared with a larger one"
        if big
        else None
    )


# -- all of them ------------------------------------------------------------------------------------------------------

_KINDS: Final[dict[str, StoreKind]] = {
    "ChromaVectorStore": _Chroma(),
    "DuckDBVectorStore": _Duck(),
    "LanceDBVectorStore": _Lance(),
    "MilvusVectorStore": _Milvus(),
    "PGVectorStore": _Postgres(),
    "QdrantVectorStore": _Qdrant(),
}
_SIMPLE: Final = _Simple()
_UNKNOWN: Final = _Unknown()


def kind_of(store: Any) -> StoreKind:
    """Return what is known of a store, or of the adapter that it inherits from, without importing it."""
    if type(store) is SimpleVectorStore:  # a subclass may search in another way
        return _SIMPLE
    return next((_KINDS[base.__name__] for base in type(store).__mro__ if base.__name__ in _KINDS), _UNKNOWN)


def is_chroma(store: Any) -> bool:
    """Return whether a vector store is LlamaIndex's ``ChromaVectorStore`` or a subclass, without importing it."""
    return isinstance(kind_of(store), _Chroma)


def store_refusal(store: BasePydanticVectorStore, tree: FilterNode) -> str | None:
    """Return why a vector store can't apply a filter; None if it can, or if only the store itself knows.

    Such a store must not be queried: it would raise, or ignore the condition and return nodes that the check of each
    returned node then drops.
    """
    kind, simple = kind_of(store), flat(tree)
    exists = any(one.operator is FilterOperator.EXISTS for one in conditions(simple))
    if not kind.expresses_negations and (exists or _negates(simple)):
        return "vector stores have no operator for 'exists', nor for the opposite of 'any'; compare with values instead"
    return next((why for one in conditions(simple) if (why := kind.why_not(store, one)) is not None), None)


def _negates(tree: FilterNode) -> bool:
    return isinstance(tree, FilterGroup) and (tree.logic is FilterLogic.NOT or any(map(_negates, tree.filters)))


def _copy(store: Any, **methods: Callable[..., Any]) -> Any:
    """Return a shallow copy of a store, with the same connections, and with methods of its own."""
    twin = store.model_copy()
    for name, method in methods.items():
        if not hasattr(type(store), name):
            raise DeniedError(f"this release of {type(store).__name__} has no {name}: it is not known how it filters")
        object.__setattr__(twin, name, method)
    return twin


# -- stores that are not known ----------------------------------------------------------------------------------------

_asked: Final[dict[int, set[FilterOperator]]] = {}
"""The operators that unknown stores, by ``id``, were found to apply."""
_UNPROBED: Final = (*INEQUALITIES, FilterOperator.IS_EMPTY, FilterOperator.EXISTS)
"""Operators that stores may hold for true where the key is absent."""


def _seen(store: Any) -> set[FilterOperator]:
    if id(store) not in _asked:
        _asked[id(store)] = set()
        weakref.finalize(store, _asked.pop, id(store), None)
    return _asked[id(store)]


def _impossible(operator: FilterOperator) -> MetadataFilters:
    """Return a filter that no row passes."""
    value: Any = 2**52 if operator in ORDERS else uuid4().hex
    many = operator in (FilterOperator.IN, FilterOperator.ANY)
    return lower(Condition(key="agentic_kb_probe", operator=operator, value=[value, uuid4().hex] if many else value))


def _check(store: Any, operator: FilterOperator, result: VectorStoreQueryResult) -> None:
    if result.ids or result.nodes:
        raise DeniedError(f"{type(store).__name__} was not searched: it ignores filters by {operator.value!r}")


def _remember(store: Any, operators: set[FilterOperator], result: VectorStoreQueryResult) -> None:
    if result.ids or result.nodes:  # an empty store passes every probe
        _seen(store).update(operators)


def _probed(store: Any, tree: FilterNode) -> Any:
    """Return a copy of an unknown store that asks for what can't exist before a query with an operator not yet seen."""
    operators = {one.operator for one in conditions(flat(tree))}.difference(_UNPROBED)
    if operators <= _seen(store):
        return store

    def probes(query: VectorStoreQuery) -> Iterator[tuple[FilterOperator, VectorStoreQuery]]:
        for operator in sorted(operators - _seen(store)):
            impossible = {**vars(query), "filters": _impossible(operator), "similarity_top_k": 1}
            yield operator, VectorStoreQuery(**impossible)

    def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        for operator, probe in probes(query):
            _check(store, operator, store.query(probe, **kwargs))
        result: VectorStoreQueryResult = store.query(query, **kwargs)
        _remember(store, operators, result)
        return result

    async def aquery(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        for operator, probe in probes(query):
            _check(store, operator, await store.aquery(probe, **kwargs))
        result: VectorStoreQueryResult = await store.aquery(query, **kwargs)
        _remember(store, operators, result)
        return result

    return _copy(store, query=query, aquery=aquery)
