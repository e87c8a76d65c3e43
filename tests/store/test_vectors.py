"""Dense search in a source: exact, with a graph, under filters; and graphs that are stale or damaged."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import FilterOperator as Operator
from llama_index.core.vector_stores.types import (
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    DeniedError,
    RetrievalError,
    StoreDamagedError,
)
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterNode, matches
from llama_index_agentic_kb.sources.filters import lower
from llama_index_agentic_kb.store import chroma, repair_store, vectors
from llama_index_agentic_kb.store.database import Chunk, DocumentDatabase, MetadataValue, StoredDocument
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding

ROWS = 600
DIMENSION = 16
TOP_K = 10
SOURCE = "rows"

Metadata = dict[str, MetadataValue]


def model() -> HashEmbedding:
    return HashEmbedding(dimensions=DIMENSION)


def metadata_of(at: int) -> Metadata:
    made: Metadata = {"tenth": at % 10, "share": at / 4, "name": f"n{at}", "even": at % 2 == 0}
    return made | ({"team": ["red", "blue"][at % 8 // 4]} if at % 4 == 0 else {})


class Rows:
    """Vectors without any cluster, stored a hundred to a document."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.vectors = rng.standard_normal((ROWS, DIMENSION)).astype(np.float32)
        self.queries = rng.standard_normal((10, DIMENSION)).astype(np.float32)

    def put(self, store: DirectoryStore, start: int, end: int) -> None:
        if start == 0:
            store.documents.put_source(SOURCE)
        for first in range(start, end, 100):
            ids = range(first, min(first + 100, end))
            document = StoredDocument(SOURCE, f"{first}", "/o", "/r", "hash", "settings")
            chunks = [
                Chunk(f"n{at}", at, f"text {at}", metadata_of(at) | {"title": "T", "document_id": "d"}, f"e{at}", 0, 1)
                for at in ids
            ]
            store.documents.put_document(document, zip(chunks, self.vectors[ids], strict=True))

    def nearest(self, query: np.ndarray[Any, Any], passes: Callable[[Metadata], bool], top_k: int = TOP_K) -> list[str]:
        """Return the ids that a comparison with all rows gives, best first."""
        ids = [at for at in range(ROWS) if passes(metadata_of(at))]
        rows = self.vectors[ids]
        far = -(rows @ query) / np.linalg.norm(rows, axis=1)
        return [f"n{ids[at]}" for at in np.argsort(far, kind="stable")[:top_k]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows()


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph from 50 rows on."""
    monkeypatch.setattr(chroma, "EXACT_ROWS", 50)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[DirectoryStore]:
    with DirectoryStore.open(tmp_path / "store", embed_model=model(), create=True) as store:
        yield store


@pytest.fixture
def store(rows: Rows, empty: DirectoryStore) -> DirectoryStore:
    rows.put(empty, 0, ROWS)
    return empty


@pytest.fixture
def with_graph(store: DirectoryStore, small_limits: None) -> DirectoryStore:
    with store.writing():
        store.update_graph(SOURCE)
    assert store.outside_graph(SOURCE) == 0
    return store


def asked(vector: Any, filters: MetadataFilters | None = None, top_k: int = TOP_K, **more: Any) -> VectorStoreQuery:
    listed = [] if vector is None else [float(x) for x in vector]
    return VectorStoreQuery(query_embedding=listed, similarity_top_k=top_k, filters=filters, **more)


def found(store: DirectoryStore, vector: Any, filters: FilterNode | None = None, **more: Any) -> list[str]:
    result, _ = store.vectors(SOURCE).search(asked(vector, None if filters is None else lower(filters), **more))
    return list(result.ids or [])


def recall(store: DirectoryStore, rows: Rows, filters: FilterNode | None = None) -> float:
    hit = total = 0
    for query in rows.queries:
        best = rows.nearest(query, lambda one: filters is None or matches(filters, one))
        hit += len(set(best) & set(found(store, query, filters)))
        total += len(best)
    return hit / total


FILTERS = [
    Condition(key="tenth", value=3),
    Condition(key="even", value=True),
    Condition(key="team", operator="ne", value="red"),
    Condition(key="share", operator="gt", value=100),
    Condition(key="name", operator="in", value=["n1", "n2", "n599"]),
]


@pytest.mark.parametrize("filters", [None, *FILTERS])
def test_without_a_graph_it_is_exact(store: DirectoryStore, rows: Rows, filters: FilterNode | None) -> None:
    """Under a filter or none, in order, with the similarities of LlamaIndex's Chroma store."""
    assert recall(store, rows, filters) == 1
    query = rows.queries[0]
    best = rows.nearest(query, lambda one: filters is None or matches(filters, one))
    assert found(store, query, filters) == best
    result, _ = store.vectors(SOURCE).search(asked(query, None if filters is None else lower(filters)))
    first = rows.vectors[int(best[0][1:])]
    far = 1 - float(first @ query / np.linalg.norm(first) / np.linalg.norm(query))
    assert (result.similarities or [])[0] == pytest.approx(math.exp(-far), rel=1e-5)
    assert result.similarities == sorted(result.similarities or [], reverse=True)


@pytest.mark.parametrize("filters", [None, *FILTERS])
def test_with_a_graph_nothing_is_lost(with_graph: DirectoryStore, rows: Rows, filters: FilterNode | None) -> None:
    """Of what a comparison with all rows gives, at least 99 %; few matching rows are compared exactly."""
    assert recall(with_graph, rows, filters) >= 0.99


def test_rows_far_from_the_query_are_found(
    with_graph: DirectoryStore, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where too few of the nearest rows match a filter, all that match are compared."""
    monkeypatch.setattr(vectors, "CANDIDATES", 20)
    monkeypatch.setattr(vectors, "MAX_CANDIDATES", 20)
    query = rows.queries[2]
    result, note = with_graph.vectors(SOURCE).search(asked(query, lower(Condition(key="even", value=True))))
    assert note == "filter matches 300 of 600: too few among the 20 nearest of all: searched exactly"
    assert result.ids == rows.nearest(query, lambda one: bool(one["even"]))
    _, note = with_graph.vectors(SOURCE).search(asked(query, lower(Condition(key="even", value=True)), 2))
    assert note == "filter matches 300 of 600: taken from the nearest of all"


def test_changes_are_found_at_once(with_graph: DirectoryStore, rows: Rows) -> None:
    """Beside a graph that lacks them: what is deleted is never found, what is added is, by another opening too."""
    query = rows.vectors[5]
    assert found(with_graph, query)[0] == "n5"
    with DirectoryStore.open(with_graph.path, embed_model=model()) as other:
        assert found(other, query)[0] == "n5"
        with_graph.documents.delete_document(SOURCE, "0")
        for one in (with_graph, other):
            ids = found(one, query)
            assert len(ids) == TOP_K
            assert all(int(node_id[1:]) >= 100 for node_id in ids)
        document = StoredDocument(SOURCE, "new", "/o", "/r", "hash", "settings")
        chunk = Chunk("new", 0, "new", {"title": "T", "document_id": "d", "even": True}, "new", None, None)
        with_graph.documents.put_document(document, [(chunk, query)])
        for one in (with_graph, other):
            assert found(one, query)[0] == "new"
            assert found(one, query, Condition(key="even", value=True))[0] == "new"
        assert with_graph.outside_graph(SOURCE) == 101
        with with_graph.writing():
            with_graph.update_graph(SOURCE)
        for one in (with_graph, other):
            assert found(one, query)[0] == "new"
            assert one.outside_graph(SOURCE) == 0
    assert len(list((with_graph.path / "graphs").iterdir())) == 1


def damaged(path: Path, how: str) -> None:
    if how == "gone":
        shutil.rmtree(path / "graphs")
    for file in path.glob("graphs/*/*/*.bin" if how == "cut" else "graphs/*/chroma.sqlite3"):
        if how == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            with file.open("r+b") as opened:
                opened.write(b"\xff" * 20_000)


@pytest.mark.parametrize("how", ["gone", "cut", "overwritten"])
@pytest.mark.parametrize("remedy", ["auto", "repair"])
def test_a_damaged_graph_costs_no_answer(with_graph: DirectoryStore, rows: Rows, how: str, remedy: str) -> None:
    """Searches go on without it; too many rows for that are an error that names the remedy, which restores all."""
    path = with_graph.path
    with_graph.close()
    damaged(path, how)
    with DirectoryStore.open(path, embed_model=model()) as store:
        assert recall(store, rows) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vectors, "MAX_ROWS", 100)
            with (
                DirectoryStore.open(path, embed_model=model()) as other,
                pytest.raises(StoreDamagedError, match=r"Nothing is lost: run `agentic-kb repair --store"),
            ):
                found(other, rows.queries[0])
        if remedy == "repair":
            report = repair_store(path)
            assert (report.rebuilt, bool(report.fault), report.chunks) == (True, True, ROWS)
            assert not repair_store(path).fault
    with DirectoryStore.open(path, embed_model=model(), repair="auto") as store:
        assert recall(store, rows) >= 0.99
        if how != "overwritten" or remedy == "repair":  # a file of the right size is only seen to be damaged in use
            assert store.outside_graph(SOURCE) == 0


def test_a_damaged_graph_of_few_rows_is_built_once(
    with_graph: DirectoryStore, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that has shrunk since may need no graph, but the next repair must find nothing."""
    monkeypatch.setattr(chroma, "EXACT_ROWS", ROWS)
    (state,) = filter(None, [with_graph.documents.source_state(SOURCE)])
    next((with_graph.path / "graphs" / state.directory).rglob("*.bin")).unlink()
    assert repair_store(with_graph.path).rebuilt
    assert not repair_store(with_graph.path).rebuilt
    assert recall(with_graph, rows) == 1.0


def test_a_graph_whose_copy_fails_is_built_anew(with_graph: DirectoryStore, rows: Rows) -> None:
    """A damaged page that no search meets is met by the next writer, who starts from the documents."""
    with_graph.close()
    for file in with_graph.path.glob("graphs/*/chroma.sqlite3"):
        content = bytearray(file.read_bytes())
        content[4096:] = b"\xff" * (len(content) - 4096)
        file.write_bytes(content)
    with DirectoryStore.open(with_graph.path, embed_model=model()) as store:
        store.documents.delete_document(SOURCE, "0")
        with store.writing():
            store.update_graph(SOURCE)
        assert store.outside_graph(SOURCE) == 0
        assert found(store, rows.vectors[500])[0] == "n500"


def test_a_half_built_graph_is_never_used(with_graph: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process left is removed by the next one that builds; a failed build leaves the one before."""
    (with_graph.path / "graphs" / "half").mkdir()
    before = with_graph.documents.source_state(SOURCE)

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(chroma.Graphs, "_fill", fail)
        with pytest.raises(Exception, match="can't be built: OSError: No space left"):
            repair_store(with_graph.path, rebuild_all=True)
    assert with_graph.documents.source_state(SOURCE) == before
    repair_store(with_graph.path, rebuild_all=True)
    assert [entry.name for entry in (with_graph.path / "graphs").iterdir()] == list(
        with_graph.documents.graph_directories()
    )


def test_ids_narrow_a_search(store: DirectoryStore, rows: Rows) -> None:
    """Node ids and document ids, which Chroma ignores; a document that is not there gives nothing."""
    assert found(store, rows.queries[0], node_ids=["n3", "n4", "absent"], top_k=5) in (["n3", "n4"], ["n4", "n3"])
    assert found(store, rows.queries[0], doc_ids=["other"]) == []
    assert len(found(store, rows.queries[0], doc_ids=["d"])) == TOP_K
    vectors = store.index(SOURCE).vector_store
    assert {node.node_id for node in vectors.get_nodes(["n3", "n4"])} == {"n3", "n4"}
    assert vectors.get_nodes([]) == []
    assert len(found(store, None, Condition(key="tenth", value=3), top_k=1_000)) == ROWS // 10


def test_all_nodes_of_a_source_are_listed(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and without reading their vectors."""
    monkeypatch.setattr(vectors, "MAX_ROWS", 50)
    monkeypatch.setattr(vectors, "_MAX_PORTION", 70)
    monkeypatch.delattr(DocumentDatabase, "vectors")
    assert len(store.index(SOURCE).vector_store.get_nodes()) == ROWS


def test_nodes_that_fail_the_check_take_no_places(store: DirectoryStore, rows: Rows) -> None:
    """Others come in their places."""
    filters = lower(Condition(key="even", value=True))

    def passes(node: BaseNode) -> bool:
        return bool(node.metadata["tenth"] == 4)

    result, _ = store.vectors(SOURCE).search(asked(rows.queries[0], filters), passes)
    assert result.ids == rows.nearest(rows.queries[0], lambda one: one["tenth"] == 4)
    assert store.vectors(SOURCE).search(asked(rows.queries[0], filters), lambda _: False)[0].ids == []


VALUES = st.sampled_from([0, 3, 4, 1.0, 2.5, -1, True, False, "red", "blue", "n4", "", "x'; DROP TABLE chunks; --"])
KEYS = st.sampled_from(["tenth", "share", "name", "even", "team", "absent", "Tenth", "a.b"])
CONDITIONS = st.builds(
    lambda key, operator, value: Condition(key=key, operator=operator, value=value),
    KEYS,
    st.sampled_from(["eq", "ne", "gt", "ge", "lt", "le"]),
    VALUES,
) | st.builds(
    lambda key, operator, values: Condition(key=key, operator=operator, value=values),
    KEYS,
    st.sampled_from(["in", "nin"]),
    st.lists(VALUES, min_size=1, max_size=4),
)
TREES: st.SearchStrategy[FilterNode] = st.recursive(
    CONDITIONS,
    lambda children: st.builds(
        lambda logic, filters: FilterGroup(logic=logic, filters=filters),
        st.sampled_from(["and", "or", "not"]),
        st.lists(children, min_size=1, max_size=10),
    ),
    max_leaves=15,
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(tree=TREES)
def test_filters_hold_in_sql_as_they_do_in_python(store: DirectoryStore, tree: FilterNode) -> None:
    """Each row is let through by SQL if and only if it matches the tree."""
    expected = {f"n{at}" for at in range(0, ROWS, 7) if matches(tree, metadata_of(at))}
    ids = [f"n{at}" for at in range(0, ROWS, 7)]
    assert set(found(store, None, tree, node_ids=ids, top_k=ROWS)) == expected


def test_large_filters(store: DirectoryStore) -> None:
    """Values and conditions by the ten thousand, and principals with a thousand groups."""
    many = Condition(key="name", operator="in", value=["n1", *(f"x{at}" for at in range(40_000))])
    assert found(store, None, many) == ["n1"]
    either = [Condition(key=f"group{at}", value=True) for at in range(1_000)]
    both = FilterGroup(logic="and", filters=[Condition(key="tenth", value=1), Condition(key="name", value="n1")])
    assert found(store, None, FilterGroup(logic="or", filters=[*either, both])) == ["n1"]
    assert found(store, None, FilterGroup(logic="or", filters=[*either, Condition(key="name", value="n2")])) == ["n2"]


@pytest.mark.parametrize(
    "filters",
    [
        MetadataFilters(filters=[]),
        MetadataFilters(filters=[MetadataFilters(filters=[])]),
        MetadataFilters(filters=[MetadataFilter(key="tenth", value="x", operator=Operator.TEXT_MATCH)]),
        MetadataFilters(filters=[MetadataFilter(key='te"nth', value=1)]),
        MetadataFilters(filters=[MetadataFilter(key="name", value="\ud800")]),
    ],
)
def test_filters_that_can_not_be_applied_are_denied(store: DirectoryStore, filters: MetadataFilters) -> None:
    """An empty one must not mean "everything"."""
    with pytest.raises(DeniedError):
        store.vectors(SOURCE).search(asked(None, filters))


def test_what_can_not_be_searched_is_refused(store: DirectoryStore, rows: Rows) -> None:
    """Vectors of another model, other modes, passed deadlines, and writing beside ingestion."""
    search = store.vectors(SOURCE).search
    with pytest.raises(RetrievalError, match="3 dimensions, those of the store have 16"):
        search(asked([1.0, 2.0, 3.0]))
    with pytest.raises(RetrievalError, match="mode 'default'; found 'mmr'"):
        search(asked(rows.queries[0], mode=VectorStoreQueryMode.MMR))
    with pytest.raises(DeadlineExceededError, match="at its deadline"):
        search(asked(rows.queries[0]), deadline=time.monotonic() - 1)
    vectors = store.index(SOURCE).vector_store
    for change in (lambda: vectors.add([]), lambda: vectors.delete("d")):
        with pytest.raises(ConfigurationError, match=r"ingest\(\) alone"):
            change()
    store.remove_source(SOURCE)
    with pytest.raises(ConfigurationError, match="no source 'rows' any more"):
        search(asked(rows.queries[0]))


def test_many_threads_search_while_one_writes(with_graph: DirectoryStore, rows: Rows) -> None:
    """Every search answers, whatever is built meanwhile; old graphs go when nobody is in them."""
    stop, errors = threading.Event(), []

    def search(at: int) -> None:
        while not stop.is_set():
            try:
                assert len(found(with_graph, rows.queries[at], FILTERS[at % 2])) == TOP_K
                assert len(found(with_graph, rows.queries[at])) == TOP_K
            except BaseException as error:  # noqa: BLE001 (told by the main thread)
                errors.append(error)
                return

    threads = [threading.Thread(target=search, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for first in (0, 100, 200):
        with with_graph.writing():
            with_graph.documents.delete_document(SOURCE, str(first))
            with_graph.update_graph(SOURCE)
            rows.put(with_graph, first, first + 100)
            with_graph.update_graph(SOURCE)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
