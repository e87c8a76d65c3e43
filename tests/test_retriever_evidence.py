"""Reranking, neighbours, long documents and the account, through the whole way of a query."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceSplitter, get_leaf_nodes
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import NodeRelationship, TextNode

from llama_index_agentic_kb import (
    AgenticRetriever,
    AgenticVectorStoreIndex,
    KnowledgeBase,
    KnowledgeSource,
    RetrievalRequest,
    RetrieverOptions,
)
from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.evidence.candidates import provenance
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import AgenticReasoningActivity, ModelQueryPlanningActivity, Outcome, SourceActivity
from llama_index_agentic_kb.search.rerank import Calibration, Reranker
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM
from tests.planning.conftest import reasoning_of
from tests.rerankers import OverlapReranker

SHARE = Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)])
QUESTION = "saturn rocket height"
ROCKETS = ["saturn saturn", "height of the saturn rocket", "rocket height", "a probe"]
LONG = " ".join(f"Sentence {number} tells of the rover on day {number}." for number in range(40))


def retriever(**options: Any) -> AgenticRetriever:
    sources = [
        KnowledgeSource("rockets", retriever=MemoryRetriever(ROCKETS, similarity_top_k=9)),
        KnowledgeSource("notes", retriever=MemoryRetriever(["saturn note", "height note"], similarity_top_k=9)),
    ]
    return AgenticRetriever(sources, effort="minimal", **options)


def calibrated(**options: Any) -> Reranker:
    return Reranker(OverlapReranker(), calibration=SHARE, **options)


def retrieval(over: AgenticRetriever, **request: Any) -> Retrieval:
    made = run(over.retrieval(RetrievalRequest.parse({"intents": [{"search": QUESTION}], **request})))
    made.arrange(made.nodes)
    return made


def texts(made: Retrieval) -> list[str]:
    return [node.text for node in made.nodes]


def test_a_reranker_scores_drops_and_is_accounted_for() -> None:
    """References have scores of 0 to 4; each search and the whole tell what the threshold dropped."""
    made = retrieval(retriever(reranker=calibrated()))
    assert texts(made) == ["height of the saturn rocket", "rocket height"]
    assert [ref.reranker_score for ref in made.references] == [4.0, pytest.approx(8 / 3)]
    assert [ref.score for ref in made.references] == [1.0, pytest.approx(2 / 3)]
    searches = [record for record in made.log.records if isinstance(record, SourceActivity)]
    assert [(one.knowledge_source_name, one.count, one.dropped_by_threshold) for one in searches] == [
        ("rockets", 2, 1),
        ("notes", 0, 2),
    ]
    record = reasoning_of(made)
    assert (record.candidates, record.kept, record.dropped_by_threshold, record.reranked) == (5, 2, 3, 5)
    assert record.warning == "3 documents were left out by rerankerThreshold"


def test_thresholds_come_from_the_request_or_the_retriever() -> None:
    """A source's own word goes first; where no calibrated reranker is, the source's record says that it was ignored."""
    params = [{"knowledgeSourceName": "notes", "rerankerThreshold": 1.0, "newField": 1}]
    strict = retrieval(retriever(reranker=calibrated(threshold=4.0)), knowledgeSourceParams=params)
    assert texts(strict) == ["height of the saturn rocket", "saturn note", "height note"]
    for options in ({}, {"reranker": OverlapReranker()}):
        searches = [
            one
            for one in retrieval(retriever(**options), knowledgeSourceParams=params).log.records
            if isinstance(one, SourceActivity)
        ]
        assert [one.warning for one in searches] == [
            None,
            "ignored parameters: newField, rerankerThreshold (no calibrated reranker scores this source)",
        ]


def chunked(*documents: Document) -> VectorStoreIndex:
    splitter = SentenceSplitter(chunk_size=60, chunk_overlap=12, tokenizer=str.split)
    return VectorStoreIndex.from_documents(list(documents), transformations=[splitter], embed_model=HashEmbedding())


def rover(**metadata: Any) -> Document:
    return Document(id_="rover", text=LONG, metadata={"title": "Rover", **metadata})


def test_neighbours_are_one_citation() -> None:
    """Extracts and references of joined chunks: one number, one id, the text once, the parts in the metadata."""
    source = KnowledgeSource("docs", index=chunked(rover()))
    request: dict[str, Any] = {"output_mode": "extractiveData", "max_output_documents": 9}
    response = KnowledgeBase([source]).retrieve("What did the rover do on day 7?", **request)
    ((extract,), (reference,)) = response.extracts, response.references
    assert extract.content == LONG
    assert (extract.title, reference.doc_key, reference.id) == ("Rover", "rover", "0")
    assert reference.source_data is not None
    assert "agentic_kb" not in reference.source_data.metadata
    apart = KnowledgeBase([source], options=RetrieverOptions(join_neighbours=False)).retrieve(
        "What did the rover do on day 7?", **request
    )
    assert len(apart.extracts) == len(apart.references) > 3
    assert reference.node_id == apart.references[0].node_id


def test_answers_cite_joined_chunks() -> None:
    """A marker leads to the joined node, in a query engine and in LlamaIndex's chat engine over the retriever."""
    index = AgenticVectorStoreIndex.from_index(chunked(rover()))
    llm = ScriptedLLM("It drove [ref_id:0].", model_name="m")
    engine = index.as_query_engine(llm=llm, effort="minimal", response_mode="answerSynthesis")
    response = engine.query("What did the rover do on day 7?")
    assert str(response) == "It drove [ref_id:0]."
    assert [node.text for node in response.source_nodes] == [LONG]
    apart = index.as_query_engine(llm=llm, effort="minimal", options=RetrieverOptions(join_neighbours=False))
    assert len(apart.query("rover day 7").source_nodes) > 3
    chat = ContextChatEngine.from_defaults(
        retriever=index.as_retriever(llm=llm, effort="minimal"), llm=llm, memory=ChatMemoryBuffer.from_defaults(llm=llm)
    )
    assert [node.text for node in chat.chat("rover day 7").source_nodes] == [LONG]
    assert "tells of the rover on day 39" in str(llm.calls[-1])


def test_auto_merging_retrieval_is_a_source() -> None:
    """Parents that LlamaIndex puts in the place of their children are cited like any other node."""
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[512, 128, 32], chunk_overlap=0)
    nodes = parser.get_nodes_from_documents([rover(), Document(text="The moon is far.", metadata={"title": "Moon"})])
    context = StorageContext.from_defaults()
    context.docstore.add_documents(nodes)
    index = VectorStoreIndex(get_leaf_nodes(nodes), storage_context=context, embed_model=HashEmbedding())
    leaves: Any = index.as_retriever(similarity_top_k=12)
    merging = AutoMergingRetriever(leaves, context, simple_ratio_thresh=0.3)
    over = AgenticRetriever([KnowledgeSource("docs", retriever=merging)], effort="minimal", similarity_top_k=9)
    made = retrieval(over, intents=[{"search": "Sentence tells of the rover on day"}])
    merged = [node for node in made.nodes if NodeRelationship.CHILD in node.node.relationships]
    assert merged
    assert len(merged[0].text) > 200
    assert made.references[0].title == "Rover"
    assert made.references[0].knowledge_source_name == "docs"


@pytest.mark.parametrize(
    ("options", "sent"),
    [({"options": RetrieverOptions(results_processing="none")}, {}), ({}, {"resultsProcessing": "none"})],
    ids=["retriever", "request"],
)
def test_results_may_be_left_as_they_are(options: Any, sent: Any) -> None:
    """By the retriever or the request: no reranker's score."""
    made = retrieval(retriever(reranker=calibrated(), **options), **sent)
    assert {one.reranker_score for one in made.references} == {None}


TEXTS = [f"rain report {n}" for n in range(8)]
PLAN = json.dumps(
    {
        "sub_queries": [
            {"query": "rain today", "sources": ["a"]},
            {"query": "report of rain", "sources": ["a", "b", "c"]},
        ]
    }
)


def source(name: str, **fields: Any) -> KnowledgeSource:
    nodes = [TextNode(id_=text, text=text, metadata={"n": n}) for n, text in enumerate(TEXTS)]
    return KnowledgeSource(name, index=VectorStoreIndex(nodes, embed_model=HashEmbedding()), **fields)


def sources() -> list[KnowledgeSource]:
    failing = KnowledgeSource("c", retriever=MemoryRetriever([], fault=ConnectionError("down")))
    return [source("a", similarity_top_k=4), source("b", similarity_top_k=3), failing]


async def retrieved(way: str, **fields: Any) -> Retrieval:
    retriever = AgenticRetriever(sources(), **{"llm": ScriptedLLM(PLAN), **fields})
    request = RetrievalRequest.parse({"messages": [{"content": "rain"}]})
    made = run(retriever.retrieval(request)) if way == "sync" else await arun(retriever.retrieval(request))
    made.arrange(made.nodes)
    return made


async def test_the_records_tell_one_story() -> None:
    """Ids are places, stages follow one another, times are in order, and all counts add up."""
    made = await retrieved(
        "async", node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.4)], similarity_top_k=3
    )
    records = made.log.records
    assert [record.id for record in records] == list(range(len(records)))
    planning, *searches, reasoning = records
    assert isinstance(planning, ModelQueryPlanningActivity)
    assert isinstance(reasoning, AgenticReasoningActivity)
    assert planning.sub_queries == [sub_query.query for sub_query in made.outcome.plan.sub_queries]
    lanes = [record for record in searches if isinstance(record, SourceActivity)]
    wanted = [(sub.id, name, sub.query) for sub in made.outcome.plan.sub_queries for name in sub.sources]
    assert [(r.sub_query_id, r.knowledge_source_name, r.arguments and r.arguments.search) for r in lanes] == wanted

    for record in records:
        assert record.started_at is not None
        assert record.completed_at is not None
        assert record.started_at <= record.completed_at
        assert record.elapsed_ms is not None
        assert record.outcome is not None
    assert planning.completed_at is not None
    assert planning.started_at is not None
    for lane in lanes:  # the question is searched while the model plans, the rest while or after it does
        assert lane.started_at is not None
        assert lane.started_at >= planning.started_at
        assert lane.started_at <= planning.completed_at or lane.sub_query_id != "q0"

    for lane in lanes:
        if lane.knowledge_source_name == "c":
            assert (lane.outcome, lane.count) == (Outcome.ERROR, 0)
        else:
            assert lane.candidates is not None
            assert lane.count == lane.candidates - (lane.dropped_by_filter or 0)
    assert reasoning.candidates == sum(lane.count or 0 for lane in lanes)
    assert reasoning.candidates == sum(
        (
            reasoning.merged or 0,
            reasoning.kept or 0,
            reasoning.dropped_by_postprocessors or 0,
            reasoning.dropped_by_budget or 0,
        )
    )
    assert reasoning.kept == len(made.nodes) == 3
    assert {part.what for part in made.missing} == {"c"}
    for node in made.nodes:
        mark = provenance(node)
        assert mark is not None
        assert records[mark["activity"]] in lanes
        for search in mark["searches"]:
            lane = records[search["activity"]]
            assert isinstance(lane, SourceActivity)
            assert (lane.sub_query_id, lane.knowledge_source_name) == (search["sub_query"], search["source"])
    assert [reference.id for reference in made.references] == ["0", "1", "2"]


def timeless(data: Any) -> Any:
    timed = ("startedAt", "completedAt", "elapsedMs", "queryTime", "seconds")
    if isinstance(data, list):
        return [timeless(item) for item in data]
    return {k: timeless(v) for k, v in data.items() if k not in timed} if isinstance(data, dict) else data


async def test_the_account_does_not_depend_on_the_way() -> None:
    """Sync and async tell the same, times apart."""

    def told(made: Retrieval) -> list[dict[str, Any]]:
        return [timeless(record.to_dict()) for record in made.log.records]

    one, other = await retrieved("sync"), await retrieved("async")
    assert told(one) == told(other)
    assert one.nodes == other.nodes
