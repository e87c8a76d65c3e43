"""What the evidence's tests share: searches that have found what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.schema import SourceActivity, SubQuery
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeList, distinct_nodes, node_key
from llama_index_agentic_kb.testing import MemoryRetriever

Found = Sequence["tuple[str, float | None] | NodeWithScore"]


def make_lane(
    number: int,
    found: Found,
    *,
    over: KnowledgeSource | None = None,
    query: str = "q0",
    scale: Any = None,
    lexical: Found | None = None,
) -> SourceSearch:
    """Return a search with an activity's number that has found (name, score) pairs, or nodes, in one list or two."""

    def made(kind: str, found: Found, scale: object = None) -> NodeList:
        nodes = [one if isinstance(one, NodeWithScore) else _node(*one) for one in found]
        return NodeList(kind, nodes, [node_key(one.node) for one in nodes], scale)

    over = over or KnowledgeSource("docs", retriever=MemoryRetriever([]))
    lists = [made("dense", found, scale)]
    if lexical is not None:
        lists.append(made("lexical", lexical))
    record = SourceActivity(id=number, knowledge_source_name=over.name, sub_query_id=query)
    sub_query = SubQuery(id=query, query=f"query {query}", sources=[over.name])
    return SourceSearch(
        sub_query,
        over,
        number,
        record,
        words=sub_query.query,
        lists=tuple(lists),
        nodes=[*distinct_nodes(lists).values()],
    )


def _node(name: str, score: float | None) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=name, text=f"text of {name}", metadata={"title": name}), score=score)
