"""What the evaluation's tests share: the tiny set, and one index of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from llama_index_agentic_kb.evaluation import CorpusIndex, Dataset, read_dataset
from llama_index_agentic_kb.testing import HashEmbedding
from tests.evaluation.tiny_set import write_set


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_set(tmp_path / "tiny")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return read_dataset(write_set(tmp_path_factory.mktemp("evaluation") / "tiny"))


@pytest.fixture(scope="session")
def corpus(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CorpusIndex]:
    cache = tmp_path_factory.mktemp("cache")
    with closing(CorpusIndex(dataset, HashEmbedding(), cache, source_field="source")) as index:
        yield index
