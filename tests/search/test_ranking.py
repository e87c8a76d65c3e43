"""``rank`` and ``arank``: best first, in every form of record, and within limits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from llama_index_agentic_kb.errors import DeadlineExceededError, InvalidRequestError, RetrievalError
from llama_index_agentic_kb.schema.grounding import MAX_RECORDS, RankRecord
from llama_index_agentic_kb.search.ranking import arank, rank
from llama_index_agentic_kb.search.rerank import Calibration, Reranker
from llama_index_agentic_kb.testing import HashEmbedding
from tests.rerankers import OverlapReranker

RECORDS = [
    RankRecord(id="cat", content="A small cat sleeps all day."),
    RankRecord(id="moon", title="Saturn V", content="The tall rocket flew to the Moon."),
    RankRecord(id="rocket", content="A rocket."),
]
GERMAN = ["Die Rakete ist nicht sehr groß und auch alt.", "Der Hund ist in dem Haus und schläft."]


@pytest.mark.parametrize(
    "ranker",
    [
        None,
        HashEmbedding(),
        OverlapReranker(),
        Reranker(OverlapReranker(), calibration=Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)])),
    ],
    ids=["words", "vectors", "postprocessor", "calibrated"],
)
async def test_best_first(ranker: Any) -> None:
    """However it is ranked, the best record comes first, with scores from 0 to 1; sync and async agree."""
    found = rank("the tall rocket", RECORDS, ranker=ranker)
    assert found[0].id == "moon"
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert all(0 <= one.score <= 1 for one in found)
    assert await arank("the tall rocket", RECORDS, ranker=ranker) == found


def test_forms_order_and_languages() -> None:
    """Texts, models and mappings are taken; titles count; equal ones stay in order; each is stemmed in its language."""
    assert [one.id for one in rank("rocket", RECORDS, top_n=1)] == ["rocket"]
    assert [(one.id, one.score) for one in rank("nothing of this", RECORDS)] == [("cat", 0), ("moon", 0), ("rocket", 0)]
    assert rank("saturn", ["plain text", {"id": "m", "title": "Saturn V"}, RECORDS[0]])[0].id == "m"
    assert rank("saturn", []) == []
    assert rank("Raketen", GERMAN)[0].score > rank("Raketen", GERMAN)[1].score == 0
    shares = [one.score for one in rank("rocket", RECORDS, ranker=OverlapReranker(fault="none"))]
    assert shares == pytest.approx([1, 2 / 3, 1 / 3])  # a reranker that gives an order alone


@pytest.mark.parametrize(
    ("query", "records", "top_n", "message"),
    [
        (" ", RECORDS, None, "query"),
        ("x", ["y"] * (MAX_RECORDS + 1), None, "records: 201"),
        ("x", [{"id": "only"}], None, "needs a title or a content"),
        ("x", ["  "], None, "needs a title or a content"),
        ("x", RECORDS, 0, "top_n"),
    ],
)
def test_limits_ranking(query: str, records: list[Any], top_n: int | None, message: str) -> None:
    """What can't be ranked is refused, by name."""
    with pytest.raises(InvalidRequestError, match=message):
        rank(query, records, top_n=top_n)


def test_failing_rankers() -> None:
    """A reranker that fails, or gives nothing back, is an error; one that hangs is given up in time."""
    for fault in (ValueError("down"), "empty"):
        with pytest.raises((ValueError, RetrievalError)):
            rank("rocket", RECORDS, ranker=OverlapReranker(fault=fault))
    begun = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        rank("rocket", RECORDS, ranker=OverlapReranker(latency=20), timeout=0.1)
    assert time.monotonic() - begun < 10
