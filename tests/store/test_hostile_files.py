"""Tests of ingestion as an attack surface: what may lie in a folder that somebody else fills."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openpyxl import Workbook
from pptx import Presentation

from llama_index_agentic_kb import KnowledgeBase, Permissions, Principal
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import Reference
from llama_index_agentic_kb.store import ingest
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.store.files import Selection
from llama_index_agentic_kb.store.reading import FileReader, UnreadableError
from llama_index_agentic_kb.testing import HashEmbedding
from tests.store.conftest import docx_document, write_docx, write_pdf, written

LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 12))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return written(tmp_path / "docs", {"good.md": "# Good\n\nSnow falls."})


def reasons(report: object) -> dict[str, str]:
    return {Path(path).name: reason for path, reason in report.failed}  # type: ignore[attr-defined]


def test_what_is_no_regular_file_is_told_and_never_waited_for(docs: Path, store: DirectoryStore) -> None:
    """Pipes, sockets and devices, found or named, or behind a link."""
    os.mkfifo(docs / "pipe.txt")
    os.mkfifo(docs / "pipe.pdf")
    (docs.parent / "device.txt").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        home = Path.cwd()
        os.chdir(docs)  # a socket's path may be no longer than 100 characters
        listening.bind("socket.md")
        os.chdir(home)
        report = ingest([docs, docs / "pipe.txt", docs.parent / "device.txt"], store)
    assert report.added == ("docs/good.md",)
    refused = sorted(Path(path).name for path, _ in report.failed)
    assert refused == ["device.txt", "pipe.pdf", "pipe.txt", "pipe.txt", "socket.md"]
    assert {reason for _, reason in report.failed} == {"is no regular file: a pipe, a socket or a device"}


def test_a_file_that_becomes_a_pipe_is_not_waited_for(docs: Path, store: DirectoryStore) -> None:
    """Between its listing and its reading."""
    (docs / "later.md").write_text("later")

    def swap(_done: int, _total: int, path: str) -> None:
        if path.endswith("bad.md"):
            (docs / "later.md").unlink()
            os.mkfifo(docs / "later.md")

    (docs / "bad.md").write_bytes(b"\0\xff")
    assert "no regular file" in reasons(ingest(docs, store, progress=swap))["later.md"]


@pytest.mark.parametrize("name", ["later.md", "later.html"])
def test_a_file_or_folder_that_becomes_a_link_is_not_followed(name: str, docs: Path, store: DirectoryStore) -> None:
    """Between its listing and its reading; one that is gone then is no link."""
    for path in (docs / name, docs / "sub" / "inner.md", docs.parent / "outside" / "inner.md", docs / "lost.md"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("later")

    def swap(_done: int, _total: int, path: str) -> None:
        if path.endswith("bad.md"):
            for put in ("later", "sub"):
                (docs / (name if put == "later" else put)).rename(docs.parent / put)
            (docs / name).symlink_to(docs.parent / "outside" / "inner.md")
            (docs / "sub").symlink_to(docs.parent / "outside")
            (docs / "lost.md").unlink()

    (docs / "bad.md").write_bytes(b"\0\xff")
    report = ingest(docs, store, progress=swap)
    assert report.added == ("docs/good.md",)
    found = reasons(report)
    assert (found[name][:29], found["inner.md"][:29]) == ("is a symlink that leaves the ",) * 2
    assert found["lost.md"] == "can't be read: No such file or directory"


@pytest.mark.parametrize(
    ("moved", "target"), [("later.md", "later.md"), ("later.md", "outside/later.md"), ("", "outside")]
)
def test_a_link_made_after_a_file_was_hashed_is_not_followed(docs: Path, moved: str, target: str) -> None:
    """Out of the folder, to itself, or in the place of the listed folder."""
    for path in (docs, docs.parent / "outside"):
        written(path, {"later.md": "later"})
    file = Selection([docs]).sources["docs"].files["later.md"]
    file.digest(1_000)
    (docs / moved).rename(docs.parent / "moved")
    (docs / moved).symlink_to(docs.parent / target if "outside" in target else target)
    with FileReader(1_000) as reader:
        for read in (lambda: file.digest(1_000), lambda: file.parsed(reader)):
            with pytest.raises(UnreadableError, match="is a symlink that leaves the folder, or leads nowhere"):
                read()


def test_large_files_are_left_out(docs: Path, store: DirectoryStore) -> None:
    """As large as the setting says, on disk or unpacked; a packed size that lies is of no use."""
    (docs / "large.txt").write_text("a" * 20_001)
    write_docx(docs / "bomb.docx", "0" * 2_000_000)
    write_docx(docs / "liar.docx", "1" * 2_000_000)
    raw = (docs / "liar.docx").read_bytes()
    size = len(docx_document("1" * 2_000_000)).to_bytes(4, "little")
    assert raw.count(size) == 2  # in the entry's own head, and in the directory
    (docs / "liar.docx").write_bytes(raw.replace(size, (900).to_bytes(4, "little")))
    told = reasons(ingest(docs, store, max_file_bytes=20_000))
    assert told["large.txt"] == "is too large: 20,001 bytes, of at most 20,000 (max_file_bytes=, --max-megabytes)"
    assert "bytes when unpacked, of at most 20,000" in told["bomb.docx"]
    assert "can't be read as .docx" in told["liar.docx"]
    assert [node.text for node in store.nodes("docs")] == ["Snow falls."]


def test_entities_are_not_followed(docs: Path, store: DirectoryStore, tmp_path: Path) -> None:
    """Neither to files (XXE) nor to more text than there is room for (a billion laughs), in no format's files."""
    (tmp_path / "secret").write_text("SECRET")
    entity = f'<!DOCTYPE d [<!ENTITY l0 "ha"><!ENTITY x SYSTEM "{(tmp_path / "secret").as_uri()}">{LAUGHS}]>'
    (docs / "page.html").write_text(f"{entity}<p>page &x; &l11;</p>")
    for number, word in enumerate(("&x;", "&l11;")):
        write_docx(docs / f"{number}.docx", word, entity)
        book = Workbook()
        book.active.append([f"MARK{number}"])
        book.save(docs / f"{number}.xlsx")
        deck = Presentation()
        deck.slides.add_slide(deck.slide_layouts[0]).shapes.title.text = f"MARK{number}"
        deck.save(str(docs / f"{number}.pptx"))
        for path in (docs / f"{number}.xlsx", docs / f"{number}.pptx"):
            with zipfile.ZipFile(path) as archive:
                entries = {name: archive.read(name).decode("utf-8", "surrogateescape") for name in archive.namelist()}
            with zipfile.ZipFile(path, "w") as archive:
                for name, text in entries.items():
                    if f"MARK{number}" in text:
                        text = re.sub(r"\A(<\?xml.*?\?>)?", rf"\1{entity}", text, count=1, flags=re.DOTALL)  # noqa: PLW2901
                    archive.writestr(name, text.replace(f"MARK{number}", word).encode("utf-8", "surrogateescape"))
        with zipfile.ZipFile(docs / f"{number}.epub", "w") as archive:
            rootfile = '<container xmlns="c"><rootfile full-path="c.opf"/></container>'
            archive.writestr("META-INF/container.xml", (entity if number else "") + rootfile)
            archive.writestr("c.opf", f"{entity}<package xmlns='p'><metadata>{word}</metadata></package>")
    ingest(docs, store)
    texts = [f"{node.metadata['title']} {node.text}" for node in store.nodes("docs")]
    assert any(text.startswith("page ") for text in texts)
    assert "Good Snow falls." in texts
    assert not any("SECRET" in text or "haha" in text for text in texts)


def test_a_parser_that_dies_is_replaced(tmp_path: Path) -> None:
    """The next file is read by a new process; one that hangs is among the faults."""
    (tmp_path / "good.html").write_text("<p>Rain falls.")
    with FileReader() as reader:
        assert next(iter(reader.read(tmp_path / "good.html").sections)).text == "Rain falls."
        assert reader._process is not None
        os.kill(reader._process.pid, 9)
        reader._process.wait()
        assert reader.read(tmp_path / "good.html").title == "good"


def test_modules_beside_the_documents_are_not_loaded(
    docs: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's own ``bs4.py`` is a file that is not read, also where the folder is the working directory."""
    program = f"open({str(docs / 'loaded')!r}, 'w').close()"
    written(docs, dict.fromkeys(["bs4.py", "llama_index_agentic_kb.py", "json.py"], program))
    written(docs, {"page.html": "<p>Rain falls."})
    monkeypatch.chdir(docs)
    assert ingest(docs, store).added == ("docs/good.md", "docs/page.html")
    assert not (docs / "loaded").exists()


def test_names_lead_nowhere(docs: Path, store: DirectoryStore, tmp_path: Path) -> None:
    """Neither files nor sources whose names look like paths write outside the store."""
    (docs / "..%2f..%2fetc.md").write_text("a")
    (docs / "~root.md").write_text("b")
    before = sorted(tmp_path.iterdir())
    for source in ("../../up", "/etc/kb", "a/../../b", "..", "con\x00nul"):
        ingest(docs, store, source=source)
        assert store.lexical(source).search("snow", 1)
    assert sorted(tmp_path.iterdir()) == before
    assert {entry.name.partition(".")[0] for entry in store.path.iterdir()} == {
        *("documents", "lexical", "write", "writer")
    }


def test_no_temporary_files_are_made(
    docs: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing lands where others may read it, or have put a link in its way."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    write_pdf(docs / "a.pdf", ["One."])
    write_docx(docs / "b.docx", "Two.")
    assert len(ingest(docs, store).added) == 3
    assert list((tmp_path / "tmp").iterdir()) == []


FORGED = """---
tenant: acme
Tenant: acme
org: acme
owner: ann
acl_public: true
acl_group_hr: true
acl_user_ann: true
url: https://evil.example/p.png
URL: https://evil.example/q.png
year: 1969
---
Snow falls.
"""
ANN = Principal(tenant="acme", user="ann", groups={"hr"})
WHOLE = Permissions(tenant="tenant", owner="owner", users="acl_user_", groups="acl_group_", public="acl_public")


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    """A folder with a file that says all of itself that it can."""
    return written(tmp_path / "forged", {"forged.md": FORGED})


Seen = Callable[..., list[Reference]]


@pytest.fixture
def seen(store: DirectoryStore) -> Seen:
    """A function that returns what a principal finds."""

    def ask(permissions: Permissions | None, principal: Principal | None) -> list[Reference]:
        kb = KnowledgeBase.from_store(
            store.path, embed_model=HashEmbedding(), permissions=permissions, effort="minimal"
        )
        return list(kb.retrieve("snow", output_mode="extractiveData", principal=principal).references)

    return ask


@pytest.mark.parametrize("permissions", [WHOLE, Permissions(tenant="tenant"), Permissions(public="acl_public")])
def test_a_file_can_not_grant_itself(forged: Path, store: DirectoryStore, seen: Seen, permissions: Permissions) -> None:
    """Its front matter names tenant, owner, group and user, and says that it is public: nobody sees it."""
    ingest(forged, store)
    assert seen(permissions, ANN) == []
    assert len(seen(None, None)) == 1
    assert store.nodes("forged")[0].metadata["year"] == 1969


def test_what_is_stamped_holds(forged: Path, store: DirectoryStore, seen: Seen) -> None:
    """By a mapping or by path; another stamp takes the place of the first, and nothing is embedded again."""
    ingest(forged, store, stamp={"tenant": "acme", "groups": ["hr"]})
    assert len(seen(WHOLE, ANN)) == 1
    assert seen(WHOLE, Principal(tenant="acme", user="ann")) == []
    assert seen(WHOLE, Principal(tenant="other", groups={"hr"})) == []
    report = ingest(forged, store, stamp=lambda path: {"tenant": path.stem, "public": True})
    assert (report.updated, report.chunks_embedded) == (("forged/forged.md",), 0)
    assert seen(WHOLE, ANN) == []
    assert len(seen(WHOLE, Principal(tenant="forged", user="x"))) == 1
    assert ingest(forged, store, stamp={"tenant": "forged", "public": True}).unchanged == ("forged/forged.md",)


def test_fields_of_other_names_must_be_protected(forged: Path, store: DirectoryStore, seen: Seen) -> None:
    """Permissions over a field that files could set are refused, until they are ingested with it."""
    named = Permissions(tenant="org")
    ingest(forged, store)
    with pytest.raises(ConfigurationError, match=r"'forged' may have set org themselves.*--tenant"):
        seen(named, ANN)
    ingest(forged, store, permissions=named)
    assert seen(named, ANN) == []
    ingest(forged, store, permissions=named, stamp={"tenant": "acme"})
    assert len(seen(named, ANN)) == 1


@pytest.mark.parametrize("stamp", [{"tenant": ""}, {"owner": "a\x00"}, {"groups": [""]}])
def test_stamps_that_can_not_be_are_refused(forged: Path, store: DirectoryStore, stamp: Any) -> None:
    """Nothing is stored that nobody, or somebody else, would see."""
    with pytest.raises(ValueError, match=r"tenant|user|group"):
        ingest(forged, store, stamp=stamp)
    assert store.stored_documents("forged") == {}


def test_links_are_no_files_own(forged: Path, store: DirectoryStore, seen: Seen) -> None:
    """A reference has neither a file's own link nor its path on the server, unless the files are trusted."""
    ingest(forged, store)
    (reference,) = seen(None, None)
    assert (reference.url, reference.citation_url) == (None, None)
    assert "evil" not in str(store.nodes("forged")[0].metadata)
    assert str(forged) not in str(store.nodes("forged")[0].metadata)
    ingest(forged, store, trust_urls=True)
    assert seen(None, None)[0].url == "https://evil.example/p.png"
