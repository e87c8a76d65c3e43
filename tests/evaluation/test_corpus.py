from __future__ import annotations

from contextlib import closing
from pathlib import Path

from llama_index_agentic_kb.evaluation import CorpusIndex, read_dataset
from llama_index_agentic_kb.testing import HashEmbedding
from tests.evaluation.tiny_set import lines, write_set


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


def test_a_field_separates_the_sources(folder: Path, tmp_path: Path) -> None:
    """Each value of it is a knowledge source; documents without it are one more."""
    rows = [{"_id": "a", "text": "x", "metadata": {"lang": "de/AT"}}, {"_id": "b", "text": "y"}]
    write_set(folder, corpus=lines(*rows, {"_id": "c", "text": "z", "metadata": {"lang": "en"}}), qrels="b1\ta\t1\n")
    with closing(CorpusIndex(read_dataset(folder), HashEmbedding(), tmp_path / "c", source_field="lang")) as made:
        assert [source.name for source in made.sources()] == ["de/AT", "documents", "en"]
