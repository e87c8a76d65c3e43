"""Tests of one store in several processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_index_agentic_kb.store import chroma, ingest
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding

_OTHER = """
import sys
from llama_index_agentic_kb.store import chroma, ingest
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding

chroma.EXACT_ROWS = 0
stores = {}
for line in sys.stdin:
    path, folder = line.rstrip("\\n").split("\\t")
    if path not in stores:
        stores[path] = DirectoryStore.open(path, embed_model=HashEmbedding())
    print(len(ingest(folder, stores[path]).added), flush=True)
"""

Order = Callable[[Path, Path], str]


@pytest.fixture(scope="module")
def order() -> Iterator[Order]:
    """A function that makes another process, which keeps its stores open, ingest a folder."""
    command = [sys.executable, "-c", _OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None is not stdout

        def send(path: Path, folder: Path) -> str:
            stdin.write(f"{path}\t{folder}\n")
            stdin.flush()
            return stdout.readline().strip()

        yield send
        process.kill()


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chroma, "EXACT_ROWS", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "docs"
    made.mkdir()
    (made / "oslo.md").write_text("# Oslo\n\nSnow falls in winter.")
    return made


@pytest.fixture
def kept(tmp_path: Path, folder: Path) -> Iterator[DirectoryStore]:
    with DirectoryStore.open(tmp_path / "store", embed_model=HashEmbedding(), create=True) as store:
        ingest(folder, store)
        yield store


def titles(store: DirectoryStore, asked: str) -> list[str]:
    found = store.index("docs").as_retriever(similarity_top_k=1).retrieve(asked)
    return [one.metadata["title"] for one in found]


@pytest.mark.slow
def test_processes_see_and_build_upon_what_others_have_written(
    kept: DirectoryStore, folder: Path, order: Order
) -> None:
    """An index that was open before finds what another process added; both may write in turn, and all stays whole."""
    assert titles(kept, "snow") == ["Oslo"]
    for turn in range(3):
        name = f"Place{turn}"
        (folder / f"{turn}.md").write_text(f"# {name}\n\nHail of kind{turn} falls.")
        if turn == 1:
            assert len(ingest(folder, kept).added) == 1
        else:
            assert order(kept.path, folder) == "1"
        assert titles(kept, f"hail of kind{turn} falls") == [name]
        assert kept.outside_graph("docs") == 0


def test_readers_do_not_wait_for_a_writer(kept: DirectoryStore, folder: Path) -> None:
    """What it has stored so far is found, by vectors, before it has ended."""
    (folder / "hail.md").write_text("# Hail\n\nIt hails.")
    seen: list[list[str]] = []

    def look(*_: object) -> None:
        with DirectoryStore.open(kept.path, embed_model=HashEmbedding()) as other:
            seen.append(titles(other, "it hails"))

    ingest(folder, kept, progress=look)
    assert seen[-1] == ["Hail"]


def test_a_child_may_open_what_its_parent_has_not(kept: DirectoryStore) -> None:
    """Only a store whose vectors were used is lost to forks: workers that open their own are the way."""
    code = f"""
import os, sys
import llama_index_agentic_kb.store.chroma
from llama_index_agentic_kb.store import chroma
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding
chroma.EXACT_ROWS = 0
pid = os.fork()
if pid == 0:
    with DirectoryStore.open({str(kept.path)!r}, embed_model=HashEmbedding()) as store:
        found = store.index("docs").as_retriever().retrieve("snow")
        os._exit(len(found))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 1
