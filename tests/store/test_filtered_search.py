from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import chromadb
import numpy as np
import pytest
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb.errors import DeadlineExceededError, RetrievalError
from llama_index_agentic_kb.store import collection_search, filtered_search
from llama_index_agentic_kb.store.chroma import ChromaDatabase
from llama_index_agentic_kb.store.filtered_search import ChromaFilteredSearch
from llama_index_agentic_kb.store.matches import MatchMemory
from llama_index_agentic_kb.store.where import matching_ids

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
            {
                "one_in_10": int(draw % 10),
                "one_in_100": int(draw % 100),
                "one_in_1000": int(draw),
                "near": bool(near),
            }
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


def _is(key: str, value: Any, operator: FilterOperator = FilterOperator.EQ) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter.model_construct(key=key, value=value, operator=operator)])


def _query(vector: Any, filters: MetadataFilters, top_k: int = TOP_K) -> VectorStoreQuery:
    return VectorStoreQuery(query_embedding=[float(x) for x in vector], similarity_top_k=top_k, filters=filters)


def _anything(_: BaseNode) -> bool:
    return True


def _has(key: str, node: BaseNode) -> bool:
    return key in node.metadata


def _remembering(store: ChromaVectorStore) -> ChromaFilteredSearch:
    return ChromaFilteredSearch(store, lambda: 1, MatchMemory())


def _ids(found: Found) -> list[str]:
    return list(found[0].ids or [])


@pytest.fixture(params=["exactly", "sieved", "with Chroma's filter"])
def searching(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ChromaVectorStore], ChromaFilteredSearch]:
    """Each way in which rows are searched, however few they are."""
    if request.param == "exactly":
        return _remembering
    for module in (filtered_search, collection_search):
        monkeypatch.setattr(module, "EXACT_ROWS", 1)
    monkeypatch.setattr(filtered_search, "FETCHED_ROWS", 0)
    return _remembering if request.param == "sieved" else ChromaFilteredSearch


Search = Callable[[VectorStoreQuery], VectorStoreQueryResult]


def _recall(rows: Rows, search: Search, key: str, value: Any) -> float:
    found = expected = 0
    for vector in rows.queries:
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
def test_recall_under_a_filter(
    rows: Rows, searching: Callable[[ChromaVectorStore], ChromaFilteredSearch], key: str, value: Any
) -> None:
    """Of what an exact search finds under filters of 10, 1 and 0.1 %, and near a query, at least 99 % is found."""
    search = searching(rows.stores["cosine"])
    assert _recall(rows, lambda query: search(query, _anything)[0], key, value) >= 0.99


@pytest.mark.parametrize("space", ["cosine", "l2", "ip"])
def test_nodes_and_scores_are_the_stores_own(rows: Rows, space: str) -> None:
    """What both find has the same node and the same similarity as in the store's own query."""
    store = rows.stores[space]
    query = _query(rows.queries[1], _is("one_in_10", 7))
    plain = store.query(query)
    own, note = _remembering(store)(query, _anything)
    assert "searched exactly" in note
    expected = dict(zip(plain.ids or [], zip(plain.nodes or [], plain.similarities or [], strict=True), strict=True))
    both = set(expected) & set(own.ids or [])
    assert len(both) >= TOP_K // 2
    for node_id, node, similarity in zip(own.ids or [], own.nodes or [], own.similarities or [], strict=True):
        if node_id in both:
            assert node == expected[node_id][0]
            assert similarity == pytest.approx(expected[node_id][1], rel=1e-4)
    assert own.similarities == sorted(own.similarities or [], reverse=True)


def test_rows_without_the_key_take_no_places(
    rows: Rows, searching: Callable[[ChromaVectorStore], ChromaFilteredSearch]
) -> None:
    """Chroma's ``$ne`` and ``$nin`` let rows without the key in: the top k is filled with rows that have it."""
    store = rows.stores["cosine"]
    for filters in (_is("team", "red", FilterOperator.NE), _is("team", ["red", "green"], FilterOperator.NIN)):
        query = _query(rows.queries[2], filters)
        assert sum("team" in node.metadata for node in store.query(query).nodes or []) < TOP_K
        search = searching(store)
        for _ in range(2):  # the second time, it is known which rows fail
            found = search(query, partial(_has, "team"))
            assert len(_ids(found)) == TOP_K
            assert _ids(found) == rows.nearest("cosine", rows.queries[2], "team", "blue")


def test_a_filter_that_matches_nothing_or_fails_always_finds_nothing(
    rows: Rows, searching: Callable[[ChromaVectorStore], ChromaFilteredSearch]
) -> None:
    """No rows are no error, and rows that fail the check are never given."""
    search = searching(rows.stores["cosine"])
    assert _ids(search(_query(rows.queries[0], _is("one_in_10", 99)), _anything)) == []
    assert _ids(search(_query(rows.queries[0], _is("one_in_10", 3)), lambda _: False)) == []


def test_the_note_says_what_was_done(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows match, of how many, and how they were searched."""
    store = rows.stores["cosine"]
    query = _query(rows.queries[0], _is("one_in_10", 3))
    count = sum(one["one_in_10"] == 3 for one in rows.metadata)
    assert _remembering(store)(query, _anything)[1] == f"filter matches {count:,} of 3,000: searched exactly"
    assert ChromaFilteredSearch(store)(query, _anything)[1] == f"filter matches {count:,}: searched exactly"
    for module in (filtered_search, collection_search):
        monkeypatch.setattr(module, "EXACT_ROWS", 100)
    sieved = _remembering(store)(query, _anything)[1]
    assert sieved.startswith(f"filter matches {count:,} of 3,000: taken from the ")
    assert ChromaFilteredSearch(store)(query, _anything)[1].startswith("filter matches more than 100 rows: taken from")
    nothing = _query(rows.queries[0], _is("one_in_10", 99))
    assert _remembering(store)(nothing, _anything)[1] == "filter matches 0 of 3,000: nothing to search"


def test_rows_far_from_the_query_are_found(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none of the nearest rows match, the matching rows are searched exactly, or with Chroma's filter."""
    store = rows.stores["cosine"]
    query = _query(-rows.queries[0], _is("near", value=True))  # its opposite: all others are nearer
    for module in (filtered_search, collection_search):
        monkeypatch.setattr(module, "EXACT_ROWS", 100)
    monkeypatch.setattr(collection_search, "CANDIDATES", 20)
    monkeypatch.setattr(collection_search, "MOST_CANDIDATES", 100)
    expected = rows.nearest("cosine", -rows.queries[0], "near", value=True)
    found = _remembering(store)(query, _anything)
    assert found[1].endswith("too few among the 100 nearest of all: searched exactly")
    assert _ids(found) == expected
    monkeypatch.setattr(filtered_search, "FETCHED_ROWS", 100)
    found = _remembering(store)(query, _anything)
    assert "too few among the 100 nearest of all: taken from its" in found[1]
    assert len(set(_ids(found)) & set(expected)) >= 9


def test_matching_rows_are_remembered_until_the_version_changes() -> None:
    """One version is read once; rows that are gone are never given, others take their places; a new version is read."""
    store, version = _small_store(40), [1]
    search = ChromaFilteredSearch(store, lambda: version[0], MatchMemory())
    query = _query([1.0, 0.0], _is("even", value=True), top_k=3)
    assert _ids(search(query, _anything)) == ["n0", "n2", "n4"]
    store.client.delete(ids=["n2"])
    store.add([_small(100, even=True)])
    assert _ids(search(query, _anything)) == ["n0", "n4", "n6"]
    version[0] = 2
    assert _ids(search(query, _anything)) == ["n100", "n0", "n4"]


def test_without_a_version_nothing_is_remembered() -> None:
    """A collection of somebody else's may change at any time: new rows are found at once."""
    store = _small_store(40)
    query = _query([1.0, 0.0], _is("even", value=True), top_k=2)
    for search in (ChromaFilteredSearch(store), ChromaFilteredSearch(store, lambda: None)):
        assert "searched exactly" in search(query, _anything)[1]
    store.add([_small(100, even=True)])
    assert _ids(search(query, _anything)) == ["n100", "n0"]


def test_a_filter_used_again_is_searched_exactly(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter's second search has its rows' vectors fetched in the background."""
    for module in (filtered_search, collection_search):
        monkeypatch.setattr(module, "EXACT_ROWS", 100)
    search = _remembering(rows.stores["cosine"])
    query = _query(rows.queries[3], _is("one_in_10", 3))
    assert "nearest of all" in search(query, _anything)[1]
    deadline = time.monotonic() + 20
    while "searched exactly" not in (found := search(query, _anything))[1]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert _ids(found) == rows.nearest("cosine", rows.queries[3], "one_in_10", 3)


def test_a_fetch_that_fails_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection that goes away while its vectors are fetched leaves searches as they were."""
    for module in (filtered_search, collection_search):
        monkeypatch.setattr(module, "EXACT_ROWS", 1)
    failed = threading.Event()

    def fails(*_: Any) -> None:
        failed.set()
        raise OSError("gone")

    monkeypatch.setattr(collection_search.CollectionSearch, "fetch_vectors", fails)
    search = _remembering(_small_store(40))
    query = _query([1.0, 0.0], _is("even", value=True), top_k=2)
    for _ in range(3):
        assert _ids(search(query, _anything)) == ["n0", "n2"]
    assert failed.wait(5)


def test_filters_larger_than_one_request() -> None:
    """40,000 values and 2,000 conditions, which Chroma refuses in one request, are asked for in several."""
    store = _small_store(30)
    odd_names = [f"name {at}" for at in range(1, 30, 2)]
    values = [*odd_names, *(f"other {at}" for at in range(40_000))]
    query = _query([1.0, 0.0], _is("name", values, FilterOperator.IN), top_k=3)
    with pytest.raises(chromadb.errors.InternalError, match="too many SQL variables"):
        store.query(query)
    either = MetadataFilters(
        filters=[
            MetadataFilters(filters=[*_is("name", name).filters, *_is("even", value=False).filters])
            for name in [*odd_names, *(f"other {at}" for at in range(150))]
        ],
        condition=FilterCondition.OR,
    )
    for search in (_remembering(store), ChromaFilteredSearch(store)):
        assert _ids(search(query, _anything)) == ["n1", "n3", "n5"]
        assert _ids(search(_query([1.0, 0.0], either, top_k=3), _anything)) == ["n1", "n3", "n5"]


def test_a_large_filter_over_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter of several requests that matches many rows of a collection without a version is sieved."""
    for module in (filtered_search, collection_search):
        monkeypatch.setattr(module, "EXACT_ROWS", 5)
    store = _small_store(40)
    query = _query([1.0, 0.0], _is("name", [f"name {at}" for at in range(1, 20_000, 2)] * 2, FilterOperator.IN), 3)
    found = ChromaFilteredSearch(store)(query, _anything)
    assert _ids(found) == ["n1", "n3", "n5"]
    assert "of 40: taken from the 40 nearest of all" in found[1]


def test_no_request_is_begun_after_the_deadline(rows: Rows) -> None:
    """A thread can't be stopped, but it stops itself."""
    query = _query(rows.queries[0], _is("one_in_10", 3))
    for search in (_remembering(rows.stores["cosine"]), ChromaFilteredSearch(rows.stores["cosine"])):
        with pytest.raises(DeadlineExceededError, match="at its deadline"):
            search(query, _anything, deadline=time.monotonic() - 1)
        assert len(_ids(search(query, _anything, deadline=time.monotonic() + 60))) == TOP_K


def test_a_vector_of_another_model_is_refused(rows: Rows) -> None:
    """A query of another length names both lengths."""
    with pytest.raises(RetrievalError, match="3 dimensions, those of the collection have 64"):
        _remembering(rows.stores["cosine"])(_query([1.0, 2.0, 3.0], _is("one_in_10", 3)), _anything)


def test_the_distance_is_read_from_the_collection() -> None:
    """Configurations, the older metadata key, and what tells no distance."""
    client = chromadb.EphemeralClient()
    collection = client.create_collection("space-by-metadata", metadata={"hnsw:space": "ip"})
    try:
        assert filtered_search._space(collection) == "ip"
    finally:
        client.delete_collection("space-by-metadata")

    odd = SimpleNamespace(configuration_json={"hnsw": None, "spann": {"space": "cosine"}}, metadata=None)
    assert filtered_search._space(odd) == "cosine"
    odd.configuration_json = {}
    assert filtered_search._space(odd) == ""


def test_our_own_sources_tell_their_version(tmp_path: Any) -> None:
    """Stores of a database that knows versions remember rows; those of one that knows none read them anew."""
    asked: list[str] = []

    def version_of(source: str) -> int:
        asked.append(source)
        return 1

    database = ChromaDatabase.persistent(tmp_path / "chroma", version_of)
    store = database.vector_store("docs", create=True)
    assert store.class_name() == ChromaVectorStore.class_name()  # scores stay comparable
    database.add("docs", [_small(at, even=at % 2 == 0) for at in range(10)])
    found = store.filtered_search(_query([1.0, 0.0], _is("even", value=False), top_k=2), _anything)
    assert (_ids(found), asked) == (["n1", "n3"], ["docs"])
    database.close()


def test_each_query_gives_similarities_of_the_distance(rows: Rows) -> None:
    """A row's similarity is exp(-distance), as in LlamaIndex's Chroma store."""
    vector = rows.vectors[5]
    result, _ = _remembering(rows.stores["l2"])(
        _query(vector, _is("one_in_1000", rows.metadata[5]["one_in_1000"])), _anything
    )
    assert (result.ids or [])[0] == "n5"
    assert (result.similarities or [])[0] == pytest.approx(math.exp(0))


def test_reading_ids_stops_between_requests() -> None:
    """A filter of several requests does not ask for the next part after the deadline."""
    asked: list[Any] = []

    def get(where: Any) -> list[str]:
        asked.append(where)
        time.sleep(0.05)
        return []

    where = {"name": {"$in": [str(at) for at in range(30_000)]}}
    with pytest.raises(DeadlineExceededError):
        matching_ids(get, where, time.monotonic() + 0.02)
    assert len(asked) == 1


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
