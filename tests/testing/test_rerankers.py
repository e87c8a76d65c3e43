from __future__ import annotations

import time

import pytest
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb.testing import OverlapReranker


def nodes() -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(id_=text, text=text)) for text in ("rain in oslo", "snow", "rain")]


def scores(reranker: OverlapReranker, query: str = "rain in oslo") -> list[tuple[str, float | None]]:
    return [(node.node_id, node.score) for node in reranker.postprocess_nodes(nodes(), query_bundle=QueryBundle(query))]


def test_nodes_are_ordered_by_shared_words() -> None:
    """The score is the share of the query's words; calls are recorded; it keeps two unless told."""
    reranker = OverlapReranker()
    assert scores(reranker) == [("rain in oslo", 1.0), ("rain", pytest.approx(1 / 3))]
    assert reranker.calls == [("rain in oslo", ["rain in oslo", "snow", "rain"])]
    assert [score for _, score in scores(OverlapReranker(top_n=9), query="")] == [0.0, 0.0, 0.0]


def test_faults() -> None:
    """It raises, gives nothing back, gives no scores, or is slow, for all queries or for some."""
    with pytest.raises(OSError, match="down"):
        scores(OverlapReranker(fault=OSError("down")))
    assert scores(OverlapReranker(fault="empty")) == []
    assert scores(OverlapReranker(fault="none", top_n=3)) == [("rain in oslo", None), ("snow", None), ("rain", None)]
    assert all(score != score for _, score in scores(OverlapReranker(fault="nan")))  # noqa: PLR0124 (nan is not itself)
    assert len(scores(OverlapReranker(fault="empty", fails_on="snow"))) == 2
    begun = time.monotonic()
    scores(OverlapReranker(latency=0.02))
    assert time.monotonic() - begun >= 0.02
