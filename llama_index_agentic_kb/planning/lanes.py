"""What the answers that were read say about the lanes that they were read in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.schema import Confidence, Finding, Outcome, SearchLane, SourceActivity, SubQuery
from llama_index_agentic_kb.sources.base import NodeKey, NodeList, node_key
from llama_index_agentic_kb.sources.fan_out import SourceSearch

__all__ = ["brings_news", "favour", "pointing"]

NEWS_DEPTH: Final = 5
"""Documents of each search that are looked at to tell whether a wave brought anything new."""


def brings_news(lanes: Sequence[SourceSearch], wave: int) -> bool:
    """Whether a wave's searches brought a document among their best that no earlier one had brought."""
    before: set[NodeKey] = set()
    after: set[NodeKey] = set()
    for lane in lanes:
        keys = {node_key(node.node) for node in lane.nodes[:NEWS_DEPTH]}
        (before if lane.sub_query.wave < wave else after).update(keys)
    return bool(after - before)


def pointing(
    child: SubQuery, answers: Sequence[Finding], lanes: Sequence[SourceSearch], log: ActivityLog
) -> Iterator[SourceSearch]:
    """Give a sub-query that needs no search the passages that answer it: they have a place in the evidence.

    Args:
        child: Its answers were read before it was searched.
        answers: Each with its passage.
        lanes: What was found by now.
        log: Tells that it was not searched.
    """
    told = {answer.node_id for answer in answers}
    for lane in lanes:
        nodes = [node for node in lane.nodes if node.node_id in told]
        if nodes:
            yield SourceSearch(child, lane.source, _recorded(child, lane, nodes, log), (NodeList("earlier", nodes),))
            told -= {node.node_id for node in nodes}


def _recorded(child: SubQuery, lane: SourceSearch, nodes: Sequence[NodeWithScore], log: ActivityLog) -> SourceActivity:
    note = f"not searched: answered by what {lane.sub_query.id} found"
    told = SearchLane(kind="earlier", count=len(nodes), candidates=len(nodes), note=note)
    name = lane.source.name
    record = log.open(
        SourceActivity,
        CBEventType.SUB_QUESTION,
        {EventPayload.SUB_QUESTION: SubQuestionAnswerPair(sub_q=SubQuestion(sub_question=child.query, tool_name=name))},
        type=lane.source.kind,
        knowledge_source_name=name,
        sub_query_id=child.id,
    )
    log.close(record, outcome=Outcome.OK, count=len(nodes), candidates=len(nodes), lanes=[told])
    return record


def favour(lanes: Sequence[SourceSearch], findings: Sequence[Finding]) -> None:
    """Let the passages that say what sub-queries found count once more in their own searches."""
    stated = {(one.sub_query_id, one.node_id) for one in findings if one.confidence is Confidence.STATED}
    for lane in lanes:
        said = [node for node in lane.nodes if (lane.sub_query.id, node.node_id) in stated]
        if said:  # without their scores: they may be of any list
            finding = NodeList("finding", [NodeWithScore(node=node.node) for node in said])
            lane.lists = (*lane.lists, finding)
