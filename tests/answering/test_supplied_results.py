"""Results that are brought along are the evidence, all of them, in their order."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb import AgenticRetriever, RetrieverOptions
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.answering.results import answer_references, answer_steps
from llama_index_agentic_kb.answering.supplied_results import supplied_request, supplied_retriever
from llama_index_agentic_kb.query_engine import AgenticQueryEngine
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import Principal
from llama_index_agentic_kb.schema.answer import (
    AnswerReference,
    ChunkContent,
    ChunkReference,
    DocumentReference,
    StructuredReference,
)
from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM
from tests.answering.retrieving import source
from tests.wire.strategies import REFERENCES

RESULTS: list[AnswerReference] = [
    ChunkReference(chunk="c1", content="Cheese is old.", document="d1", uri="https://x.example/1", title="Cheese"),
    DocumentReference(
        document="d2",
        title="Rockets",
        chunks=[ChunkContent(content="It was tall.", page_identifier="3"), ChunkContent(content="110.6 m tall.")],
    ),
    StructuredReference(document="d3", title="Record", data={"height": 110.6}),
    ChunkReference(chunk="c1", content="Same name, other text."),
    ChunkReference(content="No name."),
    ChunkReference(),
    ChunkReference(),
    *[ChunkReference(chunk=f"n{number}", content=f"Nothing of note {number}.") for number in range(20)],
]


def query(results: list[AnswerReference] | None = RESULTS) -> AnswerQuery:
    messages = [{"role": "user", "content": "How tall was the rocket?"}]
    return AnswerQuery.model_validate({"request": {"messages": messages}, "search_results": results})


def never(_: list[ChatMessage]) -> str:
    raise AssertionError("no model is asked")


def retriever(**kwargs: Any) -> tuple[AgenticRetriever, MemoryRetriever]:
    searched = MemoryRetriever(["The rocket was 110.6 m tall."])
    docs = source([])
    docs._retriever = searched
    return AgenticRetriever([docs], **{"llm": ScriptedLLM(never), "effort": "medium", **kwargs}), searched


def found(asked: AnswerQuery, like: AgenticRetriever) -> Retrieval:
    assert asked.search_results is not None
    request = supplied_request(asked.request, asked.search_results)
    retrieval = run(supplied_retriever(asked.search_results, like).retrieval(request))
    retrieval.arrange(retrieval.nodes)
    return retrieval


def test_all_are_given_in_their_order_and_nothing_is_searched() -> None:
    """27 results of all kinds, without words of the query, with equal names and without text: each is a reference."""
    like, searched = retriever(filters=None)
    retrieval = found(query(), like)
    assert list(answer_references(retrieval).values()) == RESULTS
    assert searched.queries == []
    assert [node.node.get_content() for node in retrieval.nodes[:3]] == [
        "Cheese is old.",
        "It was tall.\n\n110.6 m tall.",
        '{"height": 110.6}',
    ]
    (step,) = answer_steps(retrieval)
    assert step.description == "Read the results that were given."
    assert [one.title for one in step.actions[0].results or ()][:3] == ["Cheese", "Rockets", "Record"]


class Redacting(BaseNodePostprocessor):
    """A postprocessor that takes a word out of every text."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        for one in nodes:
            one.node.set_content(one.node.get_content().replace("Cheese", "XXX"))
        return nodes


def test_what_a_postprocessor_took_out_is_not_told() -> None:
    """Where a node's text was changed on the way, its reference is of the text as it is now."""
    like, _ = retriever()
    engine = AgenticQueryEngine(
        supplied_retriever(RESULTS, like), response_mode="extractiveData", node_postprocessors=[Redacting()]
    )
    retrieval = run(engine.answer(supplied_request(query().request, RESULTS))).retrieval
    first, second, *_ = answer_references(retrieval).values()
    assert isinstance(first, ChunkReference)
    assert (first.content, first.chunk, first.document, first.title) == ("XXX is old.", "c1", "d1", "Cheese")
    assert second == RESULTS[1]


def test_no_results_are_empty_evidence() -> None:
    """An empty list finds nothing, and does not search instead."""
    like, searched = retriever()
    retrieval = found(query([]), like)
    assert (retrieval.nodes, searched.queries) == ([], [])


def test_who_asks_stays_who_asks() -> None:
    """The retriever keeps the other's principal and limits, and none of its memory."""
    like, _ = retriever(principal=Principal(user="alice"), options=RetrieverOptions(require_principal=True))
    over = supplied_retriever(RESULTS, like)
    assert (over.principal, over.options.require_principal, over.memory) == (Principal(user="alice"), True, None)
    assert over.limits == like.limits


@settings(max_examples=30)
@given(results=st.lists(REFERENCES, max_size=4))
def test_any_results_come_back_as_they_were(results: list[AnswerReference]) -> None:
    """Whatever they hold, nodes are made with ids of their own, and references are the results."""
    like, _ = retriever()
    retrieval = found(query(results), like)
    told = answer_references(retrieval)
    assert [repr(one) for one in told.values()] == [repr(one) for one in results]
