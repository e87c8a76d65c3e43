from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llama_index_agentic_kb.cli import app
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.testing import HashEmbedding


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
    ("arguments", "kind", "message"),
    [
        (["FOLDER", "--k", "0"], ConfigurationError, "--k: expected numbers above 0"),
        (["FOLDER", "--plans", "tarot"], ConfigurationError, "--plans: 'tarot' is unknown"),
        (["FOLDER", "--plans", "llm"], ConfigurationError, "--plans llm needs OPENAI_API_KEY"),
        (["FOLDER", "--systems", "sparse"], ConfigurationError, "systems: sparse is unknown"),
        (["FOLDER", "--out", "file/run.json"], ConfigurationError, "can't be written"),
    ],
)
def test_errors_name_option_and_remedy(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    kind: type[Exception],
    message: str,
) -> None:
    """What can't be done is refused before anything is embedded."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    done = bench(*(folder if argument == "FOLDER" else argument for argument in arguments), "--cache", "cache")
    assert isinstance(done.exception, kind)
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
