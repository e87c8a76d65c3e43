"""Filtered dense searches: in a user's Chroma, and by what any vector store offers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import chromadb
import numpy as np
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from llama_index_agentic_kb.errors import DeadlineExceededError, RetrievalError
from llama_index_agentic_kb.schema import (
    Condition,
    FilterGroup,
    FilterNode,
    FilterOperator,
    Outcome,
    SourceActivity,
    any_of,
    matcher,
)
from llama_index_agentic_kb.search.dialects import Chroma
from llama_index_agentic_kb.search.filters import lower
from llama_index_agentic_kb.sources import chroma_search
from llama_index_agentic_kb.sources.chroma_search import ChromaFilteredSearch
from llama_index_agentic_kb.sources.index import index_retriever, traits_of
from llama_index_agentic_kb.sources.search import NodeList
from llama_index_agentic_kb.testing import HashEmbedding
from tests.sources.conftest import MakeIndex, search, searching

ROWS = 3_000
DIMENSION = 64
TOP_K = 10

Found = tuple[VectorStoreQueryResult, str]


class Rows:
    """Rows without any cluster, in a sparse graph that Chroma's own query loses its way in."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.vectors = rng.standard_normal((ROWS, DIMENSION)).astype(np.float32)
        self.queries = rng.standard_normal((15, DIMENSION)).astype(np.float32)
        direction = self.vectors @ self.queries[0]
        metadata: list[dict[str, Any]] = [
            {"one_in_10": int(draw % 10), "one_in_100": int(draw % 100), "one_in_1000": int(draw), "near": bool(near)}
            for draw, near in zip(rng.integers(0, 1000, ROWS), direction > np.quantile(direction, 0.9), strict=True)
        ]
        for at, one in enumerate(metadata):
            if at % 4 == 0:
                one["team"] = ["red", "blue"][at % 8 // 4]  # the others have no team
        self.metadata = metadata
        self.client = chromadb.EphemeralClient()
        self.stores = {
            "cosine": self._store("cosine", ROWS),
            "l2": self._store("l2", 300),
            "ip": self._store("ip", 300),
        }

    def _store(self, space: Any, count: int) -> ChromaVectorStore:
        name = f"filtered-{space}-{time.monotonic_ns()}"
        graph: Any = {"space": space, "ef_search": 10, "ef_construction": 50}
        collection = self.client.create_collection(name, configuration={"hnsw": graph})
        store = ChromaVectorStore(chroma_collection=collection)
        store.add(
            [
                TextNode(id_=f"n{at}", text=f"text {at}", metadata=one, embedding=vector)
                for at, (one, vector) in enumerate(zip(self.metadata, self.vectors[:count].tolist(), strict=False))
            ]
        )
        return store

    def nearest(self, space: str, query: np.ndarray[Any, Any], key: str, value: Any) -> list[str]:
        """Give the ids that an exact search gives, best first."""
        ids = [at for at, one in enumerate(self.metadata) if one.get(key) == value]
        rows = self.vectors[ids]
        inner = rows @ query
        cosine = inner / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)
        far = {"cosine": -cosine, "ip": -inner, "l2": ((rows - query) ** 2).sum(axis=1)}[space]
        return [f"n{ids[at]}" for at in np.argsort(far)[:TOP_K]]


@pytest.fixture(scope="module")
def rows() -> Iterator[Rows]:
    made = Rows()
    yield made
    for store in made.stores.values():
        made.client.delete_collection(store.client.name)


def _is(key: str, value: Any, operator: FilterOperator = FilterOperator.EQ) -> Condition:
    return Condition(key=key, value=value, operator=operator)


def _query(vector: Any, tree: FilterNode, top_k: int = TOP_K) -> VectorStoreQuery:
    return VectorStoreQuery(query_embedding=[float(x) for x in vector], similarity_top_k=top_k, filters=lower(tree))


def _search(store: ChromaVectorStore, query: VectorStoreQuery, deadline: float | None = None) -> Found:
    return ChromaFilteredSearch(store)(query, deadline)


def _ids(found: Found) -> list[str]:
    return list(found[0].ids or [])


@pytest.fixture(params=["exactly", "with Chroma's filter", "sieved"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, float]:
    """Each way in which rows are searched, however few they are; the number of queries to ask, and their recall."""
    if request.param != "exactly":
        monkeypatch.setattr(chroma_search, "EXACT_ROWS", 1)
    if request.param != "sieved":
        return 6, 0.98
    monkeypatch.setattr(chroma_search, "MAX_CONDITIONS", 0)
    # Every row's metadata are read for each query. Chroma builds its graph anew in each run, never twice the same: in
    # 12 runs of 6 queries, of 10 rows each, one row was lost.
    return 2, 0.9


Search = Callable[[VectorStoreQuery], VectorStoreQueryResult]


def _recall(rows: Rows, search: Search, key: str, value: Any, queries: int = 15) -> float:
    found = expected = 0
    for vector in rows.queries[:queries]:
        best = rows.nearest("cosine", vector, key, value)
        result = search(_query(vector, _is(key, value)))
        assert all(node.metadata[key] == value for node in result.nodes or [])
        found += len(set(best) & set(result.ids or []))
        expected += len(best)
    return found / expected


def test_chromas_own_query_loses_rows_here(rows: Rows) -> None:
    """The tests of recall below could fail: under the same filters, the store's own query finds less."""
    own = rows.stores["cosine"].query
    assert (_recall(rows, own, "one_in_10", 3) + _recall(rows, own, "near", value=True)) / 2 < 0.97


@pytest.mark.parametrize(("key", "value"), [("one_in_10", 3), ("one_in_100", 33), ("one_in_1000", 333), ("near", True)])
def test_recall_under_a_filter(rows: Rows, way: tuple[int, float], key: str, value: Any) -> None:
    """What an exact search finds under filters of 10, 1 and 0.1 %, and near a query, is found but for rare rows."""
    queries, recall = way
    assert _recall(rows, lambda query: _search(rows.stores["cosine"], query)[0], key, value, queries) >= recall


@pytest.mark.parametrize("space", ["cosine", "l2", "ip"])
def test_nodes_and_scores_are_the_stores_own(rows: Rows, space: str) -> None:
    """What both find has the same node and the same similarity as in the store's own query."""
    store = rows.stores[space]
    query = _query(rows.queries[1], _is("one_in_10", 7))
    plain = store.query(query)
    own, note = _search(store, query)
    count = sum(one["one_in_10"] == 7 for one in rows.metadata[: store.client.count()])
    assert note == f"filter matches {count}: searched exactly"
    expected = dict(zip(plain.ids or [], zip(plain.nodes or [], plain.similarities or [], strict=True), strict=True))
    both = set(expected) & set(own.ids or [])
    assert len(both) >= TOP_K // 2
    for node_id, node, similarity in zip(own.ids or [], own.nodes or [], own.similarities or [], strict=True):
        if node_id in both:
            assert node == expected[node_id][0]
            assert similarity == pytest.approx(expected[node_id][1], rel=1e-4)
    assert own.similarities == sorted(own.similarities or [], reverse=True)


@pytest.mark.usefixtures("way")
def test_rows_without_the_key_take_no_places(rows: Rows) -> None:
    """Chroma's ``$ne`` and ``$nin`` let rows without the key in: the top k is filled with rows that have it."""
    store = rows.stores["cosine"]
    for filters in (_is("team", "red", FilterOperator.NE), _is("team", ["red", "green"], FilterOperator.NIN)):
        query = _query(rows.queries[2], filters)
        assert sum("team" in node.metadata for node in store.query(query).nodes or []) < TOP_K
        assert _ids(_search(store, query)) == rows.nearest("cosine", rows.queries[2], "team", "blue")


def test_filters_larger_than_one_request() -> None:
    """40,000 values and 2,000 conditions, which Chroma refuses in one request, are found all the same."""
    store = _small_store(30)
    odd_names = [f"name {at}" for at in range(1, 30, 2)]
    values = [*odd_names, *(f"other {at}" for at in range(40_000))]
    query = _query([1.0, 0.0], _is("name", values, FilterOperator.IN), top_k=3)
    with pytest.raises(chromadb.errors.InternalError, match="too many SQL variables"):
        store.query(query)
    names = [*odd_names, *(f"other {at}" for at in range(150))]
    either = any_of(*(FilterGroup(filters=[_is("name", name), _is("even", value=False)]) for name in names))
    assert _ids(_search(store, query)) == ["n1", "n3", "n5"]
    assert _ids(_search(store, _query([1.0, 0.0], either, top_k=3))) == ["n1", "n3", "n5"]


def test_equalities_on_one_key_become_one_list() -> None:
    """A thousand conditions become one, which costs Chroma a thousandth; types stay apart."""
    assert Chroma().write(any_of(*(_is("a", at) for at in range(1000)))) == {"a": {"$in": list(range(1000))}}
    mixed = any_of(*(_is("a", value) for value in (1, True, "x")), _is("a", [2, 1], FilterOperator.IN))
    assert Chroma().write(mixed) == {"$or": [{"a": {"$in": [1, 2]}}, {"a": {"$eq": True}}, {"a": {"$eq": "x"}}]}


def test_rows_far_from_the_query_are_found(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too few of the nearest rows of all match a large filter, the matching rows are compared one by one."""
    monkeypatch.setattr(chroma_search, "EXACT_ROWS", 100)
    monkeypatch.setattr(chroma_search, "MAX_CANDIDATES", 100)
    monkeypatch.setattr(chroma_search, "MAX_CONDITIONS", 0)
    query = _query(-rows.queries[0], _is("near", value=True))  # its opposite: all others are nearer
    found = _search(rows.stores["cosine"], query)
    assert found[1] == "filter matches 300: searched exactly"
    assert _ids(found) == rows.nearest("cosine", -rows.queries[0], "near", value=True)


def test_no_request_is_begun_after_the_deadline(rows: Rows) -> None:
    """A thread can't be stopped, but it stops itself."""
    query = _query(rows.queries[0], _is("one_in_10", 3))
    with pytest.raises(DeadlineExceededError, match="at its deadline"):
        _search(rows.stores["cosine"], query, deadline=time.monotonic() - 1)
    assert len(_ids(_search(rows.stores["cosine"], query, deadline=time.monotonic() + 60))) == TOP_K


def test_a_vector_of_another_model_is_refused(rows: Rows) -> None:
    """The error says how many dimensions each has."""
    with pytest.raises(RetrievalError, match="3 dimensions, those of the collection have 64"):
        _search(rows.stores["cosine"], _query([1.0] * 3, _is("one_in_10", 3)))


def _small(at: int, *, even: bool) -> TextNode:
    angle = 0.0 if at == 100 else 0.01 * (at + 1)
    metadata = {"even": even, "name": f"name {at}"}
    return TextNode(id_=f"n{at}", text=f"text {at}", metadata=metadata, embedding=[math.cos(angle), math.sin(angle)])


def _small_store(count: int) -> ChromaVectorStore:
    """Rows by their distance from the vector (1, 0)."""
    client = chromadb.EphemeralClient()
    name = f"small-{time.monotonic_ns()}"
    store = ChromaVectorStore(
        chroma_collection=client.create_collection(name, configuration={"hnsw": {"space": "cosine"}})
    )
    store.add([_small(at, even=at % 2 == 0) for at in range(count)])
    return store


# -- by the retriever of a source -------------------------------------------------------------------------------------

EVEN = Condition(key="parity", value="even")
EVEN_ONLY = matcher(EVEN)


def _parts(count: int = 20) -> list[TextNode]:
    words = ["pump", "valve", "filter", "motor", "seal"]
    return [
        TextNode(
            id_=f"n{at}",
            text=f"the {words[at % 5]} number {at} of the {words[at % 3]}",
            metadata={"parity": "even" if at % 2 == 0 else "odd", "title": f"Title {at}"},
        )
        for at in range(count)
    ]


def dense(source: KnowledgeSource, query: str, top_k: int = 4) -> NodeList:
    return search(source, query, top_k=top_k).lists[0]


def test_it_stands_in_for_the_plain_search(chroma_index: MakeIndex) -> None:
    """The same model, scale and kind; and a note. Under no filter it is the store's own."""
    index = chroma_index(_parts(), HashEmbedding())
    retriever = index_retriever(index, EVEN, 4, {})
    assert traits_of(retriever) == traits_of(index.as_retriever(similarity_top_k=4))
    assert (traits_of(retriever).kind, traits_of(retriever).native_async) == ("dense", False)
    found = dense(KnowledgeSource("docs", index=index, filters=EVEN, hybrid=False), "pump number 4")
    assert found.note == "filter matches 10: searched exactly"
    assert dense(KnowledgeSource("docs", index=index, hybrid=False), "pump number 4").note is None


def test_a_source_is_searched_by_it_and_says_so(chroma_index: MakeIndex) -> None:
    """The note stands in the activity, of each search its own; rows without the key take no places."""
    nodes = [*_parts(), *(TextNode(id_=f"x{at}", text="pump number") for at in range(20))]  # nearer, and no parity
    index = chroma_index(nodes, HashEmbedding())
    not_odd = Condition(key="parity", operator=FilterOperator.NE, value="odd")
    source = KnowledgeSource("docs", index=index, filters=not_odd)
    records: list[Any] = []
    retriever = AgenticRetriever([source], effort="minimal", similarity_top_k=5, observer=records.append)
    found = retriever.retrieve("pump number")
    assert len(found) == 5
    assert all(EVEN_ONLY(node.node.metadata) for node in found)
    record = next(r for r in reversed(records) if isinstance(r, SourceActivity))
    assert record.outcome is Outcome.OK
    assert record.dropped_by_filter == 0
    assert [lane.note for lane in record.lanes or [] if lane.kind == "dense"] == ["filter matches 30: searched exactly"]


def test_other_searches_are_left_alone(chroma_index: MakeIndex) -> None:
    """Modes and arguments that mean something else to the store, and stores that offer nothing, have no note."""
    index = chroma_index(_parts(), HashEmbedding())
    further: tuple[dict[str, Any], ...] = (
        {"vector_store_query_mode": "mmr"},
        {"vector_store_kwargs": {"where_document": {"$contains": "pump"}}},
    )
    for kwargs in further:
        source = KnowledgeSource("docs", index=index, filters=EVEN, retriever_kwargs=kwargs)
        found = dense(source, "pump")
        assert (found.note, bool(found.nodes)) == (None, True)

    class OwnChroma(ChromaVectorStore):
        """A store whose query is its user's."""

    own = VectorStoreIndex.from_vector_store(
        OwnChroma.from_collection(index.vector_store.client), embed_model=HashEmbedding()
    )
    for other in (own, VectorStoreIndex(_parts(), embed_model=HashEmbedding())):
        assert dense(KnowledgeSource("docs", index=other, filters=EVEN, hybrid=False), "pump").note is None


def test_a_store_may_offer_a_search_of_its_own() -> None:
    """Any vector store with ``filtered_search`` is asked in place of its query, with all that the query says."""
    asked: list[VectorStoreQuery] = []

    class Offering(SimpleVectorStore):
        async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
            raise AssertionError

        def filtered_search(
            self, query: VectorStoreQuery, *, deadline: float | None
        ) -> tuple[VectorStoreQueryResult, str]:
            asked.append(query)
            kept = [node for node in _parts() if EVEN_ONLY(node.metadata)][: query.similarity_top_k]
            return VectorStoreQueryResult(
                nodes=kept, similarities=[0.5] * len(kept)
            ), f"in time: {deadline is not None}"

    context = StorageContext.from_defaults(vector_store=Offering())
    index = VectorStoreIndex(_parts(), storage_context=context, embed_model=HashEmbedding())
    found = asyncio.run(searching(KnowledgeSource("docs", index=index, filters=EVEN, hybrid=False), "valve", top_k=3))
    assert [node.node_id for node in found.nodes] == ["n0", "n2", "n4"]
    assert found.lists[0].note == "in time: True"
    limited = {"doc_ids": ["other"]}
    assert not search(KnowledgeSource("docs", index=index, filters=EVEN, retriever_kwargs=limited), "valve").nodes
    assert (asked[0].doc_ids, asked[1].doc_ids) == (None, ["other"])
