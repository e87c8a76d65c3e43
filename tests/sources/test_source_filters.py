"""Filters of callers and of planners: how they are read, lowered and joined, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import FilterCondition, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores import FilterOperator as StoreOperator

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import ConfigurationError, DeniedError, InvalidRequestError, PlanningError
from llama_index_agentic_kb.schema import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    FilterOperator,
    matches,
    parse_odata,
)
from llama_index_agentic_kb.search import filters as search_filters
from llama_index_agentic_kb.search.filters import FilterLike, lower, to_tree
from llama_index_agentic_kb.sources import FilterField
from llama_index_agentic_kb.sources.filters import MAX_FILTER, describe_fields, read_planner_filter
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.filter_trees import conditions, trees
from tests.sources.conftest import MakeIndex, search

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


def test_filters_are_read() -> None:
    """LlamaIndex's of any depth, single ones and OData text become our tree; lowered again they are the same."""
    inner = [
        MetadataFilter(key="b", value="x", operator=StoreOperator.NE),
        MetadataFilter(key="c", value=[1, 2], operator=StoreOperator.IN),
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
    item, other = (Condition(key="t", operator=FilterOperator.ANY, value=[value]) for value in "xy")
    assert to_tree(MetadataFilter(key="t", value="x", operator=StoreOperator.CONTAINS)) == item
    both = MetadataFilter(key="t", value=["x", "y"], operator=StoreOperator.ALL)
    assert to_tree(both) == FilterGroup(filters=[item, other])
    source = KnowledgeSource("s", retriever=MemoryRetriever([]), filters="a eq 1")
    assert source.mandatory == one


CHANGES: dict[str, Callable[[Any], object]] = {
    "a part is added": lambda made: made.filters.append(MetadataFilter(key="d", value=1)),
    "an inner part is added": lambda made: made.filters[1].filters.append(MetadataFilter(key="d", value=1)),
    "a listed value is removed": lambda made: made.filters[1].filters[0].value.pop(),
    "an operator is another": lambda made: setattr(made.filters[0], "operator", StoreOperator.GT),
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
        (MetadataFilter(key="a", value=3, operator=StoreOperator.TEXT_MATCH), "text_match takes text"),
        (MetadataFilter(key="a", value=None, operator=StoreOperator.CONTAINS), "'a'"),
        (MetadataFilter(key="a", value=[], operator=StoreOperator.ALL), "at least one value"),
        ("a eq", "OData filter, character 5"),
        ("", "OData filter: it is empty"),
        (MetadataFilter(key="a", value=[], operator=StoreOperator.IN), "at least one value"),
        (MetadataFilter(key="a", value="x", operator=StoreOperator.IN), "takes a list"),
        (MetadataFilter(key="a", value=["x"], operator=StoreOperator.EQ), "takes a scalar"),
        (MetadataFilter(key="", value="x"), "key"),
        ({"a": 1}, "expected MetadataFilters, OData text or a filter tree, got dict"),
    ],
    ids=str,
)
def test_what_can_not_be_checked_is_refused(bad: FilterLike, message: str) -> None:
    """A filter that is empty, or can't be evaluated on returned nodes, is an error and never a wider search."""
    with pytest.raises(InvalidRequestError, match=message):
        to_tree(bad)


# -- planners' filters ------------------------------------------------------------------------------------------------

ANY_KEYS = st.sampled_from(["tenant", "year", "tags"])
ANY_VALUES = st.sampled_from([True, 1, 2.5, "acme", "rival"])
ANY_TREES = trees(conditions(ANY_KEYS, ANY_VALUES))
METADATA = st.dictionaries(ANY_KEYS, ANY_VALUES | st.none() | st.lists(ANY_VALUES, max_size=2))

FIELDS = {
    "genre": FilterField("string", "What kind of film\nit is", values=["drama", "comedy", "it's"]),
    "year": FilterField("integer", "Year of release"),
    "rating": FilterField("number", operators=["ge", FilterOperator.LT]),
    "colour": FilterField("boolean"),
    "released": FilterField("date", "Day of release"),
    "tags": FilterField("string", values=["war", "sea"], operators=("any",)),
    "level": FilterField("integer", values=[1, 2, 3]),
    "running time": FilterField("integer", operators=["le"]),
}


def source(fields: dict[str, FilterField] | None = None, **kwargs: Any) -> KnowledgeSource:
    return KnowledgeSource("films", retriever=MemoryRetriever([]), filterable=fields, **kwargs)


@pytest.mark.parametrize(
    "text",
    [
        "genre eq 'drama' and year ge 1969",
        "not (genre in ('drama', 'it''s')) or colour eq false",
        "rating ge 7 and rating lt 8.5",
        "released ge 1969-07-20 and released lt '1970-01-01'",
        "tags/any(t: t eq 'war' or t eq 'sea')",
        "not (tags/any(t: t eq 'war'))",
        "search.in(genre, 'drama,comedy')",
        "level ne 2",
        "[running time] le 90",
    ],
)
def test_declared_fields_may_be_filtered_on(text: str) -> None:
    """A filter of declared fields, operators and values is read as it stands."""
    assert read_planner_filter(text, FIELDS) == parse_odata(text)


@pytest.mark.parametrize(
    ("given_filter", "reason"),
    [
        ("tenant eq 'acme'", "the field 'tenant' can't be filtered on; declared are: genre, year, rating"),
        ("genre eq 'horror'", "'horror' is no value of 'genre'; declared are: 'drama', 'comedy', 'it''s'"),
        ("genre eq 'Drama'", "'Drama' is no value of 'genre'"),
        ("genre in ('drama', 'horror')", "'horror' is no value"),
        ("tags/any(t: t eq 'love')", "'love' is no value of 'tags'"),
        ("genre/any(t: t eq 'drama')", "'any' can't be used on 'genre'; declared are: eq, ne, in, nin"),
        ("rating le 7", "'le' can't be used on 'rating'; declared are: ge, lt"),
        ("not (rating lt 7)", None),
        ("not (rating gt 7)", "'le' can't be used on 'rating'"),
        ("tags eq 'war'", "'eq' can't be used on 'tags'; declared are: any"),
        ("year eq '1969'", "'1969' is no integer, as values of 'year' are"),
        ("year eq true", "True is no integer"),
        ("rating ge '7'", "'7' is no number"),
        ("colour eq 1", "1 is no boolean"),
        ("released ge 'last year'", "'last year' is no date"),
        ("genre = 'drama'", "OData filter, character 7: found '='"),
        ("year eq 1" + " or year eq 1" * 200, f"the filter has 2609 characters; at most {MAX_FILTER}"),
    ],
)
def test_what_is_not_declared_is_refused(given_filter: str, reason: str | None) -> None:
    """The reason names the field, the operator or the value, and what is declared."""
    if reason is None:
        assert read_planner_filter(given_filter, FIELDS) == parse_odata(given_filter)
        return
    with pytest.raises(PlanningError, match=re.escape(reason)):
        read_planner_filter(given_filter, FIELDS)


def test_fields_are_described_as_they_are_written() -> None:
    """The planner reads each field as it stands in a filter, with operators, type, meaning and values, a line each."""
    many = FilterField("integer", values=range(100))
    lines = describe_fields({**FIELDS, "many": many}).splitlines()
    assert lines[0] == ("- genre eq|ne|in (string: What kind of film it is; values: 'drama', 'comedy', 'it''s')")
    assert lines[1] == "- year eq|ne|gt|ge|lt|le|in (integer: Year of release)"
    assert lines[2] == "- rating ge|lt (number)"
    assert lines[5] == "- tags/any(x: x eq '...') (string; values: 'war', 'sea')"
    assert lines[7] == "- [running time] le (integer)"
    assert lines[8].endswith("28, 29 and 70 more)")
    assert describe_fields(source().filterable) == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FilterField("text"), "type 'text' is unknown; known are string, integer"),  # type: ignore[arg-type]
        (lambda: FilterField("integer", values=["1"]), "'1' is no integer"),
        (lambda: FilterField("boolean", values=[1]), "1 is no boolean"),
        (lambda: FilterField("string", values=[]), "at least one value"),
        (lambda: FilterField("string", values="drama"), "values is a list"),
        (lambda: FilterField("string", operators=["gt"]), "operators of a string are some of eq, ne, in, nin, any"),
        (lambda: FilterField("integer", operators="eq"), "operators of a integer are some of"),
        (lambda: source({"": FilterField("string")}), "'' is no name of a metadata field"),
        (lambda: source({"a": "string"}), r"filterable\['a'\]: expected FilterField, got str"),  # type: ignore[dict-item]
    ],
)
def test_declarations_that_make_no_sense(make: Any, message: str) -> None:
    """A wrong declaration is told when it is made."""
    with pytest.raises(ConfigurationError, match=message):
        make()


@settings(max_examples=200, deadline=None)
@given(ANY_TREES, st.none() | ANY_TREES, st.none() | ANY_TREES, METADATA)
def test_no_caller_and_no_planner_widens_the_mandatory_filter(
    mandatory: FilterNode, caller: FilterNode | None, planner: FilterNode | None, metadata: dict[str, Any]
) -> None:
    """What passes the effective filter passes each of its parts; a planner's filter only takes away."""
    over = source(filters=mandatory)
    effective = over.effective_filter(caller, planner)
    assert effective is not None
    passes = matches(effective, metadata)
    parts = [part for part in (mandatory, caller, planner) if part is not None]
    assert passes == all(matches(part, metadata) for part in parts)
    without = over.effective_filter(caller)
    assert without is not None
    assert not passes or matches(without, metadata)
