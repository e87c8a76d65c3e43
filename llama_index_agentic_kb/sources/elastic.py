"""Stores in Elasticsearch and OpenSearch, whose filters are written by their mappings, and which count by groups."""

# ruff: noqa: D101, D102, SLF001 (see StoreKind; the adapters have no public names for their parts)

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode, VectorStoreQueryResult
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.schema.filters import Scalar
from llama_index_agentic_kb.search.dialects import ElasticField, Elasticsearch, OpenSearch, elastic_fields
from llama_index_agentic_kb.sources.stores import Counts, Store, StoreKind, copied, threaded

if TYPE_CHECKING:
    from llama_index.vector_stores.elasticsearch import ElasticsearchStore
    from llama_index.vector_stores.opensearch import OpensearchVectorStore

ELASTIC_PAGE: Final = 1_000
_NEIGHBOURS: Final = 10_000
"""The maximum number of neighbours that Elasticsearch looks at in a shard."""
_CLIENTS: Final[weakref.WeakKeyDictionary[object, object]] = weakref.WeakKeyDictionary()
"""Synchronous clients of Elasticsearch by the asynchronous ones of stores."""


class _Place(NamedTuple):
    """Where the rows of a store are."""

    client: Any  # of Elasticsearch or OpenSearch, synchronous
    index_name: str
    text: str  # the field of the text


class _Elastic(StoreKind[Store]):
    """Filters are written from what the index's mapping says of each field, which is asked for at each filtered search.

    Elasticsearch's adapter writes each condition as an equality, whatever its operator; OpenSearch's takes dates for
    another kind of text.
    """

    dialect: ClassVar[type[Elasticsearch]]
    ignores_doc_ids = True
    counts_exactly = False  # an item of a list counts, and 12 in a keyword field as "12"
    lists = True
    async_client = ""
    text_search = VectorStoreQueryMode.TEXT_SEARCH
    package: ClassVar[str]

    @property
    @abstractmethod
    def place(self) -> _Place: ...

    def nodes(self, tree: FilterNode | None) -> Iterator[BaseNode]:
        return self._listed({"bool": {"filter": self._where(tree)}})

    def with_ids(self, node_ids: Sequence[str]) -> Iterator[BaseNode]:
        return self._listed({"ids": {"values": list(node_ids)}})

    def passing(self, nodes: Sequence[BaseNode], tree: FilterNode) -> set[str]:
        asked = [*self._where(tree), {"ids": {"values": [node.node_id for node in nodes]}}]
        return {node.node_id for node in self._listed({"bool": {"filter": asked}})}

    def counts(self, tree: FilterNode | None, field: str | None, *, documents: bool) -> Counts | None:
        where = self._where(tree)
        if field is None:
            return self._total(where, documents=documents)
        at = self._fields().get(field)
        if at is None:
            return []
        too_long = [{"exists": {"field": at.whole}}, _absent(at.path)]
        lost = at.longest is not None and (at.path == at.whole or self._count([*where, *too_long]))
        if not at.counts or lost or (documents and not self._has_documents(where)):
            return None
        counts = Counter[Scalar]()
        for value, count in self._groups(where, at.path, documents=documents):
            counts[bool(value) if at.kind == "boolean" else value] += count
        return list(counts.items())

    def _total(self, where: list[JsonObject], *, documents: bool) -> Counts | None:
        if not documents:
            return [(None, self._count(where))]
        counted = (count for _, count in self._groups(where, documents=True))
        return [(None, sum(counted))] if self._has_documents(where) else None

    def _has_documents(self, where: list[JsonObject]) -> bool:
        """Return whether each row's document is indexed: OpenSearch does not index IDs of more than 256 characters."""
        at = self._fields().get("ref_doc_id")
        return at is not None and at.kind == "string" and not self._count([*where, _absent(at.path)])

    def _fields(self) -> dict[str, ElasticField]:
        """Return the fields of the mapping; a name may stand for several indices, which may differ."""
        (client, index, _), fields = self.place, dict[str, ElasticField]()
        for one in client.indices.get_mapping(index=index).values():
            metadata = one["mappings"].get("properties", {}).get("metadata", {})
            dynamic = metadata.get("dynamic", one["mappings"].get("dynamic", True))
            if str(dynamic).lower() not in {"true", "strict"}:
                raise DeniedError(f"{self.name} does not map every key of metadata in {index!r}")
            for key, field in elastic_fields(metadata.get("properties", {})):
                same = fields.get(key, field) == field
                fields[key] = field if same else ElasticField("several types", field.path, field.whole, counts=False)
        return fields

    def _where(self, tree: FilterNode | None) -> list[JsonObject]:
        return [] if tree is None else [self.dialect(self._fields()).write(tree)]

    def _count(self, where: list[JsonObject]) -> int:
        client, index, _ = self.place
        return int(client.count(index=index, body={"query": {"bool": {"filter": where}}})["count"])

    def _listed(self, asked: JsonObject) -> Iterator[BaseNode]:
        client, index, text = self.place
        scan = import_module(f"{self.package}.helpers").scan
        hits = scan(client, index=index, query={"query": asked, "_source": ["metadata", text]}, size=ELASTIC_PAGE)
        return (_node(hit, text) for hit in hits)

    def _groups(
        self, where: list[JsonObject], path: str | None = None, *, documents: bool
    ) -> Iterator[tuple[Scalar, int]]:
        """Yield each value of the field ``path`` with its number of rows, or of documents."""
        client, index, _ = self.place
        paths = {"value": path, "document": self._fields()["ref_doc_id"].path if documents else None}
        sources = [{name: {"terms": {"field": one}}} for name, one in paths.items() if one is not None]
        found: JsonObject = {"size": ELASTIC_PAGE, "sources": sources}
        while True:
            body = {"size": 0, "query": {"bool": {"filter": where}}, "aggs": {"found": {"composite": found}}}
            made = client.search(index=index, body=body)["aggregations"]["found"]
            for group in made["buckets"]:
                whole = documents and group["key"]["document"] != "None"  # else each node is on its own
                yield group["key"].get("value"), 1 if whole else group["doc_count"]
            if "after_key" not in made:
                return
            found["after"] = made["after_key"]


class ElasticsearchKind(_Elastic["ElasticsearchStore"]):
    dialect = Elasticsearch
    package = "elasticsearch"

    @property
    def place(self) -> _Place:
        if (given := self.store.client) not in _CLIENTS:  # a synchronous one with the same nodes and headers
            nodes = [node.config for node in given.transport.node_pool.all()]
            _CLIENTS[given] = import_module("elasticsearch").Elasticsearch(nodes).options(headers=dict(given._headers))
        return _Place(_CLIENTS[given], self.store.index_name, self.store.text_field)

    def narrowed(self, tree: FilterNode | None) -> ElasticsearchStore:
        store = self.store

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            if kwargs:
                raise DeniedError(f"Elasticsearch is searched here without {', '.join(sorted(kwargs))}: use filters=")
            client, index, text = self.place
            if query.mode is VectorStoreQueryMode.HYBRID and not getattr(store.retrieval_strategy, "hybrid", False):
                raise DeniedError("the store was made without hybrid search: set it in its retrieval_strategy")
            where, k = self._where(tree), query.similarity_top_k
            if query.mode is VectorStoreQueryMode.TEXT_SEARCH:
                words = {"match": {text: {"query": query.query_str}}}
                body: JsonObject = {"query": {"bool": {"must": [words], "filter": where}}}
            else:
                body = store.retrieval_strategy.es_query(
                    query=query.query_str,
                    query_vector=query.query_embedding,
                    text_field=text,
                    vector_field=store.vector_field,
                    k=k,
                    num_candidates=min(_NEIGHBOURS, max(100, 10 * k)),
                    filter=where,
                )
            found = client.search(index=index, body={**body, "size": k, "_source": ["metadata", text]})["hits"]["hits"]
            nodes, scores = [_node(hit, text) for hit in found], [hit["_score"] for hit in found]
            return VectorStoreQueryResult(nodes=nodes, similarities=scores, ids=[hit["_id"] for hit in found])

        return copied(store, query=query, aquery=threaded(query))


class OpenSearchKind(_Elastic["OpensearchVectorStore"]):
    dialect = OpenSearch
    package = "opensearchpy"

    @property
    def place(self) -> _Place:
        client = self.store.client
        return _Place(client._os_client, client._index, client._text_field)

    def _narrowed(self, tree: FilterNode) -> OpensearchVectorStore:
        store, given, twin = self.store, self.store.client, self.store.model_copy()
        own = copied(given, _parse_filters=lambda _filters: self._where(tree))
        own._owns_os_client = own._owns_os_async_client = False  # else it closes them when it goes
        twin._client = own

        def query(query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            given._ensure_initialized()
            own._initialized, own._efficient_filtering_enabled = True, given._efficient_filtering_enabled
            return type(store).query(twin, query, **kwargs)

        return copied(twin, query=query, aquery=threaded(query))


def _absent(path: str) -> JsonObject:
    return {"bool": {"must_not": [{"exists": {"field": path}}]}}


def _node(hit: JsonObject, text_field: str) -> BaseNode:
    return metadata_dict_to_node(hit["_source"]["metadata"], text=hit["_source"].get(text_field))
