from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rich.console import Console

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evaluation import (
    CorpusIndex,
    Dataset,
    EvaluationQuery,
    EvaluationRun,
    PlannedLLM,
    QueryResult,
    evaluate,
    gold_steps,
    make_systems,
    render_run,
)
from llama_index_agentic_kb.evaluation.systems import SYSTEMS, Ask

ORACLE = "ORACLE plans (gold fields)"


@pytest.fixture(scope="module")
def run(dataset: Dataset, corpus: CorpusIndex) -> EvaluationRun:
    planned = PlannedLLM(ORACLE, gold_steps, dataset.queries)
    made = make_systems(list(SYSTEMS), corpus, planned, documents=2)
    return evaluate(dataset, made, plans=ORACLE, cutoffs=[1, 2])


def test_every_system_answers_every_question(run: EvaluationRun) -> None:
    """No system fails, and each ranking is no longer than asked."""
    assert tuple(run.systems) == SYSTEMS
    for results in run.systems.values():
        assert [(result.query_id, result.error) for result in results] == [("b1", None), ("p1", None)]
        assert all(0 < len(set(result.documents)) == len(result.documents) <= 2 for result in results)


def test_dependent_steps_find_what_one_query_misses(run: EvaluationRun) -> None:
    """The director's own page needs the director's name."""
    assert run.values("medium", "All@2", "bridge") == [1.0]
    assert run.systems["medium"][0].plan[-1] == "When did Marta Lindqvist die?"


def test_costs_are_counted(run: EvaluationRun) -> None:
    """A plan costs a call, findings and a look for gaps one each; each query is embedded once, at two sources."""
    costs = {system: results[0].cost for system, results in run.systems.items()}
    calls = {name: cost.llm_calls for name, cost in costs.items() if name != "auto"}
    assert calls == {"dense": 0, "bm25": 0, "hybrid": 0, "query_fusion": 1, "minimal": 0, "low": 1, "medium": 3}
    assert costs["low"].input_tokens > 100 > costs["minimal"].input_tokens == 0
    assert costs["medium"].output_tokens > costs["low"].output_tokens > 10
    assert costs["query_fusion"].output_tokens > 0
    texts = {name: costs[name].embedded_texts for name in ("dense", "bm25", "hybrid", "minimal", "low", "medium")}
    assert texts == {"dense": 2, "bm25": 0, "hybrid": 2, "minimal": 1, "low": 3, "medium": 3}
    searches = {name: costs[name].searches for name in ("dense", "bm25", "hybrid", "minimal", "low", "medium")}
    assert searches == {"dense": 2, "bm25": 2, "hybrid": 4, "minimal": 4, "low": 12, "medium": 12}


def test_costs_of_questions_side_by_side_are_kept_apart(dataset: Dataset, corpus: CorpusIndex) -> None:
    """Eight askings at once cost what one alone costs, each."""
    planned = PlannedLLM(ORACLE, gold_steps, dataset.queries)
    system = make_systems(["medium"], corpus, planned, documents=2)["medium"]

    async def ask(times: int) -> list[Any]:
        return [found.cost for found in await asyncio.gather(*(system(dataset.queries[0]) for _ in range(times)))]

    asyncio.run(ask(1))  # from now on all vectors are in the cache
    (alone,) = asyncio.run(ask(1))
    assert asyncio.run(ask(8)) == [alone] * 8


def test_query_fusion_without_a_model_asks_none(dataset: Dataset, corpus: CorpusIndex) -> None:
    """It searches the question alone, and needs no key."""
    run = evaluate(dataset, make_systems(["query_fusion"], corpus, None, documents=2))
    assert [(one.error, one.cost.llm_calls) for one in run.systems["query_fusion"]] == [(None, 0), (None, 0)]


def test_a_failing_question_is_a_result(dataset: Dataset) -> None:
    """It found nothing, and says why, without secrets; others go on."""

    async def ask(query: EvaluationQuery) -> QueryResult:
        if query.id == "b1":
            raise RuntimeError("no luck, api_key=abc123")
        return QueryResult(["d6"])

    seen: list[Any] = []
    failed = evaluate(dataset, {"odd": ask}, cutoffs=[1], progress=lambda *state: seen.append(state))
    assert [(r.error, r.metrics["R@1"]) for r in failed.systems["odd"]] == [
        ("RuntimeError: no luck, api_key=***", 0.0),
        (None, 1.0),
    ]
    assert seen[-1] == ("odd", 2, 2)
    assert "1 questions failed, the first: RuntimeError: no luck" in shown(failed)


def test_a_failed_question_has_the_cost_of_its_calls(
    dataset: Dataset, corpus: CorpusIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was embedded and searched before the failure."""

    def broken(*_: Any) -> None:
        raise RuntimeError("no index")

    monkeypatch.setattr(next(iter(corpus.lexical.values())), "search", broken)
    for result in evaluate(dataset, make_systems(["hybrid"], corpus, None, documents=1)).systems["hybrid"]:
        assert result.error == "RuntimeError: no index"
        assert result.cost.embedded_texts > 0
        assert result.cost.searches > 0


def test_a_system_without_its_model_is_refused(corpus: CorpusIndex) -> None:
    """The message names it."""
    with pytest.raises(ConfigurationError, match="systems: low plan; say where plans come from"):
        make_systems(["low"], corpus, None, documents=2)


def shown(run: EvaluationRun) -> str:
    console = Console(width=250, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(render_run(run, run.summary()))
    return captured.get()


def test_the_report_names_the_oracle_and_what_the_plan_was_worth(run: EvaluationRun) -> None:
    """Quality with intervals, costs, kinds of questions; in each table an oracle is called one."""
    report = " ".join(shown(run).split())
    assert report.count("plans: ORACLE plans (gold fields)") == 3
    assert "bridge (1)" in report
    assert "plan value" in report
    assert "1 queries have no judgment above 0" in report


def made_up(**documents: list[list[str]]) -> EvaluationRun:
    """Return a run of systems that find these documents, over four questions of two relevant documents each."""

    def system(found: list[list[str]]) -> Ask:
        async def ask(query: EvaluationQuery) -> QueryResult:
            return QueryResult(found[int(query.id)], plan=[query.text])

        return ask

    kinds = [("a",), ("a", "b"), ("b",), ("a",)]
    queries = [EvaluationQuery(str(at), f"question {at}", kinds[at]) for at in range(4)]
    relevant = {query.id: {"x": 1.0, "y": 1.0} for query in queries}
    systems = {name: system(found) for name, found in documents.items()}
    return evaluate(Dataset("made up", [], queries, relevant), systems, cutoffs=[2])


def test_a_run_in_numbers() -> None:
    """By kind, beside the baseline, and what a plan was worth: 6 of 8 gained, 1 lost, worked out by hand."""
    run = made_up(
        hybrid=[["x"], ["x"], [], []], minimal=[["x"], [], [], []], low=[["y"], ["x", "y"], ["x", "y"], ["z", "x"]]
    )
    hybrid, minimal, low = run.summary()
    kinds = low["kinds"]
    assert {name: kind["questions"] for name, kind in kinds.items()} == {"all": 4, "a": 3, "b": 2}
    assert kinds["all"]["metrics"]["R@2"]["mean"] == pytest.approx((0.5 + 1 + 1 + 0.5) / 4)
    assert kinds["b"]["metrics"]["All@2"]["mean"] == 1
    assert kinds["a"]["differences"]["R@2"]["mean"] == pytest.approx((0 + 0.5 + 0.5) / 3)
    assert (hybrid["kinds"]["all"]["differences"], minimal["plan_value"]) == ({}, None)
    assert low["plan_value"] == pytest.approx({"gained": 6 / 8, "lost": 1 / 8})
    assert "50.0 (+50.0)" in shown(run)
    assert "100.0 (+100.0*)" in shown(run)
