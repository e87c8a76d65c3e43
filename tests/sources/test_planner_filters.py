from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.errors import ConfigurationError, PlanningError
from llama_index_agentic_kb.schema import (
    Condition,
    FilterNode,
    FilterOperator,
    matches,
    parse_odata,
)
from llama_index_agentic_kb.sources import FilterField
from llama_index_agentic_kb.sources.filters import MAX_FILTER, describe_fields, read_planner_filter
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.filter_trees import conditions, trees

KEYS = st.sampled_from(["tenant", "year", "tags"])
VALUES = st.sampled_from([True, 1, 2.5, "acme", "rival"])
TREES = trees(conditions(KEYS, VALUES))
METADATA = st.dictionaries(KEYS, VALUES | st.none() | st.lists(VALUES, max_size=2))

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
@given(TREES, st.none() | TREES, st.none() | TREES, METADATA)
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


@pytest.mark.parametrize(
    "attempt",
    [
        "tenant ne 'acme'",
        "tenant eq 'rival' or tenant eq 'acme'",
        "not (tenant eq 'acme')",
        "year eq 1 or tenant eq 'rival'",
        "tenant ne null",
    ],
)
def test_a_planner_can_not_name_the_mandatory_field(attempt: str) -> None:
    """A field that is not declared is refused; and were it declared, the mandatory filter would still hold."""
    with pytest.raises(PlanningError, match="the field 'tenant'"):
        read_planner_filter(attempt, FIELDS)
    over = source(filters=Condition(key="tenant", value="acme"))
    effective = over.effective_filter(None, parse_odata(attempt))
    assert effective is not None
    assert not matches(effective, {"tenant": "rival", "year": 1})
