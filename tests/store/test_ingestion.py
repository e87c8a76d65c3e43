from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from llama_index.core.embeddings.mock_embed_model import MockEmbedding
from llama_index.core.schema import Document, MetadataMode, TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery

from llama_index_agentic_kb.errors import ConfigurationError, IngestionError
from llama_index_agentic_kb.store import ingest, ingestion, reading, repair_store
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.store.embedding_model import model_tokenizer
from llama_index_agentic_kb.testing import HashEmbedding

FACTS = [
    f"Probe number {i} measured the magnetic field of planet {i}, and sent back {i * 37} images of its moons."
    for i in range(40)
]


class BrokenEmbedding(MockEmbedding):
    """Gives what it is told to give for every text."""

    vector: tuple[float, ...] = (1.0, 0.0)
    error: str = ""

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        if self.error:
            raise RuntimeError(self.error)
        return [list(self.vector) for _ in texts]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a long and a short document, one of them deeper."""
    root = tmp_path / "probes"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "long.md").write_text("---\ntitle: Long list\nyear: 2020\n---\n" + "\n\n".join(FACTS))
    (root / "deep" / "er" / "short.txt").write_text("Voyager 2 visited Neptune in 1989.")
    return root


def _in_step(store: DirectoryStore, source: str) -> list[TextNode]:
    """The recorded nodes, once the vector index is seen to hold exactly these."""
    nodes = store.nodes(source)
    assert set(store.vectors(source).search(VectorStoreQuery(similarity_top_k=10_000))[0].ids or []) == {
        node.node_id for node in nodes
    }
    return nodes


def test_folder_becomes_a_source(folder: Path, store: DirectoryStore) -> None:
    """A folder's files become documents of a source named after it, with uniform metadata."""
    report = ingest(folder, store, description="Space probes")
    assert report.added == ("probes/deep/er/short.txt", "probes/long.md")
    nodes = _in_step(store, "probes")
    assert report.chunks_embedded == len(nodes) > 4
    assert report.seconds > 0
    assert nodes[0].metadata == {
        "title": "short",
        "source": "probes",
        "document_id": "probes/deep/er/short.txt",
        "file_path": "deep/er/short.txt",
        "file_name": "short.txt",
        "chunk_index": 0,
    }
    assert [node.metadata["chunk_index"] for node in nodes[1:]] == list(range(len(nodes) - 1))
    assert {node.metadata["year"] for node in nodes[1:]} == {2020}
    assert store.sources()[0].description == "Space probes"


def test_models_see_title_and_text_alone(folder: Path, store: DirectoryStore) -> None:
    """Of the metadata, only the title stands in what is embedded and in what a language model reads."""
    ingest(folder, store)
    node = store.nodes("probes")[0]
    expected = "title: short\n\nVoyager 2 visited Neptune in 1989."
    assert node.get_content(metadata_mode=MetadataMode.EMBED) == expected
    assert node.get_content(metadata_mode=MetadataMode.LLM) == expected


def test_chunks_fit_the_models_window(tmp_path: Path, store: DirectoryStore) -> None:
    """Title and text with the model's two marks are at most 256 tokens, with long titles and words without spaces."""
    root = tmp_path / "long"
    root.mkdir()
    (root / "a.md").write_text("# " + "A very long title " * 40 + "\n\n" + " ".join(FACTS))
    (root / "b.txt").write_text("abcdefghij" * 400)
    (root / "c.txt").write_text("月は地球の衛星である。" * 200)
    ingest(root, store)
    tokenizer = model_tokenizer(store.embed_model)
    assert tokenizer is not None
    nodes = _in_step(store, "long")
    sizes = [len(tokenizer(node.get_content(metadata_mode=MetadataMode.EMBED))) + 2 for node in nodes]
    assert max(sizes) <= 256
    assert max(sizes) > 200
    assert str(store.nodes("long")[0].metadata["title"]).endswith("…")


def test_texts_without_words_are_cut_as_fast_as_others(tmp_path: Path) -> None:
    """16,000 exclamation marks took a thousand levels of recursion; each chunk fits."""
    (tmp_path / "marks.txt").write_text("!" * 16_000)
    with DirectoryStore.open(tmp_path / "store", embed_model=MockEmbedding(embed_dim=2), create=True) as store:
        report = ingest(tmp_path / "marks.txt", store)
        assert (report.failed, sum(len(node.text) for node in store.nodes("documents")) >= 16_000) == ((), True)


def test_neighbours_overlap_and_know_their_place(folder: Path, store: DirectoryStore) -> None:
    """Chunks share text with the next one, and their offsets cut the same text out of the document."""
    ingest(folder, store, chunk_size=100, chunk_overlap=40)
    nodes = store.nodes("probes")[1:]
    text = "\n\n".join(FACTS)
    for node, following in pairwise(nodes):
        assert node.start_char_idx is not None
        assert following.start_char_idx is not None
        assert node.end_char_idx is not None
        assert text[node.start_char_idx : node.end_char_idx] == node.text
        assert node.start_char_idx < following.start_char_idx < node.end_char_idx


def test_unchanged_files_are_not_embedded_again(folder: Path, store: DirectoryStore) -> None:
    """A second run, with touched files and a new description, embeds nothing and keeps all ids."""
    ingest(folder, store)
    before = store.nodes("probes")
    os.utime(folder / "long.md", (0, 0))
    report = ingest([folder], store, description="New words")
    assert report.unchanged == ("probes/deep/er/short.txt", "probes/long.md")
    assert (report.added, report.updated, report.deleted, report.failed, report.chunks_embedded) == ((), (), (), (), 0)
    assert store.nodes("probes") == before
    assert store.sources()[0].description == "New words"


def test_only_changed_chunks_are_embedded_again(folder: Path, store: DirectoryStore) -> None:
    """A changed end costs one embedding; old chunks of the end are gone; a changed field costs none."""
    ingest(folder, store)
    total = len(store.nodes("probes"))
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


def test_renamed_files_keep_their_vectors(folder: Path, store: DirectoryStore) -> None:
    """A renamed file with the same title is a new document with old vectors."""
    ingest(folder, store)
    (folder / "long.md").rename(folder / "deep" / "list.md")
    report = ingest(folder, store)
    assert (report.added, report.deleted) == (("probes/deep/list.md",), ("probes/long.md",))
    assert report.chunks_embedded == 0
    _in_step(store, "probes")


def test_other_settings_cut_again(folder: Path, store: DirectoryStore) -> None:
    """Another chunk size updates the documents it cuts otherwise."""
    ingest(folder, store)
    coarse = len(store.nodes("probes"))
    report = ingest(folder, store, chunk_size=100, chunk_overlap=0)
    assert report.updated == ("probes/deep/er/short.txt", "probes/long.md")
    assert len(_in_step(store, "probes")) > coarse


def test_gone_files_are_removed(folder: Path, store: DirectoryStore, tmp_path: Path) -> None:
    """Deleted, emptied and hidden files leave the store; so does a whole folder that is gone."""
    for name in ("b.txt", "c.txt", "d.txt"):
        (folder / name).write_text(f"Text of {name}.")
    ingest(folder, store)
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
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(f"Text of {name}.")
        (tmp_path / name / "same.txt").write_text(f"Same of {name}.")
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
    assert store.documents.documents("x")["a.txt"].root == str(tmp_path / "moved")


def test_all_kinds_of_files(
    tmp_path: Path,
    store: DirectoryStore,
    write_pdf: Callable[[Path, Sequence[str]], Path],
    write_docx: Callable[[Path, str], Path],
) -> None:
    """PDF, .docx, HTML, Markdown and text end up in one source; other kinds are named and counted."""
    root = tmp_path / "mixed"
    root.mkdir()
    write_pdf(root / "a.pdf", ["Saturn has rings.", "Titan has lakes."])
    write_docx(root / "b.docx", "Mars has dust.")
    (root / "c.HTML").write_text("<title>Venus</title><p>Venus has clouds.")
    (root / "d.png").write_bytes(b"\x89PNG")
    report = ingest(root, store)
    assert (len(report.added), report.skipped, report.failed) == (3, 1, ())
    assert report.skipped_files == (
        (str(root / "d.png"), "is of a kind that is not read (.png); text in images is read by ocr=True, --ocr"),
    )
    found = store.index("mixed").as_retriever(similarity_top_k=1).retrieve("lakes on Titan")[0].node
    assert (found.metadata["page_label"], found.metadata["file_name"]) == ("2", "a.pdf")
    assert found.get_content(MetadataMode.LLM).startswith("page_label: 2\ntitle: a")
    assert "page_label" not in found.get_content(MetadataMode.EMBED)


def test_documents_of_llama_index_are_stored(
    folder: Path, store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their ids, or as one by the file that a reader took them from; no folder's ingestion takes them away."""
    pages = [
        Document(text=f"Page {at} is on snow.", metadata={"file_path": "/in/a.pdf", "page_label": at, "tenant": "acme"})
        for at in (1, 2)
    ]
    note = Document(
        id_="note-1", text="# Ice\n\nIce is cold.", metadata={"year": 2024, "bad": float("nan"), "ids": [1]}
    )
    report = ingest(store=store, documents=[*pages, note], source="probes", show_progress=True)
    assert report.added == ("probes/in/a.pdf", "probes/note-1")
    assert "Ingesting probes" in capsys.readouterr().err
    assert ingest([], store, documents=[note], source="probes").unchanged == ("probes/note-1",)
    note.set_content("# Ice\n\nIce is very cold.")
    assert ingest(folder, store, documents=[note], source="probes").updated == ("probes/note-1",)
    nodes = {node.text: node.metadata for node in store.nodes("probes")}
    assert [nodes[f"Page {at} is on snow."]["page_label"] for at in (1, 2)] == [1, 2]
    kept = {
        key: value for key, value in nodes["# Ice\n\nIce is very cold."].items() if key not in ("source", "file_path")
    }
    assert kept == {
        "title": "Ice",
        "year": 2024,
        "document_id": "probes/note-1",
        "file_name": "note-1",
        "chunk_index": 0,
    }
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
    Path(os.fsdecode(os.fsencode(str(folder)) + b"/b\xff.txt")).write_text("badly named")
    report = ingest([folder, __file__], store)
    reasons = {Path(path).name: reason for path, reason in report.failed}
    assert reasons["binary.txt"] == "is binary, not text"
    assert reasons["empty.md"] == "holds no text"
    assert reasons["broken.pdf"].startswith("can't be read as .pdf")
    assert "leads nowhere" in reasons["gone.md"]
    assert reasons["b\\udcff.txt"] == "has a name that is not valid text"
    assert "is not of a kind that is read" in reasons[Path(__file__).name]
    assert report.added == ("probes/deep/er/short.txt", "probes/long.md")


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
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "secret.txt").write_text("secret")
    (folder / ".secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "linked").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to(folder)
    (folder / "inside.txt").symlink_to(folder / "deep/er/short.txt")
    report = ingest(folder, store)
    assert report.added == ("probes/deep/er/short.txt", "probes/inside.txt", "probes/long.md")
    assert {Path(path).name for path, _ in report.failed} == {"linked", "link.txt"}
    assert all(reason.startswith("is a symlink that leaves the folder") for _, reason in report.failed)
    assert not any("secret" in node.text for node in _in_step(store, "probes"))
    report = ingest(folder, store, follow_symlinks=True)
    assert report.added == ("probes/link.txt", "probes/linked/secret.txt")
    assert report.failed == ()


def test_documents_can_not_claim_anothers_identity(tmp_path: Path, store: DirectoryStore) -> None:
    """Reserved keys in front matter, and LlamaIndex's own, don't reach the metadata."""
    forged = "---\nsource: other\ndocument_id: x\nDoc_Id: y\nref_doc_id: z\nchunk_index: 7\nfile_path: /etc\n"
    (tmp_path / "forged.md").write_text(f"{forged}_node_type: IndexNode\nok: 1\n---\nText.")
    (tmp_path / "plain.md").write_text(f"{forged}ok: 1\n---\nText.")
    ingest([tmp_path / "forged.md", tmp_path / "plain.md"], store)
    forged_node, plain = _in_step(store, "documents")
    assert plain.metadata.keys() == {
        *("title", "source", "document_id", "file_path", "file_name", "chunk_index", "ok"),
    }
    assert (plain.metadata["source"], plain.metadata["document_id"]) == ("documents", "documents/plain.md")
    assert "_node_type" not in forged_node.metadata
    indexed = store.index("documents").as_retriever().retrieve("Text")
    assert {type(found.node) for found in indexed} == {TextNode}


def test_what_was_stored_before_a_failure_stays(tmp_path: Path) -> None:
    """When the model fails midway, earlier batches stay, later ones come with the next run."""
    root = tmp_path / "many"
    root.mkdir()
    for i in range(300):
        (root / f"{i:03}.txt").write_text(f"Document {i}")
    model = BrokenEmbedding(embed_dim=2, embed_batch_size=256)

    def fail_later(done: int, total: int, path: str) -> None:
        model.error = "quota used up" if done == 256 else ""

    with DirectoryStore.open(tmp_path / "store", embed_model=model, create=True) as store:
        with pytest.raises(
            IngestionError, match=r"embedding model failed: RuntimeError: quota.*run the ingestion again"
        ):
            ingest(root, store, progress=fail_later)
        assert len(_in_step(store, "many")) == 256
        model.error = ""
        report = ingest(root, store)
        assert (len(report.added), len(report.unchanged)) == (44, 256)
        _in_step(store, "many")


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


def test_settings_that_can_not_work_are_refused(folder: Path, store: DirectoryStore) -> None:
    """No paths, and sizes that don't fit each other or the model's window, are refused with the remedy."""
    with pytest.raises(ConfigurationError, match=r"reads only 254 tokens.*chunk_size=254"):
        ingest(folder, store, chunk_size=300)
    with pytest.raises(ConfigurationError, match="at least 80"):
        ingest(folder, store, chunk_size=20)
    with pytest.raises(ConfigurationError, match="between 0 and half of chunk_size, 127"):
        ingest(folder, store, chunk_overlap=200)
    with pytest.raises(ConfigurationError, match="paths is empty"):
        ingest([], store)
    with pytest.raises(ConfigurationError, match=r"open it first, KnowledgeStore\.open\('kb'"):
        ingest(folder, "kb")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has no name; pass source="):
        ingest("/", store)
    with pytest.raises(ConfigurationError, match="needs a name"):
        ingest(folder, store, source="")
    assert store.sources() == []
