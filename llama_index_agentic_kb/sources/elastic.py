"""Elasticsearch and OpenSearch by LlamaIndex's adapters: filtered searches, listings and counts.

Elasticsearch's adapter writes each condition as an equality, whatever its operator; OpenSearch's takes dates for
another kind of text. So their filters are written by ``search.dialects``, from what the index's mapping says of each
field, which is asked for at each filtered search.
"""

# ruff: noqa: SLF001 (the adapters have no public names for their parts)

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, ClassVar, Final, TypeAlias

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode, VectorStoreQueryResult
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.dialects import ElasticField, Elasticsearch, OpenSearch, elastic_fields
from llama_index_agentic_kb.sources.stores import StoreKind, copied

Json: TypeAlias = dict[str, Any]

_PAGE: Final = 1_000
_CANDIDATES: Final = 10_000
"""The maximum number of neighbours that Elasticsearch looks at in a shard."""


class _Elasticsearch(StoreKind):
    dialect: ClassVar[type[Elasticsearch]] = Elasticsearch
    ignores_doc_ids = True
    counts_exactly = False  # an item of a list counts, and 12 in a keyword field as "12"
    lists = True

    def has_async_client(self, store: Any) -> bool:  # noqa: ARG002
        return False  # it belongs to the event loop of its first use

    def text_search(self, store: Any) -> VectorStoreQueryMode | None:  # noqa: ARG002
        return VectorStoreQueryMode.TEXT_SEARCH

    def place(self, store: Any) -> tuple[Any, str, str, str]:
        """Return the client, the index, the field of the text, and the client's package."""
        return _synchronous(store.client), store.index_name, store.text_field, "elasticsearch"

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
                near = {"k": k, "num_candidates": min(_CANDIDATES, max(100, 10 * k)), "filter": where}
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
        hits = scan(client, index=index, query={"query": asked, "_source": ["metadata", text]}, size=_PAGE)
        return (_node(hit, text) for hit in hits)

    def _groups(
        self, store: Any, where: list[Json], path: str | None = None, *, documents: bool
    ) -> Iterator[tuple[Any, int]]:
        """Yield groups of rows with the value of a field and their number of documents, or of rows; see "composite"."""
        client, index, *_ = self.place(store)
        paths = {"value": path, "document": self._fields(store)["ref_doc_id"].path if documents else None}
        sources = [{name: {"terms": {"field": one}}} for name, one in paths.items() if one is not None]
        found: Json = {"size": _PAGE, "sources": sources}
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


ELASTIC: Final[dict[str, StoreKind]] = {"ElasticsearchStore": _Elasticsearch(), "OpensearchVectorStore": _OpenSearch()}

_CLIENTS: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()


def _threaded(query: Callable[..., VectorStoreQueryResult]) -> Callable[..., Awaitable[VectorStoreQueryResult]]:
    """Return the asynchronous form of a query: the adapter's own would write the filter."""
    return lambda *args, **kwargs: asyncio.to_thread(query, *args, **kwargs)


def _synchronous(client: Any) -> Any:
    """Return a synchronous client of Elasticsearch with the nodes and headers of an asynchronous one."""
    if client not in _CLIENTS:
        nodes = [node.config for node in client.transport.node_pool.all()]
        _CLIENTS[client] = import_module("elasticsearch").Elasticsearch(nodes).options(headers=dict(client._headers))
    return _CLIENTS[client]


def _absent(path: str) -> Json:
    return {"bool": {"must_not": [{"exists": {"field": path}}]}}


def _node(hit: Json, text_field: str) -> BaseNode:
    return metadata_dict_to_node(hit["_source"]["metadata"], text=hit["_source"].get(text_field))
