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
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert [system["system"] for system in kept["systems"]] == ["bm25", "medium"]
    (vectors,) = cache.rglob("vectors.npy")
    made = vectors.stat().st_mtime_ns
    assert bench(*arguments, "--plans", "none", "--systems", "minimal").exit_code == 0
    assert vectors.stat().st_mtime_ns == made
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
