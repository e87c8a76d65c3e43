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
    assert (all_of(), all_of(None), all_of(None, one)) == (None, None, one)
    assert matches(group("and", one, other), metadata) == matches(joined, metadata) == (first and second)
    assert matches(group("or", one, other), metadata) == matches(any_of(one, other), metadata) == (first or second)
    neither = [matches(group("not", tree), metadata) for tree in (one, other)]
    assert not (first and neither[0])
    assert matches(group("not", one, other), metadata) == all(neither)
    if "is_empty" not in one.to_json():  # the one condition that an absent key meets
        assert not matches(one, {})
        assert not matches(group("not", one), {})


COMPARED: dict[str, list[tuple[Any, Any, bool]]] = {
    "eq": [(True, 1, False), (1, True, False), (1, 1.0, True)],
    "ne": [(True, 1, True), ("x", None, False), ("x", ["x"], False)],
    "in": [([1, "x"], True, False)],
    "nin": [(["x"], "y", True), (["x"], None, False), (["x"], ["x"], False)],
    "gt": [(0, True, False), (1, "2", False), ("1", "2", True), (1, ["x"], False)],
    "lt": [(1, float("nan"), False)],
    "any": [
        (["x", 1], ["y", "x"], True),
        ([1], [True], False),
        (["x"], [], False),
        (["x"], "x", False),
        (["x"], None, False),
    ],
    "exists": [(True, "", True), (True, False, True), (True, [], False), (True, None, False)],
    "is_empty": [(True, None, True), (True, "", True), (True, [], True), (True, 0, False)],
    "text_match": [("tower", "the tower", True), ("Tower", "the tower", False), ("1", 1, False), ("a", ["a"], False)],
    "text_match_insensitive": [("Tower", "the TOWER", True)],
    "not any": [
        (["x"], ["y"], True),
        (["x"], [], True),
        (["x"], ["x"], False),
        (["x"], "y", False),
        (["x"], None, False),
    ],
    "not exists": [(True, [], True), (True, "x", False), (True, None, False)],
    "not eq": [("x", ["y"], False)],
    "not in": [(["x"], ["y"], False)],
}


@pytest.mark.parametrize("operator", COMPARED)
def test_comparisons(operator: str) -> None:
    """Types that don't compare are false, True is not 1, and an absent value is nothing, negated too.

    A list is known not to hold an item; a value that is no list, or is absent, is known for nothing.
    """
    for value, actual, holds in COMPARED[operator]:
        plain = Condition.parse({"key": "a", "operator": operator.removeprefix("not "), "value": value})
        tree = group("not", plain) if operator.startswith("not ") else plain
        assert matches(tree, {"a": actual}) is holds, (value, actual)


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
        ({"key": "a", "operator": "gt", "value": True}, "filter on 'a': gt takes a number or text"),
        ({"key": "a", "operator": "like", "value": 1}, "operator: "),
        ({"key": "a"}, "value"),
        ({"logic": "and", "filters": []}, "filters: "),
    ],
)
def test_conditions_that_make_no_sense(data: dict[str, Any], message: str) -> None:
    """A condition is refused with its key, and what its operator takes; a group of nothing would let all through."""
    with pytest.raises(InvalidRequestError, match=message):
        (FilterGroup if "filters" in data else Condition).parse(data)


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


def test_parts_of_a_group_are_checked() -> None:
    """Their JSON form is read, alone and among others; what is no filter, such as an empty one, is refused."""
    one, other = Condition(key="a", value=1), Condition(key="b", value=2)
    given: Any = other.to_dict()
    assert all_of(one, given) == all_of(one, other)
    assert all_of(given) == other
    bad: Any
    for bad in ("a eq 1", {}, {"key": "a"}, 5, []):
        with pytest.raises(InvalidRequestError, match="filters"):
            all_of(one, bad)
