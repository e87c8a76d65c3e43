from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llama_index_agentic_kb import AgenticRetriever
from llama_index_agentic_kb._flow import run
from llama_index_agentic_kb.errors import InvalidRequestError, LLMError
from llama_index_agentic_kb.evaluation import (
    CorpusIndex,
    Dataset,
    EvaluationQuery,
    GoldPlans,
    PlannedLLM,
    RecordedPlans,
)

if TYPE_CHECKING:
    from tests.conftest import Serve


def question(dataset: Dataset) -> str:
    return dataset.queries[0].text


def test_gold_fields_are_steps(dataset: Dataset) -> None:
    """Operations need no search; a rewrite is the one step of a set without decompositions."""
    steps = GoldPlans().steps(dataset.queries[0])
    assert [(step.id, step.depends_on, step.answers) for step in steps] == [
        ("1", (), ("Marta Lindqvist",)),
        ("2", ("1",), ("3 May 1960",)),
    ]
    assert GoldPlans().steps(dataset.queries[1]) == []
    rewritten = EvaluationQuery("x", "and then?", fields={"rewrite": "What came then?"})
    assert [step.text for step in GoldPlans().steps(rewritten)] == ["What came then?"]


def test_recorded_plans_keep_what_was_not_found(tmp_path: Path) -> None:
    """A recorded null is no answer."""
    file = tmp_path / "plans.jsonl"
    row = {"_id": "b1", "plan": [{"id": 1, "text": "x?", "depends_on": []}], "answers": {"1": None}, "final": "no"}
    file.write_text(json.dumps(row), encoding="utf-8")
    plans = RecordedPlans.load(file)
    assert "plans.jsonl" in plans.name
    assert [step.answers for step in plans.steps(EvaluationQuery("b1", "?"))] == [()]
    assert plans.steps(EvaluationQuery("other", "?")) == []
    file.write_text('{"_id": "b1"}', encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=r"plans\.jsonl, line 1: no recorded plan"):
        RecordedPlans.load(file)


@pytest.mark.parametrize("effort", ["low", "medium"])
def test_given_plans_go_the_way_of_every_plan(dataset: Dataset, corpus: CorpusIndex, effort: str) -> None:
    """At low the second step is searched in the question's words, at medium with the gold answer."""
    retriever = AgenticRetriever(corpus.sources(), llm=PlannedLLM(GoldPlans(), dataset.queries), effort=effort)
    retrieval = run(retriever.retrieval(retriever.request_for(question(dataset))))
    queries = [sub_query.query for sub_query in retrieval.plan.sub_queries]
    last = "When did Marta Lindqvist die?" if effort == "medium" else "When did Who directed Silent Harbour die?"
    assert queries == [question(dataset), "Who directed Silent Harbour?", last]


def test_the_same_plans_behind_a_server(dataset: Dataset, corpus: CorpusIndex, serve: Serve) -> None:
    """Through the real OpenAI client over HTTP the plan is the same."""
    planned = PlannedLLM(GoldPlans(), dataset.queries)
    server = serve(lambda request: planned.reply_to(request.text))
    found = []
    for llm in (planned, server.llm()):
        retriever = AgenticRetriever(corpus.sources(), llm=llm, effort="medium")
        retrieval = run(retriever.retrieval(retriever.request_for(question(dataset))))
        found.append(([s.query for s in retrieval.plan.sub_queries], [node.node_id for node in retrieval.nodes]))
    assert found[0] == found[1]


def test_other_prompts_are_refused(dataset: Dataset) -> None:
    """It is no model: what is not asked of a plan has no answer."""
    planned = PlannedLLM(GoldPlans(), dataset.queries)
    with pytest.raises(LLMError, match="no question of the evaluation set"):
        planned.reply_to("Question: What else?\nPlan:")
    with pytest.raises(LLMError, match="no others"):
        planned.reply_to(f"Question: {question(dataset)}\nAnswer:")


def test_queries_of_a_fusion_retriever_are_the_steps(dataset: Dataset) -> None:
    """LlamaIndex's QueryFusionRetriever gets the gold queries, one a line."""
    prompt = f"a helpful assistant that generates multiple search queries\nQuery: {question(dataset)}\nQueries:"
    assert PlannedLLM(GoldPlans(), dataset.queries).complete(prompt).text.splitlines()[0] == (
        "Who directed Silent Harbour?"
    )
