"""Faults that cost money: plans, filters, requests and documents that ask for far too much."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import (
    DEFAULT_LIMITS,
    EffortLimits,
    InvalidRequestError,
    KnowledgeBase,
    KnowledgeSource,
    ReasoningEffort,
    RetrievalResponse,
    RetrieverOptions,
)
from llama_index_agentic_kb.planning.steps import MAX_SEARCHES
from llama_index_agentic_kb.schema import ModelQueryPlanningActivity
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM, ScriptedReply
from tests.faults.registry import fault

AREA: Final = "wallet"

QUESTION: Final = "When did the director of the film about rain die?"
LOW: Final = DEFAULT_LIMITS[ReasoningEffort.LOW]
MEDIUM: Final = DEFAULT_LIMITS[ReasoningEffort.MEDIUM]


class Counted:
    """A knowledge base whose searches and model calls are counted."""

    def __init__(self, reply: Any, *, sources: int = 2, **fields: Any) -> None:
        self.found = [MemoryRetriever([f"rain in town {number} by Ana"]) for number in range(sources)]
        self.llm = ScriptedLLM(reply)
        self.kb = KnowledgeBase(
            [KnowledgeSource(f"s{number}", retriever=one) for number, one in enumerate(self.found)],
            llm=self.llm,
            **fields,
        )

    def ask(self, **fields: Any) -> RetrievalResponse:
        return self.kb.retrieve(QUESTION, **{"output_mode": "extractiveData", **fields})

    @property
    def searches(self) -> int:
        return sum(len(one.queries) for one in self.found)

    @property
    def calls(self) -> int:
        return len(self.llm.calls)


def steps(count: int, **fields: Any) -> str:
    sub_queries = [
        {"id": f"q{number}", "query": f"rain number {number}", "sources": ["s0", "s1"], "depends_on": [], **fields}
        for number in range(1, count + 1)
    ]
    return json.dumps({"sub_queries": sub_queries})


def warnings_of(response: RetrievalResponse) -> str:
    told = [one.warning for one in response.activity or [] if isinstance(one, ModelQueryPlanningActivity)]
    return "; ".join(filter(None, [*told, *(response.plan.warnings if response.plan else [])]))


def bounded(plan: str, *, told: bool = True) -> None:
    """Plan, and see that no more is searched than the effort allows, and one call is made."""
    counted = Counted(plan)
    response = counted.ask(retrieval_reasoning_effort="low")
    assert counted.calls == 1
    assert counted.searches <= 2 * (LOW.sub_queries + 1), counted.searches
    assert not told or warnings_of(response)
    assert response.references


PLANS: Final[dict[str, str]] = {
    "plans 1,000 sub-queries": steps(1_000),
    "plans one query of 1 MB": json.dumps({"sub_queries": [{"query": "rain " * 200_000, "sources": ["s0"]}]}),
    "nests its plan 100,000 levels deep": '{"sub_queries":' + "[" * 100_000,
    "plans a chain of 500 steps": json.dumps(
        {
            "sub_queries": [
                {"id": f"q{n}", "query": f"rain {n} of #q{n - 1}", "sources": ["s0"], "depends_on": [f"q{n - 1}"]}
                for n in range(1, 501)
            ]
        }
    ),
    "names each source 1,000 times": json.dumps({"sub_queries": [{"query": "rain", "sources": ["s0", "s1"] * 1_000}]}),
}
for name, plan in PLANS.items():
    fault(AREA, f"a model {name}", "the plan is cut at the effort's limits; one call")(
        partial(bounded, plan, told="names each" not in name and "1 MB" not in name)
    )


@fault(AREA, "a model streams a plan that never ends", "reading stops at a bound, and what was read is searched")
def endless_plan() -> None:
    item = json.dumps({"query": "rain and more", "sources": ["s0"]})
    counted = Counted(ScriptedReply('{"sub_queries": [' + (item + ",") * 200_000, chunk_size=65_536))
    response = counted.ask(retrieval_reasoning_effort="low")
    assert counted.calls == 1
    assert counted.searches <= 2 * (LOW.sub_queries + 1)
    assert response.references


def by_prompt(*, plan: str, findings: str = "", revision: str = "") -> Callable[[list[ChatMessage]], str]:

    def reply(messages: list[ChatMessage]) -> str:
        shown = "\n".join(str(message.content) for message in messages)
        if '"step"' in shown:
            return findings
        return revision if "verdict" in shown.lower() or "sufficient" in shown.lower() else plan

    return reply


DEPENDENT: Final = json.dumps(
    {
        "sub_queries": [
            {"id": "q1", "query": "director of the film about rain", "sources": ["s0", "s1"], "depends_on": []},
            {"id": "q2", "query": "when did #q1 die", "sources": ["s0", "s1"], "depends_on": ["q1"]},
        ]
    }
)


@fault(AREA, "a model finds 1,000 answers to one step", "the step that builds on it becomes a few searches")
def many_answers() -> None:
    lines = "\n".join(
        json.dumps({"step": "q1", "value": f"Ana {number}", "ref": 1, "confidence": "stated"})
        for number in range(1_000)
    )
    counted = Counted(by_prompt(plan=DEPENDENT, findings=lines, revision='{"sufficient": true}'))
    counted.ask(retrieval_reasoning_effort="medium")
    assert counted.searches <= 2 * (2 + MAX_SEARCHES), counted.searches
    assert counted.calls <= 1 + MEDIUM.rounds + MEDIUM.revisions


@fault(AREA, "a model is never satisfied, and adds 500 searches each time", "one revision, cut at the effort's limit")
def never_enough() -> None:
    counted = Counted(lambda _: steps(500))
    counted.ask(retrieval_reasoning_effort="medium")
    assert counted.calls <= 1 + MEDIUM.rounds + MEDIUM.revisions, counted.calls
    most = 1 + MEDIUM.sub_queries * (1 + MEDIUM.revisions)
    assert counted.searches <= 2 * most, counted.searches


@fault(AREA, "50 sources and 8 sub-queries each", "searches stop at the request's cap, which is reported")
def many_sources() -> None:
    limits = {ReasoningEffort.MINIMAL: EffortLimits(searches=60)}
    counted = Counted("", sources=50, options=RetrieverOptions(limits=limits))
    intents = [{"search": f"rain {number}"} for number in range(8)]
    response = counted.kb.retrieve(
        {"intents": intents, "retrievalReasoningEffort": {"kind": "minimal"}, "outputMode": "extractiveData"}
    )
    assert counted.searches == 60
    assert "EffortLimits.searches" in next(part for part in response.missing if part.what == "searches").reason


@fault(AREA, "a chunk of 1 MB, answered by refine, compact and tree_summarize", "a bounded number of model calls")
def long_chunk() -> None:
    source = KnowledgeSource("docs", retriever=MemoryRetriever(["rain falls on the plain. " * 40_000]))
    for mode in ("refine", "compact", "tree_summarize"):
        llm = ScriptedLLM("It rains [ref_id:0].", context_window=8_192)
        kb = KnowledgeBase([source], llm=llm, effort="minimal")
        kb.as_query_engine(mode).query("Where does the rain fall?")
        assert len(llm.calls) <= 50, (mode, len(llm.calls))


RAIN: Final = {"messages": [{"content": "rain"}]}


def of_a_source(**params: Any) -> dict[str, Any]:
    return {**RAIN, "knowledgeSourceParams": [{"knowledgeSourceName": "s0", **params}]}


MANY: Final = {"key": "a", "operator": "in", "value": list(range(20_000))}
NAMED: Final = [{"knowledgeSourceName": f"s{number}"} for number in range(20_000)]
REQUESTS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "a question of 1 MB": ({"messages": [{"content": "rain " * 200_000}]}, "messages"),
    "20,000 messages": ({"messages": [{"content": "rain"}] * 20_000}, "messages"),
    "10,000 intents": ({"intents": [{"search": "rain"}] * 10_000}, "intents"),
    "a filter of 1 MB": (of_a_source(filterAddOn="a eq 'x' or " * 80_000 + "b eq 1"), "filterAddOn"),
    "20,000 sources that it says something about": ({**RAIN, "knowledgeSourceParams": NAMED}, "knowledgeSourceParams"),
    "a filter over 20,000 values": (of_a_source(filters=MANY), "knowledgeSourceParams[s0].filters"),
    "a filter of 5,000 nested parentheses": (
        of_a_source(filterAddOn="(" * 5_000 + "a eq 1" + ")" * 5_000),
        "filterAddOn",
    ),
}


def refused(data: dict[str, Any], field: str) -> None:
    """Ask, and see that the field is named and nothing was spent."""
    counted = Counted("unused")
    try:
        counted.kb.retrieve(data)
    except InvalidRequestError as error:
        told = str(error)
    else:
        raise AssertionError("it was taken")
    assert field in told
    assert len(told) < 1_000
    assert (counted.calls, counted.searches) == (0, 0)


for name, (data, field) in REQUESTS.items():
    fault(AREA, f"a request with {name}", "refused before anything is spent; the error names the field and the limit")(
        partial(refused, data, field)
    )


@fault(AREA, "a text node of 200,000 words without an end", "excerpts and extracts are cut within the budget")
def endless_sentence() -> None:
    source = KnowledgeSource("docs", retriever=MemoryRetriever([TextNode(text="rain " * 200_000)]))
    response = KnowledgeBase([source], effort="minimal").retrieve("rain", max_output_size_in_tokens=300)
    assert 0 < len(response.text) < 5_000
