"""Generated filter trees."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode


def conditions(keys: st.SearchStrategy[str], scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Condition]:
    orders, lists = st.sampled_from(["gt", "ge", "lt", "le"]), st.sampled_from(["in", "nin", "any"])
    return st.one_of(
        st.builds(Condition, key=keys, operator=st.sampled_from(["eq", "ne"]), value=scalars),
        st.builds(Condition, key=keys, operator=orders, value=scalars.filter(lambda one: not isinstance(one, bool))),
        st.builds(Condition, key=keys, operator=lists, value=st.lists(scalars, min_size=1, max_size=3)),
        st.builds(Condition, key=keys, operator=st.sampled_from(["exists", "is_empty"]), value=st.just(value=True)),
        st.builds(
            Condition,
            key=keys,
            operator=st.sampled_from(["text_match", "text_match_insensitive"]),
            value=scalars.filter(lambda value: isinstance(value, str) and value),
        ),
    )


def trees(leaves: st.SearchStrategy[Condition], max_leaves: int = 6) -> st.SearchStrategy[FilterNode]:
    """Return conditions and groups of them, of every logic."""
    made: st.SearchStrategy[FilterNode] = st.recursive(
        leaves,
        lambda inner: st.builds(
            FilterGroup, logic=st.sampled_from(FilterLogic), filters=st.lists(inner, min_size=1, max_size=3)
        ),
        max_leaves=max_leaves,
    )
    return made
