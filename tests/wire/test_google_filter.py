"""Google's filter text: what it means, and what is refused with what words."""

from __future__ import annotations

import pytest

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import matches, to_odata
from llama_index_agentic_kb.wire.google_filter import parse_filter

FIELDS = {"color": "red", "year": 1969, "score": 0.5, "public": True}
DOCUMENT = {**FIELDS, "date": "2024-01-31", "x": 'q"\\'}


@pytest.mark.parametrize(
    ("text", "odata", "holds"),
    [
        ('color: ANY("red")', "color eq 'red'", True),
        ('color:ANY("blue","red")', "(color eq 'blue' or color eq 'red')", True),
        ('x: ANY("q\\"\\\\")', "x eq 'q\"\\'", True),
        ("year: IN(1969, 1970)", "(year ge 1969 and year lt 1970)", True),
        ("year: IN(1968, 1969)", "(year ge 1968 and year lt 1969)", False),
        ("year: IN(1968e, 1969i)", "(year gt 1968 and year le 1969)", True),
        ("year: IN(*, 1969i)", "year le 1969", True),
        ("year: IN(1.9e3e, *)", "year gt 1900.0", True),
        ("year: IN(*, *)", "year ne null", True),
        ("public = true", "public eq true", True),
        ('date > "2024-01-01"', "date gt '2024-01-01'", True),
        ('NOT color: ANY("red")', "not (color eq 'red')", False),
        ('-color: ANY("blue")', "not (color eq 'blue')", True),
        ('NOT missing: ANY("x")', "not (missing eq 'x')", False),
        ("year > 1 AND score > 0 AND public = true", "(year gt 1 and score gt 0 and public eq true)", True),
        ("(year < 1 OR score > 0) AND NOT (year = 2 OR year = 3)", None, True),
        ('color: ANY("red") AND year: IN(1900, *)', "(color eq 'red' and year ge 1900)", True),
    ],
)
def test_a_filter_means_what_googles_does(text: str, odata: str | None, holds: bool) -> None:
    """Each form of the grammar becomes the tree with its meaning."""
    tree = parse_filter(text)
    assert tree is not None
    assert odata is None or to_odata(tree) == odata
    assert matches(tree, DOCUMENT) is holds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a = 1 AND b = 2 OR c = 3",
            "filter, character 17: found 'OR', expected: AND, the end; AND beside OR is ambiguous",
        ),
        ("a", "filter, character 2: the filter ends, expected: one of < <= > >= = (not equal is NOT"),
        ("a != 1", "found '!', expected: one of < <= > >= = (not equal is NOT field = value), ':'"),
        ("a: ANY()", 'expected: a text in double quotes ("acme")'),
        ("a: ANY(red)", "filter, character 8: found 'red', expected: a text in double quotes"),
        ('a: ANY("red)', "text stands in double quotes, closed by another"),
        (r'a: ANY("\n")', r"only \" and \\ may follow a backslash"),
        ("a: IN(x, 1)", "expected: a number or *"),
        ("a = red", 'expected: a text in double quotes ("acme"), a number, true, false'),
        ("a = 1 b = 2", "filter, character 7: found 'b', expected: AND, OR, the end"),
        ("AND", "found 'AND', expected: a field, NOT, '('"),
        ('GEO_DISTANCE(a, "Oslo", 10)', "GEO_DISTANCE is not supported"),
        ("a = " + "9" * 50, "is too large or too long a number"),
        ("a = 9223372036854775808", "is too large or too long a number"),
        ("_node_content = 1", "is no field of a document"),
        ("(" * 40 + "a = 1" + ")" * 40, "at most 32 parentheses may stand inside each other"),
        ("a = 1 AND " * 10_000, "100000 characters; at most 65536 are read"),
        ("a: ANY(" + '"",' * 5_001 + '"")', "at most 5000 values are read"),
    ],
)
def test_what_is_no_filter_is_refused_with_place_and_remedy(text: str, message: str) -> None:
    """The message says the place, what was found and what would do."""
    with pytest.raises(InvalidRequestError) as refused:
        parse_filter(text)
    assert message in str(refused.value)


def test_long_filters_are_read_in_linear_time() -> None:
    """The longest text is read, with and without a closing quote; what took quadratic time would hang here."""
    assert parse_filter(" AND ".join(["a = 1"] * 6_000)) is not None
    for text in ('a: ANY("' + "\\\\" * 32_000, "(" * 65_000, "NOT " * 16_000, '"' * 65_000, "-" * 65_000):
        with pytest.raises(InvalidRequestError):
            parse_filter(text)
