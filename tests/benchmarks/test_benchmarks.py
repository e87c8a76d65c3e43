"""The benchmarks run. Only counts are checked here, never times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.critical_path import critical_path
from tests.benchmarks.measure import Row

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def path() -> dict[tuple[str, str], Row]:
    rows = critical_path(1, llm_seconds=0.03, search_seconds=0.005, natives=(True,))
    return {(row.name, row.peer_name): row for row in rows}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_four_sources_by_five_queries_cost_two_model_calls(path: dict[tuple[str, str], Row], mode: str) -> None:
    """Plan and answer are one call each, and each distinct query is embedded once; LlamaIndex's counts stand beside."""
    case = f"critical_path/{mode}, native async sources"
    fusion, sub_questions = "QueryFusionRetriever + compact", "SubQuestionQueryEngine"
    calls = path[f"{case}/LLM calls", fusion], path[f"{case}/LLM calls", sub_questions]
    embedded = path[f"{case}/embedding calls", fusion], path[f"{case}/embedding calls", sub_questions]
    assert (calls[0].ours, calls[0].peer, calls[1].peer) == (2, 2, 18)
    assert (embedded[0].ours, embedded[0].peer, embedded[1].peer) == (5, 20, 16)


@pytest.mark.long
def test_every_benchmark_gives_whole_rows(tmp_path: Path) -> None:
    """Each row has the fields that bench.json promises, and no contestant failed."""
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert {row["name"].split("/")[0] for row in rows} == set(BENCHMARKS)
    for row in rows:
        assert set(row) == {"name", "ours", "peer", "peer_name", "unit", "ratio", "runs"}
        assert isinstance(row["ours"], float | int), row
        assert isinstance(row["peer"], float | int) or row["peer_name"] == "(no peer)", row
        assert "failed" not in row["peer_name"], row
        assert row["runs"] >= 1
    values = {row["name"]: row["ours"] for row in rows}
    assert values["import/heavy modules loaded by the main names"] == 0
    for mode in ("sync", "async"):
        assert (values[f"chroma/{mode}/embedding batches"], values[f"chroma/{mode}/texts embedded"]) == (2, 5)
