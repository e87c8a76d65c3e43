from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tantivy
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb.errors import ConfigurationError, IngestionError, RetrievalError
from llama_index_agentic_kb.schema import Condition
from llama_index_agentic_kb.search.lexical import LexicalIndex
from llama_index_agentic_kb.sources.lexical import lexical_for
from llama_index_agentic_kb.store import ingest, repair_store
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding
from tests.store.conftest import written

TEXTS = {
    "saturn.md": "# Saturn V\n\nThe rocket was 110.6 m tall.",
    "ariane.md": "# Ariane 5\n\nThe rocket was 50 m tall.",
    "oslo.md": "# Oslo\n\nSnow falls in winter.",
}
Open = Callable[[], DirectoryStore]
END = 100
"""Bytes at the end of an index's file by which it is opened; what is damaged before them is met when it is read."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "docs", TEXTS)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """A function that opens the store, as another process would."""
    opened = []

    def start() -> DirectoryStore:
        opened.append(DirectoryStore.open(tmp_path / "store", embed_model=HashEmbedding(), create=True))
        return opened[-1]

    yield start
    for store in opened:
        store.close()


@pytest.fixture
def kept(folder: Path, open_store: Open) -> DirectoryStore:
    store = open_store()
    ingest(folder, store)
    return store


def titles(found: list[NodeWithScore]) -> list[str]:
    return [node.metadata["title"] for node in found]


def directory_of(store: DirectoryStore) -> Path:
    (directory,) = (store.path / "lexical").iterdir()
    return directory


def test_ingestion_makes_it(kept: DirectoryStore) -> None:
    """Titles and texts are found by their words, without vectors; scores fall."""
    search = kept.lexical("docs")
    found = search.search("How tall is the Saturn V rocket?", 2)
    assert titles(found) == ["Saturn V", "Ariane 5"]
    assert (found[0].score or 0) > (found[1].score or 0) > 0
    assert titles(search.search("Oslo", 5)) == ["Oslo"]
    assert titles(search.search("rocket", 5, Condition(key="file_name", value="ariane.md"))) == ["Ariane 5"]
    assert kept.lexical("docs") is search


def test_a_source_over_the_stores_index_uses_it(kept: DirectoryStore) -> None:
    """Without being asked for."""
    assert lexical_for("docs", kept.index("docs"), hybrid=None, retriever_kwargs={}) is kept.lexical("docs")
    assert lexical_for("docs", kept.index("docs"), hybrid=False, retriever_kwargs={}) is None


def test_it_follows_each_ingestion(kept: DirectoryStore, folder: Path, open_store: Open) -> None:
    """New words are found, by an older reader too, those of changed and deleted files no more; others stay."""
    reader = open_store().lexical("docs")
    assert titles(reader.search("rain", 5)) == []
    (folder / "ariane.md").unlink()
    rain = {"oslo.md": "# Oslo\n\nRain falls in summer.", "bergen.md": "# Bergen\n\nRain falls all year."}
    written(folder, rain)
    ingest(folder, kept)
    search = kept.lexical("docs")
    assert titles(search.search("snow winter 50", 5)) == []
    assert sorted(titles(search.search("rain", 5))) == sorted(titles(reader.search("rain", 5))) == ["Bergen", "Oslo"]
    before = (directory_of(kept) / "meta.json").read_bytes()
    ingest(folder, kept)
    assert (directory_of(kept) / "meta.json").read_bytes() == before


def test_removal_goes_with_the_source(kept: DirectoryStore, folder: Path, open_store: Open) -> None:
    """Nothing is left on disk; a source of the same name and version starts anew, for other processes too."""
    reader = open_store().lexical("docs")
    assert titles(reader.search("Oslo", 5)) == ["Oslo"]
    search, directory = kept.lexical("docs"), directory_of(kept)
    kept.remove_source("docs")
    assert not directory.exists()
    with pytest.raises(ConfigurationError, match="no source 'docs';"):
        search.search("Oslo", 5)
    ingest(written(folder, {name: f"# New {name}\n\nHail." for name in TEXTS}), kept)
    assert titles(reader.search("Oslo", 5)) == ["New oslo.md"]
    assert len(reader.search("hail", 5)) == 3


def test_a_missing_one_is_made_by_the_first_search(kept: DirectoryStore, open_store: Open) -> None:
    """As for a store of an earlier release; many threads at once get the same."""
    shutil.rmtree(kept.path / "lexical")
    search = open_store().lexical("docs")
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda _: sorted(titles(search.search("rocket", 5))), range(6))]
    assert found == [["Ariane 5", "Saturn V"]] * 6
    assert directory_of(kept).is_dir()


@pytest.mark.parametrize("damage", ["cut", "body", "release"])
def test_a_damaged_one_is_made_again(kept: DirectoryStore, open_store: Open, damage: str) -> None:
    """Whether it can't be opened, is another release's, or only fails while it is searched."""
    directory = directory_of(kept)
    if damage == "cut":
        (directory / "meta.json").write_text('{"segments')
    elif damage == "release":
        shutil.rmtree(directory)
        directory.mkdir()
        tantivy.Index(tantivy.SchemaBuilder().add_text_field("old").build(), path=str(directory))
    for path in directory.iterdir() if damage == "body" else []:
        if path.suffix in (".idx", ".term", ".store", ".fieldnorm"):
            content = path.read_bytes()
            path.write_bytes(b"\xff" * (len(content) - 200) + content[-200:])
    assert titles(open_store().lexical("docs").search("Oslo", 5)) == ["Oslo"]
    assert titles(open_store().lexical("docs").search("saturn", 5)) == ["Saturn V"]


@pytest.mark.parametrize("kind", ["idx", "store", "term", "pos", "fieldnorm", "fast", "json", "footer", "gone"])
def test_repair_finds_any_damage(kept: DirectoryStore, kind: str) -> None:
    """One byte of any file, or all of them: the store is not called whole, and is afterwards."""
    kept.close()
    if kind == "gone":
        shutil.rmtree(directory_of(kept))
    else:
        suffix = "idx" if kind == "footer" else kind
        path = next(path for path in directory_of(kept).glob(f"*.{suffix}") if path.stat().st_size > END)
        content = bytearray(path.read_bytes())
        content[3] ^= 0xFF
        path.write_bytes(content[:-END] + b"[]\2\0\0\0magi" if kind == "footer" else content)
    report = repair_store(kept.path)
    assert (report.rebuilt, "lexical" in report.fault) == (True, True)
    assert repair_store(kept.path).fault == ""


def test_while_another_process_writes_the_last_commit_is_searched(
    kept: DirectoryStore, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Without what is gone since; where there is no commit at all, the error says who is writing."""
    reader = open_store()
    documents = kept.stored_documents("docs")
    kept.delete_document("docs", "oslo.md")
    with kept.writing():
        assert titles(reader.lexical("docs").search("Oslo", 5)) == []
        assert titles(reader.lexical("docs").search("Saturn", 5)) == ["Saturn V"]
        assert caplog.text == ""
        shutil.rmtree(kept.path / "lexical")
        with pytest.raises(RetrievalError, match=f"'docs' is missing: Process {os.getpid()} is writing"):
            open_store().lexical("docs").search("Saturn", 5)
    assert titles(open_store().lexical("docs").search("Saturn", 5)) == ["Saturn V"]
    assert set(kept.stored_documents("docs")) == documents.keys() - {"oslo.md"}


def test_an_outdated_one_is_kept_while_it_can_not_be_written(
    kept: DirectoryStore, open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is no damage: the last commit is searched, with a warning, and searched again, and stays on disk."""
    kept.delete_document("docs", "oslo.md")
    before = (directory_of(kept) / "meta.json").read_bytes()
    with monkeypatch.context() as patched:

        def full(*_: object, **__: object) -> None:
            raise RetrievalError("the lexical index can't be written: No space left on device")

        patched.setattr(LexicalIndex, "update", full)
        said = [
            "the lexical index of the source 'docs' is searched as it was: the lexical index can't be written: No space"
        ]
        for search, warned in [
            (open_store().lexical("docs"), said),
            (lexical := kept.lexical("docs"), said),
            (lexical, []),
        ]:
            assert titles(search.search("Saturn", 5)) == ["Saturn V"]
            assert [message[: len(said[0])] for message in caplog.messages] == warned
            caplog.clear()
        with pytest.raises(IngestionError, match=r"can't be written.*No space left"):
            kept.update_indexes("docs")
    assert (directory_of(kept) / "meta.json").read_bytes() == before
    assert titles(open_store().lexical("docs").search("Saturn", 5)) == ["Saturn V"]
    assert (directory_of(kept) / "meta.json").read_bytes() != before


def test_a_directory_that_can_not_be_written_is_told(kept: DirectoryStore, open_store: Open, folder: Path) -> None:
    """A file in place of the directory stands for a missing right: searches and ingestions name it, and store on."""
    shutil.rmtree(kept.path / "lexical")
    (kept.path / "lexical").write_text("")
    with pytest.raises(RetrievalError, match="'docs' is missing"):
        open_store().lexical("docs").search("Oslo", 5)
    (folder / "hail.md").write_text("# Hail\n\nIt hails.")
    with pytest.raises(IngestionError, match="lexical index of the source 'docs' can't be written"):
        ingest(folder, kept)
    (kept.path / "lexical").unlink()
    assert titles(kept.lexical("docs").search("hail", 5)) == ["Hail"]


def test_readers_do_not_wait_for_a_writer(kept: DirectoryStore, folder: Path, open_store: Open) -> None:
    """What it has stored so far is found, by vectors, before it has ended."""
    (folder / "hail.md").write_text("# Hail\n\nIt hails.")
    seen: list[list[str]] = []

    def look(*_: object) -> None:
        seen.append(titles(open_store().index("docs").as_retriever(similarity_top_k=1).retrieve("it hails")))

    ingest(folder, kept, progress=look)
    assert seen[-1] == ["Hail"]
