"""Dense search in a source: exact, with a graph, under filters; and graphs that are stale or damaged."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import FilterOperator as Operator
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters, VectorStoreQueryMode

from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    DeniedError,
    InvalidRequestError,
    RetrievalError,
    StoreDamagedError,
)
from llama_index_agentic_kb.schema import Condition, FilterNode, matches
from llama_index_agentic_kb.search.filters import lower
from llama_index_agentic_kb.store import chroma, repair_store, vectors
from llama_index_agentic_kb.store.database import Chunk, DocumentDatabase, StoredDocument
from llama_index_agentic_kb.store.directory import DirectoryStore
from tests.store.rows import MODEL, QUERIES, ROWS, SOURCE, TOP_K, VECTORS, asked, found, nearest, put, recall


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chroma, "EXACT_ROWS", 50)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    with DirectoryStore.open(tmp_path / "store", embed_model=MODEL, create=True) as opened:
        put(opened)
        yield opened


@pytest.fixture
def with_graph(store: DirectoryStore, small_limits: None) -> DirectoryStore:
    with store.writing():
        store.update_graph(SOURCE)
    assert store.outside_graph(SOURCE) == 0
    return store


FILTERS = [
    Condition(key="tenth", value=3),
    Condition(key="even", value=True),
    Condition(key="team", operator="ne", value="red"),
    Condition(key="share", operator="gt", value=100),
    Condition(key="name", operator="in", value=["n1", "n2", "n599"]),
]


@pytest.mark.parametrize("filters", [None, *FILTERS], ids=str)
def test_the_nearest_are_found(with_graph: DirectoryStore, filters: FilterNode | None) -> None:
    """With a graph at least 99 % of them, without one all, in order, with the similarities of Chroma's own store."""
    assert recall(with_graph, filters) >= 0.99
    shutil.rmtree(with_graph.path / "graphs")
    with DirectoryStore.open(with_graph.path, embed_model=MODEL) as store:
        assert recall(store, filters) == 1
        query = QUERIES[0]
        best = nearest(query, lambda one: filters is None or matches(filters, one))
        result, _ = store.vectors(SOURCE).search(asked(query, None if filters is None else lower(filters)))
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
    result, note = with_graph.vectors(SOURCE).search(asked(query, lower(Condition(key="even", value=True))))
    assert note == "filter matches 300 of 600: too few among the 20 nearest of all: searched exactly"
    assert result.ids == nearest(query, lambda one: bool(one["even"]))
    _, note = with_graph.vectors(SOURCE).search(asked(query, lower(Condition(key="even", value=True)), 2))
    assert note == "filter matches 300 of 600: taken from the nearest of all"


def test_changes_are_found_at_once(with_graph: DirectoryStore) -> None:
    """Beside a graph that lacks them: what is deleted is never found, what is added is, by another opening too."""
    query = VECTORS[5]
    assert found(with_graph, query)[0] == "n5"
    with DirectoryStore.open(with_graph.path, embed_model=MODEL) as other:
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
        if how != "overwritten" or remedy == "repair":  # a file of the right size is only seen to be damaged in use
            assert store.outside_graph(SOURCE) == 0


def test_ids_narrow_a_search(store: DirectoryStore) -> None:
    """Node ids and document ids, which Chroma ignores; a document that is not there gives nothing."""
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
    monkeypatch.delattr(DocumentDatabase, "vectors")
    assert len(store.index(SOURCE).vector_store.get_nodes()) == ROWS


def test_nodes_that_fail_the_check_take_no_places(store: DirectoryStore) -> None:
    """Others come in their places."""
    filters = lower(Condition(key="even", value=True))

    def passes(node: BaseNode) -> bool:
        return bool(node.metadata["tenth"] == 4)

    result, _ = store.vectors(SOURCE).search(asked(QUERIES[0], filters), passes)
    assert result.ids == nearest(QUERIES[0], lambda one: one["tenth"] == 4)
    assert store.vectors(SOURCE).search(asked(QUERIES[0], filters), lambda _: False)[0].ids == []


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
        store.vectors(SOURCE).search(asked(None, filters))


def test_what_can_not_be_searched_is_refused(store: DirectoryStore) -> None:
    """Vectors of another model, other modes, passed deadlines, and writing beside ingestion."""
    search = store.vectors(SOURCE).search
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
    with pytest.raises(ConfigurationError, match="no source 'rows' any more"):
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
                with_graph.documents.delete_document(SOURCE, str(first))
                with_graph.update_graph(SOURCE)
                put(with_graph, first, first + 100)
                with_graph.update_graph(SOURCE)
        stop.set()
        list(begun)
