"""Tests of one store in several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.vector_stores.types import VectorStoreQuery

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.store import chroma, ingest
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding

_OTHER = """
import json, sys, time
from llama_index_agentic_kb.store import chroma, ingest
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding

chroma.EXACT_ROWS = 0
stores = {}
for line in sys.stdin:
    order = json.loads(line)
    path = order["store"]
    if path not in stores:
        stores[path] = DirectoryStore.open(path, embed_model=HashEmbedding())
    if order["do"] == "ingest":
        print(json.dumps(len(ingest(order["folder"], stores[path]).added)), flush=True)
    else:
        with stores[path].writing():
            print("held", flush=True)
            time.sleep(order["seconds"])
"""

Order = Callable[..., Any]


@pytest.fixture(scope="module")
def order() -> Iterator[Order]:
    """A function that gives an order to another process, which keeps its stores open."""
    command = [sys.executable, "-c", _OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def give(**what: object) -> Any:
            stdin.write(json.dumps({key: str(value) for key, value in what.items()}).replace('"1.0"', "1.0") + "\n")
            stdin.flush()
            return stdout.readline().strip()

        yield give
        process.kill()


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for each source, however small."""
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
            assert order(do="ingest", store=kept.path, folder=folder) == "1"
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


# -- forks -----------------------------------------------------------------------------------------------------------


def _tell(pipe: int, uses: dict[str, Callable[[], object]]) -> None:
    told = {}
    for name, use in uses.items():
        try:
            told[name] = f"worked: {use()!r}"
        except ConfigurationError as error:
            told[name] = str(error)
    os.write(pipe, json.dumps(told).encode())
    os.close(pipe)


def _heard(pipe: int, pid: int) -> dict[str, str]:
    """What a child told; a child that hangs is killed."""
    killer = threading.Timer(20, os.kill, (pid, 9))
    killer.start()
    with os.fdopen(pipe, "rb") as file:
        data = file.read()
    killer.cancel()
    return dict(json.loads(data or b"{}"))


def _uses(kept: DirectoryStore) -> dict[str, Callable[[], object]]:
    index, lexical = kept.index("docs"), kept.lexical("docs")
    retriever = index.as_retriever()
    retriever.retrieve("snow")
    lexical.search("snow", 1)

    def open_anew() -> object:
        with DirectoryStore.open(kept.path, embed_model=HashEmbedding()) as store:
            return store.index("docs").as_retriever().retrieve("snow")

    return {
        "sources": kept.sources,
        "vectors": lambda: retriever.retrieve("snow"),
        "filtered": lambda: kept.vectors("docs").search(VectorStoreQuery(similarity_top_k=1)),
        "words": lambda: lexical.search("snow", 1),
        "metadata": lambda: list(kept.metadata("docs")),
        "writing": lambda: kept.writing().__enter__(),
        "opened anew": open_anew,
        "closed": kept.close,
    }


def _assert_refused(told: dict[str, str]) -> None:
    assert told.pop("closed") == "worked: None"
    assert "can't open one any more. Open stores only in the children" in told.pop("opened anew")
    assert len(told) == 6
    for name, error in told.items():
        assert "was forked" in error, name
        assert "'spawn'" in error, name


def test_a_forked_child_is_told_at_once(kept: DirectoryStore) -> None:
    """Nothing hangs, as Chroma itself would; the parent goes on, and the store opens in a child started otherwise."""
    uses = _uses(kept)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: that is the matter here
        pid = os.fork()
    if pid == 0:
        try:
            _tell(write, uses)
        finally:
            os._exit(0)
    os.close(write)
    told = _heard(read, pid)
    os.waitpid(pid, 0)
    _assert_refused(told)
    assert titles(kept, "snow") == ["Oslo"]


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
