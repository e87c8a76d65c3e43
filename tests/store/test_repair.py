from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_index_agentic_kb.errors import ConfigurationError, IngestionError, StoreDamagedError
from llama_index_agentic_kb.store import KnowledgeStore, ingest, recovery, repair_store
from llama_index_agentic_kb.store.recovery import find_fault
from llama_index_agentic_kb.testing import HashEmbedding

DEAD = "4194304 a process that died"


def model() -> HashEmbedding:
    return HashEmbedding(dimensions=8, embed_batch_size=100)


def filled(folder: Path, facts: int) -> Path:
    """A store of four documents of so many sentences each."""
    (folder / "docs").mkdir()
    for number in range(4):
        text = (f"Probe {number} {at} saw planet {at * 7} with {at * 31} moons, year {at * 13}." for at in range(facts))
        (folder / "docs" / f"{number}.txt").write_text("\n\n".join(text))
    with KnowledgeStore.open(folder / "store", embed_model=model(), create=True) as store:
        ingest(folder / "docs", store, chunk_size=80, chunk_overlap=0)
    return folder / "store"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("whole"), 30)


@pytest.fixture
def kept(whole: Path, tmp_path: Path) -> Path:
    """A copy of a small store."""
    return Path(shutil.copytree(whole, tmp_path / "store"))


def marked(path: Path) -> Path:
    """Leave the note of a writer that died."""
    with KnowledgeStore.open(path, embed_model=model(), repair="later") as store:
        store.documents.state.begin(DEAD)
    return path


def ruin_database(path: Path) -> None:
    with (path / "chroma" / "chroma.sqlite3").open("r+b") as file:
        file.write(b"\xff" * 20_000)


def remove_directory(path: Path) -> None:
    shutil.rmtree(path / "chroma")


def remove_some(path: Path) -> None:
    with KnowledgeStore.open(path, embed_model=model(), repair="later") as store:
        store.chroma.delete_nodes("docs", sorted(store.chroma.node_ids("docs"))[:1])


def assert_whole(path: Path, directory: str) -> None:
    """Every chunk has its vector, and searches find both ways."""
    with KnowledgeStore.open(path, embed_model=model()) as store:
        assert store.documents.state.vectors[0] == directory
        assert store.documents.state.writing is None
        assert [entry.name for entry in path.glob("chroma*")] == [directory]
        nodes = store.nodes("docs")
        assert store.chroma.node_ids("docs") == {node.node_id for node in nodes}
        asked = nodes[20].text
        assert asked in {found.text for found in store.index("docs").as_retriever(similarity_top_k=3).retrieve(asked)}
        assert asked in {found.text for found in store.lexical("docs").search(asked, 3)}


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at vectors is an error."""

    def check(*_: object) -> str:
        raise AssertionError("the vectors were looked at")

    monkeypatch.setattr(recovery, "find_fault", check)


@pytest.mark.usefixtures("no_checks")
def test_a_store_that_was_left_in_order_is_not_looked_at(kept: Path) -> None:
    """Opening it, and ingesting what has not changed, start no process; nothing is marked."""
    with KnowledgeStore.open(kept, embed_model=model()) as store:
        changes = store.documents.state.vectors[1]
        ingest(kept.parent / "none", store)
        with store.writing():
            pass
        assert store.documents.state.vectors == ("chroma", changes)


def test_vectors_that_a_dead_writer_left_whole_stay(kept: Path) -> None:
    """They are looked at once, by whoever opens the store next; what a killed repair left is removed."""
    (kept / "chroma-7").mkdir()
    with KnowledgeStore.open(marked(kept), embed_model=model()) as store:
        assert store.documents.state.writing is None
    assert_whole(kept, "chroma")


@pytest.mark.parametrize("damage", [ruin_database, remove_directory, remove_some])
def test_damaged_vectors_are_recognised_and_made_again(kept: Path, damage: Callable[[Path], None]) -> None:
    """By default an error names the command and nothing is touched; asked to, opening repairs, without the model."""
    damage(marked(kept))
    with pytest.raises(StoreDamagedError, match=f"damaged: .*`agentic-kb repair --store {kept}`"):
        KnowledgeStore.open(kept, embed_model=model())
    quiet = model()
    with KnowledgeStore.open(kept, embed_model=quiet, repair="auto"):
        pass
    assert sum(len(call[1]) for call in quiet.calls) == 1  # the one that tells models apart
    assert_whole(kept, "chroma-2")


@pytest.mark.slow
def test_a_damaged_graph_is_recognised(tmp_path: Path) -> None:
    """Of more chunks than Chroma keeps in its log alone; cut in the middle of the file, as a crash may leave it."""
    store = marked(filled(tmp_path, 800))
    (graph,) = (store / "chroma").glob("*/data_level0.bin")
    os.truncate(graph, graph.stat().st_size // 2)
    with pytest.raises(StoreDamagedError, match=r"damaged: .*`agentic-kb repair"):
        KnowledgeStore.open(store, embed_model=model())
    assert repair_store(store, embed_model=model()).chunks > 1000
    assert_whole(store, "chroma-2")


def test_repair_tells_what_it_did(kept: Path) -> None:
    """A whole store is left alone unless asked; vectors that are not kept are embedded, the first time."""
    report = repair_store(kept, embed_model=model())
    assert (report.fault, report.rebuilt, report.documents) == ("", False, 4)
    with sqlite3.connect(kept / "documents.db") as connection:
        connection.execute("DELETE FROM vectors WHERE rowid % 2 = 0")
    connection.close()
    told: list[tuple[int, int, str]] = []
    report = repair_store(kept, embed_model=model(), rebuild_all=True, progress=lambda *one: told.append(one))
    assert (report.rebuilt, report.documents) == (True, 4)
    assert report.vectors_embedded == report.chunks // 2
    assert report.vectors_embedded + report.vectors_kept == report.chunks
    assert told[-1] == (report.chunks, report.chunks, "docs")
    again = repair_store(kept, embed_model=model(), rebuild_all=True)
    assert (again.vectors_embedded, again.vectors_kept) == (0, report.chunks)
    assert_whole(kept, "chroma-3")


def test_a_repair_that_fails_leaves_the_store_and_what_was_embedded(kept: Path) -> None:
    """Nothing is replaced, and the next repair goes on from there."""
    with sqlite3.connect(kept / "documents.db") as connection:
        connection.execute("DELETE FROM vectors")
    connection.close()

    def fail(_done: int, _total: int, _source: str) -> None:
        raise RuntimeError("the model is gone")

    with pytest.raises(IngestionError, match=r"can't be made again: RuntimeError: the model is gone.*repair --store"):
        repair_store(kept, embed_model=model(), rebuild_all=True, progress=fail)
    assert_whole(kept, "chroma")
    report = repair_store(kept, embed_model=model(), rebuild_all=True)
    assert report.vectors_embedded == 0
    assert_whole(kept, "chroma-2")


def test_a_store_of_the_first_release_is_brought_up_to_date(kept: Path, whole: Path) -> None:
    """Its vectors are looked at once, and the next ingestion keeps those that Chroma has."""
    with sqlite3.connect(kept / "documents.db") as connection:
        connection.execute("DROP TABLE vectors")
        connection.execute("DROP TABLE state")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    with KnowledgeStore.open(kept, embed_model=model()) as store:
        assert store.documents.state.writing is None
        chunks = store.sources()[0].chunks
        assert len(store.documents.vectors.missing("docs")) == chunks
        report = ingest(whole.parent / "docs", store, chunk_size=80, chunk_overlap=0)
        assert (len(report.unchanged), report.chunks_embedded) == (4, 0)
        assert store.documents.vectors.missing("docs") == set()
        assert find_fault(store) == ""


@pytest.mark.parametrize("content", ["", '{"formatVersion": 1, "emb', None])
def test_a_lost_store_file_is_written_again(tmp_path: Path, content: str | None) -> None:
    """From the copy beside the documents; without one the error says so."""
    path = tmp_path / "store"
    KnowledgeStore.open(path, embed_model=model(), create=True).close()
    whole = (path / "store.json").read_text()
    (path / "store.json").unlink()
    if content is not None:
        (path / "store.json").write_text(content)
        with pytest.raises(StoreDamagedError, match="agentic-kb repair"):
            KnowledgeStore.open(path, embed_model=model())
    assert repair_store(path, embed_model=model()).store_file
    assert (path / "store.json").read_text() == whole
    (path / "store.json").write_text("")
    with sqlite3.connect(path / "documents.db") as connection:
        connection.execute("DELETE FROM state")
    connection.close()
    with pytest.raises(StoreDamagedError, match="kept no copy"):
        repair_store(path, embed_model=model())


def test_damaged_documents_are_told_and_not_built_upon(kept: Path) -> None:
    """Of the documents there is no other copy: pages in the middle, the head, and the file itself."""
    file = kept / "documents.db"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(size // 4)
        opened.write(b"\xff" * (size // 2))
    with pytest.raises(StoreDamagedError, match=r"documents\.db' is damaged: "):
        repair_store(kept, embed_model=model())
    file.write_bytes(b"no database" * 500)
    with pytest.raises(StoreDamagedError, match="can't be read as a document database"):
        KnowledgeStore.open(kept, embed_model=model())
    file.unlink()
    with pytest.raises(StoreDamagedError, match=r"documents\.db' is gone"):
        KnowledgeStore.open(kept, embed_model=model())
    assert list((kept / "chroma").iterdir())


def test_what_repair_takes_is_checked(tmp_path: Path) -> None:
    """No store, and a word that is none of those there are."""
    with pytest.raises(ConfigurationError, match="There is no store"):
        repair_store(tmp_path / "none")
    with pytest.raises(ConfigurationError, match="'never', 'auto' or 'later'"):
        KnowledgeStore.open(tmp_path, repair="perhaps")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert capfd.readouterr().out == ""
