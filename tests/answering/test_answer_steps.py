"""Steps of an answer: what was really searched, what came of it, and what was thought on the way."""

from __future__ import annotations

from typing import Any

from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from llama_index_agentic_kb.answering.results import answer_references, answer_steps, unanswered_parts
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import Outcome
from llama_index_agentic_kb.schema.answer import AnswerState, AnswerStep, ChunkReference, DocumentReference
from llama_index_agentic_kb.schema.answer_query import ResultMode
from llama_index_agentic_kb.search.rerank import Calibration, Reranker
from tests.answering.retrieving import APOLLO, SATURN, planner, retrieved, source
from tests.rerankers import OverlapReranker

QUESTION = "How tall was the rocket that launched Apollo 11?"
HOPS: list[dict[str, Any]] = [
    {"id": "q1", "query": "rocket that launched Apollo 11", "finds": "the rocket that launched Apollo 11"},
    {"id": "q2", "query": "height of #q1", "depends_on": ["q1"]},
]
FOUND: list[dict[str, Any]] = [
    {"step": "q1", "answers": [{"value": "Saturn V rocket", "ref": 1, "confidence": "stated"}]}
]


def steps(retrieval: Retrieval, mode: ResultMode | None = None) -> list[AnswerStep]:
    return answer_steps(retrieval, mode)


def lacking(retrieval: Retrieval) -> list[tuple[str | None, Outcome, str]]:
    parts = unanswered_parts(retrieval)
    assert all(part.what == "sub-question" for part in parts)
    return [(part.sub_query_id, part.outcome, part.reason) for part in parts]


def failing(*words: str) -> Any:
    """A source's fault: queries that hold one of these words fail."""
    return lambda bundle: OSError("gone") if any(word in bundle.query_str for word in words) else None


def test_a_question_that_is_searched_as_it_is_has_one_step() -> None:
    """Without a plan there is one step with one action: the question, and the evidence with short snippets."""
    long = "The rocket. " + "Nothing of note. " * 60 + "On it a rocket so tall launched Apollo."
    (step,) = steps(retrieved([source([long])], QUESTION))
    assert (step.state, step.description, step.thought) == (AnswerState.SUCCEEDED, "Search the query.", "")
    (action,) = step.actions
    assert action.query == QUESTION
    assert action.results is not None
    (snippet,) = action.results[0].snippets
    assert "a rocket so tall launched Apollo." in snippet.snippet
    assert len(snippet.snippet) <= 240
    assert "\n" not in snippet.snippet
    assert snippet.status == "SUCCESS"


def test_each_wave_is_a_step_that_tells_what_it_builds_on() -> None:
    """The first wave is rephrased, the second searches with what the first found, and says so."""
    retrieval = retrieved([source([APOLLO, SATURN])], QUESTION, llm=planner(HOPS, FOUND), effort="medium")
    first, second = steps(retrieval)
    assert (first.description, second.description) == ("Rephrase the query and search.", "Search with what was found.")
    assert [one.query for one in first.actions] == [QUESTION, "rocket that launched Apollo 11"]
    assert [one.query for one in second.actions] == ["height of Saturn V rocket"]
    assert second.thought.startswith("the rocket that launched Apollo 11: Saturn V rocket")
    assert "sufficient" in second.thought
    told = [[one.query, one.results is not None] for step in (first, second) for one in step.actions]
    assert [query for query, _ in told] == [one.query for one in retrieval.plan.sub_queries]
    assert all(observed for _, observed in told)
    assert lacking(retrieval) == []


def test_observations_are_the_kept_results_of_their_search() -> None:
    """A search observes of the evidence just what it found itself, by the documents' names of the references."""
    plan = [{"id": "q1", "query": "launched Apollo"}, {"id": "q2", "query": "110.6"}, {"id": "q3", "query": "cheese"}]
    retrieval = retrieved([source([APOLLO, SATURN])], "Tell of it", llm=planner(plan), effort="low")
    by_query = {action.query: action.results for step in steps(retrieval) for action in step.actions}
    names = {
        one.chunks[0].content: one.document
        for one in answer_references(retrieval).values()
        if isinstance(one, DocumentReference)
    }
    observed = {query: [one.document for one in results or ()] for query, results in by_query.items()}
    assert observed["launched Apollo"] == [names[APOLLO]]
    assert observed["110.6"] == [names[SATURN]]
    assert by_query["cheese"] == []
    assert lacking(retrieval) == [("q3", Outcome.EMPTY, "cheese: nothing was found for it")]


def test_passages_of_one_document_are_observed_together() -> None:
    """A document that a search found in several passages is one result; in chunk mode it has chunks, with scores."""
    nodes = [
        TextNode(id_=name, text=text, relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id="doc")})
        for name, text in (("a", APOLLO), ("b", SATURN))
    ]
    reranker = Reranker(OverlapReranker(), calibration=Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)]), threshold=0.0)
    retrieval = retrieved([source(nodes)], QUESTION, reranker=reranker)
    ((result,),) = [action.results or [] for action in steps(retrieval)[0].actions]
    assert (result.document, len(result.snippets), result.chunks) == ("doc", 2, [])
    ((result,),) = [action.results or [] for action in steps(retrieval, ResultMode.CHUNKS)[0].actions]
    assert (result.document, result.snippets) == ("doc", [])
    told = {one.chunk: (one.content, one.relevance_score) for one in result.chunks}
    assert told == {
        one.chunk: (one.content, one.relevance_score)
        for one in answer_references(retrieval).values()
        if isinstance(one, ChunkReference)
    }
    assert all(one.relevance_score for one in result.chunks)


def test_lost_searches_are_no_empty_ones() -> None:
    """A failed search observed nothing; a step whose every search failed has failed; both are counted in words."""
    sources = [source([APOLLO, SATURN], memory={"fault": failing("height")})]
    retrieval = retrieved(sources, QUESTION, llm=planner(HOPS, FOUND), effort="medium")
    first, second = steps(retrieval)
    assert first.state is AnswerState.SUCCEEDED
    assert second.state is AnswerState.FAILED
    assert second.description == "Search with what was found. The search gave no answer."
    assert [one.results for one in second.actions] == [None]
    assert lacking(retrieval) == [("q2", Outcome.ERROR, "height of Saturn V rocket: its searches failed")]


def test_a_revision_is_a_step() -> None:
    """A search for what was missing is a step of its own, whose thought is what was missing."""
    revision = {"sufficient": False, "gaps": ["the height"], "sub_queries": [{"id": "r", "query": "Saturn V 110.6"}]}
    plan = [{"id": "q1", "query": "launched Apollo"}]
    retrieval = retrieved([source([APOLLO, SATURN])], "launched", llm=planner(plan, revision=revision), effort="medium")
    last = steps(retrieval)[-1]
    assert last.description == "Search for what is missing."
    assert last.thought == "revised: the height"
    assert [one.query for one in last.actions] == ["Saturn V 110.6"]
    assert last.actions[0].results


def test_sources_that_show_no_references_are_not_observed() -> None:
    """What is no reference is in no observation either; its search is told as one that kept nothing."""
    params = [{"knowledgeSourceName": "docs", "includeReferences": False}]
    retrieval = retrieved([source([SATURN])], QUESTION, params)
    assert retrieval.nodes
    ((action,),) = [step.actions for step in steps(retrieval)]
    assert action.results == []
    params = [{"knowledgeSourceName": "docs", "includeReferenceSourceData": False}]
    ((action,),) = [step.actions for step in steps(retrieved([source([SATURN])], QUESTION, params))]
    assert [one.snippets for one in action.results or ()] == [[]]
