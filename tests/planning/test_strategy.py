from __future__ import annotations

from typing import Any

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import ReasoningEffort, RetrievalRequest
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.planning.conftest import World, line, queries_of, reasoning_of, refs, steps

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


def test_without_a_model_nothing_is_planned() -> None:
    """Every effort is a plain search then."""
    retriever = AgenticRetriever([KnowledgeSource("docs", retriever=MemoryRetriever(["Titanic"]))], effort="medium")
    made = run(retriever.retrieval(RetrievalRequest.parse({"messages": [{"content": QUESTION}]})))
    assert queries_of(made) == {"q0": QUESTION}
    assert reasoning_of(made).retrieval_reasoning_effort is ReasoningEffort.MINIMAL


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


def test_intents_are_not_planned() -> None:
    """What the request says itself is searched."""
    searched = world()
    retriever = AgenticRetriever(
        [KnowledgeSource("docs", retriever=searched.memory)], llm=searched.llm, effort="medium"
    )
    request = RetrievalRequest.parse({"intents": [{"type": "semantic", "search": "Titanic"}]})
    assert list(queries_of(run(retriever.retrieval(request))).values()) == ["Titanic"]
    assert searched.prompts == []


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


def test_auto_stops_when_a_wave_brings_nothing_new() -> None:
    """A wave that finds what was found before ends the calls; what waits is still searched."""
    searched = world(pages={"Titanic": "Titanic was directed by James Cameron, born in Ontario."})
    made = searched.search(QUESTION, "auto")
    assert searched.calls("findings") == 1
    assert "round 2 brought nothing new" in decision(made)
    assert "q3" in queries_of(made)
    other = world(pages={"Titanic": "Titanic was directed by James Cameron, born in Ontario."})
    other.search(QUESTION, "medium")
    assert other.calls("findings") == 2
