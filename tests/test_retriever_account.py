from __future__ import annotations

import json
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, RetrievalRequest
from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.evidence.candidates import provenance
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import (
    AgenticReasoningActivity,
    ModelQueryPlanningActivity,
    Outcome,
    SourceActivity,
)
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM

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
    assert planning.sub_queries == [sub_query.query for sub_query in made.plan.sub_queries]
    lanes = [record for record in searches if isinstance(record, SourceActivity)]
    wanted = [(sub.id, name, sub.query) for sub in made.plan.sub_queries for name in sub.sources]
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
