from __future__ import annotations

from pathlib import Path

import pytest

from llama_index_agentic_kb import AgenticRetriever
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.evaluation import (
    CorpusIndex,
    Dataset,
    GoldPlans,
    PlannedLLM,
    RecordedRetrieval,
    assert_same_evidence,
    evaluate,
    make_systems,
    recorded_llm,
)
from llama_index_agentic_kb.replay import RecordedLLM


@pytest.fixture(scope="module")
def recorded(dataset: Dataset, corpus: CorpusIndex) -> RecordedRetrieval:
    llm = PlannedLLM(GoldPlans(), dataset.queries)
    retriever = AgenticRetriever(corpus.sources(), llm=llm, effort="medium")
    return RecordedRetrieval.record(retriever, dataset.queries[0].text)


def replaying(recorded: RecordedRetrieval, corpus: CorpusIndex) -> AgenticRetriever:
    return AgenticRetriever(corpus.sources(), llm=RecordedLLM(recording=recorded.recording), effort="medium")


def test_a_retrieval_is_replayed_without_its_model(
    recorded: RecordedRetrieval, corpus: CorpusIndex, tmp_path: Path
) -> None:
    """Plan, findings and verdict are said again, and the same evidence is found; the file holds all of it."""
    file = tmp_path / "recorded.json"
    recorded.save(file)
    loaded = RecordedRetrieval.load(file)
    assert loaded == recorded
    assert len(loaded.recording.replies) == 3
    assert loaded.plan[-1] == "When did Marta Lindqvist die?"
    assert_same_evidence(file, replaying(loaded, corpus))


def test_other_evidence_fails_the_test(recorded: RecordedRetrieval, corpus: CorpusIndex) -> None:
    """What was gained and lost is told, and so is another plan."""
    fewer = AgenticRetriever(
        corpus.sources(), llm=RecordedLLM(recording=recorded.recording), effort="medium", similarity_top_k=1
    )
    with pytest.raises(AssertionError, match="evidence lost"):
        assert_same_evidence(recorded, fewer)
    unplanned = AgenticRetriever(corpus.sources(), effort="medium")
    with pytest.raises(AssertionError, match="planned"):
        assert_same_evidence(recorded, unplanned)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """The message says to record again."""
    file = tmp_path / "other.json"
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="record it again"):
        RecordedRetrieval.load(file)


def test_a_run_keeps_its_retrievals(dataset: Dataset, corpus: CorpusIndex, tmp_path: Path) -> None:
    """One file a question and effort, each replayable."""
    made = make_systems(["low"], corpus, PlannedLLM(GoldPlans(), dataset.queries), documents=2, record=tmp_path)
    evaluate(dataset, made, concurrency=2)
    files = sorted(file.name for file in (tmp_path / "low").iterdir())
    assert files == ["b1.json", "p1.json"]
    loaded = RecordedRetrieval.load(tmp_path / "low" / "b1.json")
    llm = RecordedLLM(recording=loaded.recording)
    assert_same_evidence(loaded, AgenticRetriever(corpus.sources(), llm=llm, effort="low", similarity_top_k=2))


def test_a_recorded_run_is_replayed_whole(dataset: Dataset, corpus: CorpusIndex, tmp_path: Path) -> None:
    """Without the plans' source every question finds what it found, in as many calls."""
    planned = PlannedLLM(GoldPlans(), dataset.queries)
    first = evaluate(dataset, make_systems(["medium"], corpus, planned, documents=2, record=tmp_path))
    replayed = {"medium": recorded_llm(tmp_path, "medium")}
    again = evaluate(dataset, make_systems(["medium"], corpus, replayed, documents=2))
    for before, after in zip(first.systems[0].results, again.systems[0].results, strict=True):
        assert (after.plan, after.documents, after.error) == (before.plan, before.documents, None)
        assert after.cost.llm_calls == before.cost.llm_calls > 0
