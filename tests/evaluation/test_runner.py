from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.evaluation import (
    CorpusIndex,
    Dataset,
    EvaluationQuery,
    EvaluationRun,
    GoldPlans,
    PlannedLLM,
    System,
    compare_runs,
    evaluate,
    make_systems,
)
from llama_index_agentic_kb.evaluation.report import plan_value, render_difference, render_run
from llama_index_agentic_kb.evaluation.systems import SYSTEMS, Found


@pytest.fixture(scope="module")
def run(dataset: Dataset, corpus: CorpusIndex) -> EvaluationRun:
    planned = PlannedLLM(GoldPlans(), dataset.queries)
    made = make_systems(list(SYSTEMS), corpus, planned, documents=2)
    return evaluate(dataset, made, plans=GoldPlans().name, cutoffs=[1, 2])


def test_every_system_answers_every_question(run: EvaluationRun) -> None:
    """No system fails, and each ranking is no longer than asked."""
    assert [one.system for one in run.systems] == list(SYSTEMS)
    for one in run.systems:
        assert [(result.query_id, result.error) for result in one.results] == [("b1", None), ("p1", None)]
        assert all(0 < len(set(result.documents)) == len(result.documents) <= 2 for result in one.results)


def test_dependent_steps_find_what_one_query_misses(run: EvaluationRun) -> None:
    """The director's own page needs the director's name."""
    medium, minimal = run.run_of("medium"), run.run_of("minimal")
    assert medium is not None
    assert minimal is not None
    assert medium.values("All@2", "bridge") == [1.0]
    assert medium.results[0].plan[-1] == "When did Marta Lindqvist die?"


def test_costs_are_counted(run: EvaluationRun) -> None:
    """A plan costs a call, findings and a look for gaps one each; a search is a query at a source."""
    costs = {one.system: one.results[0].cost for one in run.systems}
    assert [costs[name].llm_calls for name in ("dense", "minimal", "low", "medium")] == [0, 0, 1, 3]
    assert costs["low"].input_tokens > 100 > costs["minimal"].input_tokens == 0
    assert (costs["minimal"].searches, costs["low"].searches, costs["medium"].queries) == (2, 6, 3)


def test_a_run_survives_json(run: EvaluationRun) -> None:
    """What is kept is read back equal."""
    assert EvaluationRun.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_a_failing_question_is_a_result(dataset: Dataset) -> None:
    """It found nothing, and says why; others go on."""

    async def ask(query: EvaluationQuery) -> Found:
        if query.id == "b1":
            raise RuntimeError("no luck")
        return Found(["d6"])

    seen: list[Any] = []
    failed = evaluate(dataset, [System("odd", ask)], cutoffs=[1], progress=lambda *told: seen.append(told))
    assert [(r.error, r.metrics["R@1"]) for r in failed.systems[0].results] == [
        ("RuntimeError: no luck", 0.0),
        (None, 1.0),
    ]
    assert seen[-1] == ("odd", 2, 2)
    assert "1 questions failed, the first: RuntimeError: no luck" in shown(failed)


def test_unknown_systems_and_missing_models_are_refused(corpus: CorpusIndex) -> None:
    """The message names what there is, or what is missing."""
    with pytest.raises(ConfigurationError, match="systems: sparse is unknown; known are dense"):
        make_systems(["dense", "sparse"], corpus, None, documents=2)
    with pytest.raises(ConfigurationError, match="systems: low plan; say where plans come from"):
        make_systems(["low"], corpus, None, documents=2)


def shown(run: EvaluationRun) -> str:
    console = Console(width=250, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(render_run(run))
    return captured.get()


def test_the_report_names_the_oracle_and_what_the_plan_was_worth(run: EvaluationRun) -> None:
    """Quality with intervals, costs, kinds of questions; an oracle is called one."""
    report = shown(run)
    assert "plans: ORACLE plans (gold fields)" in report
    assert "bridge (1)" in report
    assert "plan value" in report
    assert "1 queries have no judgment above 0" in report
    low = run.run_of("medium")
    assert low is not None
    assert plan_value(run, low).startswith("+33.3 %")


def test_two_runs_are_compared(run: EvaluationRun) -> None:
    """Evidence gained and lost, by question; other sets are refused."""
    changed = EvaluationRun.from_dict(json.loads(json.dumps(run.to_dict())))
    changed.systems[0].results[1].documents = ["d6", "d1"]
    changed.systems[0].results[0].documents = []
    changed.systems[0].results[0].plan = ["another"]
    difference = compare_runs(run, changed)
    changes = difference.systems[0].changes
    assert changes[0].plan_changed
    assert changes[0].lost
    assert not any(change.gained or change.lost for one in difference.systems[1:] for change in one.changes)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render_difference(difference))
    assert "dense b1: gained -, lost" in captured.get()
    changed.dataset = "another"
    with pytest.raises(InvalidRequestError, match="can't be compared"):
        compare_runs(run, changed)
