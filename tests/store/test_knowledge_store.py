"""A store: how it is opened, refused, damaged and closed, and used by several processes."""

from __future__ import annotations

import gc
import os
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from llama_index.core.embeddings.mock_embed_model import MockEmbedding
from sqlalchemy.exc import DBAPIError

from llama_index_agentic_kb.errors import ConfigurationError, IngestionError, StoreDamagedError, StoreMismatchError
from llama_index_agentic_kb.store import SourceInfo, database, ingest, repair_store
from llama_index_agentic_kb.store.database import Chunk, DocumentDatabase, Piece, StoredDocument
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.store.embedding_model import DEFAULT_EMBED_MODEL, MULTILINGUAL
from llama_index_agentic_kb.testing import HashEmbedding
from tests.store.conftest import written

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

MOCK = MockEmbedding(embed_dim=4)


def _small_source(folder: Path) -> Path:
    texts = {"voyager.txt": "Voyager 1 left the heliosphere in 2012.", "rings.txt": "Saturn has rings of ice."}
    return written(folder, texts)


def test_a_store_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask; a store that is there already is opened by ``create=`` as it is."""
    monkeypatch.setattr(database, "EXACT_ROWS", 0)
    folder = _small_source(tmp_path / "space")
    before = os.umask(0)
    try:
        for _ in range(2):
            with DirectoryStore.open(tmp_path / "store", embed_model=HashEmbedding(), create=True) as store:
                ingest(folder, store)
    finally:
        os.umask(before)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    entries = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "store").iterdir()}
    assert {"graphs", "lexical", "writer.pid"} <= entries.keys()
    assert {mode for name, mode in entries.items() if name in ("graphs", "lexical")} == {0o700}
    assert {mode for name, mode in entries.items() if name not in ("graphs", "lexical")} == {0o600}


def test_a_store_that_nobody_closes_lets_its_files_go(tmp_path: Path) -> None:
    """When its last user has gone, and not only at the next run of the garbage collector."""
    DirectoryStore.open(tmp_path / "store", embed_model=MOCK, create=True).close()
    gc.disable()
    try:
        store = DirectoryStore.open(tmp_path / "store", embed_model=MOCK)
        assert store.sources() == []
        gone = weakref.ref(store)
        del store
        assert gone() is None
    finally:
        gc.enable()


class _Reversed(HashEmbedding):
    """A model with the same name and other weights."""

    def _vectors(self, texts: list[str]) -> list[list[float]]:
        return super()._vectors([text[::-1] for text in texts])


def test_another_model_is_refused(tmp_path: Path, embed_model: BaseEmbedding) -> None:
    """Both models and the remedy are named; the default model is only loaded, and compared, where it is needed."""
    DirectoryStore.open(tmp_path / "store", embed_model=MOCK, create=True).close()
    others: list[tuple[BaseEmbedding | str | None, str]] = [
        (MockEmbedding(embed_dim=4, model_name="other"), "other"),
        (MockEmbedding(embed_dim=5), r"MockEmbedding \(5 dimensions\)"),
        ("multilingual", MULTILINGUAL),
        (None, DEFAULT_EMBED_MODEL),
    ]
    for other, shown in others:
        with pytest.raises(StoreMismatchError, match=rf"MockEmbedding \(4 dimensions\) .* {shown}: .*--embed-model"):
            _ = DirectoryStore.open(tmp_path / "store", embed_model=other).embed_model
    DirectoryStore.open(tmp_path / "hash", embed_model=HashEmbedding(), create=True).close()
    with pytest.raises(StoreMismatchError, match=r"is opened with .* with other weights: .*--embed-model"):
        _ = DirectoryStore.open(tmp_path / "hash", embed_model=_Reversed()).embed_model
    DirectoryStore.open(tmp_path / "default", embed_model=embed_model, create=True).close()
    with _changed(tmp_path / "default", "UPDATE state SET value = replace(value, '384', '385')") as store:
        assert store._embed_model is None
        with pytest.raises(StoreMismatchError, match="385 dimensions"):
            _ = store.embed_model


def _changed(path: Path, statement: str, *values: str) -> DirectoryStore:
    """Open a store after somebody has changed its database."""
    with closing(sqlite3.connect(path / "documents.db", isolation_level=None)) as connection:
        connection.execute(statement, values)
    return DirectoryStore.open(path)


@pytest.mark.parametrize("state", ["[" * 100_000, "{}", "no JSON", '{"name": 1, "dimension": 4, "probe": "x"}'])
def test_a_damaged_record_of_the_model_is_an_error(tmp_path: Path, state: str) -> None:
    """However deep it is nested: the error names the remedy."""
    DirectoryStore.open(tmp_path / "store", embed_model=MOCK, create=True).close()
    with pytest.raises(StoreDamagedError, match=r"does not say which model made its vectors.*agentic-kb ingest"):
        _changed(tmp_path / "store", "UPDATE state SET value = ? WHERE key = 'embedding model'", state)


def test_a_directory_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    """Whether a store is to be made there, or is there already."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is a file"):
        DirectoryStore.open(tmp_path / "file", embed_model=MOCK, create=True)
    with pytest.raises(ConfigurationError, match="No store can be made in"):
        DirectoryStore.open(tmp_path / "file" / "store", embed_model=MOCK, create=True)
    DirectoryStore.open(tmp_path / "store", embed_model=MOCK, create=True).close()
    (tmp_path / "store" / "documents.db").unlink()
    (tmp_path / "store" / "documents.db").mkdir()
    with pytest.raises(ConfigurationError, match=r"documents\.db' can't be opened: unable to open.*right to write"):
        DirectoryStore.open(tmp_path / "store", embed_model=MOCK)


def test_foreign_and_damaged_databases_are_refused(tmp_path: Path) -> None:
    """Another's, one of another release, no store at all: each a clear error."""
    for name, statement, message in (
        ("newer", "PRAGMA user_version = 9", "schema version 9"),
        ("other", "CREATE TABLE x (y)", "holds other tables"),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigurationError, match=message):
            _changed(tmp_path / name, statement)
    for use in (DirectoryStore.open, repair_store):
        with pytest.raises(ConfigurationError, match=r"There is no store in .*agentic-kb ingest"):
            use(tmp_path / "none")
    with pytest.raises(ConfigurationError, match="it is 'never' or 'auto'"):
        DirectoryStore.open(tmp_path, repair="perhaps")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("UPDATE contents SET text = CAST(x'ff414243' AS TEXT)", "a text is not UTF-8"),
        ("UPDATE chunks SET metadata = '{\"a\": 1'", "JSONDecodeError"),
        ("UPDATE chunks SET metadata = '[1]'", "TypeError"),
    ],
)
def test_damage_inside_of_a_page_is_told(tmp_path: Path, store: DirectoryStore, statement: str, fault: str) -> None:
    """SQLite has no checksums: rows that can't be read are damage, with the remedy and without their text."""
    ingest(_small_source(tmp_path / "space"), store)
    _changed(tmp_path / "store", statement).close()
    with pytest.raises(StoreDamagedError, match=f"is damaged: {fault}.*Restore it") as caught:
        store.nodes("space")
    assert "ABC" not in str(caught.value)


def _document(path: str) -> StoredDocument:
    return StoredDocument("docs", path, "/o", "/r", "hash", "settings")


def _chunk(name: str) -> Chunk:
    return Chunk(name, 0, "text", {"title": "T"}, f"embedding of {name}", None, None)


def test_the_database_keeps_vectors_with_their_chunks(store: DirectoryStore) -> None:
    """Chunks that stay keep their rows and vectors; versions grow with each change and are never used twice."""
    assert store._source_state("docs") is None
    assert store.documents is store
    store.put_source("docs")
    store.put_document(_document("a"), [(_chunk(name), [0.5, -2.0]) for name in "xy"])
    rows = {chunk.node_id: chunk.id for chunk in store.chunks("docs")}
    store.put_document(_document("a"), [(_chunk("x"), []), (_chunk("z"), [3.0, 0.0])])
    assert {chunk.node_id: chunk.id > rows["y"] for chunk in store.chunks("docs")} == {"x": False, "z": True}
    known = store._vectors_by_embedding("docs", ["embedding of x", "embedding of z", "embedding of y"])
    vectors = {key: vector.tolist() for key, vector in known.items()}
    assert vectors == {"embedding of x": [0.5, -2.0], "embedding of z": [3.0, 0.0]}
    assert store._vectors_by_embedding("other", ["embedding of x"]) == {}
    assert next(store.metadata("docs")) == ("docs/a", {"title": "T"})  # and left before its end
    before = store.sources()[0].version
    store.delete_document("docs", "a")
    assert store._rows("SELECT count(*) FROM contents") == [(0,)]
    after = store.sources()[0].version
    store.remove_source("docs")
    store.put_source("docs")
    assert before < after < store.sources()[0].version


def test_a_stream_of_chunks_is_not_stored_from_its_middle(store: DirectoryStore) -> None:
    """After a lost connection a list is stored again; of a stream the beginning is gone."""

    def pieces() -> Iterator[Piece]:
        yield _chunk("x"), [0.5]
        raise DBAPIError("INSERT ...", {}, sqlite3.OperationalError("database is locked\nby postgresql://u:pass@h/x"))

    store.put_source("docs")
    message = r"failed while a large file was stored: database is locked by postgresql://\*\*\*@h/x. Run the ingestion"
    with pytest.raises(IngestionError, match=message) as failed:
        store.put_document(_document("a"), pieces())
    assert isinstance(failed.value.__cause__, DBAPIError)
    assert store.chunks("docs") == []


def test_a_stream_that_was_lost_at_the_commit_says_so(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work itself had ended: the second try names what was lost, and what to do."""
    write = store._write
    monkeypatch.setattr(store, "_write", lambda work: write(lambda at: work(at) and work(at)))
    store.put_source("docs")
    with pytest.raises(IngestionError, match=r"its connection was lost at the commit\. Run the ingestion again\.$"):
        store.put_document(_document("a"), iter([(_chunk("x"), [0.5])]))
    assert store.chunks("docs") == []


def test_closed_store_says_so(tmp_path: Path) -> None:
    """After closing, twice if need be, use is a clear error."""
    store = DirectoryStore.open(tmp_path / "store", embed_model=MOCK, create=True)
    store.put_source("a")
    assert store.vectors("a") is store.vectors("a")
    words = store.lexical("a")
    store.close()
    store.close()
    for use in (
        store.sources,
        lambda: store.index("a"),
        lambda: store.lexical("a"),
        lambda: words.search("pump", 3),
        lambda: store.writing().__enter__(),
    ):
        with pytest.raises(ConfigurationError, match="is closed"):
            use()


def test_sources_are_listed_and_removed(tmp_path: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources come with description and counts; a removed one is gone from both databases."""
    ingest(_small_source(tmp_path / "space"), store, description="Space facts")
    retriever = store.index("space").as_retriever(similarity_top_k=1)
    assert retriever.retrieve("Who left the heliosphere?")[0].node.metadata["title"] == "voyager"
    assert store.sources() == [SourceInfo("space", "Space facts", documents=2, chunks=2, version=2)]
    with pytest.raises(ConfigurationError, match="no source 'sea'; it has: space"):
        store.index("sea")
    with monkeypatch.context() as patched:  # counting all chunks takes seconds in a large store
        patched.delattr(DocumentDatabase, "sources")
        assert len(store.nodes("space")) == 2
    store.remove_source("space")
    assert store.sources() == []
    for use in (store.index, store.nodes, store.remove_source):
        with pytest.raises(ConfigurationError, match="no source 'space'; it has: none yet"):
            use("space")
