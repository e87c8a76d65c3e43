from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.store import where as where_module
from llama_index_agentic_kb.store.where import Where, chroma_where, fits, matching_ids

VALUES = st.integers(0, 5)
KEYS = st.sampled_from(["a", "b"])


def _filter(key: str, name: str, value: Any) -> MetadataFilter:
    return MetadataFilter.model_construct(key=key, operator=FilterOperator(name), value=value)


def _group(filters: list[Any], condition: FilterCondition) -> MetadataFilters:
    return MetadataFilters(filters=filters, condition=condition)


CONDITIONS = st.builds(_filter, KEYS, st.sampled_from(["==", "!=", ">", "<="]), VALUES) | st.builds(
    _filter, KEYS, st.sampled_from(["in", "nin"]), st.lists(VALUES, min_size=1, max_size=6)
)
TREES = st.recursive(
    CONDITIONS,
    lambda children: st.builds(
        _group, st.lists(children, min_size=1, max_size=5), st.sampled_from([FilterCondition.AND, FilterCondition.OR])
    ),
    max_leaves=12,
)
ROWS = {f"{a}{b}": {key: value for key, value in (("a", a), ("b", b)) if value} for a in range(6) for b in range(6)}
"""Rows where the value 0 stands for no key at all."""


_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$lte": operator.le,
    "$in": lambda value, wanted: value in wanted,
    "$nin": lambda value, wanted: value not in wanted,
}


def _holds(where: Where, row: dict[str, int]) -> bool:
    """Evaluate as Chroma does: an absent key passes ``$ne`` and ``$nin`` and nothing else."""
    key, inner = next(iter(where.items()))
    if key in ("$and", "$or"):
        return (all if key == "$and" else any)(_holds(part, row) for part in inner)
    name, wanted = next(iter(inner.items()))
    if key not in row:
        return name in ("$ne", "$nin")
    return bool(_COMPARED[name](row[key], wanted))


def _as_it_is(one: MetadataFilter | MetadataFilters) -> Where:
    """Give the filter with nothing put together, as LlamaIndex's store does."""
    if isinstance(one, MetadataFilters):
        return {f"${one.condition.value}": [_as_it_is(child) for child in one.filters]}  # type: ignore[union-attr]
    return {one.key: {where_module._OPERATORS[one.operator]: one.value}}


@settings(max_examples=80, deadline=None)
@given(tree=TREES, conditions=st.integers(1, 4), values=st.integers(1, 6))
def test_filters_put_together_and_taken_apart_match_the_same_rows(tree: Any, conditions: int, values: int) -> None:
    """Lists made of equalities, and requests made of parts, change no filter's meaning, and each request fits."""
    filters = tree if isinstance(tree, MetadataFilters) else MetadataFilters(filters=[tree])

    def get(where: Where) -> list[str]:
        assert fits(where)
        return [name for name, row in ROWS.items() if _holds(where, row)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where_module, "MAX_CONDITIONS", conditions)
        patch.setattr(where_module, "MAX_VALUES", values)
        found = matching_ids(get, chroma_where(filters), None)
    assert len(found) == len(set(found))
    assert set(found) == {name for name, row in ROWS.items() if _holds(_as_it_is(filters), row)}


def test_equalities_on_one_key_become_one_list() -> None:
    """A thousand conditions become one, which costs Chroma a thousandth; types stay apart."""
    either = _group([_filter("a", "==", at) for at in range(1000)], FilterCondition.OR)
    assert chroma_where(either) == {"a": {"$in": list(range(1000))}}
    neither = _group([_filter("a", "!=", 1), _filter("b", ">", 2), _filter("a", "nin", [2, 3])], FilterCondition.AND)
    assert chroma_where(neither) == {"$and": [{"a": {"$nin": [1, 2, 3]}}, {"b": {"$gt": 2}}]}
    mixed = _group([_filter("a", "==", 1), _filter("a", "==", True), _filter("a", "==", "x")], FilterCondition.OR)  # noqa: FBT003
    assert chroma_where(mixed) == {"$or": [{"a": {"$eq": 1}}, {"a": {"$eq": True}}, {"a": {"$eq": "x"}}]}


def test_what_chroma_has_no_word_for_is_denied() -> None:
    """Never sent as something else, never left out."""
    with pytest.raises(DeniedError, match="no operator 'contains'"):
        chroma_where(MetadataFilters(filters=[_filter("a", "contains", "x")]))
    with pytest.raises(DeniedError, match="no 'not'"):
        chroma_where(_group([_filter("a", "==", 1)], FilterCondition.NOT))
