"""Vector stores by LlamaIndex's adapters: filtered searches, listings and counts of each kind.

The filter of a known store is written by its dialect (``search.dialects``), and a copy of the store carries it, since
the adapters can't be trusted with a filter that must hold. A store that is not known here gets ``MetadataFilters``.
Before a filtered search it is asked for what can't exist, and is refused if it returns anything; no more once a search
with these operators has found something.
"""

# ruff: noqa: D101, D102, SLF001 (see StoreKind; the adapters have no public names for their parts)

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeAlias, TypeVar
from uuid import uuid4

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node
from pydantic import BaseModel

from llama_index_agentic_kb._aio import call_deadline
from llama_index_agentic_kb._types import JsonMapping
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import Condition, FilterNode, FilterOperator, all_of, matcher
from llama_index_agentic_kb.schema.filters import INEQUALITIES, ORDERS, Scalar, conditions, flat
from llama_index_agentic_kb.search.dialects import (
    Chroma,
    DuckSql,
    LanceSql,
    Language,
    Milvus,
    PostgresSql,
    Qdrant,
    quoted,
)
from llama_index_agentic_kb.search.filters import AnyStore, lower

if TYPE_CHECKING:
    import httpx
    from chromadb import Collection
    from llama_index.vector_stores.chroma import ChromaVectorStore
    from llama_index.vector_stores.duckdb import DuckDBVectorStore
    from llama_index.vector_stores.lancedb import LanceDBVectorStore
    from llama_index.vector_stores.milvus import MilvusVectorStore
    from llama_index.vector_stores.postgres import PGVectorStore
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from qdrant_client.http.models import Filter
    from sqlalchemy import Row, TextClause

    from llama_index_agentic_kb.store.vectors import StoreVectorStore

T = TypeVar("T")
Store = TypeVar("Store", bound=BasePydanticVectorStore)

Counts: TypeAlias = list[tuple[Scalar | None, int]]
"""Values of a field, each with its number of documents or chunks."""
FilteredSearch: TypeAlias = Callable[[VectorStoreQuery, float | None], tuple[VectorStoreQueryResult, str]]
"""Finds the nearest rows that match ``query.filters``, by a deadline (``time.monotonic()``).

Returns nodes with similarities as in the store's own query, and a sentence on how they were found.
"""

search_notes: Final[ContextVar[list[str] | None]] = ContextVar("agentic_kb_search_notes", default=None)
"""The list to which a filtered search of this context adds its sentence."""
CHROMA_PAGE: Final = 2_000
"""Rows of one request to Chroma, which takes 32,766 values at most."""
_PLAIN_ID: Final = re.compile(r"[\w.:/#@ -]+")


class StoreKind(Generic[Store]):
    """A vector store of one kind: what it can filter, and how its adapter has to be called."""

    dialect: ClassVar[type[Language] | None] = AnyStore
    """The language of its filters; None if it is given the IDs that pass."""
    ignores_doc_ids: ClassVar[bool] = False
    """Whether a query's ``doc_ids`` are ignored, so that everything would be searched."""
    async_client: ClassVar[str | None] = None
    """The attribute that is None if the store was made without an async client; "" if none works on any event loop."""
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

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def name(self) -> str:
        """The name of the database."""
        return "SimpleVectorStore" if self.dialect is None else self.dialect.name

    @classmethod
    def has_native_async(cls, store: BasePydanticVectorStore) -> bool:
        """Return whether a store's asynchronous query really awaits, on any event loop."""
        own, client = type(store).aquery is not BasePydanticVectorStore.aquery, cls.async_client
        return own and (client is None or (client != "" and getattr(store, client, None) is not None))

    def refusal(self, tree: FilterNode) -> str | None:
        """Return why a filter can't be applied; None if it can, or if only the store itself knows."""
        return None if self.dialect is None else self.dialect.refusal(tree)

    def narrowed(self, tree: FilterNode | None) -> Store:
        """Return a copy of the store that applies a filter to each query that has one, whatever the query's says."""
        return self.store if tree is None else self._narrowed(tree)

    def _narrowed(self, tree: FilterNode) -> Store:  # noqa: ARG002
        return self.store

    def nodes(self, tree: FilterNode | None) -> Iterable[BaseNode]:
        """Return all nodes that pass a filter."""
        asked = self.narrowed(tree) if self.needs_copy else self.store
        return asked.get_nodes(None, None if tree is None else lower(tree))

    def with_ids(self, node_ids: Sequence[str]) -> Iterable[BaseNode]:
        """Return the nodes with these IDs that there are."""
        asked = [one for one in node_ids if self.escapes_ids or _PLAIN_ID.fullmatch(one)]
        return self.store.get_nodes(asked, None) if asked else []  # none would mean all

    def passing(self, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        """Return the IDs of the nodes whose rows pass a filter: a grant may have been removed from the row alone."""
        documents: list[Scalar] = [*sorted({node.ref_doc_id or "None" for node in nodes})]
        of_these = Condition(key="ref_doc_id", operator=FilterOperator.IN, value=documents)
        return {node.node_id for node in self.nodes(all_of(tree, of_these))} if documents else set()

    def counts(self, tree: FilterNode | None, field: str | None, *, documents: bool) -> Counts | None:  # noqa: ARG002
        """Return each value of a field with its number of ``documents``, or of chunks, that pass a filter.

        Without a field it is None, with the number of all. None if the store can't count them.
        """
        return None

    @property
    def text_search(self) -> VectorStoreQueryMode | None:
        """The mode of a query by the store's own full-text search; None if the store was made without."""
        has_words = self.has_words is not None and getattr(self.store, self.has_words)
        return VectorStoreQueryMode.SPARSE if has_words else None

    def _searched_by(self, search: FilteredSearch) -> Store:
        """Return a copy of the store in which a filtered search answers plain queries by a vector."""
        store = self.store

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            is_dense = query.mode is VectorStoreQueryMode.DEFAULT and bool(query.query_embedding) and not kwargs
            if not is_dense or query.filters is None:
                return store.query(query, **kwargs)
            result, note = search(query, call_deadline())
            if (notes := search_notes.get()) is not None:
                notes.append(note)
            return result

        return copied(store, query=query, aquery=threaded(query))


class UnknownKind(StoreKind[BasePydanticVectorStore]):
    needs_copy = False
    escapes_ids = False

    def _narrowed(self, tree: FilterNode) -> BasePydanticVectorStore:
        return _probed(self.store, tree)

    def passing(self, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:  # noqa: ARG002
        return {node.node_id for node in nodes}  # nothing is known of its rows


class SearchingKind(UnknownKind):
    """A store with a filtered search of its own, as that of a knowledge store."""

    store: StoreVectorStore
    escapes_ids = True
    async_client = ""

    def refusal(self, tree: FilterNode) -> str | None:
        own: type[Language] | None = getattr(self.store, "filter_dialect", None)
        return super().refusal(tree) if own is None else own.refusal(tree)

    def _narrowed(self, tree: FilterNode) -> BasePydanticVectorStore:  # noqa: ARG002 (the query has it)
        return self._searched_by(lambda query, deadline: self.store.filtered_search(query, deadline=deadline))


class SimpleKind(StoreKind[SimpleVectorStore]):
    """LlamaIndex's store in memory, which applies some operators wrongly: it gets the IDs that pass instead."""

    dialect = None

    def _narrowed(self, tree: FilterNode) -> SimpleVectorStore:
        store = self.store

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            passes, rows = matcher(tree), list(store.data.metadata_dict.items())
            if not rows:  # none, or persisted without metadata, which is an error
                return store.query(query, **kwargs)
            allowed = {row for row, metadata in rows if passes(metadata)}
            if query.node_ids is not None:
                allowed.intersection_update(query.node_ids)
            return store.query(replace(query, filters=None, node_ids=list(allowed)), **kwargs)

        return copied(store, query=query)

    def passing(self, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        passes, rows = matcher(tree), self.store.data.metadata_dict
        return {node.node_id for node in nodes if passes(rows.get(node.node_id, node.metadata))}


class ChromaKind(StoreKind["ChromaVectorStore"]):
    dialect = Chroma
    ignores_doc_ids = True
    needs_copy = False

    def __init__(self, store: ChromaVectorStore) -> None:
        super().__init__(with_request_timeouts(store))

    def _narrowed(self, tree: FilterNode) -> ChromaVectorStore:  # noqa: ARG002 (the query has it)
        if type(self.store).__name__ != "ChromaVectorStore":  # a subclass may override the search
            return self.store
        from llama_index_agentic_kb.sources.chroma_search import ChromaFilteredSearch  # noqa: PLC0415 (loads the store)

        search = ChromaFilteredSearch(self.store)
        return self._searched_by(search) if search.usable else self.store

    def nodes(self, tree: FilterNode | None) -> Iterator[BaseNode]:
        # Each row is checked here: a request takes some hundred conditions, and a principal may have more groups.
        if tree is None:
            yield from super().nodes(None)
            return
        passes = matcher(tree)
        passing = (row for row, metadata in chroma_rows(self.store.client) if passes(metadata))
        while ids := list(islice(passing, CHROMA_PAGE)):
            yield from self.with_ids(ids)

    def passing(self, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        passes, ids = matcher(tree), [node.node_id for node in nodes]
        rows = self.store.client.get(ids=ids, include=["metadatas"]) if ids else {"ids": (), "metadatas": ()}
        return {row for row, own in zip(rows["ids"], rows["metadatas"], strict=True) if passes(own or {})}


def chroma_rows(collection: Collection) -> Iterator[tuple[str, JsonMapping]]:
    """Yield the IDs and metadata of a Chroma collection's rows, read page by page."""
    for start in range(0, collection.count(), CHROMA_PAGE):
        rows = collection.get(limit=CHROMA_PAGE, offset=start, include=["metadatas"])
        yield from ((row, own or {}) for row, own in zip(rows["ids"], rows["metadatas"] or (), strict=True))


_POSTGRES_UNITS: Final = ("id", "COALESCE(NULLIF(metadata_ ->> 'ref_doc_id', 'None'), node_id)")
"""What is distinct of each chunk, and of each document."""


class PostgresKind(StoreKind["PGVectorStore"]):
    dialect = PostgresSql
    ignores_doc_ids = True
    has_words = "hybrid_search"
    async_client = ""  # its connections fail on any event loop but that of their first use

    def _narrowed(self, tree: FilterNode) -> PGVectorStore:
        from sqlalchemy import func  # noqa: PLC0415 (a second)

        store = self.store

        def exactly(embedding: list[float], *rest: Any, **kwargs: Any) -> object:
            statement = type(store)._build_query(twin, embedding, *rest, **kwargs)
            distance = store._table_class.embedding.cosine_distance(embedding)
            return statement.order_by(None).order_by(func.abs(distance))  # no index of vectors is of this

        def filtered(**methods: Callable[..., object]) -> PGVectorStore:
            """Return a copy that uses the store's connections, which are made at first use."""

            def connected() -> None:
                store._initialize()
                (made.__pydantic_private__ or {}).update(store.__pydantic_private__ or {})

            clause = _postgres_clause(tree)
            made = copied(store, _initialize=connected, _recursively_apply_filters=lambda _filters: clause, **methods)
            return made

        twin, exact = filtered(), filtered(_build_query=exactly)

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            result = type(store).query(twin, query, **kwargs)
            if query.mode is VectorStoreQueryMode.DEFAULT and len(result.ids or ()) < query.similarity_top_k:
                # An index of vectors reads the nearest rows, and drops those that do not pass: it may have lost some.
                result = type(store).query(exact, query, **kwargs)
            return result

        return copied(twin, query=query)

    def nodes(self, tree: FilterNode | None) -> Iterator[BaseNode]:
        # The adapter's own way reads all rows at once, with their vectors.
        return (metadata_dict_to_node(metadata) for (metadata,) in self._select(tree, ["metadata_"]))

    def counts(self, tree: FilterNode | None, field: str | None, *, documents: bool) -> Counts | None:
        counts = f"count(DISTINCT {_POSTGRES_UNITS[documents]})"
        if field is None:
            return [(None, count) for (count,) in self._select(tree, [counts])]
        value = "CAST(metadata_ -> CAST(:field AS text) AS jsonb)"
        many = f"CASE WHEN jsonb_typeof({value}) = 'array' THEN {value} ELSE jsonb_build_array({value}) END"
        items = self._select(tree, [f"CAST(jsonb_array_elements({many}) AS text)", counts], "1", field=field)
        return [(json.loads(item), count) for item, count in items]

    def _select(self, tree: FilterNode | None, columns: list[str], *groups: str, **values: str) -> Iterator[Row[Any]]:
        """Yield the rows of a query over those that pass a filter."""
        from sqlalchemy import select, text  # noqa: PLC0415 (a second)
        from sqlalchemy.orm import Session  # noqa: PLC0415

        self.store._initialize()
        query = select(*map(text, columns)).select_from(self.store._table_class).group_by(*map(text, groups))
        if tree is not None:
            query = query.where(_postgres_clause(tree))
        with Session(self.store._engine) as session:
            yield from session.execute(query.params(**values).execution_options(yield_per=1_000))


def _postgres_clause(tree: FilterNode) -> TextClause:
    from sqlalchemy import text  # noqa: PLC0415 (a second)

    where, values = PostgresSql().named(tree)
    return text(where).bindparams(**values)


class DuckKind(StoreKind["DuckDBVectorStore"]):
    dialect = DuckSql
    ignores_doc_ids = True

    def _narrowed(self, tree: FilterNode) -> DuckDBVectorStore:
        from duckdb import SQLExpression  # noqa: PLC0415 (only who has such a store has the package)

        where = DuckSql().write(tree)
        return copied(self.store, _build_metadata_filter_expressions=lambda metadata_filters: SQLExpression(where))  # noqa: ARG005


_LANCE: Final = {"string": "string", "large_string": "string", "bool": "boolean", "double": "number", "float": "number"}
"""The kinds of value of columns' types."""


class LanceKind(StoreKind["LanceDBVectorStore"]):
    dialect = LanceSql
    ignores_doc_ids = True

    def narrowed(self, tree: FilterNode | None) -> LanceDBVectorStore:
        store = self.store

        def where() -> dict[str, str]:  # the table is read when it is searched: it may be made, or grow, until then
            if tree is None:
                return {}
            table: Any = store.table
            fields = {one.name: str(one.type) for one in table.schema.field("metadata").type}
            kinds = {name: _LANCE.get(kind, "whole" if "int" in kind else "other") for name, kind in fields.items()}
            return {"where": LanceSql(kinds).write(tree)}

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            try:
                return store.query(replace(query, filters=None), **kwargs, **where())
            except Warning as nothing:  # this is how the adapter says that nothing was found
                if type(nothing) is not Warning:
                    raise
                return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])

        return copied(store, query=query, get_nodes=lambda *_asked: store.get_nodes(None, None, **where()))

    def with_ids(self, node_ids: Sequence[str]) -> Iterable[BaseNode]:
        where = f"id IN ({', '.join(map(quoted, node_ids))})"  # the adapter quotes IDs as names of columns
        return self.store.get_nodes(None, None, where=where) if node_ids else []


class MilvusKind(StoreKind["MilvusVectorStore"]):
    dialect = Milvus
    escapes_ids = False
    async_client = "_async_milvusclient"

    def refusal(self, tree: FilterNode) -> str | None:
        own = {"id", self.store.text_key, self.store.doc_id_field, self.store.embedding_field}
        taken = next((one.key for one in conditions(tree) if one.key in own), None)
        return super().refusal(tree) if taken is None else f"Milvus keeps something else under {taken!r}"

    def _narrowed(self, tree: FilterNode) -> MilvusVectorStore:
        where, store = Milvus().write(tree), self.store

        def prepared(query: VectorStoreQuery, **kwargs: Any) -> tuple[str, list[str]]:
            own, fields = store._prepare_before_search(replace(query, filters=None), **kwargs)
            return (f"({where}) and ({own})" if own else where), fields

        return copied(store, _prepare_before_search=prepared)

    def nodes(self, tree: FilterNode | None) -> Iterator[BaseNode]:
        where, store = 'id != ""' if tree is None else Milvus().write(tree), self.store
        rows = store.client.query_iterator(store.collection_name, filter=where, output_fields=["*"])
        try:
            while batch := rows.next():
                yield from (metadata_dict_to_node(row, text=row.get(store.text_key)) for row in batch)
        finally:
            rows.close()


class QdrantKind(StoreKind["QdrantVectorStore"]):
    dialect = Qdrant
    async_client = "_aclient"
    has_words = "enable_hybrid"

    def _narrowed(self, tree: FilterNode) -> QdrantVectorStore:
        return copied(self.store, _build_subfilter=lambda _filters: self._where(tree))

    def _where(self, tree: FilterNode) -> Filter:
        from qdrant_client.http.models import Filter  # noqa: PLC0415 (only who has such a store has the package)

        return Filter.model_validate(Qdrant().write(tree))

    def nodes(self, tree: FilterNode | None) -> Iterator[BaseNode]:
        store, where, offset = self.store, None if tree is None else self._where(tree), None
        while True:
            points, offset = store.client.scroll(store.collection_name, where, limit=1_000, offset=offset)
            yield from store.parse_to_query_result(points).nodes or ()
            if offset is None:
                return


def threaded(query: Callable[..., VectorStoreQueryResult]) -> Callable[..., Awaitable[VectorStoreQueryResult]]:
    """Return the asynchronous form of a query: the adapter's own would write the filter."""
    return lambda *args, **kwargs: asyncio.to_thread(query, *args, **kwargs)


def copied(store: T, **methods: Callable[..., object]) -> T:
    """Return a shallow copy of a store, with the same connections, and with methods of its own."""
    twin = store.model_copy() if isinstance(store, BaseModel) else copy.copy(store)
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
    value: Scalar | list[Scalar] = 2**52 if operator in ORDERS else uuid4().hex
    if operator in (FilterOperator.IN, FilterOperator.ANY):
        value = [uuid4().hex, uuid4().hex]
    impossible = lower(Condition(key="agentic_kb_probe", operator=operator, value=value))
    return replace(query, filters=impossible, similarity_top_k=1)


def _probed(store: BasePydanticVectorStore, tree: FilterNode) -> BasePydanticVectorStore:
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

    def found(result: VectorStoreQueryResult) -> VectorStoreQueryResult:
        seen.update(operators if result.ids or result.nodes else ())  # an empty store passes every probe
        return result

    def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        for operator in sorted(operators - seen):
            check(operator, store.query(_probe(query, operator), **kwargs))
        return found(store.query(query, **kwargs))

    async def aquery(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        for operator in sorted(operators - seen):
            check(operator, await store.aquery(_probe(query, operator), **kwargs))
        return found(await store.aquery(query, **kwargs))

    return copied(store, query=query, aquery=aquery)


# -- timeouts of requests to a Chroma server --------------------------------------------------------------------------
# Chroma's HTTP client has none (httpx with ``timeout=None``): a stopped server would block each calling thread.

WITHOUT_DEADLINE: Final = 60.0
"""The timeout, in seconds, of a request whose call has no deadline."""

MARGIN: Final = 0.25
"""Seconds between a call's deadline and its request's timeout, so that the caller sees the deadline error first."""


def with_request_timeouts(store: ChromaVectorStore) -> ChromaVectorStore:
    """Return a copy of a store whose requests over HTTP end with their calls; the store itself if it needs none.

    The user's client is unchanged: the copy sends the same requests over the same connections.
    """
    collection: Any = store._collection
    server: Any = getattr(collection, "_client", None)
    timeout = getattr(getattr(server, "_session", None), "timeout", None)
    if timeout is None or getattr(timeout, "read", 0) is not None:
        return store
    twin, timed, timed_server = store.model_copy(), copy.copy(collection), copy.copy(server)
    timed_server._session = _TimedSession(server._session)
    timed._client, twin._collection = timed_server, timed
    return twin


class _TimedSession:
    """An ``httpx.Client`` whose requests have a timeout."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)

    def request(self, *args: Any, **kwargs: Any) -> httpx.Response:
        """Send a request with the remaining time of its call as timeout; see ``httpx.Client.request``."""
        deadline = call_deadline()
        left = WITHOUT_DEADLINE if deadline is None else max(0.0, deadline - time.monotonic()) + MARGIN
        return self._session.request(*args, **{"timeout": left, **kwargs})
