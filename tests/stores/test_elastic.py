"""What is sent to Elasticsearch and OpenSearch, by LlamaIndex's own clients; a stand-in records and answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, Permissions, Principal
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import Condition, FilterOperator
from llama_index_agentic_kb.search.dialects import Elasticsearch, elastic_fields
from llama_index_agentic_kb.server.azure import find_passage
from llama_index_agentic_kb.sources import elastic
from llama_index_agentic_kb.sources.index import kind_of
from tests.sources.conftest import search
from tests.stores.elastic import ElasticServer, elasticsearch_store, opensearch_store
from tests.stores.kinds import DIMENSIONS, index_over
from tests.stores.test_vector_stores import nodes

Op = FilterOperator
ROWS: list[dict[str, Any]] = [{"tenant": tenant, "size": at, "open": at > 2} for at, tenant in enumerate("aabbb")]
PERMITTED = [{"terms": {"metadata.tenant.keyword": ["b"]}}]


@pytest.fixture(scope="module", params=[False, True], ids=["elasticsearch", "opensearch"])
def server(request: pytest.FixtureRequest) -> Iterator[ElasticServer]:
    """A stand-in for each of the two."""
    made = ElasticServer(opensearch=request.param)
    yield made
    made.close()


def filled(server: ElasticServer, name: str, rows: list[TextNode]) -> VectorStoreIndex:
    make = opensearch_store if server.opensearch else elasticsearch_store
    index = index_over(make(server.url, name, DIMENSIONS))
    index.insert_nodes(rows)
    return index


@pytest.fixture(scope="module")
def source(server: ElasticServer) -> KnowledgeSource:
    """A source over five rows of two tenants."""
    return KnowledgeSource("rows", index=filled(server, "rows", nodes(ROWS)), permissions=Permissions(tenant="tenant"))


def test_permissions_and_filters_are_in_both_searches(server: ElasticServer, source: KnowledgeSource) -> None:
    """The nearest vectors are looked for among the rows that pass, and so are the words, by the store itself."""
    server.requests.clear()
    found = search(source, "item003", source.permitted(Principal(tenant="b")), top_k=3)
    assert [(ranked.kind, len(ranked.nodes), ranked.dropped_by_filter) for ranked in found.lists] == [
        ("dense", 3, 0),
        ("lexical", 1, 0),
    ]
    near, words = sorted(server.bodies("_search"), key=lambda body: "match" in str(body))
    knn = near["query"]["knn"]["embedding"] if server.opensearch else near["knn"]
    inner = knn["filter"]["bool"]["filter"] if server.opensearch else knn["filter"]
    assert (knn["k"], inner, near["size"]) == (3, PERMITTED, 3)
    assert words["query"]["bool"]["filter"] == PERMITTED
    assert "item003" in str(words["query"]["bool"]["must"])


def test_a_hybrid_search_is_filtered_on_both_sides(server: ElasticServer, source: KnowledgeSource) -> None:
    """Where the store fuses the lists itself, each of them has the filter."""
    store: Any = source.index.vector_store  # type: ignore[union-attr]
    asked = VectorStoreQuery(query_str="x", query_embedding=[1.0] * DIMENSIONS, mode=VectorStoreQueryMode.HYBRID)
    if server.opensearch:
        store.client._search_pipeline = "fused"
    else:
        store = store.model_copy()
        store.retrieval_strategy = type(store.retrieval_strategy)(hybrid=True, text_field="content")
    server.requests.clear()
    tree = Condition(key="tenant", value="b")
    found = kind_of(store).narrowed(tree).query(asked).nodes
    assert {node.metadata["tenant"] for node in found} == {"b"}
    assert str(server.bodies("_search")[-1]).count(str(PERMITTED[0])) == 2


def test_rows_are_counted_by_the_store(
    server: ElasticServer, source: KnowledgeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups come in pages, and no row is read but under permissions: a store counts an item of a list."""
    kb, own = KnowledgeBase([source, KnowledgeSource("open", index=source.index)]), "tenant eq 'b'"
    assert kb.count("rows", principal=Principal(tenant="b"), per="chunk") == 3
    monkeypatch.setattr(elastic, "ELASTIC_PAGE", 1)
    server.requests.clear()
    assert kb.count("open", filters=own, per="chunk") == 3
    assert kb.count("open", filters=own) == 2
    found = kb.facets("open", ["size", "open"], filters=own, per="chunk")
    counted = {name: {(one.value, one.count) for one in buckets} for name, buckets in found.items()}
    assert counted == {"size": {(2, 1), (3, 1), (4, 1)}, "open": {(False, 1), (True, 2)}}
    assert all(body["size"] == 0 for body in server.bodies("_search"))


def test_rows_are_read_in_pages(
    server: ElasticServer, source: KnowledgeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under permissions every page is read, and each row is checked here."""
    monkeypatch.setattr(elastic, "ELASTIC_PAGE", 2)
    server.requests.clear()
    kb = KnowledgeBase([source])
    found = kb.facets("rows", "size", principal=Principal(tenant="b"), per="chunk")["size"]
    assert [(one.value, one.count) for one in found] == [(2, 1), (3, 1), (4, 1)]
    assert [method for method, path, _ in server.requests if path == "_search/scroll"] == ["POST", "POST", "DELETE"]
    assert server.bodies("_search")[0]["query"] == {"bool": {"filter": PERMITTED}}


def test_what_the_store_converts_is_not_what_was_asked_for(server: ElasticServer) -> None:
    """The number 12 is indexed as "12" in a field of text: the store finds it, and it is another tenant's."""
    rows = nodes([{"tenant": "12", "size": 1}, {"tenant": 12, "size": "1"}, {"tenant": 12, "size": 1.5}])
    index = filled(server, "converted", rows)
    source = KnowledgeSource("rows", index=index, permissions=Permissions(tenant="tenant"), hybrid=False)
    who = Principal(tenant="12")
    tree = source.permitted(who)
    assert kind_of(index.vector_store).counts(tree, None, documents=False) == [(None, 3)]
    assert [node.metadata["size"] for node in search(source, "row", tree, top_k=3).nodes] == [1]
    kb = KnowledgeBase([source])
    assert (kb.count("rows", principal=who, per="chunk"), len(kb.documents("rows", principal=who))) == (1, 1)
    assert [bucket.value for bucket in kb.facets("rows", "size", principal=who)["size"]] == [1]


def test_documents_with_long_ids_are_counted(server: ElasticServer) -> None:
    """OpenSearch does not index them: then rows are read. Elasticsearch's adapter maps keywords of any length."""
    made = nodes([{"size": 1, "tenant": "b"}] * 4)
    for node in made[2:]:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="x" * 300)
    index = filled(server, "long", made)
    kb = KnowledgeBase([KnowledgeSource("rows", index=index)])
    assert (kb.count("rows"), kb.count("rows", filters="size eq 1")) == (2, 2)
    assert [(one.value, one.count) for one in kb.facets("rows", "size")["size"]] == [(1, 2)]
    shared = KnowledgeBase([KnowledgeSource("rows", index=index, permissions=Permissions(tenant="tenant"))])
    assert asyncio.run(find_passage(shared, "rows", made[3].node_id, Principal(tenant="b")))


MAPPED = {
    "day": {"type": "date"},
    "word": {"type": "text", "fields": {"keyword": {"type": "keyword", "ignore_above": 4}}},
    "free": {"type": "text"},
    "folded": {"type": "keyword", "normalizer": "lowercase"},
    "key": {"type": "keyword"},
    "size": {"type": "long"},
    "flag": {"type": "boolean"},
    "a": {"properties": {"b": {"type": "double"}}},
}


@pytest.mark.parametrize(
    ("condition", "written"),
    [
        (Condition(key="key", operator=Op.GT, value="x"), {"range": {"metadata.key": {"gt": "x"}}}),
        (Condition(key="a.b", operator=Op.LE, value=2), {"range": {"metadata.a.b": {"lte": 2}}}),
        (Condition(key="size", operator=Op.IN, value=[1, "1", True]), {"terms": {"metadata.size": [1]}}),
        (Condition(key="flag", value=True), {"terms": {"metadata.flag": [True]}}),
        (Condition(key="size", value="1"), {"match_none": {}}),
        (Condition(key="absent", operator=Op.NE, value="x"), {"match_none": {}}),
        (
            Condition(key="word", operator=Op.NE, value="x"),
            {
                "bool": {
                    "filter": [{"exists": {"field": "metadata.word"}}],
                    "must_not": [{"terms": {"metadata.word.keyword": ["x"]}}],
                }
            },
        ),
        (Condition(key="word", value="12345"), "beyond 4 characters, and it is compared with a longer one"),
        (Condition(key="word", operator=Op.GT, value="x"), "map it as keyword without ignore_above"),
        (Condition(key="day", operator=Op.GT, value="2024-01-31"), "keeps it as date"),
        (Condition(key="free", value="x"), "keeps it as text"),
        (Condition(key="folded", value="x"), "map it as keyword"),
    ],
    ids=str,
)
def test_a_filter_is_written_by_the_mapping(condition: Condition, written: Any) -> None:
    """Values are compared with fields of their type alone; what a mapping can't compare exactly is refused."""
    dialect = Elasticsearch(dict(elastic_fields(MAPPED)))
    if isinstance(written, str):
        with pytest.raises(DeniedError, match=written):
            dialect.write(condition)
    else:
        assert dialect.write(condition) == written
