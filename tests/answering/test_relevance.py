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
    ("question", "strict"),
    [
        ("How do I reset the pump, and who may do it?", None),
        ("What is the capital of France?", OUT),
        ("How do I varnish the antique wooden fence with the pump?", NOTHING),
        ("What does it cost?", None),  # one word tells nothing
        ("pump reset", None),  # in any language
        ("Wie setze ich die Pumpe zurück?", None),  # the passages are in another one
        ("泵怎么复位?", None),  # not written in words
        ("", None),
    ],
    ids=["own", "foreign", "half", "one word", "keywords", "german", "chinese", "empty"],
)
def test_a_strict_gate_counts_the_words_of_the_question(question: str, strict: SkippedReason | None) -> None:
    """Only where words can tell: several, in the same language, set apart; and only where it is asked for."""
    assert judge_relevance([question], nodes(PUMP), strict=True).reason is strict
    assert judge_relevance([question], nodes(PUMP), strict=False).reason is None


def test_one_planned_question_that_the_passages_hold_is_enough() -> None:
    """A question in other words is planned in theirs; and each passage counts, the last one too."""
    asked = ["Which machine needs a fresh start again?", "How is the pump reset?"]
    evidence = nodes(["Filler about gardens."] * 9 + PUMP)
    assert judge_relevance(asked[:1], evidence, strict=True).reason is OUT
    assert judge_relevance(asked, evidence, strict=True).reason is None
    assert judge_relevance([], evidence, strict=True).reason is None


def test_passages_without_text_are_none() -> None:
    """Whatever their metadata say."""
    assert judge_relevance(["How is the pump reset?"], nodes(["", " "]), strict=False).reason is NOTHING


@pytest.mark.parametrize(
    ("score", "lenient", "strict"), [(0.5, OUT, OUT), (1.5, None, NOTHING), (2.5, None, None)], ids=str
)
def test_a_calibrated_rerankers_best_score_goes_before_words(
    score: float, lenient: SkippedReason | None, strict: SkippedReason | None
) -> None:
    """It read both."""
    evidence = nodes(PUMP, [0.1, score])
    assert judge_relevance(["What is the capital of France?"], evidence, strict=False).reason is lenient
    judged = judge_relevance(["What is the capital of France?"], evidence, strict=True)
    assert (judged.reason, judged.signal, judged.value) == (strict, "reranker", score)


def test_nothing_is_never_relevant() -> None:
    """Nor is it out of domain: who knows."""
    assert judge_relevance(["How do I reset the pump?"], [], strict=False).reason is NOTHING
