"""Dense search in a source: exact, with a graph, under filters; stale and damaged graphs; and filters in SQL."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.vector_stores.types import FilterOperator as Operator
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters, VectorStoreQueryMode

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    DeniedError,
    InvalidRequestError,
    RetrievalError,
    StoreDamagedError,
)
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterNode, matches, parse_odata
from llama_index_agentic_kb.search.filters import lower
from llama_index_agentic_kb.store import KnowledgeStore, database, repair_store, vectors
from llama_index_agentic_kb.store.database import Chunk, DocumentDatabase, StoredDocument
from llama_index_agentic_kb.store.directory import DirectoryStore, _checksum
from tests.filter_trees import conditions, trees
from tests.sources.conftest import search
from tests.store.rows import (
    FILTERS,
    MODEL,
    QUERIES,
    ROWS,
    SOURCE,
    TOP_K,
    VECTORS,
    asked,
    found,
    metadata_of,
    nearest,
    put,
    recall,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    with DirectoryStore.open(tmp_path / "store", embed_model=MODEL, create=True) as opened:
        put(opened)
        yield opened


@pytest.fixture
def with_graph(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> DirectoryStore:
    monkeypatch.setattr(database, "EXACT_ROWS", 50)
    with store.writing():
        store.update_graph(SOURCE)
    assert store.graphs.outside(SOURCE) == 0
    return store


@pytest.mark.parametrize("filters", [None, *FILTERS], ids=str)
def test_the_nearest_are_found(with_graph: DirectoryStore, filters: FilterNode | None) -> None:
    """With a graph at least 99 % of them, without one all, in order, as similar as in LlamaIndex's Chroma store."""
    assert recall(with_graph, filters) >= 0.99
    shutil.rmtree(with_graph.path / "graphs")
    with DirectoryStore.open(with_graph.path, embed_model=MODEL) as store:
        assert recall(store, filters) == 1
        query = QUERIES[0]
        best = nearest(query, lambda one: filters is None or matches(filters, one))
        result, _ = store.vectors(SOURCE).filtered_search(asked(query, None if filters is None else lower(filters)))
    assert result.ids == best
    first = VECTORS[int(best[0][1:])]
    far = 1 - float(first @ query / np.linalg.norm(first) / np.linalg.norm(query))
    assert (result.similarities or [])[0] == pytest.approx(math.exp(-far), rel=1e-5)
    assert result.similarities == sorted(result.similarities or [], reverse=True)


def test_rows_far_from_the_query_are_found(with_graph: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too few of the nearest rows match a filter, all that match are compared."""
    monkeypatch.setattr(vectors, "CANDIDATES", 20)
    monkeypatch.setattr(vectors, "MAX_CANDIDATES", 20)
    query = QUERIES[2]
    result, note = with_graph.vectors(SOURCE).filtered_search(asked(query, lower(Condition(key="even", value=True))))
    assert note == "filter matches 300 of 600: too few among the 20 nearest of all: searched exactly"
    assert result.ids == nearest(query, lambda one: bool(one["even"]))
    _, note = with_graph.vectors(SOURCE).filtered_search(asked(query, lower(Condition(key="even", value=True)), 2))
    assert note == "filter matches 300 of 600: taken from the nearest of all"


def test_changes_are_found_at_once(with_graph: DirectoryStore) -> None:
    """Beside a graph that lacks them: what is deleted is never found, what is added is, by another opening too."""
    query = VECTORS[5]
    assert found(with_graph, query)[0] == "n5"
    with DirectoryStore.open(with_graph.path, embed_model=MODEL) as other:
        assert found(other, query)[0] == "n5"
        with_graph.delete_document(SOURCE, "0")
        for one in (with_graph, other):
            ids = found(one, query)
            assert len(ids) == TOP_K
            assert all(int(node_id[1:]) >= 100 for node_id in ids)
        document = StoredDocument(SOURCE, "new", "/o", "/r", "hash", "settings")
        chunk = Chunk("new", 0, "new", {"title": "T", "document_id": "d", "even": True}, "new", None, None)
        with_graph.put_document(document, [(chunk, query)])
        for one in (with_graph, other):
            assert found(one, query)[0] == "new"
            assert found(one, query, Condition(key="even", value=True))[0] == "new"
        assert with_graph.graphs.outside(SOURCE) == 101
        with with_graph.writing():
            with_graph.update_graph(SOURCE)
        for one in (with_graph, other):
            assert found(one, query)[0] == "new"
            assert one.graphs.outside(SOURCE) == 0
    assert len(list((with_graph.path / "graphs").iterdir())) == 1


def damaged(path: Path, how: str) -> None:
    if how == "gone":
        shutil.rmtree(path / "graphs")
    for file in path.glob("graphs/*"):
        if how == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif how == "earlier":  # releases before usearch wrote directories
            file.unlink()
            (file / "index").mkdir(parents=True)
        else:  # among the links of the graph, which lead out of the memory then
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size - 20_000)
                opened.write(b"\xff" * 20_000)


@pytest.mark.parametrize("how", ["gone", "cut", "overwritten", "earlier"])
@pytest.mark.parametrize("remedy", ["auto", "repair"])
def test_a_damaged_graph_costs_no_answer(with_graph: DirectoryStore, how: str, remedy: str) -> None:
    """Searches go on without it; too many rows for that are an error that names the remedy, which restores all."""
    path = with_graph.path
    with_graph.close()
    damaged(path, how)
    with DirectoryStore.open(path, embed_model=MODEL) as store:
        assert recall(store) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vectors, "MAX_ROWS", 100)
            with (
                DirectoryStore.open(path, embed_model=MODEL) as other,
                pytest.raises(StoreDamagedError, match=r"Nothing is lost: run `agentic-kb repair --store"),
            ):
                found(other, QUERIES[0])
        if remedy == "repair":
            report = repair_store(path)
            assert (report.rebuilt, bool(report.fault), report.chunks) == (True, True, ROWS)
            assert not repair_store(path).fault
    with DirectoryStore.open(path, embed_model=MODEL, repair="auto") as store:
        assert recall(store) >= 0.99
        assert store.graphs.outside(SOURCE) == 0


@pytest.mark.parametrize("how", ["gone", "links", "vectors"])
def test_a_graph_that_changed_since_it_was_opened_is_built_anew(with_graph: DirectoryStore, how: str) -> None:
    """An ingestion of the process that has the graph open does not go on from the damaged file."""
    (file,) = (with_graph.path / "graphs").iterdir()
    damage = bytearray(file.read_bytes())
    file.unlink()
    if how != "gone":
        damage[slice(-20_000, None) if how == "links" else slice(200, 15_000)] = b"\xff" * (
            20_000 if how == "links" else 14_800
        )
        file.write_bytes(damage)
    with_graph.delete_document(SOURCE, "0")
    with with_graph.writing():
        with_graph.update_graph(SOURCE)
    assert with_graph.graphs.outside(SOURCE) == 0
    assert len(found(with_graph, VECTORS[550])) == TOP_K
    assert found(with_graph, VECTORS[550])[0] == "n550"


def test_chunks_behind_deleted_ones_are_found(with_graph: DirectoryStore) -> None:
    """Deleted chunks of the graph don't count towards what is asked for, nor may too many be asked for."""
    for first in (0, 100, 200, 300, 400):
        with_graph.delete_document(SOURCE, str(first))
    for top_k in (100, sys.maxsize):
        assert len(found(with_graph, QUERIES[0], top_k=top_k)) == 100
    assert len(found(with_graph, QUERIES[0])) == TOP_K


def test_ids_narrow_a_search(store: DirectoryStore) -> None:
    """Node ids and document ids; a document that is not there gives nothing."""
    assert found(store, QUERIES[0], node_ids=["n3", "n4", "absent"], top_k=5) in (["n3", "n4"], ["n4", "n3"])
    assert found(store, QUERIES[0], doc_ids=["other"]) == []
    assert len(found(store, QUERIES[0], doc_ids=["d"])) == TOP_K
    vectors = store.index(SOURCE).vector_store
    assert {node.node_id for node in vectors.get_nodes(["n3", "n4"])} == {"n3", "n4"}
    assert vectors.get_nodes([]) == []
    assert len(found(store, None, Condition(key="tenth", value=3), top_k=1_000)) == ROWS // 10


def test_all_nodes_of_a_source_are_listed(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and without reading their vectors."""
    monkeypatch.setattr(vectors, "MAX_ROWS", 50)
    monkeypatch.setattr(vectors, "_MAX_PORTION", 70)
    monkeypatch.delattr(DocumentDatabase, "_vectors_of")
    assert len(store.index(SOURCE).vector_store.get_nodes()) == ROWS


@pytest.mark.parametrize(
    "filters",
    [
        MetadataFilters(filters=[]),
        MetadataFilters(filters=[MetadataFilters(filters=[])]),
        MetadataFilters(filters=[MetadataFilter(key="name", value="é", operator=Operator.TEXT_MATCH_INSENSITIVE)]),
        MetadataFilters(filters=[MetadataFilter(key='te"nth', value=1)]),
        MetadataFilters(filters=[MetadataFilter(key="name", value="\0")]),
    ],
)
def test_filters_that_can_not_be_applied_are_denied(store: DirectoryStore, filters: MetadataFilters) -> None:
    """An empty one must not mean "everything"."""
    with pytest.raises((DeniedError, InvalidRequestError)):
        store.vectors(SOURCE).filtered_search(asked(None, filters))


def test_what_can_not_be_searched_is_refused(store: DirectoryStore) -> None:
    """Vectors of another model, other modes, passed deadlines, and writing beside ingestion."""
    search = store.vectors(SOURCE).filtered_search
    with pytest.raises(RetrievalError, match="3 dimensions, those of the store have 16"):
        search(asked([1.0, 2.0, 3.0]))
    with pytest.raises(RetrievalError, match="mode 'default'; found 'mmr'"):
        search(asked(QUERIES[0], mode=VectorStoreQueryMode.MMR))
    with pytest.raises(DeadlineExceededError, match="at its deadline"):
        search(asked(QUERIES[0]), deadline=time.monotonic() - 1)
    vectors = store.index(SOURCE).vector_store
    for change in (lambda: vectors.add([]), lambda: vectors.delete("d")):
        with pytest.raises(ConfigurationError, match=r"ingest\(\) alone"):
            change()
    store.remove_source(SOURCE)
    with pytest.raises(ConfigurationError, match="no source 'rows';"):
        search(asked(QUERIES[0]))


def test_many_threads_search_while_one_writes(with_graph: DirectoryStore) -> None:
    """Every search answers, whatever is built meanwhile; old graphs go when nobody is in them."""
    stop = threading.Event()

    def search(at: int) -> None:
        while not stop.is_set():
            assert len(found(with_graph, QUERIES[at], FILTERS[at % 2])) == TOP_K
            assert len(found(with_graph, QUERIES[at])) == TOP_K

    with ThreadPoolExecutor(4) as threads:
        begun = threads.map(search, range(4))
        for first in (0, 100, 200):
            with with_graph.writing():
                with_graph.delete_document(SOURCE, str(first))
                with_graph.update_graph(SOURCE)
                put(with_graph, first, first + 100)
                with_graph.update_graph(SOURCE)
        stop.set()
        list(begun)


VALUES = st.sampled_from([0, 3, 4.0, 2.5, -1, True, False, "red", "blue", "n4", "", "x'; DROP TABLE chunks; --"])
PLAIN = st.sampled_from(["tenth", "share", "name", "even", "team", "absent", "Tenth", "a.b"])
ODD = PLAIN | st.sampled_from(['q"', "É", "%s ?"])
SQLITE, POSTGRES = (trees(conditions(keys, VALUES), max_leaves=15) for keys in (PLAIN, ODD))


@pytest.fixture(scope="module", params=["directory", pytest.param("postgres", marks=pytest.mark.slow)])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnowledgeStore]:
    directory = request.param == "directory"
    where = tmp_path_factory.mktemp("rows") / "store" if directory else request.getfixturevalue("postgres").url
    with KnowledgeStore.open(where, embed_model=MODEL, create=True) as store:
        put(store)
        yield store
        store.remove_source("rows")


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_filters_hold_in_sql_as_they_do_in_python(rows: KnowledgeStore, data: st.DataObject) -> None:
    """Each row is let through by SQL if and only if it matches the tree."""
    if isinstance(rows, DirectoryStore):
        tree = data.draw(SQLITE)
        passed = set(found(rows, None, tree, top_k=ROWS))
    else:
        tree = data.draw(POSTGRES)
        condition, parameters = rows.dialect.filter(tree)
        passed = {row[0] for row in rows._rows(f"SELECT node_id FROM chunks WHERE {condition}", parameters)}
    assert passed == {f"n{at}" for at in range(ROWS) if matches(tree, metadata_of(at))}


@pytest.mark.parametrize("text", ["contains(name, 'n1')", "isempty(team)", "team ne null", "not contains(name, '9')"])
def test_a_source_over_a_store_takes_every_operator(rows: KnowledgeStore, text: str) -> None:
    """The store's own language says what it lacks, not that of LlamaIndex's filters."""
    tree = parse_odata(text)
    source = KnowledgeSource("rows", index=rows.index("rows"), hybrid=False)
    result = search(source, "row", tree, top_k=ROWS)
    assert {node.node_id for node in result.nodes} == {f"n{at}" for at in range(ROWS) if matches(tree, metadata_of(at))}
    assert result.total("dropped_by_filter") == 0


def test_large_filters(rows: KnowledgeStore) -> None:
    """Values and conditions by the ten thousand, and principals with a thousand groups."""
    many = Condition(key="name", operator="in", value=["n1", *(f"x{at}" for at in range(40_000))])
    assert found(rows, None, many) == ["n1"]
    either = [Condition(key=f"group{at}", value=True) for at in range(1_000)]
    both = FilterGroup(logic="and", filters=[Condition(key="tenth", value=1), Condition(key="name", value="n1")])
    assert found(rows, QUERIES[0], FilterGroup(logic="or", filters=[*either, both])) == ["n1"]
    assert found(rows, None, FilterGroup(logic="or", filters=[*either, Condition(key="name", value="n2")])) == ["n2"]


def test_a_file_does_not_take_the_place_of_a_passed_document(store: DirectoryStore) -> None:
    """A passed document has the empty origin, which is not "nothing"."""
    assert store.put_document(StoredDocument(SOURCE, "a.md", "", "", "h1", "s"), [])
    assert not store.put_document(StoredDocument(SOURCE, "a.md", "/other/a.md", "/other", "h2", "s"), [])


def test_a_repair_says_that_a_graph_is_of_another_release(with_graph: DirectoryStore) -> None:
    """Its checksum is right, and usearch can't read it."""
    path = with_graph.path
    with_graph.close()
    (file,) = path.glob("graphs/*")
    other = file.with_name("other")
    other.write_bytes(file.read_bytes().replace(b"usearch", b"another"))
    with DirectoryStore.open(path, embed_model=MODEL) as store:
        store._put_graph(SOURCE, other.name, 600, _checksum(other))
    file.unlink()
    repaired = repair_store(path)
    assert "another release of usearch" in repaired.fault
    with DirectoryStore.open(path, embed_model=MODEL) as store:
        assert store.graphs.outside(SOURCE) == 0
