"""From files to text, titles and metadata."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_index_agentic_kb.errors import IngestionError
from llama_index_agentic_kb.store import parsing, reading
from llama_index_agentic_kb.store.reading import FileReader, first_heading, split_front_matter

MARKDOWN = """---
title: "Apollo 11: the landing"
url: https://example.org/apollo#top
year: 1969
mass: 28.8
crewed: true
code: 007
draft: no # a comment
tags: [moon, crew]
crew:
  - Armstrong
# nothing
---

# Landing

First paragraph,
with <b>tags</b> and [a link](https://example.org).

    indented = code()
"""
Read = Callable[[str, bytes], tuple[str, str]]


@pytest.fixture(scope="module")
def reader() -> Iterator[FileReader]:
    """A reader whose parsers are loaded once for all tests."""
    with FileReader(max_bytes=15_000) as opened:
        yield opened


@pytest.fixture
def read(reader: FileReader, tmp_path: Path) -> Read:
    """A function that returns title and text of a file with some content."""

    def read_it(name: str, content: bytes) -> tuple[str, str]:
        (tmp_path / name).write_bytes(content)
        parsed = reader.read(tmp_path / name)
        return parsed.title, "\n".join(section.text for section in parsed.sections)

    return read_it


def test_front_matter_becomes_metadata() -> None:
    """Scalars become typed metadata; lists are left out; the text keeps everything else as it is."""
    fields, text = split_front_matter(MARKDOWN)
    assert fields == {
        "title": "Apollo 11: the landing",
        "url": "https://example.org/apollo#top",
        "year": 1969,
        "mass": 28.8,
        "crewed": True,
        "code": "007",
        "draft": "no",
    }
    assert text.startswith(
        "# Landing\n\nFirst paragraph,\nwith <b>tags</b> and [a link](https://example.org).\n\n    i"
    )


@pytest.mark.parametrize("text", ["---\nJust a line between rules\n---\nText", "Text\n---\na: b\n---\n", "---\na: b\n"])
def test_rules_are_not_front_matter(text: str) -> None:
    """Thematic breaks and unfinished blocks stay text."""
    assert split_front_matter(text) == ({}, text)


@pytest.mark.parametrize(
    ("text", "heading"),
    [
        ("intro\n\n## The *Moon* ##\n# Later", "The *Moon"),
        ("```\n# not this\n```\n# This", "This"),
        ("# [Linked](https://e.org) title", "Linked title"),
        ("#hashtag\nno heading", ""),
        ("# Notes on C#  ", "Notes on C#"),
        pytest.param("# a" + " " * 100_000 + "b", "a" + " " * 100_000 + "b", id="read in linear time"),
    ],
)
def test_first_heading(text: str, heading: str) -> None:
    """The first heading outside code names a document."""
    assert first_heading(text).rstrip("*") == heading


@pytest.mark.parametrize(
    ("name", "content", "title", "text"),
    [
        ("a.md", "# The  Moon\n\nIt is far.\n\n# The Moon\n", "The Moon", "It is far.\n\n# The Moon\n"),
        ("b.md", "---\ntitle: Luna\n---\n# The Moon\n\nIt is far.\n", "Luna", "# The Moon\n\nIt is far.\n"),
        ("c.md", "# The Moon\n", "The Moon", "# The Moon\n"),
        ("d.md", "text", "d", "text"),
        ("e.txt", "# text", "e", "# text"),
    ],
)
def test_titles_fall_back_in_order(read: Read, name: str, content: str, title: str, text: str) -> None:
    """Front matter's title, the heading, the file's stem; a heading that only repeats the title is no text."""
    found = read(name, content.encode())
    assert (" ".join(found[0].split()), found[1].strip()) == (title, text.strip())


def test_html_keeps_blocks_apart(read: Read) -> None:
    """Paragraphs don't run together, inline marks don't break words, scripts are gone, entities are text."""
    page = b"""<?xml version="1.0"?><!DOCTYPE html><html><head><title>Site | Page</title><style>p {}</style></head>
    <body><script>alert(1)</script><h1>The <i>Moon</i></h1><div><p>One
    line.</p><p>T<b>w</b>o &amp; more.</p></div><ul><li>first</li><li>second</li></ul>
    <table><tr><td>a</td><td>b</td></tr></table><pre>x = 1
y = 2</pre><!-- hidden --></body></html>"""
    assert read("a.html", page) == (
        "The Moon",
        "The Moon\n\nOne line.\n\nTwo & more.\n\nfirst\nsecond\n\na b\n\nx = 1\ny = 2",
    )
    latin = '<meta charset="iso-8859-1"><title>Ein Überblick</title><p>Größe'.encode("latin-1")
    assert read("b.htm", latin) == ("Ein Überblick", "Größe")


def test_pdf_and_docx_are_read(
    reader: FileReader,
    tmp_path: Path,
    write_pdf: Callable[[Path, list[str]], Path],
    write_docx: Callable[[Path, str], Path],
) -> None:
    """Each page of a PDF is a section that knows its label; paragraphs of a .docx are a blank line apart."""
    pdf = reader.read(write_pdf(tmp_path / "Report.pdf", ["Saturn has rings.", "Titan has lakes."]))
    assert pdf.title == "Report"
    pages = [(section.text.strip(), section.metadata["page_label"]) for section in pdf.sections]
    assert pages == [("Saturn has rings.", "1"), ("Titan has lakes.", "2")]
    with pytest.raises(
        IngestionError, match=r"is too large: 2[0-9,]+ bytes, of at most 15,000"
    ):  # however it is packed
        reader.read(write_pdf(tmp_path / "long.pdf", ["Snow. " * 4_000]))
    memo = reader.read(write_docx(tmp_path / "memo.docx", "First.\nSecond."))
    assert (memo.title, [section.text for section in memo.sections]) == ("memo", ["First.\n\nSecond."])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_encodings(read: Read, encoding: str) -> None:
    """UTF-8 with and without mark and UTF-16 are read alike, with line ends made one kind."""
    assert read("a.txt", "Größe\r\nzwei".encode(encoding))[1] == "Größe\nzwei"


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "L'été dernier, à la forêt où naît le chêne."),
        ("cp1252", "Größe"),
        ("cp1250", "Zażółć gęślą jaźń, książka leży na półce."),
        ("cp1251", "Снег падает зимой на поля."),
        ("koi8-r", "Снег падает зимой на поля."),
        ("cp1253", "Το χιόνι πέφτει τον χειμώνα."),  # noqa: RUF001 (Greek)
        ("shift_jis", "日本語の文章です。雪が降っています。"),
        ("gbk", "北京是中国的首都,冬天会下雪。"),
        ("euc_kr", "겨울에 눈이 옵니다."),
        ("cp874", "หิมะตกในฤดูหนาว"),
    ],
)
def test_old_encodings_are_guessed(read: Read, encoding: str, text: str) -> None:
    """From the text around the first byte that is no UTF-8, wherever in the file that is."""
    assert read("a.txt", text.encode(encoding))[1] == text
    assert read("a.md", ("plain\n" * 2_000 + text).encode(encoding))[1].endswith(f"\n{text}")


def test_a_few_bad_bytes_are_replaced(read: Read) -> None:
    """A log that was cut within a character is UTF-8 still."""
    assert read("a.txt", "Größe, Länge, Höhe, Fläche, Körper, Brücke, Tür, Öl, Äpfel, Übung".encode() + b"\xc3")[
        1
    ].endswith("Übung\ufffd")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("binary.md", b"\x89PNG\x00\x00", "is binary"),
        ("noise.txt", bytes(range(1, 32)) * 9 + b"\xff", "is binary"),
        ("binary.html", b"<p>\x00", "is binary"),
        ("broken.pdf", b"%PDF-1.4 nothing else", "can't be read as .pdf"),
        ("broken.docx", b"not a zip", "can't be read as .docx: BadZipFile: File is not a zip file"),
        ("other.docx", {"nothing.xml": ""}, "can't be read as .docx: .*document.xml"),
        ("xml.docx", {"word/document.xml": "<broken"}, "can't be read as .docx"),
        ("bomb.docx", {"word/document.xml": "a" * 20_000}, "is too large: 20,000 bytes when unpacked"),
    ],
)
def test_unreadable_files_name_the_reason(
    read: Read, tmp_path: Path, name: str, content: bytes | dict[str, str], reason: str
) -> None:
    """Each kind of broken file is refused with its own reason."""
    if isinstance(content, dict):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for entry, text in content.items():
                archive.writestr(entry, text)
        content = (tmp_path / name).read_bytes()
    with pytest.raises(IngestionError, match=reason):
        read(name, content)


@pytest.mark.parametrize("name", ["gone.pdf", "gone.docx", "gone.html"])
def test_reasons_hold_no_path(name: str, tmp_path: Path) -> None:
    """A file may go between the walk and its parser, whose error names it in full."""
    assert parsing.parse(tmp_path / name, 1000) == {
        "error": f"can't be read as {Path(name).suffix}: No such file or directory"
    }


def test_an_interrupt_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Ctrl-C would keep the process as long as a file may take."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    pipes = {"stdin": SimpleNamespace(write=interrupted, close=int), "stdout": SimpleNamespace(close=int)}
    monkeypatch.setattr(reading, "_start", lambda: SimpleNamespace(**pipes, kill=int, wait=int))
    with pytest.raises(KeyboardInterrupt), FileReader(seconds=3) as reader:
        reader.read(Path("a.pdf"))
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_text_that_no_store_takes_is_cleaned(read: Read) -> None:
    """NUL beyond the part that is checked for binary content is dropped."""
    assert read("a.txt", b"a" * 9000 + b"\x00b")[1] == "a" * 9000 + "b"


def test_long_texts_come_in_blocks(reader: FileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end where a paragraph, a line or a word does, hold the whole text, and know where they begin."""
    monkeypatch.setattr(reading, "BLOCK", 40)
    text = "one two three four\n\n" * 9 + "x" * 100 + " end of it\n" * 9
    (tmp_path / "long.txt").write_text(text)
    sections = list(reader.read(tmp_path / "long.txt").sections)
    assert "".join(section.text for section in sections) == text
    assert all(text[section.start :].startswith(section.text) for section in sections)
    assert max(len(section.text) for section in sections) == 40
    assert sections[0].text.endswith("four\n\n")
