"""Real retrievals over small sources, for what is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import BaseNode

from llama_index_agentic_kb import AgenticRetriever, KnowledgeBase, KnowledgeSource
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


QUESTION = "How tall was the Saturn V rocket of Apollo 11 and when was it launched?"
TEXTS = [
    "The Saturn V rocket was 110.6 m tall.",
    "Apollo 11 was launched by a Saturn V rocket in July 1969.",
    "The Saturn V rocket of Apollo was built in several places.",
]
GOOD = "The Saturn V was 110.6 m tall [ref_id:{0}]. Apollo 11 was launched in July 1969 [ref_id:{1}]."


class Model:
    """A language model that plans and answers as told, and keeps its prompts."""

    def __init__(self, answer: str = GOOD, plan: dict[str, Any] | None = None, related: str = "[]") -> None:
        self.answer = answer
        self.plan = plan or {"sub_queries": []}
        self.related = related
        self.prompts: list[str] = []
        self.order: list[int] = []
        """Each text's number in the prompt for the answer, which takes the place of ``{0}`` and so on."""

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        prompt = "\n".join(str(message.content) for message in messages)
        self.prompts.append(prompt)
        if prompt.startswith("You plan searches"):
            return json.dumps(self.plan)
        if not prompt.startswith("You answer questions"):
            return self.related
        ranked = sorted(range(3), key=lambda number: prompt.find(TEXTS[number]))
        self.order = [ranked.index(number) for number in range(3)]
        return self.answer.format(*self.order)

    @property
    def writing(self) -> str:
        return next(prompt for prompt in self.prompts if prompt.startswith("You answer questions"))


def base(model: Model, *sources: KnowledgeSource, **fields: Any) -> KnowledgeBase:
    given = sources or (KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS, similarity_top_k=3)),)
    return KnowledgeBase(list(given), llm=ScriptedLLM(model), **{"effort": "minimal", **fields})
