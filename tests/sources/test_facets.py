from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.sources.facets import (
    Facet,
    FacetBucket,
    MetadataRow,
    Per,
    SourceDocument,
    facet_buckets,
    list_documents,
    sort_key,
)

ROWS = [
    MetadataRow("d1", {"genre": "drama", "year": 1969, "tags": ["war", "sea"], "page": 1}),
    MetadataRow("d1", {"genre": "drama", "year": 1969, "tags": ["war"], "page": 2}),
    MetadataRow("d2", {"genre": "comedy", "year": 1972, "page": 1, "_secret": 1}),
    MetadataRow("d3", {"genre": "drama", "year": 1985.5, "tags": [], "page": 1}),
    MetadataRow("d4", {"genre": None, "page": 1, "odd": {"x": 1}}),
]


def facet(asked: str | Facet, rows: list[MetadataRow] = ROWS, *, limit: int = 10, per: Per = "document") -> list[Any]:
    one = Facet(asked) if isinstance(asked, str) else asked
    return facet_buckets(iter(rows), facets=[one], limit=limit, per=per)[one.field]


@pytest.mark.parametrize(
    ("key", "ranges", "buckets"),
    [
        ("year", [1970, 1980], [(None, 1970, 1), (1970, 1980, 1), (1980, None, 1)]),
        ("genre", ["d"], [(None, "d", 1), ("d", None, 2)]),
        ("page", ["a"], [(None, "a", 0), ("a", None, 0)]),
    ],
)
def test_ranges(key: str, ranges: list[Any], buckets: list[tuple[Any, Any, int]]) -> None:
    """From each boundary to below the next; empty ranges too, and values of another type in none."""
    assert facet(Facet(key, ranges=ranges)) == [
        FacetBucket(count, start=start, end=end) for start, end, count in buckets
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranges": [2, 1]}, "ranges must be ascending"),
        ({"ranges": [1, "2"]}, "ranges must be ascending boundaries, all numbers or all text"),
        ({"ranges": "abc"}, "ranges must be ascending"),
        ({"ranges": [True]}, "ranges must be ascending"),
    ],
)
def test_facets_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    """The error names the facet and what it takes."""
    with pytest.raises(InvalidRequestError, match=f"facet 'year': {message}"):
        Facet("year", **fields)


VALUES = st.one_of(st.integers(-3, 3), st.booleans(), st.sampled_from(["a", "b"]), st.none())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("wxyz"), VALUES | st.lists(VALUES, max_size=2))))
def test_counts_are_what_counting_by_hand_gives(given_rows: list[tuple[str, Any]]) -> None:
    """Values agree with a plain count over sets."""
    rows = [MetadataRow(document, {"v": value}) for document, value in sorted(given_rows, key=lambda row: row[0])]
    having = {
        (document, isinstance(item, bool), item)
        for document, value in given_rows
        for item in (value if isinstance(value, list) else [value])
        if item is not None
    }
    assert {(isinstance(b.value, bool), b.value): b.count for b in facet("v", rows)} == Counter(
        (kind, item) for _, kind, item in having
    )


def listed(*order_by: Any, limit: int = 10, offset: int = 0, rows: list[MetadataRow] = ROWS) -> list[str]:
    found = list_documents(iter(rows), order=sort_key(order_by), limit=limit, offset=offset)
    return [document.document_id for document in found]


def test_documents_hold_what_their_chunks_agree_in() -> None:
    """What differs between chunks is none of the document's, and hidden fields stay hidden."""
    first, second, *_ = list_documents(iter(ROWS), order=sort_key(()), limit=10, offset=0)
    assert first == SourceDocument("d1", 2, {"genre": "drama", "year": 1969})
    assert second == SourceDocument("d2", 1, {"genre": "comedy", "year": 1972, "page": 1})


def test_documents_are_sorted() -> None:
    """By several fields, either way; what has no value comes last, ties are by id."""
    assert listed() == ["d1", "d2", "d3", "d4"]
    assert listed("year") == ["d1", "d2", "d3", "d4"]
    assert listed("year desc") == listed(("year", "desc")) == ["d3", "d2", "d1", "d4"]
    assert listed("genre desc", "year desc") == ["d3", "d1", "d2", "d4"]
    assert listed("genre", ("year", "asc")) == ["d2", "d1", "d3", "d4"]
    assert listed("year desc", limit=2, offset=1) == ["d2", "d1"]
    assert listed("no field") == ["d1", "d2", "d3", "d4"]


@pytest.mark.parametrize("bad", [("year", "down"), ("", "asc"), ("year",), "", ("a", "b", "c")])
def test_orders_that_make_no_sense(bad: Any) -> None:
    """The error shows what was given and the forms there are."""
    with pytest.raises(InvalidRequestError, match=r"order_by: expected 'field', 'field desc' or"):
        sort_key([bad])
