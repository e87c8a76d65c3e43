from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import DeniedError, InvalidRequestError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, matches
from llama_index_agentic_kb.schema import FilterOperator as Operator
from llama_index_agentic_kb.schema.filters import flat
from llama_index_agentic_kb.search import filters as search_filters
from llama_index_agentic_kb.search.filters import FilterLike, lower, to_tree
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.filter_trees import conditions, trees
from tests.sources.conftest import MakeIndex, search

KEYS = st.sampled_from(["text", "number", "flag", "tags", "absent"])
VALUES = st.sampled_from(["a", "b", "it's", "ü", 0, 1, 2, True, False])
TREES = trees(conditions(KEYS, VALUES).filter(lambda one: one.operator[:2] not in ("te", "is")))
KNOWN: dict[str, Any] = {"text": "a", "number": 1, "flag": True, "absent": "b", "tags": ["a"]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "tags/any(t: t eq 'a')",
            "'any' on 'tags': Chroma has no such operator for metadata; keep a key for each item",
        ),
        ("number eq 1 or (flag and tags/any(t: t eq 'a'))", "'any' on 'tags': Chroma has no such operator"),
        ("text gt 'a'", "'gt' on 'text': Chroma orders numbers only, not text or dates"),
        ("text ge 2024-01-31", "keep a number such as 20240131"),
        ("not (text lt 'a')", "'ge' on 'text': Chroma"),
        ("text ne null", "Chroma has no 'exists'"),
        ("not (tags/any(t: t eq 'a'))", "nor the opposite of 'any'"),
    ],
)
def test_what_chroma_can_not_apply_is_denied(chroma_index: MakeIndex, text: str, why: str) -> None:
    """The search is refused with the reason, whoever asks for the filter; nothing wider is searched, or warmed up."""
    index = chroma_index([TextNode(text="row", metadata=KNOWN | {"tags": "a"})], HashEmbedding(dimensions=4))
    for mandatory, caller in ((None, to_tree(text)), (text, Condition(key="number", value=1))):
        source = KnowledgeSource("chroma", index=index, filters=mandatory, hybrid=False)
        with pytest.raises(DeniedError, match=re.escape(why)):
            search(source, "row", caller)
        run(source.warm_up())


@settings(max_examples=100, deadline=None)
@given(TREES, st.sampled_from([{"text": "a"}, {"tags": ["a", "b"]}, {"tags": []}, {"tags": "a"}, {"number": 1}]))
def test_flat_trees_mean_the_same(tree: FilterNode, row: dict[str, Any]) -> None:
    """Without negations a tree lets through what it let through; where all keys are known, nothing else."""
    simple = flat(tree)
    _assert_flat(simple)
    if matches(tree, row):
        assert matches(simple, row) or any(key not in row for key in _keys(tree))
    assert matches(simple, KNOWN | row) == matches(tree, KNOWN | row)


def _keys(tree: FilterNode) -> set[str]:
    if isinstance(tree, Condition):
        return {tree.key}
    return {key for child in tree.filters for key in _keys(child)}


def _assert_flat(tree: FilterNode) -> None:
    if isinstance(tree, Condition):
        return
    if tree.logic is FilterLogic.NOT:
        (only,) = tree.filters
        assert isinstance(only, Condition)
        assert only.operator in (Operator.ANY, Operator.EXISTS)
        return
    assert len(tree.filters) > 1
    for child in tree.filters:
        assert not (isinstance(child, FilterGroup) and child.logic is tree.logic)
        _assert_flat(child)


def test_filters_are_read() -> None:
    """LlamaIndex's of any depth, single ones and OData text become our tree; lowered again they are the same."""
    inner = [
        MetadataFilter(key="b", value="x", operator=FilterOperator.NE),
        MetadataFilter(key="c", value=[1, 2], operator=FilterOperator.IN),
    ]
    filters = [MetadataFilter(key="a", value=1), MetadataFilters(filters=inner)]
    given_filters = MetadataFilters(condition=FilterCondition.OR, filters=filters)
    tree = to_tree(given_filters)
    assert tree is not None
    assert lower(tree).model_dump() == given_filters.model_dump()
    assert to_tree(lower(tree)) is tree
    assert to_tree(None) is None
    assert to_tree(tree) is tree
    one = Condition(key="a", value=1)
    assert to_tree(MetadataFilter(key="a", value=1)) == to_tree("a eq 1") == one
    negated = MetadataFilters(condition=FilterCondition.NOT, filters=[MetadataFilter(key="a", value=1)])
    assert to_tree(negated) == FilterGroup(logic=FilterLogic.NOT, filters=[one])
    item, other = (Condition(key="t", operator=Operator.ANY, value=[value]) for value in "xy")
    assert to_tree(MetadataFilter(key="t", value="x", operator=FilterOperator.CONTAINS)) == item
    both = MetadataFilter(key="t", value=["x", "y"], operator=FilterOperator.ALL)
    assert to_tree(both) == FilterGroup(filters=[item, other])
    source = KnowledgeSource("s", retriever=MemoryRetriever([]), filters="a eq 1")
    assert source.mandatory == one


CHANGES: dict[str, Callable[[Any], object]] = {
    "a part is added": lambda made: made.filters.append(MetadataFilter(key="d", value=1)),
    "an inner part is added": lambda made: made.filters[1].filters.append(MetadataFilter(key="d", value=1)),
    "a listed value is removed": lambda made: made.filters[1].filters[0].value.pop(),
    "an operator is another": lambda made: setattr(made.filters[0], "operator", FilterOperator.GT),
    "and is or": lambda made: setattr(made, "condition", FilterCondition.OR),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_in_a_lowered_filter_holds(
    change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lowered filter is its tree, which is not lowered again to see it, until somebody changes it at any depth."""
    tree = to_tree("a eq 1 and (search.in(b, 'x,y') or c eq 2)")
    assert tree is not None
    made = lower(tree)
    monkeypatch.setattr(search_filters, "lower", None)
    assert to_tree(made) is tree
    change(made)
    assert to_tree(made) == to_tree(MetadataFilters.model_construct(**dict(made))) != tree


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (MetadataFilters(filters=[]), r"filters=\[\]\) is no filter; pass None"),
        (MetadataFilters(filters=[MetadataFilters(filters=[])]), "is no filter"),
        (MetadataFilter(key="a", value=3, operator=FilterOperator.TEXT_MATCH), "text_match takes text"),
        (MetadataFilter(key="a", value=None, operator=FilterOperator.CONTAINS), "'a'"),
        (MetadataFilter(key="a", value=[], operator=FilterOperator.ALL), "at least one value"),
        ("a eq", "OData filter, character 5"),
        ("", "OData filter: it is empty"),
        (MetadataFilter(key="a", value=[], operator=FilterOperator.IN), "at least one value"),
        (MetadataFilter(key="a", value="x", operator=FilterOperator.IN), "takes a list"),
        (MetadataFilter(key="a", value=["x"], operator=FilterOperator.EQ), "takes a scalar"),
        (MetadataFilter(key="", value="x"), "key"),
        ({"a": 1}, "expected MetadataFilters, OData text or a filter tree, got dict"),
    ],
    ids=str,
)
def test_what_can_not_be_checked_is_refused(bad: FilterLike, message: str) -> None:
    """A filter that is empty, or can't be evaluated on returned nodes, is an error and never a wider search."""
    with pytest.raises(InvalidRequestError, match=message):
        to_tree(bad)
