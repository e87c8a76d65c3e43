from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import DeniedError, InvalidRequestError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, matches
from llama_index_agentic_kb.schema import FilterOperator as Operator
from llama_index_agentic_kb.sources.filters import FilterLike, flat, lower, to_tree
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.sources.conftest import Found, MakeIndex, search

TEXTS, NUMBERS, FLAGS = ["a", "b", "it's", "ü"], [0, 1, 2], [True, False]
TAGS: list[list[str]] = [["a"], ["a", "b"], []]
ROWS: list[dict[str, Any]] = [
    {**({"text": text} if text else {}), **({"number": number} if number is not None else {}), "flag": flag}
    for text in [*TEXTS[:3], None]
    for number in [*NUMBERS, None]
    for flag in FLAGS
]


def condition(key: str, values: list[Any], *, ordered: bool) -> st.SearchStrategy[Condition]:
    single = [Operator.EQ, Operator.NE, *((Operator.GT, Operator.GE, Operator.LT, Operator.LE) if ordered else ())]
    return st.builds(Condition, key=st.just(key), operator=st.sampled_from(single), value=st.sampled_from(values)) | (
        st.builds(
            Condition,
            key=st.just(key),
            operator=st.sampled_from([Operator.IN, Operator.NIN]),
            value=st.lists(st.sampled_from(values), min_size=1, max_size=3),
        )
    )


CONDITIONS = (
    condition("text", TEXTS, ordered=False)
    | condition("number", NUMBERS, ordered=True)
    | condition("flag", FLAGS, ordered=False)
    | condition("absent", TEXTS, ordered=False)
)
TREES: st.SearchStrategy[FilterNode] = st.recursive(
    CONDITIONS,
    lambda inner: st.builds(
        FilterGroup, logic=st.sampled_from(FilterLogic), filters=st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


TAGGED = [*ROWS, *({"text": "a", "tags": tags} for tags in TAGS), {"tags": "a"}]
ITEMS = st.builds(
    Condition,
    key=st.just("tags"),
    operator=st.just(Operator.ANY),
    value=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2),
) | st.builds(
    Condition,
    key=st.sampled_from(["tags", "text", "absent"]),
    operator=st.just(Operator.EXISTS),
    value=st.just(value=True),
)
TAGGED_TREES: st.SearchStrategy[FilterNode] = st.recursive(
    CONDITIONS | ITEMS,
    lambda inner: st.builds(
        FilterGroup, logic=st.sampled_from(FilterLogic), filters=st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


def rows(metadata: list[dict[str, Any]] = ROWS) -> list[TextNode]:
    return [TextNode(id_=str(n), text="row", metadata=row) for n, row in enumerate(metadata)]


def found(source: KnowledgeSource, tree: FilterNode) -> Found:
    return search(source, "row", tree, top_k=100)


@pytest.fixture(scope="module")
def simple_source() -> KnowledgeSource:
    index = VectorStoreIndex(rows(TAGGED), embed_model=HashEmbedding(dimensions=4))
    return KnowledgeSource("simple", index=index, hybrid=False)


def expected(tree: FilterNode, metadata: list[dict[str, Any]] = ROWS) -> set[str]:
    return {str(n) for n, row in enumerate(metadata) if matches(tree, row)}


@settings(max_examples=50, deadline=None)
@given(TAGGED_TREES)
def test_llamaindexs_own_store_finds_exactly_what_matches(simple_source: KnowledgeSource, tree: FilterNode) -> None:
    """Any tree, negations included, selects the rows for which it holds: none leaks, none is lost, none is dropped."""
    result = found(simple_source, tree)
    assert {node.node_id for node in result.nodes} == expected(tree, TAGGED)
    assert result.total("dropped_by_filter") == 0


def test_chroma_finds_exactly_what_matches(chroma_index: MakeIndex) -> None:
    """The same holds for real Chroma, where the whole tree is pushed down."""
    source = KnowledgeSource("chroma", index=chroma_index(rows(), HashEmbedding(dimensions=4)), hybrid=False)

    @settings(max_examples=50, deadline=None)
    @given(TREES)
    def check(tree: FilterNode) -> None:
        assert {node.node_id for node in found(source, tree).nodes} == expected(tree)

    check()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tags/any(t: t eq 'a')", "Chroma can't filter on items of lists, as 'any' on 'tags' does"),
        ("number eq 1 or (flag and tags/any(t: t eq 'a'))", "Chroma can't filter on items of lists"),
        ("text gt 'a'", "Chroma orders numbers only, not text or dates, as 'gt' on 'text' does"),
        ("text ge 2024-01-31", "keep a number such as 20240131"),
        ("not (text lt 'a')", "as 'ge' on 'text' does"),
        ("text ne null", "no operator for 'exists'"),
        ("not (tags/any(t: t eq 'a'))", "nor for the opposite of 'any'"),
    ],
)
def test_what_chroma_can_not_apply_is_denied(chroma_index: MakeIndex, text: str, why: str) -> None:
    """The search is refused with the reason, whoever asks for the filter; nothing wider is searched, or warmed up."""
    index = chroma_index(rows(), HashEmbedding(dimensions=4))
    tree = to_tree(text)
    assert tree is not None
    with pytest.raises(DeniedError, match=re.escape(why)):
        found(KnowledgeSource("chroma", index=index, hybrid=False), tree)
    mandatory = KnowledgeSource("chroma", index=index, filters=text, hybrid=False)
    with pytest.raises(DeniedError, match=re.escape(why)):
        found(mandatory, Condition(key="number", value=1))
    run(mandatory.warm_up())


@settings(max_examples=100, deadline=None)
@given(TAGGED_TREES, st.sampled_from(TAGGED))
def test_flat_trees_mean_the_same(tree: FilterNode, row: dict[str, Any]) -> None:
    """Without negations a tree lets through what it let through; where all keys are known, nothing else."""
    simple = flat(tree)
    _assert_flat(simple)
    if matches(tree, row):
        assert matches(simple, row) or any(key not in row for key in _keys(tree))
    known = {"text": "a", "number": 1, "flag": True, "absent": "b", "tags": ["a"], **row}
    assert matches(simple, known) == matches(tree, known)


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


def test_negations_are_pushed_down() -> None:
    """De Morgan: few stores know ``not``."""
    tree = FilterGroup(
        logic=FilterLogic.NOT,
        filters=[
            FilterGroup(filters=[Condition(key="a", value=1), Condition(key="b", operator=Operator.GT, value=2)]),
            Condition(key="c", operator=Operator.IN, value=["x"]),
        ],
    )
    assert lower(tree) == MetadataFilters(
        condition=FilterCondition.AND,
        filters=[
            MetadataFilters(
                condition=FilterCondition.OR,
                filters=[
                    MetadataFilter(key="a", value=1, operator=FilterOperator.NE),
                    MetadataFilter(key="b", value=2, operator=FilterOperator.LTE),
                ],
            ),
            MetadataFilter(key="c", value=["x"], operator=FilterOperator.NIN),
        ],
    )


def test_items_of_lists_are_lowered() -> None:
    """One value is ``contains``, several ``any``; their negations, and "not empty", stand under a ``not``."""
    one = Condition(key="tags", operator=Operator.ANY, value=["x"])
    contains = MetadataFilter(key="tags", value="x", operator=FilterOperator.CONTAINS)
    assert lower(one) == MetadataFilters(filters=[contains])
    assert lower(Condition(key="tags", operator=Operator.ANY, value=["x", "y"])) == MetadataFilters(
        filters=[MetadataFilter(key="tags", value=["x", "y"], operator=FilterOperator.ANY)]
    )
    assert lower(FilterGroup(logic=FilterLogic.NOT, filters=[one])) == MetadataFilters(
        filters=[contains], condition=FilterCondition.NOT
    )
    empty = MetadataFilter(key="tags", value=None, operator=FilterOperator.IS_EMPTY)
    assert lower(Condition(key="tags", operator=Operator.EXISTS, value=True)) == MetadataFilters(
        filters=[empty], condition=FilterCondition.NOT
    )


def test_llamaindexs_filters_on_lists_are_read() -> None:
    """``contains`` and ``any`` are ours; ``all`` is one for each value."""
    assert to_tree(MetadataFilter(key="t", value="x", operator=FilterOperator.CONTAINS)) == Condition(
        key="t", operator=Operator.ANY, value=["x"]
    )
    assert to_tree(MetadataFilter(key="t", value=["x", "y"], operator=FilterOperator.ANY)) == Condition(
        key="t", operator=Operator.ANY, value=["x", "y"]
    )
    assert to_tree(MetadataFilter(key="t", value=["x", "y"], operator=FilterOperator.ALL)) == FilterGroup(
        filters=[Condition(key="t", operator=Operator.ANY, value=[value]) for value in ("x", "y")]
    )


def test_text_is_odata() -> None:
    """A string is a filter too, wherever one is taken."""
    assert to_tree("a eq 1") == Condition(key="a", value=1)
    assert KnowledgeSource("s", retriever=MemoryRetriever([]), filters="a eq 'x'").mandatory == Condition(
        key="a", value="x"
    )


def test_groups_of_one_logic_are_one_list() -> None:
    """Mandatory AND (caller AND caller) is a flat list, which every store takes."""
    a, b, c = (Condition(key=key, value=1) for key in "abc")
    lowered = lower(FilterGroup(filters=[a, FilterGroup(filters=[b, FilterGroup(filters=[c])])]))
    assert [one.key for one in lowered.filters if isinstance(one, MetadataFilter)] == ["a", "b", "c"]
    assert lower(a) == MetadataFilters(filters=[MetadataFilter(key="a", value=1)])


def test_values_are_lowered_as_stores_take_them() -> None:
    """Booleans stay booleans, which LlamaIndex's own model refuses; numbers in one list are of one type."""
    (flag,) = lower(Condition(key="public", value=True)).filters
    (numbers,) = lower(Condition(key="year", operator=Operator.IN, value=[0, 1.5])).filters
    assert isinstance(flag, MetadataFilter)
    assert isinstance(numbers, MetadataFilter)
    assert flag.value is True
    assert repr(numbers.value) == "[0.0, 1.5]"


def test_llamaindexs_filters_are_read() -> None:
    """``MetadataFilters`` of any depth, and single filters, become our tree; lowered again they are the same."""
    given_filters = MetadataFilters(
        condition=FilterCondition.OR,
        filters=[
            MetadataFilter(key="a", value=1),
            MetadataFilters(
                filters=[
                    MetadataFilter(key="b", value="x", operator=FilterOperator.NE),
                    MetadataFilter(key="c", value=[1, 2], operator=FilterOperator.IN),
                ]
            ),
        ],
    )
    tree = to_tree(given_filters)
    assert tree is not None
    assert lower(tree) == given_filters
    assert to_tree(MetadataFilter(key="a", value=1)) == Condition(key="a", value=1)
    assert to_tree(None) is None
    assert to_tree(tree) is tree
    negated = to_tree(MetadataFilters(condition=FilterCondition.NOT, filters=[MetadataFilter(key="a", value=1)]))
    assert isinstance(negated, FilterGroup)
    assert negated.logic is FilterLogic.NOT


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
