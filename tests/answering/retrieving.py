"""Real retrievals over small sources, for what is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import BaseNode

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import RetrievalRequest
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM

APOLLO = "Apollo 11 was launched by a Saturn V rocket."
SATURN = "The Saturn V rocket was 110.6 m tall."


def source(items: Sequence[str | BaseNode], name: str = "docs", **kwargs: Any) -> KnowledgeSource:
    """A source over texts or nodes, which finds up to 20 that share a word with the query."""
    retriever = MemoryRetriever(items, similarity_top_k=20, **kwargs.pop("memory", {}))
    if "permissions" in kwargs:
        return KnowledgeSource(name, retriever_factory=lambda _: retriever, **kwargs)
    return KnowledgeSource(name, retriever=retriever, **kwargs)


def retrieved(
    sources: Sequence[KnowledgeSource], question: str, params: Sequence[dict[str, Any]] = (), **kwargs: Any
) -> Retrieval:
    request = RetrievalRequest.parse(
        {
            "messages": [{"role": "user", "content": question}],
            "knowledgeSourceParams": [{"kind": "searchIndex", **one} for one in params],
        }
    )
    retrieval = run(AgenticRetriever(sources, **{"effort": "minimal", **kwargs}).retrieval(request))
    retrieval.arrange(retrieval.nodes)
    return retrieval


def planner(
    sub_queries: Sequence[dict[str, Any]], findings: Sequence[dict[str, Any]] = (), revision: Any = None
) -> Any:
    """A model that plans these sub-queries, reads these findings and says this of gaps."""

    def reply(messages: Sequence[ChatMessage]) -> str:
        text = str(messages)
        if "You plan searches" in text:
            return json.dumps({"sub_queries": sub_queries})
        if "You read what the steps" in text:
            return "\n".join(map(json.dumps, findings))
        if "gaps" in text:
            return json.dumps(revision or {"sufficient": True, "gaps": [], "sub_queries": []})
        return "It was 110.6 m tall [ref_id:0]."

    return ScriptedLLM(reply)
