from __future__ import annotations

import pytest
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb import KnowledgeSource, interleave
from llama_index_agentic_kb.planning.scope import Scope, evidence_strength, is_simple
from llama_index_agentic_kb.schema import SourceActivity, SubQuery
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeList
from llama_index_agentic_kb.testing import MemoryRetriever

SOURCE = KnowledgeSource("docs", retriever=MemoryRetriever([]))


@pytest.mark.parametrize(
    "question",
    [
        "What is the capital of France?",
        "Who is the director of Titanic?",
        "Who wrote Hamlet?",
        "When did Titanic sink?",
        "How do I reset my password?",
        "error 0x80070057",
        "return policy",
        "What's the capital of France?",
    ],
)
def test_questions_for_one_fact_are_simple(question: str) -> None:
    """Short ones that ask for one relation, or a fact of what they name."""
    assert is_simple(Scope(question))


@pytest.mark.parametrize(
    "question",
    [
        "Where was the director of Titanic born?",
        "How tall was the rocket of Apollo 11?",
        "When did Obama's wife study law?",
        "Who was the father of the king of Spain?",
        "Who is the director's mother's employer?",
        "Which film is older, Alien or Jaws?",
        "Who is Ann's grandfather?",
        "Who is Ann's mother-in-law?",
        "Would a Pict be confused by Old English?",
        "Isn't Hamlet older?",
        "rain and snow",
        "the man who sold the world",
        "Wo wurde der Regisseur von Titanic geboren?",
        "Dónde nació el director de Titanic?",
        "タイタニックの監督の出身地は",
        "Tell me all there is to know on rain in Paris today please",
        "Who wrote Hamlet?\nAnd when?",
        "",
    ],
)
def test_all_others_are_planned(question: str) -> None:
    """Relations that lead to a fact, comparisons, kinship, other languages: where in doubt a plan is made."""
    assert not is_simple(Scope(question))


def test_a_question_in_a_conversation_is_not_simple() -> None:
    """What it means may stand in earlier turns."""
    assert not is_simple(Scope("Who wrote it?", (("user", "Tell me of Hamlet."),)))


def lane(*lists: list[str]) -> SourceSearch:
    record = SourceActivity(id=0, knowledge_source_name="docs", sub_query_id="q0")
    found = tuple(
        NodeList(kind, [NodeWithScore(node=TextNode(id_=text, text=text), score=0.5) for text in texts])
        for kind, texts in zip(("dense", "lexical"), lists, strict=False)
    )
    return SourceSearch(SubQuery(id="q0", query="x", sources=["docs"]), SOURCE, record, found)


def test_evidence_that_holds_the_questions_words_is_strong() -> None:
    """Its signals tell how much, and are shares."""
    strength = evidence_strength(
        Scope("When did the Titanic sink?"), [lane(["The Titanic sank: it sinks in 1912."]), lane()], interleave
    )
    assert strength.sufficient
    assert strength.signals == {"coverage": 1.0, "agreement": 1.0, "found": 0.5}
    assert strength.reason.startswith("not planned")


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        (Scope("When did the Olympic sink?"), "too few"),
        (Scope("Where was the director of Titanic born?"), "joins"),
        (Scope("Titanic and Olympic"), "joins"),
        (Scope("Titanic", (("user", "x"),)), "conversation"),
    ],
)
def test_weak_evidence_says_why(scope: Scope, reason: str) -> None:
    """Words that no passage holds, several facts, and conversations want a plan."""
    strength = evidence_strength(scope, [lane(["Titanic director born"])], interleave)
    assert not strength.sufficient
    assert reason in strength.reason


def test_nothing_found_is_weak() -> None:
    """Neither no lanes nor empty ones are evidence."""
    for lanes in ([], [lane()], [lane([], [])]):
        strength = evidence_strength(Scope("When did the Titanic sink?"), lanes, interleave)
        assert not strength.sufficient
        assert strength.signals["coverage"] == strength.signals["found"] == 0


def test_two_ways_of_searching_agree_or_not() -> None:
    """Agreement is the share of the best five that both have."""
    halves = evidence_strength(Scope("x"), [lane(["a", "b"], ["b", "c"])], interleave)
    assert halves.signals["agreement"] == 0.5
