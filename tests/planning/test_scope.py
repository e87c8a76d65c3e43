from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb import EffortLimits, KnowledgeSource, ReasoningEffort, RetrievalRequest, interleave
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.planning.scope import Scope, evidence_strength, is_simple
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import SourceActivity, SubQuery
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeList
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.planning.conftest import World, line, queries_of, reasoning_of, refs, steps


def request(*messages: tuple[str, str]) -> RetrievalRequest:
    return RetrievalRequest.parse({"messages": [{"role": role, "content": text} for role, text in messages]})


def test_the_last_user_message_is_the_question() -> None:
    """What came before it is the history, oldest first, without empty messages; system messages are instructions."""
    scope = Scope.of(request(("system", "Be brief."), ("user", "Hi"), ("assistant", " "), ("user", " Who? ")))
    assert scope.question == "Who?"
    assert scope.history == (("user", "Hi"),)
    assert scope.answer_instructions == scope.retrieval_instructions == "Be brief."
    assert scope.intents == ()


def test_memory_is_the_history_of_a_request_without_one() -> None:
    """Its user and assistant turns are read, not empty ones, nor the question that a chat engine has stored already."""
    memory = [
        ChatMessage(role=MessageRole.SYSTEM, content="You are kind."),
        ChatMessage(role=MessageRole.USER, content="Who built it?"),
        ChatMessage(role=MessageRole.ASSISTANT, content=None),
        ChatMessage(role=MessageRole.TOOL, content="42"),
        ChatMessage(role=MessageRole.ASSISTANT, content="Eiffel."),
        ChatMessage(role=MessageRole.USER, content="  When?\n"),
    ]
    assert Scope.of(request(("user", "When? ")), memory).history == (
        ("user", "Who built it?"),
        ("assistant", "Eiffel."),
    )
    asked = request(("user", "a"), ("user", "When?"))
    assert Scope.of(asked, memory).history == (("user", "a"),)


SOURCE = KnowledgeSource("docs", retriever=MemoryRetriever([]))


@pytest.mark.parametrize(
    "question",
    [
        "What is the capital of France?", "Who is the director of Titanic?", "Who wrote Hamlet?",
        "When did Titanic sink?", "How do I reset my password?", "error 0x80070057", "return policy",
        "What's the capital of France?",
    ],
)  # fmt: skip
def test_questions_for_one_fact_are_simple(question: str) -> None:
    """Short ones that ask for one relation, or a fact of what they name."""
    assert is_simple(Scope(question))


@pytest.mark.parametrize(
    "question",
    [
        "Where was the director of Titanic born?", "How tall was the rocket of Apollo 11?",
        "When did Obama's wife study law?", "Who was the father of the king of Spain?",
        "Who is the director's mother's employer?", "Which film is older, Alien or Jaws?", "Who is Ann's grandfather?",
        "Who is Ann's mother-in-law?", "Would a Pict be confused by Old English?", "Isn't Hamlet older?",
        "rain and snow", "the man who sold the world", "Wo wurde der Regisseur von Titanic geboren?",
        "Dónde nació el director de Titanic?", "タイタニックの監督の出身地は",
        "Tell me all there is to know on rain in Paris today please", "Who wrote Hamlet?\nAnd when?", "",
    ],
)  # fmt: skip
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


PAGES = {
    "Titanic": "Titanic is a film directed by James Cameron.",
    "James Cameron": "James Cameron was born in Kapuskasing, Ontario.",
}
BRIDGE = steps(
    {"query": "Who directed Titanic?", "finds": "the director"},
    {"query": "birthplace of #q1", "depends_on": ["q1"]},
    {"query": "mayor of #q2", "depends_on": ["q2"]},
)
QUESTION = "Where was the director of Titanic born?"


def cameron(prompt: str) -> str:
    return line("q1", ("James Cameron", refs(prompt)["Titanic"]))


def world(**fields: Any) -> World:
    return World(**{"pages": PAGES, "plan": BRIDGE, "findings": cameron, **fields})


def decision(made: Retrieval) -> str:
    return reasoning_of(made).decision or ""


def test_minimal_effort_asks_no_model() -> None:
    """The question is searched as it is."""
    searched = world()
    made = searched.search(QUESTION, "minimal")
    assert searched.prompts == []
    assert queries_of(made) == {"q0": QUESTION}
    record = reasoning_of(made)
    assert record.planned is not None
    assert record.spent is not None
    assert (record.planned.waves, record.planned.tokens, record.spent.tokens, record.spent.waves) == (1, 0, 0, 1)


def test_a_simple_question_goes_straight_to_search_at_auto_effort() -> None:
    """No model is asked, and the account says why; other efforts plan it."""
    searched = world()
    made = searched.search("Who wrote Hamlet?", "auto")
    assert searched.prompts == []
    assert decision(made) == "not planned: a simple question"
    assert reasoning_of(made).retrieval_reasoning_effort is ReasoningEffort.MINIMAL
    planned = world()
    planned.search("Who wrote Hamlet?", "low")
    assert planned.calls("plan") == 1


def test_strong_evidence_is_enough() -> None:
    """Auto effort asks no model where the question's own evidence holds its words, and reports its signals."""
    searched = world()
    made = searched.search("Titanic film directed James Cameron", "auto")
    assert searched.prompts == []
    record = reasoning_of(made)
    assert record.signals is not None
    assert record.signals["coverage"] == 1.0
    assert decision(made) == "not planned: the question's own evidence is strong"
    assert record.logical_reasoning_effort is ReasoningEffort.AUTO
    assert record.retrieval_reasoning_effort is ReasoningEffort.MINIMAL


def test_weak_evidence_is_planned() -> None:
    """Auto effort escalates, does not search the question twice, and reports its signals."""
    searched = world()
    made = searched.search(QUESTION, "auto")
    assert searched.calls("plan") == 1
    assert searched.asked.count(QUESTION) == 1
    assert queries_of(made)["q2"] == "birthplace of James Cameron"
    assert set(reasoning_of(made).signals or {}) == {"coverage", "agreement", "found"}
    assert decision(made).startswith("planned: the question joins several facts")
    assert reasoning_of(made).retrieval_reasoning_effort is ReasoningEffort.AUTO


@pytest.mark.parametrize("name", [f.name for f in fields(EffortLimits)])
def test_a_limit_that_lets_nothing_through_is_refused(name: str) -> None:
    """Zero and less are refused by the field's name; there may be no revision, but not fewer."""
    for value in (-1,) if name == "revisions" else (0, -1):
        with pytest.raises(ConfigurationError, match=rf"EffortLimits\.{name}"):
            EffortLimits(**{name: value})
    assert EffortLimits(revisions=0).revisions == 0
