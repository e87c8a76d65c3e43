from __future__ import annotations

from collections.abc import Sequence

import pytest
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb.answering.relevance import judge_relevance
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY
from llama_index_agentic_kb.schema.answer import SkippedReason

PUMP = ["Hold the red button for ten seconds to reset the pump.", "The pump must be reset by trained staff only."]
OUT, NOTHING = SkippedReason.OUT_OF_DOMAIN_QUERY_IGNORED, SkippedReason.NO_RELEVANT_CONTENT


def nodes(texts: Sequence[str], scores: Sequence[float | None] = ()) -> list[NodeWithScore]:
    """Evidence; with a calibrated reranker's scores, if any."""
    given = [*scores, *[None] * len(texts)]
    return [
        NodeWithScore(node=TextNode(text=text, metadata={PROVENANCE_KEY: {"reranker_score": score}}))
        for text, score in zip(texts, given, strict=False)
    ]


@pytest.mark.parametrize(
    ("question", "lenient", "strict"),
    [
        ("How do I reset the pump, and who may do it?", None, None),
        ("What is the capital of France?", OUT, OUT),
        ("How do I paint the wooden garden fence with the pump?", None, NOTHING),
        ("pump reset", None, None),  # in any language
        ("Wie setze ich die Pumpe zurück?", None, None),  # the passages are in another one
        ("泵怎么复位?", None, None),  # not written in words
        ("", None, None),
    ],
    ids=["own", "foreign", "half", "keywords", "german", "chinese", "empty"],
)
def test_evidence_is_judged_by_the_words_of_the_question(
    question: str, lenient: SkippedReason | None, strict: SkippedReason | None
) -> None:
    """Only where words can tell: the same language, and one whose words are set apart."""
    assert judge_relevance(question, nodes(PUMP), strict=False).reason is lenient
    assert judge_relevance(question, nodes(PUMP), strict=True).reason is strict


@pytest.mark.parametrize(
    ("score", "lenient", "strict"), [(0.5, OUT, OUT), (1.5, None, NOTHING), (2.5, None, None)], ids=str
)
def test_a_calibrated_rerankers_best_score_goes_before_words(
    score: float, lenient: SkippedReason | None, strict: SkippedReason | None
) -> None:
    """It read both."""
    evidence = nodes(PUMP, [0.1, score])
    assert judge_relevance("What is the capital of France?", evidence, strict=False).reason is lenient
    judged = judge_relevance("What is the capital of France?", evidence, strict=True)
    assert (judged.reason, judged.signal, judged.value) == (strict, "reranker", score)


def test_nothing_is_never_relevant() -> None:
    """Nor is it out of domain: who knows."""
    assert judge_relevance("How do I reset the pump?", [], strict=False).reason is NOTHING
