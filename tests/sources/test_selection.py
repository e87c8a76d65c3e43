from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import SummaryIndex

from llama_index_agentic_kb import KnowledgeSource, RetrievalRequest
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.schema import Condition, all_of
from llama_index_agentic_kb.sources.selection import SelectedSource, as_source, by_name, select
from llama_index_agentic_kb.testing import MemoryRetriever

A, B, C = (Condition(key=key, value=1) for key in "abc")


def source(name: str, **fields: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever([]), **fields)


def selected(*params: dict[str, Any], filters: Condition | None = None) -> dict[str, SelectedSource]:
    request = RetrievalRequest.parse({"messages": [{"content": "q"}], "knowledgeSourceParams": list(params)})
    wiki = source("wiki")
    wiki.kind = "web"
    return select(by_name([source("docs", filters=A), wiki]), request, filters)


def test_all_sources_are_searched_unless_ruled_out() -> None:
    """Parameters configure sources; only ``neverQuerySource`` takes one out."""
    assert list(selected()) == ["docs", "wiki"]
    assert list(selected({"knowledgeSourceName": "wiki"})) == ["docs", "wiki"]
    assert list(selected({"knowledgeSourceName": "wiki", "neverQuerySource": True})) == ["docs"]


def test_odata_narrows_with_the_rest() -> None:
    """``filterAddOn`` joins the caller's filter and the request's; what is wrong with it is told by its field."""
    params = {"knowledgeSourceName": "docs", "filters": C.to_dict(), "filterAddOn": "d eq 1"}
    chosen = selected(params, filters=B)
    d = Condition(key="d", value=1)
    assert chosen["docs"].caller == all_of(B, C, d)
    assert chosen["docs"].filters == all_of(A, all_of(B, C, d))
    assert chosen["wiki"].filters == B
    assert chosen["docs"].filters_for(A) == all_of(A, all_of(B, C, d), A)
    assert chosen["docs"].filters_for(None) is chosen["docs"].filters
    assert selected()["wiki"].filters is None
    where = (
        r"^knowledgeSourceParams\[docs\]\.filterAddOn: OData filter, character 5: the filter ends, expected: a value"
    )
    for never in (False, True):
        with pytest.raises(InvalidRequestError, match=where):
            selected({"knowledgeSourceName": "docs", "filterAddOn": "d eq", "neverQuerySource": never})


def test_parameters_that_are_not_acted_on_are_told() -> None:
    """Unknown fields, and a threshold that nothing can be compared with, are named."""
    params = {"knowledgeSourceName": "docs", "rerankerThreshold": 2.0, "newField": 1}
    assert selected(params)["docs"].warning == (
        "ignored parameters: newField, rerankerThreshold (no calibrated reranker scores this source)"
    )
    assert selected()["docs"].warning is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([{"knowledgeSourceName": "nope"}], "no source is named 'nope'; there are: docs, wiki"),
        ([{"knowledgeSourceName": "wiki", "kind": "searchIndex"}], "'wiki' is of kind 'web', not 'searchIndex'"),
        (
            [{"knowledgeSourceName": name, "neverQuerySource": True} for name in ("docs", "wiki")],
            "leaves no source to search",
        ),
    ],
)
def test_parameters_that_fit_no_source_are_refused(params: list[dict[str, Any]], message: str) -> None:
    """Errors name the source and what there is."""
    with pytest.raises(InvalidRequestError, match=message):
        selected(*params)


def test_names_are_unique() -> None:
    """No source, two of one name, and what is no source are refused."""
    with pytest.raises(ConfigurationError, match="give at least one"):
        by_name([])
    with pytest.raises(ConfigurationError, match="docs is given twice"):
        by_name([source("docs"), source("wiki"), source("docs")])
    with pytest.raises(ConfigurationError, match="expected KnowledgeSource, got MemoryRetriever"):
        by_name([MemoryRetriever([])])  # type: ignore[list-item]


def test_anything_searchable_becomes_a_source() -> None:
    """Indexes and retrievers are named by their position; a source is itself; anything else is refused."""
    own = source("own")
    assert as_source(own, 1) is own
    assert repr(as_source(SummaryIndex([]), 2)) == "KnowledgeSource('source_2', SummaryIndex)"
    assert repr(as_source(MemoryRetriever([]), 3)) == "KnowledgeSource('source_3', MemoryRetriever)"
    with pytest.raises(ConfigurationError, match="can't search a str"):
        as_source("text", 1)
