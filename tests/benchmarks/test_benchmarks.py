"""The benchmarks run, each in its smallest form. Only counts are checked here, never times."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.evaluation import CorpusIndex, gold_steps, read_dataset
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.benchmarks import conversations, scale
from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.measure import busy
from tests.benchmarks.same_prompts import PromptRuns
from tests.evaluation.tiny_set import lines, write_set

ROOT = Path(__file__).parents[2]
CHUNKS = 500
TALKS = {
    "rockets": ["Who built the Saturn V rocket?", "How tall was it?", "And its thrust?"],
    "gardens": ["What is compost made of?", "How long does it take?", "And in winter?"],
}
pytestmark = pytest.mark.long


def run(*command: str | Path) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_benchmark_gives_whole_rows(tmp_path: Path) -> None:
    """Each row has the fields that bench.json promises, no contestant failed, and ours makes no call in vain."""
    run("tests.benchmarks", "--quick", "--out", tmp_path / "bench.json")
    rows = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert {row["name"].split("/")[0] for row in rows} == set(BENCHMARKS)
    for row in rows:
        assert set(row) == {"name", "ours", "peer", "peer_name", "unit", "ratio", "runs"}
        assert isinstance(row["ours"], float | int), row
        assert isinstance(row["peer"], float | int) or row["peer_name"] == "(no peer)", row
        assert "failed" not in row["peer_name"], row
    values = {row["name"]: row["ours"] for row in rows}
    assert values["import/heavy modules loaded by the main names"] == 0
    for mode in ("sync", "async"):
        assert values[f"chroma/{mode}/texts embedded"] == 5
        assert 2 <= values[f"chroma/{mode}/embedding batches"] <= 5  # on a busy machine a query may come too late
        case = f"critical_path/{mode}, native async sources"
        assert (values[f"{case}/LLM calls"], values[f"{case}/embedding calls"]) == (2, 5)


def test_scale(tmp_path: Path) -> None:
    """A size is built once; under filters ours finds what an exact search finds."""
    out = tmp_path / "bench.json"
    sizes = ["--sizes", str(CHUNKS), "--hard", str(CHUNKS), "--searches", "20", "--cache", str(tmp_path)]
    run("tests.benchmarks.scale", *sizes, "--out", out)
    results = json.loads(out.read_text(encoding="utf-8"))
    assert scale.build(tmp_path, CHUNKS)["seconds"] == results[0]["build"]["seconds"]
    for result in results:
        for share in ("10 %", "1 %"):
            assert result[f"filter {share}, ours"]["recall"] == 1
            assert result[f"filter {share}, Chroma's own"]["recall"] > 0


def test_prompts_are_the_same_on_a_busy_machine(tmp_path: Path) -> None:
    """Every run has the prompts of the first, byte for byte; where a source comes to know more they are not."""
    made = PromptRuns(read_dataset(write_set(tmp_path / "set")), gold_steps, HashEmbedding(), tmp_path / "cache")
    idle = made.run(2)
    with busy(2):
        assert made.run(2)["unnamed"] == idle["unnamed"] == 0
    made.sources.append(KnowledgeSource("new", retriever=MemoryRetriever(["Silent Harbour was directed by nobody."])))
    assert made.run(1)["unnamed"] > 0
    made.close()


def test_conversations(tmp_path: Path) -> None:
    """Questions in their conversation, and after the other one; the scope keeps what a small corpus holds."""
    corpus, queries, qrels = [], [], []
    for source, texts in {**TALKS, "more rockets": TALKS["rockets"]}.items():
        kind, history = source.split()[-1], list[dict[str, str]]()
        for at, text in enumerate(texts):
            corpus.append({"_id": f"{source}{at}", "title": "", "text": text, "metadata": {"source": kind}})
            queries.append({"_id": f"{source}<{at}", "text": text, "rewrite": text, "history": history, "source": kind})
            qrels.append(f"{source}<{at}\t{source}{at}\t1")
            history = [*history, {"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    changes = {"corpus": lines(*corpus), "queries": lines(*queries), "qrels": "\n".join(qrels)}
    dataset = read_dataset(write_set(tmp_path, **changes))
    cases = conversations.cases_of(dataset)
    assert {case.kind for case in cases} >= {"first", "continuing", "shift, other source"}
    with closing(CorpusIndex(dataset, HashEmbedding(), tmp_path / "vectors", source_field="source")) as index:
        scores = asyncio.run(conversations.run(conversations.Bench(index, dataset), cases, dataset))
    continuing = {system: score[0] for (part, system), score in scores.items() if part.startswith("continuing")}
    assert len(continuing) == 8
    assert continuing["ours"] == continuing["ours, scope"]
