"""The benchmark of scale runs on 500 chunks. Only what must hold is checked here, never times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks import scale
from tests.benchmarks.scale_corpus import ScaleCorpus
from tests.benchmarks.scale_store import ScaleStore

CHUNKS = 500
SEARCHES = 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    scale.build(folder, CHUNKS)
    scale.build(folder, CHUNKS, clustered=False)
    scale.build_lexical(folder, CHUNKS)
    return folder


@pytest.mark.long
def test_a_size_is_built_once(cache: Path) -> None:
    """What was built is found again; what was left half built is built anew."""
    first = scale.build(cache, CHUNKS)
    assert first["documents.db MB"] > 0
    assert scale.build_lexical(cache, CHUNKS)["seconds"] == scale.build_lexical(cache, CHUNKS)["seconds"]
    assert scale.build(cache, CHUNKS)["seconds"] == first["seconds"]
    at = ScaleStore(cache, 100)
    at.folder.mkdir()
    (at.folder / "half").touch()
    assert scale.build(cache, 100)["seconds"] > 0
    assert not (at.folder / "half").exists()
    with at.open() as store:
        assert store.documents.count("scale") == 100


@pytest.mark.long
def test_every_number_is_there(cache: Path) -> None:
    """Searches of one user and of 16, dense and hybrid; under filters ours finds what an exact search finds."""
    result = scale.measure(cache, CHUNKS, SEARCHES)
    for users in ("1 user", "16 users"):
        for kind in ("dense", "hybrid"):
            numbers = result[f"{kind}, {users}"]
            assert 0 < numbers["p50"] <= numbers["p99"]
        assert result[f"hybrid, {users}"]["dense p50"] >= 0
        assert result[f"hybrid, {users}"]["lexical p50"] >= 0
    for found in (result, scale.measure(cache, CHUNKS, SEARCHES, clustered=False)):
        for share in ("10 %", "1 %"):
            assert found[f"filter {share}, ours"]["recall"] == 1
            assert found[f"filter {share}, Chroma's own"]["recall"] > 0
            assert "searched exactly" in found[f"filter {share}, note"]


@pytest.mark.long
def test_it_runs_from_the_command_line(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Sizes can be chosen; the numbers are written as JSON and printed as a table."""
    out = cache / "out" / "bench-scale.json"
    arguments = ["--sizes", str(CHUNKS), "--hard", "0", "--searches", "5", "--cache", str(cache), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["scale", *arguments])
    scale.main()
    results = json.loads(out.read_text(encoding="utf-8"))
    assert [result["chunks"] for result in results] == [CHUNKS]
    assert results[0]["build BM25"]["lexical MB"] > 0
    assert "filter 10 %, ours" in capsys.readouterr().out


def test_chunks_are_the_same_at_each_run() -> None:
    """Vectors, texts and groups come from the seed alone; neighbours exist; queries are near some of the chunks."""
    first, second = ScaleCorpus(400), ScaleCorpus(400)
    (one,), (other,) = first.blocks(), second.blocks()
    assert np.array_equal(one.vectors, other.vectors)
    assert one.texts == other.texts
    assert set(one.groups.tolist()) <= set(range(100))
    assert (first.query_vectors @ one.vectors.T).max(axis=1).mean() > 0.6
    assert first.query_texts == second.query_texts
