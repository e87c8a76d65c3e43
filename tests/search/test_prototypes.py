from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from llama_index_agentic_kb.errors import RetrievalError
from llama_index_agentic_kb.search.prototypes import (
    MAX_PROTOTYPES,
    Floats,
    ScopeIndex,
    ScopeSettings,
    prototypes,
    unit_rows,
)


@dataclass
class Reader:
    """Chunks by document, each with a vector that depends on its id."""

    documents: dict[str, list[str]]
    read: list[str] = field(default_factory=list)

    def version(self) -> str:
        return str(sorted(self.documents.items()))

    def chunks(self) -> Mapping[str, Sequence[str]]:
        return self.documents

    def vectors(self, chunks: Sequence[str]) -> Mapping[str, Floats]:
        self.read += chunks
        rows = {chunk: np.random.default_rng(sum(chunk.encode())).normal(size=8) for chunk in chunks}
        return {chunk: row.astype(np.float32) for chunk, row in rows.items() if chunk != "gone"}


def reader(count: int = 3) -> Reader:
    return Reader({f"d{at}": [f"d{at}c{chunk}" for chunk in range(at + 1)] for at in range(count)})


def test_a_document_is_near_each_of_its_topics() -> None:
    """A long document on two topics has prototypes near both; their mean is near neither."""
    topics = np.eye(2, 8, dtype=np.float32)
    rows = unit_rows(np.concatenate([topics[[0]] + 0.01 * np.eye(8)[[at % 8]] for at in range(6)] + [topics[[1]]] * 6))
    made = prototypes(rows)
    assert len(made) <= MAX_PROTOTYPES
    assert ((made @ topics.T).max(axis=0) > 0.98).all()
    assert (unit_rows(rows.mean(axis=0, keepdims=True)) @ topics.T).max() < 0.8


def test_similarity_is_that_of_the_nearest_prototype() -> None:
    """Documents of up to four chunks are compared chunk by chunk."""
    source = reader()
    index = ScopeIndex.build(source, "m")
    view = unit_rows(np.stack([source.vectors(["d2c1"])["d2c1"]]))
    similarity = index.similarities(view)[:, 0]
    assert index.documents == ("d0", "d1", "d2")
    assert similarity[2] == pytest.approx(1.0, abs=1e-5)
    assert similarity[:2].max() < 0.99
    np.testing.assert_array_equal(index.part({"d2", "unknown", "d0"}).similarities(view)[:, 0], similarity[[0, 2]])


def test_a_sample_stands_for_many_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most ``SAMPLE`` of them, always the same ones; few documents stand for themselves."""
    index = ScopeIndex.build(reader(9), "m")
    assert index.sample is index
    monkeypatch.setattr("llama_index_agentic_kb.search.prototypes.SAMPLE", 4)
    first, second = (ScopeIndex.build(reader(9), "m").sample.documents for _ in range(2))
    assert first == second
    assert len(first) == 4


def test_only_changed_documents_are_read() -> None:
    """An update equals a new index; documents without vectors are left out."""
    source = reader()
    index = replace(ScopeIndex.build(source, "m"), settings=ScopeSettings(deviations=1.25))
    source.documents = {"d2": source.documents["d2"], "d1": ["d1c0", "new"], "d9": ["gone"]}
    source.read.clear()
    updated = index.updated(source)
    assert sorted(source.read) == ["d1c0", "gone", "new"]
    assert updated.settings == index.settings
    assert updated.version == source.version() != index.version
    built = ScopeIndex.build(source, "m")
    assert updated.documents == built.documents == ("d2", "d1")
    np.testing.assert_array_equal(updated.prototypes, built.prototypes)
    assert ScopeIndex.build(Reader({}), "m").updated(source).documents == built.documents


def test_an_index_survives_a_file(tmp_path: Path) -> None:
    """With its settings."""
    index = replace(ScopeIndex.build(reader(), "m"), settings=ScopeSettings(1.75, 0.3, 0.1))
    index.save(tmp_path / "deep" / "scope.npz")
    loaded = ScopeIndex.load(tmp_path / "deep" / "scope.npz")
    assert loaded.settings == index.settings
    assert (loaded.model, loaded.version, loaded.documents, loaded.digests) == (
        *("m", index.version, index.documents, index.digests),
    )
    np.testing.assert_array_equal(loaded.prototypes, index.prototypes)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["scope.npz"]


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no zip", None])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: bytes | None) -> None:
    """Empty, cut off, or missing: the error names the file."""
    path = tmp_path / "scope.npz"
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(RetrievalError, match=r"scope\.npz"):
        ScopeIndex.load(path)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """A file with fewer prototypes than documents would name the wrong documents."""
    index = ScopeIndex.build(reader(), "m")
    replace(index, prototypes=index.prototypes[:2]).save(tmp_path / "scope.npz")
    with pytest.raises(RetrievalError, match="not whole"):
        ScopeIndex.load(tmp_path / "scope.npz")
