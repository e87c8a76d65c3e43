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


def ranged(*triples: tuple[Any, Any, int]) -> list[FacetBucket]:
    return [FacetBucket(count, start=start, end=end) for start, end, count in triples]


def test_intervals_of_numbers() -> None:
    """Ranges of one width counted from 0, only those that hold something, without the noise of binary fractions."""
    assert facet(Facet("year", interval=10)) == ranged((1960, 1970, 1), (1970, 1980, 1), (1980, 1990, 1))
    rows = [MetadataRow(str(n), {"v": value}) for n, value in enumerate([0.3, 0.35, -0.05, True, "x", 10**400])]
    assert facet(Facet("v", interval=0.1), rows) == ranged((-0.1, 0.0, 1), (0.3, 0.4, 2))


@pytest.mark.parametrize(
    ("unit", "buckets"),
    [
        ("year", "2023-01-01 2024-01-01 1, 2024-01-01 2025-01-01 3, 9999-01-01 - 1"),
        ("month", "2023-12-01 2024-01-01 1, 2024-02-01 2024-03-01 2, 2024-12-01 2025-01-01 1, 9999-12-01 - 1"),
        ("day", "2023-12-31 2024-01-01 1, 2024-02-29 2024-03-01 2, 2024-12-01 2024-12-02 1, 9999-12-31 - 1"),
    ],
)
def test_intervals_of_dates(unit: str, buckets: str) -> None:
    """Years, months and days of ISO dates and date-times; their edges are dates that a filter can compare with."""
    dates = ["2023-12-31", "2024-02-29", "2024-02-29T23:00:00Z", "2024-12-01", "9999-12-31", "soon", 2024]
    rows = [MetadataRow(str(n), {"day": value}) for n, value in enumerate(dates)]
    found = [f"{one.start} {one.end or '-'} {one.count}" for one in facet(Facet("day", interval=unit), rows)]
    assert ", ".join(found) == buckets


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranges": [1], "interval": 2}, "give ranges or an interval, not both"),
        ({"ranges": [2, 1]}, "ranges must be ascending"),
        ({"ranges": [1, "2"]}, "ranges must be ascending boundaries, all numbers or all text"),
        ({"ranges": "abc"}, "ranges must be ascending"),
        ({"ranges": [True]}, "ranges must be ascending"),
        ({"interval": 0}, "interval must be a number above 0, or one of year, month, day, got 0"),
        ({"interval": "week"}, "interval must be"),
        ({"limit": 0}, "limit must be above 0"),
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
    """Values and intervals agree with a plain count over sets."""
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
    floors = {(document, item // 2) for document, kind, item in having if isinstance(item, int) and not kind}
    assert {b.start: b.count for b in facet(Facet("v", interval=2), rows)} == Counter(2 * n for _, n in floors)


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
