"""Filters in SQL mean what they mean in Python, in SQLite and in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.schema import Condition, FilterGroup, matches, parse_odata
from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.store.directory import DirectoryStore
from tests.filter_trees import conditions, trees
from tests.sources.conftest import search
from tests.store.rows import MODEL, QUERIES, ROWS, found, metadata_of, put

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
        condition, parameters = rows.documents.dialect.filter(tree)
        passed = {row[0] for row in rows.documents.rows(f"SELECT node_id FROM chunks WHERE {condition}", parameters)}
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
