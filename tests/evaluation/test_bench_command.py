from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llama_index_agentic_kb.cli import app
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.testing import HashEmbedding


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast embedding model stands in for the default one."""
    monkeypatch.setattr("llama_index_agentic_kb.store.default_embed_model", HashEmbedding)


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_a_run_is_reported_recorded_replayed_and_compared(folder: Path, tmp_path: Path) -> None:
    """What --record keeps is a source of plans; the second run finds the same, and --diff says so."""
    arguments: list[str | Path] = [folder, "--cache", tmp_path / "c", "--systems", "bm25, low,medium", "--k", "1,10"]
    arguments += ["--source-field", "source"]
    first, second, kept = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "kept"
    done = bench(*arguments, "--record", kept, "--out", first)
    assert done.exit_code == 0, done.output
    assert "ORACLE" in done.output
    assert "…" not in done.output
    done = bench(*arguments, "--plans", f"recorded:{kept}", "--out", second)
    assert done.exit_code == 0, done.output
    assert "(recorded)" in done.output
    changed = bench("--diff", first, second)
    assert changed.exit_code == 0, changed.output
    assert ": gained" not in changed.output
    assert "plans differ" in changed.output
    run = json.loads(second.read_text(encoding="utf-8"))
    assert [system["system"] for system in run["systems"]] == ["bm25", "low", "medium"]
    assert run["summary"][2]["kinds"]["all"]["metrics"]["R@10"]["mean"] == 1


def test_recorded_plans_are_replayed(folder: Path, tmp_path: Path) -> None:
    """A file of plans stands in for the oracle, and is named in the report."""
    plans = tmp_path / "plans.jsonl"
    row = {"_id": "b1", "plan": [{"id": 1, "text": "Who directed Silent Harbour?"}], "answers": {}}
    plans.write_text(json.dumps(row), encoding="utf-8")
    done = bench(folder, "--cache", tmp_path / "c", "--systems", "low", "--plans", f"recorded:{plans}")
    assert done.exit_code == 0, done.output
    assert "recorded plans" in done.output
    assert "1 queries were left out: plans.jsonl holds no plan for them" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ([], ConfigurationError, "give a folder"),
        (["FOLDER", "--k", "0"], ConfigurationError, "--k: expected numbers above 0"),
        (["FOLDER", "--plans", "tarot"], ConfigurationError, "--plans: 'tarot' is unknown"),
        (["FOLDER", "--plans", "llm"], ConfigurationError, "--plans llm needs OPENAI_API_KEY"),
        (["FOLDER", "--plans", "recorded:.", "--systems", "low"], InvalidRequestError, "run with --record"),
        (["FOLDER", "--plans", "recorded:.", "--systems", "bm25"], ConfigurationError, "no system of --systems plans"),
        (["FOLDER", "--systems", "sparse"], ConfigurationError, "systems: sparse is unknown"),
        (["FOLDER", "--out", "file/run.json"], ConfigurationError, "can't be made"),
        (["--diff", "nowhere.json", "nowhere.json"], InvalidRequestError, "holds no run"),
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
