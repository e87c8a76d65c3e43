"""Faults of the store: writers that die, damaged and missing files, hostile folders, other processes, full disks."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from llama_index_agentic_kb import KnowledgeBase
from llama_index_agentic_kb.errors import ConfigurationError, IngestionError, StoreDamagedError
from llama_index_agentic_kb.store import database, ingest, repair_store
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.store.reading import FileReader
from llama_index_agentic_kb.testing import HashEmbedding
from tests.deep_folders import deep_folders
from tests.faults.registry import HANGS, failing, fault

TEXTS = {
    "oslo.md": "# Oslo\n\nSnow falls in winter.",
    "paris.md": "# Paris\n\nRain falls in autumn.",
    "quito.md": "# Quito\n\nThe sun stands high at noon.",
}


@contextmanager
def folder() -> Iterator[Path]:
    """A directory with documents in ``docs``; pytest's own are for tests only."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        made = Path(name).resolve()
        (made / "docs").mkdir()
        for file, text in TEXTS.items():
            (made / "docs" / file).write_text(text)
        yield made


@contextmanager
def kept() -> Iterator[Path]:
    with folder() as made:
        with opened(made / "store", create=True) as store:
            assert len(ingest(made / "docs", store).added) == len(TEXTS)
        yield made / "store"


def opened(path: Path, **arguments: Any) -> DirectoryStore:
    return DirectoryStore.open(path, embed_model=HashEmbedding(), **arguments)


def asked(path: Path, question: str = "Where does snow fall?", **arguments: Any) -> list[str]:
    """Ask a knowledge base over a store; the titles that it answers with."""
    kb = KnowledgeBase.from_store(path, embed_model=HashEmbedding(), effort="minimal", **arguments)
    return [reference.title for reference in kb.retrieve(question, output_mode="extractiveData").references]


def assert_all_there(path: Path) -> None:
    """Each document is found, by vectors and by words."""
    with opened(path) as store:
        assert set(store.stored_documents("docs")) == set(TEXTS)
        for text in TEXTS.values():
            title, _, body = text.removeprefix("# ").partition("\n\n")
            dense = store.index("docs").as_retriever(similarity_top_k=1).retrieve(body)
            assert [node.metadata["title"] for node in dense] == [title]
            assert store.lexical("docs").search(body, 1)[0].metadata["title"] == title


@contextmanager
def with_graphs() -> Iterator[None]:
    """Graphs for sources of more than two chunks, which the documents' source has."""
    before = database.EXACT_ROWS
    database.EXACT_ROWS = 2
    try:
        yield
    finally:
        database.EXACT_ROWS = before


@fault("store", "the writer dies midway", "what it had acknowledged is found at once, by vectors and by words")
def dead_writer() -> None:
    with with_graphs(), folder() as made:
        pid = os.fork()
        if pid == 0:
            with opened(made / "store", create=True) as store:
                ingest(made / "docs", store, progress=lambda *_: os._exit(9))
        os.waitpid(pid, 0)
        with opened(made / "store") as store:
            stored = list(store.stored_documents("docs"))
            assert stored
        title = stored[0].removesuffix(".md").capitalize()
        assert title in asked(made / "store", TEXTS[stored[0]])


@fault("store", "a graph is damaged and repair='auto'", "the question is answered; no text is embedded again")
def repaired_unasked() -> None:
    with with_graphs(), kept() as path:
        shutil.rmtree(path / "graphs")
        model = HashEmbedding()
        with DirectoryStore.open(path, embed_model=model, repair="auto"):
            assert [texts for _, texts in model.calls] == [["dimension"]]  # tells models apart
        assert len(list((path / "graphs").iterdir())) == 1
        assert "Oslo" in asked(path, repair="auto")
        assert_all_there(path)


@fault("store", "a repair dies midway", "the store is as before; what it left is removed, the next one ends")
def dead_repair() -> None:
    with with_graphs(), kept() as path:
        (path / "graphs" / "half").write_text("half")
        assert repair_store(path).chunks == len(TEXTS)
        assert len(list((path / "graphs").iterdir())) == 1
        assert_all_there(path)


@fault("store", "documents.db is overwritten", "a clear error; nothing else is touched")
def documents_overwritten() -> None:
    with kept() as path:
        (path / "documents.db").write_bytes(b"no database" * 500)
        for work in (lambda: asked(path), lambda: repair_store(path)):
            failing(StoreDamagedError, "is damaged: file is not a database.*Restore it", work)
        assert (path / "lexical").is_dir()


@fault("store", "documents.db is gone", "a clear error instead of an empty store")
def documents_gone() -> None:
    with kept() as path:
        (path / "documents.db").unlink()
        failing(StoreDamagedError, "documents.db' is gone", lambda: asked(path))


@fault("store", "the embedding model fails midway", "what was stored before stays; the next run goes on")
def model_fails() -> None:
    with folder() as made, opened(made / "store", create=True) as store:
        ingest(made / "docs" / "oslo.md", store, source="docs")
        whole = store.embed_model
        store._embed_model = HashEmbedding(dimensions=7)  # of which no vector fits
        failing(IngestionError, "not 256 finite numbers", lambda: ingest(made / "docs", store))
        store._embed_model = whole
        assert len(store.nodes("docs")) == 1
        ingest(made / "docs", store)
        assert_all_there(made / "store")


@fault("store", "the directory holds other files", "no store is made among them")
def foreign_files() -> None:
    with folder() as made:
        failing(ConfigurationError, "holds other files", lambda: opened(made / "docs", create=True))
        assert {entry.name for entry in (made / "docs").iterdir()} == set(TEXTS)


@fault("store", "somebody else is writing", "an error names the process; with wait= the turn comes", deadline=5.0)
def second_writer() -> float:
    with kept() as path, opened(path) as store:
        (path.parent / "docs" / "bergen.md").write_text("# Bergen\n\nHail.")
        free, held = threading.Event(), threading.Event()

        def write() -> None:
            with store.writing():
                held.set()
                free.wait(HANGS)

        thread = threading.Thread(target=write)
        thread.start()
        assert held.wait(HANGS)
        failing(IngestionError, f"Process {os.getpid()} is writing", lambda: ingest(path.parent / "docs", store))
        assert "Oslo" in asked(path)
        threading.Timer(0.2, free.set).start()
        began = time.monotonic()
        assert ingest(path.parent / "docs", store, wait=5.0).added == ("docs/bergen.md",)
        thread.join()
        return time.monotonic() - began


@fault("store", "a forked child uses its parent's store", "an error at once; it may open the store again", deadline=5.0)
def forked() -> float:
    with with_graphs(), kept() as path, opened(path) as store:
        retriever = store.index("docs").as_retriever()
        assert retriever.retrieve("snow")
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                failing(ConfigurationError, "was forked", lambda: retriever.retrieve("snow"))
                assert opened(path).index("docs").as_retriever().retrieve("snow")
                os._exit(7)
            finally:
                os._exit(1)
        killer = threading.Timer(HANGS, os.kill, (pid, 9))
        killer.start()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        killer.cancel()
        assert code == 7
        assert retriever.retrieve("snow")
        return time.monotonic() - began


@fault("store", "another program holds documents.db locked", "an error says so; afterwards all goes on", deadline=5.0)
def locked() -> float:
    with kept() as path, opened(path) as store, closing(sqlite3.connect(path / "documents.db")) as other:
        store.timeout = 0.1
        (path.parent / "docs" / "bergen.md").write_text("# Bergen\n\nHail.")
        began = time.monotonic()
        other.execute("BEGIN IMMEDIATE")
        failing(IngestionError, "locked.*wait for that to end", lambda: ingest(path.parent / "docs", store))
        assert "Oslo" in asked(path)
        other.rollback()
        waited = time.monotonic() - began
        assert ingest(path.parent / "docs", store).added == ("docs/bergen.md",)
        return waited


@fault("store", "the disk is full", "an error says so; what was stored stays, and the rest comes once there is room")
def disk_full() -> None:
    with kept() as path, opened(path) as store:
        for number in range(20):
            words = " ".join(f"word{number}x{at}" for at in range(1_500))
            (path.parent / "docs" / f"{number}.txt").write_text(words)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        largest = max(file.stat().st_size for file in path.rglob("*") if file.is_file())
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 50_000, before[1]))
        try:
            failing(IngestionError, "stored|[Mm]ake room|written", lambda: ingest(path.parent / "docs", store))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        with opened(path, repair="auto") as after:
            assert set(TEXTS) <= set(after.stored_documents("docs"))
            assert ingest(path.parent / "docs", after).failed == ()
            assert len(after.stored_documents("docs")) == 20 + len(TEXTS)
            assert after.lexical("docs").search("word7x700", 1)


@fault("store", "a file's parser hangs", "it is ended after its time; the next file is read", deadline=5.0)
def parser_hangs() -> float:
    with folder() as made, FileReader(seconds=0.3) as reader:
        os.mkfifo(made / "hangs.html")
        began = time.monotonic()
        failing(IngestionError, "can't be read within 0.3 s", lambda: reader.read(made / "hangs.html"))
        assert reader.read(made / "docs" / "oslo.md").title == "Oslo"
        return time.monotonic() - began


@fault("store", "folders are nested 1,200 deep", "those beyond 64 are reported; the others are stored")
def deep() -> None:
    with folder() as made, opened(made / "store", create=True) as store:
        with deep_folders(made / "docs"):
            report = ingest(made / "docs", store)
        assert "folders deep" in report.failed[0][1]
        assert len(report.added) == len(TEXTS)
