from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from llama_index_agentic_kb.evaluation import CorpusIndex, read_dataset
from llama_index_agentic_kb.testing import HashEmbedding
from tests.evaluation.tiny_set import DOCUMENTS, write_set


def embedded(folder: Path, cache: Path) -> tuple[int, dict[str, str]]:
    """Give how many texts were embedded to index a folder, and the metadata of its first document."""
    seen: list[int] = []
    with closing(
        CorpusIndex(read_dataset(folder), HashEmbedding(), cache, progress=lambda *_: seen.append(_[1]))
    ) as made:
        (node, *_) = made.indexes["documents"].as_retriever(similarity_top_k=1).retrieve("Silent Harbour")
        return sum(seen), dict(node.metadata)


def changed(field: str) -> str:
    rows = [
        {"_id": name, "title": title, "text": text, "metadata": {"source": source}}
        for name, (title, text, source) in DOCUMENTS.items()
    ]
    rows[0][field] = {"source": "elsewhere"} if field == "metadata" else "Silent Harbour, a silent film"
    return "\n".join(map(json.dumps, rows))


def test_vectors_are_made_once(folder: Path, tmp_path: Path) -> None:
    """A second run finds them; changed metadata is seen without embedding again, changed text is embedded."""
    cache = tmp_path / "cache"
    assert embedded(folder, cache)[0] == 8
    assert embedded(folder, cache)[0] == 0
    again, metadata = embedded(write_set(tmp_path / "tiny", corpus=changed("metadata")), cache)
    assert (again, metadata["source"]) == (0, "elsewhere")
    assert embedded(write_set(tmp_path / "tiny", corpus=changed("text")), cache)[0] == 8


@pytest.mark.parametrize("left", [b"", b"no array", None])
def test_a_broken_cache_is_made_anew(folder: Path, tmp_path: Path, left: bytes | None) -> None:
    """Vectors of a run that was cut off, or of another number of documents, are not trusted."""
    import numpy as np  # noqa: PLC0415 (one test writes arrays)

    cache = tmp_path / "cache"
    embedded(folder, cache)
    (file,) = cache.rglob("vectors.npy")
    if left is None:
        np.save(file, np.zeros((3, 4), dtype=np.float32))
    else:
        file.write_bytes(left)
    assert embedded(folder, cache)[0] == 8


def test_a_field_tells_the_sources(folder: Path, tmp_path: Path) -> None:
    """Each value of it is a knowledge source; what lacks it is one more."""
    rows = [
        {"_id": "a", "text": "x", "metadata": {"lang": "de/AT"}},
        {"_id": "b", "text": "y"},
        {"_id": "c", "text": "z", "metadata": {"lang": "en"}},
    ]
    folder = write_set(folder, corpus="\n".join(map(json.dumps, rows)), qrels="b1\ta\t1\n")
    with closing(CorpusIndex(read_dataset(folder), HashEmbedding(), tmp_path / "c", source_field="lang")) as made:
        names: Sequence[str] = [source.name for source in made.sources()]
    assert names == ["de/AT", "documents", "en"]
