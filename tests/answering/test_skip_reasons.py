from __future__ import annotations

import pytest
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb.answering.policy import judge_relevance
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY
from llama_index_agentic_kb.schema.response import SkippedReason

OUT, NOTHING = SkippedReason.OUT_OF_DOMAIN_QUERY_IGNORED, SkippedReason.NO_RELEVANT_CONTENT


def nodes(*scores: float | None, text: str = "Hold the red button.") -> list[NodeWithScore]:
    """Evidence with a calibrated reranker's scores, if any."""
    marks = [{PROVENANCE_KEY: {"reranker_score": score}} for score in scores]
    return [NodeWithScore(node=TextNode(text=text, metadata=mark)) for mark in marks]


@pytest.mark.parametrize(
    ("score", "unset", "strict"), [(0.5, OUT, OUT), (1.5, None, NOTHING), (2.5, None, None)], ids=str
)
def test_evidence_is_judged_by_the_best_calibrated_score(
    score: float, unset: SkippedReason | None, strict: SkippedReason | None
) -> None:
    """As strictly as the gate says; an open gate withholds nothing."""
    evidence = nodes(0.1, None, score)
    assert judge_relevance(evidence, gate=None) == (unset, True)
    assert judge_relevance(evidence, gate=True) == (strict, True)
    assert judge_relevance(evidence, gate=False) == (None, True)


@pytest.mark.parametrize("gate", [True, None, False])
def test_without_scores_only_nothing_is_irrelevant(gate: bool | None) -> None:
    """Whatever the gate; that nothing judged the evidence is reported."""
    assert judge_relevance(nodes(None), gate=gate) == (None, False)
    assert judge_relevance([], gate=gate) == judge_relevance(nodes(3.0, text=" "), gate=gate) == (NOTHING, True)
