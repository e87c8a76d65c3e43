"""The benchmarks run; their numbers are looked at elsewhere. Only counts are checked here, never times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "ratio = ours / peer" in done.stdout
    loaded: Rows = json.loads(out.read_text(encoding="utf-8"))
    return loaded


def value(rows: Rows, name: str, peer: str | None = None) -> float | None:
    """Give ours, or the peer's, of the row of that name."""
    found = [row for row in rows if row["name"] == name and (peer is None or row["peer_name"] == peer)]
    assert found, name
    return found[0]["ours"] if peer is None else found[0]["peer"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_every_benchmark_gives_whole_rows(rows: Rows) -> None:
    """Each row has the fields that bench.json promises, and no contestant failed."""
    assert {row["name"].split("/")[0] for row in rows} == {
        "import",
        "critical_path",
        "planned_path",
        "chroma",
        "throughput",
        "embedding",
        "load",
    }
    for row in rows:
        assert set(row) == {"name", "ours", "peer", "peer_name", "unit", "ratio", "runs"}
        assert isinstance(row["ours"], float | int), row
        assert isinstance(row["peer"], float | int) or row["peer_name"] == "(no peer)", row
        assert "failed" not in row["peer_name"], row
        assert row["runs"] >= 1


@pytest.mark.slow
def test_the_import_loads_nothing_heavy(rows: Rows) -> None:
    """Neither the package nor its main names load torch, chromadb, transformers or openai."""
    assert value(rows, "import/heavy modules loaded by the package") == 0
    assert value(rows, "import/heavy modules loaded by the main names") == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("sources", ["native async sources", "sync-only sources"])
def test_four_sources_by_five_queries_cost_two_model_calls(rows: Rows, mode: str, sources: str) -> None:
    """Plan and answer are one call each, and each distinct query is embedded once; LlamaIndex's counts stand beside."""
    case = f"critical_path/{mode}, {sources}"
    assert value(rows, f"{case}/LLM calls") == 2
    assert value(rows, f"{case}/LLM calls", "QueryFusionRetriever + compact") == 2
    assert value(rows, f"{case}/LLM calls", "CitationQueryEngine") == 2
    assert value(rows, f"{case}/LLM calls", "SubQuestionQueryEngine") == 18
    assert value(rows, f"{case}/embedding calls") == 5
    assert value(rows, f"{case}/embedding calls", "SubQuestionQueryEngine") == 16
    assert value(rows, f"{case}/embedding calls", "QueryFusionRetriever + compact") == 20
    assert (value(rows, f"{case}/tokens") or 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_chroma_needs_two_batches(rows: Rows, mode: str) -> None:
    """The question is embedded while the model plans, its four sub-queries in one batch, whatever they search."""
    assert value(rows, f"chroma/{mode}/embedding batches") == 2
    assert value(rows, f"chroma/{mode}/texts embedded") == 5
    assert value(rows, f"chroma/{mode}/texts embedded", "QueryFusionRetriever") == 20
