from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llama_index_agentic_kb.cli import app
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.testing import HashEmbedding


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast embedding model stands in for the default one."""
    monkeypatch.setattr("llama_index_agentic_kb.store.default_embed_model", HashEmbedding)


def bench(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_a_folder_in_a_report_out(folder: Path, tmp_path: Path) -> None:
    """Tables are printed, and the run is kept; vectors are made once."""
    out, cache = tmp_path / "run.json", tmp_path / "cache"
    arguments = (folder, "--cache", cache, "--systems", "bm25, medium", "--k", "1,2", "--source-field", "source")
    done = bench(*arguments, "--out", out)
    assert done.exit_code == 0, done.output
    assert "ORACLE" in done.output
    assert "…" not in done.output
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert [system["system"] for system in kept["systems"]] == ["bm25", "medium"]
    compared = bench("--diff", out, out)
    assert compared.exit_code == 0, compared.output
    assert "medium" in compared.output


def test_recorded_plans_are_replayed(folder: Path, tmp_path: Path) -> None:
    """A file of plans stands in for the oracle, and is named in the report."""
    plans = tmp_path / "plans.jsonl"
    row = {"_id": "b1", "plan": [{"id": 1, "text": "Who directed Silent Harbour?"}], "answers": {}}
    plans.write_text(json.dumps(row), encoding="utf-8")
    done = bench(folder, "--cache", tmp_path / "c", "--systems", "low", "--plans", f"recorded:{plans}")
    assert done.exit_code == 0, done.output
    assert "recorded plans" in done.output
    assert "1 queries were left out: plans.jsonl holds no plan for them" in " ".join(done.output.split())


def test_a_run_is_recorded_and_replayed(folder: Path, tmp_path: Path) -> None:
    """What --record keeps is a source of plans; the second run tells that it finds the same."""
    arguments = (folder, "--cache", tmp_path / "c", "--systems", "bm25,low,medium")
    first, second, kept = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "kept"
    assert bench(*arguments, "--record", kept, "--out", first).exit_code == 0
    done = bench(*arguments, "--plans", f"recorded:{kept}", "--out", second)
    assert done.exit_code == 0, done.output
    assert "(recorded)" in done.output
    changed = bench("--diff", first, second)
    assert ": gained" not in changed.output
    assert "plans differ" in changed.output
    summary = json.loads(second.read_text(encoding="utf-8"))["summary"]
    assert summary[2]["kinds"]["all"]["metrics"]["R@10"]["mean"] == 1


def test_a_folder_without_recordings_is_refused(folder: Path, tmp_path: Path) -> None:
    """The remedy is named; so is a replay that nothing would use."""
    arguments = (folder, "--cache", tmp_path / "c", "--plans", f"recorded:{tmp_path}")
    assert "run with --record" in str(bench(*arguments, "--systems", "low").exception)
    assert "no system of --systems plans" in str(bench(*arguments, "--systems", "bm25").exception)


def test_what_is_wrong_is_told_before_anything_is_embedded(folder: Path, tmp_path: Path) -> None:
    """A run that could not be kept, and a system that nobody knows, leave no cache behind."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    arguments = (folder, "--cache", tmp_path / "c")
    assert "can't be made" in str(bench(*arguments, "--out", tmp_path / "file" / "run.json").exception)
    assert "sparse is unknown" in str(bench(*arguments, "--systems", "sparse").exception)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    [
        ([], ConfigurationError, "give a folder"),
        (["--k", "0"], ConfigurationError, "--k: expected numbers above 0"),
        (["--plans", "tarot"], ConfigurationError, "--plans: 'tarot' is unknown"),
        (["--plans", "llm"], ConfigurationError, "--plans llm needs OPENAI_API_KEY"),
        (["--systems", "sparse"], ConfigurationError, "systems: sparse is unknown"),
        (["--diff", "nowhere.json", "nowhere.json"], InvalidRequestError, "holds no run"),
    ],
)
def test_what_can_not_be_done_is_told(
    folder: Path, tmp_path: Path, arguments: list[str], kind: type[Exception], told: str
) -> None:
    """Errors name the option and the remedy."""
    given: list[str | Path] = [folder, "--cache", tmp_path / "c"] if arguments and "--diff" not in arguments else []
    done = bench(*given, *arguments)
    assert isinstance(done.exception, kind)
    assert told in str(done.exception)
