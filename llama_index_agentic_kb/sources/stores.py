"""Vector stores by LlamaIndex's adapters: filtered searches, listings and counts of each kind.

The filter of a known store is written by its dialect (``search.dialects``), and a copy of the store carries it, since
the adapters can't be trusted with a filter that must hold. A store that is not known here gets ``MetadataFilters``.
Before a filtered search it is asked for what can't exist, and is refused if it returns anything; no more once a search
with these operators has found something.
"""

# ruff: noqa: SLF001 (the adapters have no public names for their parts)

from __future__ import annotations

import asyncio
import copy
import json
import re
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, ClassVar, Final, TypeAlias
from uuid import uuid4

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode, VectorStoreQueryResult
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import Condition, FilterNode, FilterOperator, all_of, matcher
from llama_index_agentic_kb.schema.filters import INEQUALITIES, ORDERS, conditions, flat
from llama_index_agentic_kb.search.dialects import (
    Chroma,
    Dialect,
    DuckSql,
    ElasticField,
    Elasticsearch,
    LanceSql,
    Milvus,
    OpenSearch,
    PostgresSql,
    Qdrant,
    elastic_fields,
    quoted,
)
from llama_index_agentic_kb.search.filters import Lowering, lower

Json: TypeAlias = JsonObject

CHROMA_PAGE: Final = 2_000
"""Rows of one request to Chroma, which takes 32,766 values at most."""
_PLAIN_ID: Final = re.compile(r"[\w.:/#@ -]+")


class StoreKind:
    """One kind of vector store: what it can filter, and how its adapter has to be called."""

    dialect: ClassVar[type[Dialect[Any]] | None] = Lowering
    """The language of its filters; None if it is given the IDs that pass."""
    ignores_doc_ids: ClassVar[bool] = False
    """Whether a query's ``doc_ids`` are ignored, so that everything would be searched."""
    async_client: ClassVar[str | None] = None
    """The attribute that is None if the store was made without an async client; "" if its clients are of one loop."""
    needs_copy: ClassVar[bool] = True
    """Whether its adapter can't be trusted with filters itself."""
    has_words: ClassVar[str | None] = None
    """The attribute that says whether the store was made with a full-text search."""
    escapes_ids: ClassVar[bool] = True
    """Whether its adapter can be asked for any ID; others may put an ID into a query as it is."""

    counts_exactly: ClassVar[bool] = True
    """Whether it counts only rows that pass in Python too; else its counts are not used under permissions."""
    lists: ClassVar[bool] = False
    """Whether nodes are listed here, though its adapter may not."""

    @property
    def name(self) -> str:
        """The name of the database."""
        return "SimpleVectorStore" if self.dialect is None else self.dialect.name

    def has_async_client(self, store: Any) -> bool:
        """Return whether an asynchronous query can be made, on any event loop."""
        name = self.async_client
        return name is None or (name != "" and getattr(store, name, None) is not None)

    def refusal(self, store: Any, tree: FilterNode) -> str | None:  # noqa: ARG002
        """Return why a filter can't be applied; None if it can, or if only the store itself knows."""
        return None if self.dialect is None else self.dialect.refusal(tree)

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        """Return a copy of a store that applies a filter to each query that has one, whatever the query's says."""
        return store if tree is None else self._narrowed(store, tree)

    def _narrowed(self, store: Any, tree: FilterNode) -> Any:  # noqa: ARG002
        return store

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterable[BaseNode]:
        """Return all nodes that pass a filter."""
        asked = self.narrowed(store, tree) if self.needs_copy else store
        nodes: list[BaseNode] = asked.get_nodes(None, None if tree is None else lower(tree))
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

    def counts(self, *_asked: Any, **_unit: Any) -> list[tuple[Any, int]] | None:
        """Return each value of a field with its number of ``documents``, or of chunks, that pass a filter.

        Without a field it is None, with the number of all. None if the store can't count them.
        """
        return None

    def text_search(self, store: Any) -> VectorStoreQueryMode | None:
        """Return the mode of a query by the store's own full-text search; None if the store was made without."""
        has_words = self.has_words is not None and getattr(store, self.has_words)
        return VectorStoreQueryMode.SPARSE if has_words else None


class _Unknown(StoreKind):
    needs_copy = False
    escapes_ids = False

    def refusal(self, store: Any, tree: FilterNode) -> str | None:
        own: type[Dialect[Any]] | None = getattr(store, "filter_dialect", None)  # a knowledge store's
        return super().refusal(store, tree) if own is None else own.refusal(tree)

    def _narrowed(self, store: Any, tree: FilterNode) -> Any:
        return store if hasattr(type(store), "filtered_search") else _probed(store, tree)

    def passing(self, store: Any, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:  # noqa: ARG002
        return {node.node_id for node in nodes}  # nothing is known of its rows


class _Simple(StoreKind):
    """LlamaIndex's store in memory, which applies some operators wrongly: it gets the IDs that pass instead."""

    dialect = None

    def _narrowed(self, store: Any, tree: FilterNode) -> Any:
        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            passes, rows = matcher(tree), list(store.data.metadata_dict.items())
            if not rows:  # none, or persisted without metadata, which is an error
                return type(store).query(store, query, **kwargs)  # type: ignore[no-any-return]
            allowed = {row for row, metadata in rows if passes(metadata)}
            if query.node_ids is not None:
                allowed.intersection_update(query.node_ids)
            narrow = VectorStoreQuery(**{**vars(query), "filters": None, "node_ids": list(allowed)})
            return type(store).query(store, narrow, **kwargs)  # type: ignore[no-any-return]

        return copied(store, query=query)

    def passing(self, store: Any, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        passes, rows = matcher(tree), store.data.metadata_dict
        return {node.node_id for node in nodes if passes(rows.get(node.node_id, node.metadata))}


class _Chroma(StoreKind):
    dialect = Chroma
    ignores_doc_ids = True
    needs_copy = False

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterator[BaseNode]:
        # Each row is checked here: a request takes some hundred conditions, and a principal may have more groups.
        if tree is None:
            yield from super().nodes(store, None)
            return
        passes = matcher(tree)
        passing = (row for row, metadata in chroma_rows(store.client) if passes(metadata))
        while ids := list(islice(passing, CHROMA_PAGE)):
            yield from self.with_ids(store, ids)

    def passing(self, store: Any, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        passes, ids = matcher(tree), [node.node_id for node in nodes]
        rows = store.client.get(ids=ids, include=["metadatas"]) if ids else {"ids": (), "metadatas": ()}
        return {row for row, own in zip(rows["ids"], rows["metadatas"], strict=True) if passes(own or {})}


def chroma_rows(collection: Any) -> Iterator[tuple[str, JsonMapping]]:
    """Yield the IDs and metadata of a Chroma collection's rows, read page by page."""
    for start in range(0, collection.count(), CHROMA_PAGE):
        rows = collection.get(limit=CHROMA_PAGE, offset=start, include=["metadatas"])
        yield from ((row, own or {}) for row, own in zip(rows["ids"], rows["metadatas"], strict=True))


_POSTGRES_UNITS: Final = ("id", "COALESCE(NULLIF(metadata_ ->> 'ref_doc_id', 'None'), node_id)")
"""What is distinct of each chunk, and of each document."""


class _Postgres(StoreKind):
    dialect = PostgresSql
    ignores_doc_ids = True
    has_words = "hybrid_search"
    async_client = ""  # its connections fail on any event loop but that of their first use

    def _narrowed(self, store: Any, tree: FilterNode) -> Any:
        from sqlalchemy import func  # noqa: PLC0415 (a second)

        clause = _postgres_clause(tree)
        twin = _connected_copy(store, _recursively_apply_filters=clause)

        def exactly(embedding: Any, *rest: Any, **kwargs: Any) -> Any:
            statement = type(store)._build_query(twin, embedding, *rest, **kwargs)
            distance = store._table_class.embedding.cosine_distance(embedding)
            return statement.order_by(None).order_by(func.abs(distance))  # no index of vectors is of this

        exact = _connected_copy(store, _recursively_apply_filters=clause, _build_query=exactly)

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            result: VectorStoreQueryResult = type(store).query(twin, query, **kwargs)
            if query.mode is VectorStoreQueryMode.DEFAULT and len(result.ids or ()) < query.similarity_top_k:
                # An index of vectors reads the nearest rows, and drops those that do not pass: it may have lost some.
                result = type(store).query(exact, query, **kwargs)
            return result

        return copied(twin, query=query)

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterator[BaseNode]:
        # The adapter's own way reads all rows at once, with their vectors.
        return (metadata_dict_to_node(metadata) for (metadata,) in self._select(store, tree, ["metadata_"]))

    def counts(
        self, store: Any, tree: FilterNode | None, field: str | None, *, documents: bool
    ) -> list[tuple[Any, int]] | None:
        counts = f"count(DISTINCT {_POSTGRES_UNITS[documents]})"
        if field is None:
            return [(None, count) for (count,) in self._select(store, tree, [counts])]
        from sqlalchemy import Text, cast, func, text  # noqa: PLC0415 (a second)

        value = "CAST(metadata_ -> CAST(:field AS text) AS jsonb)"
        many = f"CASE WHEN jsonb_typeof({value}) = 'array' THEN {value} ELSE jsonb_build_array({value}) END"
        item = func.jsonb_array_elements(text(many).bindparams(field=field)).column_valued(
            "item", joins_implicitly=True
        )
        return [(json.loads(one), count) for one, count in self._select(store, tree, [cast(item, Text), counts], item)]

    def _select(self, store: Any, tree: FilterNode | None, columns: Sequence[Any], *groups: Any) -> Iterator[Any]:
        """Yield the rows of a query over those that pass a filter."""
        from sqlalchemy import select, text  # noqa: PLC0415 (a second)

        store._initialize()
        query = select(*(text(one) if isinstance(one, str) else one for one in columns))
        query = query.select_from(store._table_class).group_by(*groups)
        if tree is not None:
            query = query.where(_postgres_clause(tree)(None))
        with store._session() as session:
            yield from session.execute(query.execution_options(yield_per=1_000))


def _postgres_clause(tree: FilterNode) -> Callable[[Any], Any]:
    """Return what makes a filter as a clause of SQLAlchemy, whatever the adapter's filter says."""
    from sqlalchemy import text  # noqa: PLC0415 (a second)

    where, values = PostgresSql().named(tree)
    return lambda _filters: text(where).bindparams(**values)


def _connected_copy(store: Any, **methods: Callable[..., Any]) -> Any:
    """Return a copy of a store of PostgreSQL that uses the store's connections, which are made at first use."""

    def connected() -> None:
        store._initialize()
        twin.__pydantic_private__.update(store.__pydantic_private__)

    twin = copied(store, _initialize=connected, **methods)
    return twin


class _Duck(StoreKind):
    dialect = DuckSql
    ignores_doc_ids = True

    def _narrowed(self, store: Any, tree: FilterNode) -> Any:
        from duckdb import SQLExpression  # noqa: PLC0415 (only who has such a store has the package)

        where = DuckSql().write(tree)
        return copied(store, _build_metadata_filter_expressions=lambda metadata_filters: SQLExpression(where))  # noqa: ARG005


_LANCE: Final = {"string": "string", "large_string": "string", "bool": "boolean", "double": "number", "float": "number"}
"""The kinds of value of columns' types."""


class _Lance(StoreKind):
    dialect = LanceSql
    ignores_doc_ids = True

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        def where() -> dict[str, str]:  # the table is read when it is searched: it may be made, or grow, until then
            if tree is None:
                return {}
            fields = {one.name: str(one.type) for one in store.table.schema.field("metadata").type}
            kinds = {name: _LANCE.get(kind, "whole" if "int" in kind else "other") for name, kind in fields.items()}
            return {"where": LanceSql(kinds).write(tree)}

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

        return copied(store, query=query, get_nodes=get_nodes)

    def with_ids(self, store: Any, node_ids: Sequence[str]) -> Iterable[BaseNode]:
        where = f"id IN ({', '.join(map(quoted, node_ids))})"  # the adapter quotes IDs as names of columns
        nodes: list[BaseNode] = store.get_nodes(None, None, where=where) if node_ids else []
        return nodes


class _Milvus(StoreKind):
    dialect = Milvus
    escapes_ids = False
    async_client = "_async_milvusclient"

    def refusal(self, store: Any, tree: FilterNode) -> str | None:
        own = {"id", store.text_key, store.doc_id_field, store.embedding_field}
        taken = next((one.key for one in conditions(tree) if one.key in own), None)
        return super().refusal(store, tree) if taken is None else f"Milvus keeps something else under {taken!r}"

    def _narrowed(self, store: Any, tree: FilterNode) -> Any:
        where, prepare = Milvus().write(tree), type(store)._prepare_before_search

        def prepared(query: VectorStoreQuery, **kwargs: Any) -> tuple[str, list[str]]:
            own, fields = prepare(store, VectorStoreQuery(**{**vars(query), "filters": None}), **kwargs)
            return (f"({where}) and ({own})" if own else where), fields

        return copied(store, _prepare_before_search=prepared)

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterator[BaseNode]:
        where = 'id != ""' if tree is None else Milvus().write(tree)
        rows = store.client.query_iterator(store.collection_name, filter=where, output_fields=["*"])
        try:
            while batch := rows.next():
                yield from (metadata_dict_to_node(row, text=row.get(store.text_key)) for row in batch)
        finally:
            rows.close()


class _Qdrant(StoreKind):
    dialect = Qdrant
    async_client = "_aclient"
    has_words = "enable_hybrid"

    def _narrowed(self, store: Any, tree: FilterNode) -> Any:
        return copied(store, _build_subfilter=lambda _filters: Qdrant().write(tree))

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterator[BaseNode]:
        where, offset = None if tree is None else Qdrant().write(tree), None
        while True:
            points, offset = store.client.scroll(store.collection_name, where, limit=1_000, offset=offset)
            yield from store.parse_to_query_result(points).nodes
            if offset is None:
                return


# -- Elasticsearch and OpenSearch -------------------------------------------------------------------------------------

ELASTIC_PAGE: Final = 1_000
_NEIGHBOURS: Final = 10_000
"""The maximum number of neighbours that Elasticsearch looks at in a shard."""
_CLIENTS: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()
"""Synchronous clients of Elasticsearch by the asynchronous ones of stores."""


class _Elasticsearch(StoreKind):
    """Filters are written from what the index's mapping says of each field, which is asked for at each filtered search.

    Elasticsearch's adapter writes each condition as an equality, whatever its operator; OpenSearch's takes dates for
    another kind of text.
    """

    dialect: ClassVar[type[Elasticsearch]] = Elasticsearch
    ignores_doc_ids = True
    counts_exactly = False  # an item of a list counts, and 12 in a keyword field as "12"
    lists = True
    async_client = ""

    def text_search(self, store: Any) -> VectorStoreQueryMode | None:  # noqa: ARG002
        return VectorStoreQueryMode.TEXT_SEARCH

    def place(self, store: Any) -> tuple[Any, str, str, str]:
        """Return the client, the index, the field of the text, and the client's package."""
        if (given := store.client) not in _CLIENTS:  # a synchronous one with the same nodes and headers
            nodes = [node.config for node in given.transport.node_pool.all()]
            _CLIENTS[given] = import_module("elasticsearch").Elasticsearch(nodes).options(headers=dict(given._headers))
        return _CLIENTS[given], store.index_name, store.text_field, "elasticsearch"

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            if kwargs:
                raise DeniedError(f"Elasticsearch is searched here without {', '.join(sorted(kwargs))}: use filters=")
            client, index, text, _ = self.place(store)
            if query.mode is VectorStoreQueryMode.HYBRID and not getattr(store.retrieval_strategy, "hybrid", False):
                raise DeniedError("the store was made without hybrid search: set it in its retrieval_strategy")
            where, k = self._where(store, tree), query.similarity_top_k
            if query.mode is VectorStoreQueryMode.TEXT_SEARCH:
                words = {"match": {text: {"query": query.query_str}}}
                body: Json = {"query": {"bool": {"must": [words], "filter": where}}}
            else:
                near = {"k": k, "num_candidates": min(_NEIGHBOURS, max(100, 10 * k)), "filter": where}
                near |= {"query": query.query_str, "query_vector": query.query_embedding}
                body = store.retrieval_strategy.es_query(text_field=text, vector_field=store.vector_field, **near)
            found = client.search(index=index, body={**body, "size": k, "_source": ["metadata", text]})["hits"]["hits"]
            nodes, scores = [_node(hit, text) for hit in found], [hit["_score"] for hit in found]
            return VectorStoreQueryResult(nodes=nodes, similarities=scores, ids=[hit["_id"] for hit in found])

        return copied(store, query=query, aquery=_threaded(query))

    def nodes(self, store: Any, tree: FilterNode | None) -> Iterator[BaseNode]:
        return self._listed(store, {"bool": {"filter": self._where(store, tree)}})

    def with_ids(self, store: Any, node_ids: Sequence[str]) -> Iterator[BaseNode]:
        return self._listed(store, {"ids": {"values": list(node_ids)}})

    def passing(self, store: Any, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        asked = [*self._where(store, tree), {"ids": {"values": [node.node_id for node in nodes]}}]
        return {node.node_id for node in self._listed(store, {"bool": {"filter": asked}})}

    def counts(
        self, store: Any, tree: FilterNode | None, field: str | None, *, documents: bool
    ) -> list[tuple[Any, int]] | None:
        where = self._where(store, tree)
        if field is None:
            if not documents:
                return [(None, self._count(store, where))]
            counted = (count for _, count in self._groups(store, where, documents=True))
            return [(None, sum(counted))] if self._has_documents(store, where) else None
        at = self._fields(store).get(field)
        if at is None:
            return []
        too_long = [{"exists": {"field": at.whole}}, _absent(at.path)]
        lost = at.longest is not None and (at.path == at.whole or self._count(store, [*where, *too_long]))
        if not at.counts or lost or (documents and not self._has_documents(store, where)):
            return None
        counts: Counter[Any] = Counter()
        for value, count in self._groups(store, where, at.path, documents=documents):
            counts[bool(value) if at.kind == "boolean" else value] += count
        return list(counts.items())

    def _has_documents(self, store: Any, where: list[Json]) -> bool:
        """Return whether each row's document is indexed: OpenSearch does not index IDs of more than 256 characters."""
        at = self._fields(store).get("ref_doc_id")
        return at is not None and at.kind == "string" and not self._count(store, [*where, _absent(at.path)])

    def _fields(self, store: Any) -> dict[str, ElasticField]:
        """Return the fields of the mapping; a name may stand for several indices, which may differ."""
        (client, index, *_), fields = self.place(store), dict[str, ElasticField]()
        for one in client.indices.get_mapping(index=index).values():
            metadata = one["mappings"].get("properties", {}).get("metadata", {})
            dynamic = metadata.get("dynamic", one["mappings"].get("dynamic", True))
            if str(dynamic).lower() not in {"true", "strict"}:
                raise DeniedError(f"{self.name} does not map every key of metadata in {index!r}")
            for key, field in elastic_fields(metadata.get("properties", {})):
                same = fields.get(key, field) == field
                fields[key] = field if same else ElasticField("several types", field.path, field.whole, counts=False)
        return fields

    def _where(self, store: Any, tree: FilterNode | None) -> list[Json]:
        return [] if tree is None else [self.dialect(self._fields(store)).write(tree)]

    def _count(self, store: Any, where: list[Json]) -> int:
        client, index, *_ = self.place(store)
        return int(client.count(index=index, body={"query": {"bool": {"filter": where}}})["count"])

    def _listed(self, store: Any, asked: Json) -> Iterator[BaseNode]:
        client, index, text, package = self.place(store)
        scan = import_module(f"{package}.helpers").scan
        hits = scan(client, index=index, query={"query": asked, "_source": ["metadata", text]}, size=ELASTIC_PAGE)
        return (_node(hit, text) for hit in hits)

    def _groups(
        self, store: Any, where: list[Json], path: str | None = None, *, documents: bool
    ) -> Iterator[tuple[Any, int]]:
        """Yield groups of rows with the value of a field and their number of documents, or of rows; see "composite"."""
        client, index, *_ = self.place(store)
        paths = {"value": path, "document": self._fields(store)["ref_doc_id"].path if documents else None}
        sources = [{name: {"terms": {"field": one}}} for name, one in paths.items() if one is not None]
        found: Json = {"size": ELASTIC_PAGE, "sources": sources}
        while True:
            body = {"size": 0, "query": {"bool": {"filter": where}}, "aggs": {"found": {"composite": found}}}
            made = client.search(index=index, body=body)["aggregations"]["found"]
            for group in made["buckets"]:
                whole = documents and group["key"]["document"] != "None"  # else each node is on its own
                yield group["key"].get("value"), 1 if whole else group["doc_count"]
            if "after_key" not in made:
                return
            found["after"] = made["after_key"]


class _OpenSearch(_Elasticsearch):
    dialect = OpenSearch

    def place(self, store: Any) -> tuple[Any, str, str, str]:
        return store.client._os_client, store.client._index, store.client._text_field, "opensearchpy"

    def narrowed(self, store: Any, tree: FilterNode | None) -> Any:
        if tree is None:
            return store
        given, twin = store.client, store.model_copy()
        own = copied(given, _parse_filters=lambda _filters: self._where(store, tree))
        own._owns_os_client = own._owns_os_async_client = False  # else it closes them when it goes
        twin._client = own

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            given._ensure_initialized()
            own._initialized, own._efficient_filtering_enabled = True, given._efficient_filtering_enabled
            return type(store).query(twin, query, **kwargs)  # type: ignore[no-any-return]

        return copied(twin, query=query, aquery=_threaded(query))


def _threaded(query: Callable[..., VectorStoreQueryResult]) -> Callable[..., Awaitable[VectorStoreQueryResult]]:
    """Return the asynchronous form of a query: the adapter's own would write the filter."""
    return lambda *args, **kwargs: asyncio.to_thread(query, *args, **kwargs)


def _absent(path: str) -> Json:
    return {"bool": {"must_not": [{"exists": {"field": path}}]}}


def _node(hit: Json, text_field: str) -> BaseNode:
    return metadata_dict_to_node(hit["_source"]["metadata"], text=hit["_source"].get(text_field))


# -- all of them ------------------------------------------------------------------------------------------------------

_KINDS: Final[dict[str, StoreKind]] = {
    "ChromaVectorStore": _Chroma(),
    "DuckDBVectorStore": _Duck(),
    "ElasticsearchStore": _Elasticsearch(),
    "LanceDBVectorStore": _Lance(),
    "MilvusVectorStore": _Milvus(),
    "OpensearchVectorStore": _OpenSearch(),
    "PGVectorStore": _Postgres(),
    "QdrantVectorStore": _Qdrant(),
}
_SIMPLE: Final = _Simple()
_UNKNOWN: Final = _Unknown()


def kind_of(store: Any) -> StoreKind:
    """Return what is known of a store, or of the adapter that it inherits from, without importing it."""
    if type(store) is SimpleVectorStore:  # a subclass may search in another way
        return _SIMPLE
    names = (base.__name__ for base in type(store).__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), _UNKNOWN)


def is_chroma(store: Any) -> bool:
    """Return whether a vector store is LlamaIndex's ``ChromaVectorStore`` or a subclass, without importing it."""
    return isinstance(kind_of(store), _Chroma)


def copied(store: Any, **methods: Callable[..., Any]) -> Any:
    """Return a shallow copy of a store, with the same connections, and with methods of its own."""
    twin = store.model_copy() if hasattr(store, "model_copy") else copy.copy(store)
    for name, method in methods.items():
        if not hasattr(type(store), name):
            raise DeniedError(f"this release of {type(store).__name__} has no {name}: it is not known how it filters")
        object.__setattr__(twin, name, method)
    return twin


# -- stores that are not known ----------------------------------------------------------------------------------------

_applied: Final[dict[int, set[FilterOperator]]] = {}
"""The operators that unknown stores, by ``id``, were found to apply."""
_UNPROBED: Final = (*INEQUALITIES, FilterOperator.IS_EMPTY, FilterOperator.EXISTS)
"""Operators that stores may hold for true where the key is absent."""


def _probe(query: VectorStoreQuery, operator: FilterOperator) -> VectorStoreQuery:
    """Return a query by a filter that no row passes."""
    value: Any = 2**52 if operator in ORDERS else uuid4().hex
    if operator in (FilterOperator.IN, FilterOperator.ANY):
        value = [value, uuid4().hex]
    impossible = lower(Condition(key="agentic_kb_probe", operator=operator, value=value))
    return VectorStoreQuery(**{**vars(query), "filters": impossible, "similarity_top_k": 1})


def _probed(store: Any, tree: FilterNode) -> Any:
    """Return a copy of an unknown store that asks for what can't exist before a query with an operator not yet seen."""
    operators = {one.operator for one in conditions(flat(tree))}.difference(_UNPROBED)
    if id(store) not in _applied:
        _applied[id(store)] = set()
        weakref.finalize(store, _applied.pop, id(store), None)
    seen = _applied[id(store)]
    if operators <= seen:
        return store

    def check(operator: FilterOperator, result: VectorStoreQueryResult) -> None:
        if result.ids or result.nodes:
            raise DeniedError(f"{type(store).__name__} was not searched: it ignores filters by {operator.value!r}")

    def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        for operator in sorted(operators - seen):
            check(operator, store.query(_probe(query, operator), **kwargs))
        result: VectorStoreQueryResult = store.query(query, **kwargs)
        seen.update(operators if result.ids or result.nodes else ())  # an empty store passes every probe
        return result

    async def aquery(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        for operator in sorted(operators - seen):
            check(operator, await store.aquery(_probe(query, operator), **kwargs))
        result: VectorStoreQueryResult = await store.aquery(query, **kwargs)
        seen.update(operators if result.ids or result.nodes else ())
        return result

    return copied(store, query=query, aquery=aquery)
