from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from llama_index_agentic_kb.cli import app
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evaluation import (
    METRICS,
    CorpusIndex,
    Dataset,
    EvaluationQuery,
    EvaluationRun,
    PlannedLLM,
    QueryResult,
    evaluate,
    gold_steps,
    make_systems,
    read_dataset,
    render_run,
    systems,
)
from llama_index_agentic_kb.evaluation.runner import mean
from llama_index_agentic_kb.evaluation.systems import SYSTEMS, Ask
from llama_index_agentic_kb.testing import HashEmbedding
from tests.evaluation.tiny_set import lines, write_set

ORACLE = "ORACLE plans (gold fields)"


@pytest.fixture(scope="module")
def run(dataset: Dataset, corpus: CorpusIndex) -> EvaluationRun:
    planned = PlannedLLM(ORACLE, gold_steps, dataset.queries)
    made = make_systems(list(SYSTEMS), corpus, planned, documents=2)
    return evaluate(dataset, made, plans=ORACLE, cutoffs=[1, 2])


def test_every_system_answers_every_question(run: EvaluationRun) -> None:
    """No system fails, each ranking is no longer than asked, and dependent steps find what one query misses."""
    assert tuple(run.systems) == SYSTEMS
    for results in run.systems.values():
        assert [(result.query_id, result.error) for result in results] == [("b1", None), ("p1", None)]
        assert all(0 < len(set(result.documents)) == len(result.documents) <= 2 for result in results)
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


def test_metrics_are_those_worked_out_by_hand() -> None:
    """Of grades 2, 1 and 1, the first and the last are found, at the first and the third place; one comes too late."""
    relevant = {"a": 2.0, "b": 1.0, "c": 1.0}
    found = {name: measure(["a", "x", "b", "c"], relevant, 3) for name, measure in METRICS.items()}
    gain, best = 2 + 1 / 2, 2 + 1 / math.log2(3) + 1 / 2
    assert found == pytest.approx({"R": 2 / 3, "All": 0, "nDCG": gain / best, "MRR": 1})
    late = {name: measure(["x", "x", "b", "a", "c"], relevant, 5) for name, measure in METRICS.items()}
    assert (late["All"], late["MRR"]) == (1, 1 / 3)
    assert late["nDCG"] < METRICS["nDCG"](["x", "a", "b", "c"], relevant, 5) < 1
    assert METRICS["nDCG"](["a", "b", "c"], relevant, 2) == 1


def test_an_interval_holds_its_mean_and_shrinks_with_more_values() -> None:
    """Four times the values halve its width, about; the same seed gives the same interval."""
    narrow, wide = mean([0.0, 1.0] * 200), mean([0.0, 1.0] * 50)
    assert narrow["low"] < narrow["mean"] == 0.5 < narrow["high"]
    assert 1.6 < (wide["high"] - wide["low"]) / (narrow["high"] - narrow["low"]) < 2.5
    assert mean([0.0, 1.0] * 50) == wide


def test_a_difference_is_separated_from_noise() -> None:
    """A steady gain is significant, though never quite sure; a coin's is not; no difference has a p-value of 1."""
    steady = mean([0.01] * 200)
    assert steady["low"] > 0
    assert steady["p"] == pytest.approx(2 / 2001)
    noise = mean(np.random.default_rng(1).choice([-1.0, 1.0], size=200))
    assert noise["low"] < 0 < noise["high"]
    assert noise["p"] > 0.05
    assert mean([0.0] * 50)["p"] == 1


def embedded(folder: Path, cache: Path) -> int:
    """Index a folder, and return how many texts were embedded for it."""
    seen: list[int] = [0]
    index = CorpusIndex(read_dataset(folder), HashEmbedding(), cache, progress=lambda done, _: seen.append(done))
    with closing(index):
        (node, *_) = index.indexes["documents"].as_retriever(similarity_top_k=1).retrieve("Silent Harbour")
        assert node.node_id == "d1"
    return seen[-1]


def test_vectors_are_made_once(folder: Path, tmp_path: Path) -> None:
    """A second run finds them; those of another corpus, or of a run that was stopped midway, are not trusted."""
    cache = tmp_path / "cache"
    assert [embedded(folder, cache), embedded(folder, cache)] == [8, 0]
    changed = (folder / "corpus.jsonl").read_text().replace("film of 1931", "silent film")
    assert embedded(write_set(tmp_path / "other" / "tiny", corpus=changed), cache) == 8
    for mark in cache.rglob("complete"):
        mark.unlink()
    assert embedded(folder, cache) == 8


def test_after_a_failure_the_next_try_works(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fails midway leaves no database open in the process; a file of settings beside it has no effect."""
    batches = []

    class Failing(HashEmbedding):
        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            batches.append(texts)
            if len(batches) == 2:
                raise ConnectionError
            return super()._get_text_embeddings(texts)

    data, model = read_dataset(folder), Failing()
    with monkeypatch.context() as patch:
        patch.setattr(systems, "LexicalRetriever", Mock(side_effect=MemoryError))
        close = create_autospec(CorpusIndex.close, side_effect=CorpusIndex.close)
        patch.setattr(CorpusIndex, "close", close)
        with pytest.raises(MemoryError):
            CorpusIndex(data, HashEmbedding(), tmp_path / "cache")
    close.assert_called_once()
    monkeypatch.setattr(systems, "BATCH", 4)
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("is_persistent=unknown\n")
    with pytest.raises(ConnectionError):
        CorpusIndex(data, model, tmp_path / "cache")
    with closing(CorpusIndex(data, model, tmp_path / "cache")) as index:
        (node, *_) = index.indexes["documents"].as_retriever(similarity_top_k=1).retrieve("Silent Harbour")
        assert node.node_id == "d1"


def test_a_field_separates_the_sources(folder: Path, tmp_path: Path) -> None:
    """Each value of it is a knowledge source; documents without it are one more."""
    rows = [{"_id": "a", "text": "x", "metadata": {"lang": "de/AT"}}, {"_id": "b", "text": "y"}]
    write_set(folder, corpus=lines(*rows, {"_id": "c", "text": "z", "metadata": {"lang": "en"}}), qrels="b1\ta\t1\n")
    with closing(CorpusIndex(read_dataset(folder), HashEmbedding(), tmp_path / "c", source_field="lang")) as made:
        assert [source.name for source in made.sources()] == ["de/AT", "documents", "en"]


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast embedding model stands in for the default one."""
    monkeypatch.setattr("llama_index_agentic_kb.store.default_embed_model", HashEmbedding)


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_a_run_is_reported_and_kept(folder: Path, tmp_path: Path) -> None:
    """The report names the oracle; --out keeps the results of each system with their summary."""
    kept = tmp_path / "run.json"
    arguments: list[str | Path] = [folder, "--cache", tmp_path / "c", "--systems", "bm25, medium", "--k", "1,10"]
    done = bench(*arguments, "--source-field", "source", "--out", kept)
    assert done.exit_code == 0, done.output
    assert "ORACLE" in done.output
    assert "…" not in done.output
    run = json.loads(kept.read_text(encoding="utf-8"))
    assert [system["system"] for system in run["systems"]] == ["bm25", "medium"]
    assert run["summary"][1]["kinds"]["all"]["metrics"]["R@10"]["mean"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FOLDER", "--k", "0"], "--k: expected numbers above 0"),
        (["FOLDER", "--plans", "tarot"], "--plans: 'tarot' is unknown"),
        (["FOLDER", "--plans", "llm"], "--plans llm needs OPENAI_API_KEY"),
        (["FOLDER", "--systems", "low", "--plans", "none"], "systems: low plan; say where plans come from"),
        (["FOLDER", "--systems", "sparse"], "systems: sparse is unknown"),
        (["FOLDER", "--out", "file/run.json"], "can't be written"),
    ],
)
def test_errors_name_option_and_remedy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    """What can't be done is refused before anything is embedded."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    done = bench(*(folder if argument == "FOLDER" else argument for argument in arguments), "--cache", "cache")
    assert isinstance(done.exception, ConfigurationError)
    assert message in str(done.exception)
    assert not Path("cache").exists()


def test_recorded_plans_are_replayed(folder: Path, tmp_path: Path) -> None:
    """A file of plans stands in for the oracle, and is named in the report."""
    plans = tmp_path / "plans.jsonl"
    row = {"_id": "b1", "plan": [{"id": 1, "text": "Who directed Silent Harbour?"}], "answers": {}}
    plans.write_text(json.dumps(row), encoding="utf-8")
    done = bench(folder, "--cache", tmp_path / "c", "--systems", "low", "--plans", f"recorded:{plans}")
    assert done.exit_code == 0, done.output
    assert "recorded plans" in done.output
    assert "1 queries were left out: plans.jsonl holds no plan for them" in " ".join(done.output.split())
