"""OData text: what is read, what is refused with what words, and that what is written is read back."""

from __future__ import annotations

import re
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
    FilterOperator,
    all_of,
    any_of,
    matcher,
    parse_odata,
    to_odata,
)
from llama_index_agentic_kb.schema.filters import conditions as conditions_of
from llama_index_agentic_kb.schema.odata import MAX_DEPTH, MAX_LENGTH, MAX_TERMS, MAX_VALUES
from tests.filter_trees import conditions, trees

PLAIN_KEYS = ["a", "b", "größe", "address/city", "file name", "not", "a]b", "2024", "in/x", "a/any", "search.in"]
KEYS = st.sampled_from(PLAIN_KEYS) | st.text(min_size=1, max_size=5).filter(
    lambda key: key[0] != "$"
)  # which is refused
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["it's", "''", "a,b", "2024-01-31", "null", "x\ny", "\\"]),
)
TREES = trees(conditions(KEYS, SCALARS))


def condition(key: str, operator: str, value: Any) -> Condition:
    return Condition(key=key, operator=FilterOperator(operator), value=value)


def exists(key: str) -> Condition:
    return Condition(key=key, operator=FilterOperator.EXISTS, value=True)


def negated(tree: FilterNode) -> FilterGroup:
    return FilterGroup(logic=FilterLogic.NOT, filters=[tree])


YES = Condition(key="a", value=True)
A, B, C = (condition(key, "eq", 1) for key in "abc")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a eq 'it''s'", condition("a", "eq", "it's")),
        ("a gt -5", condition("a", "gt", -5)),
        ("a ge +1.5", condition("a", "ge", 1.5)),
        ("a lt 2.5e-3", condition("a", "lt", 0.0025)),
        ("a eq true", YES),
        ("a", YES),
        ("a ge 2024-01-31", condition("a", "ge", "2024-01-31")),
        ("a lt 2024-01-31T12:30:00.5+02:00", condition("a", "lt", "2024-01-31T12:30:00.5+02:00")),
        ("a ne null", exists("a")),
        ("a in (1, 'x',2.5)", condition("a", "in", [1, "x", 2.5])),
        ("search.in(a, 'x,y z')", condition("a", "in", ["x", "y", "z"])),
        ("search.in(a, 'x y,,z', ',')", condition("a", "in", ["x y", "z"])),
        ("search.in (a, 'x|y]z^', '|]')", condition("a", "in", ["x", "y", "z^"])),
        ("t/any()", exists("t")),
        ("contains(a, 'x''y')", condition("a", "text_match", "x'y")),
        ("contains( tolower(a/b) , 'x' )", condition("a/b", "text_match_insensitive", "x")),
        ("isempty([file name])", condition("file name", "is_empty", value=True)),
        ("contains eq 1", condition("contains", "eq", 1)),
        ("t/any(x: x eq 'v')", condition("t", "any", ["v"])),
        ("t/any( x : x eq 1 or x in (2, 3) or (search.in(x, 'p q')))", condition("t", "any", [1, 2, 3, "p", "q"])),
        ("[file name] eq 1", condition("file name", "eq", 1)),
        ("[a]]b] eq 1", condition("a]b", "eq", 1)),
        ("größe eq 1", condition("größe", "eq", 1)),
        ("a eq 1 and b eq 1 or c eq 1", any_of(all_of(A, B) or A, C)),
        ("a eq 1 or b eq 1 and c eq 1", any_of(A, all_of(B, C) or B)),
        ("(a eq 1 or b eq 1) and c eq 1", all_of(any_of(A, B), C)),
        ("not a eq 1 and b eq 1", all_of(negated(A), B)),
        ("not (a eq 1 and b eq 1)", negated(all_of(A, B) or A)),
        (" \n(((a eq 1)))\t", A),
    ],
)
def test_what_is_read(text: str, tree: FilterNode) -> None:
    """Every form of the subset is the tree that it means."""
    assert parse_odata(text) == tree


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("a eq", 5, "the filter ends, expected: a value"),
        ("(a eq 1", 8, "the filter ends, expected: ')'"),
        ("a eq 1)", 7, "found ')', expected: the end"),
        ("a eq acme", 6, "found 'acme', expected: a value ('text', 1, 1.5, true, 2024-01-31)"),
        ("a eq ‘acme’", 6, "text stands in single quotes: 'acme'"),  # noqa: RUF001 (what word processors make of them)
        ("a eq 'it's'", 10, "a quote inside it is doubled: 'it''s'"),
        ("a eq 'x", 6, "a string is closed by a single quote"),
        ("a = 1", 3, "operators are words: eq, ne"),
        ("t/all(x: x ne 1)", 2, "write not field/any(...)"),
        ("search.ismatch('x')", 7, "search.in, contains, tolower and any are the only functions"),
        ("a eq 1 andb eq 2", 8, "found 'andb', expected: and, or, the end"),
        (
            "a eq null",
            6,
            "eq null can't be asked: a filter lets nothing through for what is not known of it; a ne null",
        ),
        ("a eq 1e999", 6, "'1e999' is too large"),
        ("a eq " + "1" * 5_000, 6, "is too large or too long a number"),
        ("a eq .5", 6, "a number has a digit before its point"),
        ("a eq ٣", 6, "found '٣', expected: a value"),
        ("a eq 2024-13-01", 6, "'2024-13-01' is no date"),
        ("a in ()", 7, "found ')', expected: a value"),
        ("a not in (1)", 3, "found 'not', expected: a comparison"),
        ("search.in(a, '')", 14, "search.in takes 1 to 5000 values"),
        ("t/any(x: y eq 1)", 10, "found 'y'; inside any only its variable, 'x', is compared"),
        ("t/any(x: x gt 1)", 12, "inside any only eq, in and search.in are known"),
        ("t/any(x: x eq 1 and x eq 2)", 17, "found 'and', expected: or, ')'"),
        ("t/any(x: not x eq 1)", 10, "found 'not', expected: a field"),
        ("not not a", 5, "found 'not', expected: a field"),
    ],
)
def test_what_is_refused(text: str, place: int, message: str) -> None:
    """An error tells the place, what stands there, what could, and what was probably meant."""
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as raised:
        parse_odata(text)
    assert str(raised.value).startswith(f"OData filter, character {place}: ")
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("text", ["", " \n"])
def test_nothing_is_no_filter(text: str) -> None:
    """An empty text is not "everything"."""
    with pytest.raises(InvalidRequestError, match="it is empty; leave it out to search everything"):
        parse_odata(text)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH, "(" * 50_000, "at most 32 parentheses"),
        (" and ".join(["a"] * MAX_TERMS), " and ".join(["a"] * 10_000), "at most 1000 terms"),
        (f"a in ({','.join(['1'] * (MAX_TERMS - 1))})", f"a in ({','.join(['1'] * 9_000)})", "use search.in for lists"),
        (f"search.in(a, '{'x,' * MAX_VALUES}')", f"search.in(a, '{'x,' * (MAX_VALUES + 1)}')", "1 to 5000 values"),
        (f"a eq '{'x' * (MAX_LENGTH - 7)}'", f"a eq '{'x' * MAX_LENGTH}'", "characters; at most 65536 are read"),
        ("not (" * MAX_DEPTH + "a" + ")" * MAX_DEPTH, "not (" * 9_000, "at most 32 parentheses"),
        ("a eq '" + "''" * 30_000 + "'", "a eq '" + "''" * 30_000, "character 6"),
    ],
    ids=["parentheses", "terms", "list", "search.in", "length", "not", "quotes"],
)
def test_limits(good: str, bad: str, message: str) -> None:
    """Up to each limit a filter is read, and survives being written; beyond it is refused."""
    tree = parse_odata(good)
    assert isinstance(to_odata(tree), str)
    with pytest.raises(InvalidRequestError, match=message):
        parse_odata(bad)


@settings(max_examples=150, deadline=None)
@given(TREES, st.data())
def test_what_is_written_is_read_back(tree: FilterNode, data: st.DataObject) -> None:
    """The tree that is read means the same as the one written, unknowns included, and is written as the same text."""
    text = to_odata(tree)
    again, parts = parse_odata(text), list(conditions_of(tree))
    assert to_odata(again) == text
    values = st.one_of(
        SCALARS,
        st.none(),
        st.lists(SCALARS, max_size=2),
        *(st.just(value) for one in parts for value in (*one.values, one.value)),
    )
    metadata = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys((one.key for one in parts), values)))
    for wanted in (True, False):
        assert matcher(again, wanted=wanted)(metadata) is matcher(tree, wanted=wanted)(metadata)
