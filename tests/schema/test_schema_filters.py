"""The filter tree: what it lets through, and its forms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    all_of,
    any_of,
    matcher,
    matches,
    parse_odata,
)
from tests.filter_trees import conditions, trees

KEYS = st.sampled_from(["a", "b", "c"])
SCALARS = st.one_of(
    st.booleans(), st.integers(-3, 3), st.sampled_from([0.5, 1.0, 2.5]), st.sampled_from(["", "x", "y", "1"])
)
CONDITIONS = conditions(KEYS, SCALARS)
TREES = trees(CONDITIONS)
METADATA = st.dictionaries(KEYS, st.one_of(SCALARS, st.none(), st.lists(SCALARS, max_size=2)))


def group(logic: str, *filters: FilterNode) -> FilterGroup:
    return FilterGroup(logic=FilterLogic(logic), filters=list(filters))


@settings(max_examples=50, deadline=None)
@given(TREES)
def test_a_tree_survives_the_wire(tree: FilterNode) -> None:
    """Parsing what was written gives the same tree, from data and from JSON text."""
    assert type(tree).parse(tree.to_dict()) == tree
    assert type(tree).parse(tree.to_json()) == tree


@settings(max_examples=100, deadline=None)
@given(TREES, TREES, METADATA)
def test_groups_mean_what_their_logic_says(one: FilterNode, other: FilterNode, metadata: dict[str, Any]) -> None:
    """And, or and not hold as they should; more filters only narrow, and where nothing is known nothing passes."""
    first, second = matches(one, metadata), matches(other, metadata)
    joined = all_of(one, None, other)
    assert joined is not None
    assert matches(group("and", one, other), metadata) == matches(joined, metadata) == (first and second)
    assert matches(group("or", one, other), metadata) == matches(any_of(one, other), metadata) == (first or second)
    neither = [matches(group("not", tree), metadata) for tree in (one, other)]
    assert not (first and neither[0])
    assert matches(group("not", one, other), metadata) == all(neither)
    if "is_empty" not in one.to_json():  # the one condition that an absent key meets
        assert not matches(one, {})
        assert not matches(group("not", one), {})


def test_all_of_nothing_is_no_filter() -> None:
    """No filter given is None, and one is itself."""
    only = Condition(key="a", value=1)
    assert all_of() is None
    assert all_of(None, None) is None
    assert all_of(None, only) is only


@pytest.mark.parametrize(
    ("operator", "value", "actual", "holds"),
    [
        ("eq", True, 1, False),
        ("eq", 1, True, False),
        ("ne", True, 1, True),
        ("eq", 1, 1.0, True),
        ("in", [1, "x"], True, False),
        ("nin", ["x"], "y", True),
        ("nin", ["x"], None, False),
        ("ne", "x", None, False),
        ("gt", 1, "2", False),
        ("gt", "1", "2", True),
        ("le", 2, 2.0, True),
        ("gt", 1, ["x"], False),
        ("lt", 1, float("nan"), False),
        ("ge", 1, float("nan"), False),
        ("any", ["x", 1], ["y", "x"], True),
        ("any", ["x"], ("x",), True),
        ("any", [1], [True], False),
        ("any", ["x"], [], False),
        ("any", ["x"], "x", False),
        ("any", ["x"], {"x": 1}, False),
        ("any", ["x"], None, False),
        ("exists", True, "", True),
        ("exists", True, False, True),
        ("exists", True, ["x"], True),
        ("exists", True, [], False),
        ("exists", True, None, False),
        ("ne", "x", ["x"], False),
        ("nin", ["x"], ["x"], False),
        ("is_empty", True, None, True),
        ("is_empty", True, "", True),
        ("is_empty", True, [], True),
        ("is_empty", True, 0, False),
        ("is_empty", True, [""], False),
        ("text_match", "tower", "the tower", True),
        ("text_match", "Tower", "the tower", False),
        ("text_match_insensitive", "Tower", "the TOWER", True),
        ("text_match", "1", 1, False),
        ("text_match", "a", ["a"], False),
        ("text_match", "a", None, False),
    ],
)
def test_comparisons(operator: str, value: Any, actual: Any, holds: bool) -> None:
    """Types that don't compare are false, True is not 1, and an absent value is nothing."""
    assert matches(Condition.parse({"key": "a", "operator": operator, "value": value}), {"a": actual}) is holds


@pytest.mark.parametrize(
    ("operator", "value", "actual", "holds"),
    [
        ("any", ["x"], ["y"], True),
        ("any", ["x"], [], True),
        ("any", ["x"], ["x"], False),
        ("any", ["x"], "y", False),
        ("any", ["x"], None, False),
        ("exists", True, [], True),
        ("exists", True, "x", False),
        ("exists", True, None, False),
        ("eq", "x", ["y"], False),
        ("in", ["x"], ["y"], False),
    ],
)
def test_negations_of_what_is_unknown_stay_unknown(operator: str, value: Any, actual: Any, holds: bool) -> None:
    """A list is known not to hold an item; a value that is no list, or is absent, is known for nothing."""
    negated = group("not", Condition.parse({"key": "a", "operator": operator, "value": value}))
    assert matches(negated, {"a": actual}) is holds


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"key": "a", "operator": "in", "value": "x"}, "filter on 'a': in takes a list"),
        ({"key": "a", "operator": "eq", "value": ["x"]}, "filter on 'a': eq takes a scalar"),
        ({"key": "a", "operator": "in", "value": []}, "filter on 'a': in takes at least one value"),
        ({"key": "a", "operator": "any", "value": "x"}, "filter on 'a': any takes a list"),
        ({"key": "a", "operator": "any", "value": []}, "filter on 'a': any takes at least one value"),
        ({"key": "a", "operator": "exists", "value": False}, "filter on 'a': exists takes true"),
        ({"key": "a", "value": float("inf")}, "filter on 'a': a number must be finite"),
        ({"key": "a", "operator": "in", "value": [1, float("nan")]}, "filter on 'a': a number must be finite"),
        ({"key": "", "value": 1}, "key: "),
        ({"key": "a", "operator": "is_empty", "value": False}, "filter on 'a': is_empty takes true"),
        ({"key": "a", "operator": "text_match", "value": 1}, "filter on 'a': text_match takes text"),
        ({"key": "a", "operator": "text_match", "value": ""}, "filter on 'a': text_match takes text"),
        ({"key": "a", "operator": "like", "value": 1}, "operator: "),
        ({"key": "a"}, "value"),
    ],
)
def test_conditions_that_make_no_sense(data: dict[str, Any], message: str) -> None:
    """A condition is refused with its key, and what its operator takes."""
    with pytest.raises(InvalidRequestError, match=message):
        Condition.parse(data)


def test_an_empty_group_is_refused() -> None:
    """A group of nothing would let everything through."""
    with pytest.raises(InvalidRequestError, match="filters: "):
        FilterGroup.parse({"logic": "and", "filters": []})


@given(st.lists(CONDITIONS, min_size=8, max_size=12), st.sampled_from(["and", "or"]), METADATA)
def test_many_conditions_in_one_group(conditions: list[Condition], logic: str, metadata: dict[str, Any]) -> None:
    """Looking up only the conditions on keys that are there changes nothing, also where the group is negated."""
    pairs: FilterNode = conditions[0]
    for condition in conditions[1:]:
        pairs = group(logic, pairs, condition)
    together = group(logic, *conditions)
    assert matcher(together)(metadata) is matches(pairs, metadata)
    assert matcher(group("not", together))(metadata) is matches(group("not", pairs), metadata)


@pytest.mark.parametrize("key", ["$or", "$and", "$ne", "_node_content", "_node_type"])
def test_a_key_is_a_field(key: str) -> None:
    """What a store would read as an operator, or keeps for itself, is no field, in a tree and in OData text."""
    with pytest.raises(ValueError, match="is no field of a document"):
        Condition(key=key, value="x")
    with pytest.raises(InvalidRequestError):
        parse_odata(f"[{key}] eq 'x'")
