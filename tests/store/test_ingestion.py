from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.embeddings.mock_embed_model import MockEmbedding
from llama_index.core.readers.base import BaseReader
from llama_index.core.schema import Document, MetadataMode, TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery

from llama_index_agentic_kb.errors import ConfigurationError, IngestionError
from llama_index_agentic_kb.store import ingest, ingestion, reading, repair_store
from llama_index_agentic_kb.store.database import StoredDocument
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.store.embedding_model import model_tokenizer
from llama_index_agentic_kb.testing import HashEmbedding
from tests.store.conftest import write_pdf, written

FACTS = [
    f"Probe number {i} measured the magnetic field of planet {i}, and sent back {i * 37} images of its moons."
    for i in range(40)
]


class BrokenEmbedding(MockEmbedding):
    vector: tuple[float, ...] = (1.0, 0.0)
    error: str = ""

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        if self.error:
            raise RuntimeError(self.error)
        return [list(self.vector) for _ in texts]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a long and a short document, one of them deeper."""
    long = "---\ntitle: Long list\nyear: 2020\n---\n" + "\n\n".join(FACTS)
    return written(tmp_path / "probes", {"long.md": long, "deep/er/short.txt": "Voyager 2 visited Neptune in 1989."})


def _in_step(store: DirectoryStore, source: str) -> list[TextNode]:
    """The recorded nodes, once the vector index is seen to hold exactly these."""
    nodes = store.nodes(source)
    assert set(store.vectors(source).filtered_search(VectorStoreQuery(similarity_top_k=10_000))[0].ids or []) == {
        node.node_id for node in nodes
    }
    return nodes


def test_folder_becomes_a_source(folder: Path, store: DirectoryStore) -> None:
    """A folder's files become documents of a source named after it, with uniform metadata."""
    report = ingest(folder, store, description="Space probes")
    assert report.added == ("probes/deep/er/short.txt", "probes/long.md")
    short, *others = _in_step(store, "probes")
    assert report.chunks_embedded == len(others) + 1 > 4
    assert report.seconds > 0
    own = {"title": "short", "source": "probes", "document_id": "probes/deep/er/short.txt", "chunk_index": 0}
    assert short.metadata == {**own, "file_path": "deep/er/short.txt", "file_name": "short.txt"}
    assert [node.metadata["chunk_index"] for node in others] == list(range(len(others)))
    assert {node.metadata["year"] for node in others} == {2020}
    assert store.sources()[0].description == "Space probes"


def test_models_see_title_and_text_alone(folder: Path, store: DirectoryStore) -> None:
    """Of the metadata, the title is embedded; what a language model reads has the page's number too."""
    write_pdf(folder / "a.pdf", ["Saturn has rings.", "Titan has lakes."])
    ingest(folder, store)
    shown = {
        tuple(node.get_content(mode).strip() for mode in (MetadataMode.EMBED, MetadataMode.LLM))
        for node in store.nodes("probes")
    }
    short = "title: short\n\nVoyager 2 visited Neptune in 1989."
    assert (short, short) in shown
    assert ("title: a\n\nTitan has lakes.", "page_label: 2\ntitle: a\n\nTitan has lakes.") in shown


def test_chunks_fit_the_models_window(tmp_path: Path, minilm_store: DirectoryStore) -> None:
    """Title and text with the model's two marks are at most 256 tokens, with long titles and words without spaces."""
    titled = "# " + "A very long title " * 40 + "\n\n" + " ".join(FACTS)
    texts = {"a.md": titled, "b.txt": "abcdefghij" * 400, "c.txt": "月は地球の衛星である。" * 200}
    ingest(written(tmp_path / "long", texts), minilm_store)
    tokenizer = model_tokenizer(minilm_store.embed_model)
    assert tokenizer is not None
    nodes = _in_step(minilm_store, "long")
    sizes = [len(tokenizer(node.get_content(metadata_mode=MetadataMode.EMBED))) + 2 for node in nodes]
    assert 200 < max(sizes) <= 256
    assert str(nodes[0].metadata["title"]).endswith("…")


def test_texts_without_words_are_cut_as_fast_as_others(tmp_path: Path) -> None:
    """16,000 exclamation marks took a thousand levels of recursion; each chunk fits."""
    (tmp_path / "marks.txt").write_text("!" * 16_000)
    with DirectoryStore.open(tmp_path / "store", embed_model=MockEmbedding(embed_dim=2), create=True) as store:
        report = ingest(tmp_path / "marks.txt", store)
        assert (report.failed, sum(len(node.text) for node in store.nodes("documents")) >= 16_000) == ((), True)


def test_neighbours_overlap_and_know_their_place(folder: Path, store: DirectoryStore) -> None:
    """Chunks share text with the next one, their offsets cut it out of the document; another size cuts again."""
    ingest(folder, store, chunk_size=200, chunk_overlap=0)
    coarse = len(store.nodes("probes"))
    report = ingest(folder, store, chunk_size=100, chunk_overlap=40)
    assert report.updated == ("probes/deep/er/short.txt", "probes/long.md")
    nodes, text = _in_step(store, "probes")[1:], "\n\n".join(FACTS)
    assert len(nodes) > coarse
    for node, following in pairwise(nodes):
        start, end, then = node.start_char_idx, node.end_char_idx, following.start_char_idx
        assert start is not None is not then
        assert text[start:end] == node.text
        assert start < then < (end or 0)


def test_only_changed_chunks_are_embedded_again(folder: Path, store: DirectoryStore) -> None:
    """A changed end costs one embedding; old chunks of the end are gone; a changed field costs none."""
    ingest(folder, store)
    total = len(store.nodes("probes"))
    os.utime(folder / "long.md", (0, 0))
    assert ingest([folder], store, description="New words").chunks_embedded == 0
    assert store.sources()[0].description == "New words"
    file = folder / "long.md"
    file.write_text(file.read_text() + " One more sentence.")
    report = ingest(folder, store)
    assert (report.updated, report.chunks_embedded) == (("probes/long.md",), 1)
    nodes = _in_step(store, "probes")
    assert len(nodes) == total
    assert nodes[-1].text.endswith("One more sentence.")
    file.write_text(file.read_text().replace("year: 2020", "year: 2021"))
    report = ingest(folder, store)
    assert (report.updated, report.chunks_embedded) == (("probes/long.md",), 0)
    assert {node.metadata["year"] for node in _in_step(store, "probes")[1:]} == {2021}
    found = store.index("probes").as_retriever(similarity_top_k=1).retrieve("One more sentence.")
    assert found[0].node.metadata["year"] == 2021


def test_gone_files_are_removed(folder: Path, store: DirectoryStore, tmp_path: Path) -> None:
    """Deleted, emptied and hidden files leave the store; so does a whole folder that is gone."""
    ingest(written(folder, {name: f"Text of {name}." for name in ("b.txt", "c.txt", "d.txt")}), store)
    (folder / "long.md").unlink()
    (folder / "b.txt").write_text(" \n")
    (folder / "c.txt").rename(folder / ".c.txt")
    report = ingest(folder, store)
    assert sorted(report.deleted) == ["probes/b.txt", "probes/c.txt", "probes/long.md"]
    assert report.failed == ((str(folder / "b.txt"), "holds no text"),)
    assert {node.metadata["file_path"] for node in _in_step(store, "probes")} == {"deep/er/short.txt", "d.txt"}
    shutil.rmtree(folder)
    assert ingest(folder, store).deleted == ("probes/d.txt", "probes/deep/er/short.txt")
    assert _in_step(store, "probes") == []
    assert store.index("probes").as_retriever().retrieve("anything") == []
    assert ingest(tmp_path / "never", store).failed == ((str(tmp_path / "never"), "no such file or folder"),)


def test_single_files_and_named_sources(folder: Path, store: DirectoryStore) -> None:
    """Single files go to `documents`; a given name takes everything; several paths make several sources."""
    ingest([folder, folder / "long.md"], store)
    assert [info.name for info in store.sources()] == ["documents", "probes"]
    ingest([str(folder / "deep"), folder / "long.md"], store, source="All ünder one 🚀")
    assert [info.name for info in store.sources()] == ["All ünder one 🚀", "documents", "probes"]
    assert {node.metadata["document_id"] for node in _in_step(store, "All ünder one 🚀")} == {
        "All ünder one 🚀/er/short.txt",
        "All ünder one 🚀/long.md",
    }


def test_two_folders_in_one_source(tmp_path: Path, store: DirectoryStore) -> None:
    """Folders of one source don't remove or replace each other's documents; a moved folder takes its own over."""
    for name in ("a", "b"):
        written(tmp_path / name, {f"{name}.txt": f"Text of {name}.", "same.txt": f"Same of {name}."})
    report = ingest([tmp_path / "a", tmp_path / "b"], store, source="x")
    assert report.added == ("x/a.txt", "x/b.txt", "x/same.txt")
    assert "another source" in report.failed[0][1]
    report = ingest(tmp_path / "b", store, source="x")
    assert (report.unchanged, report.deleted) == (("x/b.txt",), ())
    assert report.failed[0] == (
        str(tmp_path / "b" / "same.txt"),
        f"has the same path in this source as {tmp_path / 'a' / 'same.txt'}; give its folder another source",
    )
    (tmp_path / "a").rename(tmp_path / "moved")
    report = ingest(tmp_path / "moved", store, source="x")
    assert (report.updated, report.deleted, report.chunks_embedded) == (("x/a.txt", "x/same.txt"), (), 0)
    assert store.stored_documents("x")["a.txt"].root == str(tmp_path / "moved")


def test_documents_of_llama_index_are_stored(
    folder: Path, store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their ids, or as one by the file that a reader took them from; no folder's ingestion takes them away."""
    pages = [
        Document(text=f"Page {at} is on snow.", metadata={"file_path": "/in/a.pdf", "page_label": at, "tenant": "acme"})
        for at in (1, 2)
    ]
    odd = {"year": 2024, "bad": float("nan"), "ids": [1]}
    note = Document(id_="note-1", text="# Ice\n\nIce is cold.", metadata=odd)
    report = ingest(store=store, documents=[*pages, note], source="probes", show_progress=True)
    assert report.added == ("probes/in/a.pdf", "probes/note-1")
    assert "Ingesting probes" in capsys.readouterr().err
    assert ingest([], store, documents=[note], source="probes").unchanged == ("probes/note-1",)
    note.set_content("# Ice\n\nIce is very cold.")
    assert ingest(folder, store, documents=[note], source="probes").updated == ("probes/note-1",)
    nodes = {node.text: node.metadata for node in store.nodes("probes")}
    assert [nodes[f"Page {at} is on snow."]["page_label"] for at in (1, 2)] == [1, 2]
    kept = nodes["# Ice\n\nIce is very cold."]
    expected = {"title": "Ice", "year": 2024, "document_id": "probes/note-1", "file_name": "note-1", "chunk_index": 0}
    assert {key: kept[key] for key in kept if key not in ("source", "file_path")} == expected
    assert "tenant" not in nodes["Page 1 is on snow."]
    assert ingest(folder, store).deleted == ()


def test_no_model_is_loaded_when_nothing_changed(folder: Path, tmp_path: Path) -> None:
    """A model that is only named is loaded for the first new text."""
    with DirectoryStore.open(tmp_path / "store", embed_model=HashEmbedding(), create=True) as store:
        ingest(folder, store)
    (tmp_path / "hash").mkdir()
    with DirectoryStore.open(tmp_path / "store", embed_model=str(tmp_path / "hash")) as store:
        (folder / "empty.txt").write_text(" ")
        assert ingest(folder, store).added == ()
        (folder / "new.txt").write_text("new")
        with pytest.raises(ConfigurationError, match=r"hash' can't be loaded.*a local folder or a name"):
            ingest(folder, store)


def test_bad_files_never_stop_the_others(folder: Path, store: DirectoryStore, tmp_path: Path) -> None:
    """Binary, empty, broken, badly named and unknown files are reported with their reasons; the rest is stored."""
    (folder / "binary.txt").write_bytes(b"\x00\x01\x02")
    (folder / "empty.md").write_text("---\ntitle: Nothing else\n---\n")
    (folder / "broken.pdf").write_bytes(b"%PDF")
    (folder / "gone.md").symlink_to(folder / "nowhere.md")
    (folder / "d.png").write_bytes(b"\x89PNG")
    Path(os.fsdecode(os.fsencode(str(folder)) + b"/b\xff.txt")).write_text("badly named")
    report = ingest([folder, __file__], store)
    reasons = {Path(path).name: reason for path, reason in report.failed}
    assert reasons["binary.txt"] == "is binary, not text"
    assert reasons["empty.md"] == "holds no text"
    assert reasons["broken.pdf"].startswith("can't be read as .pdf")
    assert "leads nowhere" in reasons["gone.md"]
    assert reasons["b\\udcff.txt"] == "has a name that is not valid text"
    assert "is not of a kind that is read" in reasons[Path(__file__).name]
    unread = "is of a kind that is not read (.png); text in images is read by ocr=True, --ocr"
    assert report.skipped_files == ((str(folder / "d.png"), unread),)
    assert report.added == ("probes/deep/er/short.txt", "probes/long.md")


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_disk_that_fails_while_a_text_is_read_costs_that_file(
    folder: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """Before its first chunk and after: texts are read while they are cut."""
    decoded = reading._decoded

    def failing(path: Path) -> Iterator[str]:
        for text in decoded(path):
            yield from [text] * blocks
            if path.name == "long.md":
                raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(reading, "_decoded", failing)
    monkeypatch.setattr(reading, "BLOCK", 5_000)
    (folder / "meadow.txt").write_text("Larks nest on the ground.")
    report = ingest(folder, store)
    assert report.failed == ((str(folder / "long.md"), "can't be read: Input/output error"),)
    assert report.added == ("probes/deep/er/short.txt", "probes/meadow.txt")


def test_a_large_file_that_breaks_midway_leaves_its_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored while it is read: too long a time for cutting undoes all of it."""
    monkeypatch.setattr(ingestion, "_BATCH_CHUNKS", 4)
    monkeypatch.setattr(reading, "BLOCK", 500)
    file = tmp_path / "large.txt"
    file.write_text(" ".join(FACTS))
    with DirectoryStore.open(tmp_path / "store", embed_model=MockEmbedding(embed_dim=2), create=True) as store:
        assert ingest(file, store, chunk_size=80, chunk_overlap=0).chunks_embedded > 8
        before = store.nodes("documents")
        file.write_bytes(b"New. " + file.read_bytes())
        report = ingest(file, store, chunk_size=80, chunk_overlap=0, read_seconds=1e-9)
        assert report.failed[0][1] == "can't be read and cut within 1e-09 s"
        assert store.nodes("documents") == before
        assert ingest(file, store, chunk_size=80, chunk_overlap=0).updated == ("documents/large.txt",)
        assert store.nodes("documents")[0].text.startswith("New.")


def test_a_file_of_many_fields_leaves_the_store_whole(folder: Path, store: DirectoryStore) -> None:
    """6,000 keys of front matter, or very long ones, would be a burden of each chunk: what is beyond is left out."""
    fields = "\n".join(f"key{at}: {at}" for at in range(6_000))
    (folder / "many.md").write_text(f"---\nlong: {'x' * 5_000}\n{fields}\n---\nMany fields.")
    assert ingest(folder, store).failed == ()
    assert store.lexical("probes").search("many", 1)[0].metadata.keys() >= {"key0", "key50"}
    assert repair_store(store.path).fault == ""


def test_a_folder_that_can_not_be_listed_keeps_its_documents(
    folder: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents below a folder without permission are not taken for deleted."""
    ingest(folder, store)
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # file modes don't stop root, as which tests may run
    report = ingest(folder, store)
    assert (report.deleted, report.unchanged) == ((), ("probes/long.md",))
    assert report.failed == ((str(folder / "deep"), "can't be listed: Permission denied"),)


def test_hidden_files_and_leaving_symlinks_stay_out(folder: Path, store: DirectoryStore, tmp_path: Path) -> None:
    """Hidden files, hidden folders and links that leave the folder are not read; a link inside it is."""
    outside = tmp_path / "outside"
    written(outside, {"secret.txt": "secret"})
    written(folder, {".git/secret.txt": "secret", ".secret.txt": "secret"})
    links = {"link.txt": outside / "secret.txt", "linked": outside, "loop": folder}
    for name, target in (links | {"inside.txt": folder / "deep/er/short.txt"}).items():
        (folder / name).symlink_to(target)
    report = ingest(folder, store)
    assert report.added == ("probes/deep/er/short.txt", "probes/inside.txt", "probes/long.md")
    assert {Path(path).name for path, _ in report.failed} == {"linked", "link.txt"}
    assert all(reason.startswith("is a symlink that leaves the folder") for _, reason in report.failed)
    assert not any("secret" in node.text for node in _in_step(store, "probes"))


def test_documents_can_not_claim_anothers_identity(tmp_path: Path, store: DirectoryStore) -> None:
    """Reserved keys in front matter, and LlamaIndex's own, don't reach the metadata."""
    forged = "---\nsource: other\ndocument_id: x\nDoc_Id: y\nref_doc_id: z\nchunk_index: 7\nfile_path: /etc\n"
    texts = {"forged.md": f"{forged}_node_type: IndexNode\nok: 1\n---\nText.", "plain.md": f"{forged}ok: 1\n---\nText."}
    ingest([written(tmp_path, texts) / name for name in texts], store)
    forged_node, plain = _in_step(store, "documents")
    ours = ("title", "source", "document_id", "file_path", "file_name", "chunk_index")
    assert plain.metadata.keys() == {*ours, "ok"}
    assert (plain.metadata["source"], plain.metadata["document_id"]) == ("documents", "documents/plain.md")
    assert "_node_type" not in forged_node.metadata
    indexed = store.index("documents").as_retriever().retrieve("Text")
    assert {type(found.node) for found in indexed} == {TextNode}


def test_what_was_stored_before_a_failure_stays(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the model fails midway, earlier batches stay, later ones come with the next run."""
    monkeypatch.setattr(ingestion, "_BATCH_CHUNKS", 1)
    model = BrokenEmbedding(embed_dim=2)

    def fail_later(done: int, total: int, path: str) -> None:
        model.error = "quota used up"

    with DirectoryStore.open(tmp_path / "store", embed_model=model, create=True) as store:
        with pytest.raises(IngestionError, match=r"model failed: RuntimeError: quota.*run the ingestion again"):
            ingest(folder, store, progress=fail_later)
        assert len(_in_step(store, "probes")) == 1
        model.error = ""
        report = ingest(folder, store)
        assert (report.added, report.unchanged) == (("probes/long.md",), ("probes/deep/er/short.txt",))


@pytest.mark.parametrize("vector", [(1.0, 0.0, 0.0), (float("nan"), 0.0)])
def test_unusable_vectors_are_refused(tmp_path: Path, vector: tuple[float, ...]) -> None:
    """Vectors of another length, or with values that are no numbers, are not stored."""
    (tmp_path / "a.txt").write_text("text")
    model = BrokenEmbedding(embed_dim=2)
    with DirectoryStore.open(tmp_path / "store", embed_model=model, create=True) as store:
        model.vector = vector
        with pytest.raises(IngestionError, match="not 2 finite numbers"):
            ingest(tmp_path / "a.txt", store)
        assert _in_step(store, "documents") == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": 300}, r"reads only 254 tokens.*chunk_size=254"),
        ({"chunk_size": 20}, "at least 80"),
        ({"chunk_overlap": 200}, "between 0 and half of chunk_size, 127"),
        ({"paths": []}, "paths is empty"),
        ({"store": "kb"}, r"open it first, KnowledgeStore\.open\('kb'"),
        ({"paths": "/"}, "has no name; pass source="),
        ({"source": ""}, "needs a name"),
    ],
    ids=str,
)
def test_settings_that_can_not_work_are_refused(
    folder: Path, minilm_store: DirectoryStore, settings: dict[str, Any], message: str
) -> None:
    """No paths, and sizes that don't fit each other or the model's window, are refused with the remedy."""
    with pytest.raises(ConfigurationError, match=message):
        ingest(**{"paths": folder, "store": minilm_store, **settings})
    assert minilm_store.sources() == []


def test_a_file_of_another_folder_that_is_stored_meanwhile_stays(folder: Path, store: DirectoryStore) -> None:
    """Two processes may ingest folders with the same paths into one source of a shared store; one is refused."""

    class Meanwhile(BaseReader):
        def load_data(self, *_: Any, **__: Any) -> list[Document]:
            theirs = StoredDocument("probes", "twice.own", "/elsewhere/twice.own", "/elsewhere", "hash", "settings")
            assert store.put_document(theirs, [])
            return [Document(text="Ours.")]

    (folder / "twice.own").write_text("x")
    report = ingest(folder, store, file_extractor={".own": Meanwhile()})
    assert [(Path(path).name, reason[:64]) for path, reason in report.failed] == [
        ("twice.own", "has the same path in this source as a file stored meanwhile; giv")
    ]
    assert store.stored_documents("probes")["twice.own"].origin == "/elsewhere/twice.own"
