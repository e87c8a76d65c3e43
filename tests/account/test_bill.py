"""The account is the bill: what a metering model server billed is the sum over the activity records, in every mode."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.response_synthesizers import get_response_synthesizer

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.grounding.settings import Grounding
from llama_index_agentic_kb.schema import ActivityRecord, AgenticReasoningActivity, ModelAnswerSynthesisActivity
from llama_index_agentic_kb.search.rerank import Reranker
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, MemoryRetriever, Reply

QUESTION = "How tall was the Saturn V rocket, and when was Apollo 11 launched?"
TEXTS = ["The Saturn V rocket was 110.6 m tall.", "Apollo 11 was launched by a Saturn V rocket in July 1969."]
ANSWER = "It was 110.6 m tall [ref_id:0]. It was painted green all over."
PLAN = {
    "sub_queries": [
        {"id": "q1", "query": "height of the Saturn V", "finds": "the height"},
        {"id": "q2", "query": "launch of #q1", "depends_on": ["q1"]},
    ]
}
FOUND = {"step": "q1", "answers": [{"value": "110.6 m", "passage": 0, "confidence": "stated"}]}


def reply(request: ChatRequest) -> str | Reply:
    for asked, said in (
        ("You plan searches", json.dumps(PLAN)),
        ("Relevance: ", "Doc: 1, Relevance: 7"),
        ("follow-up", json.dumps([{"question": "How tall?", "ref": 0, "quote": "Saturn V rocket was 110.6"}])),
        ("You correct one sentence", "It was tall [ref_id:0]."),
        ("verdict", '{"claim": 0, "verdict": "supported"}\n{"claim": 1, "verdict": "unsupported"}'),
        ("sub_queries", json.dumps({"sufficient": True, "sub_queries": []})),
        ("stated", json.dumps(FOUND)),
    ):
        if re.search(asked, request.text):
            return said
    return Reply(ANSWER, chunk_size=9)


def billed(records: list[ActivityRecord] | None) -> int:
    return sum(
        (getattr(one, "input_tokens", 0) or 0)
        + (getattr(one, "output_tokens", 0) or 0)
        + (getattr(one, "reasoning_tokens", 0) or 0)
        for one in records or []
    )


@pytest.fixture(scope="module")
def server() -> Any:
    with LoopbackOpenAI(reply) as running:
        yield running


def knowledge_base(server: LoopbackOpenAI, *, effort: str, rerank: str, judge: bool, repair: Any) -> KnowledgeBase:
    llm = server.llm()
    ranked = LLMRerank(llm=llm, top_n=2)
    return KnowledgeBase(
        [KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))],
        llm=llm,
        effort=effort,
        reranker=Reranker(ranked) if rerank == "reranker" else None,
        node_postprocessors=[ranked] if rerank == "postprocessor" else [],
        grounding=Grounding(scorer=server.llm() if judge else "lexical", repair=repair, seconds=20.0),
    )


DOORS = {
    "retrieve": lambda kb: kb.retrieve(QUESTION).activity,
    "extracts": lambda kb: kb.retrieve(QUESTION, output_mode="extractiveData").activity,
    "answer": lambda kb: kb.answer(QUESTION, related_questions=True).account.activity,
    "stream_answer": lambda kb: list(kb.stream_answer(QUESTION, related_questions=True))[-1].account.activity,
    "refine": lambda kb: kb.as_query_engine("refine").query(QUESTION).account.activity,
    "compact": lambda kb: kb.as_query_engine("compact").query(QUESTION).account.activity,
    "accumulate": lambda kb: kb.as_query_engine("accumulate").query(QUESTION).account.activity,
    "tree": lambda kb: kb.as_query_engine("tree_summarize").query(QUESTION).account.activity,
    "engine's postprocessor": lambda kb: (
        kb.as_query_engine(node_postprocessors=[LLMRerank(llm=kb.llm, top_n=1)]).query(QUESTION).account.activity
    ),
    "LlamaIndex's synthesizer": lambda kb: (
        kb.as_query_engine(response_synthesizer=get_response_synthesizer(llm=kb.llm)).query(QUESTION).account.activity
    ),
}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    door=st.sampled_from(sorted(DOORS)),
    effort=st.sampled_from(["minimal", "low", "medium", "auto"]),
    rerank=st.sampled_from(["none", "reranker", "postprocessor"]),
    judge=st.booleans(),
    repair=st.sampled_from([None, "drop", "rewrite"]),
)
def test_the_account_is_the_bill(server: LoopbackOpenAI, door: str, **chosen: Any) -> None:
    """Planning, reading, ranking, writing, checking, repairing, related questions; nothing twice, nothing left out."""
    before = server.billed.total_tokens
    activity = DOORS[door](knowledge_base(server, **chosen))
    assert billed(activity) == server.billed.total_tokens - before


def test_each_purpose_has_a_record_of_its_own(server: LoopbackOpenAI) -> None:
    """With its calls, its model and its tokens."""
    kb = knowledge_base(server, effort="low", rerank="reranker", judge=True, repair="rewrite")
    account = kb.answer(QUESTION, related_questions=True).account
    activity = [] if account is None else account.activity or []
    calls = {one.purpose: one for one in activity if isinstance(one, ModelAnswerSynthesisActivity)}
    assert list(calls) == ["answer", "check", "repair", "relatedQuestions"]
    assert all(one.calls and one.input_tokens and one.output_tokens and one.model for one in calls.values())
    (reasoning,) = [one for one in activity if isinstance(one, AgenticReasoningActivity)]
    assert (reasoning.reasoning_tokens or 0) > 0


def test_a_reply_that_is_refused_is_billed() -> None:
    """A filtered answer cost its tokens."""
    with LoopbackOpenAI(lambda _: Reply("So", finish_reason="content_filter")) as filtering:
        kb = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))], llm=filtering.llm())
        seen: list[ActivityRecord] = []
        with pytest.raises(Exception, match="filter"):
            kb.retrieve(QUESTION, retrieval_reasoning_effort="minimal", on_activity=seen.append)
        assert billed([*{one.id: one for one in seen}.values()]) == filtering.billed.total_tokens > 0
