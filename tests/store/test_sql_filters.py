"""Filters in SQL mean what they mean in Python, in SQLite and in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.schema import Condition, FilterGroup, matches
from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.store.directory import DirectoryStore
from tests.filter_trees import conditions, trees
from tests.store.rows import MODEL, QUERIES, ROWS, found, metadata_of, put

VALUES = st.sampled_from([0, 3, 4.0, 2.5, -1, True, False, "red", "blue", "n4", "", "x'; DROP TABLE chunks; --"])
PLAIN = st.sampled_from(["tenth", "share", "name", "even", "team", "absent", "Tenth", "a.b"])
ODD = PLAIN | st.sampled_from(['q"', "É", "%s ?"])
SQLITE, POSTGRES = (trees(conditions(keys, VALUES), max_leaves=15) for keys in (PLAIN, ODD))


@pytest.fixture(scope="module", params=["directory", pytest.param("postgres", marks=pytest.mark.slow)])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnowledgeStore]:
    """Each kind of store, with rows."""
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
        condition, parameters = rows.documents.dialect.filter(tree)
        passed = {row[0] for row in rows.documents.rows(f"SELECT node_id FROM chunks WHERE {condition}", parameters)}
    assert passed == {f"n{at}" for at in range(ROWS) if matches(tree, metadata_of(at))}


def test_large_filters(rows: KnowledgeStore) -> None:
    """Values and conditions by the ten thousand, and principals with a thousand groups."""
    many = Condition(key="name", operator="in", value=["n1", *(f"x{at}" for at in range(40_000))])
    assert found(rows, None, many) == ["n1"]
    either = [Condition(key=f"group{at}", value=True) for at in range(1_000)]
    both = FilterGroup(logic="and", filters=[Condition(key="tenth", value=1), Condition(key="name", value="n1")])
    assert found(rows, QUERIES[0], FilterGroup(logic="or", filters=[*either, both])) == ["n1"]
    assert found(rows, None, FilterGroup(logic="or", filters=[*either, Condition(key="name", value="n2")])) == ["n2"]
