"""A small world to search: texts, a model that plans and reads by a script, and a retriever over both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb import (
    AgenticRetriever,
    EffortLimits,
    KnowledgeBase,
    KnowledgeSource,
    RetrieverOptions,
    interleave,
)
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.llm import LanguageModel
from llama_index_agentic_kb.planning import Scope
from llama_index_agentic_kb.planning.effort import DEFAULT_LIMITS, as_effort
from llama_index_agentic_kb.planning.planner import PlanningModel, Task
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import (
    AgenticReasoningActivity,
    ModelQueryPlanningActivity,
    ReasoningEffort,
    RetrievalRequest,
    RetrievalResponse,
    SourceActivity,
    SourceParams,
    SubQuery,
)
from llama_index_agentic_kb.sources.base import SelectedSource
from llama_index_agentic_kb.sources.fan_out import FanOut, SourceSearch
from llama_index_agentic_kb.sources.search import NodeList, node_key
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM, ScriptedReply

Said: TypeAlias = "str | Exception | ScriptedReply"
Says: TypeAlias = "Said | Callable[[str], Said] | list[Said | Callable[[str], Said]]"

KINDS = {"You plan searches": "plan", "You read what": "findings", "You judge whether": "revision"}


def steps(*proposals: dict[str, Any]) -> str:
    items = [
        {"id": f"q{number}", "depends_on": [], "finds": "", **proposal}
        for number, proposal in enumerate(proposals, start=1)
    ]
    return json.dumps({"sub_queries": items})


def line(step: str, *answers: Any) -> str:
    """One line of findings; an answer is a value alone, or (value, ref), or (value, ref, confidence)."""
    told = []
    for answer in answers:
        value, ref, confidence = (*(answer if isinstance(answer, tuple) else (answer,)), None, None)[:3]
        told.append({"value": value, "ref": ref, "confidence": confidence or "stated"})
    return json.dumps({"step": step, "answers": told})


def sufficient() -> str:
    return json.dumps({"sufficient": True, "gaps": [], "sub_queries": []})


def refs(prompt: str) -> dict[str, int]:
    """The ref_id of each passage of a prompt, by its title."""
    found = {}
    for part in prompt.split('<passage ref_id="')[1:]:
        number, rest = part.split('" title="', 1)
        found[rest.split('"', 1)[0]] = int(number)
    return found


@dataclass
class World:
    """What is searched, and what the model says: a list is used up call by call, a function is given the prompt."""

    pages: dict[str, str]
    plan: Says = ""
    findings: Says = ""
    revision: Says = field(default_factory=sufficient)
    answer: Says = "It is the river [ref_id:0]."
    source: dict[str, Any] = field(default_factory=dict)
    prompts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        nodes = [TextNode(id_=title, text=text, metadata={"title": title}) for title, text in self.pages.items()]
        self.memory = MemoryRetriever(nodes, **self.source)
        self.llm = ScriptedLLM(self._say)

    def _say(self, messages: list[ChatMessage]) -> Said:
        system, user = (str(message.content) for message in messages)
        kind = next((name for start, name in KINDS.items() if system.startswith(start)), "answer")
        before = self.calls(kind)
        self.prompts.append((kind, user))
        says: Any = getattr(self, kind)
        says = says[before] if isinstance(says, list) else says
        return says(user) if callable(says) else says  # type: ignore[no-any-return]

    def prompts_of(self, kind: str) -> list[str]:
        return [text for one, text in self.prompts if one == kind]

    def calls(self, kind: str) -> int:
        return len(self.prompts_of(kind))

    @property
    def asked(self) -> list[str]:
        return list(self.memory.queries)

    def search(
        self,
        question: str,
        effort: str = "medium",
        *,
        sources: Sequence[KnowledgeSource] | None = None,
        limits: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Retrieval:
        known = {name: getattr(DEFAULT_LIMITS[as_effort(effort)], name) for name in EffortLimits.__slots__}
        retriever = AgenticRetriever(
            sources or [KnowledgeSource("docs", "All there is.", retriever=self.memory)],
            llm=self.llm,
            effort=effort,
            options=RetrieverOptions(limits={as_effort(effort): EffortLimits(**{**known, **(limits or {})})}),
            **fields,
        )
        return run(retriever.retrieval(RetrievalRequest.parse({"messages": [{"content": question}]})))

    def respond(self, question: str, source: KnowledgeSource | None = None, **fields: Any) -> RetrievalResponse:
        """Answer at medium effort."""
        asked = source or KnowledgeSource("docs", retriever=self.memory)
        return KnowledgeBase([asked], llm=self.llm, effort="medium").retrieve(question, **fields)


def planning_of(made: Retrieval, purpose: str) -> list[ModelQueryPlanningActivity]:
    return [r for r in made.log.records if isinstance(r, ModelQueryPlanningActivity) and r.purpose == purpose]


def searches_of(made: Retrieval) -> list[SourceActivity]:
    return [record for record in made.log.records if isinstance(record, SourceActivity)]


def reasoning_of(made: Retrieval) -> AgenticReasoningActivity:
    record = made.log.last(AgenticReasoningActivity)
    assert record is not None
    return record


def queries_of(made: Retrieval) -> dict[str, str]:
    return {one.id: one.query for one in made.outcome.plan.sub_queries}


def planner(llm: LLM, spotlighting: Any = "delimit") -> PlanningModel:
    manager = CallbackManager()
    return PlanningModel(LanguageModel(llm, lambda: manager), spotlighting)


def task(scope: Scope, limits: EffortLimits, sources: Sequence[SelectedSource] = ()) -> Task:
    log = ActivityLog(CallbackManager())
    fan_out = FanOut({one.name: one for one in sources}, log, top_k=1, search_seconds=1)
    return Task(scope, ReasoningEffort.LOW, limits, None, interleave, fan_out, log)


SOURCE = KnowledgeSource("docs", retriever=MemoryRetriever([]))


def found_by(nodes: Sequence[NodeWithScore], name: str = "q0", query: str = "x") -> SourceSearch:
    """A search that has found these nodes."""
    record = SourceActivity(id=0, knowledge_source_name="docs", sub_query_id=name)
    return SourceSearch(
        SubQuery(id=name, query=query, sources=["docs"]),
        SOURCE,
        record.id,
        record,
        lists=(NodeList("dense", [*nodes], [node_key(one.node) for one in nodes]),),
        nodes=nodes,
    )


def selected(name: str, description: str = "", *, always: bool = False) -> SelectedSource:
    """A source that a request may search."""
    source = KnowledgeSource(name, description, retriever=MemoryRetriever([]))
    return SelectedSource(name, source, SourceParams(knowledge_source_name=name, always_query_source=always), None)
